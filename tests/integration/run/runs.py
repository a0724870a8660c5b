"""`sft run` with the real trainer on tiny inputs, and what it leaves behind."""

import contextlib
import functools
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import yaml

from sft_api.rundir import PROGRESS_FILE, STOP_FILE
from tests.integration.run.hub import environment_of, usual_endpoint
from tests.waiting import PATIENCE_SECONDS, Patience, T, wait_until

_STANDING = Path(__file__).parents[2] / "standing"
"""A folder for PYTHONPATH, with the callback of a run that stands still."""
_NOT_INHERITED = ("FORCE_COLOR", "HF_TOKEN", "HF_HUB_OFFLINE", "AWS_PROFILE", "AWS_ACCESS_KEY_ID", "AWS_SESSION_TOKEN")

_SHELL = dict(os.environ)
"""The environment that tests were begun with: torch writes into that of a process that compiles, for itself alone."""

NEW_PROCESS: Callable[..., subprocess.Popen[str]] = functools.partial(subprocess.Popen, text=True)


def environment_of_runs(cache: Path) -> dict[str, str]:
    """Of commands that keep in ``cache`` what they have fetched and tokenised."""
    return {
        **{name: value for name, value in _SHELL.items() if name not in _NOT_INHERITED},
        "SFT_CACHE_DIR": str(cache),
        "HF_HOME": str(cache / "huggingface"),
        "AWS_EC2_METADATA_DISABLED": "true",
        **environment_of(usual_endpoint()),
    }


@dataclass(frozen=True)
class Ended:
    """How a run ended."""

    code: int
    said: str
    """What the user saw on the terminal."""
    status: dict[str, Any]
    """The status on standard output; empty when nothing was started."""

    @property
    def latest(self) -> int | None:
        """Step of the newest checkpoint that the status names."""
        latest = self.status["checkpoints"].get("latest")
        return latest["step"] if latest else None


class Place:
    """A folder to run jobs in, with a cache of its own."""

    _started: subprocess.Popen[str]
    """The run that was started last."""
    _run_dir: Path
    """Where it reports."""
    _goes_on: Path | None
    """What a run that stands still waits for."""

    def __init__(
        self, folder: Path, inputs: Any, cache: Path, popen: Callable[..., subprocess.Popen[str]] = NEW_PROCESS
    ) -> None:
        """``popen`` starts its commands."""
        folder.mkdir(parents=True, exist_ok=True)
        self.popen = popen
        self.folder = folder
        self.inputs = inputs
        self.environment = environment_of_runs(cache)

    def job(self, name: str = "tiny", **sections: Any) -> dict[str, Any]:
        """A manifest on the tiny inputs; ``sections`` are merged into its spec."""
        spec: dict[str, Any] = {
            "model": {"uri": f"file://{self.inputs.model}"},
            "data": {
                "train": [{"uri": f"file://{self.inputs.train}", "split": "train[:60]"}],
                "maxLength": 256,
                "workers": 1,
            },
            "training": {"steps": 3, "globalBatchTokens": 512, "optimizer": {"learningRate": 1e-3}},
            "compute": {"gpusPerNode": 0},
            "export": {"atEnd": False},
        }
        for section, fields in sections.items():
            spec[section] = {**spec.get(section, {}), **fields}
        return {"apiVersion": "sftjob.dev/v1alpha1", "kind": "SFTJob", "metadata": {"name": name}, "spec": spec}

    def store(self, name: str = "tiny") -> Path:
        """Where the checkpoints of a job go that names no place."""
        return self.folder / "sft-runs" / name

    def start(self, job: dict[str, Any], *options: str, **environment: str) -> subprocess.Popen[str]:
        """Begin ``sft run`` with ``options``; ``environment`` is added to that of this shell."""
        file = self.folder / f"{job['metadata']['name']}.yaml"
        file.write_text(yaml.safe_dump(job))
        name = job["metadata"]["name"] + ("-dummy-run" if "dummyRun" in job["spec"]["training"] else "")
        self._goes_on, self._run_dir = None, self.store(name) / "run"
        self._started = self.popen(
            [sys.executable, "-m", "sft_cli.main", "run", file.name, "--output", "json", *options],
            cwd=self.folder,
            env={**self.environment, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        return self._started

    def start_standing(
        self, job: dict[str, Any], step: int, *options: str, **environment: str
    ) -> subprocess.Popen[str]:
        """Begin a run that stands still after ``step``; return as soon as it does.

        What is done to it then, is done there, however fast it is. It goes on when its end is waited for.
        """
        stands = self.folder / f"stands-after-{step}"
        for left in (stands, stands.with_suffix(".over")):  # by a run before
            left.unlink(missing_ok=True)
        arguments = {"step": str(step), "stands": str(stands)}
        spec = job["spec"]
        callbacks = [*spec["training"].get("callbacks", ()), {"class": "standing:StandsStill", "arguments": arguments}]
        standing = {**job, "spec": {**spec, "training": {**spec["training"], "callbacks": callbacks}}}
        theirs = environment.pop("PYTHONPATH", self.environment.get("PYTHONPATH", ""))
        folders = os.pathsep.join(filter(None, (str(_STANDING), theirs)))
        process = self.start(standing, *options, PYTHONPATH=folders, **environment)
        self.wait_until(stands.exists)
        self._goes_on = stands.with_suffix(".over")
        return process

    def finish(self, process: subprocess.Popen[str]) -> Ended:
        """Wait for the end of a run, which leaves no process behind and shows no traceback, however it ends.

        Patience begins anew with every step. When it ends, the assertion that fails shows what the run said.
        """
        if self._goes_on is not None:
            self._goes_on.touch()
        patience = Patience(2 * PATIENCE_SECONDS)
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    out, said = process.communicate(timeout=1)
                    break
                if not patience.lasts(self._reported_step()):
                    self._give_up(process, f"for {patience.seconds:.0f} s it made no step and did not end")
        finally:
            process.kill()
        assert "Traceback" not in said, said
        wait_until(lambda: not self.processes())
        return Ended(process.returncode, said, json.loads(out) if out else {})

    def run(self, job: dict[str, Any], *options: str, **environment: str) -> Ended:
        """A run from its begin to its end."""
        return self.finish(self.start(job, *options, **environment))

    def reported(self) -> dict[str, Any]:
        """What the first process of the run that was started last has reported; empty when it has not yet."""
        try:
            document: dict[str, Any] = json.loads((self._run_dir / PROGRESS_FILE).read_text())
        except FileNotFoundError:  # also of a run that is begun anew: the folder is set aside
            return {}
        return document

    def wait_until(self, look: Callable[[], T]) -> T:
        """The first true answer of ``look`` while the run that was started last goes on.

        Patience begins anew with every step. When the run ends before, or nothing comes, the assertion that fails shows
        what the run said.
        """
        process, patience = self._started, Patience()
        while True:
            over = process.poll() is not None
            if found := look():
                return found
            if over:
                self._give_up(process, f"the run ended with {process.returncode}; last seen: {found!r}")
            if not patience.lasts(self._reported_step()):
                self._give_up(process, f"for {patience.seconds:.0f} s nothing came of it; last seen: {found!r}")
            time.sleep(0.01)

    def _reported_step(self) -> int:
        """-1 before the first report."""
        step: int = self.reported().get("step", -1)
        return step

    def _give_up(self, process: subprocess.Popen[str], why: str) -> NoReturn:
        """Kill a run of which nothing comes; the error shows what it said."""
        reported = self.reported()
        self.kill()
        process.kill()
        said = process.communicate()[1][-4000:]
        raise AssertionError(f"{why}\n{said}\nIt last reported {json.dumps(reported)}")

    def wait_for_step(self, step: int) -> None:
        """Return as soon as the run that was started last reports ``step``: one that will make many more."""
        self.wait_until(lambda: self._reported_step() >= step)

    def interrupt(self, process: subprocess.Popen[str], number: signal.Signals = signal.SIGINT) -> Ended:
        """Ctrl-C, or another signal; one that stands still has heard of it when it goes on."""
        process.send_signal(number)
        if self._goes_on is not None:
            wait_until(lambda: (self._run_dir / STOP_FILE).exists() or process.poll() is not None)
        return self.finish(process)

    def processes(self) -> list[int]:
        """Pids of everything that works in this folder."""
        return processes_in(self.folder)

    def kill(self) -> list[int]:
        """SIGKILL to everything that works in this folder; pids of what did."""
        killed: list[int] = []
        while pids := self.processes():
            killed += pids
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        return killed


def processes_in(folder: Path) -> list[int]:
    """Pids of everything whose current folder is ``folder``."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if os.readlink(entry / "cwd") == str(folder):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def assert_failed(ended: Ended, code: int, failure: str, *sentences: str) -> None:
    """The run has ended with ``code``, and terminal and status say why: each of ``sentences``, regular expressions."""
    assert ended.code == code, ended.said
    assert ended.status["state"] == "Failed"
    (failed,) = [condition for condition in ended.status["conditions"] if condition["type"] == "Failed"]
    assert (failed["status"], failed["reason"]) == ("True", failure)
    for sentence in sentences:
        assert re.search(sentence, ended.said), ended.said
        assert re.search(sentence, ended.status["message"]), ended.status["message"]


def assert_refused(ended: Ended, code: int, failure: str, *sentences: str) -> None:
    """The run has failed so before the first step, at the first try, and has written no checkpoint."""
    assert_failed(ended, code, failure, *sentences)
    assert ended.status["progress"]["step"] == 0
    assert "restarts" not in ended.status
    assert ended.latest is None


def step_numbers(store: Path) -> dict[int, dict[str, Any]]:
    """The recorded numbers of every step but its times; of a step done twice those of the newest attempt."""
    from tests.parity.runs import step_records

    return {
        step: {name: value for name, value in record.items() if name not in ("seconds", "time")}
        for step, record in step_records(store).items()
    }


def assert_the_same_to_rounding(place: Place, expected: Place) -> None:
    """The run in ``place`` has made the steps of the one in ``expected``, of the same tokens."""
    here, there = step_numbers(place.store()), step_numbers(expected.store())
    assert here.keys() == there.keys()
    for step, record in there.items():
        for name in ("tokens", "trainedTokens", "learningRate", "epoch"):
            assert here[step][name] == record[name], step
        loss, wanted = here[step]["loss"], record["loss"]
        assert math.isclose(loss, wanted, rel_tol=1e-4), (step, loss, wanted)
