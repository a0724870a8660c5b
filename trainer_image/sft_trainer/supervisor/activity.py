"""What the workers of this pod say they do, and when they said so last."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from sft_api.progress import BEFORE_TRAINING, Activity, Phase
from sft_api.rundir import ACTIVITY_FOLDER

from .liveness import PASSIVE, gets_further
from .protocol import PodActivity, RankActivity
from .told import ToldFiles


@dataclass(frozen=True)
class Said:
    """What one process does."""

    rank: int
    activity: Activity
    moved: float
    """When it got further last."""
    anything: bool = True
    """False until its first word."""


class Activities:
    """Follows the activity files of the workers of one generation."""

    def __init__(self, run_dir: Path, ranks: Iterable[int], now: float) -> None:
        """``now`` is the time of the workers' start, on the clock that ``read`` is called with."""
        self._said = {rank: Said(rank, Activity(), now, anything=False) for rank in ranks}
        self._files = ToldFiles(run_dir / ACTIVITY_FOLDER, self._said, Activity)
        self.step = 0
        """Last step that any of them has told of."""
        self.claimed = False
        """Whether any of them is part of an attempt."""

    def read(self, now: float) -> None:
        """Look what is new."""
        for rank, activity in self._files.news():
            before = self._said[rank]
            further = not before.anything or gets_further(before.activity, activity)
            self._said[rank] = Said(rank, activity, now if further else before.moved)
            self.step = max(self.step, activity.step)
            self.claimed |= activity.attempt > 0

    @property
    def before_training(self) -> bool:
        """Whether none of them has come to its first step: there is nothing to save."""
        return all(one.activity.phase in BEFORE_TRAINING for one in self._said.values())

    def summary(self, now: float) -> PodActivity:
        """What the pod does."""
        return summarise(self._said.values(), now)


def summarise(said: Iterable[Said], now: float) -> PodActivity:
    """Pure: of what processes said, what the pod does, and which of them is judged.

    It does what the process does that got further last, those that only wait left out where others do something.
    Judged is the one that stands still for longest, of those that neither wait nor, where others do more, train.
    """
    said = list(said)
    shown = max(said, key=lambda one: (one.activity.phase not in PASSIVE, one.moved))
    newest = max(one.moved for one in said)
    working = [one for one in said if one.activity.phase not in PASSIVE]
    stillest = min(working, key=lambda one: (one.activity.phase is Phase.TRAINING, one.moved), default=None)
    return PodActivity(
        **{**_of(shown, now), "silent_seconds": _seconds(now - newest)},
        stillest=None if stillest is None else RankActivity(**_of(stillest, now)),
    )


def _of(one: Said, now: float) -> dict[str, object]:
    return {
        **dict(one.activity),
        "rank": one.rank,
        "silent_seconds": _seconds(now - one.moved),
        "said_anything": one.anything,
    }


def _seconds(seconds: float) -> float:
    return round(max(0.0, seconds), 1)
