"""Pure: the figures of a run over its steps, put together from the records of all its attempts."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sft_api.report import finite

Record = Mapping[str, Any]

_SCALARS = {
    "train/loss": "loss",
    "train/aux_loss": "auxLoss",
    "train/grad_norm": "gradNorm",
    "train/learning_rate": "learningRate",
    "train/epoch": "epoch",
    "eval/loss": "evalLoss",
    "eval/accuracy": "evalAccuracy",
}
"""Fields of a record by the names that TensorBoard shows."""


@dataclass(frozen=True)
class Scalar:
    """One figure of one step. ``time``: seconds since 1970, None when it was not recorded."""

    tag: str
    step: int
    value: float
    time: float | None


def scalars(record: Record) -> Iterator[Scalar]:
    """The figures in a record of ``metrics/*.jsonl``; what is not finite is left out."""
    step, time = int(record["step"]), record.get("time")
    figures = {tag: record.get(field) for tag, field in _SCALARS.items()}
    if len(losses := record.get("evalLosses") or {}) > 1:
        figures |= {f"eval/loss/{name}": loss for name, loss in losses.items()}
        accuracies = record.get("evalAccuracies") or {}
        figures |= {f"eval/accuracy/{name}": accuracy for name, accuracy in accuracies.items()}
    if record.get("seconds"):
        figures["train/tokens_per_second"] = record["tokens"] / record["seconds"]
    for tag, value in figures.items():
        if (number := finite(value)) is not None:
            yield Scalar(tag, step, number, time)


class History:
    """Training and evaluation losses by step. A step that was done twice counts once."""

    def __init__(self) -> None:
        self.losses: dict[int, float] = {}
        self.eval_losses: dict[int, float] = {}
        self._known: dict[str, set[int]] = {"train": set(), "eval": set()}
        """Steps that were told of, also those of which a loss was not finite."""

    def add(self, records: Iterable[Record], *, up_to: int | None = None) -> list[Scalar]:
        """Take in ``records`` (of steps no later than ``up_to``); the figures in them that were not known yet."""
        news = []
        for record in records:
            step = record["step"]
            if up_to is not None and step > up_to:
                continue
            known = {kind: step in steps for kind, steps in self._known.items()}
            for kind, field in (("train", "loss"), ("eval", "evalLoss")):
                if field in record:
                    self._known[kind].add(step)
            for scalar in scalars(record):
                if known[scalar.tag.partition("/")[0]]:
                    continue
                news.append(scalar)
                if scalar.tag == "train/loss":
                    self.losses[scalar.step] = scalar.value
                elif scalar.tag == "eval/loss":
                    self.eval_losses[scalar.step] = scalar.value
        return news
