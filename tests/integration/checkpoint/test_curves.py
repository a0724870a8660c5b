"""The picture of a run and its TensorBoard files, in a folder and in S3, over saves, resumes and outages."""

import json
import re
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from sft_trainer.checkpoint.local import LocalStore
from sft_trainer.checkpoint.store import Store
from sft_trainer.curves import writer
from sft_trainer.curves.chart import Line, draw, thinned
from sft_trainer.curves.writer import CurveWriter, metrics_key
from sft_trainer.errors import AccessDeniedError, StorageUnavailableError
from tests.waiting import PATIENCE_SECONDS, wait_until

SVG = "{http://www.w3.org/2000/svg}"


def record(step: int, loss: float | None, **more: Any) -> dict[str, Any]:
    figures = {"step": step, "loss": loss, "gradNorm": 1.0, "learningRate": 1e-3, "epoch": step / 10}
    return figures | {"tokens": 100, "seconds": 0.5, "time": 1.8e9 + step} | more


def lines(records: Sequence[dict[str, Any]]) -> bytes:
    return "".join(f"{json.dumps(record)}\n" for record in records).encode()


def save(store: Store, curve: CurveWriter, attempt: int, records: Sequence[dict[str, Any]]) -> None:
    """What ``Saving`` does with the records of the steps since the last save."""
    store.put(metrics_key(records[-1]["step"], attempt), lines(records))
    curve.add(records[-1]["step"], lines(records))


def shown_by_tensorboard(store: Store, folder: Path, tag: str) -> list[tuple[int, float]]:
    """Every event of ``tag``, as TensorBoard's own reader finds them file by file, in the order of the files."""
    found: list[tuple[int, float]] = []
    for number, entry in enumerate(store.list("tensorboard/")):
        (folder / str(number)).mkdir(parents=True)
        (folder / str(number) / entry.key.rpartition("/")[2]).write_bytes(store.read(entry.key))
        reader = EventAccumulator(str(folder / str(number))).Reload()
        if tag in reader.Tags()["scalars"]:
            found += [(event.step, round(event.value, 5)) for event in reader.Scalars(tag)]
    return found


def curves(svg: bytes) -> dict[str, int]:
    """The names of the lines in a picture, and how many points each has."""
    root = ElementTree.fromstring(svg)
    names = [
        group.findtext(f"{SVG}text") for group in root.iter(f"{SVG}g") if "activate-serie" in group.get("class", "")
    ]
    paths = [path.get("d", "") for path in root.iter(f"{SVG}path") if "line reactive" in path.get("class", "")]
    points = [len(re.findall(r"[\d.]+", path)) // 2 for path in paths]
    return dict(zip(map(str, names), points, strict=True))


def test_a_run_leaves_its_picture_and_what_tensorboard_reads(store: Store, tmp_path: Path) -> None:
    written = []
    curve = CurveWriter(store, "tiny <1>", attempt=1, resumed_at=0, written=lambda: written.append(True))
    first = [{"step": 0, "evalLoss": 6.0, "evalLosses": {"a": 5.0, "b": 7.0}}, *(record(n, 6 - n) for n in (1, 2))]
    save(store, curve, 1, first)
    save(
        store,
        curve,
        1,
        [
            record(3, 3.0),
            record(
                4,
                None,
                evalLoss=2.5,
                evalLosses={"a": 2.0, "b": 3.0},
                evalAccuracy=0.5,
                evalAccuracies={"a": 0.25, "b": 0.75},
            ),
        ],
    )
    curve.finish(PATIENCE_SECONDS)

    assert written == [True, True]
    assert shown_by_tensorboard(store, tmp_path / "loss", "train/loss") == [(1, 5.0), (2, 4.0), (3, 3.0)]
    assert shown_by_tensorboard(store, tmp_path / "eval", "eval/loss") == [(0, 6.0), (4, 2.5)]
    assert shown_by_tensorboard(store, tmp_path / "b", "eval/loss/b") == [(0, 7.0), (4, 3.0)]
    assert shown_by_tensorboard(store, tmp_path / "right", "eval/accuracy") == [(4, 0.5)]
    assert shown_by_tensorboard(store, tmp_path / "right b", "eval/accuracy/b") == [(4, 0.75)]
    assert shown_by_tensorboard(store, tmp_path / "speed", "train/tokens_per_second")[0] == (1, 200.0)
    svg = store.read("curve.svg")
    assert b"tiny &lt;1&gt;" in svg
    assert curves(svg) == {"training": 3, "held-out": 2}
    assert b"<script" not in svg
    assert svg.count(b"http") == svg.count(b"http://www.w3.org/"), "nothing is fetched from anywhere"


def test_a_resumed_run_goes_on_where_it_went_on_from(store: Store, tmp_path: Path) -> None:
    # Given an attempt whose last checkpoint is that of step 5, though its figures reach to step 10
    lost = CurveWriter(store, "tiny", attempt=1, resumed_at=0)
    save(store, lost, 1, [{"step": 0, "evalLoss": 9.0}, *(record(step, 9.0) for step in range(1, 4))])
    save(store, lost, 1, [record(step, 9.0) for step in range(4, 11)])
    lost.finish(PATIENCE_SECONDS)
    assert len(shown_by_tensorboard(store, tmp_path / "before", "train/loss")) == 10

    # When the next one does the rest again, and a third one has nothing left to do but evaluate
    resumed = CurveWriter(store, "tiny", attempt=2, resumed_at=5)
    save(store, resumed, 2, [record(step, 4.0) for step in range(6, 9)])
    save(store, resumed, 2, [record(9, 4.0), record(10, 4.0, evalLoss=3.0)])
    resumed.finish(PATIENCE_SECONDS)
    last = CurveWriter(store, "tiny", attempt=3, resumed_at=10)
    save(store, last, 3, [{"step": 10, "evalLoss": 3.0}])
    last.finish(PATIENCE_SECONDS)

    # Then each step is there once, as it was done by the attempt that counts
    expected = [(step, 9.0 if step <= 5 else 4.0) for step in range(1, 11)]
    assert sorted(shown_by_tensorboard(store, tmp_path / "after", "train/loss")) == expected
    assert sorted(shown_by_tensorboard(store, tmp_path / "eval", "eval/loss")) == [(0, 9.0), (10, 3.0)]
    assert curves(store.read("curve.svg")) == {"training": 10, "held-out": 2}


def test_where_nothing_may_be_removed_any_more_a_resumed_run_has_its_curve(tmp_path: Path) -> None:
    # Given files for TensorBoard with steps that are made again, and a right to delete that was revoked
    class Kept(LocalStore):
        def delete(self, keys: Iterable[str]) -> None:
            raise AccessDeniedError("access denied")

    store = Kept(tmp_path)
    lost = CurveWriter(LocalStore(tmp_path), "tiny", attempt=1, resumed_at=0)
    save(store, lost, 1, [record(step, 9.0) for step in range(1, 4)])
    save(store, lost, 1, [record(step, 9.0) for step in range(4, 11)])
    lost.finish(PATIENCE_SECONDS)

    # When the next attempt makes the rest again
    resumed = CurveWriter(store, "tiny", attempt=2, resumed_at=5)
    save(store, resumed, 2, [record(step, 4.0) for step in range(6, 9)])
    resumed.finish(PATIENCE_SECONDS)

    # Then all is shown as it counts, also by a TensorBoard that reads the files which stay
    assert curves(store.read("curve.svg")) == {"training": 8}
    reader = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    found = {event.step: round(event.value, 5) for event in reader.Scalars("train/loss")}
    assert found == {step: 9.0 if step <= 5 else 4.0 for step in range(1, 9)}


def test_of_records_that_are_longer_than_any_whole_lines_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, earlier = LocalStore(tmp_path), [record(step, 9.0) for step in range(1, 4)]
    store.put(metrics_key(3, 1), lines(earlier))
    monkeypatch.setattr(writer, "_MOST_BYTES", len(lines(earlier)) - 5)
    curve = CurveWriter(store, "tiny", attempt=2, resumed_at=3)
    save(store, curve, 2, [record(4, 4.0)])
    curve.finish(PATIENCE_SECONDS)
    assert curves(store.read("curve.svg")) == {"training": 3}


def test_a_save_at_the_step_that_was_resumed_keeps_what_came_before(store: Store, tmp_path: Path) -> None:
    # Given an attempt whose last checkpoint is that of step 5, though its figures reach to step 10
    lost = CurveWriter(store, "tiny", attempt=1, resumed_at=0)
    save(store, lost, 1, [record(step, 9.0) for step in range(1, 6)])
    save(store, lost, 1, [record(step, 9.0) for step in range(6, 11)])
    lost.finish(PATIENCE_SECONDS)

    # When the next one evaluates that step and saves it once more, as where the best are kept
    resumed = CurveWriter(store, "tiny", attempt=2, resumed_at=5)
    save(store, resumed, 2, [{"step": 5, "evalLoss": 3.0}])
    save(store, resumed, 2, [record(6, 4.0)])
    resumed.finish(PATIENCE_SECONDS)

    # Then both are there
    assert shown_by_tensorboard(store, tmp_path / "loss", "train/loss") == [*((n, 9.0) for n in range(1, 6)), (6, 4.0)]
    assert shown_by_tensorboard(store, tmp_path / "eval", "eval/loss") == [(5, 3.0)]


def test_a_step_without_a_finite_loss_is_told_once(store: Store, tmp_path: Path) -> None:
    # Given an attempt whose evaluation of step 2, which it saved, gave no number
    before = CurveWriter(store, "tiny", attempt=1, resumed_at=0)
    nothing = {"step": 2, "evalLoss": None, "evalAccuracy": 0.25}
    save(store, before, 1, [record(1, 9.0), record(2, None) | nothing])
    before.finish(PATIENCE_SECONDS)

    # When the next one evaluates it once more
    again = CurveWriter(store, "tiny", attempt=2, resumed_at=2)
    save(store, again, 2, [nothing, record(3, 8.0)])
    again.finish(PATIENCE_SECONDS)

    # Then what else there is of it stands there once
    assert shown_by_tensorboard(store, tmp_path / "right", "eval/accuracy") == [(2, 0.25)]
    rates = shown_by_tensorboard(store, tmp_path / "rates", "train/learning_rate")
    assert [step for step, _ in rates] == [1, 2, 3]


@pytest.mark.parametrize("step", [5, 6], ids=["saved there again", "saved later"])
def test_the_newest_evaluation_of_a_step_is_shown_where_it_is_another_one(
    store: Store, tmp_path: Path, step: int
) -> None:
    # Given an attempt that was interrupted when it had evaluated step 5 and saved it
    before = CurveWriter(store, "tiny", attempt=1, resumed_at=0)
    save(store, before, 1, [record(n, 9.0, evalLoss=3.0, evalAccuracy=0.5) for n in range(1, 6)])
    before.finish(PATIENCE_SECONDS)

    # When the next one evaluates that step on the data of now
    again = CurveWriter(store, "tiny", attempt=2, resumed_at=5)
    judged = {"step": 5, "evalLoss": 7.0, "evalAccuracy": 0.25}
    save(store, again, 2, [judged, *(record(n, 4.0) for n in range(6, step + 1))])
    save(store, again, 2, [record(7, 4.0)])
    again.finish(PATIENCE_SECONDS)

    # Then that is what is told of it, once, as the status and its checkpoint do
    expected = [*((n, 3.0) for n in range(1, 5)), (5, 7.0)]
    assert sorted(shown_by_tensorboard(store, tmp_path / "eval", "eval/loss")) == expected
    assert (5, 0.25) in shown_by_tensorboard(store, tmp_path / "right", "eval/accuracy")
    trained = shown_by_tensorboard(store, tmp_path / "loss", "train/loss")
    assert [n for n, _ in sorted(trained)] == [1, 2, 3, 4, 5, *range(6, step + 1), 7]


def test_a_run_that_starts_anew_after_a_crash_without_checkpoint_shows_the_new_start(
    store: Store, tmp_path: Path
) -> None:
    crashed = CurveWriter(store, "tiny", attempt=1, resumed_at=0)
    save(store, crashed, 1, [{"step": 0, "evalLoss": 9.0}, record(1, 9.0), record(2, 9.0)])
    crashed.finish(PATIENCE_SECONDS)
    again = CurveWriter(store, "tiny", attempt=2, resumed_at=0)
    save(store, again, 2, [{"step": 0, "evalLoss": 9.0}, record(1, 8.0)])
    again.finish(PATIENCE_SECONDS)

    assert shown_by_tensorboard(store, tmp_path / "loss", "train/loss") == [(1, 8.0)]
    assert shown_by_tensorboard(store, tmp_path / "eval", "eval/loss") == [(0, 9.0)]


def test_a_long_run_that_goes_on_writes_no_more_anew_than_what_it_takes_back(tmp_path: Path) -> None:
    # Given an attempt of many saves, the last of which has steps that no checkpoint has
    store = LocalStore(tmp_path / "store")
    lost = CurveWriter(store, "tiny", attempt=1, resumed_at=0)
    for first in range(1, 101, 10):
        save(store, lost, 1, [record(step, 9.0) for step in range(first, first + 10)])
    lost.finish(PATIENCE_SECONDS)
    before = {entry.key: store.read(entry.key) for entry in store.list("tensorboard/")}

    # When the next one goes on from within the last but one
    resumed = CurveWriter(store, "tiny", attempt=2, resumed_at=85)
    save(store, resumed, 2, [record(step, 4.0) for step in range(86, 101)])
    resumed.finish(PATIENCE_SECONDS)

    # Then files that hold nothing of later are as they were, and each step is there once
    after = {entry.key: store.read(entry.key) for entry in store.list("tensorboard/")}
    assert {key for key in before if key in after} == {key for key in before if int(key[-8:]) <= 80}
    assert all(before[key] == after[key] for key in before if key in after)
    assert len(after) == 8 + 2
    expected = [(step, 9.0 if step <= 85 else 4.0) for step in range(1, 101)]
    assert sorted(shown_by_tensorboard(store, tmp_path / "after", "train/loss")) == expected
    assert curves(store.read("curve.svg")) == {"training": 100}


def test_steps_that_were_taken_back_before_let_files_stay(tmp_path: Path) -> None:
    # Given steps of a first attempt that the second one has taken back, and not made again when it was lost
    store = LocalStore(tmp_path / "store")
    for attempt, resumed_at, first, last in ((1, 0, 1, 5), (1, 0, 6, 10), (2, 5, 6, 8), (2, 5, 9, 9)):
        if first == resumed_at + 1:
            curve = CurveWriter(store, "tiny", attempt=attempt, resumed_at=resumed_at)
        save(store, curve, attempt, [record(step, 9.0 - attempt) for step in range(first, last + 1)])
        if last in (10, 9):
            curve.finish(PATIENCE_SECONDS)
    before = {entry.key[-8:] for entry in store.list("tensorboard/")}

    # When a third one goes on
    third = CurveWriter(store, "tiny", attempt=3, resumed_at=8)
    save(store, third, 3, [record(step, 4.0) for step in range(9, 11)])
    third.finish(PATIENCE_SECONDS)

    # Then only the file with what it takes back goes
    assert before == {"00000005", "00000008", "00000009"}
    assert {entry.key[-20:] for entry in store.list("tensorboard/")} == {
        f"a0000{attempt}-step-{step:08d}" for attempt, step in ((1, 5), (2, 8), (3, 10))
    }
    expected = [(step, 8.0 if step <= 5 else 7.0 if step <= 8 else 4.0) for step in range(1, 11)]
    assert sorted(shown_by_tensorboard(store, tmp_path / "after", "train/loss")) == expected


@pytest.mark.parametrize("at", [6, 8], ids=["from there again", "from later"])
def test_figures_that_never_came_into_a_file_of_tensorboard_are_made_up_for(tmp_path: Path, at: int) -> None:
    # Given a second attempt whose records were written, and its events not: the first one's of those steps stayed
    store = LocalStore(tmp_path / "store")
    first = CurveWriter(store, "tiny", attempt=1, resumed_at=0)
    save(store, first, 1, [record(step, 9.0) for step in range(1, 4)])
    save(store, first, 1, [record(step, 9.0) for step in range(4, 7)])
    first.finish(PATIENCE_SECONDS)
    store.put(metrics_key(6, 2), lines([record(step, 5.0) for step in range(4, 7)]))
    third = CurveWriter(store, "tiny", attempt=3, resumed_at=6)
    save(store, third, 3, [record(step, 4.0) for step in range(7, 9)])
    save(store, third, 3, [record(step, 4.0) for step in range(9, 11)])
    third.finish(PATIENCE_SECONDS)

    # When one goes on from where the second was, or from later
    last = CurveWriter(store, "tiny", attempt=4, resumed_at=at)
    save(store, last, 4, [record(step, 3.0) for step in range(at + 1, 11)])
    last.finish(PATIENCE_SECONDS)

    # Then each step is there once, as it was done by the attempt that counts
    expected = [(step, 9.0 if step <= 3 else 5.0 if step <= 6 else 4.0 if step <= at else 3.0) for step in range(1, 11)]
    assert sorted(shown_by_tensorboard(store, tmp_path / "after", "train/loss")) == expected


class StuckStore(LocalStore):
    """Refuses or keeps waiting whoever writes a curve."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.away = False
        self.gate = threading.Event()
        self.gate.set()

    def put(self, key: str, data: bytes) -> None:
        if not key.startswith("metrics/"):
            self.gate.wait(PATIENCE_SECONDS)
            if self.away:
                raise StorageUnavailableError(f"{key}: the storage is away")
        super().put(key, data)


def test_storage_that_was_away_for_a_while_has_everything_in_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = StuckStore(tmp_path)
    curve = CurveWriter(store, "tiny", attempt=1, resumed_at=0)
    store.away = True
    curve.add(2, lines([record(1, 5.0), record(2, 4.0)]))
    wait_until(lambda: "it goes with the next save" in caplog.text)
    store.away = False
    curve.add(3, lines([record(3, 3.0)]))
    curve.finish(PATIENCE_SECONDS)

    assert shown_by_tensorboard(store, tmp_path / "loss", "train/loss") == [(1, 5.0), (2, 4.0), (3, 3.0)]
    assert curves(store.read("curve.svg")) == {"training": 3}


def test_what_storage_refused_before_the_last_save_is_there_at_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The last save waits for the storage; its curve was tried before that."""
    store = StuckStore(tmp_path)
    curve = CurveWriter(store, "tiny", attempt=1, resumed_at=0)
    store.away = True
    curve.add(2, lines([record(1, 5.0), record(2, 4.0)]))
    wait_until(lambda: "it goes with the next save" in caplog.text)
    store.away = False
    curve.finish(PATIENCE_SECONDS)

    assert shown_by_tensorboard(store, tmp_path / "loss", "train/loss") == [(1, 5.0), (2, 4.0)]
    assert curves(store.read("curve.svg")) == {"training": 2}


def test_no_step_waits_for_a_storage_that_does_not_answer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = StuckStore(tmp_path)
    store.gate.clear()
    curve = CurveWriter(store, "tiny", attempt=1, resumed_at=0)
    for step in range(1, 101):
        curve.add(step, lines([record(step, 5.0)]))
    # All of them returned; so does the end, which says what is missing.
    curve.finish(0.1)
    assert "curve.svg is not up to date" in caplog.text
    assert store.list("curve.svg") == []
    store.gate.set()
    curve.finish(PATIENCE_SECONDS)
    assert curves(store.read("curve.svg")) == {"training": 100}


def test_a_picture_of_a_long_run_is_no_larger_than_it_can_show() -> None:
    points = [(step, float(step % 2)) for step in range(1, 100_001)]
    few = thinned(points, 600)
    assert len(few) == 599
    assert all(value == pytest.approx(0.5, abs=0.01) for _, value in few[:-1])
    assert few[0][0] == pytest.approx(84)
    assert thinned([], 600) == []
    picture = draw("long", [Line("training", points)])
    assert len(picture) < 64 * 1024
    assert picture == draw("long", [Line("training", points)]), "the same lines give the same bytes"
