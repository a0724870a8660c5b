"""A disk of the machine that is full: what processes tell on it is not worth a run that saves elsewhere."""

from pathlib import Path

import pytest

from sft_api.progress import Phase, TrainingProgress
from sft_api.rundir import PROGRESS_FILE
from sft_trainer.reporting import Reporter
from sft_trainer.supervisor.activity import Activities
from tests.integration.run.disks import fill, small_disk


def told(folder: Path) -> TrainingProgress:
    return TrainingProgress.model_validate_json((folder / PROGRESS_FILE).read_bytes())


def test_a_run_goes_on_where_its_progress_finds_no_room_and_its_processes_are_seen_to_live(tmp_path: Path) -> None:
    # Given a run that has said what it does, on a disk that something else then fills to the last byte
    with small_disk(tmp_path / "disk", kilobytes=200) as disk:
        folder = disk / "run"
        reporter = Reporter(folder, writes=True)
        activities = Activities(folder, [0], now=0.0)
        reporter.update(phase=Phase.TRAINING, phase_detail="", step=99)
        activities.read(now=1.0)
        fill(disk / "filler")

        # When it makes more steps, of more digits, and does something else that takes more words
        for phase, detail, step in ((Phase.TRAINING, "", 100_000), (Phase.EVALUATING, "3 of 100 batches", 100_001)):
            reporter._last_activity_time = 0.0  # more than a second ago
            reporter.update(phase=phase, phase_detail=detail, step=step)

            # Then that is told in the room of the word before
            activities.read(now=step)
            assert activities.summary(now=step).silent_seconds == 0
            assert told(folder).step == step

        # And what finds no room is told as soon as there is some again
        reporter.warn("w" * 5000)
        reporter.update(step=100_002)
        assert told(folder).step == 100_001
        assert not list(folder.rglob(".*"))
        (disk / "filler").unlink()
        reporter.update(step=100_003)
        assert (told(folder).step, len(told(folder).warnings)) == (100_003, 1)

        # A shorter word after it has all of that room, and nothing of the longer one is left there
        fill(disk / "filler")
        reporter.update(step=100_004, warnings=[])
        assert (told(folder).step, told(folder).warnings) == (100_004, [])


def test_a_disk_that_is_full_from_the_first_word_on_is_said(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", kilobytes=200) as disk:
        fill(disk / "filler")
        with pytest.raises(OSError, match="No space left"):
            Reporter(disk / "run", writes=True).phase(Phase.STARTING)
