"""``training.dummyRun``: some steps of the real loop on random tokens, for their speed and memory.

The run is that of every other one in all that a step costs: model, sharding, feed, agreement. It reads no data, and
has no place: it claims nothing, saves nothing, exports nothing, and leaves what lies in the run's own place alone.
"""

import math
import resource
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

import torch

from sft_api.progress import DUMMY_RUN_CHARACTERS
from sft_api.trainer_config import TrainerConfig
from sft_api.v1alpha1.status import CheckpointsStatus

from .classify import classify
from .data.random_examples import RandomExamples
from .data.steps import plan_steps
from .distributed import Ranks, gathered
from .due import SavesWhenDue, StopsWhenAsked
from .errors import ConfigError, StopRequested
from .events import Claimed, Control, Listener, Listeners, StepDone
from .gpu_memory import TellsAllocatedMemory
from .listeners import OurListeners
from .outage import Outage
from .preparation import prepare_model
from .prepared import Prepared
from .reporting import Reporter, Reporting
from .saving import AskedEachStep, Saving
from .skipped import SkippedSteps
from .trainer import Trainer

_WARM_UP = 2
"""Steps that are not measured: the first allocates and picks kernels, the second shows how many bins fit into a forward
pass."""
_GIB = 2**30


class Measured(Listener):
    """What the steps took."""

    def __init__(self) -> None:
        self.steps: list[StepDone] = []

    def on_step(self, event: StepDone, control: Control) -> None:
        self.steps.append(event)


class NothingSaved:
    """Stands for the saving of a run that has none."""

    in_flight = False
    checkpoints = CheckpointsStatus()
    seconds_since_save = 0.0

    def __init__(self) -> None:
        self.outage = Outage(math.inf)

    def anything_saved(self) -> bool:
        return False

    def look_after(self) -> bool:
        return False

    def may_have_arrived(self) -> bool:
        return False

    def failed_here(self) -> bool:
        return False

    def copied(self, device: torch.device) -> float:
        return 0.0

    def settle(self) -> None: ...

    def tell(self) -> None: ...


class DummyRun(Trainer):
    """One process of it."""

    def __init__(self, config: TrainerConfig, ranks: Ranks, run_dir: Path) -> None:
        """``config`` is what ``sft_api.dummy_run`` leaves of one."""
        super().__init__(config, ranks, run_dir)
        self._measured = Measured()

    def run(self) -> None:
        """Make the steps, and tell what they took. Memory that runs out is a ``ConfigError``; else as a run's."""
        try:
            super().run()
        except (RuntimeError, MemoryError) as error:
            if type(error).__name__ != "OutOfMemoryError" and not isinstance(error, MemoryError):
                raise
            # To find that out was what it was for: nobody has to see it three times.
            raise ConfigError(f"{classify(error, step=self.step)[1]}; found by training.dummyRun") from error

    def _export(self) -> None:
        """What comes of it at the end is what was measured."""
        # The largest of all processes, each.
        most = [max(figures) for figures in zip(*gathered(memory_here(self.device)), strict=True)]
        text = sentence(self._measured.steps, most, self.config.spec.data.max_length)
        self.reporter.update(dummy_run=text[:DUMMY_RUN_CHARACTERS])
        self.reporter.say("%s", text)

    def _open_store(self) -> None: ...

    def _make_callbacks(self) -> None: ...

    def _prepare(self) -> Prepared:
        return prepare_dummy(self.config, self.reporter, self.device)

    def _compare(self) -> None: ...

    def _claim(self) -> None:
        self._nothing: AskedEachStep = NothingSaved()
        self.saving = cast(Saving, self._nothing)  # whose other methods only what is replaced here calls
        self._watch()
        self.attempt = 1
        self.events.emit(Claimed(self.attempt, self.prepared.total_steps))

    def _watch(self) -> None:
        skipped = SkippedSteps(self.reporter, self._nothing, learning_rate=self.config.plan.learning_rate)
        saves = SavesWhenDue(self.spec, self.intervals, self._nothing, keeps_time=False)
        others: list[Listener] = [Reporting(self.reporter), StopsWhenAsked(self._stop_file), self._measured]
        if self.spec.compute.gpus_per_node:
            others.append(TellsAllocatedMemory(self._stop_file.parent, self.topology.rank))
        self.ours = OurListeners(skipped, saves, others)
        self.events = Listeners(self.ours.in_order(), self.control)

    def _resume_or_load(self) -> None:
        boxes = self.strategy.boxes("base") + self.strategy.boxes("trained")
        self.prepared.model.fill(boxes, self.spec, self.reporter)

    def _save(self, *, final: bool = False) -> None: ...

    def _stop(self) -> NoReturn:
        raise StopRequested(f"the dummy run was stopped after step {self.step}")


def prepare_dummy(config: TrainerConfig, reporter: Reporter, device: torch.device) -> Prepared:
    """The model as a run of ``config`` has it, and steps of random tokens. Nothing of ``data`` is read."""
    model = prepare_model(config, reporter, device)
    huggingface: Any = model.blueprint.huggingface
    examples: Any = RandomExamples.filling(config, huggingface.get_input_embeddings().num_embeddings)
    steps, epoch_size = plan_steps(config.spec, config.plan, [examples])
    total = config.spec.training.steps
    assert total is not None  # noqa: S101 - a dummy run has that many
    return Prepared(model, {}, None, [examples], {}, steps, total, epoch_size)


def memory_here(device: torch.device) -> list[float]:
    """The most bytes of this process so far: of host memory; of a GPU's reserved, and allocated; and all of a GPU's."""
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
    if device.type != "cuda":
        return [host, 0.0, 0.0, 0.0]
    total = torch.cuda.mem_get_info(device)[1]
    reserved, allocated = torch.cuda.max_memory_reserved(device), torch.cuda.max_memory_allocated(device)
    return [host, float(reserved), float(allocated), float(total)]


def sentence(steps: Sequence[StepDone], most: Sequence[float], longest: int) -> str:
    """What was measured in ``steps``; ``most`` as of ``memory_here``, the largest of all processes each."""
    measured = steps[_WARM_UP:]
    seconds = statistics.median(step.seconds for step in measured)
    tokens = measured[-1].tokens
    rate, processes = tokens / seconds, measured[-1].processes
    share = measured[-1].peak_flops_share
    host, reserved, allocated, total = (amount / _GIB for amount in most)
    gpu = (
        f"{reserved:.1f} of {total:.1f} GiB of a GPU's memory at most ({allocated:.1f} GiB in tensors), "
        if total
        else ""
    )
    return (
        f"{seconds:.3g} s a step of {tokens:,} random tokens in examples of up to {longest:,} (the median of the last "
        f"{len(measured)} of {len(steps)} steps): {rate:,.0f} tokens/s, {rate / processes:,.0f} a process"
        f"{f', {100 * share:.1f}% of peak FLOP/s' if share is not None else ''}; {gpu}{host:.1f} GiB of host memory a "
        "process at most; no data was read, and nothing was saved"
    )
