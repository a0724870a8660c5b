"""A run is its place: who may train there, over every store, whatever was there before and who begins beside it."""

from __future__ import annotations

import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from sft_api.checkpoints import STATUS_KEY, AttemptClaim, CheckpointId, attempt_key
from sft_api.place import ALIVE_KEY, DONE_KEY, LONGEST_RECORD, ORIGIN_FIELD, RUN_KEY, RunRecord, decode_record
from sft_api.progress import TrainingProgress
from sft_api.trainer_config import TrainerConfig
from sft_trainer import done
from sft_trainer.alive import read_beat
from sft_trainer.checkpoint.catalog import Catalog
from sft_trainer.checkpoint.errors import StoreSharedError
from sft_trainer.checkpoint.protocol import Protocol
from sft_trainer.checkpoint.store import Store
from sft_trainer.entering import enter
from sft_trainer.errors import ConfigError, StorageUnavailableError, TrainingError
from sft_trainer.place import check_record, forget_unbegun, look, open_place, read_done, read_record
from sft_trainer.reporting import Reporter
from tests.integration.checkpoint.managers import save, started
from tests.parity.runs import manifest, resolve

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def run(store: Store, uid: str = "first", name: str = "parity", **sections: Any) -> TrainerConfig:
    """The configuration of a job that saves in ``store``."""
    job = manifest(Path("/inputs"), Path("/store"), **sections)
    job["metadata"]["name"] = name
    config = resolve(job)
    return config.model_copy(
        update={"checkpoint_uri": store.uri, "job": config.job.model_copy(update={"uid": uid, "namespace": "team"})}
    )


def opened(config: TrainerConfig, store: Store, *, conditional: bool = True, **revisions: str) -> RunRecord:
    return open_place(config, store, conditional=conditional, revisions=lambda: revisions, sleep=lambda _: None)


def saved(config: TrainerConfig, store: Store, step: int) -> None:
    """A checkpoint of the run."""
    save(started(store, config.job.uid), step, numbers=config.numbers().as_record())


SEED = {"training": {"seed": 7}}
NEVER = {"checkpoint": {"resume": {"policy": "never"}}}


@pytest.mark.parametrize("conditional", [True, False])
def test_the_first_start_makes_the_record_and_later_ones_train_by_it(store: Store, conditional: bool) -> None:
    config = run(store)
    assert look(config, store) is None
    made = opened(config, store, conditional=conditional, model="aaaa")
    assert decode_record(store.read(RUN_KEY)) == made
    assert (made.name, made.namespace, made.uid, made.digest) == ("parity", "team", "first", config.numbers().digest)

    # Another object, another namespace, another day: the same run, and the revisions of the first start
    again = opened(run(store, uid="second"), store, conditional=conditional, model="bbbb")
    assert again == made


def test_another_name_or_other_numbers_are_refused_once_anything_is_saved(store: Store) -> None:
    config = run(store)
    opened(config, store)
    saved(config, store, 10)
    before = store.read(RUN_KEY)
    sentence = (
        rf"{store.uri} belongs to the run parity with other settings \(metadata.name: \"parity\" -> \"other\", "
        r"training.seed: 42 -> 7\); it was begun on 20.* in namespace team: give this run another metadata.name or"
    )
    other = run(store, uid="second", name="other", **SEED)
    for refused in (look, opened):
        with pytest.raises(ConfigError, match=sentence):
            refused(other, store)
    assert store.read(RUN_KEY) == before


def test_a_record_behind_which_nothing_was_saved_keeps_nobody_away(store: Store) -> None:
    # Given a start that ended before its first save, because of a number that was wrong
    opened(run(store), store)
    started(store, "first")

    # When it is corrected
    corrected = run(store, uid="first", **SEED)
    assert look(corrected, store) is None
    made = opened(corrected, store)

    # Then the place is that of the corrected run, and the one before learns it when it claims
    assert decode_record(store.read(RUN_KEY)) == made
    check_record(corrected, store)
    with pytest.raises(ConfigError, match=r"training\.seed: 7 -> 42"):
        check_record(run(store), store)
    store.delete([RUN_KEY])
    with pytest.raises(StorageUnavailableError, match=r"run\.json was removed while this run began"):
        check_record(corrected, store)


def test_no_process_pins_anything_to_the_record_that_is_about_to_be_replaced(store: Store, tmp_path: Path) -> None:
    # Given a start that ended before its first save, as its model could not be trained
    opened(run(store, model={"uri": "hf://org/wrong"}), store, **{"model.uri": "a" * 40})

    # When the model was corrected, and the other processes look before the first one has made its record
    corrected = run(store, model={"uri": "hf://org/right"})
    reporter = Reporter(tmp_path, writes=False, rank=1)
    before = enter(corrected, store, reporter, writes=False)
    made = opened(corrected, store, **{"model.uri": "b" * 40})

    # Then none of them asks the hub for a commit of the other model, and later ones have that of this run
    assert dict(before.revisions) == {}
    assert enter(corrected, store, reporter, writes=False).record == made


@pytest.mark.parametrize("conditional", [True, False])
@pytest.mark.parametrize("same", [True, False])
def test_a_record_that_was_made_while_revisions_were_looked_up_is_not_written_over(
    store: Store, conditional: bool, same: bool
) -> None:
    # Given a start that asks a slow hub, while another one makes its record and saves
    slow, fast = run(store), run(store, uid="second", **({} if same else SEED))

    def revisions() -> dict[str, str]:
        opened(fast, store, conditional=conditional, model="aaaa")
        saved(fast, store, 10)
        return {"model": "bbbb"}

    def begin() -> RunRecord:
        return open_place(slow, store, conditional=conditional, revisions=revisions, sleep=lambda _: None)

    # When it has its answer, then it trains by that record, or is refused
    if same:
        assert begin().revisions == {"model": "aaaa"}
    else:
        with pytest.raises(ConfigError, match=r"training\.seed: 7 -> 42"):
            begin()
    assert decode_record(store.read(RUN_KEY)).uid == "second"


@pytest.mark.parametrize("conditional", [True, False])
@pytest.mark.parametrize("raw", [b"", b'{"version": 1, "name": "par', b'{"version": 9}'])
def test_half_a_record_is_never_written_over(store: Store, raw: bytes, conditional: bool) -> None:
    store.put(RUN_KEY, raw)
    with pytest.raises(ConfigError, match=r"run\.json says whose checkpoints these are, and cannot be used: it is "):
        open_place(run(store), store, conditional=conditional, revisions=dict, sleep=lambda _: None)
    assert store.read(RUN_KEY) == raw


def test_no_more_is_read_of_a_record_than_one_may_have(store: Store) -> None:
    """Who looks at the place of another, or trains there, shall not need as much memory as somebody wrote bytes."""
    for key in (RUN_KEY, DONE_KEY, ALIVE_KEY):
        store.put(key, b" " * (LONGEST_RECORD + 1000))

    for read in (lambda: read_record(store, lambda _: None), lambda: read_done(store)):
        with pytest.raises(ConfigError, match="cannot be used: it has 16777216 bytes or more, which no record needs"):
            read()
    sign = read_beat(store)

    assert isinstance(sign, bytes)
    assert len(sign) == LONGEST_RECORD
    store.put(RUN_KEY, b"whole")
    assert [store.read(RUN_KEY, most) for most in (3, 5, 100)] == [b"who", b"whole", b"whole"]


def test_no_more_is_read_of_claims_and_reports_than_they_may_have(store: Store) -> None:
    claim = AttemptClaim(attempt=1, job_uid="uid", claim_id="c", host="h", time=datetime.now(UTC))
    store.put(attempt_key(1), claim.model_dump_json(by_alias=True).encode())
    store.put(STATUS_KEY, TrainingProgress(step=6).model_dump_json().encode())
    known = Catalog(store).newest_claim_of("uid")
    told = done._reported(store)
    assert (known and known.attempt, told and told.step) == (1, 6)

    # Of those that are longer the end, which makes them whole, is not read
    for key in (attempt_key(1), STATUS_KEY):
        store.put(key, b" " * LONGEST_RECORD + store.read(key))

    assert (Catalog(store).newest_claim_of("uid"), done._reported(store)) == (None, None)
    with pytest.raises(StoreSharedError, match="another start"):
        Catalog(store).check_newest(1, "uid")


def test_a_record_that_is_just_being_written_is_waited_for(store: Store) -> None:
    config = run(store)
    opened(config, store)
    whole = store.read(RUN_KEY)
    store.put(RUN_KEY, whole[:20])

    def sleep(seconds: float) -> None:
        if seconds:
            store.put(RUN_KEY, whole)

    assert read_record(store, sleep) == decode_record(whole)


def test_checkpoints_of_before_there_were_records_are_adopted_when_their_numbers_match(store: Store) -> None:
    config = run(store)
    saved(config, store, 10)
    with pytest.raises(ConfigError, match=r"a run with other settings \(training.seed: 42 -> 7\)"):
        opened(run(store, uid="second", **SEED), store)
    save(started(store), 20)  # newer, and it does not say what it was made with
    with pytest.raises(ConfigError, match="cannot be compared"):
        opened(config, store)
    store.delete([CheckpointId(2, 20).manifest_key])

    assert opened(run(store, uid="second"), store).uid == "second"


def test_a_policy_of_never_needs_an_empty_place_or_the_same_object(store: Store) -> None:
    config = run(store, **NEVER)
    opened(config, store)
    opened(run(store, uid="second", **NEVER), store)  # nothing is saved yet
    saved(config, store, 10)

    assert look(config, store) is not None
    with pytest.raises(ConfigError, match=r"is never, and .* holds checkpoints of an earlier start \(uid first\)"):
        opened(run(store, uid="second", **NEVER), store)
    # The same without a record
    store.delete([RUN_KEY])
    assert look(config, store) is None
    with pytest.raises(ConfigError, match=r"\(uid first\): name an empty place"):
        look(run(store, uid="second", **NEVER), store)


def test_a_record_of_its_own_lets_nobody_in_where_another_start_has_saved(store: Store) -> None:
    config = run(store, **NEVER)
    opened(config, store)  # and it fails before it has saved anything
    saved(run(store, uid="second"), store, 10)
    with pytest.raises(ConfigError, match=r"holds checkpoints of an earlier start \(uid second\)"):
        opened(config, store)


@pytest.mark.parametrize("looks", [1, 2], ids=["before its claim", "after it"])
def test_who_is_refused_stops_nobody_by_its_claim(store: Store, looks: int) -> None:
    # Given two runs of one place by mistake, of which the faster one trains there
    slow, fast = run(store), run(store, uid="second", **SEED)
    opened(slow, store)
    opened(fast, store)
    trains = started(store, "second")
    looked = 0

    def accept() -> None:
        nonlocal looked
        looked += 1
        if looked == looks:
            check_record(slow, store)

    # When the other one begins
    with pytest.raises(ConfigError, match="the run parity with other settings"):
        Protocol(store).claim("first", accept)

    # Then the first goes on
    assert looked == looks
    Catalog(store).check_newest(trains.attempt, "second")


@pytest.mark.parametrize("same", [True, False])
def test_of_many_that_begin_at_once_all_have_one_record_or_are_refused(store: Store, same: bool) -> None:
    ready = threading.Barrier(4)
    ends: list[tuple[RunRecord, int] | TrainingError] = []

    def start(number: int) -> None:
        config = run(store, uid=f"job-{number}", training={"seed": 1 if same else number})
        ready.wait()
        try:
            record = opened(config, store)
            attempt = started(store, config.job.uid).attempt
            check_record(config, store)
            ends.append((record, attempt))
        except TrainingError as error:
            ends.append(error)

    threads = [threading.Thread(target=start, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    final = decode_record(store.read(RUN_KEY))
    goes_on = {end[1]: end[0].record_id for end in ends if isinstance(end, tuple)}
    assert len(ends) == 4
    if same:
        assert set(goes_on.values()) == {final.record_id}
        assert len(goes_on) == 4
    else:
        # One whose record was replaced after it had looked at it a last time has the older claim: its saves are refused
        newest = max(goes_on)
        assert [attempt for attempt, record_id in goes_on.items() if record_id == final.record_id] == [newest]


@pytest.mark.parametrize("begun", ["no", "claimed", "saved", "another run", "from a checkpoint"])
def test_a_run_that_never_began_takes_back_what_it_pinned(store: Store, begun: str) -> None:
    # Given a start that ended for a row of its data
    config = run(store)
    opened(config, store, **{ORIGIN_FIELD if begun == "from a checkpoint" else "model.uri": "a" * 40})
    if begun == "claimed":
        started(store, "second")
    if begun == "saved":
        saved(run(store, uid="second"), store, 10)

    # When its supervisor ends it, then its record goes, but not that of another run, or of one that has begun
    forget_unbegun(run(store, **SEED) if begun == "another run" else config, store)
    assert (look(config, store) is None) == (begun == "no")
