"""Runs supervisors as if they were pods: each on a loopback address of its own, with fake workers."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sft_trainer
from sft_api.progress import Progress, TerminationMessage
from sft_api.trainer_config import TrainerConfig
from sft_api.v1alpha1 import SFTJob
from tests.waiting import PATIENCE_SECONDS


@dataclass
class Pod:
    """One supervisor process."""

    index: int
    process: subprocess.Popen[str]
    log_file: Path
    termination_file: Path
    url: str

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    @property
    def termination(self) -> TerminationMessage:
        text = self.termination_file.read_text()
        assert len(text.encode()) <= 4096
        return TerminationMessage.model_validate_json(text)

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=PATIENCE_SECONDS) as answer:
            return str(answer.read().decode())

    @property
    def progress(self) -> Progress:
        return Progress.model_validate_json(self.get("/v1/progress"))

    def wait(self, seconds: float = PATIENCE_SECONDS) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"pod {self.index} did not end in {seconds} s:\n{self.log}") from None

    def wait_for_step(self, step: int) -> Progress:
        """Until the group has made ``step``; asks pod 0."""
        wait_for(lambda: self.progress.training.step >= step, self)
        return self.progress

    def signal(self, number: int) -> None:
        self.process.send_signal(number)


def wait_for(what: Callable[[], bool], pod: Pod, seconds: float = PATIENCE_SECONDS) -> None:
    """Until ``what`` holds; connection errors count as not yet."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(OSError):
            if what():
                return
        time.sleep(0.02)
    raise AssertionError(f"nothing happened in {seconds} s; the log of pod {pod.index}:\n{pod.log}")


@dataclass
class Group:
    """Pods of one run in one folder."""

    folder: Path
    port: int
    nodes: int = 1
    processes: int = 1
    gpus: int = 0
    launcher: str = "supervisor"
    run_policy: dict[str, Any] = field(default_factory=dict)
    faults: list[dict[str, Any]] = field(default_factory=list)
    steps: int = 5
    step_seconds: float = 0.02
    prepare: dict[str, float] = field(default_factory=dict)
    preload: tuple[str, ...] = ("ssl",)
    launch: str = "sft_trainer.launch"
    """The supervisor is ``python -m`` this."""
    lost_after: float = 10.0
    silent_after: float = 1800.0
    judged_first: bool = False
    pods: list[Pod] = field(default_factory=list)

    def write_files(self) -> None:
        job = {
            "apiVersion": "sftjob.dev/v1alpha1",
            "kind": "SFTJob",
            "metadata": {"name": "fake"},
            "spec": {
                "model": {"uri": "file:///nowhere"},
                "data": {"train": [{"uri": "file:///nowhere.jsonl"}]},
                "compute": {
                    "nodes": self.nodes,
                    "gpusPerNode": self.gpus,
                    "processesPerNode": self.processes,
                    "launcher": self.launcher,
                },
                "checkpoint": {"uri": f"file://{self.folder}/checkpoints"},
                "runPolicy": self.run_policy,
            },
        }
        config = TrainerConfig.resolve(SFTJob.model_validate(job), uid="uid-1", default_checkpoint_uri=None)
        (self.folder / "config.json").write_text(config.model_dump_json(by_alias=True))
        script = {
            "steps": self.steps,
            "stepSeconds": self.step_seconds,
            "checkpointEvery": 2,
            "folder": str(self.folder),
            "prepare": self.prepare,
            "faults": self.faults,
        }
        (self.folder / "script.json").write_text(json.dumps(script))

    def shorten(self, steps: int) -> None:
        """Workers that start from now on make so many steps, or none when more are made already."""
        self.steps = steps
        self.write_files()

    def start(self, index: int = 0, *, address: str = "", **environment: str) -> Pod:
        """A pod for ``index``; a replacement when there was one."""
        if not (self.folder / "config.json").exists():
            self.write_files()
        name = f"pod-{index}-{len(self.pods)}"
        address = address or f"127.0.0.{index + 1}"
        log_file, termination_file = self.folder / f"{name}.log", self.folder / f"{name}.termination"
        command = [
            *(sys.executable, "-m", self.launch),
            *("--config", str(self.folder / "config.json")),
            *("--bind", address, "--port", str(self.port), "--run-dir", str(self.folder / name)),
            *("--lost-after", str(self.lost_after), "--silent-after", str(self.silent_after)),
            *(["--judged-first"] if self.judged_first else []),
            *("--worker-module", "fake_worker", "--preload", *self.preload),
        ]
        inherited = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
        given = {
            "JOB_COMPLETION_INDEX": str(index),
            "SFT_COORDINATOR": "127.0.0.1",
            "SFT_TERMINATION_LOG": str(termination_file),
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
            "FAKE_SCRIPT": str(self.folder / "script.json"),
        }
        with log_file.open("w") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=inherited | given | environment, text=True
            )
        host = f"[{address}]" if ":" in address else address
        pod = Pod(index, process, log_file, termination_file, f"http://{host}:{self.port}")
        self.pods.append(pod)
        return pod

    def changed_trainer(self) -> str:
        """A PYTHONPATH with a trainer whose code differs a little, as after a push to the same tag."""
        copy = self.folder / "changed" / "sft_trainer"
        shutil.copytree(Path(sft_trainer.__file__).parent, copy)
        (copy / "errors.py").write_text((copy / "errors.py").read_text() + "# changed\n")
        return os.pathsep.join((str(copy.parent), str(Path(__file__).parent)))

    def start_all(self) -> list[Pod]:
        return [self.start(index) for index in range(self.nodes)]

    def starts(self, rank: int) -> list[dict[str, Any]]:
        """Of each start of ``rank`` its environment, pid, time, and whether it was preloaded."""
        return [json.loads(line) for line in (self.folder / f"starts-{rank}").read_text().splitlines()]

    def kill_worker(self, rank: int) -> None:
        """SIGKILL to the newest worker of ``rank``."""
        try:
            os.kill(self.starts(rank)[-1]["pid"], signal.SIGKILL)
        except ProcessLookupError:
            raise AssertionError(f"the worker of rank {rank} has ended:\n{self.pods[0].log}") from None

    def freeze(self, pod: Pod, rank: int) -> None:
        """Like a node without a network: supervisor and worker live, and nothing comes of them."""
        pod.signal(signal.SIGSTOP)
        os.kill(self.starts(rank)[-1]["pid"], signal.SIGSTOP)

    def thaw(self, pod: Pod, rank: int) -> None:
        """The end of ``freeze``."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.starts(rank)[-1]["pid"], signal.SIGCONT)
        pod.signal(signal.SIGCONT)

    def workers(self) -> list[int]:
        """Pids of what looks like a worker to ``ps``."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes().split(b"\0")
                environment = (entry / "environ").read_bytes().decode(errors="replace")
                if words[1:3] == [b"-m", b"fake_worker"] and str(self.folder) in environment:
                    found.append(int(entry.name))
        return found

    def processes_left(self) -> list[str]:
        """Command lines of processes that belong to this group and live."""
        left = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    environment = (entry / "environ").read_bytes().decode(errors="replace")
                    if command and str(self.folder) in command + environment:
                        left.append(command)
        return left

    def close(self) -> None:
        for pod in self.pods:
            if pod.process.poll() is None:
                pod.signal(signal.SIGKILL)
                pod.process.wait()


@dataclass
class Name:
    """Stands for a DNS name: new connections to ``address`` reach ``target``, open ones stay where they are."""

    address: str
    target: str
    asked: bytearray = field(default_factory=bytearray)
    """All that was sent to ``target``, which has it."""


@contextmanager
def name_of(pod: Pod) -> Iterator[Name]:
    """A name that leads to ``pod``, on its port."""
    host, port = pod.url.removeprefix("http://").split(":")
    name = Name("127.0.0.9", host)

    def forward(source: socket.socket, sink: socket.socket, sent: bytearray) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65_536):
                sink.sendall(data)
                sent += data
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def serve(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = listener.accept()
                try:
                    server = socket.create_connection((name.target, int(port)))
                except OSError:  # not there yet
                    client.close()
                    continue
                for way in ((client, server, name.asked), (server, client, bytearray())):
                    threading.Thread(target=forward, args=way, daemon=True).start()

    with socket.create_server((name.address, int(port))) as listener:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        yield name
        listener.shutdown(socket.SHUT_RDWR)
