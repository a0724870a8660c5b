"""When a run evaluates and saves: the order of what ``Trainer.run`` does, its sentences replaced by their names."""

import math
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sft_api.checkpoints import CheckpointId, Manifest, RunState
from sft_api.progress import Activity, Phase
from sft_api.report import checkpoints_status
from sft_api.rundir import ACTIVITY_FOLDER
from sft_api.v1alpha1.status import CheckpointsStatus, CheckpointStatus
from sft_trainer import evaluate as evaluating
from sft_trainer import trainer
from sft_trainer.due import EvaluatesWhenDue, Intervals
from sft_trainer.errors import StopRequested, StorageFullError
from sft_trainer.events import (
    Asking,
    Control,
    Ended,
    Evaluated,
    Finishing,
    Listener,
    Listeners,
    Outcome,
    Request,
    Resumed,
    SaveBegins,
    SaveEnded,
    Started,
    StepDone,
)
from sft_trainer.figures import Figures
from sft_trainer.reporting import Reporting
from sft_trainer.topology import Topology
from sft_trainer.trainer import Trainer
from tests.unit.data.examples import FakeExamples
from tests.unit.trainer.stories import BareRun


def step_done(step: int, **fields: Any) -> StepDone:
    figures = {"loss": 1.0, "grad_norm": 1.0, "learning_rate": 1.0, "epoch": 0.5, "tokens": 1, "trained_tokens": 1}
    times = {"seconds": 1.0, "time": 0.0, "processes": 1, "peak_flops_share": None}
    return StepDone(**{"step": step, **figures, **times, "save_in_flight": False, "figures": Figures(step), **fields})


class Story(BareRun):
    """Writes down what it does.

    ``happens`` in a step: stop, timer (everySeconds is over), skip (not finite), upload (of the last save goes on).
    """

    def __init__(
        self, folder: Path, happens: dict[int, str], *, listeners: Sequence[Listener] = (), **sections: Any
    ) -> None:
        super().__init__(folder, 6, listeners, **sections)
        self.happens = happens
        self.eval_losses: dict[int, float] = {}
        """By step; 1.0 where there is none."""
        self.saving.settle = lambda: self.told.append("settle")  # type: ignore[method-assign]
        self.saving.hurry = lambda: self.told.append(f"hurry {self.step}")  # type: ignore[method-assign]
        # Of two passes and a fifth
        self.prepared = SimpleNamespace(  # type: ignore[assignment]
            total_steps=6, steps=SimpleNamespace(steps_per_epoch=Fraction(5, 2))
        )
        self.strategy = SimpleNamespace(loaded=lambda: None, updates=1)  # type: ignore[assignment]

    def _feed(self) -> Any:
        return SimpleNamespace(close=lambda: None)

    def _train_step(self) -> None:
        happens = self.happens.get(self.step + 1, "")
        self.saving.seconds_since_save = 10**9 if happens == "timer" else 0  # type: ignore[misc]
        if "stop" in happens:
            self._stop_file.touch()
        self.events.emit(Asking(self.step + 1))
        self.control.agree(self.control.asked())
        self.step += 1
        uploads = happens in ("upload", "stop")
        loss = math.nan if "skip" in happens else 1.0
        self.events.emit(step_done(self.step, loss=loss, save_in_flight=uploads))

    def _evaluate(self) -> None:
        if self.figures.evaluated_at != self.step:
            self.figures = replace(self.figures, step=self.step).evaluated(self.eval_losses.get(self.step, 1.0))
            self.told.append(f"evaluate {self.step}")
            self.events.emit(Evaluated(self.step, 1.0, {"held-out": 1.0}, 0.5, {"held-out": 0.5}, self.figures))

    def _save(self, *, final: bool = False) -> None:
        self.told.append(f"save {self.step}{' at the end' if final else ''}")
        self.events.emit(SaveBegins(self.step, final=final))
        self.events.emit(SaveEnded(self.step, final=final))


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "join_group", lambda *_: None)
    monkeypatch.setattr(trainer, "sum_over_ranks", lambda values, device: values)


def told(folder: Path, happens: dict[int, str], **sections: Any) -> list[str]:
    story = Story(folder, happens, **sections)
    story.run()
    return story.told


def test_a_timer_that_ends_at_the_last_step_saves_it_once_and_evaluated(tmp_path: Path) -> None:
    assert told(tmp_path, {2: "timer", 6: "timer"}) == ["save 2", "evaluate 6", "save 6 at the end"]


def test_a_save_that_waited_for_finite_gradients_does_not_come_before_the_last_evaluation(tmp_path: Path) -> None:
    events = {4: "skip", 5: "skip"}
    assert told(tmp_path, events, checkpoint={"everySteps": 4}) == ["evaluate 6", "save 6 at the end"]


def test_an_evaluation_is_saved_where_the_best_checkpoints_are_kept(tmp_path: Path) -> None:
    training = {"steps": 6, "evaluation": {"everySteps": 2, "beforeTraining": True}}
    evaluated = ["evaluate 0", "evaluate 2", "evaluate 4", "evaluate 6"]
    assert told(tmp_path, {}, training=training) == [*evaluated, "save 6 at the end"]
    best = {"keep": {"best": 1}}
    assert told(tmp_path, {}, training=training, checkpoint=best) == [
        "evaluate 0",
        *("evaluate 2", "save 2"),
        *("evaluate 4", "save 4"),
        *("evaluate 6", "save 6 at the end"),
    ]


@pytest.mark.parametrize(
    ("epochs", "evaluated"),
    [(1, [3, 5, 6]), (0.5, [2, 3, 4, 5, 6]), (0.1, [1, 2, 3, 4, 5, 6]), (2, [5, 6]), (2.4, [6]), (3, [6])],
)
def test_intervals_in_passes_end_with_the_step_in_which_so_much_of_a_pass_is_done(
    tmp_path: Path, epochs: float, evaluated: list[int]
) -> None:
    training = {"steps": 6, "evaluation": {"everyEpochs": epochs}}

    happened = told(tmp_path, {}, training=training, checkpoint={"everyEpochs": epochs})

    assert [event for event in happened if event.startswith("evaluate")] == [f"evaluate {step}" for step in evaluated]
    saved = [f"save {step}" for step in evaluated[:-1]]
    assert [event for event in happened if event.startswith("save")] == [*saved, "save 6 at the end"]


def test_a_tenth_of_a_pass_is_what_is_written(tmp_path: Path) -> None:
    # The binary number nearest to 0.1 is a little more: after step 10 it would not be done.
    spec = Story(tmp_path, {}, training={"evaluation": {"everyEpochs": 0.1}}).spec
    intervals = Intervals.of(spec, lambda: Fraction(100))
    assert [step for step in range(1, 31) if intervals.planned(step)] == [10, 20, 30]


def test_a_save_is_put_off_while_the_last_one_is_being_uploaded(tmp_path: Path) -> None:
    events = {2: "upload", 3: "upload"}
    # The one that goes on is told to hurry.
    expected = ["hurry 2", "hurry 3", "save 4", "evaluate 6", "save 6 at the end"]
    assert told(tmp_path, events, checkpoint={"everySteps": 2}) == expected
    # But not one that is to be kept for ever, nor that of what may be the best, nor the last one.
    kept = {"everySteps": 2, "keep": {"everySteps": 2}}
    assert told(tmp_path, events, checkpoint=kept) == ["save 2", "save 4", "evaluate 6", "save 6 at the end"]
    training = {"steps": 6, "evaluation": {"everySteps": 3}}
    checkpoint = {"keep": {"best": 1}}
    assert told(tmp_path, {3: "upload", 6: "upload"}, training=training, checkpoint=checkpoint) == [
        *("evaluate 3", "save 3"),
        *("evaluate 6", "save 6 at the end"),
    ]


def test_what_stops_is_saved_once(tmp_path: Path) -> None:
    story = Story(tmp_path, {4: "stop"}, checkpoint={"everySteps": 2})
    with pytest.raises(StopRequested, match="stopped after step 4"):
        story.run()
    assert story.told == ["save 2", "save 4 at the end"]


def test_a_stop_after_skipped_steps_leaves_the_last_good_checkpoint_the_newest(tmp_path: Path) -> None:
    story = Story(tmp_path, {3: "skip", 4: "skip and stop"}, checkpoint={"everySteps": 2})
    saved = CheckpointStatus(
        step=2, attempt=1, uri="file:///x", time="2026-01-01T00:00:00Z", size_bytes=1, verified=True
    )
    story.saving.checkpoints = checkpoints_status([saved])  # type: ignore[misc]
    with pytest.raises(
        StopRequested, match=r"4, which is not saved: .* last 2 steps .* the checkpoint of step 2 is kept"
    ):
        story.run()
    assert story.told == ["save 2", "settle"]


def test_a_listener_watches_the_whole_run_and_asks_for_more(tmp_path: Path) -> None:
    heard: list[str] = []

    class Callback(Listener):
        """Like one of a user: it knows what it hears, and nothing of the loop."""

        def on_start(self, event: Started, control: Control) -> None:
            heard.append(f"start {event.step}/{event.total_steps}")

        def on_step(self, event: StepDone, control: Control) -> None:
            heard.append(f"step {event.step}")
            if event.step == 1:
                control.ask(Request.SAVE)
            if event.step == 3:
                control.ask(Request.EVALUATE)
            if event.step == 4:
                control.ask(Request.STOP)

        def on_evaluate(self, event: Evaluated, control: Control) -> None:
            heard.append(f"evaluate {event.step}")

        def on_save(self, event: SaveEnded, control: Control) -> None:
            heard.append(f"save {event.step}")

    story = Story(tmp_path, {}, listeners=[Callback()])
    with pytest.raises(StopRequested, match="stopped after step 5"):
        story.run()

    # It is done after the step that is agreed on next.
    assert story.told == ["save 2", "evaluate 4", "save 5 at the end"]
    assert heard == [
        *("start 0/6", "step 1", "step 2", "save 2", "step 3", "step 4", "evaluate 4", "step 5", "save 5"),
    ]


def test_an_error_of_a_listener_ends_the_run_as_what_it_is(tmp_path: Path) -> None:
    class Broken(Listener):
        def on_step(self, event: StepDone, control: Control) -> None:
            raise StorageFullError("no room for what I write")

    story = Story(tmp_path, {}, listeners=[Broken()])
    with pytest.raises(StorageFullError, match="no room for what I write"):
        story.run()
    assert (story.step, story.told) == (1, [])


def test_what_is_done_is_said_between_the_steps(tmp_path: Path) -> None:
    said: list[tuple[Phase, str]] = []

    class Watching(Listener):
        def on_ask(self, event: Asking, control: Control) -> None:
            said.append((story.reporter.progress.phase, story.reporter.progress.phase_detail))
            # As what they do says it.
            story.reporter.phase(Phase.SAVING, "step before")

        def on_end(self, event: Ended, control: Control) -> None:
            said.append((story.reporter.progress.phase, story.reporter.progress.phase_detail))

    training = {"steps": 6, "evaluation": {"everySteps": 2, "beforeTraining": True}}
    story = Story(tmp_path, {3: "timer"}, listeners=[Watching()], training=training)
    story.run()
    assert said == [(Phase.LOADING, "the first step"), *[(Phase.TRAINING, "")] * 5, (Phase.COMPLETE, "")]


def ends(folder: Path, happens: dict[int, str], *others: Listener) -> tuple[list[Ended], BaseException | None]:
    """Every end that a listener after ``others`` is told of in a run, and what the run raised."""
    told: list[Ended] = []

    class Hears(Listener):
        def on_end(self, event: Ended, control: Control) -> None:
            told.append(event)

    try:
        Story(folder, happens, listeners=[*others, Hears()]).run()
    except BaseException as error:
        return told, error
    return told, None


def test_however_a_run_ends_its_listeners_are_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Breaks(Listener):
        def on_step(self, event: StepDone, control: Control) -> None:
            if event.step == 3:
                raise KeyboardInterrupt

    (complete,), none = ends(tmp_path / "complete", {})
    assert (complete.outcome, complete.step, complete.error, none) == (Outcome.COMPLETE, 6, None, None)

    (stopped,), asked = ends(tmp_path / "stopped", {4: "stop"})
    assert (stopped.outcome, stopped.step) == (Outcome.STOPPED, 4)
    assert isinstance(asked, StopRequested)
    assert stopped.error is asked

    (failed,), broken = ends(tmp_path / "failed", {}, Breaks())
    assert (failed.outcome, failed.step) == (Outcome.FAILED, 3)
    assert isinstance(broken, KeyboardInterrupt)
    assert failed.error is broken

    # Also where there was no loop yet
    monkeypatch.setattr(Story, "_build", lambda _: (_ for _ in ()).throw(StorageFullError("no room")))
    (early,), full = ends(tmp_path / "early", {})
    assert (early.outcome, early.step, early.error) == (Outcome.FAILED, 0, full)
    assert isinstance(full, StorageFullError)


def test_a_listener_that_fails_at_the_end_hides_neither_the_error_before_nor_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class FailsAtTheEnd(Listener):
        def __init__(self, words: str) -> None:
            self._words = words

        def on_end(self, event: Ended, control: Control) -> None:
            raise RuntimeError(self._words)

    told, error = ends(tmp_path / "stopped", {4: "stop"}, FailsAtTheEnd("the tracker is away"))
    assert len(told) == 1
    assert isinstance(error, StopRequested)
    assert "FailsAtTheEnd failed at the end of the run" in caplog.text
    assert "the tracker is away" in caplog.text

    # A run that nothing else was wrong with fails with the first of them; it was told that it is complete.
    listeners = FailsAtTheEnd("the first"), FailsAtTheEnd("the second")
    (complete,), error = ends(tmp_path / "complete", {}, *listeners)
    assert complete.outcome is Outcome.COMPLETE
    assert str(error) == "the first"
    assert "the second" in caplog.text


def test_a_process_that_is_alone_reads_nothing_to_compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    monkeypatch.setattr(trainer, "fingerprint", lambda *_: read.append("weights"))
    monkeypatch.setattr(trainer, "check_alike", lambda _: read.append("others"))
    story = Story(tmp_path, {})

    Trainer._compare(story)
    assert read == []

    story.topology = Topology(rank=0, local_rank=0, world_size=2, shard=2)
    Trainer._compare(story)
    assert read == ["weights", "others"]


def test_what_all_processes_do_at_once_is_said_as_a_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[tuple[Phase, str]] = []

    def look() -> None:
        activity = Activity.model_validate_json((tmp_path / ACTIVITY_FOLDER / "rank-0.json").read_bytes())
        said.append((activity.phase, activity.detail))

    def forms_a_group(ranks: Any, device: Any, forming: Any, timeout: Any) -> None:
        look()
        with forming():
            look()

    def adds_up(values: list[Any], device: Any) -> list[float]:
        look()
        return [1.0 for _ in values]

    # Given a process that is not alone
    story = Story(tmp_path, {})
    assert story.topology.forming == story._forming
    story.topology = Topology(rank=0, local_rank=0, world_size=2, shard=2)
    story.device = torch.device("cpu")
    story.prepared = SimpleNamespace(eval={"a": FakeExamples([4, 4, 4])})  # type: ignore[assignment]
    story.strategy.forward_sums = lambda bins: torch.ones((2,), dtype=torch.float64)  # type: ignore[method-assign]
    story.events = Listeners([Reporting(story.reporter)], story.control)
    monkeypatch.setattr(trainer, "join_group", forms_a_group)
    monkeypatch.setattr(evaluating, "sum_over_ranks", adds_up)
    monkeypatch.setattr(trainer, "summed", lambda values, device: torch.tensor(values))

    # When it meets the others, and evaluates
    story._meet()
    Trainer._evaluate(story)

    # Then the rendezvous, the group and the last sum have words of their own, which say whom it waits for
    waits = "for the other processes"
    assert said == [
        (Phase.WAITING, waits),
        *((Phase.WAITING, f"{waits}, {what}") for what in ("to form a group", "to add the evaluation up")),
    ]
    assert story.reporter.progress.phase is Phase.EVALUATING, "what the group does is not changed by it"

    # And a process that is alone waits for nobody
    said.clear()
    story.topology, story.figures = Topology(rank=0, local_rank=0, world_size=1), Figures()
    Trainer._evaluate(story)
    assert [phase for phase, _ in said] == [Phase.EVALUATING]


def test_weights_are_waited_for_before_anything_is_made_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[str] = []

    def adds_up(values: list[Any], device: Any) -> list[Any]:
        activity = Activity.model_validate_json((tmp_path / ACTIVITY_FOLDER / "rank-0.json").read_bytes())
        happened.append(f"{activity.phase}: {activity.detail}")
        return values

    # Given a process that is not alone, and layers that all processes compile together
    story = Story(tmp_path, {})
    story.topology = Topology(rank=0, local_rank=0, world_size=2, shard=2)
    monkeypatch.setattr(trainer, "sum_over_ranks", adds_up)
    monkeypatch.setattr(story, "_resume_or_load", lambda: happened.append("read"))
    story.strategy.loaded = lambda: happened.append("compiled")  # type: ignore[method-assign]

    # When it has read its weights, and others perhaps not
    story.run()

    # Then it says that it waits, and does not say that it compiles
    waits = "waiting: for the other processes"
    assert [each.lower() for each in happened[:4]] == [
        "read",
        f"{waits}, to have read the weights",
        "compiled",
        f"{waits}, to begin",
    ]


@pytest.mark.parametrize(
    ("step", "eval_loss", "asks"),
    [(4, None, True), (4, 1.5, False), (3, None, False), (6, None, False)],
    ids=["left", "evaluated", "not due", "the last one, evaluated anyway"],
)
def test_an_evaluation_that_was_left_is_made_up_for(
    tmp_path: Path, step: int, eval_loss: float | None, asks: bool
) -> None:
    # Given evaluations every second step, and a checkpoint of one with or without its loss
    story = Story(tmp_path, {}, training={"steps": 6, "evaluation": {"everySteps": 2}})
    due = EvaluatesWhenDue(story.spec, Intervals.of(story.spec, lambda: Fraction(5, 2)))
    figures = Figures(step, eval_loss=eval_loss, begins_evaluated=eval_loss is not None)

    due.on_resume(Resumed(CheckpointId(1, step), figures, CheckpointsStatus(), []), story.control)
    due.on_start(Started(step, 6), story.control)

    assert story.control.asks(Request.EVALUATE) is asks


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("begins", [True, False], ids=["begins", "goes on"])
def test_what_begins_with_a_checkpoint_of_another_run_is_evaluated_before_its_first_step(
    tmp_path: Path, begins: bool, before: bool
) -> None:
    # Given a checkpoint of step 4 that was evaluated, of another run or of this one
    story = Story(tmp_path, {}, training={"steps": 6, "evaluation": {"beforeTraining": before}})
    due = EvaluatesWhenDue(story.spec, Intervals.of(story.spec, lambda: Fraction(5, 2)))
    resumed = Resumed(
        CheckpointId(1, 4), Figures(4, eval_loss=1.5, begins_evaluated=True), CheckpointsStatus(), [], begins
    )

    due.on_resume(resumed, story.control)
    due.on_start(Started(4, 6), story.control)

    assert story.control.asks(Request.EVALUATE) is (begins and before)


@pytest.mark.parametrize("end", ["", "asked for", "agreed on"])
def test_who_is_asked_to_stop_within_an_evaluation_saves_and_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    # Given an evaluation within which the word to stop is left, of a step after which a callback may have ended the run
    story = Story(tmp_path, {})
    story.device = torch.device("cpu")
    story.step, story.figures = 4, Figures(4)
    story.prepared = SimpleNamespace(eval={"a": FakeExamples([400, 400, 400])}, total_steps=6)  # type: ignore[assignment]
    computed = []

    def forward_sums(bins: Any) -> torch.Tensor:
        computed.append(bins)
        if len(computed) == 2:
            (tmp_path / "stop").touch()
        return torch.ones((2,), dtype=torch.float64)

    story.strategy.forward_sums = forward_sums  # type: ignore[method-assign]
    story._claim()
    monkeypatch.setattr(trainer, "summed", lambda values, device: torch.tensor(values))
    if end:
        (story.control.ask if end == "asked for" else story.control.decide)(Request.FINISH, "it was asked to")

    # When it goes on, then it ends there, with its step saved
    with pytest.raises(StopRequested, match="stopped after step 4, which is saved"):
        Trainer._evaluate(story)
    assert len(computed) == 2
    assert story.told == ["save 4 at the end"]
    assert story.figures.evaluated_at == -1
    # And with the end that was asked for: nobody who goes on there asks again
    assert story.figures.stopped_early == ("after step 4: it was asked to" if end else "")
    # And that it was left is known to whoever goes on, also where a callback had asked for it
    run = RunState.model_validate({**story.figures.record(), "updates": 4})
    saved = Manifest(step=4, attempt=1, job_uid="u", world_size=1, created=datetime.now(UTC), run=run, files=())
    due, control = EvaluatesWhenDue(story.spec, story.intervals), Control()
    due.on_resume(Resumed(saved.id, Figures.recorded(saved), CheckpointsStatus(), []), control)
    due.on_start(Started(4, 6), control)
    assert control.asks(Request.EVALUATE)


class Hears(Listener):
    """Keeps why a run was stopped early, and how it ended."""

    why = ""
    outcome: Outcome | None = None

    def on_finish(self, event: Finishing, control: Control) -> None:
        self.why = event.figures.stopped_early

    def on_end(self, event: Ended, control: Control) -> None:
        self.outcome = event.outcome


EARLY = {"training": {"steps": 6, "evaluation": {"everySteps": 1, "earlyStopping": {"patience": 2}}}}


def test_a_run_that_gets_no_better_is_complete_where_it_was_seen(tmp_path: Path) -> None:
    hears = Hears()
    story = Story(tmp_path, {}, listeners=[hears], checkpoint={"keep": {"best": 1}}, **EARLY)
    story.eval_losses = {1: 1.5, 2: 1.25, 3: 1.25, 4: 1.3}

    story.run()

    # Neither saved twice nor trained further
    each = [word for step in (1, 2, 3) for word in (f"evaluate {step}", f"save {step}")]
    assert story.told == [*each, "evaluate 4", "save 4 at the end"]
    assert hears.outcome is Outcome.COMPLETE
    assert hears.why == (
        "after step 4: the evaluation loss was not better than 1.2500 in 2 evaluations "
        "(training.evaluation.earlyStopping)"
    )
    assert story.reporter.progress.stopped_early == hears.why
    assert (story.reporter.progress.phase, story.reporter.progress.remaining_seconds) == (Phase.COMPLETE, None)


def test_a_run_that_goes_on_from_its_last_checkpoint_makes_no_step_more(tmp_path: Path) -> None:
    story = Story(tmp_path, {}, **EARLY)
    story.step, story.figures = 4, Figures(4, eval_loss=1.0, evaluated_at=4, stopped_early="after step 4: so it was")

    story.run()

    assert story.told == ["save 4 at the end"]


@pytest.mark.parametrize(
    ("evaluated_on", "told"),
    [
        ("A", ["evaluate 3", "evaluate 4", "save 4 at the end"]),
        ("B", [*(f"evaluate {step}" for step in (2, 3, 4, 5, 6)), "save 6 at the end"]),
    ],
)
def test_a_run_that_goes_on_is_judged_by_losses_of_the_data_of_now(
    tmp_path: Path, evaluated_on: str, told: list[str]
) -> None:
    # Given a checkpoint that was evaluated on A, far better than any evaluation to come
    figures = Figures(2).evaluated(0.5)
    run = RunState.model_validate({**figures.record(), "updates": 2, "eval_data": {"held-out": "A"}})
    saved = Manifest(step=2, attempt=1, job_uid="u", world_size=1, created=datetime.now(UTC), run=run, files=())

    class GoesOn(Story):
        def _resume_or_load(self) -> None:
            self._go_on_after(saved, Figures.recorded(saved), [])

    story = GoesOn(tmp_path, {}, **EARLY)
    sets = {"held-out": SimpleNamespace(digest=evaluated_on)}
    story.prepared = SimpleNamespace(  # type: ignore[assignment]
        total_steps=6, train=(), eval=sets, model=SimpleNamespace(digest=""), companions={}
    )
    # When each of these is better than the one before
    story.eval_losses = {2: 2.0, 3: 1.9, 4: 1.7, 5: 1.5, 6: 1.4}
    story.run()

    # Then only what is judged by A is no better
    assert story.told == told
    warned = [text for text in story.reporter.progress.warnings if "evaluation data" in text]
    assert len(warned) == (evaluated_on == "B")


def test_a_stop_within_the_step_that_finishes_the_run_loses_nothing_of_that(tmp_path: Path) -> None:
    story = Story(tmp_path, {3: "stop"}, **EARLY)
    with pytest.raises(StopRequested):
        story.run()
    assert story.told[-1] == "save 3 at the end"
    assert story.figures.stopped_early, "the checkpoint records it"


class Asks(Listener):
    """Asks for the end of the run at the start, or after a step."""

    def __init__(self, after: int) -> None:
        self._after = after

    def on_start(self, event: Started, control: Control) -> None:
        if self._after == 0:
            control.ask(Request.FINISH, "it was asked to")

    def on_step(self, event: StepDone, control: Control) -> None:
        if event.step == self._after:
            control.ask(Request.FINISH, "it was asked to")


@pytest.mark.parametrize(("after", "ends"), [(0, 1), (2, 3)], ids=["at the start", "later"])
def test_what_asks_for_the_end_gets_it_after_a_step(tmp_path: Path, after: int, ends: int) -> None:
    story = Story(tmp_path, {}, listeners=[Asks(after)])
    story.run()
    assert story.told == [f"evaluate {ends}", f"save {ends} at the end"]
    assert story.figures.stopped_early == f"after step {ends}: it was asked to"


@pytest.mark.parametrize("happens", [{}, {4: "stop"}], ids=["saved", "stopped"])
@pytest.mark.parametrize("request_", [Request.FINISH, Request.EVALUATE], ids=["the end", "an evaluation"])
def test_what_is_asked_for_after_a_step_that_is_saved_is_done_before_that(
    tmp_path: Path, request_: Request, happens: dict[int, str]
) -> None:
    # Given a listener that asks once, after a step whose checkpoint is the one that a restart goes on from
    class AsksOnce(Listener):
        def on_step(self, event: StepDone, control: Control) -> None:
            if event.step == 4:
                control.ask(request_, "it was asked to")

    story = Story(tmp_path, happens, listeners=[AsksOnce()], checkpoint={"everySteps": 4})

    # When it is saved, or left
    if happens:
        with pytest.raises(StopRequested):
            story.run()
    else:
        story.run()

    # Then nobody has to ask again
    if request_ is Request.FINISH:
        assert story.told == (["save 4 at the end"] if happens else ["evaluate 4", "save 4 at the end"])
        assert story.figures.stopped_early == "after step 4: it was asked to"
    else:
        assert story.told[:2] == ["evaluate 4", "save 4 at the end" if happens else "save 4"]


def test_what_an_evaluation_gives_occasion_to_ask_for_is_done_before_its_step_is_saved(tmp_path: Path) -> None:
    class AsksAtOnce(Listener):
        def on_evaluate(self, event: Evaluated, control: Control) -> None:
            control.ask(Request.FINISH, "it is good enough")

    training = {"steps": 6, "evaluation": {"everySteps": 2}}
    story = Story(tmp_path, {}, listeners=[AsksAtOnce()], training=training, checkpoint={"everySteps": 2})
    story.run()
    assert story.told == ["evaluate 2", "save 2 at the end"]


def test_a_run_that_makes_all_its_steps_is_not_stopped_early(tmp_path: Path) -> None:
    story = Story(tmp_path, {}, listeners=[Asks(5)])
    story.run()
    assert story.told == ["evaluate 6", "save 6 at the end"]
    assert story.figures.stopped_early == ""


def test_the_words_are_those_of_the_process_that_has_some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "gathered", lambda why: [why, "", "it is the third that asks"])
    story = Story(tmp_path, {})
    story.topology = Topology(rank=0, local_rank=0, world_size=3, shard=3)
    story.control.agree([float(request is Request.FINISH) for request in Request])
    story.run()
    assert story.figures.stopped_early == "after step 1: it is the third that asks"


def test_an_end_without_words_has_ours(tmp_path: Path) -> None:
    story = Story(tmp_path, {})
    story.control.agree([float(request is Request.FINISH) for request in Request])
    story.run()
    assert story.figures.stopped_early == "after step 1: a callback asked for it"
