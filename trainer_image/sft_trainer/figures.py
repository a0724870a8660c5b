"""What a run has come to: the figures that its checkpoints keep. They belong to it, and not to who shows them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from sft_api.checkpoints import Manifest
from sft_api.report import finite

from .data.batches import Step

_TOTALS = (
    *("examples_seen", "tokens_seen", "trained_tokens_seen", "step_seconds", "first_loss", "first_eval_loss"),
    *("best_eval_loss", "worse_evaluations", "judged_at", "stopped_early", "evaluation_left"),
)
"""Fields of a ``RunState`` by the same names."""
_SHOWN = (
    *("step", "loss", "first_loss", "eval_loss", "eval_losses", "eval_accuracy", "eval_accuracies"),
    *("first_eval_loss", "tokens_seen", "trained_tokens_seen", "stopped_early"),
)
"""Fields of a ``TrainingProgress`` by the same names."""
_OF_LAST_STEP = ("epoch", "learning_rate", "grad_norm", "aux_loss")
"""Those that each step tells itself."""
_NONE: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True)
class Figures:
    """After ``step`` optimizer steps, of all attempts; a loss is None where there is none, or no finite one."""

    step: int = 0
    examples_seen: int = 0
    tokens_seen: int = 0
    trained_tokens_seen: int = 0
    step_seconds: float = 0.0
    """What these steps took, whichever attempts made them; those that were made again count once."""
    loss: float | None = None
    """Of the last step."""
    last_step: Mapping[str, float | None] = field(default_factory=dict)
    """What else is told of it, by fields of a ``TrainingProgress``."""
    first_loss: float | None = None
    """Of the first step."""
    eval_loss: float | None = None
    """Of the last evaluation."""
    eval_losses: Mapping[str, float | None] = field(default_factory=dict)
    """The same of each set, by its name."""
    eval_accuracy: float | None = None
    """Of the last evaluation: share of the trained tokens that were found the most likely ones."""
    eval_accuracies: Mapping[str, float | None] = field(default_factory=dict)
    """The same of each set, by its name."""
    first_eval_loss: float | None = None
    """Of the one before the first step, if there was one."""
    evaluated_at: int = -1
    """Step of the last evaluation of this attempt."""
    begins_evaluated: bool = False
    """Whether the checkpoint that this attempt went on from knows the loss of its own step."""
    best_eval_loss: float | None = None
    """The lowest, by which the evaluations after it are judged."""
    worse_evaluations: int = 0
    """Evaluations since then, none of which was better."""
    judged_at: int = -1
    """Step of the last evaluation that is counted in these, by whatever attempt: none counts twice."""
    evaluation_left: bool = False
    """Whether an evaluation after ``step`` was begun and left: whoever goes on from there makes it up."""
    stopped_early: str = ""
    """Why the run ends with ``step`` and not as planned, a sentence; empty while it does not."""

    @classmethod
    def recorded(cls, manifest: Manifest) -> "Figures":
        """Those of a run that goes on from there."""
        extra, metrics = manifest.run.model_extra or {}, manifest.run.metrics
        totals = {name: extra[name] for name in _TOTALS if name in extra}
        told, last = extra.get("last_step") or {}, dict[str, Any](extra.get("last_evaluation") or metrics)
        return cls(
            step=manifest.step,
            loss=metrics.get("loss"),
            eval_loss=last.get("evalLoss"),
            eval_accuracy=last.get("evalAccuracy"),
            eval_losses=last.get("evalLosses") or {},
            eval_accuracies=last.get("evalAccuracies") or {},
            begins_evaluated=metrics.get("evalLoss") is not None,
            last_step={name: told[name] for name in _OF_LAST_STEP if name in told},
            **totals,
        )

    def record(self) -> dict[str, Any]:
        """Fields of the ``RunState`` of a checkpoint of ``step``."""
        metrics = {"loss": self.loss, "evalLoss": None, "evalAccuracy": None}
        # What is told until the next one: a checkpoint is judged by that of its own step alone.
        last = {"evalLoss": self.eval_loss, "evalAccuracy": self.eval_accuracy}
        if self.evaluated_at == self.step:
            metrics |= last
        totals = {name: getattr(self, name) for name in _TOTALS}
        each = {"evalLosses": dict(self.eval_losses), "evalAccuracies": dict(self.eval_accuracies)}
        told = {"last_evaluation": {**last, **each}, "last_step": dict(self.last_step)}
        return {"cursor": self.step, "metrics": metrics, **told, **totals}

    def progress(self) -> dict[str, Any]:
        """Fields of the ``TrainingProgress`` that shows them."""
        return {name: getattr(self, name) for name in _SHOWN}

    def after(self, number: int, step: Step, loss: float, seconds: float) -> "Figures":
        """With ``step``, which has that number and took ``seconds``, and its mean ``loss``."""
        shown = finite(loss)
        return replace(
            self,
            step=number,
            examples_seen=self.examples_seen + step.examples,
            tokens_seen=self.tokens_seen + step.tokens,
            trained_tokens_seen=self.trained_tokens_seen + step.trained_tokens,
            step_seconds=self.step_seconds + seconds,
            loss=shown,
            first_loss=shown if number == 1 else self.first_loss,
            evaluation_left=False,
        )

    def evaluated(
        self,
        loss: float,
        accuracy: float | None = None,
        losses: Mapping[str, float] = _NONE,
        accuracies: Mapping[str, float] = _NONE,
        *,
        min_delta: float = 0.0,
    ) -> "Figures":
        """With an evaluation after ``step``, and the ``losses`` and ``accuracies`` of each set by its name; one that is
        lower by no more than ``min_delta`` is not better."""
        shown = finite(loss)
        told = replace(
            self,
            eval_loss=shown,
            eval_losses={name: finite(each) for name, each in losses.items()},
            eval_accuracy=accuracy,
            eval_accuracies={name: finite(each) for name, each in accuracies.items()},
            first_eval_loss=shown if self.step == 0 else self.first_eval_loss,
            evaluated_at=self.step,
            evaluation_left=False,
        )
        if self.judged_at == self.step:
            return told
        better = shown is not None and (self.best_eval_loss is None or shown < self.best_eval_loss - min_delta)
        return replace(
            told,
            best_eval_loss=shown if better else self.best_eval_loss,
            worse_evaluations=0 if better else self.worse_evaluations + 1,
            judged_at=self.step,
        )

    def evaluated_on_other_data(self) -> "Figures":
        """Those of a run that goes on with other evaluation data: no loss of before can be compared with one of now."""
        unjudged = replace(self, best_eval_loss=None, worse_evaluations=0, judged_at=-1)
        untold = replace(unjudged, eval_loss=None, eval_losses={}, eval_accuracy=None, eval_accuracies={})
        return replace(untold, first_eval_loss=None, begins_evaluated=False)

    def as_another_run(self) -> "Figures":
        """Those of a run that goes on from another one's checkpoint: how its own go, and how long, it tells itself."""
        unjudged = replace(self, best_eval_loss=None, worse_evaluations=0, judged_at=-1)
        return replace(unjudged, step_seconds=0.0, stopped_early="", evaluation_left=False)
