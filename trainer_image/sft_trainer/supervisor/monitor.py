"""Looks at the machine of this pod every few seconds, by a thread that neither the group nor a step waits for."""

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from sft_api.rundir import MEMORY_FOLDER, AllocatedMemory, of_rank

from .cgroup import Cgroup
from .gpus import GpuFigures, Gpus
from .host import HostFigures, read_host
from .output import Output
from .settings import Settings

SAMPLE_SECONDS = 5.0
STALE_SECONDS = 60.0
"""What was seen longer ago is told no more: a driver that does not answer holds up nothing but its own figures."""
LASTING = 6
"""Looks in a row, half a minute, after which something is worth a warning."""
FULL_SHARE = 0.95
"""Of a pod's memory."""
_WORTH_A_WARNING = {
    "heat": "because of heat: look at the node's cooling",
    "power_brake": "by the server's power brake: look at its power supply",
    "hardware": "by its hardware: look at the node's cooling and power supply",
}


@dataclass(frozen=True)
class Sample:
    """What was seen of a machine at one time."""

    host: HostFigures = field(default_factory=HostFigures)
    gpus: tuple[GpuFigures, ...] = ()
    allocated: Mapping[int, AllocatedMemory] = field(default_factory=dict)
    """What the workers have told of their GPUs, by rank."""


class Monitor:
    """Samples of this pod, and warnings worth acting on, each told once."""

    def __init__(
        self,
        settings: Settings,
        output: Output,
        cache: Path,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``cache`` is where models and data are kept."""
        self._settings = settings
        self._output = output
        self._cache = cache
        self._clock = clock
        self._gpus: Gpus | None = None
        self._judge = Judge(settings.node)
        self._seen: tuple[float, Sample] | None = None
        self.warnings: tuple[str, ...] = ()

    def start(self) -> None:
        """Begin to look."""
        threading.Thread(target=self._look_always, name="monitor", daemon=True).start()

    @property
    def sample(self) -> Sample | None:
        """The last one; None while there is none, or where it is old."""
        seen = self._seen
        return seen[1] if seen is not None and self._clock() - seen[0] <= STALE_SECONDS else None

    def look(self) -> None:
        """Take one sample."""
        if self._settings.gpus and self._gpus is None:
            self._gpus = Gpus(self._settings.gpus)
        gpus = tuple(self._gpus.read()) if self._gpus is not None else ()
        sample = Sample(read_host(Cgroup(), self._cache), gpus, _allocated(self._settings))
        self._seen = (self._clock(), sample)
        warnings = self._judge.warnings(sample)
        for warning in warnings[len(self.warnings) :]:
            self._output.say(f"warning: {warning}")
        self.warnings = warnings

    def _look_always(self) -> None:
        while True:
            self.look()
            time.sleep(SAMPLE_SECONDS)


class Judge:
    """Pure but for its memory: what of many samples is worth a warning."""

    def __init__(self, node: int) -> None:
        self._pod = f"pod {node}"
        self._lasted: dict[str, int] = {}
        self._told: dict[str, str] = {}

    def warnings(self, sample: Sample) -> tuple[str, ...]:
        """All so far, with what ``sample`` adds: one sentence for each kind of trouble, however long it lasts."""
        for kind, sentence in self._troubles(sample).items():
            at_once = kind.startswith("xid")
            if at_once or self._lasted[kind] >= LASTING:
                self._told.setdefault(kind, sentence)
        return tuple(self._told.values())

    def _troubles(self, sample: Sample) -> dict[str, str]:
        found: dict[str, str] = {}
        for reason, why in _WORTH_A_WARNING.items():
            slowed = [gpu for gpu in sample.gpus if reason in _causes(gpu)]
            if slowed:
                heat = "" if slowed[0].temperature is None else f" ({slowed[0].temperature:.0f} °C)"
                found[reason] = f"{self._pod}: GPU {_numbers(slowed)}{heat} is slowed down {why}"
        if failed := [gpu for gpu in sample.gpus if gpu.xid]:
            found["xid"] = (
                f"{self._pod}: the driver reports error Xid {failed[0].xid} of GPU {_numbers(failed)}: the kernel's "
                "log of the node says more, and NVIDIA's list of Xid errors what it means"
            )
        used, limit = sample.host.memory_used, sample.host.memory_limit
        if used is not None and limit and used > FULL_SHARE * limit:
            found["memory"] = (
                f"{self._pod}: {used / 2**30:.1f} of the {limit / 2**30:.1f} GiB of its memory are used, and the "
                "kernel ends a process where they are not enough: raise compute.resources.limits.memory, or lower "
                "data.workers or set checkpoint.async: false"
            )
        self._lasted = {kind: self._lasted.get(kind, 0) + 1 for kind in found}
        return found


def _causes(gpu: GpuFigures) -> frozenset[str]:
    """What slows it down; that the hardware does so says no more where it is known why."""
    causes = gpu.slowed_by or frozenset()
    return causes - {"hardware"} if causes & {"heat", "power_brake"} else causes


def _numbers(gpus: list[GpuFigures]) -> str:
    return ", ".join(str(gpu.index) for gpu in gpus)


def _allocated(settings: Settings) -> dict[int, AllocatedMemory]:
    found: dict[int, AllocatedMemory] = {}
    for rank in settings.ranks:
        with suppress(OSError, ValidationError):  # none of this start, or being replaced
            told = of_rank(settings.run_dir / MEMORY_FOLDER, rank).read_bytes()
            found[rank] = AllocatedMemory.model_validate_json(told)
    return found
