"""A disk of the machine that is full: what processes tell on it is not worth a run that saves elsewhere."""

import tempfile
from pathlib import Path
from typing import Any

import pytest

from sft_api.progress import Phase, TrainingProgress
from sft_api.rundir import PROGRESS_FILE
from sft_trainer.errors import StorageFullError
from sft_trainer.export.companions import companions
from sft_trainer.models.causal_lm import build_on_meta
from sft_trainer.outage import is_outage
from sft_trainer.reporting import Reporter
from sft_trainer.supervisor.activity import Activities
from tests.integration.run.disks import enlarge, fill, small_disk
from tests.parity.mask_tokenizers import chat_tokenizer


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


def test_an_export_waits_for_room_in_the_temporary_folder(
    tiny_inputs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a run that is to export where temporary files find no room: what tells the tokenizer of it is no OSError
    model = build_on_meta(tiny_inputs.model)
    with small_disk(tmp_path / "disk", kilobytes=8) as disk:
        monkeypatch.setattr(tempfile, "tempdir", str(disk))

        # Then it is said to be full, and no error without a name that is tried from the model on till it is enough
        with pytest.raises(StorageFullError, match=f"{disk}: the disk is full .* or set TMPDIR") as full:
            companions(model, tiny_inputs.model, chat_tokenizer("chatml"), "")
        assert is_outage(full.value)
        assert not list(disk.iterdir())

        # And the export goes on once there is some
        enlarge(disk, 1024)
        assert "tokenizer.json" in companions(model, tiny_inputs.model, chat_tokenizer("chatml"), "")
