"""What a pod says of its workers: that of the one which got further last, those that only wait left out."""

import json
from pathlib import Path

import pytest

from sft_api.progress import Activity, Phase
from sft_trainer.reporting import Reporter
from sft_trainer.supervisor.activity import Activities, summarise
from sft_trainer.supervisor.protocol import PodActivity

WAITS = Activity(phase=Phase.WAITING, detail="for the other processes")
READS = Activity(phase=Phase.TOKENIZING, detail="1/2 rows")


@pytest.mark.parametrize(
    ("said", "expected", "silent"),
    [
        ([(READS, 10.0)], READS, 90.0),
        ([(WAITS, 60.0), (READS, 10.0)], READS, 40.0),
        ([(WAITS, 60.0), (WAITS, 50.0)], WAITS, 40.0),
        ([(Activity(phase=Phase.LOADING), 70.0), (READS, 80.0)], READS, 20.0),
    ],
)
def test_the_summary_of_a_pod(said: list[tuple[Activity, float]], expected: Activity, silent: float) -> None:
    assert summarise(said, 100.0) == PodActivity(**expected.model_dump(), silent_seconds=silent)


def test_workers_that_say_nothing_are_silent_since_their_start(tmp_path: Path) -> None:
    activities = Activities(tmp_path, range(2), now=5.0)
    activities.read(65.0)
    assert activities.summary(65.0) == PodActivity(phase=Phase.STARTING, silent_seconds=60.0)


def test_every_word_of_a_worker_counts_and_its_steps_are_known(tmp_path: Path) -> None:
    activities = Activities(tmp_path, range(4, 6), now=0.0)
    reporter = Reporter(tmp_path, writes=False, rank=5)
    reporter.phase(Phase.LOADING, "fetching")
    activities.read(10.0)
    assert activities.summary(12.0) == PodActivity(phase=Phase.LOADING, detail="fetching", silent_seconds=2.0)
    # Nothing new since.
    activities.read(20.0)
    assert activities.summary(20.0).silent_seconds == 10.0
    reporter.update(step=7)
    reporter.phase(Phase.SAVING)
    activities.read(30.0)
    assert (activities.step, activities.summary(30.0).silent_seconds) == (7, 0.0)


def test_a_file_that_is_not_an_activity_says_nothing(tmp_path: Path) -> None:
    activities = Activities(tmp_path, range(1), now=0.0)
    (tmp_path / "activity").mkdir()
    (tmp_path / "activity" / "rank-0.json").write_text(json.dumps({"phase": "Invented"}))
    activities.read(5.0)
    assert activities.summary(5.0).silent_seconds == 5.0


def test_only_the_first_rank_tells_its_figures_but_every_rank_what_it_does(tmp_path: Path) -> None:
    Reporter(tmp_path, writes=False, rank=3).phase(Phase.EXPORTING)
    assert [file.relative_to(tmp_path).as_posix() for file in tmp_path.rglob("*.json")] == ["activity/rank-3.json"]
