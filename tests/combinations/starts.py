"""Starts of a run: its workers, as a supervisor starts them, forked from a process that has imported for them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sft_api.failures import ExitCode
from sft_api.progress import TrainingProgress, WorkerError
from sft_api.rundir import ERRORS_FOLDER, STOP_FILE, of_rank
from sft_api.trainer_config import TrainerConfig
from sft_api.v1alpha1 import SFTJob
from sft_trainer.distributed import Ranks
from sft_trainer.events import Control, Evaluating, Listener, StepDone
from sft_trainer.process import begin, report_end
from sft_trainer.trainer import Trainer
from tests.integration.checkpoint.ranks import CONTEXT
from tests.parity.runs import step_records, worker_environment

_PATIENCE_SECONDS = 900.0
"""In which a run gets further, however slow the machine is."""
_PEERS_SECONDS = 60.0
"""In which others end once one has."""


@dataclass(frozen=True)
class Disturbance:
    """What happens to the workers of a start after a step."""

    step: int
    kill: bool
    """SIGKILL to all of them; else they are asked to stop."""
    evaluating: bool = False
    """While they evaluate after that step."""

    def __str__(self) -> str:
        where = "in the evaluation " if self.evaluating else ""
        return f"{'killed' if self.kill else 'stopped'} {where}after step {self.step}"


@dataclass(frozen=True)
class Ended:
    """How a start ended."""

    code: int
    message: str
    """Why; empty where the run is complete."""
    step: int
    """After which it ended, where it did not complete."""
    log: str
    """The end of what the first worker wrote."""


@dataclass(frozen=True)
class Run:
    """A run with a folder of its own, which is begun as often as it takes."""

    name: str
    job: Mapping[str, Any]
    folder: Path
    cache: Path
    """What runs have tokenised."""

    @property
    def store(self) -> Path:
        return self.folder / "store"

    def config(self, **changed: Any) -> TrainerConfig:
        """What its trainer gets, ``changed`` sections in place of the manifest's own."""
        job = {**self.job, "metadata": {"name": self.name}, "spec": {**self.job["spec"], **changed}}
        return TrainerConfig.resolve(
            SFTJob.from_manifest(job), uid=self.name, default_checkpoint_uri=f"file://{self.store}"
        )

    def start(self, disturbance: Disturbance | None = None, **changed: Any) -> Ended:
        """Begin it, or go on with it, to its end or the ``disturbance``."""
        try:
            config = self.config(**changed)
        except ValueError as error:  # as ``sft run`` says it, and the operator, before anything is started
            return Ended(ExitCode.CONFIG_ERROR, str(error), 0, "")
        shutil.rmtree(self.folder / "run", ignore_errors=True)
        environment = worker_environment(config, self.folder) | {"SFT_CACHE_DIR": str(self.cache)}
        processes = config.plan.processes
        workers = [
            CONTEXT.Process(
                target=_work,
                args=({**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}, self._log(rank), disturbance),
            )
            for rank in range(processes)
        ]
        for worker in workers:
            worker.start()
        codes = _wait(workers, self.folder)
        errors = [_error(self.folder / "run", rank) for rank in range(processes)]
        # That of who failed first says why: others lose their peer.
        failed = min((error for error in errors if error), key=lambda error: error.failure == "PeerLost", default=None)
        code = next((code for code in codes if code not in (0, ExitCode.PEER_LOST)), max(codes))
        said = self._log(0).read_text()[-2000:]
        return Ended(code, failed.message if failed else "", failed.step if failed else 0, said)

    def _log(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.log"

    def numbers(self) -> dict[int, dict[str, Any]]:
        """What is recorded of each step but its times; of 0 the evaluation before the first."""
        return {
            step: {name: value for name, value in record.items() if name not in ("seconds", "time")}
            for step, record in step_records(self.store).items()
        }

    def progress(self) -> TrainingProgress:
        """What it has told last."""
        return TrainingProgress.model_validate_json((self.store / "status.json").read_text())

    def weights(self) -> dict[str, bytes]:
        """Files of weights in its exports, by name."""
        export = self.store / "export"
        return {str(file.relative_to(export)): file.read_bytes() for file in export.rglob("*.safetensors")}


class _Disturbs(Listener):
    def __init__(self, disturbance: Disturbance, stop_file: Path) -> None:
        self._disturbance, self._stop_file = disturbance, stop_file

    def on_step(self, event: StepDone, control: Control) -> None:
        if not self._disturbance.evaluating and event.step == self._disturbance.step:
            self._disturb()

    def on_evaluating(self, event: Evaluating, control: Control) -> None:
        if self._disturbance.evaluating and event.step == self._disturbance.step:
            self._disturb()

    def _disturb(self) -> None:
        if self._disturbance.kill:
            os.kill(os.getpid(), signal.SIGKILL)
        self._stop_file.touch()


def _work(environment: Mapping[str, str], log: Path, disturbance: Disturbance | None) -> None:
    """In a forked process: be a worker."""
    with log.open("w") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    config, run_dir = begin()
    ranks = Ranks.from_environment()
    trainer = Trainer(config, ranks, run_dir, [_Disturbs(disturbance, run_dir / STOP_FILE)] if disturbance else [])
    code = 0
    try:
        trainer.run()
    except BaseException as error:
        code = report_end(error, run_dir, rank=ranks.rank, step=trainer.step, attempt=trainer.attempt)
    sys.stderr.flush()
    os._exit(code)


def _wait(workers: list[Any], folder: Path) -> list[int]:
    """Exit codes. As with a supervisor, one that fails takes the others with it, and so does a run that hangs."""
    try:
        while any(worker.is_alive() for worker in workers):
            assert time.time() - _told(folder) < _PATIENCE_SECONDS, "the workers neither ended nor got any further"
            for worker in workers:
                worker.join(0.5)
            if any(worker.exitcode for worker in workers):
                for worker in workers:
                    worker.join(_PEERS_SECONDS)
                break
    finally:
        for worker in workers:
            if worker.is_alive():
                worker.kill()
                worker.join()
    return [worker.exitcode for worker in workers]


def _told(folder: Path) -> float:
    """When the workers of a run in ``folder`` said last what they do."""
    times = [(folder / "config.json").stat().st_mtime]
    for path in (folder / "run").rglob("*"):
        with suppress(FileNotFoundError):  # what is being removed, or renamed
            times.append(path.stat().st_mtime)
    return max(times)


def _error(run_dir: Path, rank: int) -> WorkerError | None:
    file = of_rank(run_dir / ERRORS_FOLDER, rank)
    return WorkerError.model_validate(json.loads(file.read_text())) if file.exists() else None
