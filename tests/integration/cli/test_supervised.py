"""`sft run` with the real supervisor, real processes, and a worker that only counts."""

import fcntl
import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

import sft_trainer
from sft_api.rundir import STOP_FILE
from sft_api.v1alpha1.status import SFTJobStatus
from tests.integration.cli.terminal import Terminal
from tests.integration.run.disks import small_disk
from tests.integration.run.runs import processes_in
from tests.unit.cli.jobs import manifest
from tests.waiting import PATIENCE_SECONDS, wait_until

SFT = str(Path(sys.executable).with_name("sft"))
FAKE_TRAINER = Path(__file__).with_name("fake_trainer")


class Runs:
    """Starts `sft` in a folder of its own, and makes sure that nothing is left at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[subprocess.Popen[str]] = []

    def write(self, **spec: Any) -> None:
        (self.folder / "job.yaml").write_text(yaml.safe_dump(manifest(**spec)))

    def environment(self, script: dict[str, Any]) -> dict[str, str]:
        return {
            **{name: value for name, value in os.environ.items() if name not in ("FORCE_COLOR", "NO_COLOR")},
            "PYTHONPATH": str(FAKE_TRAINER),
            "REAL_SFT_TRAINER": str(sft_trainer.__path__[0]),
            "FAKE_WORKER": json.dumps(script),
        }

    def start(
        self, *arguments: str, stderr: int = subprocess.PIPE, output: str = "yaml", **script: Any
    ) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [SFT, "run", "job.yaml", "--output", output, *arguments],
            cwd=self.folder,
            env=self.environment(script),
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
        self.started.append(process)
        return process

    def finish(self, process: subprocess.Popen[str]) -> tuple[int, str, str]:
        out, err = process.communicate(timeout=PATIENCE_SECONDS)
        return process.returncode, out, err or ""

    def run(self, *arguments: str, **script: Any) -> tuple[int, str, str]:
        return self.finish(self.start(*arguments, **script))

    def wait_for_step(self, step: int) -> None:
        report = self.folder / "sft-runs" / "tiny" / "run" / "progress.json"
        wait_until(lambda: report.exists() and json.loads(report.read_text())["step"] >= step)

    def processes(self) -> list[int]:
        """Everything that works for a run in this folder."""
        return processes_in(self.folder)


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    made = Runs(tmp_path)
    # A user's own file with the name of a module must not get in the trainer's way.
    (tmp_path / "pydantic.py").write_text("raise RuntimeError('the wrong module')")
    made.write(training={"steps": 4})
    yield made
    for process in made.started:
        if process.poll() is None:
            process.kill()
            process.communicate()
    wait_until(lambda: not made.processes())


def conditions(status: SFTJobStatus) -> dict[str, str]:
    return {condition.type: condition.reason for condition in status.conditions if condition.status == "True"}


def status_of(text: str) -> SFTJobStatus:
    return SFTJobStatus.model_validate(yaml.safe_load(text))


def test_a_run_to_its_end(runs: Runs) -> None:
    code, out, err = runs.run(warnings=["3 of 10 rows were dropped"])

    assert code == 0, err
    status = status_of(out)
    assert status.state == "Complete"
    assert conditions(status) == {"Accepted": "Valid", "Complete": "TrainingComplete"}
    assert status.progress is not None
    assert (status.progress.summary, status.progress.loss, status.progress.phase) == ("4/4", 1.0, "Complete")
    assert status.checkpoints is not None
    assert status.checkpoints.latest is not None
    assert (status.checkpoints.latest.step, status.steps_at_risk) == (4, 0)
    assert status.export is not None
    assert status.export.uri == f"file://{runs.folder}/sft-runs/tiny/export"
    assert status.warnings == ["3 of 10 rows were dropped"]
    assert status.plan is not None
    assert status.first_step_time is not None
    assert err.count("Warning: 3 of 10 rows were dropped") == 1
    assert "tiny: 1 process on CPU, fp32" in err
    assert f"Model       {runs.folder}/sft-runs/tiny/export\n" in err
    assert "worker says hello" not in err
    (log,) = (runs.folder / "sft-runs" / "tiny" / "logs").iterdir()
    assert "worker says hello" in log.read_text()


def test_a_complete_run_ends_in_few_lines(runs: Runs) -> None:
    code, out, err = runs.run(output="text")

    assert code == 0, err
    result, loss, model, time, *table, following = out.splitlines()
    assert re.fullmatch(r"Complete    tiny: 4/4 steps in \d+s", result)
    assert loss == "Loss        4.0000 → 1.0000"
    assert model == f"Model       {runs.folder}/sft-runs/tiny/export"
    assert re.fullmatch(r"Time        [0-9.]+ process seconds", time)
    assert all(re.fullmatch(r" {12} *[0-9.]+ +\d+%  [a-z, ]+", row) for row in table)
    assert following.startswith("Next        load it with from_pretrained")
    assert "Complete" not in err


def test_what_is_written_before_the_first_report_says_what_is_done(runs: Runs) -> None:
    begins = runs.folder / "begins"
    process = runs.start(output="text", startsAfter=str(begins))
    assert process.stderr is not None

    # The worker waits until that is read
    assert any(line.endswith("Starting: importing torch and transformers\n") for line in process.stderr)
    begins.touch()

    assert runs.finish(process)[0] == 0


def test_json_is_all_there_is_on_stdout_whatever_is_shown_besides(runs: Runs) -> None:
    runs.write(training={"steps": 4}, compute={"gpusPerNode": 0, "env": [{"name": "GIVEN", "value": "by the job"}]})

    code, out, err = runs.run("--output", "json", "--processes", "2", "--verbose")

    status = json.loads(out)
    assert code == 0
    assert (status["state"], status["plan"]["processes"]) == ("Complete", 2)
    assert SFTJobStatus.model_validate(status).state == "Complete"
    assert "[rank 1] worker says hello by the job" in err


def test_a_crash_is_survived_and_reported(runs: Runs) -> None:
    code, out, err = runs.run(crashAt=3)

    restarts = status_of(out).restarts
    assert code == 0, err
    assert restarts is not None
    assert (restarts.failures, restarts.last_reason, restarts.lost_steps) == (1, "WorkerCrashed", 1)
    assert status_of(out).attempt == 2
    assert err.count("WorkerCrashed on rank 0 after step 3: ") == 1


def test_a_failure_says_what_to_do_and_has_its_exit_code(runs: Runs) -> None:
    code, out, err = runs.run(failure="DataError", message="row 7 of train.jsonl has no messages")

    status = status_of(out)
    assert code == 11
    assert status.state == "Failed"
    assert conditions(status)["Failed"] == "DataError"
    assert status.message == "row 7 of train.jsonl has no messages"
    assert "Failed      DataError on rank 0: row 7 of train.jsonl has no messages" in err
    assert "sft data" in err
    assert "traceback of the worker" not in err


def test_what_the_command_line_sets_is_in_the_run_and_in_the_command_that_goes_on(runs: Runs) -> None:
    sets = ("--set", "training.steps=3", "--set", "data.train[0].split=train[:100]", "--set", "metadata.name=demo 2")
    refused, _, error = runs.run(*sets)
    assert refused == 10
    assert error.startswith("--set metadata.name: metadata.name must be at most ")

    sets = (*sets[:4], "--set", "metadata.name=demo-2")
    code, out, err = runs.run(*sets, failure="DataError", message="row 7 of train.jsonl has no messages")

    assert (code, status_of(out).plan.total_steps) == (11, 3)
    assert json.loads((runs.folder / "sft-runs" / "demo-2" / "config.json").read_text())["job"]["name"] == "demo-2"
    quoted = "--set training.steps=3 --set 'data.train[0].split=train[:100]' --set metadata.name=demo-2"
    assert f"\nInstead of the manifest: {quoted}\n" in err
    assert f"\n  sft run job.yaml {quoted}\n" in err


def test_an_unexplained_failure_shows_the_log(runs: Runs) -> None:
    runs.write(training={"steps": 4}, runPolicy={"maxRestarts": 0})

    code, out, err = runs.run(failure="Unknown", message="KeyError: 'lm_head'")

    assert code == 17
    status = status_of(out)
    assert conditions(status)["Failed"] == "RestartsExhausted"
    assert status.message == "1 failure, and spec.runPolicy.maxRestarts is 0; the last was Unknown: KeyError: 'lm_head'"
    assert "Failed      RestartsExhausted on rank 0: 1 failure, and" in err
    assert "KeyError: 'lm_head'" in err
    assert "traceback of the worker" in err
    # A run that may not fail at all is not tried again.
    assert attempts(runs) == 1


def attempts(runs: Runs) -> int:
    """How often the worker of rank 0 was started."""
    return len((runs.folder / "sft-runs" / "tiny" / "attempts-0").read_text())


def test_a_run_that_fails_again_and_again_is_tried_as_often_as_it_may(runs: Runs) -> None:
    # Given a worker that dies three steps after each start, with a checkpoint on the way
    runs.write(training={"steps": 100}, runPolicy={"maxRestarts": 3})

    code, out, err = runs.run(dieAfterSteps=3)

    status = status_of(out)
    sentence = "4 failures, and spec.runPolicy.maxRestarts is 3; the last was WorkerCrashed: "
    assert code == 17
    assert conditions(status) == {"Accepted": "Valid", "Failed": "RestartsExhausted", "Stalled": "RestartsExhausted"}
    assert status.message.startswith(sentence)
    assert "about to exit with 1" in status.message
    assert attempts(runs) == 4
    assert status.restarts is not None
    assert (status.restarts.failures, status.restarts.last_reason) == (4, "WorkerCrashed")
    assert status.progress is not None
    assert (status.progress.step, status.progress.phase) == (9, "Failed")
    assert f"Failed      RestartsExhausted on rank 0: {sentence}" in err
    assert "Checkpoint  step 8, " in err
    assert "Next        Look into the log" in err


def test_a_run_that_gets_no_further_is_not_given_up_within_two_minutes(runs: Runs) -> None:
    runs.write(training={"steps": 100}, runPolicy={"maxRestarts": 4})

    code, out, err = runs.run("--verbose", dieAtStep=3)

    sentence = "5 failures, and spec.runPolicy.maxRestarts is 4; the last was WorkerCrashed: "
    assert code == 17
    assert status_of(out).message.startswith(sentence)
    assert attempts(runs) == 5
    assert err.count("WorkerCrashed on rank 0 after step 3: ") == 1 + 4


def test_ctrl_c_saves_and_says_how_to_go_on(runs: Runs) -> None:
    runs.write(training={"steps": 10_000})
    process = runs.start("--processes", "1")
    runs.wait_for_step(3)

    process.send_signal(signal.SIGINT)
    code, out, err = runs.finish(process)

    assert code == 30, err
    status = status_of(out)
    assert status.state == "Suspended"
    assert status.checkpoints is not None
    assert status.checkpoints.latest is not None
    assert status.steps_at_risk == 0
    assert "again to kill" in err
    assert f"goes on from step {status.checkpoints.latest.step}:\n  sft run job.yaml --processes 1\n" in err

    runs.write(training={"steps": status.checkpoints.latest.step + 2})
    code, out, _ = runs.run("--processes", "1")
    assert code == 0
    assert status_of(out).attempt == 2


def test_ctrl_c_as_the_result_is_told_takes_neither_that_nor_the_exit_code(runs: Runs) -> None:
    # Given a run whose result does not fit into the pipe that it goes to, and who does not read yet
    process = runs.start(warnings=["w" * 900 + str(number) for number in range(10)])
    assert process.stdout is not None
    size = fcntl.fcntl(process.stdout, fcntl.F_SETPIPE_SZ, 4096)
    wait_until(lambda: _unread(process.stdout) >= size)

    process.send_signal(signal.SIGINT)
    code, out, err = runs.finish(process)

    assert code == 0, err
    assert status_of(out).state == "Complete"


def _unread(pipe: Any) -> int:
    """Bytes in ``pipe``."""
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)


def test_ctrl_c_twice_kills(runs: Runs) -> None:
    runs.write(training={"steps": 10_000})
    process = runs.start(ignoreStop=True)
    runs.wait_for_step(3)

    process.send_signal(signal.SIGINT)
    # Two signals that come before one of them is heard are one.
    wait_until((runs.folder / "sft-runs" / "tiny" / "run" / STOP_FILE).exists)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    code, out, err = runs.finish(process)

    assert code == 30
    assert "Killing" in err
    latest = status_of(out).checkpoints
    assert latest is not None
    assert latest.latest is not None
    assert f"goes on from step {latest.latest.step}" in err


def test_nothing_stays_when_sft_is_killed(runs: Runs) -> None:
    runs.write(training={"steps": 10_000})
    process = runs.start("--processes", "2")
    runs.wait_for_step(2)
    assert len(runs.processes()) >= 4

    process.kill()
    process.communicate()

    wait_until(lambda: not runs.processes())
    saved = runs.folder / "sft-runs" / "tiny" / "step-0"
    assert int(saved.read_text()) >= 2


def test_nothing_stays_when_the_supervisor_is_killed(runs: Runs, tmp_path: Path) -> None:
    runs.write(training={"steps": 10_000})
    orphan = tmp_path / "orphan"
    process = runs.start(orphan=str(orphan))
    runs.wait_for_step(2)
    supervisor = next(pid for pid in runs.processes() if "sft_trainer.launch" in command_line(pid))

    os.kill(supervisor, signal.SIGKILL)
    code, out, err = runs.finish(process)

    assert code == 31
    assert "SIGKILL" in err
    assert conditions(status_of(out))["Failed"] == "WorkerCrashed"
    assert not Path(f"/proc/{orphan.read_text()}").exists()


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def test_one_run_at_a_time_in_a_folder(runs: Runs) -> None:
    runs.write(training={"steps": 10_000})
    first = runs.start()
    runs.wait_for_step(1)

    code, out, err = runs.run()

    assert code == 18
    assert out == ""
    assert "another sft run trains in" in err
    first.send_signal(signal.SIGTERM)
    assert runs.finish(first)[0] == 30


def test_one_run_at_a_time_into_one_place_for_checkpoints(runs: Runs) -> None:
    shared = {"uri": f"file://{runs.folder}/shared"}
    runs.write(training={"steps": 10_000}, checkpoint=shared)
    first = runs.start()
    runs.wait_for_step(1)
    document = yaml.safe_load((runs.folder / "job.yaml").read_text())
    document["metadata"]["name"] = "other"
    (runs.folder / "job.yaml").write_text(yaml.safe_dump(document))

    code, _, err = runs.run()
    fresh, _, _ = runs.run("--fresh")

    assert (code, fresh) == (18, 18)
    assert f"another sft run trains in {runs.folder}/shared" in err
    first.send_signal(signal.SIGTERM)
    assert runs.finish(first)[0] == 30
    runs.write(training={"steps": 4}, checkpoint=shared)
    assert runs.run("--fresh")[0] == 0
    assert runs.run()[0] == 0
    assert len(list(runs.folder.glob("shared-until-*"))) == 1


def test_fresh_sets_the_earlier_run_aside(runs: Runs) -> None:
    earlier = runs.folder / "sft-runs" / "tiny"
    earlier.mkdir(parents=True)
    (earlier / "step-0").write_text("4")
    (earlier / "attempts-0").write_text("x")

    code, out, err = runs.run("--fresh")

    assert code == 0, err
    assert status_of(out).attempt == 1
    (aside,) = (runs.folder / "sft-runs").glob("tiny-until-*")
    assert (aside / "step-0").read_text() == "4"
    assert f"The earlier run is now in {aside}." in err


def test_fresh_on_a_mounted_volume_says_what_to_do(runs: Runs) -> None:
    with small_disk(runs.folder / "volume", kilobytes=500) as volume:
        (volume / "step-0").write_text("4")
        runs.write(training={"steps": 4}, checkpoint={"uri": f"file://{volume}"})

        code, _, err = runs.run("--fresh")

        assert code == 10
        assert f"--fresh cannot rename {volume} to volume-until-" in err
        assert (volume / "step-0").read_text() == "4"


def test_the_end_of_the_terminal_saves_too(runs: Runs) -> None:
    runs.write(training={"steps": 10_000})
    terminal, inside = pty.openpty()
    # What a test session under nohup ignores, its children would ignore too.
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    process = runs.start(stderr=inside)
    signal.signal(signal.SIGHUP, before)
    os.close(inside)
    runs.wait_for_step(3)

    os.close(terminal)
    process.send_signal(signal.SIGHUP)
    code, out, _ = runs.finish(process)

    assert code == 30
    assert status_of(out).steps_at_risk == 0


def test_the_end_of_all_processes_of_a_session_saves_too(runs: Runs) -> None:
    """As an init system or a batch system ends them: by SIGTERM to each, then SIGHUP; begun in the background by a
    script, where SIGINT is ignored."""
    runs.write(training={"steps": 10_000})
    given = {signal.SIGHUP: signal.SIG_DFL, signal.SIGINT: signal.SIG_IGN}
    before = {number: signal.signal(number, handler) for number, handler in given.items()}
    process = runs.start("--processes", "1", seconds=1.5)
    for number, handler in before.items():
        signal.signal(number, handler)
    runs.wait_for_step(1)

    for pid in sorted({process.pid, *runs.processes()}):
        with suppress(ProcessLookupError):  # it has left already, as it was asked to by another
            os.kill(pid, signal.SIGTERM)
    process.send_signal(signal.SIGHUP)
    code, out, err = runs.finish(process)

    assert code == 30, err
    status = status_of(out)
    assert status.checkpoints is not None
    assert status.checkpoints.latest is not None, err
    assert status.steps_at_risk == 0


def test_a_terminal_shows_one_line_in_place_of_any_width(runs: Runs) -> None:
    runs.write(training={"steps": 100_000})
    terminal = Terminal(columns=60)
    process = runs.start(output="text", stderr=terminal.inside, warnings=["short data"])
    terminal.started()

    def rows_after_some_steps() -> list[str]:
        """What is on the screen a few looks later: the last row is the line."""
        first = _step(terminal.screen.rows())
        terminal.watch(lambda: _step(terminal.screen.rows()) > first + 5)
        return terminal.screen.rows()

    usual = rows_after_some_steps()
    terminal.resize(25)
    narrow = rows_after_some_steps()
    terminal.resize(200)
    wide = rows_after_some_steps()
    process.send_signal(signal.SIGINT)
    terminal.watch_to_the_end()

    assert runs.finish(process)[0] == 30
    for rows in (usual, narrow, wide):
        assert [row[0] in _SIGNS for row in rows] == [False] * (len(rows) - 1) + [True], rows
    assert re.fullmatch(r". step [\d,]+/100,000 · loss 0\.\d{4} · 1h2m left( · saved.*)?", usual[-1])
    assert re.fullmatch(r". step [\d,]+/100,000", narrow[-1])
    assert re.search(r"left · saved [\d,]+, \d+s ago$", wide[-1])
    text = terminal.screen.text()
    assert text.count("Warning: short data") == 1
    assert not any(sign in text for sign in _SIGNS), "the line is gone at the end"
    assert "Stopped     tiny: after step" in text


_SIGNS = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"


def _step(rows: list[str]) -> int:
    found = re.match(r". step ([\d,]+)/", rows[-1]) if rows else None
    return int(found[1].replace(",", "")) if found else 0
