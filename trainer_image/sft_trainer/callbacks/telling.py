"""The listener that tells callbacks of what happens in the loop, in values of their own."""

import logging
from types import MappingProxyType
from typing import Any

from sft_api.trainer_config import TrainerConfig
from sft_trainer.errors import TrainingError
from sft_trainer.events import (
    Claimed,
    Committed,
    Control,
    Ended,
    Evaluated,
    ExportEnded,
    Finishing,
    Listener,
    Logged,
    Request,
    Resumed,
    Started,
    StepDone,
)
from sft_trainer.topology import Topology

from . import base
from .loading import failed, find

log = logging.getLogger("sft_trainer")

_REQUESTS = {"evaluate": Request.EVALUATE, "save": Request.SAVE, "stop": Request.FINISH}


class Callbacks(Listener):
    """Those of ``training.callbacks``, in their order; they hear of everything after our own listeners."""

    def __init__(self, config: TrainerConfig, topology: Topology) -> None:
        """Make them; raises ``ConfigError`` and ``CallbackError``."""
        self._config = config
        self._topology = topology
        self._callbacks = [(path, make()) for path, make in find(config.spec.training.callbacks)]
        self._attempt = 0
        self._total_steps = 0
        self._started = False
        self._saved: tuple[int, int] | None = None
        """Attempt and step of the last checkpoint that they were told of, or that this run had before."""
        self._stopped_early = ""
        self._export_uri: str | None = None

    def on_claim(self, event: Claimed, control: Control) -> None:
        self._attempt = event.attempt

    def on_resume(self, event: Resumed, control: Control) -> None:
        # One of another run may have the attempt and step of one that this run saves.
        self._saved = None if event.begins else event.checkpoint
        self._stopped_early = event.figures.stopped_early

    def on_start(self, event: Started, control: Control) -> None:
        config, topology = self._config, self._topology
        self._total_steps, self._started = event.total_steps, True
        run = base.Run(
            name=config.job.name,
            namespace=config.job.namespace,
            attempt=self._attempt,
            step=event.step,
            total_steps=event.total_steps,
            processes=topology.world_size,
            is_first_process=topology.writes,
            checkpoint_uri=config.checkpoint_uri,
            export_uri=config.export_uri,
            # How often it restarts is the SFTJob's to say at any time: what pods are given is no value of its own.
            spec=config.spec.model_dump(
                mode="json", by_alias=True, exclude_none=True, exclude={"run_policy": {"max_restarts"}}
            ),
        )
        self._tell("on_start", run, control)

    def on_step(self, event: StepDone, control: Control) -> None:
        step = base.Step(
            step=event.step,
            total_steps=self._total_steps,
            epoch=event.epoch,
            loss=event.loss,
            grad_norm=event.grad_norm,
            learning_rate=event.learning_rate,
            tokens=event.tokens,
            trained_tokens=event.trained_tokens,
            tokens_seen=event.figures.tokens_seen,
            seconds=event.seconds,
        )
        self._tell("on_step", step, control)

    def on_log(self, event: Logged, control: Control) -> None:
        self._tell("on_log", base.Log(event.step, MappingProxyType(dict(event.values))), control)

    def on_evaluate(self, event: Evaluated, control: Control) -> None:
        losses, accuracies = (MappingProxyType(dict(each)) for each in (event.losses, event.accuracies))
        evaluation = base.Evaluation(
            step=event.step,
            loss=event.loss,
            losses=losses,
            accuracy=event.accuracy,
            accuracies=accuracies,
            best_loss=event.figures.best_eval_loss,
        )
        self._tell("on_evaluate", evaluation, control)

    def on_finish(self, event: Finishing, control: Control) -> None:
        self._stopped_early = event.figures.stopped_early

    def on_commit(self, event: Committed, control: Control) -> None:
        latest = event.checkpoints.latest
        if not self._topology.writes or latest is None or self._saved == (latest.attempt, latest.step):
            return
        self._saved = (latest.attempt, latest.step)
        checkpoint = base.Checkpoint(
            step=latest.step,
            attempt=latest.attempt,
            uri=latest.uri,
            size_bytes=latest.size_bytes,
            eval_loss=latest.eval_loss,
        )
        self._tell("on_save", checkpoint, control)

    def on_export(self, event: ExportEnded, control: Control) -> None:
        self._export_uri = event.uri

    def on_end(self, event: Ended, control: Control) -> None:
        if not self._started:
            return
        message = self._stopped_early if event.error is None else _words(event.error)
        end = base.End(event.step, event.outcome.value, message, self._export_uri)
        for path, callback in self._callbacks:
            try:
                callback.on_end(end)
            except BaseException:
                # The run is over, and what came of it is written: that must not be lost to what comes after it.
                log.exception("%s.on_end failed", path)

    def _tell(self, method: str, value: Any, control: Control) -> None:
        for path, callback in self._callbacks:
            asks = base.Control()
            try:
                getattr(callback, method)(value, asks)
            except BaseException as error:
                raise failed(f"{path}.{method}", error) from error
            for name in sorted(asks.requested):
                why = asks.why or "asked for by the callback"
                control.ask(_REQUESTS[name], f"{why} ({path})")


def _words(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, TrainingError) else f"{type(error).__name__}: {text}"
