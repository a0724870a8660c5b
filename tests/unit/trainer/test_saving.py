"""Saves while storage is slow: training says what it waits for, and what is still due is saved."""

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from sft_api.checkpoints import CheckpointId, Manifest, RunState
from sft_api.failures import is_retryable
from sft_api.progress import Activity, Phase
from sft_api.rundir import ACTIVITY_FOLDER
from sft_trainer import saving
from sft_trainer.checkpoint import writing
from sft_trainer.checkpoint.catalog import Catalog
from sft_trainer.checkpoint.errors import CheckpointSaveError
from sft_trainer.checkpoint.local import LocalStore
from sft_trainer.checkpoint.staging import HostStaging
from sft_trainer.checkpoint.store import WriteStream
from sft_trainer.errors import StorageUnavailableError
from sft_trainer.late import Moment
from sft_trainer.reporting import Reporter
from sft_trainer.saving import Saving
from sft_trainer.topology import ALONE
from tests.parity.runs import manifest, resolve
from tests.unit.checkpoint.boxed import whole
from tests.waiting import PATIENCE_SECONDS, wait_until

CPU = torch.device("cpu")


class SlowStore(LocalStore):
    """Begins to write the files of a checkpoint when ``gate`` is opened."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.gate = threading.Event()

    def open_write(self, key: str, size_hint: int = 0) -> WriteStream:
        if key.endswith(".bin"):
            self.gate.wait(PATIENCE_SECONDS)
        return super().open_write(key, size_hint)


class Run:
    """A model that is saved into a slow store."""

    def __init__(self, folder: Path) -> None:
        self.store = SlowStore(folder / "store")
        self.reporter = Reporter(folder, writes=True)
        self.config = resolve(manifest(folder, folder / "store"))
        self.commits: list[int] = []
        self.saving = Saving(
            self.config,
            self.store,
            self.reporter,
            device=CPU,
            topology=ALONE,
            on_commit=lambda known: self.commits.append(known.latest.step if known.latest else 0),
        )
        self.saving.claim_attempt()
        self.boxes = whole({"model.weight": torch.randn(64, 64)})

    def save(self, step: int, *, final: bool = False) -> bool:
        self.reporter.update(phase=Phase.TRAINING, phase_detail="", step=step)
        state = RunState(cursor=step, numbers=self.config.numbers().as_record())
        return self.saving.save(step, self.boxes, state, final=final)

    @property
    def saved(self) -> set[str]:
        return {path.parent.name for path in self.store.path.glob("checkpoints/*/manifest.json")}


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    yield made
    made.store.gate.set()
    made.saving.settle()


def test_a_final_save_says_that_it_waits_for_the_upload_before_it(run: Run) -> None:
    # Given an upload that does not come to an end
    run.save(1)
    assert run.saving.in_flight

    # When the run ends meanwhile
    ending = threading.Thread(target=run.save, args=(2,), kwargs={"final": True})
    ending.start()
    wait_until(lambda: run.reporter.progress.phase is not Phase.TRAINING)

    # Then it is not taken for a step that never ends, and nothing is left out
    progress = run.reporter.progress
    assert (progress.phase, progress.phase_detail) == (Phase.SAVING, "waiting for the upload of the last checkpoint")
    run.store.gate.set()
    ending.join(PATIENCE_SECONDS)
    assert run.saved == {"step-00000001-a00001", "step-00000002-a00001"}
    assert not run.saving.in_flight


def test_bytes_are_a_sign_of_life_only_while_training_waits_for_them(run: Run) -> None:
    run.save(1)
    run.reporter.update(phase=Phase.TRAINING, phase_detail="", step=2)
    run.store.gate.set()
    wait_until(lambda: not run.saving.in_flight)
    assert run.reporter.progress.phase is Phase.TRAINING

    run.save(3, final=True)
    assert run.reporter.progress.phase is Phase.SAVING
    assert run.reporter.progress.phase_detail.startswith("step 3: 0 MiB")


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Copies for saves in the background begin when it is set."""
    begin, copy = threading.Event(), HostStaging._copy

    def late(staging: HostStaging, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        assert begin.wait(PATIENCE_SECONDS)
        return copy(staging, tensors)

    monkeypatch.setattr(HostStaging, "_copy", late)
    return begin


def test_training_that_waits_for_the_copy_of_a_save_is_no_step(run: Run, copies: threading.Event) -> None:
    # Given a copy that takes longer than the step beside it
    run.save(1)
    run.reporter.update(phase=Phase.TRAINING, phase_detail="")
    saving_before = run.reporter.progress.spent.saving
    waited: list[float] = []
    step = threading.Thread(target=lambda: waited.append(run.saving.copied(CPU)))
    step.start()

    # Then it is said what is waited for: the limit is that of saves, which is longer than a step's
    wait_until(lambda: run.reporter.progress.phase is Phase.SAVING)
    assert run.reporter.progress.phase_detail == "copying the checkpoint to host memory"

    # And it counts as that, once it goes on with the step
    copies.set()
    step.join(PATIENCE_SECONDS)
    progress = run.reporter.progress
    assert (progress.phase, progress.phase_detail) == (Phase.TRAINING, "")
    assert 0 < progress.spent.saving - saving_before <= waited[0]


def test_nothing_is_said_of_a_copy_while_the_step_beside_it_is_computed(
    run: Run, copies: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a device that still computes the gradients
    class Computes(Moment):
        passed = False

    monkeypatch.setattr(saving, "Moment", Computes)
    said: list[Phase] = []
    run.save(1)
    monkeypatch.setattr(run.reporter, "phase", lambda phase, *_: said.append(phase))
    step = threading.Thread(target=run.saving.copied, args=(CPU,))
    step.start()
    time.sleep(4 * saving._SHORT_SECONDS)

    # Then it is a step as any other; and so is one that finds the copy complete
    copies.set()
    step.join(PATIENCE_SECONDS)
    assert run.saving.copied(CPU) == 0
    assert said == []


def test_every_commit_is_told_once_and_not_between_gradients_and_update(run: Run) -> None:
    assert run.save(1)
    run.store.gate.set()
    wait_until(lambda: not run.saving.failed_here() and run.saving._untold)
    assert run.commits == []
    run.saving.tell()
    run.saving.settle()
    run.saving.tell()
    assert run.commits == [1]

    assert run.save(2)
    assert run.save(3)
    assert run.commits == [1, 2]
    assert run.save(4, final=True)
    assert not run.saving.failed_here()
    run.saving.settle()
    assert run.commits == [1, 2, 3, 4]


def test_a_save_that_failed_is_not_said_to_be_one(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: Any, **__: Any) -> None:
        raise StorageUnavailableError("it does not answer")

    monkeypatch.setattr(run.saving._manager, "save", away)

    assert not run.save(1)
    assert run.commits == []


def test_who_has_sent_its_part_waits_for_the_others_and_says_so(run: Run, tmp_path: Path) -> None:
    def said() -> tuple[Phase, str]:
        activity = Activity.model_validate_json((tmp_path / ACTIVITY_FOLDER / "rank-0.json").read_bytes())
        return activity.phase, activity.detail

    # Given an upload in the background that has come to the parts of the others: training goes on
    run.save(1)
    run.reporter.update(phase=Phase.TRAINING, phase_detail="", step=1)
    run.saving._note_wait(True)
    assert said()[0] is Phase.TRAINING

    # When training waits for it
    ending = threading.Thread(target=run.save, args=(2,), kwargs={"final": True})
    ending.start()
    wait_until(lambda: run.reporter.progress.phase is Phase.SAVING)

    # Then it is the others who are waited for, until this process has to do something again
    what = "waiting for the upload of the last checkpoint"
    wait_until(lambda: said() == (Phase.WAITING, f"for the other processes, Saving: {what}"))
    run.saving._note_wait(False)
    assert said() == (Phase.SAVING, what)
    run.store.gate.set()
    ending.join(PATIENCE_SECONDS)


def test_reading_a_checkpoint_shows_that_it_lives(run: Run, tmp_path: Path) -> None:
    run.store.gate.set()
    run.save(1, final=True)
    again = Run(tmp_path)
    again.store.gate.set()
    assert again.saving.resume(again.boxes) is not None
    assert again.reporter.progress.phase is Phase.LOADING
    assert again.reporter.progress.phase_detail.startswith("reading the checkpoint: 0 MiB")


def test_what_is_kept_is_what_the_job_says(tmp_path: Path) -> None:
    # Given a job that keeps every fourth step for ever
    keep = {"last": 1, "everySteps": 4}
    config = resolve(manifest(tmp_path, tmp_path / "store", checkpoint={"everySteps": 2, "async": False, "keep": keep}))
    store, reporter = LocalStore(tmp_path / "store"), Reporter(tmp_path, writes=True)
    saving = Saving(config, store, reporter, device=torch.device("cpu"), topology=ALONE)
    saving.claim_attempt()

    # When it saves every second one
    for step in range(2, 15, 2):
        assert saving.save(step, whole({"weight": torch.ones(2)}), RunState(cursor=step))

    # Then the newest stays, and those
    assert [entry.step for entry in saving.checkpoints.kept] == [14, 12, 8, 4]


def test_a_step_that_is_evaluated_after_a_resume_is_saved_again_with_that(tmp_path: Path) -> None:
    # Given a run that was asked to stop within the evaluation of the step that it saved
    config = resolve(manifest(tmp_path, tmp_path / "store", checkpoint={"async": False}))
    store, reporter = LocalStore(tmp_path / "store"), Reporter(tmp_path, writes=True)
    boxes = whole({"weight": torch.ones(2)})

    def state(evaluated: float | None) -> RunState:
        metrics = {"loss": 1.0, "evalLoss": evaluated}
        return RunState(cursor=4, numbers=config.numbers().as_record(), metrics=metrics)

    def resumed() -> Saving:
        saving = Saving(config, store, reporter, device=torch.device("cpu"), topology=ALONE)
        saving.claim_attempt()
        saving.resume(boxes)
        return saving

    resumed().save(4, boxes, state(None), final=True)

    # When it goes on, first without an evaluation, then with one, then again without
    for evaluated in (None, 2.5, None):
        saving = resumed()
        saving.save(4, boxes, state(evaluated), final=True)

    # Then the one with it is a checkpoint of its own, and the one that counts
    assert [(entry.step, entry.attempt, entry.eval_loss) for entry in saving.checkpoints.kept] == [(4, 3, 2.5)]
    assert saving.checkpoint_of(4) == CheckpointId(attempt=3, step=4)


@pytest.mark.parametrize("goes_on", [True, False], ids=["everything", "weights"])
def test_who_is_stopped_before_his_first_step_begins_again_with_the_checkpoint_of_the_other_run(
    run: Run, tmp_path: Path, goes_on: bool
) -> None:
    # Given a run that begins with a checkpoint of another one, and is to be evaluated before its first step
    run.store.gate.set()
    run.save(4, final=True)
    (theirs,) = (each for each in Catalog(run.store).candidates() if isinstance(each, Manifest))
    store = LocalStore(tmp_path / "mine")
    mine = Saving(run.config, store, run.reporter, device=torch.device("cpu"), topology=ALONE)
    mine.claim_attempt()
    mine.begin_from(run.store, lambda: theirs, run.boxes, lambda manifest: None, goes_on=goes_on)
    began = 4 if goes_on else 0

    def saved(step: int, loss: float | None) -> list[int]:
        record = run.config.numbers().as_record()
        mine.save(step, run.boxes, RunState(cursor=step, numbers=record, metrics={"evalLoss": loss}), final=True)
        return [entry.step for entry in mine.checkpoints.kept]

    # When it is stopped before that, then nothing is saved that would be taken for a run that goes on
    assert saved(began, None) == []
    # And it is, once there is something of its own to keep
    assert saved(began, 2.5) == ([4] if goes_on else [])
    assert saved(5, None)[0] == 5


def test_a_checkpoint_that_does_not_say_that_the_run_ends_with_it_is_saved_once_more(run: Run) -> None:
    # Given a run that goes on from the checkpoint of its last step
    run.store.gate.set()
    run.save(4, final=True)
    again = Saving(run.config, run.store, run.reporter, device=torch.device("cpu"), topology=ALONE)
    again.claim_attempt()
    assert again.resume(run.boxes) is not None
    state = RunState(cursor=4, numbers=run.config.numbers().as_record())

    # When nothing is new of it, then it is not saved; when it is the last one, it is, in place of the other
    again.save(4, run.boxes, state, final=True)
    assert run.saved == {"step-00000004-a00001"}
    ended = RunState.model_validate({**dict(state), "stopped_early": "after step 4: no better"})
    again.save(4, run.boxes, ended, final=True)
    assert run.saved == {"step-00000004-a00002"}
    assert again.checkpoint_of(4) == CheckpointId(2, 4)


def test_saves_that_fail_in_the_process_itself_end_the_attempt_before_all_of_the_run_is_at_risk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a process in which no save gets through, whatever the store takes
    checkpoint, policy = {"async": False, "everySteps": 2}, {"storageDeadlineSeconds": 60}
    config = resolve(manifest(tmp_path, tmp_path / "store", checkpoint=checkpoint, runPolicy=policy))
    reporter, clock = Reporter(tmp_path, writes=True), Mock(monotonic=Mock(return_value=1000.0))
    made = Saving(config, LocalStore(tmp_path / "store"), reporter, device=CPU, topology=ALONE)
    made.claim_attempt()
    monkeypatch.setattr(saving, "time", clock)
    pieces = writing.write_pieces

    def save(step: int, *, at: float, fails: bool = True) -> bool:
        clock.monotonic.return_value = at
        works = Mock(side_effect=RuntimeError("can't start new thread")) if fails else pieces
        monkeypatch.setattr(writing, "write_pieces", works)
        return made.save(step, whole({"weight": torch.ones(2)}), RunState(cursor=step))

    # When each fails, then that is told once, of the last one, and training goes on
    assert not save(2, at=1000.0)
    assert not save(4, at=1059.0)
    (warning,) = reporter.progress.warnings
    assert warning.endswith("as planned: rank 0: RuntimeError: can't start new thread")
    assert reporter.progress.storage_outage is None

    # It begins anew with each that gets through
    assert save(6, at=1070.0, fails=False)
    assert not save(8, at=1100.0)
    assert not save(10, at=1159.0)

    # But it does not go on for ever: nothing would be left of it in the end
    with pytest.raises(CheckpointSaveError, match=r"for 1m1s, .* not the store's doing: .* can't start new thread"):
        save(12, at=1161.0)
    assert is_retryable(CheckpointSaveError.failure), "the next start may be able to"


def test_whoever_is_stopped_tries_to_save_however_long_saves_have_failed_in_the_process_itself(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a save in the background that fails, an hour after the first one did
    run.store.gate.set()
    works, fails = writing.write_pieces, Mock(side_effect=RuntimeError("can't start new thread"))
    monkeypatch.setattr(writing, "write_pieces", fails)
    monkeypatch.setattr(run.saving, "_fails_since", time.monotonic() - 3601.0)
    assert run.save(1)
    wait_until(lambda: not run.saving.in_flight)

    # When the run is asked to stop, and can be saved
    monkeypatch.setattr(writing, "write_pieces", works)
    assert run.save(2, final=True)
    assert run.saved == {"step-00000002-a00001"}


def test_a_run_knows_whether_it_has_saved_before(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert not run.saving.anything_saved()
    run.store.gate.set()
    run.save(1, final=True)

    assert run.saving.anything_saved()
