"""What happens in a run, told to whatever watches it.

The loop emits events; listeners hear them in the order in which they were registered, on every process, and may ask
for more: a save, an evaluation, a stop. What one process asks for is agreed on by all in the step's own all-reduce, so
that all do the same after the same step. Listeners change nothing of the numbers; an error of one ends the run.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from sft_api.checkpoints import CheckpointId
from sft_api.progress import Incident
from sft_api.v1alpha1.status import CheckpointsStatus

from .errors import StopRequested
from .figures import Figures

log = logging.getLogger("sft_trainer")


class Request(Enum):
    """What a listener may ask the loop for."""

    EVALUATE = "evaluate"
    FINISH = "finish"
    """End the run here, complete: evaluated, saved and exported like one that has made all its steps."""
    STOP = "stop"
    """Save and leave; whoever starts the run again goes on."""
    SAVE = "save"
    TIME_GPUS = "time-gpus"
    """Have each process time its GPU: all after the same step, as each of them holds up all others meanwhile."""


class Control:
    """Requests of this process, and what all processes have agreed on."""

    def __init__(self) -> None:
        self._asked: set[Request] = set()
        self._agreed: set[Request] = set()
        self._why: dict[Request, str] = {}

    def ask(self, request: Request, why: str = "") -> None:
        """Want that done after the step that is agreed on next, or the one after it; one process is enough."""
        self._asked.add(request)
        self._because(request, why)

    def decide(self, request: Request, why: str = "") -> None:
        """Have that done now. For what every process decides alike."""
        self._agreed.add(request)
        self._because(request, why)

    def _because(self, request: Request, why: str) -> None:
        if why:
            self._why.setdefault(request, why)

    def why(self, request: Request) -> str:
        """The first reason that was given for that on this process; empty where only others have one."""
        return self._why.get(request, "")

    def asks(self, request: Request) -> bool:
        """Whether this process asks for that, which is not agreed on yet."""
        return request in self._asked

    def asked(self) -> list[float]:
        """What this process asked for since the last call: a number for each kind, whose sum ``agree`` takes in."""
        asked, self._asked = self._asked, set()
        return [float(request in asked) for request in Request]

    def agree(self, sums: Sequence[float]) -> None:
        """Take in what all processes asked for, the same everywhere."""
        self._agreed.update(request for request, count in zip(Request, sums, strict=True) if count > 0)

    def wants(self, request: Request) -> bool:
        """Whether that is agreed on and not done yet."""
        return request in self._agreed

    def takes(self, request: Request) -> bool:
        """``wants``; it counts as done from now on."""
        wanted = request in self._agreed
        self._agreed.discard(request)
        return wanted


@dataclass(frozen=True)
class Claimed:
    """An attempt of the run is this group's: the first event of one that gets so far."""

    attempt: int
    total_steps: int
    """Of the whole run."""
    incidents: tuple[Incident, ...] = ()
    """How earlier attempts of the same object ended; on the process that writes."""


@dataclass(frozen=True)
class Resumed:
    """The state of a checkpoint was read, from which the run goes on. A run that begins anew is not told of."""

    checkpoint: CheckpointId
    figures: Figures
    checkpoints: CheckpointsStatus
    """All that this process knows of."""
    warnings: Sequence[str]
    """What is not as it was when that checkpoint was made."""
    begins: bool = False
    """Whether the run begins with it: it is one of another run."""


@dataclass(frozen=True)
class Started:
    """The state is loaded and the loop begins; what is asked for now is done before the first step."""

    step: int
    """Steps done so far: 0, or that of the checkpoint the run goes on from."""
    total_steps: int


@dataclass(frozen=True)
class Asking:
    """The processes are about to agree on what follows ``step``.

    On a GPU, what is asked for now is done right after it only where its number says so (``due.Intervals``),
    and else one step later: the host does not wait for what the processes agree on.
    """

    step: int


@dataclass(frozen=True)
class StepDone:
    """One optimizer step, of all processes together."""

    step: int
    loss: float
    """Mean over the trained tokens of the step, before its update."""
    grad_norm: float
    learning_rate: float
    tokens: int
    trained_tokens: int
    epoch: float
    seconds: float
    time: float
    """When it was done, in seconds since 1970."""
    processes: int
    peak_flops_share: float | None
    """Model-FLOPs utilisation; None where the peak of the device is not known."""
    save_in_flight: bool
    """Whether any process still uploads the last save."""
    figures: Figures
    """Of the run, with this step."""
    aux_loss: float | None = None
    """Load-balancing loss of the routers, without its coefficient: the mean over the step's tokens of that of their
    bins; None where it is not trained."""
    data_seconds: float = 0.0
    """Of ``seconds``, what this process waited for the tokens of the step."""

    @property
    def is_finite(self) -> bool:
        """False where loss or gradients were not finite: the step was skipped, it changed nothing."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)

    def record(self) -> dict[str, Any]:
        """What is written down of the step."""
        return {
            "step": self.step,
            "loss": self.loss,
            **({} if self.aux_loss is None else {"auxLoss": self.aux_loss}),
            "gradNorm": self.grad_norm,
            "learningRate": self.learning_rate,
            "tokens": self.tokens,
            "trainedTokens": self.trained_tokens,
            "epoch": self.epoch,
            "seconds": round(self.seconds, 6),
            "time": round(self.time, 3),
        }


@dataclass(frozen=True)
class Logged:
    """Values of a step are written down: those of the step itself, or those of an evaluation after it."""

    step: int
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Evaluating:
    """An evaluation after ``step`` goes on; first told when nothing is done and the number of batches not known."""

    step: int
    done: int = 0
    batches: int = 0
    """In all."""


@dataclass(frozen=True)
class Evaluated:
    """Mean losses and token accuracies after ``step``, over all sets together and of each."""

    step: int
    loss: float
    losses: Mapping[str, float]
    accuracy: float
    accuracies: Mapping[str, float]
    figures: Figures
    """Of the run, with this evaluation."""


@dataclass(frozen=True)
class Finishing:
    """The run ends with ``step``, earlier than planned, and as complete; ``figures`` say why."""

    step: int
    figures: Figures


@dataclass(frozen=True)
class SaveBegins:
    """The state of ``step`` is about to be saved."""

    step: int
    final: bool
    """Nothing comes after it."""
    beside: list[Callable[[], None]] = field(default_factory=list)
    """What shall be written before that checkpoint counts: listeners of the leader add to it. Called in the thread that
    saves, perhaps more than once, while training goes on; an error is one of the save."""


@dataclass(frozen=True)
class SaveEnded:
    """The save of the state of ``step`` is over for the loop, which goes on: it is saved, or on its way to the store.

    Or the storage does not answer, and the next one has to do.
    """

    step: int
    final: bool
    """Nothing comes after it."""


@dataclass(frozen=True)
class Committed:
    """A save has arrived, perhaps after later steps; processes learn of it at different ones."""

    step: int
    """Steps done so far."""
    checkpoints: CheckpointsStatus
    """All that this process knows of; the first process knows all that there are."""


@dataclass(frozen=True)
class ExportBegins:
    """The checkpoint of the last step, or the best one, is about to be exported."""

    uri: str


@dataclass(frozen=True)
class ExportEnded:
    """The model is there, whole."""

    step: int
    """Of the checkpoint that it was exported from."""
    uri: str


class Outcome(Enum):
    """How a run ended on this process."""

    COMPLETE = "complete"
    STOPPED = "stopped"
    """It was asked to, and can go on."""
    FAILED = "failed"


@dataclass(frozen=True)
class Ended:
    """The run is over: the last event, told once however it ended, also to those that never heard of a start.

    Where it failed the other processes may be gone, or know nothing of it: nothing collective may follow.
    """

    step: int
    """Steps that were launched, or that of the checkpoint the run went on from."""
    error: BaseException | None = None
    """What ended it; None when it is complete."""

    @property
    def outcome(self) -> Outcome:
        if self.error is None:
            return Outcome.COMPLETE
        return Outcome.STOPPED if isinstance(self.error, StopRequested) else Outcome.FAILED


Event = (
    Claimed
    | Resumed
    | Started
    | Asking
    | StepDone
    | Logged
    | Evaluating
    | Evaluated
    | Finishing
    | SaveBegins
    | SaveEnded
    | Committed
    | ExportBegins
    | ExportEnded
    | Ended
)


class Listener:
    """Hears of nothing by itself: override what you want to hear."""

    def on_claim(self, event: Claimed, control: Control) -> None: ...

    def on_resume(self, event: Resumed, control: Control) -> None: ...

    def on_start(self, event: Started, control: Control) -> None: ...

    def on_ask(self, event: Asking, control: Control) -> None: ...

    def on_step(self, event: StepDone, control: Control) -> None: ...

    def on_log(self, event: Logged, control: Control) -> None: ...

    def on_evaluating(self, event: Evaluating, control: Control) -> None: ...

    def on_evaluate(self, event: Evaluated, control: Control) -> None: ...

    def on_finish(self, event: Finishing, control: Control) -> None: ...

    def on_save_begins(self, event: SaveBegins, control: Control) -> None: ...

    def on_save(self, event: SaveEnded, control: Control) -> None: ...

    def on_commit(self, event: Committed, control: Control) -> None: ...

    def on_export_begins(self, event: ExportBegins, control: Control) -> None: ...

    def on_export(self, event: ExportEnded, control: Control) -> None: ...

    def on_end(self, event: Ended, control: Control) -> None: ...


class Listeners:
    """All that watch one loop, on this process."""

    def __init__(self, listeners: Sequence[Listener], control: Control) -> None:
        self._listeners = listeners
        self._control = control

    def emit(self, event: Event) -> None:
        """Tell all of them, in order. Raises what one raises; those after it do not hear of the event then."""
        for listener in self._listeners:
            _tell(listener, event, self._control)

    def end(self, event: Ended) -> None:
        """Tell all of them of the end, whatever one raises; of a complete run the first such error is raised.

        Of another one none is: what ended the run is what has to be known.
        """
        first: Exception | None = None
        for listener in self._listeners:
            try:
                _tell(listener, event, self._control)
            except Exception as error:
                if first is not None or event.error is not None:
                    log.exception("%s failed at the end of the run", type(listener).__name__)
                first = first or error
        if first is not None and event.error is None:
            raise first


def _tell(listener: Listener, event: Event, control: Control) -> None:
    match event:
        case Claimed():
            listener.on_claim(event, control)
        case Resumed():
            listener.on_resume(event, control)
        case Started():
            listener.on_start(event, control)
        case Asking():
            listener.on_ask(event, control)
        case StepDone():
            listener.on_step(event, control)
        case Logged():
            listener.on_log(event, control)
        case Evaluating():
            listener.on_evaluating(event, control)
        case Evaluated():
            listener.on_evaluate(event, control)
        case Finishing():
            listener.on_finish(event, control)
        case SaveBegins():
            listener.on_save_begins(event, control)
        case SaveEnded():
            listener.on_save(event, control)
        case Committed():
            listener.on_commit(event, control)
        case ExportBegins():
            listener.on_export_begins(event, control)
        case ExportEnded():
            listener.on_export(event, control)
        case Ended():
            listener.on_end(event, control)
