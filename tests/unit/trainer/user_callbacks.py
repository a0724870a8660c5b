"""What users might write: classes of ``training.callbacks``, good and bad."""

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from sft_trainer.callbacks import Callback, Checkpoint, Control, End, Evaluation, Log, Run, Step


class WritesSpec(Callback):
    """Writes down the spec that it is told."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "spec.json"

    def on_start(self, run: Run, control: Control) -> None:
        self._file.write_text(json.dumps(run.spec))


class Diary(Callback):
    """Writes down what it hears, one line an event, and asks for things after steps."""

    def __init__(self, folder: Path, save: int = 0, evaluate: int = 0, stop: int = 0) -> None:
        self._folder = folder
        self._asks = {save: "save", evaluate: "evaluate", stop: "stop"}

    def _write(self, *words: object) -> None:
        # Of each process its own.
        with (self._folder / f"diary-{os.environ.get('RANK', '0')}.jsonl").open("a") as file:
            file.write(json.dumps(words) + "\n")

    def on_start(self, run: Run, control: Control) -> None:
        self._write("start", run.name, run.attempt, run.step, run.total_steps, run.processes, run.is_first_process)

    def on_step(self, step: Step, control: Control) -> None:
        self._write("step", step.step, step.loss, step.tokens_seen)
        match self._asks.get(step.step):
            case "save":
                control.save()
            case "evaluate":
                control.evaluate()
            case "stop":
                control.stop("it is enough")

    def on_log(self, log: Log, control: Control) -> None:
        self._write("log", log.step, sorted(log.values))

    def on_evaluate(self, evaluation: Evaluation, control: Control) -> None:
        self._write("evaluate", evaluation.step, evaluation.loss, dict(evaluation.losses))

    def on_save(self, checkpoint: Checkpoint, control: Control) -> None:
        self._write("save", checkpoint.step, checkpoint.uri)

    def on_end(self, end: End) -> None:
        self._write("end", end.step, end.outcome, end.message, end.export_uri)


class Typed(Callback):
    """Takes arguments of all kinds."""

    def __init__(
        self, rate: float, count: int, loud: bool, mode: Literal["a", "b"] = "a", name="plain", **others: str
    ) -> None:  # type: ignore[no-untyped-def]
        self.given = (rate, count, loud, mode, name, others)


class Plain(Callback):
    """Takes none."""


class RaisesWhenMade(Callback):
    def __init__(self) -> None:
        raise RuntimeError("no tracker here")


class RaisesAfterAStep(Callback):
    def on_step(self, step: Step, control: Control) -> None:
        raise ValueError(f"the loss is {step.loss > 0}")

    def on_end(self, end: End) -> None:
        raise ValueError("and at the end too")


class Interrupts(Callback):
    def on_step(self, step: Step, control: Control) -> None:
        raise KeyboardInterrupt


class CancelsItself(Callback):
    """Awaits what was cancelled: no Exception, as is what libraries in Rust raise when they panic."""

    def on_step(self, step: Step, control: Control) -> None:
        asyncio.run(_cancelled())


async def _cancelled() -> None:
    task = asyncio.ensure_future(asyncio.sleep(60))
    task.cancel()
    await task


class RaisesAtTheEnd(Callback):
    def on_end(self, end: End) -> None:
        raise SystemExit(3)


class CancelsItselfAtTheEnd(Callback):
    def on_end(self, end: End) -> None:
        asyncio.run(_cancelled())


class SavesWithoutControl(Callback):
    def on_save(self, checkpoint: Checkpoint) -> None:  # type: ignore[override]
        raise AssertionError("it cannot be called")


class EndsWithControl(Callback):
    def on_end(self, end: End, control: Control) -> None:  # type: ignore[override]
        raise AssertionError("it cannot be called")


class Asynchronous(Callback):
    async def on_step(self, step: Step, control: Control) -> None:  # type: ignore[override]
        raise AssertionError("nobody awaits it")


class Yields(Callback):
    def on_end(self, end: End) -> Iterator[None]:  # type: ignore[override]
        yield


class Indirect(Callback):
    """Its methods take what they are told, each in another way."""

    def on_step(self, *told: object) -> None: ...

    @staticmethod
    def on_log(log: Log, control: Control) -> None: ...

    def on_end(self, end: End, but: str = "") -> None: ...


class NoCallback:
    """Of another library, perhaps."""
