"""One pod: what the workers do, and what becomes of the run."""

import json
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from sft_api.failures import FailureClass
from sft_api.progress import Phase
from sft_api.restarts import count_incidents, exhausted
from sft_api.rundir import STOP_FILE
from sft_api.v1alpha1 import RestartsStatus
from tests.waiting import wait_until

from .pods import Group, wait_for


def test_a_run_that_works_is_complete(group: Group) -> None:
    group.processes = 2
    pod = group.start()

    assert pod.wait() == 0
    assert pod.termination.failure is None
    assert (pod.termination.step, pod.termination.checkpoints[0].folder) == (5, "step-00000005-a00001")
    assert "[rank 0] rank 0 of 2, start 1\n" in pod.log
    assert "[rank 1] rank 1 of 2, start 1\n" in pod.log


def test_workers_get_their_place_and_threads(group: Group) -> None:
    group.processes = 2
    assert group.start(SFT_THREADS="3").wait() == 0

    environment = group.starts(1)[0]
    expected = {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "OMP_NUM_THREADS": "3",
        "SFT_CONFIG": str(group.folder / "config.json"),
    }
    assert {key: environment[key] for key in expected} == expected
    assert int(environment["SFT_GENERATION"]) > 0


def test_a_crash_restarts_all_workers_from_the_checkpoint(group: Group) -> None:
    group.processes = 2
    group.steps = 50
    group.faults = [{"rank": 1, "start": 1, "step": 5, "do": "signal SIGKILL"}]
    group.faults += [{"rank": 0, "start": 2, "step": 50, "do": "linger"}]
    pod = group.start()
    wait_for(lambda: pod.progress.generation == 2, pod)
    progress = pod.wait_for_step(6)

    (incident,) = progress.incidents
    assert incident.failure is FailureClass.WORKER_CRASHED
    assert incident.rank == 1
    assert "SIGKILL" in incident.message
    assert (incident.step, incident.lost_steps, incident.disruption) == (5, 1, False)
    assert incident.recovered_time is not None
    assert incident.recovered_time > incident.time
    assert progress.training.resumed_from_step == 4
    assert 'sft_trainer_restarts_total{failure="WorkerCrashed"} 1.0' in pod.get("/metrics")
    (group.folder / "linger").touch()
    assert pod.wait() == 0
    (told,) = pod.termination.incidents
    assert told == incident.model_copy(update={"message": told.message})
    first, second = group.starts(0)
    assert first["MASTER_PORT"] != second["MASTER_PORT"]
    assert int(first["SFT_GENERATION"]) < int(second["SFT_GENERATION"])


def test_what_ended_an_attempt_is_still_told_when_its_supervisor_is_lost(group: Group) -> None:
    # Given a crash that nobody has read of
    group.steps = 10_000
    group.faults = [{"rank": 0, "start": 1, "step": 5, "do": "signal SIGKILL"}]
    first = group.start()
    wait_for(lambda: "start 2\n" in first.log, first)

    # When the pod is lost, and another one goes on
    first.signal(signal.SIGKILL)
    first.wait()
    second = group.start()
    progress = second.wait_for_step(6)

    # Then it tells of it, and what it cost
    (incident,) = progress.incidents
    assert (incident.failure, incident.step, incident.attempt) == (FailureClass.WORKER_CRASHED, 5, 1)
    assert incident.recovered_time is not None
    assert incident.lost_steps == 1
    assert 'sft_trainer_restarts_total{failure="WorkerCrashed"} 1.0' not in second.get("/metrics")


def test_the_cause_is_told_not_its_consequence(group: Group) -> None:
    group.processes = 3
    group.faults = [{"rank": 2, "start": 1, "step": 2, "do": "fail DataError,11"}]
    pod = group.start()

    assert pod.wait() == 11
    assert pod.termination.failure is FailureClass.DATA_ERROR
    assert pod.termination.message == "DataError on purpose"
    assert (pod.termination.rank, pod.termination.step) == (2, 2)
    assert len(group.starts(0)) == 1


def test_who_starts_a_failed_run_again_need_not_watch_and_who_finds_it_between_two_starts_must(group: Group) -> None:
    # Given a run that gives signs of life, and crashes
    sign = {"attempt": 1, "name": "fake", "namespace": "team", "uid": "uid-1", "host": "h", "count": 3, "ended": ""}
    place = group.folder / "checkpoints" / "alive.json"
    place.parent.mkdir()
    place.write_text(json.dumps(sign))
    group.steps = 10_000
    group.faults = [
        {"rank": 0, "start": 1, "step": 3, "do": "fail OutOfMemory,1"},
        {"rank": 0, "start": 2, "step": 6, "do": "fail DataError,11"},
    ]

    # When it is started again, then nothing says meanwhile that it has ended
    pod = group.start()
    wait_for(lambda: "start 2\n" in pod.log, pod)
    assert json.loads(place.read_text()) == sign

    # And when no start mends it, that is its last sign
    assert pod.wait() == 11
    assert json.loads(place.read_text()) == {**sign, "count": 4, "ended": "failed"}


def test_what_is_asked_to_stop_between_two_starts_has_ended(group: Group) -> None:
    # Given a crash that waits for a verdict
    sign = {"attempt": 1, "name": "fake", "namespace": "team", "uid": "uid-1", "host": "h", "count": 3, "ended": ""}
    place = group.folder / "checkpoints" / "alive.json"
    place.parent.mkdir()
    place.write_text(json.dumps(sign))
    group.judged_first = True
    group.faults = [{"rank": 0, "start": 1, "step": 3, "do": "exit 1"}]
    pod = group.start()
    wait_for(lambda: "waits until that is judged" in pod.log, pod)

    # When the verdict is that it ends
    pod.signal(signal.SIGTERM)

    # Then its place says so
    assert pod.wait() != 0
    assert json.loads(place.read_text())["ended"] == "failed"


def test_the_last_words_of_a_worker_that_says_nothing_else(group: Group) -> None:
    group.steps = 10_000
    group.faults = [{"rank": 0, "start": 1, "step": 1, "do": "exit 1"}]
    pod = group.start()
    wait_for(lambda: pod.progress.incidents != [], pod)

    (incident,) = pod.progress.incidents
    assert (incident.failure, incident.rank) == (FailureClass.WORKER_CRASHED, 0)
    assert "about to exit with 1" in incident.message
    restarts = count_incidents(RestartsStatus(), [incident])
    assert "spec.runPolicy.maxRestarts is 0; the last was WorkerCrashed: " in (exhausted(restarts, 0) or "")


def always(step: int, *, starts: int) -> list[dict[str, Any]]:
    """A worker that dies at ``step`` of each of its first ``starts``."""
    return [{"rank": 0, "start": start, "step": step, "do": "exit 1"} for start in range(1, starts + 1)]


def test_a_failure_that_repeats_waits_for_a_verdict(group: Group) -> None:
    # Given a worker that dies at every start, and nobody who reads of it
    group.steps = 10_000
    group.faults = always(1, starts=2)
    pod = group.start()
    wait_for(lambda: "the next start waits until that is judged, at most 60 s" in pod.log, pod)
    assert pod.log.count("failure of rank 0 at step 1") == 2

    # When time goes by, many times as much as the pause after a second failure
    time.sleep(4)
    before = len(group.starts(0))
    # And then somebody reads of it, judges, and reads on
    verdict = exhausted(count_incidents(RestartsStatus(), pod.progress.incidents), 10)
    assert pod.progress.training.phase is Phase.WAITING

    # Then it is started for the third time, and not before
    assert verdict is None
    wait_for(lambda: len(group.starts(0)) == 3, pod)
    assert before == 2


def test_who_ends_a_run_that_waits_for_a_verdict_sees_no_further_start(group: Group) -> None:
    group.judged_first = True
    group.faults = always(1, starts=9)
    pod = group.start()
    wait_for(lambda: "failure of rank 0 at step 1" in pod.log, pod)
    assert len(pod.progress.incidents) == 1
    pod.signal(signal.SIGINT)

    assert pod.wait() == 30
    assert "asked to stop; the workers ended with WorkerCrashed" in pod.termination.message
    assert len(group.starts(0)) == 1


def test_sigterm_saves_and_leaves_with_the_retryable_code(group: Group) -> None:
    group.processes = 2
    group.steps = 10_000
    pod = group.start()
    pod.wait_for_step(3)
    pod.signal(signal.SIGTERM)

    assert pod.wait() == 30
    assert pod.termination.failure is FailureClass.INTERRUPTED
    assert pod.termination.checkpoints[0].folder == f"step-{pod.termination.step:08d}-a00001"
    assert f"[rank 0] rank 0 saved step {pod.termination.step}\n" in pod.log


def test_sigterm_is_told_to_workers_whose_run_directory_was_removed(group: Group) -> None:
    group.steps = 10_000
    group.faults = [{"rank": 0, "start": 1, "step": 2, "do": "linger"}]
    pod = group.start()
    pod.wait_for_step(2)
    (run_dir,) = (path for path in group.folder.glob("pod-*") if path.is_dir())
    shutil.rmtree(run_dir)
    pod.signal(signal.SIGTERM)
    wait_for((run_dir / STOP_FILE).exists, pod)
    (group.folder / "linger").touch()

    assert pod.wait() == 30
    assert "rank 0 saved step 3\n" in pod.log
    assert "Traceback" not in pod.log


def test_workers_that_cannot_be_told_to_stop_are_killed_in_the_end(group: Group) -> None:
    group.run_policy = {"terminationGracePeriodSeconds": 5}
    group.faults = [{"rank": 0, "start": 1, "step": 2, "do": "linger"}]
    pod = group.start()
    pod.wait_for_step(2)
    (run_dir,) = (path for path in group.folder.glob("pod-*") if path.is_dir())
    (run_dir / STOP_FILE).symlink_to("/nowhere/stop")
    pod.signal(signal.SIGTERM)

    assert pod.wait() == 30
    assert "the workers cannot be told: " in pod.log
    assert "the workers had not left after 4 s" in pod.termination.message
    assert "Traceback" not in pod.log


def test_sigterm_right_after_the_start_is_heard(group: Group) -> None:
    group.steps = 10_000
    group.start()
    pod = group.pods[0]
    status = Path(f"/proc/{pod.process.pid}/status")
    # The handler is there before the slow imports, when the supervisor does not listen yet.
    wait_for(lambda: int(status.read_text().split("SigCgt:")[1].split()[0], 16) >> (signal.SIGTERM - 1) & 1 == 1, pod)
    pod.signal(signal.SIGTERM)

    assert pod.wait() == 30
    assert pod.termination.message == "asked to stop; there was nothing to save"


def test_workers_that_do_not_leave_are_killed_before_the_grace_time_ends(group: Group) -> None:
    group.steps = 10_000
    group.run_policy = {"terminationGracePeriodSeconds": 5}
    group.faults = [{"rank": 0, "start": 1, "step": 2, "do": "hang"}]
    pod = group.start()
    pod.wait_for_step(2)
    begin = time.monotonic()
    pod.signal(signal.SIGTERM)

    assert pod.wait() == 30
    assert time.monotonic() - begin > 3.9
    assert "the workers had not left after 4 s" in pod.termination.message


def test_a_second_interrupt_kills_at_once(group: Group) -> None:
    group.run_policy = {"terminationGracePeriodSeconds": 3600}
    group.faults = [{"rank": 0, "start": 1, "step": 2, "do": "hang"}]
    pod = group.start()
    pod.wait_for_step(2)
    pod.signal(signal.SIGINT)
    # Two signals that come before one of them is heard are one.
    wait_for(lambda: "SIGINT: asking the workers to save and leave" in pod.log, pod)
    pod.signal(signal.SIGINT)

    assert pod.wait() == 30


def test_what_workers_leave_behind_is_killed_and_reaped(group: Group) -> None:
    group.faults = [
        {"rank": 0, "start": 1, "step": 1, "do": "orphan"},
        {"rank": 0, "start": 1, "step": 2, "do": "exit 1"},
        {"rank": 0, "start": 2, "step": 3, "do": "hang"},
    ]
    pod = group.start()
    wait_for(lambda: len(group.starts(0)) == 2, pod)

    assert not [command for command in group.processes_left() if "987654" in command]


def test_workers_die_with_a_supervisor_that_is_killed(group: Group) -> None:
    group.processes = 2
    group.steps = 10_000
    pod = group.start()
    pod.wait_for_step(1)
    pod.signal(signal.SIGKILL)
    pod.wait()

    # Long before they have made their steps.
    wait_until(lambda: not group.processes_left())


def test_a_broken_configuration_is_the_users_error(group: Group) -> None:
    group.write_files()
    config = json.loads((group.folder / "config.json").read_text())
    config["spec"]["compute"]["nodes"] = 0
    (group.folder / "config.json").write_text(json.dumps(config))
    pod = group.start()

    assert pod.wait() == 10
    assert pod.termination.failure is FailureClass.CONFIG_ERROR
    assert "spec.compute.nodes" in pod.termination.message


def test_health_progress_and_metrics_are_served(group: Group) -> None:
    group.steps = 10_000
    pod = group.start()
    progress = pod.wait_for_step(2)

    assert pod.get("/healthz") == "ok\n"
    assert progress.job_uid == "uid-1"
    assert (progress.generation, progress.members) == (1, 1)
    assert progress.training.phase is Phase.TRAINING
    metrics = pod.get("/metrics")
    for name in ("step", "loss", "checkpoint_step", "checkpoint_age_seconds", "members"):
        assert f"\nsft_trainer_{name} " in metrics
    assert 'sft_trainer_phase{phase="Training"} 1.0' in metrics
    wait_for(lambda: "\nsft_trainer_host_disk_free_bytes " in pod.get("/metrics"), pod)
    assert "sft_trainer_gpu_" not in pod.get("/metrics"), "the job has none"


def test_workers_are_forks_of_one_process_that_has_imported_everything(group: Group) -> None:
    group.processes = 2
    group.steps = 10_000
    group.faults = [{"rank": 0, "start": start, "step": 0, "do": "orphan"} for start in (1, 2)]
    pod = group.start()
    for start in (2, 3):
        pod.wait_for_step(2)
        group.kill_worker(1)
        # Somebody reads of it, as somebody does of every run.
        wait_for(lambda number=start: pod.progress.generation == number == len(group.starts(1)), pod)  # type: ignore[misc]

    assert [start["preloaded"] for start in group.starts(1)] == [True, True, True]
    assert all(start["collects"] for start in group.starts(1)), "garbage is left only by the imports"
    assert [start["RANK"] for start in group.starts(1)] == ["1", "1", "1"]
    assert len({start["MASTER_PORT"] for start in group.starts(1)}) == 3
    assert "worker of rank 1 was killed (SIGKILL)" in pod.log
    wait_for(lambda: "[rank 1] rank 1 of 2, start 3\n" in pod.log, pod)
    wait_for(lambda: sorted(group.workers()) == sorted(group.starts(rank)[-1]["pid"] for rank in (0, 1)), pod)
    # Forked workers end with the supervisor like any others: the fixture looks.
    pod.signal(signal.SIGKILL)
    pod.wait()


def test_the_process_that_forks_workers_is_replaced_when_it_is_killed(group: Group) -> None:
    group.steps = 10_000
    pod = group.start()
    pod.wait_for_step(1)
    subprocess.run(["pkill", "-9", "-P", str(pod.process.pid), "-f", "supervisor.preload"], check=True)
    group.kill_worker(0)
    wait_for(lambda: len(group.starts(0)) == 2, pod)

    assert [start["preloaded"] for start in group.starts(0)] == [True, True]
    pod.signal(signal.SIGTERM)
    assert pod.wait() == 30


def test_imports_that_leave_a_thread_behind_make_each_worker_import_for_itself(group: Group) -> None:
    group.preload = ("ssl", "thread_at_import")
    pod = group.start()

    assert pod.wait() == 0
    assert "every worker imports for itself: 2 threads are running after the imports" in pod.log
    assert [start["preloaded"] for start in group.starts(0)] == [False]


def test_without_anything_to_import_workers_are_new_processes(group: Group) -> None:
    group.preload = ()
    assert group.start().wait() == 0

    assert [start["preloaded"] for start in group.starts(0)] == [False]


def test_the_supervisor_answers_and_stops_while_imports_are_slow(group: Group) -> None:
    group.preload = ("slow_import",)
    pod = group.start()
    wait_for(lambda: pod.get("/healthz") == "ok\n", pod)
    for _ in range(5):
        assert pod.progress.training.phase is Phase.STARTING
    pod.signal(signal.SIGTERM)

    assert pod.wait() == 30
    assert not (group.folder / "starts-0").exists()
