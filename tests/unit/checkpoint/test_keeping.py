"""Which checkpoints stay."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from sft_api.checkpoints import CheckpointId, RunState
from sft_api.v1alpha1.status import CheckpointStatus
from sft_trainer.checkpoint.catalog import KeepPolicy, best_of, describe, kept_by


def checkpoints(*losses: float | None) -> list[CheckpointStatus]:
    """Steps 100, 200, … with these evaluation losses, newest first."""
    made = [
        describe(
            CheckpointId(1, 100 * number), "s3://b/run", datetime.now(UTC), 10, RunState(metrics={"evalLoss": loss})
        )
        for number, loss in enumerate(losses, start=1)
    ]
    return made[::-1]


@pytest.mark.parametrize(
    ("policy", "steps"),
    [
        (KeepPolicy(last=1), [500]),
        (KeepPolicy(last=2), [500, 400]),
        (KeepPolicy(last=0), [500]),
        (KeepPolicy(last=9), [500, 400, 300, 200, 100]),
        (KeepPolicy(last=1, best=1), [500, 200]),
        (KeepPolicy(last=1, best=2), [500, 300, 200]),
        (KeepPolicy(last=1, every_steps=200), [500, 400, 200]),
        (KeepPolicy(last=1, needed=lambda checkpoint: checkpoint.step == 300), [500, 300]),
    ],
)
def test_keep(policy: KeepPolicy, steps: list[int]) -> None:
    assert [entry.step for entry in kept_by(policy, checkpoints(3.0, 1.0, 2.0, None, 4.0))] == steps


def test_of_equal_losses_the_newer_is_best() -> None:
    assert [entry.step for entry in best_of(checkpoints(1.0, 1.0, None))] == [200, 100]


def test_the_status_entry() -> None:
    (entry,) = checkpoints(1.5)
    assert entry.uri == "s3://b/run/checkpoints/step-00000100-a00001"
    assert entry.eval_loss == 1.5
    assert entry.verified
