"""Pure: where the time of a run's GPUs went. The same in the cluster and with ``sft run``.

The rule: ``gpuSeconds`` are GPUs times the seconds that pods were bound to them, told by whoever starts the pods. What
the group did in them the trainer tells, as figures that only grow while its pod lives; ``waiting`` is the rest, so that
all parts add up. A step is productive once a checkpoint of the curve holds it: each checkpoint records the seconds of
all steps before it, whichever attempts made them. A job without GPUs counts its processes instead.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import Literal, NamedTuple

from pydantic.alias_generators import to_camel

from .times import timestamp
from .v1alpha1.goodput import Activities, GoodputMarks, GoodputStatus, LostGpuSeconds, SpentSeconds

_LOST = tuple(Activities.model_fields)
"""Parts that are called alike in what is reported and in what is lost."""
SPENT = ("steps", *_LOST)
"""Parts of ``SpentSeconds`` that add up to what a group did."""


class Devices(NamedTuple):
    """What a job's time is counted in."""

    counted: Literal["GPUs", "Processes"]
    per_pod: int
    pods: int

    @property
    def all(self) -> int:
        """Of the whole group."""
        return self.per_pod * self.pods


def followed_by(earlier: SpentSeconds, later: SpentSeconds) -> SpentSeconds:
    """Both together; ``later`` is of a start after all those of ``earlier``."""
    started = later.curve_began is not None
    return SpentSeconds(
        **{name: getattr(earlier, name) + getattr(later, name) for name in SPENT},
        curve_began=later.curve_began if earlier.curve_began is None else earlier.curve_began,
        # After a checkpoint that proved damaged a run goes back behind what it had saved: that was productive once, and
        # doing it again is lost.
        curve_saved=max(earlier.curve_saved, later.curve_saved),
        curve_now=later.curve_now if started else earlier.curve_now,
    )


def account(
    previous: GoodputStatus | None,
    devices: Devices,
    *,
    gpu_seconds: float,
    until: datetime,
    spent: SpentSeconds | None = None,
    reporter: str = "",
) -> GoodputStatus:
    """The account up to ``until``, in which pods were bound to GPUs for ``gpu_seconds`` in all.

    ``spent`` is what the pod ``reporter`` told last, None when nothing was told. Only what is unsaved ever shrinks, by
    as much as the other parts grow.
    """
    known = previous or GoodputStatus(counted=devices.counted)
    marks = known.marks or GoodputMarks(until=timestamp(until))
    earlier = marks.earlier
    if spent is not None and reporter != marks.reporter and marks.reporter:
        earlier = _reported(known, devices, marks.curve_began)
    reported = followed_by(earlier or SpentSeconds(), spent) if spent is not None else None
    parts = _parts(known, devices, reported) if reported is not None else known
    lost, before = parts.lost_gpu_seconds, known.lost_gpu_seconds
    others = sum(getattr(lost, name) for name in (*_LOST, "repeated_steps"))
    others += parts.productive_gpu_seconds + parts.unsaved_gpu_seconds
    total = max(gpu_seconds, known.gpu_seconds, others + before.waiting)
    return parts.model_copy(
        update={
            "gpu_seconds": round(total, 3),
            "percent": int(100 * parts.productive_gpu_seconds / total) if total > 0 else None,
            "lost_gpu_seconds": lost.model_copy(update={"waiting": round(max(0.0, total - others), 3)}),
            "marks": GoodputMarks(
                until=timestamp(until),
                reporter=reporter if spent is not None else marks.reporter,
                earlier=earlier,
                curve_began=marks.curve_began if reported is None else reported.curve_began,
            ),
        }
    )


def _parts(known: GoodputStatus, devices: Devices, spent: SpentSeconds) -> GoodputStatus:
    """All but ``waiting``, which is what is left, and the marks."""
    number, before = devices.all, known.lost_gpu_seconds
    began = spent.curve_began
    curve = spent.curve_saved - began if began is not None else 0.0
    steps = number * spent.steps
    productive = max(known.productive_gpu_seconds, min(number * curve, steps))
    not_productive = max(0.0, steps - productive)
    unsaved = min(max(0.0, number * (spent.curve_now - spent.curve_saved)), not_productive)
    repeated = max(before.repeated_steps, not_productive - unsaved)
    lost = {name: round(max(getattr(before, name), number * getattr(spent, name)), 3) for name in _LOST}
    return known.model_copy(
        update={
            "productive_gpu_seconds": round(productive, 3),
            "unsaved_gpu_seconds": round(max(0.0, not_productive - repeated), 3),
            "lost_gpu_seconds": LostGpuSeconds(**lost, repeated_steps=round(repeated, 3), waiting=before.waiting),
        }
    )


def _reported(known: GoodputStatus, devices: Devices, began: float | None) -> SpentSeconds:
    """What was reported so far, by all pods: the account says it in other words."""
    number, lost = max(1, devices.all), known.lost_gpu_seconds
    steps = known.productive_gpu_seconds + known.unsaved_gpu_seconds + lost.repeated_steps
    saved = (began or 0.0) + known.productive_gpu_seconds / number
    return SpentSeconds(
        **{name: getattr(lost, name) / number for name in _LOST},
        steps=steps / number,
        curve_began=began,
        curve_saved=saved,
        curve_now=saved + known.unsaved_gpu_seconds / number,
    )


CAUSES: Mapping[str, str] = {
    "starting": "starting and loading",
    "repeated_steps": "steps that were lost",
    "saving": "waiting for saves",
    "evaluating": "evaluation",
    "exporting": "export",
    "hanging": "hanging",
    "storage_outage": "waiting for the store",
    "waiting": "waiting, recovery",
}
"""Fields of ``LostGpuSeconds``, as people read them."""
LOST_CAUSES: Mapping[str, str] = {name: to_camel(name) for name in CAUSES}
"""The same, as they stand in a status."""
