"""A store that took a run's checkpoints and then takes none: training goes on, and the end waits, but not for ever."""

import os
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sft_api.checkpoints import RunState
from sft_api.failures import ExitCode, FailureClass, exit_code, is_retryable
from sft_api.place import ALIVE_KEY, Done, RunRecord
from sft_api.progress import Phase, StorageOutage, WorkerError
from sft_api.report import with_told
from sft_api.rundir import ERRORS_FOLDER
from sft_trainer import entering, saving, trainer
from sft_trainer import outage as outages
from sft_trainer.alive import Alive, read_beat
from sft_trainer.checkpoint.catalog import nothing_removed
from sft_trainer.checkpoint.errors import AttemptSupersededError, CheckpointCorruptError, ObjectNotFoundError
from sft_trainer.checkpoint.local import LocalStore
from sft_trainer.checkpoint.protocol import Protocol
from sft_trainer.checkpoint.store import WriteStream
from sft_trainer.due import Intervals, SavesWhenDue
from sft_trainer.errors import (
    AccessDeniedError,
    ConfigError,
    DataError,
    SharedPlaceError,
    StorageDeadlineError,
    StorageFullError,
    StorageNotFoundError,
    StorageRefusedError,
    StorageUnavailableError,
    TrainingError,
)
from sft_trainer.events import Asking, Claimed, Control, Ended
from sft_trainer.outage import Outage, is_outage, of_another_place, of_the_place
from sft_trainer.process import report_end
from sft_trainer.reporting import Reporter
from sft_trainer.saving import Saving
from sft_trainer.topology import ALONE
from tests.parity.runs import manifest, resolve
from tests.unit.checkpoint.boxed import whole
from tests.waiting import PATIENCE_SECONDS, wait_until

NOW = datetime(2026, 1, 1, tzinfo=UTC)
DENIED = AccessDeniedError("the key was revoked")


class Clock:
    seconds = 100.0

    def __call__(self) -> float:
        return self.seconds

    def now(self) -> datetime:
        return NOW + timedelta(seconds=self.seconds - 100)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (StorageUnavailableError("x"), True),
        (AccessDeniedError("x"), True),
        (StorageFullError("x"), True),
        (StorageNotFoundError("the bucket is not there"), True),
        (StorageRefusedError("x"), True),
        # In a store that answers.
        (ObjectNotFoundError("x"), False),
        (CheckpointCorruptError("x"), False),
        (AttemptSupersededError("x"), False),
        (SharedPlaceError("x"), False),
        (ConfigError("x"), False),
        (OSError("x"), False),
    ],
)
def test_what_may_end_without_the_runs_doing(error: Exception, expected: bool) -> None:
    assert is_outage(error) is expected


@pytest.mark.parametrize(("error", "expected"), [(DENIED, True), (ObjectNotFoundError("x"), False)])
def test_a_worker_that_a_place_of_the_run_refuses_says_so_in_its_last_words(
    error: TrainingError, expected: bool, tmp_path: Path
) -> None:
    ends = []
    for place in (of_the_place(), nullcontext()):
        try:
            with place:
                raise type(error)(str(error))
        except TrainingError as raised:
            report_end(raised, tmp_path, rank=1)
        ends.append(WorkerError.model_validate_json((tmp_path / ERRORS_FOLDER / "rank-1.json").read_bytes()).outage)

    # The same words about a model are none of it.
    assert ends == [expected, False]


def test_last_words_about_a_file_whose_name_is_not_utf_8_arrive(tmp_path: Path) -> None:
    """Else the worker ends with the error of its report, for no reason that is known, and is started again."""
    name = os.fsdecode(b"/data/caf\xe9.jsonl")
    try:
        raise DataError(f"{name} line 1 is not a JSON object")
    except DataError as raised:
        code = report_end(raised, tmp_path, rank=1)
    assert code == exit_code(FailureClass.DATA_ERROR)
    error = WorkerError.model_validate_json((tmp_path / ERRORS_FOLDER / "rank-1.json").read_bytes())
    assert error.message == r"/data/caf\udce9.jsonl line 1 is not a JSON object"


def test_a_place_that_is_only_read_from_is_none_of_the_run_on_the_way_either() -> None:
    with pytest.raises(TrainingError) as raised, of_the_place(), of_another_place():
        raise AccessDeniedError("s3://data")
    assert raised.value.outage is False


@pytest.mark.parametrize(("refuses", "expected"), [("look", True), ("changed", False), ("told_of_siblings", False)])
def test_of_what_a_start_does_in_its_place_the_data_and_other_places_are_none_of_it(
    refuses: str, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*_: object) -> Any:
        raise AccessDeniedError(refuses)

    answers = {
        **dict.fromkeys(("find_done", "check_storage", "look", "watch")),
        "nothing_saved": True,
        "open_place": RunRecord.model_construct(revisions={}),
        "told_of_siblings": [],
        "changed": [],
    }
    for name, answer in answers.items():
        monkeypatch.setattr(entering, name, lambda *_, answer=answer, **__: answer)
    monkeypatch.setattr(entering, refuses, denied)
    config = resolve(manifest(tmp_path / "inputs", tmp_path / "store"))

    with pytest.raises(AccessDeniedError) as raised:
        entering.enter(config, LocalStore(tmp_path), Reporter(tmp_path, writes=False), writes=True)
    assert (raised.value.outage is True) is expected


def test_what_a_start_reads_after_its_claim_or_instead_of_it_is_of_the_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*_: object) -> Any:
        raise DENIED

    # Given a process whose key is revoked when it has claimed an attempt, or has found the run complete
    one = trainer.Trainer.__new__(trainer.Trainer)
    one.config = resolve(manifest(tmp_path / "inputs", tmp_path / "store", compute={"gpusPerNode": 1}))
    one.spec, one.topology = one.config.spec, ALONE
    one.store, one.reporter = LocalStore(tmp_path), Reporter(tmp_path, writes=False)
    one.saving, one._place = SimpleNamespace(anything_saved=denied), entering.Entered(None, None)  # type: ignore[assignment]
    monkeypatch.setattr(trainer, "end_again", denied)

    # Then it ends with the word that lets the run wait
    for read in (one._as_tried, lambda: one._end_again(Done(step=6, attempt=1))):
        monkeypatch.setattr(DENIED, "outage", None)
        with pytest.raises(AccessDeniedError) as raised:
            read()
        assert raised.value.outage is True


def test_an_outage_is_told_from_its_beginning_in_the_words_of_its_last_answer() -> None:
    clock = Clock()
    outage = Outage(60, clock=clock, now=clock.now)
    assert outage.failed(DENIED) == outage.told, "it begins"
    clock.seconds += 20
    assert outage.failed(StorageFullError("no room")) is None, "it goes on"

    assert outage.told == StorageOutage(
        since=NOW, ends=NOW + timedelta(seconds=60), failure=FailureClass.STORAGE_FULL, message="no room"
    )
    past = outage.ended()
    assert past is not None
    assert past.seconds == 20
    assert outage.told is None
    assert outage.ended() is None


def test_it_is_tried_again_ever_more_rarely_and_anew_after_each_outage() -> None:
    clock = Clock()
    outage = Outage(10_000, clock=clock, now=clock.now)
    assert not outage.wants_a_try
    for _ in range(2):
        pauses = []
        for _ in range(6):
            outage.failed(DENIED)
            pauses.append(outage.seconds_to_next_try)
            assert not outage.wants_a_try
            clock.seconds += pauses[-1]
            assert outage.wants_a_try
        assert pauses == [5, 5, 10, 20, 40, 60]
        outage.ended()


def test_it_has_a_deadline() -> None:
    clock = Clock()
    outage = Outage(60, clock=clock, now=clock.now)
    outage.check()
    outage.failed(DENIED)
    clock.seconds += 59.9
    outage.check()
    clock.seconds += 0.1

    with pytest.raises(StorageDeadlineError) as raised:
        outage.check()
    assert str(raised.value) == (
        "nothing could be saved for 1m0s, since 2026-01-01T00:00:00Z, and runPolicy.storageDeadlineSeconds is 60; the "
        "last answer was: the key was revoked"
    )
    assert exit_code(raised.value.failure) is ExitCode.STORAGE_DEADLINE_EXCEEDED
    assert not is_retryable(raised.value.failure)


class RefusingStore(LocalStore):
    """Says no to whoever writes a checkpoint while ``refusal`` is set."""

    refusal: TrainingError | None = None
    writes = 0

    def open_write(self, key: str, size_hint: int = 0) -> WriteStream:
        if key.endswith(".bin"):
            self.writes += 1
            if self.refusal is not None:
                raise self.refusal
        return super().open_write(key, size_hint)


class Run:
    def __init__(self, folder: Path, *, asynchronous: bool, deadline: int = 3600) -> None:
        self.store = RefusingStore(folder / "store")
        self.reporter = Reporter(folder, writes=True)
        job = manifest(
            folder,
            folder / "store",
            checkpoint={"async": asynchronous},
            runPolicy={"storageDeadlineSeconds": deadline},
        )
        self.config = resolve(job)
        self.saving = Saving(self.config, self.store, self.reporter, device=torch.device("cpu"), topology=ALONE)
        self.saving.claim_attempt()
        self.boxes = whole({"model.weight": torch.randn(8, 8)})

    def save(self, step: int, *, final: bool = False) -> bool:
        self.reporter.update(phase=Phase.TRAINING, phase_detail="", step=step)
        state = RunState(cursor=step, numbers=self.config.numbers().as_record())
        return self.saving.save(step, self.boxes, state, final=final)

    def settle(self) -> None:
        self.saving.settle()

    @property
    def saved(self) -> list[int]:
        return sorted(int(path.parent.name[5:13]) for path in self.store.path.glob("checkpoints/*/manifest.json"))


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outages, "_FIRST_PAUSE", 0.01)
    monkeypatch.setattr(outages, "_LONGEST_PAUSE", 0.05)


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("refusal", [DENIED, StorageFullError("no room"), StorageNotFoundError("the bucket is gone")])
@pytest.mark.usefixtures("short_pauses")
def test_training_goes_on_and_the_newest_step_is_saved_when_the_store_takes_it(
    tmp_path: Path, refusal: TrainingError, asynchronous: bool
) -> None:
    # Given a run whose store says no after its first checkpoint
    run = Run(tmp_path, asynchronous=asynchronous)
    run.save(1)
    run.settle()
    run.store.refusal = refusal
    for step in (2, 3):
        run.save(step)
        run.settle()

    # Then nothing ends, and it is told since when and why
    told = run.reporter.progress.storage_outage
    assert told is not None
    assert (told.failure, told.message) == (refusal.failure, str(refusal))
    assert run.reporter.progress.warnings == []
    wait_until(lambda: run.saving.outage.wants_a_try)

    # When the store takes it again
    run.store.refusal = None
    run.save(4)
    run.settle()

    # Then what was refused left nothing behind
    assert run.saved == [1, 4]
    assert {path.name[:13] for path in run.store.path.glob("checkpoints/*")} == {"step-00000001", "step-00000004"}
    assert run.reporter.progress.storage_outage is None
    (warning,) = run.reporter.progress.warnings
    assert "nothing could be saved: " in warning
    assert str(refusal) in warning


@pytest.mark.parametrize(("refusal", "left"), [(StorageFullError("no room"), 0), (DENIED, 1)])
def test_kept_tokens_make_room_for_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: TrainingError, left: int
) -> None:
    run = Run(tmp_path, asynchronous=False)
    monkeypatch.setattr(run.store, "_uri", "pvc://claim/store")
    run.store.put(f"tokenized/{'a' * 64}.arrow", b"tokens")
    run.store.refusal = refusal
    run.save(1)
    assert len(run.store.list("tokenized/")) == left


@pytest.mark.usefixtures("short_pauses")
def test_of_outages_the_last_one_is_told_beside_what_else_there_is_to_tell(tmp_path: Path) -> None:
    run = Run(tmp_path, asynchronous=False)
    run.reporter.warn("the data is short")
    for step, why in ((1, "the key was revoked"), (3, "the bucket is closed")):
        run.store.refusal = AccessDeniedError(why)
        run.save(step)
        wait_until(lambda: run.saving.outage.wants_a_try)
        run.store.refusal = None
        run.save(step + 1)

    data, outage = run.reporter.progress.warnings
    assert data == "the data is short"
    assert outage.endswith("nothing could be saved: the bucket is closed")


def test_that_old_checkpoints_may_not_be_removed_is_told_once_in_the_words_of_the_last_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, answers = Run(tmp_path, asynchronous=True), iter(range(9))

    def denied(*_: object) -> None:
        raise AccessDeniedError(f"answer {next(answers)}")

    monkeypatch.setattr(LocalStore, "delete", denied)
    for step in (1, 2, 3, 4):
        run.save(step)
        run.settle()

    # Each save is there all the same: two are kept, and of the third and the fourth the removal was refused
    assert run.saved == [1, 2, 3, 4]
    (warning,) = run.reporter.progress.warnings
    assert "fills up, as what is kept no longer cannot be removed: answer 1; give the run the right" in warning
    assert run.reporter.progress.storage_outage is None


def test_that_nothing_may_be_removed_stands_once_in_a_status_whatever_could_not_be() -> None:
    refused = [f"s3://bucket/run/{key}: access denied" for key in ("probe-1f", "checkpoints/step-00000020-a00001")]
    first, second = (nothing_removed("s3://bucket/run", AccessDeniedError(each))[0] for each in refused)

    assert with_told(with_told([], [first, "another"]), [second]) == ["another", second]


@pytest.mark.usefixtures("short_pauses")
def test_the_final_save_waits_for_the_store_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    run = Run(tmp_path, asynchronous=True)
    run.store.refusal = DENIED
    ending = threading.Thread(target=run.save, args=(5,), kwargs={"final": True}, daemon=True)
    ending.start()
    wait_until(lambda: run.store.writes > 3)
    wait_until(lambda: "waiting for the store" in run.reporter.progress.phase_detail)
    assert run.reporter.progress.phase is Phase.SAVING
    assert ending.is_alive()
    (told,) = (message for message in caplog.messages if message.startswith("nothing can be saved now"))
    assert told.startswith("nothing can be saved now: the key was revoked; the run ends at ")

    run.store.refusal = None
    ending.join(PATIENCE_SECONDS)
    assert run.saved == [5]


@pytest.mark.usefixtures("short_pauses")
def test_a_final_save_that_arrived_unheard_ends_the_run_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a store that takes the last manifest, and then goes away before it says so
    run, create, unheard = Run(tmp_path, asynchronous=True), LocalStore.create, []

    def once(store: LocalStore, key: str, data: bytes) -> bool:
        created = create(store, key, data)
        if not unheard:
            unheard.append(key)
            raise StorageUnavailableError("no answer")
        return created

    monkeypatch.setattr(LocalStore, "create", once)

    # Then the next try finds it, and the outage is over
    assert run.save(5, final=True)
    assert run.saved == [5]
    assert len(list(run.store.path.glob("checkpoints/*/*.bin"))) == 1
    assert run.reporter.progress.storage_outage is None


class Hanging:
    """A store that neither takes anything nor says so."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.answers = threading.Event()
        """What makes it take what it was asked to."""


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hanging]:
    made, write = Hanging(), RefusingStore.open_write

    def hangs(store: RefusingStore, key: str, size_hint: int = 0) -> WriteStream:
        if key.endswith(".bin"):
            made.asked.set()
            made.answers.wait()
        return write(store, key, size_hint)

    monkeypatch.setattr(RefusingStore, "open_write", hangs)
    yield made
    made.answers.set()


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_store_that_hangs_while_training_waits_for_it_is_no_hang_and_has_the_deadline_of_outages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hanging: Hanging, asynchronous: bool
) -> None:
    run = Run(tmp_path, asynchronous=asynchronous, deadline=1)
    monkeypatch.setattr(saving, "_STILL_SECONDS", 0)

    def save() -> None:
        run.save(5)
        assert asynchronous
        run.settle()

    with pytest.raises(StorageDeadlineError, match="storageDeadlineSeconds is 1; the last answer was: the save has wr"):
        save()
    assert hanging.asked.is_set()


def test_a_final_save_that_stands_still_says_that_it_waits_until_it_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hanging: Hanging
) -> None:
    # Given a run that ends while its store hangs
    run = Run(tmp_path, asynchronous=True)
    monkeypatch.setattr(saving, "_STILL_SECONDS", 0)
    ending = threading.Thread(target=run.save, args=(5,), kwargs={"final": True}, daemon=True)
    ending.start()

    # Then it is an outage, and each second a sign of life
    wait_until(lambda: run.reporter.progress.phase_detail == "step 5: waiting for the store")
    assert hanging.asked.is_set()
    progress = run.reporter.progress
    assert progress.phase is Phase.SAVING
    assert progress.storage_outage is not None
    wait_until(lambda: (run.reporter.progress.update_time or NOW) > (progress.update_time or NOW))

    # And it is over once that answers
    monkeypatch.setattr(saving, "_STILL_SECONDS", 1e9)
    hanging.answers.set()
    ending.join(PATIENCE_SECONDS)
    assert run.saved == [5]
    assert run.reporter.progress.storage_outage is None


@pytest.mark.usefixtures("short_pauses")
def test_a_save_that_stands_still_is_an_outage_until_it_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hanging: Hanging
) -> None:
    # Given a store that neither takes anything nor says so
    run = Run(tmp_path, asynchronous=True, deadline=1)
    run.save(5)
    assert hanging.asked.wait(PATIENCE_SECONDS)
    run.saving.look_after()
    assert run.reporter.progress.storage_outage is None

    # When nothing is written for long
    monkeypatch.setattr(saving, "_STILL_SECONDS", 0)
    run.saving.look_after()

    # Then it is told, and has the deadline of any outage
    told = run.reporter.progress.storage_outage
    assert told is not None
    assert "the save has written nothing for " in told.message
    wait_until(lambda: run.saving.outage.verdict)
    with pytest.raises(StorageDeadlineError):
        run.saving.outage.check()

    # And it is over when something is written again
    monkeypatch.setattr(saving, "_STILL_SECONDS", 1e9)
    run.saving.look_after()
    assert run.reporter.progress.storage_outage is None
    hanging.answers.set()
    run.settle()
    assert run.saved == [5]


@pytest.mark.parametrize("keeps_time", [True, False])
@pytest.mark.usefixtures("short_pauses")
def test_the_deadline_of_an_outage_leaves_a_save_alone_that_arrives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hanging: Hanging, keeps_time: bool
) -> None:
    # Given an outage whose deadline passes while the first save after it is on its way
    run = Run(tmp_path, asynchronous=True, deadline=1)
    due = SavesWhenDue(run.config.spec, Intervals.of(run.config.spec, Fraction), run.saving, keeps_time=keeps_time)
    run.saving.outage.failed(DENIED)
    run.save(5)
    assert hanging.asked.wait(PATIENCE_SECONDS)
    wait_until(lambda: run.saving.outage.verdict)

    # Then it ends the run where its part of the save stands still, on whatever process, and not while that goes on
    due.on_ask(Asking(6), Control())
    monkeypatch.setattr(saving, "_STILL_SECONDS", 0)
    with pytest.raises(StorageDeadlineError):
        due.on_ask(Asking(7), Control())

    # Nor once it has arrived, which is told only after the step
    hanging.answers.set()
    wait_until(lambda: not run.saving.in_flight)
    due.on_ask(Asking(8), Control())
    assert not run.saving.failed_here()
    run.saving.tell()
    assert run.saved == [5]
    assert run.saving.outage.told is None

    # And by the clock of one process once there is none on its way, and none that has arrived
    run.store.refusal = DENIED
    run.saving.outage.failed(DENIED)
    run.save(9)
    wait_until(lambda: not run.saving.in_flight and run.saving.outage.verdict)
    with pytest.raises(StorageDeadlineError) if keeps_time else nullcontext():
        due.on_ask(Asking(10), Control())


@pytest.mark.usefixtures("short_pauses")
def test_it_waits_no_longer_than_the_deadline(tmp_path: Path) -> None:
    run = Run(tmp_path, asynchronous=True, deadline=1)
    run.store.refusal = DENIED

    with pytest.raises(StorageDeadlineError, match="storageDeadlineSeconds is 1; the last answer was: the key was rev"):
        run.save(5, final=True)


@pytest.mark.usefixtures("short_pauses")
def test_what_is_no_outage_ends_the_run_at_once(tmp_path: Path) -> None:
    run = Run(tmp_path, asynchronous=True)
    run.store.refusal = AttemptSupersededError("a newer attempt")

    with pytest.raises(AttemptSupersededError):
        run.save(5, final=True)
    assert run.store.writes == 1


@pytest.mark.usefixtures("short_pauses")
def test_other_work_of_the_end_waits_as_well(tmp_path: Path) -> None:
    run, tries = Run(tmp_path, asynchronous=True), []

    def export() -> None:
        tries.append(run.reporter.progress.storage_outage is not None)
        if len(tries) < 3:
            raise DENIED

    run.saving.patiently(export, "the export")
    assert tries == [False, True, True]
    assert run.reporter.progress.storage_outage is None


@pytest.mark.usefixtures("short_pauses")
def test_what_goes_beside_a_checkpoint_is_there_before_it_counts(tmp_path: Path) -> None:
    run = Run(tmp_path, asynchronous=True)
    state = RunState(numbers=run.config.numbers().as_record())
    here: list[list[int]] = []

    def fails_once() -> None:
        here.append(run.saved)
        if len(here) == 1:
            raise DENIED

    assert run.saving.save(3, run.boxes, state, final=True, beside=[fails_once])
    assert here == [[], []]
    assert run.saved == [3]


def test_whatever_a_store_raises_who_lives_goes_on_to_say_so(tmp_path: Path) -> None:
    # Given a store of which a library raises an error that is none of ours
    class Surprising(LocalStore):
        puts = 0

        def put(self, key: str, data: bytes) -> None:
            self.puts += 1
            if self.puts < 3:
                raise RuntimeError("the credentials were renewed, and are expired all the same")
            super().put(key, data)

    store = Surprising(tmp_path / "store")
    Protocol(store).claim("parity")
    config = resolve(manifest(tmp_path, tmp_path))
    alive, control = Alive(config, store, tmp_path / "stop", beat_seconds=0.01), Control()
    alive.on_claim(Claimed(1, 60), control)

    # Then its next signs are there
    wait_until(lambda: read_beat(store) is not None)
    alive.on_end(Ended(20), control)
    assert "complete" in str(store.read(ALIVE_KEY))
