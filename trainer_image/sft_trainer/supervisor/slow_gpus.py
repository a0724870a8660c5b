"""Which GPUs are slower than the others: in a step all wait for the slowest, and all seem to take as long.

No I/O: the clock is passed in. Every GPU has done the same work, so that the others of its model in this run say how
long that takes. One look may have met a process that was held up for a moment: two in a row decide, both ways.
"""

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from sft_api.progress import MOST_SLOW_GPUS
from sft_api.slow_gpus import slow_gpu
from sft_api.times import timestamp
from sft_api.v1alpha1 import SlowGpuStatus

from .protocol import RankTimes, Report

SLOWER = 1.15
"""By this factor of the usual time a GPU is slow that was not."""
AS_FAST = 1.10
"""Within this one it is as fast as the others again: between the two it stays what it was."""
AT_LEAST = 3
"""GPUs of one model: of two nobody knows which is the usual one."""
LATE_SECONDS = 60.0
"""After the first word of a look the others are waited for so long."""
_IN_A_ROW = 2


class Told(NamedTuple):
    """What one GPU took, and where it is."""

    times: RankTimes
    pod: int
    node: str

    @property
    def key(self) -> tuple[str, int, str]:
        """The GPU, whichever process has it."""
        return (self.times.uuid, self.times.gpu, self.node or str(self.pod))


class Ratio(NamedTuple):
    """Time of a GPU by the usual one."""

    products: float
    memory: float


def ratios(times: Mapping[int, RankTimes]) -> dict[int, Ratio]:
    """Pure: by rank, how much longer than usual each took; 1 is as long, and none is there where nobody can tell.

    Usual is the median of those of its model, the lower one of two: where one half is slow, it is that half. Where
    most are, they are what is usual.
    """
    models: dict[str, list[int]] = {}
    for rank, one in times.items():
        models.setdefault(one.model, []).append(rank)
    found: dict[int, Ratio] = {}
    for ranks in models.values():
        if len(ranks) < AT_LEAST:
            continue
        products = statistics.median_low(times[rank].products for rank in ranks)
        memory = statistics.median_low(times[rank].memory for rank in ranks)
        found |= {rank: Ratio(times[rank].products / products, times[rank].memory / memory) for rank in ranks}
    return found


@dataclass
class _Known:
    """What is known of one GPU."""

    told: Told
    ratio: Ratio
    slow_since: datetime | None = None
    against: int = 0
    """Looks in a row, the last ones, that say the contrary."""
    first_against: datetime | None = None
    unseen: int = 0
    """Looks in a row, the last ones, in which it was not compared."""

    def see(self, told: Told, ratio: Ratio, time: datetime) -> bool:
        """Take in one look; whether it changes what is told of the GPU: slow, or no more."""
        self.told, self.ratio, self.unseen = told, ratio, 0
        slow = max(ratio) > (SLOWER if self.slow_since is None else AS_FAST)
        if slow == (self.slow_since is not None):
            self.against = 0
            return False
        self.against += 1
        self.first_against = time if self.against == 1 else self.first_against
        if self.against < _IN_A_ROW:
            return False
        self.slow_since = self.first_against if slow else None
        self.against = 0
        return True

    def status(self, since: datetime) -> SlowGpuStatus:
        times = self.told.times
        return SlowGpuStatus(
            pod=self.told.pod,
            node=self.told.node,
            gpu=times.gpu,
            rank=times.rank,
            uuid=times.uuid,
            model=times.model,
            products_speed=_shown(1 / self.ratio.products),
            memory_speed=_shown(1 / self.ratio.memory),
            since=timestamp(since),
        )


class SlowGpus:
    """Gathers what the pods tell of a look, and judges it when all have. Outlives starts of the workers."""

    def __init__(self, processes: int) -> None:
        """``processes`` of the whole run: so many tell."""
        self._processes = processes
        self._known: dict[tuple[str, int, str], _Known] = {}
        self._heard: dict[int, tuple[tuple[int, int], ...]] = {}
        """Of each pod, which looks of which start its last report had: most bring nothing new."""
        self._look = (0, 0)
        """Start of the workers, and number of the look that is gathered, or was last."""
        self._gathered: dict[int, Told] = {}
        self._began = 0.0

    @property
    def slow(self) -> list[SlowGpuStatus]:
        """The GPUs that are slow, those that are it for longest first; no more than are told."""
        found = [(known.slow_since, known) for known in self._known.values() if known.slow_since is not None]
        found.sort(key=lambda one: (one[0], one[1].told.times.rank))
        return [known.status(since) for since, known in found[:MOST_SLOW_GPUS]]

    def hear(self, report: Report, now: float, time: datetime) -> list[str]:
        """Take in what a pod of the start that is under way tells; what to say of it in the log.

        ``now`` is of any steady clock, ``time`` that of people.
        """
        said = self._judge(time) if self._gathered and now - self._began > LATE_SECONDS else []
        start = report.running or 0
        looks = tuple((start, times.look) for times in report.gpu_times)
        if not looks or looks == self._heard.get(report.node):
            return said
        self._heard[report.node] = looks
        first = report.node * report.processes
        for look, times in zip(looks, report.gpu_times, strict=True):
            if not first <= times.rank < first + report.processes or look < self._look:
                continue
            if look > self._look:
                # Whoever has not told of the one before by now tells of it no more.
                said += self._judge(time) if self._gathered else []
                self._look, self._began = look, now
            elif not self._gathered:
                continue  # it was judged without this one
            self._gathered[times.rank] = Told(times, report.node, report.host)
        if len(self._gathered) == self._processes:
            said += self._judge(time)
        return said

    def _judge(self, time: datetime) -> list[str]:
        gathered, self._gathered = self._gathered, {}
        found = ratios({rank: told.times for rank, told in gathered.items()})
        said = list(self._see(gathered, found, time))
        compared = {gathered[rank].key for rank in found}
        # Not those of a pod that was replaced, nor of a model of which too few are left. Where some have told nothing,
        # as those without room for the work never do, nobody knows that at once.
        most = 1 if len(gathered) == self._processes else _IN_A_ROW
        for key in self._known.keys() - compared:
            self._known[key].unseen += 1
            if self._known[key].unseen >= most:
                del self._known[key]
        return said

    def _see(self, gathered: Mapping[int, Told], found: Mapping[int, Ratio], time: datetime) -> Iterable[str]:
        for rank, ratio in sorted(found.items()):
            told = gathered[rank]
            known = self._known.setdefault(told.key, _Known(told, ratio))
            if not known.see(told, ratio, time):
                continue
            if known.slow_since is None:
                where = f"GPU {told.times.gpu} of pod {told.pod} ({told.times.uuid}, rank {rank})"
                yield f"{where} is as fast as the others again"
            else:
                yield f"warning: {slow_gpu(known.status(known.slow_since))}"


def _shown(speed: float) -> float:
    return round(speed, 3)
