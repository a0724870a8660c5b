"""What a run has come to, and what its checkpoints keep of it."""

import math
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from sft_api.checkpoints import Manifest, RunState
from sft_trainer.figures import Figures


def restarted(figures: Figures) -> Figures:
    """Those of a run that goes on from the checkpoint that recorded ``figures``."""
    run = RunState.model_validate_json(RunState.model_validate(figures.record()).model_dump_json(by_alias=True))
    manifest = Manifest(
        step=figures.step, attempt=1, job_uid="u", world_size=1, created=datetime.now(UTC), run=run, files=()
    )
    return Figures.recorded(manifest)


def evaluations(*losses: float, min_delta: float = 0.0, restarts: bool = False) -> Figures:
    """After an evaluation of each step; with ``restarts`` of as many attempts."""
    figures = Figures()
    for step, loss in enumerate(losses, 1):
        figures = Figures(**{**vars(figures), "step": step}).evaluated(loss, min_delta=min_delta)
        if restarts:
            figures = restarted(figures)
    return figures


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize(
    ("losses", "min_delta", "worse", "best"),
    [
        ((2.0, 1.0), 0.0, 0, 1.0),
        ((1.0, 1.0, 1.5), 0.0, 2, 1.0),
        ((2.0, 1.95, 1.9, 1.85), 0.1, 0, 1.85),
        ((2.0, 1.95, 1.93), 0.1, 2, 2.0),
        ((1.0, float("nan")), 0.0, 1, 1.0),
        ((float("nan"), 3.0), 0.0, 0, 3.0),
    ],
)
def test_evaluations_are_judged_by_the_best_whatever_restarts_there_were(
    losses: tuple[float, ...], min_delta: float, worse: int, best: float, restarts: bool
) -> None:
    figures = evaluations(*losses, min_delta=min_delta, restarts=restarts)
    assert (figures.worse_evaluations, figures.best_eval_loss) == (worse, best)


def test_an_evaluation_that_a_restart_repeats_counts_once() -> None:
    figures = restarted(evaluations(1.0, 1.5))
    again = figures.evaluated(1.5)
    assert (again.worse_evaluations, again.eval_loss, again.evaluated_at) == (1, 1.5, 2)


def test_the_last_evaluation_is_told_also_after_a_restart_at_a_later_step() -> None:
    evaluated = replace(evaluations(1.0), step=2).evaluated(1.5, 0.5, {"a": 1.25, "b": math.nan}, {"a": 0.75})
    at_once, later = restarted(evaluated), restarted(restarted(replace(evaluated, step=3)))
    assert (at_once.progress()["eval_loss"], at_once.begins_evaluated) == (1.5, True)
    assert (later.progress()["eval_loss"], later.begins_evaluated) == (1.5, False)
    for figures in (at_once, later):
        told = figures.progress()
        assert (told["eval_accuracy"], told["eval_accuracies"]) == (0.5, {"a": 0.75})
        assert told["eval_losses"] == {"a": 1.25, "b": None}
    assert later.record()["metrics"]["evalLoss"] is None, "a checkpoint is judged by its own step alone"


def test_what_the_last_step_told_is_known_after_a_restart() -> None:
    told = {"epoch": 1.5, "learning_rate": 1e-3, "grad_norm": None, "aux_loss": None}
    assert restarted(Figures(4, last_step=told)).last_step == told


def test_evaluations_of_other_data_are_judged_by_none_of_before() -> None:
    before = restarted(replace(evaluations(0.6, 0.5), step=3).evaluated(0.7, None, {"a": 0.7}))
    figures = before.evaluated_on_other_data()
    assert (figures.step, figures.eval_loss, figures.eval_losses, figures.first_eval_loss) == (3, None, {}, None)
    # Also one after the very step that was evaluated before.
    for step, loss in ((3, 1.9), (4, 1.7), (5, 1.5)):
        figures = replace(figures, step=step).evaluated(loss)
        assert (figures.best_eval_loss, figures.worse_evaluations) == (loss, 0)


def test_the_end_of_a_run_is_recorded_and_is_not_that_of_one_that_goes_on_from_it() -> None:
    ended = restarted(Figures(4, tokens_seen=7, stopped_early="after step 4: enough"))
    assert ended.stopped_early == "after step 4: enough"
    other = ended.as_another_run()
    assert (other.step, other.tokens_seen, other.stopped_early) == (4, 7, "")


def test_what_a_checkpoint_of_an_older_trainer_does_not_say_is_as_if_nothing_had_happened() -> None:
    manifest = Manifest(
        step=4, attempt=1, job_uid="u", world_size=1, created=datetime.now(UTC), run=RunState(cursor=4), files=()
    )
    assert Figures.recorded(manifest) == Figures(4)
