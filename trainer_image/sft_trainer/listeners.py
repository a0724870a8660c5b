"""Who watches every run, in the order in which they hear of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from sft_api.trainer_config import TrainerConfig

from .alive import Alive
from .checkpoint.store import Store
from .curves.listener import Curve
from .data.tokenized import TokenizedSource
from .done import DoneFile
from .due import EvaluatesWhenDue, FinishesWhenNoBetter, Intervals, SavesWhenDue, StopsWhenAsked
from .events import Listener
from .export.on_the_way import ExportsOnTheWay
from .gpu_memory import TellsAllocatedMemory
from .gpu_times import GpuWork, TimesGpu
from .keeps_tokens import KeepsTokens, is_shared
from .memory_snapshot import MemorySnapshot
from .profiling import Profile
from .records import RecordsFile, StatusFile
from .reporting import Reporter, Reporting
from .saving import Saving
from .skipped import SkippedSteps
from .topology import Topology


@dataclass(frozen=True)
class OurListeners:
    """All of them, and those that the loop asks before it saves, stops or exports."""

    skipped: SkippedSteps
    saves: SavesWhenDue
    others: list[Listener]
    exports: ExportsOnTheWay | None = None
    """Where there are any, on the process that writes for all."""
    alive: Alive | None = None
    """Where there is a place, on the process that writes for all."""
    done: DoneFile | None = None
    """The same."""

    @classmethod
    def of(
        cls,
        config: TrainerConfig,
        intervals: Intervals,
        topology: Topology,
        store: Store,
        saving: Saving,
        reporter: Reporter,
        stop_file: Path,
        device: torch.device,
        sources: Callable[[], Sequence[TokenizedSource]],
    ) -> "OurListeners":
        """``device`` computes for this process; ``stop_file``, in the run directory, is the supervisor's word that the
        run shall save and leave."""
        alive, done = Alive(config, store, stop_file), DoneFile(store, saving)
        # What a run has once is written by one process.
        written: list[Listener] = [
            RecordsFile(store),
            # Before the curve, which is waited for at the end: who is asked to stop may be killed meanwhile.
            StatusFile(store, reporter),
            done,
            alive,
            Curve(store, config.job.name, reporter),
        ]
        if is_shared(store):
            written.append(KeepsTokens(store, sources, wanted=config.spec.data.keep_tokenized))
        if (profile := config.spec.monitoring.profile) is not None:
            written.append(Profile(profile, store, reporter))
        exports = None
        if topology.writes and config.spec.export.every_steps is not None:
            exports = ExportsOnTheWay(config, store, saving, reporter, stop_file)
            written.append(exports)
        of_gpus: list[Listener] = []
        if config.spec.compute.gpus_per_node:
            of_gpus.append(TellsAllocatedMemory(stop_file.parent, topology.rank))
            of_gpus.append(TimesGpu(stop_file.parent, topology.rank, GpuWork(device), leads=topology.writes))
            if (wanted := config.spec.monitoring.memory_snapshot) is not None:
                name = f"rank-{topology.rank:05d}"
                of_gpus.append(MemorySnapshot(wanted, store, reporter, name, writes=topology.writes))
        return cls(
            SkippedSteps(reporter, saving, learning_rate=config.plan.learning_rate),
            SavesWhenDue(config.spec, intervals, saving, keeps_time=topology.writes),
            [
                # What is trained by dft is low too where the model is far off.
                Reporting(reporter, loss_falls=config.spec.training.loss != "dft"),
                *of_gpus,
                *(written if topology.writes else []),
                EvaluatesWhenDue(config.spec, intervals),
                FinishesWhenNoBetter(config.spec),
                StopsWhenAsked(stop_file),
            ],
            exports,
            alive if topology.writes else None,
            done if topology.writes else None,
        )

    def in_order(self) -> list[Listener]:
        """A step that ends the run is told to nobody else; the progress is told before it is written down."""
        return [self.skipped, *self.others, self.saves]
