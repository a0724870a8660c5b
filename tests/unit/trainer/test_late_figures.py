"""The host learns of a step when the next one is launched, and of all of them before it acts."""

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sft_trainer import trainer
from sft_trainer.data.batches import Step
from sft_trainer.data.feed import Share
from sft_trainer.dummy_run import NothingSaved
from sft_trainer.errors import NonFiniteLossError, StopRequested
from sft_trainer.events import Control, Listener, Request, StepDone
from sft_trainer.late import LateFigures, Moment, steps_behind
from sft_trainer.records import RecordsFile
from sft_trainer.reporting import Reporter
from sft_trainer.skipped import SkippedSteps
from sft_trainer.topology import Topology
from tests.unit.trainer.stories import BareRun
from tests.unit.trainer.test_run_story import step_done

CPU = torch.device("cpu")
NAN = math.nan


class Story(BareRun):
    """A run of ten steps, whose ``losses`` are 1 where not given; writes down what happens in which order.

    ``asked`` are steps that are computed while the group is asked to stop, ``timer`` those at which a save is due.
    """

    def __init__(self, folder: Path, losses: dict[int, float], *, asked: int = 0, timer: int = 0, **sections: Any):
        super().__init__(folder, 10, **sections)
        self.losses, self.asked, self.timer = losses, asked, timer
        self.prepared = SimpleNamespace(total_steps=10, epoch_size=10, eval=["some"])  # type: ignore[assignment]
        self.strategy = SimpleNamespace(  # type: ignore[assignment]
            auxiliary=False,
            updates=0,
            loaded=lambda: None,
            forward_backward=self._compute,
            grad_norm=lambda: torch.tensor(1.0),
            apply=self._apply,
        )
        self._flops = SimpleNamespace(training=lambda _: 0.0, share_of_peak=lambda *_: None)  # type: ignore[assignment]
        self.applied: list[bool] = []

    def _compute(self, bins: Any, denominator: int, tokens: int) -> torch.Tensor:
        number = self.step + 1
        self.told.append(f"launch {number}")
        if number == self.asked:
            self._stop_file.parent.mkdir(exist_ok=True)
            self._stop_file.touch()
        self.saving.seconds_since_save = 1e9 if number == self.timer else 0.0  # type: ignore[misc]
        return torch.tensor(self.losses.get(number, 1.0), dtype=torch.float64)

    def _apply(self, rate: float, max_norm: float, norm: torch.Tensor, ok: torch.Tensor) -> None:
        self.applied.append(bool(ok))
        self.strategy.updates += bool(ok)

    def _learn(self, launched: Any) -> None:
        self.told.append(f"learn {launched.number}")
        super()._learn(launched)

    def _feed(self) -> Any:
        step = Step(bins=(), examples=1, tokens=1, trained_tokens=1)
        return _Endless(Share(step, ()))

    def _evaluate(self) -> None:
        self.told.append(f"evaluate {self.step}")

    def _save(self, *, final: bool = False) -> None:
        assert not self._launched, "a step is not known"
        self.told.append(f"save {self.step}")

    def records(self) -> list[dict[str, Any]]:
        """What would be written down at the next save."""
        (file,) = (listener for listener in self.ours.others if isinstance(listener, RecordsFile))
        return [json.loads(line) for line in file.records.lines().splitlines()]

    def recorded(self) -> list[int]:
        return [record["step"] for record in self.records()]


class _Endless(Iterator[Share]):
    def __init__(self, share: Share) -> None:
        self._share = share

    def __next__(self) -> Share:
        return self._share

    def close(self) -> None: ...


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "join_group", lambda *_: None)
    monkeypatch.setattr(trainer, "steps_behind", lambda device: 1)  # as on a GPU
    monkeypatch.setattr(trainer, "sum_over_ranks", lambda values, device: values)
    monkeypatch.setattr(
        trainer, "summed", lambda values, device: torch.tensor([float(value) for value in values], dtype=torch.float64)
    )


def test_a_step_is_learned_of_when_the_next_one_is_launched(tmp_path: Path) -> None:
    story = Story(tmp_path, {number: number / 8 for number in range(1, 11)})
    story.run()
    assert story.told == [
        "launch 1",
        *(word for number in range(2, 11) for word in (f"launch {number}", f"learn {number - 1}")),
        *("learn 10", "evaluate 10", "save 10"),
    ]
    # Each once, in order, with its own numbers
    assert [(record["step"], record["loss"]) for record in story.records()] == [(n, n / 8) for n in range(1, 11)]


def test_a_cpu_has_nothing_to_wait_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "steps_behind", steps_behind)
    story = Story(tmp_path, {}, asked=4)
    with pytest.raises(StopRequested, match="stopped after step 4, which is saved"):
        story.run()
    assert story.told[:3] == ["launch 1", "learn 1", "launch 2"]


def test_a_run_that_saves_nothing_makes_steps_as_others_do(tmp_path: Path) -> None:
    story = Story(tmp_path, {})
    story.saving, story.device, story._shares = NothingSaved(), CPU, story._feed()  # type: ignore[assignment]

    story._learn(story._launch())

    assert story.figures.step == 1


def test_all_replicas_clip_by_one_norm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given two replicas, whose sums of squares differ in the last bit
    norms = [torch.tensor(1.0), torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))]
    clipped: list[float] = []

    def added_up(values: list[Any], device: torch.device) -> torch.Tensor:
        sums = torch.tensor([float(value) for value in values], dtype=torch.float64)
        sums[2] = sum(float(norm) for norm in norms)
        return sums

    monkeypatch.setattr(trainer, "summed", added_up)
    for norm in norms:
        story = Story(tmp_path, {})
        story.device, story._shares = CPU, story._feed()
        story.topology = Topology(rank=0, local_rank=0, world_size=2, replicate=2)
        story.strategy.grad_norm = lambda norm=norm: norm  # type: ignore[method-assign,misc]
        story.strategy.apply = lambda rate, most, by, ok: clipped.append(float(by))  # type: ignore[method-assign]

        # When each makes a step
        story._launch()

    # Then both scale their gradients alike
    assert clipped[0] == clipped[1]


def test_a_wait_for_the_copy_of_a_save_is_no_part_of_the_step(tmp_path: Path) -> None:
    story = Story(tmp_path, {})
    story.device, story._shares = CPU, story._feed()

    def copied(device: torch.device) -> float:
        time.sleep(0.2)
        return 0.2

    story.saving.copied = copied  # type: ignore[method-assign]
    launched = story._launch()
    took = launched.began.seconds_until(launched.figures.ready)
    story._learn(launched)

    assert story.figures.step_seconds == pytest.approx(took - 0.2)


def test_what_steps_waited_for_their_tokens_is_added_up(tmp_path: Path) -> None:
    story = Story(tmp_path, {})
    story.device, feed = CPU, story._feed()
    story._watch()

    def given() -> Iterator[Share]:
        while True:
            time.sleep(0.05)
            yield next(feed)

    def compute(bins: Any, denominator: int, tokens: int) -> torch.Tensor:
        time.sleep(0.05)
        return torch.tensor(1.0, dtype=torch.float64)

    story._shares, story.strategy.forward_backward = given(), compute  # type: ignore[assignment,method-assign]

    for _ in range(2):
        story._learn(story._launch())

    # Each waited, and computed as long besides
    assert 0.1 <= story.reporter.progress.data_seconds <= story.figures.step_seconds - 0.1


def test_what_is_due_after_a_step_waits_for_it_and_no_other(tmp_path: Path) -> None:
    story = Story(tmp_path, {}, training={"steps": 10, "evaluation": {"everySteps": 4}}, checkpoint={"everySteps": 6})
    story.run()
    for number, what in ((4, "evaluate"), (8, "evaluate"), (6, "save")):
        at = story.told.index(f"{what} {number}")
        assert story.told[at - 1] == f"learn {number}"
        assert f"launch {number + 1}" not in story.told[:at]
    assert story.recorded() == list(range(1, 11))


def test_a_stop_comes_one_step_later_and_saves_what_is_known(tmp_path: Path) -> None:
    story = Story(tmp_path, {}, asked=4)
    with pytest.raises(StopRequested, match="stopped after step 5, which is saved"):
        story.run()
    assert story.told[-4:] == ["launch 5", "learn 4", "learn 5", "save 5"]
    assert story.recorded() == [1, 2, 3, 4, 5]


def test_what_is_asked_for_while_the_host_is_behind_is_not_lost(tmp_path: Path) -> None:
    # Given a listener that asks for a save when it hears of step 4, which is when step 5 is on its way
    class Asks(Listener):
        def on_step(self, event: StepDone, control: Control) -> None:
            if event.step == 4:
                control.ask(Request.SAVE)

    story = Story(tmp_path, {})
    story._theirs = [Asks()]
    story.run()
    # Then it is agreed on with step 6, of which is heard when step 7 is on its way
    assert [word for word in story.told if word.startswith("save")] == ["save 7", "save 10"]


def test_a_save_by_the_clock_comes_one_step_later(tmp_path: Path) -> None:
    story = Story(tmp_path, {}, timer=4)
    story.run()
    at = story.told.index("save 5")
    assert story.told[at - 3 : at + 2] == ["launch 5", "learn 4", "learn 5", "save 5", "launch 6"]


def test_a_save_waits_until_its_step_is_known_to_be_finite(tmp_path: Path) -> None:
    # Given a save by the clock of step 4, and steps after it that are skipped
    story = Story(tmp_path, {5: NAN, 6: NAN}, timer=4)
    story.run()
    # Then it is the first that follows one that is known to be good: no step is waited for only to see whether it is
    assert [word for word in story.told if word.startswith("save")] == ["save 8", "save 10"]
    assert story.applied == [number not in (5, 6) for number in range(1, 11)]
    assert story.reporter.progress.skipped_steps == 2


def test_a_stop_right_before_a_skipped_step_saves_nothing(tmp_path: Path) -> None:
    story = Story(tmp_path, {5: NAN}, asked=4)
    with pytest.raises(StopRequested, match="stopped after step 5, which is not saved"):
        story.run()
    assert not any(word.startswith("save") for word in story.told)


def test_too_many_skipped_steps_end_the_run_one_step_later(tmp_path: Path) -> None:
    story = Story(tmp_path, dict.fromkeys(range(3, 11), NAN), checkpoint={"everySteps": 4})
    with pytest.raises(NonFiniteLossError, match="for 5 steps in a row, up to step 7 "):
        story.run()
    assert story.applied[:2] == [True, True]
    assert not any(story.applied[2:])
    assert len(story.applied) in (7, 8)
    assert not any(word.startswith("save") for word in story.told)


def test_a_run_whose_few_steps_are_all_skipped_is_not_complete(tmp_path: Path) -> None:
    # Given a run that is over before there are too many in a row
    story = Story(tmp_path, dict.fromkeys((1, 2, 3), NAN))
    story.prepared.total_steps = 3
    with pytest.raises(NonFiniteLossError, match="no step of the run changed the model: loss or gradients of all 3 "):
        story.run()
    assert "learn 3" in story.told
    assert not any(word.startswith(("save", "evaluate")) for word in story.told)


def test_skipped_steps_are_one_warning_that_counts(tmp_path: Path) -> None:
    reporter = Reporter(tmp_path, writes=True)
    skipped = SkippedSteps(reporter, SimpleNamespace(), learning_rate=1e-3)  # type: ignore[arg-type]
    reporter.warn("something else")
    for number, figure in ((3, "loss"), (7, "grad_norm"), (8, "loss")):
        skipped.on_step(step_done(number, **{figure: NAN}), Control())
        assert skipped.in_a_row == 1
        skipped.on_step(step_done(number + 1), Control())
    assert skipped.in_a_row == 0
    assert reporter.progress.skipped_steps == 3
    assert reporter.progress.warnings == [
        "something else",
        "loss or gradients of 3 steps were not finite, the last is step 8: they were skipped",
    ]


def test_figures_are_those_of_when_they_were_taken() -> None:
    values = torch.tensor([1.5, 2.0], dtype=torch.float64)
    began = Moment(CPU)
    figures = LateFigures(values)
    values.zero_()
    assert figures.read() == [1.5, 2.0]
    assert began.seconds_until(figures.ready) >= 0
