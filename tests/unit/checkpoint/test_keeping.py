"""Which checkpoints stay."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from sft_api.checkpoints import CheckpointId, RunState
from sft_api.progress import TerminationMessage
from sft_api.report import best_of, checkpoints_status, committed, last_checkpoints
from sft_api.v1alpha1.status import CheckpointStatus
from sft_trainer.checkpoint.catalog import KeepPolicy, describe, kept_by


def checkpoints(*losses: float | None, sets: tuple[str, ...] = ()) -> list[CheckpointStatus]:
    """Steps 100, 200, … with these evaluation losses, each of that of ``sets`` where there are some, newest first."""
    made = [
        describe(
            CheckpointId(1, 100 * number),
            "s3://b/run",
            datetime.now(UTC),
            10,
            RunState(metrics={"evalLoss": loss}, eval_data=dict.fromkeys(["held-out"], on) if on else {}),
        )
        for number, (loss, on) in enumerate(zip(losses, sets or [""] * len(losses), strict=True), start=1)
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


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        (KeepPolicy(last=2), [(2, 500), (1, 400)]),
        (KeepPolicy(last=1, best=2), [(2, 500), (1, 200)]),
        (KeepPolicy(last=1, every_steps=500), [(2, 500)]),
        (KeepPolicy(last=2, needed=lambda checkpoint: checkpoint.step == 500), [(2, 500), (1, 500), (1, 400)]),
    ],
)
def test_a_step_that_two_attempts_have_saved_counts_once(policy: KeepPolicy, kept: list[tuple[int, int]]) -> None:
    # Given a step that was saved by who was stopped, and once more by who made up its evaluation
    known = checkpoints(3.0, 1.0, 2.0, 4.0, 0.5)
    again = known[0].model_copy(update={"attempt": 2, "eval_loss": 0.4})
    assert [(entry.attempt, entry.step) for entry in kept_by(policy, [again, *known])] == kept


def test_of_equal_losses_the_newer_is_best() -> None:
    assert [entry.step for entry in best_of(checkpoints(1.0, 1.0, None))] == [200, 100]


@pytest.mark.parametrize(
    ("losses", "sets", "best"),
    [
        ((0.5, 1.9, 1.7), ("A", "B", "B"), 300),
        ((0.5, 1.7, 1.9), ("A", "B", "B"), 200),
        # Until anything was evaluated on the new data the best of the old one is worth keeping.
        ((0.5, 0.6, None), ("A", "A", "B"), 100),
        ((1.9, 0.5, 1.8), ("B", "A", "B"), 300),
        # What an earlier version evaluated on nobody knows.
        ((0.5, 1.9, 1.7), ("", "B", "B"), 100),
        ((0.5, 1.9, 1.7), ("A", "", ""), 100),
    ],
)
def test_only_losses_of_the_data_that_was_evaluated_on_last_are_compared(
    losses: tuple[float | None, ...], sets: tuple[str, ...], best: int
) -> None:
    known = checkpoints(*losses, sets=sets)
    assert best_of(known)[0].step == best
    assert best in [entry.step for entry in kept_by(KeepPolicy(last=1, best=1), known)]
    status = checkpoints_status(known)
    assert status.best == best_of(known)[0]
    # The last words of a pod have no room for what it was evaluated on.
    folder, words = committed(status)
    told = checkpoints_status(last_checkpoints(TerminationMessage(checkpoints_uri=folder, checkpoints=words)))
    assert told.best is not None
    assert told.best.step == best
    assert [entry.step for entry in told.kept] == [300, 200, 100]


def test_names_and_order_of_evaluation_sets_make_no_other_loss() -> None:
    one, other = RunState(eval_data={"a": "1", "b": "2"}), RunState(eval_data={"c": "2", "a": "1"})
    assert one.evaluated_on == other.evaluated_on != RunState(eval_data={"a": "1"}).evaluated_on
    assert RunState().evaluated_on == ""


def test_the_status_entry() -> None:
    (entry,) = checkpoints(1.5)
    assert entry.uri == "s3://b/run/checkpoints/step-00000100-a00001"
    assert entry.eval_loss == 1.5
    assert entry.verified
