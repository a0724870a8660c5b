"""The public side of callbacks: the class to inherit from, and the values that it is told.

Fields are only ever added to the values, and methods to the class.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Run:
    """The run that begins, or goes on after an interruption."""

    name: str
    namespace: str
    attempt: int
    """1 at the first start; one more at each start after an interruption."""
    step: int
    """Steps done so far: 0, or that of the checkpoint the run goes on from."""
    total_steps: int
    """Of the whole run."""
    processes: int
    """In all; each has callbacks of its own."""
    is_first_process: bool
    """True on the one that writes for all: what shall happen once (a message, a tracker) happens there."""
    checkpoint_uri: str
    export_uri: str | None
    """None where nothing is exported."""
    spec: Mapping[str, Any]
    """``spec`` of the SFTJob with its defaults, as YAML has it; without what Secrets hold, and without
    ``runPolicy.maxRestarts``, which may change while the run lasts."""


@dataclass(frozen=True)
class Step:
    """One optimizer step of all processes, done."""

    step: int
    total_steps: int
    epoch: float
    """Passes over the data so far."""
    loss: float
    """Mean over the trained tokens of the step, before its update. May be NaN or infinite: such a step is skipped."""
    grad_norm: float
    """Of all gradients together, before they were clipped."""
    learning_rate: float
    tokens: int
    """Of the step, context included."""
    trained_tokens: int
    tokens_seen: int
    """Of all steps so far."""
    seconds: float
    """What the step took."""


@dataclass(frozen=True)
class Log:
    """What is recorded of a step, as in ``metrics/*.jsonl``: of the step itself, or of an evaluation after it."""

    step: int
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Evaluation:
    """An evaluation after ``step``."""

    step: int
    loss: float
    """Mean over all trained tokens of all sets."""
    losses: Mapping[str, float]
    """Of each set."""
    accuracy: float
    """Share of the trained tokens, over all sets, that the model finds the most likely ones: from 0 to 1."""
    accuracies: Mapping[str, float]
    """Of each set."""
    best_loss: float | None
    """The lowest of the run so far, this one included; by ``earlyStopping.minDelta`` where that is set."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that has arrived, whole, where the run saves."""

    step: int
    attempt: int
    uri: str
    size_bytes: int
    eval_loss: float | None
    """None where the step was not evaluated."""


@dataclass(frozen=True)
class End:
    """The run is over for this process."""

    step: int
    outcome: Literal["complete", "stopped", "failed"]
    """stopped: it was asked to (suspended, preempted, Ctrl-C), is saved, and can go on."""
    message: str
    """What ended it, or why it was stopped early; empty when it made all its steps."""
    export_uri: str | None
    """Where the model is, when one was exported."""


class Control:
    """What a callback may ask for. One process is enough: all do it after the same step.

    That is one step later on a CPU, and up to three on a GPU: a step is heard of when the next one is on its way.
    What is asked for after a step that is saved is done before that, so that a restart cannot lose it.

    A plain object, so that tests of a callback can look at it.
    """

    def __init__(self) -> None:
        self.requested: set[Literal["evaluate", "save", "stop"]] = set()
        self.why = ""
        """For what reason a stop was asked."""

    def evaluate(self) -> None:
        """Evaluate on ``data.eval`` and ``data.heldOut``; nothing where there is neither."""
        self.requested.add("evaluate")

    def save(self) -> None:
        """Save a checkpoint; put off while the last one is still on its way to the store."""
        self.requested.add("save")

    def stop(self, why: str = "") -> None:
        """End the run, as complete: evaluated, saved and exported. ``why`` goes into its status (500 characters).

        It is not started again. What makes no sense to be exported is an error: raise one.
        """
        self.requested.add("stop")
        self.why = self.why or why


class Callback:
    """Hears of a run: override what you want to hear.

    It is made once on every process of every start, with ``training.callbacks[].arguments``, before anything is
    loaded. It is called between steps, by the thread that trains, and so holds it up for as long as it takes. It is
    given values, never the model: it changes no number of the run. What it raises ends the run (CallbackError, not
    retried), but for ``on_end``, where it is only logged.
    """

    def on_start(self, run: Run, control: Control) -> None:
        """The state is loaded, and the first step of this start comes next."""

    def on_step(self, step: Step, control: Control) -> None:
        """A step is done."""

    def on_log(self, log: Log, control: Control) -> None:
        """Values of a step are recorded."""

    def on_evaluate(self, evaluation: Evaluation, control: Control) -> None:
        """An evaluation is done."""

    def on_save(self, checkpoint: Checkpoint, control: Control) -> None:
        """A checkpoint has arrived, perhaps after later steps. On the first process only."""

    def on_end(self, end: End) -> None:
        """The run is over, however it ended, and ``on_start`` was called. Other processes may be gone."""
