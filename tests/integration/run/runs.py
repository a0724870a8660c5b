"""`sft run` with the real trainer on tiny inputs, and what it leaves behind."""

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.waiting import PATIENCE_SECONDS, wait_until

_NOT_INHERITED = ("FORCE_COLOR", "HF_TOKEN", "HF_HUB_OFFLINE", "AWS_PROFILE", "AWS_ACCESS_KEY_ID", "AWS_SESSION_TOKEN")


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

    def __init__(self, folder: Path, inputs: Any, cache: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.inputs = inputs
        self.environment = {
            **{name: value for name, value in os.environ.items() if name not in _NOT_INHERITED},
            "SFT_CACHE_DIR": str(cache),
            "HF_HOME": str(cache / "huggingface"),
            "AWS_EC2_METADATA_DISABLED": "true",
        }

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
        self._started = subprocess.Popen(
            [sys.executable, "-m", "sft_cli.main", "run", file.name, "--output", "json", *options],
            cwd=self.folder,
            env={**self.environment, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        return self._started

    def finish(self, process: subprocess.Popen[str]) -> Ended:
        """Wait for the end of a run, which leaves no process behind and shows no traceback, however it ends."""
        try:
            out, said = process.communicate(timeout=2 * PATIENCE_SECONDS)
        finally:
            process.kill()
        assert "Traceback" not in said, said
        wait_until(lambda: not self.processes())
        return Ended(process.returncode, said, json.loads(out) if out else {})

    def run(self, job: dict[str, Any], *options: str, **environment: str) -> Ended:
        """A run from its begin to its end."""
        return self.finish(self.start(job, *options, **environment))

    def wait_for_step(self, step: int, name: str = "tiny") -> None:
        """Return as soon as the run that was started last reports ``step``; what it said is shown when it does not."""
        report = self.store(name) / "run" / "progress.json"

        def reported() -> bool:
            try:
                return bool(json.loads(report.read_text())["step"] >= step)
            except FileNotFoundError:  # of a run that is begun anew the folder is set aside
                return False

        process = self._started
        try:
            wait_until(lambda: reported() or process.poll() is not None)
            assert reported(), f"it ended with {process.returncode}"
        except AssertionError as error:
            process.kill()
            raise AssertionError(
                f"step {step} was not reported ({error}): {process.communicate()[1][-4000:]}"
            ) from None

    def interrupt(self, process: subprocess.Popen[str], number: signal.Signals = signal.SIGINT) -> Ended:
        """Ctrl-C, or another signal."""
        process.send_signal(number)
        return self.finish(process)

    def processes(self) -> list[int]:
        """Pids of everything that works in this folder."""
        return processes_in(self.folder)


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
