"""What a pod says of its workers: that of the one which got further last, those that only wait left out."""

import json
from pathlib import Path

import pytest

from sft_api.progress import Activity, Phase
from sft_trainer import reporting
from sft_trainer.reporting import Reporter
from sft_trainer.supervisor.activity import Activities, Said, summarise
from sft_trainer.supervisor.protocol import PodActivity, RankActivity

WAITS = Activity(phase=Phase.WAITING, detail="for the other processes")
READS = Activity(phase=Phase.TOKENIZING, detail="1/2 rows")


LOADS = Activity(phase=Phase.LOADING)
TRAINS = Activity(phase=Phase.TRAINING, step=3)


@pytest.mark.parametrize(
    ("said", "shown", "silent", "judged"),
    [
        ([(READS, 10.0)], 0, 90.0, 0),
        ([(WAITS, 60.0), (READS, 10.0)], 1, 40.0, 1),
        ([(WAITS, 60.0), (WAITS, 50.0)], 0, 40.0, None),
        ([(LOADS, 70.0), (READS, 80.0)], 1, 20.0, 0),
        ([(TRAINS, 10.0), (TRAINS, 20.0)], 1, 80.0, 0),
        # A step waits for all.
        ([(TRAINS, 10.0), (LOADS, 20.0)], 1, 80.0, 1),
    ],
)
def test_the_summary_of_a_pod(
    said: list[tuple[Activity, float]], shown: int, silent: float, judged: int | None
) -> None:
    summary = summarise([Said(rank, *one) for rank, one in enumerate(said)], 100.0)
    expected = RankActivity(**dict(said[shown][0]), rank=shown, silent_seconds=silent)
    assert RankActivity(**{**dict(summary), "stillest": None}) == expected
    if judged is None:
        assert summary.stillest is None
    else:
        activity, moved = said[judged]
        assert summary.stillest == RankActivity(**activity.model_dump(), rank=judged, silent_seconds=100.0 - moved)


def test_workers_that_say_nothing_are_silent_since_their_start(tmp_path: Path) -> None:
    activities = Activities(tmp_path, range(2), now=5.0)
    activities.read(65.0)
    silent = RankActivity(rank=0, phase=Phase.STARTING, silent_seconds=60.0, said_anything=False)
    assert activities.summary(65.0) == PodActivity(**silent.model_dump(), stillest=silent)


def heard(activities: Activities, now: float) -> tuple[Phase, str, float]:
    activities.read(now)
    summary = activities.summary(now)
    return summary.phase, summary.detail, summary.silent_seconds


def test_every_word_of_a_worker_counts_and_its_steps_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(reporting.time, "monotonic", lambda: clock[0])
    activities = Activities(tmp_path, range(4, 6), now=0.0)
    reporter = Reporter(tmp_path, writes=False, rank=5)
    reporter.phase(Phase.LOADING, "fetching")
    activities.read(10.0)
    assert heard(activities, 12.0) == (Phase.LOADING, "fetching", 2.0)
    # Nothing new since.
    assert heard(activities, 20.0) == (Phase.LOADING, "fetching", 10.0)
    clock[0] = 25.0
    reporter.alive(Phase.LOADING, "fetching")
    assert heard(activities, 25.0) == (Phase.LOADING, "fetching", 0.0)
    # What is published of other things is no word of what it does.
    clock[0] = 28.0
    reporter.update(curve_uri="file:///curve.svg")
    assert heard(activities, 28.0) == (Phase.LOADING, "fetching", 3.0)
    clock[0] = 30.0
    reporter.update(step=7)
    reporter.phase(Phase.SAVING)
    assert heard(activities, 30.0) == (Phase.SAVING, "", 0.0)
    assert activities.step == 7


def test_who_waits_says_so_once_and_its_other_words_are_no_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(reporting.time, "monotonic", lambda: clock[0])
    activities, reporter = Activities(tmp_path, range(1), now=0.0), Reporter(tmp_path, writes=True)
    reporter.phase(Phase.SAVING, "step 5: 1 MiB")
    assert heard(activities, 10.0) == (Phase.SAVING, "step 5: 1 MiB", 0.0)

    with reporter.waiting("for the others"):
        assert heard(activities, 20.0) == (Phase.WAITING, "for the others", 0.0)
        clock[0] = 30.0
        reporter.waits("for the others")
        reporter.update(step=5)
        assert heard(activities, 30.0) == (Phase.WAITING, "for the others", 10.0)
        # The group as a whole still saves.
        assert (reporter.progress.phase, reporter.progress.phase_detail) == (Phase.SAVING, "step 5: 1 MiB")
    assert heard(activities, 40.0) == (Phase.SAVING, "step 5: 1 MiB", 0.0)
    # A word of its own ends it as well.
    reporter.waits("for the others")
    reporter.phase(Phase.EVALUATING)
    assert heard(activities, 50.0)[0] is Phase.EVALUATING


def test_a_file_that_is_not_an_activity_says_nothing(tmp_path: Path) -> None:
    activities = Activities(tmp_path, range(1), now=0.0)
    (tmp_path / "activity").mkdir()
    (tmp_path / "activity" / "rank-0.json").write_text(json.dumps({"phase": 3}))
    activities.read(5.0)
    assert activities.summary(5.0).silent_seconds == 5.0


def test_only_the_first_rank_tells_its_figures_but_every_rank_what_it_does(tmp_path: Path) -> None:
    Reporter(tmp_path, writes=False, rank=3).phase(Phase.EXPORTING)
    assert [file.relative_to(tmp_path).as_posix() for file in tmp_path.rglob("*.json")] == ["activity/rank-3.json"]
