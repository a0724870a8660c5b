"""Several pods: they start together, end together, and survive the loss of any of them."""

import json
import re
import signal
import time
from pathlib import Path

import pytest

from sft_api.failures import FailureClass
from sft_api.progress import Phase
from sft_api.rundir import MEMORY_FOLDER, AllocatedMemory

from .pods import Group, name_of, wait_for


def test_pods_start_together_and_are_complete_together(group: Group) -> None:
    group.nodes, group.processes = 3, 2
    pods = group.start_all()

    assert [pod.wait() for pod in pods] == [0, 0, 0]
    ranks = [group.starts(rank)[0] for rank in range(6)]
    assert [(each["RANK"], each["LOCAL_RANK"], each["GROUP_RANK"]) for each in ranks] == [
        ("0", "0", "0"),
        ("1", "1", "0"),
        ("2", "0", "1"),
        ("3", "1", "1"),
        ("4", "0", "2"),
        ("5", "1", "2"),
    ]
    assert len({each["SFT_GENERATION"] for each in ranks}) == 1
    assert all(pod.termination.failure is None and pod.termination.step == 5 for pod in pods)


def test_nothing_starts_until_all_pods_are_there(group: Group) -> None:
    group.nodes = 2
    earlier = group.folder / "pod-0-0"
    earlier.mkdir()
    (earlier / "progress.json").write_text('{"phase": "Complete", "step": 7}')
    first = group.start(0)
    wait_for(lambda: first.progress.training.phase_detail == "1/2 pods, waiting for 1", first)
    assert first.progress.training.phase is Phase.WAITING
    assert first.progress.training.step == 0
    assert not (group.folder / "starts-0").exists()
    second = group.start(1)

    assert [first.wait(), second.wait()] == [0, 0]


def test_a_crash_in_one_pod_restarts_the_workers_of_all(group: Group) -> None:
    group.nodes = 2
    group.steps = 50
    group.faults = [{"rank": 1, "start": 1, "step": 3, "do": "signal SIGSEGV"}]
    group.faults += [{"rank": 0, "start": 2, "step": 50, "do": "linger"}]
    first, second = (group.start(index, SFT_NODE_NAME=f"node-{index}") for index in (0, 1))
    wait_for(lambda: first.progress.generation == 2, first)
    progress = first.wait_for_step(4)

    (incident,) = progress.incidents
    assert (incident.failure, incident.rank, incident.step) == (FailureClass.WORKER_CRASHED, 1, 3)
    # The other worker only lost its peer.
    assert incident.host == "node-1"
    (group.folder / "linger").touch()
    assert [first.wait(), second.wait()] == [0, 0]
    assert len(group.starts(0)) == len(group.starts(1)) == 2


def test_an_error_that_no_retry_mends_ends_all_pods_with_its_code(group: Group) -> None:
    group.nodes = 2
    group.faults = [{"rank": 1, "start": 1, "step": 2, "do": "fail StorageFull,15"}]
    first, second = group.start_all()

    assert [first.wait(), second.wait()] == [15, 15]
    assert first.termination.message == second.termination.message == "StorageFull on purpose"


def test_a_lost_pod_is_waited_for_and_free(group: Group) -> None:
    group.nodes = 2
    group.steps = 10_000
    group.run_policy = {"maxRestarts": 0}
    first, second = group.start_all()
    first.wait_for_step(3)
    second.signal(signal.SIGKILL)
    second.wait()
    group.start(1)
    wait_for(lambda: first.progress.generation == 2 and first.progress.training.phase is Phase.TRAINING, first)

    (incident,) = first.progress.incidents
    assert incident.disruption
    assert incident.failure is FailureClass.PEER_LOST
    assert incident.message == "pod 1 was replaced"
    assert len(group.starts(0)) == 2


def test_a_pod_that_is_not_heard_is_lost_even_without_a_replacement(group: Group) -> None:
    group.nodes = 2
    group.steps = 10_000
    group.lost_after = 5.0
    first, second = group.start_all()
    first.wait_for_step(1)
    group.freeze(second, rank=1)
    # It is written down when the workers that are left have ended, which is a moment later than the order to end.
    wait_for(lambda: first.progress.incidents != [], first)
    assert first.progress.incidents[0].message == "pod 1 was not heard for 5 s"
    assert first.progress.training.phase is Phase.WAITING
    group.thaw(second, rank=1)

    wait_for(lambda: first.progress.generation == 2 and first.progress.training.phase is Phase.TRAINING, first)


def test_steps_are_proof_of_life_of_a_pod_that_is_not_heard(group: Group) -> None:
    group.nodes = 2
    group.steps = 100_000
    group.lost_after = 3.0
    first, second = group.start_all()
    before = first.wait_for_step(1).training.step
    # No word comes from the supervisor, but its worker takes part in every step.
    second.signal(signal.SIGSTOP)
    silent_since = time.monotonic()
    wait_for(lambda: time.monotonic() - silent_since > 2 * group.lost_after, first)
    wait_for(lambda: first.progress.training.step > before + 10, first)
    second.signal(signal.SIGCONT)

    assert first.progress.generation == 1
    assert first.progress.incidents == []


def test_steps_are_proof_of_life_of_index_0_as_well(group: Group) -> None:
    group.nodes = 2
    group.steps = 100_000
    group.lost_after = 3.0
    first, second = group.start_all()
    before = first.wait_for_step(1).training.step
    # The supervisor of index 0 answers nobody, but its worker takes part in every step.
    first.signal(signal.SIGSTOP)
    silent_since = time.monotonic()
    wait_for(lambda: time.monotonic() - silent_since > 2 * group.lost_after, second)
    first.signal(signal.SIGCONT)
    wait_for(lambda: first.progress.training.step > before + 10, first)

    assert first.progress.generation == 1
    assert first.progress.incidents == []


def test_rank_0_waits_for_a_pod_that_prepares_for_long(group: Group) -> None:
    group.nodes = 2
    group.silent_after = 5.0
    group.run_policy = {"progressDeadlineSeconds": 5}
    group.prepare = {"1": 15.0}
    first, second = group.start_all()
    wait_for(lambda: "for pod 1 (Tokenizing: " in first.progress.training.phase_detail, first)
    assert first.progress.training.phase is Phase.WAITING

    assert [first.wait(), second.wait()] == [0, 0]
    assert len(group.starts(1)) == 1


def test_a_start_at_which_nobody_says_anything_is_a_hang(group: Group) -> None:
    group.nodes = 2
    group.silent_after = 4.0
    group.run_policy = {"progressDeadlineSeconds": 4}
    group.faults = [{"rank": 1, "start": 1, "step": 0, "do": "hang"}]
    first, second = group.start_all()

    assert [first.wait(), second.wait()] == [0, 0]
    assert "failure at step 0: Hang: nothing new for 4 s in phase Waiting" in first.log


@pytest.mark.parametrize("others", ["work Exporting", "work Waiting"])
def test_a_process_that_stands_still_is_found_and_named_whatever_the_others_say(group: Group, others: str) -> None:
    group.nodes, group.processes = 2, 2
    group.silent_after = 4.0
    group.run_policy = {"progressDeadlineSeconds": 4}
    group.faults = [{"rank": rank, "start": 1, "step": 2, "do": others} for rank in (0, 1, 3)]
    group.faults += [{"rank": 2, "start": 1, "step": 2, "do": "stall Saving"}]
    first, second = group.start_all()

    assert [first.wait(), second.wait()] == [0, 0]
    assert re.search(
        r"failure at step 2: Hang: nothing new for \d+ s in phase Saving \(the limit is 4 s\): "
        r"rank 2 of pod 1 \(and no further\) is silent; the stacks of all ranks",
        first.log,
    )


def test_index_0_that_waits_for_a_pod_lost_at_the_end_leaves_when_it_is_asked_to(group: Group) -> None:
    # Given a run that is complete, whose second pod was lost before it could be told
    group.nodes = 2
    group.steps = 20
    group.faults = [{"rank": 0, "start": 1, "step": 20, "do": "linger"}]
    first = group.start(0)
    with name_of(first) as name:
        second = group.start(1, SFT_COORDINATOR=name.address)
        wait_for(lambda: b'"outcome":"Complete"' in name.asked, second)
        second.signal(signal.SIGKILL)
        second.wait()
    (group.folder / "linger").touch()
    # Not only the worker has to say so.
    wait_for(lambda: first.progress.training.phase_detail == "the run is complete", first)

    # When it is asked to stop
    first.signal(signal.SIGTERM)

    # Then it does not use up its grace time
    assert first.wait() == 0
    assert first.termination.failure is None


def test_a_pod_that_is_stopped_while_its_group_begins_waits_for_no_index_0_that_has_left(group: Group) -> None:
    # Given a worker that waits for one of the other pod, and much time
    group.nodes, group.lost_after = 2, 3600.0
    group.run_policy = {"terminationGracePeriodSeconds": 3600}
    group.prepare = {"0": 3600.0}
    first, second = group.start_all()
    wait_for(lambda: (group.folder / "starts-1").exists(), second)

    # When both are stopped, and index 0 leaves before it has told the other
    first.signal(signal.SIGKILL)
    first.wait()
    second.signal(signal.SIGTERM)

    # Then there is nothing to save, and nobody to wait for
    assert second.wait() == 30


def test_a_pod_that_is_stopped_does_not_use_up_its_grace_time_to_say_goodbye(group: Group) -> None:
    # Given workers that hang, and an index 0 that has left when the others are still asked to stop
    group.nodes, group.steps = 2, 10_000
    group.run_policy = {"terminationGracePeriodSeconds": 5}
    group.faults = [{"rank": 1, "start": 1, "step": 2, "do": "hang"}]
    first, second = group.start_all()
    first.wait_for_step(2)
    begin = time.monotonic()
    second.signal(signal.SIGTERM)
    first.signal(signal.SIGKILL)

    # Then its last words are there before who asked kills it
    assert second.wait() == 30
    assert time.monotonic() - begin < 7  # the four of the workers, and the three that a goodbye may take
    assert "the workers had not left after 4 s and were killed" in second.termination.message


def test_a_pod_with_the_shortest_grace_time_says_what_became_of_its_workers(group: Group) -> None:
    # Given workers that hang, of which one pod is asked to stop
    group.nodes, group.steps, group.lost_after = 2, 10_000, 3600.0
    group.run_policy = {"terminationGracePeriodSeconds": 5}
    group.faults = [{"rank": 1, "start": 1, "step": 2, "do": "hang"}]
    first, second = group.start_all()
    first.wait_for_step(2)
    second.signal(signal.SIGTERM)

    # Then index 0 hears of their end from it, and does not have to miss it
    assert second.wait() == 30
    wait_for(lambda: bool(first.progress.incidents), first)
    (incident,) = first.progress.incidents
    assert (incident.failure, incident.disruption) == (FailureClass.INTERRUPTED, True)


def test_index_0_that_trains_with_a_lost_pod_leaves_when_it_is_asked_to(group: Group) -> None:
    group.nodes = 2
    group.steps = 10_000
    group.lost_after = 600.0
    first, second = group.start_all()
    first.wait_for_step(3)
    group.freeze(second, rank=1)
    first.signal(signal.SIGTERM)

    assert first.wait() == 30
    assert first.termination.failure is FailureClass.INTERRUPTED
    group.thaw(second, rank=1)


def test_without_index_0_the_workers_of_the_others_are_killed(group: Group) -> None:
    group.nodes = 2
    group.steps = 10_000
    group.lost_after = 2.0
    group.faults = [{"rank": 1, "start": 1, "step": 3, "do": "hang"}]
    first, second = group.start_all()
    wait_for(lambda: first.progress.training.step >= 3, first)
    first.signal(signal.SIGKILL)
    first.wait()
    assert len(group.workers()) == 1

    wait_for(lambda: group.workers() == [], second)
    assert second.process.poll() is None


def test_another_index_0_takes_over_without_memory(group: Group) -> None:
    group.nodes = 2
    group.steps = 10_000
    first, second = group.start_all()
    first.wait_for_step(3)
    first.signal(signal.SIGKILL)
    first.wait()
    group.shorten(20)
    replacement = group.start(0)

    assert [replacement.wait(), second.wait()] == [0, 0]
    before, after = group.starts(1)
    assert int(before["SFT_GENERATION"]) < int(after["SFT_GENERATION"])
    assert len(group.starts(0)) == 2


def test_sigterm_of_one_pod_saves_all_and_the_others_wait_for_its_replacement(group: Group) -> None:
    group.nodes = 2
    group.steps = 10_000
    first, second = group.start_all()
    first.wait_for_step(3)
    second.signal(signal.SIGTERM)

    assert second.wait() == 30
    assert second.termination.failure is FailureClass.INTERRUPTED
    wait_for(lambda: len(first.progress.incidents) == 1, first)
    (incident,) = first.progress.incidents
    assert incident.disruption
    assert incident.failure is FailureClass.INTERRUPTED
    assert "saved step" in first.log
    group.shorten(20)
    replacement = group.start(1)
    assert [first.wait(), replacement.wait()] == [0, 0]


def test_index_0_that_is_stopped_after_another_pod_was_says_that_the_run_has_ended(group: Group) -> None:
    # Given a run of two pods that gives signs of life, whose workers have left since one of both was asked to stop
    sign = {"attempt": 1, "name": "fake", "namespace": "team", "uid": "uid-1", "host": "h", "count": 3, "ended": ""}
    place = group.folder / "checkpoints" / "alive.json"
    place.parent.mkdir()
    place.write_text(json.dumps(sign))
    group.nodes = 2
    group.steps = 10_000
    first, second = group.start_all()
    first.wait_for_step(3)
    second.signal(signal.SIGTERM)
    assert second.wait() == 30
    wait_for(lambda: len(first.progress.incidents) == 1, first)

    # When index 0 is asked to stop too, before there is another pod: the job is suspended, or deleted
    first.signal(signal.SIGTERM)

    # Then its place says so, as rank 0 could not
    assert first.wait() == 30
    assert json.loads(place.read_text())["ended"] == "failed"


def test_sigterm_of_all_pods_ends_all_with_the_retryable_code(group: Group) -> None:
    group.nodes = 2
    group.steps = 10_000
    pods = group.start_all()
    pods[0].wait_for_step(3)
    for pod in pods:
        pod.signal(signal.SIGTERM)

    assert [pod.wait() for pod in pods] == [30, 30]
    assert "saved step" in pods[0].log


def test_a_hang_in_one_pod_prints_the_stacks_of_all_and_training_goes_on(group: Group) -> None:
    group.nodes = 2
    group.run_policy = {"progressDeadlineSeconds": 3}
    group.faults = [{"rank": 1, "start": 1, "step": 2, "do": "hang"}]
    first, second = group.start_all()

    assert [first.wait(), second.wait()] == [0, 0]
    assert "failure at step 2: Hang: no new step for 3 s after step 2" in first.log
    assert '[rank 0]   File "' in first.log
    assert "in receive\n" in first.log
    assert "in do\n" in second.log


def test_the_stacks_of_a_hang_are_kept_where_its_message_says(group: Group) -> None:
    # Given a claim of the attempt that will hang
    group.nodes = 2
    group.run_policy = {"progressDeadlineSeconds": 3}
    group.faults = [{"rank": 1, "start": 1, "step": 4, "do": "hang"}]
    claims = group.folder / "checkpoints" / "attempts"
    claims.mkdir(parents=True)
    (claims / "00001.json").write_text('{"attempt": 1, "jobUid": "uid-1"}')

    # When it hangs
    first, second = group.start_all()
    assert [first.wait(), second.wait()] == [0, 0]

    # Then both pods have kept there what their processes were doing
    told = re.search(r"failure at step 4: Hang: .* pods' logs and in file://(\S+)", first.log)
    assert told is not None, first.log
    folder = Path(told[1])
    assert folder.parent == group.folder / "checkpoints" / "hangs"
    assert sorted(file.name for file in folder.iterdir()) == ["stacks-rank-00000.txt", "stacks-rank-00001.txt"]
    assert "in receive\n" in (folder / "stacks-rank-00000.txt").read_text()
    assert "in do\n" in (folder / "stacks-rank-00001.txt").read_text()
    for pod in (first, second):
        assert f"what the workers were doing is kept in file://{folder}" in pod.log


def test_every_pod_tells_of_its_machine_and_the_first_one_of_the_run(group: Group) -> None:
    group.nodes, group.steps = 2, 10_000
    first, second = group.start_all()
    first.wait_for_step(1)

    for pod in (first, second):
        wait_for(lambda pod=pod: "sft_trainer_host_disk_free_bytes " in pod.get("/metrics"), pod)  # type: ignore[misc]
    assert "sft_trainer_step " in first.get("/metrics")
    assert "sft_trainer_step " not in second.get("/metrics")


def test_what_workers_held_is_told_no_more_once_they_have_ended(group: Group) -> None:
    group.nodes, group.steps = 2, 10_000
    first, second = group.start_all()
    first.wait_for_step(2)
    held = AllocatedMemory(allocated=5, reserved=6, peak=7).model_dump_json(by_alias=True)
    (group.folder / "pod-0-0" / MEMORY_FOLDER / "rank-0.json").write_text(held)
    wait_for(lambda: 'sft_trainer_gpu_allocated_bytes{rank="0"} 5.0' in first.get("/metrics"), first)

    second.signal(signal.SIGKILL)

    wait_for(lambda: first.progress.training.phase is Phase.WAITING, first)
    wait_for(lambda: "sft_trainer_gpu_allocated_bytes" not in first.get("/metrics"), first)


def test_a_pod_of_another_job_is_refused(group: Group) -> None:
    group.nodes = 2
    first = group.start(0)
    config = (group.folder / "config.json").read_text()
    wait_for(lambda: first.get("/healthz") == "ok\n", first)
    (group.folder / "config.json").write_text(config.replace("uid-1", "uid-2"))
    second = group.start(1)

    wait_for(lambda: "this is the group of job 'uid-1', not 'uid-2'" in second.log, second)
    assert first.progress.members == 1


def test_a_pod_of_another_kubernetes_job_of_the_same_name_is_refused(group: Group) -> None:
    group.nodes = 2
    first = group.start(0, SFT_GROUP_UID="job-1")
    second = group.start(1, SFT_GROUP_UID="job-2")

    wait_for(lambda: "this is another run of job 'uid-1': one of both is about to end" in second.log, second, 60)
    assert first.progress.members == 1
    assert first.progress.version_mismatch == ""
    assert "job-1" not in second.log


def test_a_name_that_led_to_the_last_run_is_looked_up_again(group: Group) -> None:
    # Given index 0 of the last run, which goes on living, behind the name of index 0
    group.nodes = 2
    last = group.start(0, SFT_GROUP_UID="last")
    wait_for(lambda: last.get("/healthz") == "ok\n", last, 60)
    with name_of(last) as name:
        second = group.start(1, SFT_GROUP_UID="this", SFT_COORDINATOR=name.address)
        wait_for(lambda: "this is another run" in second.log, second, 60)

        # When the name leads to that of this run
        first = group.start(0, SFT_GROUP_UID="this", address="127.0.0.8")
        name.target = "127.0.0.8"

        # Then the two meet
        assert [first.wait(), second.wait()] == [0, 0]


def test_pods_of_two_versions_form_no_group_and_it_is_said(group: Group) -> None:
    group.nodes = 2
    first = group.start(0, SFT_POD_UID="pod-uid")
    changed = group.start(1, PYTHONPATH=group.changed_trainer())
    wait_for(lambda: first.progress.version_mismatch != "", first, 60)

    progress = first.progress
    assert progress.pod_uid == "pod-uid"
    assert progress.training.phase is Phase.WAITING
    assert progress.training.phase_detail == progress.version_mismatch
    versions = re.findall(r"pod (\d) has version ([0-9a-f]{12})", progress.version_mismatch)
    assert [node for node, _ in versions] == ["0", "1"]
    assert versions[0][1] != versions[1][1]
    wait_for(lambda: progress.version_mismatch in changed.log, changed, 60)
    assert not (group.folder / "starts-0").exists()

    # When the pod is replaced by one that runs the same, all is well.
    changed.signal(signal.SIGTERM)
    assert changed.wait(60) == 30
    second = group.start(1)
    assert [first.wait(), second.wait()] == [0, 0]
