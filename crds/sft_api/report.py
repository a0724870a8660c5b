"""Pure: from what the trainer reports to what the status shows; the same in the cluster and with ``sft run``."""

import math
import re
from collections.abc import Sequence
from datetime import datetime

from .checkpoints import CheckpointId, checkpoint_id
from .progress import MOST_WARNINGS, CommittedCheckpoint, TerminationMessage, TrainingProgress
from .times import timestamp
from .v1alpha1.status import CheckpointsStatus, CheckpointStatus, ProgressStatus

_STOPPED_EARLY = "StoppedEarly"
_DUMMY_RUN = "DummyRunComplete"
_SHOWN_CHECKPOINTS = 10
_WARNING_CHARACTERS = 1000
_COUNTING = tuple(
    re.compile(beginning)
    for beginning in (
        r"for \S+, from \S+, nothing could be saved: ",
        r"(for \S+, from \S+, nothing could|nothing can) be exported\b",
        r"loss or gradients of ",
        r"a checkpoint was not saved, ",
        r"not exported to ",
        r"(not )?uploaded to ",
        r".+ fills up, as what is kept no longer cannot be removed: ",
    )
)
"""How warnings begin of which the newest says all: of an outage that ended, of one of exports whether it lasts or
not, of skipped steps, of saves that failed, of exports given up, of the upload, and of what could not be removed."""


def duration(seconds: float | None) -> str:
    """``seconds`` for people: 42s, 7m10s, 3h12m, 2d4h; empty for None and what is not finite."""
    if (exact := finite(seconds)) is None:
        return ""
    total = round(exact)
    if total < 60:
        return f"{total}s"
    if total < 3600:
        return f"{total // 60}m{total % 60}s"
    if total < 86400:
        return f"{total // 3600}h{total % 3600 // 60}m"
    return f"{total // 86400}d{total % 86400 // 3600}h"


def finite(value: float | None) -> float | None:
    """``value``, or None when it is NaN or infinite: JSON has no word for them."""
    return value if value is not None and math.isfinite(value) else None


def shown(value: float | None) -> float | None:
    """``value`` to five digits, as columns show it."""
    exact = finite(value)
    return None if exact is None else float(f"{exact:.5g}")


def what_is_complete(progress: ProgressStatus | None, reason: str, message: str) -> tuple[str, str]:
    """``reason`` and ``message`` of the condition ``Complete``, or those of a run that did not just make its steps."""
    if progress is not None and progress.dummy_run:
        return _DUMMY_RUN, f"training.dummyRun: {progress.dummy_run}"
    if progress is not None and progress.stopped_early:
        said = f"the run was stopped early, {progress.stopped_early}"
        return _STOPPED_EARLY, f"{message}; {said}" if message else said
    return reason, message


def with_told(known: Sequence[str], told: Sequence[str]) -> list[str]:
    """``known`` with what is ``told`` now, the newest last; of more than a status shows the oldest are left out.

    A sentence that is told no longer stays, unless it counts something and the next count is told. The same again
    changes nothing, so what was left out is no news in the next look.
    """
    new = dict.fromkeys(text[:_WARNING_CHARACTERS] for text in told)
    kinds = {_kind(text) for text in new}
    others = [text for text in known if text not in new and _kind(text) not in kinds]
    return [*others, *new][-MOST_WARNINGS:]


def _kind(warning: str) -> str:
    """What only one warning is shown of: what ``warning`` counts, else itself."""
    return next((counting.pattern for counting in _COUNTING if counting.match(warning)), warning)


def percent(step: int, total: int | None) -> int | None:
    """Steps done, in percent; None when nobody knows of how many."""
    return max(0, min(100, step * 100 // total)) if total else None


def progress_status(training: TrainingProgress) -> ProgressStatus:
    """``status.progress`` for a report of the trainer."""
    total = training.total_steps
    return ProgressStatus(
        step=training.step,
        total_steps=total,
        summary=f"{training.step}/{total}" if total else (str(training.step) if training.step else ""),
        percent=percent(training.step, total),
        phase=training.phase.value,
        epoch=shown(training.epoch),
        loss=shown(training.loss),
        first_loss=shown(training.first_loss),
        # As exact as the trainer says it: it is what an export is checked against.
        eval_loss=finite(training.eval_loss),
        first_eval_loss=finite(training.first_eval_loss),
        eval_accuracy=shown(training.eval_accuracy),
        learning_rate=shown(training.learning_rate),
        grad_norm=shown(training.grad_norm),
        aux_loss=shown(training.aux_loss),
        tokens_per_second=shown(training.tokens_per_second),
        tokens_per_second_per_gpu=shown(training.tokens_per_second_per_gpu),
        model_flops_utilization=shown(training.model_flops_utilization),
        tokens_seen=training.tokens_seen,
        stopped_early=training.stopped_early,
        dummy_run=training.dummy_run,
        curve=training.curve_uri or "",
        remaining=duration(training.remaining_seconds),
        update_time=timestamp(training.update_time),
    )


def checkpoint_status(
    identity: CheckpointId, uri: str, time: datetime, size_bytes: int, eval_loss: float | None, eval_data: str = ""
) -> CheckpointStatus:
    """The entry of ``status.checkpoints`` for a verified checkpoint in the folder ``uri``.

    ``eval_data``: ``RunState.evaluated_on``.
    """
    return CheckpointStatus(
        step=identity.step,
        attempt=identity.attempt,
        uri=uri,
        time=timestamp(time),
        size_bytes=size_bytes,
        verified=True,
        eval_loss=eval_loss,
        eval_data=eval_data,
    )


def best_of(checkpoints: Sequence[CheckpointStatus]) -> list[CheckpointStatus]:
    """Of ``checkpoints``, newest first, those whose evaluation losses can be compared, lowest first; of equal ones the
    newer.

    Losses of other data than was evaluated on last cannot. What earlier versions evaluated on is not known: it counts
    as the same.
    """
    with_loss = [entry for entry in checkpoints if entry.eval_loss is not None]
    last = next((entry.eval_data for entry in with_loss if entry.eval_data), "")
    comparable = [entry for entry in with_loss if entry.eval_data in ("", last)]
    return sorted(comparable, key=lambda entry: (entry.eval_loss, -entry.attempt, -entry.step))


def checkpoints_status(verified: Sequence[CheckpointStatus]) -> CheckpointsStatus:
    """``status.checkpoints`` for all that are kept, newest first; of equally good ones the newer is the best."""
    return CheckpointsStatus(
        latest=verified[0] if verified else None,
        best=next(iter(best_of(verified)), None),
        kept=list(verified[:_SHOWN_CHECKPOINTS]),
    )


def committed(checkpoints: CheckpointsStatus) -> tuple[str, list[CommittedCheckpoint]]:
    """The folder of ``checkpoints`` and their entries, as a termination message has room for; none when it has not."""
    entries = checkpoints.kept or [entry for entry in (checkpoints.latest,) if entry]
    if checkpoints.best and checkpoints.best not in entries:
        entries = [*entries[: _SHOWN_CHECKPOINTS - 1], checkpoints.best]
    if not entries or len(parent := entries[0].uri.rpartition("/")[0]) > 1000 or not parent.isascii():
        return "", []
    # Whoever reads them takes the lowest loss for the best.
    comparable = best_of(entries)
    return parent, [
        CommittedCheckpoint(
            folder=entry.uri.rpartition("/")[2],
            time=datetime.fromisoformat(entry.time),
            size_bytes=entry.size_bytes,
            eval_loss=entry.eval_loss if entry in comparable else None,
        )
        for entry in entries
    ]


def last_checkpoints(end: TerminationMessage) -> list[CheckpointStatus]:
    """What ``committed`` put into a termination message."""
    # Verified: rank 0 checks every file before it commits, and tells only of what it committed.
    return [
        checkpoint_status(one, f"{end.checkpoints_uri}/{entry.folder}", entry.time, entry.size_bytes, entry.eval_loss)
        for entry in end.checkpoints
        if (one := checkpoint_id(entry.folder))
    ]
