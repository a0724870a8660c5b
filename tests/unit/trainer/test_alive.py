"""Who trains in a place is found out by watching, without a clock, and says how it ended when it can."""

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sft_api.checkpoints import attempt_key
from sft_api.place import ALIVE_KEY, Beat
from sft_api.progress import Phase
from sft_trainer.alive import Alive, check_nobody_came, read_beat, say_ended, watch
from sft_trainer.checkpoint.catalog import Catalog
from sft_trainer.checkpoint.errors import StoreSharedError
from sft_trainer.checkpoint.local import LocalStore
from sft_trainer.checkpoint.protocol import Protocol
from sft_trainer.checkpoint.store import StoredObject
from sft_trainer.entering import Entered
from sft_trainer.errors import PlaceInUseError, StopRequested, StorageUnavailableError
from sft_trainer.events import Claimed, Control, Ended, Request
from sft_trainer.place import open_place
from sft_trainer.reporting import Reporter
from sft_trainer.trainer import Trainer
from tests.parity.runs import manifest, resolve
from tests.waiting import wait_until


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


def beat(store: LocalStore, uid: str = "other", count: int = 1, ended: str = "", attempt: int = 3) -> None:
    written = Beat(attempt=attempt, name="tiny", namespace="team", uid=uid, host="node-7", count=count, ended=ended)
    store.put(ALIVE_KEY, written.model_dump_json(by_alias=True).encode())


def watched(
    store: LocalStore, folder: Path, during: Callable[[float], None] = lambda at: None
) -> tuple[float, Reporter]:
    """Seconds that a start watched, while ``during`` happened at each of them."""
    reporter, waited = Reporter(folder, writes=True), 0.0

    def sleep(seconds: float) -> None:
        nonlocal waited
        waited += seconds
        during(waited)

    config = resolve(manifest(folder, folder))
    watch(config, store, reporter, sleep=sleep)
    return waited, reporter


def test_a_place_in_which_nobody_trains_is_not_watched(store: LocalStore, tmp_path: Path) -> None:
    assert watched(store, tmp_path)[0] == 0
    for ended in ("complete", "stopped", "failed"):
        beat(store, ended=ended)
        assert watched(store, tmp_path)[0] == 0
    beat(store, uid="parity")  # this very object: it fences itself
    assert watched(store, tmp_path)[0] == 0


def test_silence_is_waited_for_and_what_for_is_said(store: LocalStore, tmp_path: Path) -> None:
    beat(store)
    said: list[str] = []
    reporter = Reporter(tmp_path, writes=True)
    config = resolve(manifest(tmp_path, tmp_path))
    watch(config, store, reporter, sleep=lambda _: said.append(reporter.progress.phase_detail))
    assert reporter.progress.phase is Phase.STARTING
    assert len(set(said)) == len(said) == 36, "another word each time: it is no hang"
    assert said[-1] == (
        f"team/tiny (uid other, attempt 3, on node-7) trained in {store.uri} and did not say that it ended: it is "
        "watched for a sign of life, 175 of 180 s"
    )


def test_another_sign_is_a_holder_who_is_named(store: LocalStore, tmp_path: Path) -> None:
    beat(store, count=8)
    sentence = r"is in use: team/tiny \(uid other, attempt 3, on node-7\) trains there now\. Delete or suspend"
    at: list[float] = []

    def during(seconds: float) -> None:
        at.append(seconds)
        if seconds == 60:
            beat(store, count=9)

    with pytest.raises(PlaceInUseError, match=sentence):
        watched(store, tmp_path, during)
    assert at[-1] == 60, "as soon as there is one"


def test_who_was_asked_to_take_over_does_so_once(store: LocalStore, tmp_path: Path) -> None:
    config = resolve(manifest(tmp_path, tmp_path))

    def enters(word: str) -> float:
        waited: list[float] = []
        reporter = Reporter(tmp_path, writes=True)
        watch(config, store, reporter, take_over=word, sleep=waited.append)
        return sum(waited)

    # Given another one, of which nobody knows whether it lives
    claims = Protocol(store)
    claims.claim("other")
    beat(store)
    # The first start after the word does not wait; its claim says for which word
    assert enters("now") == 0
    assert claims.claim(config.job.uid, took_over="now").took_over == "now"
    # Who comes after that is watched like any other; a new word counts anew
    claims.claim("other")
    beat(store, attempt=3)
    assert enters("now") == 180
    assert enters("again") == 0


def test_who_ends_meanwhile_makes_room_at_once(store: LocalStore, tmp_path: Path) -> None:
    beat(store)
    assert watched(store, tmp_path, lambda at: beat(store, count=2, ended="stopped") if at == 30 else None)[0] == 30
    beat(store)
    assert watched(store, tmp_path, lambda at: store.delete([ALIVE_KEY]) if at == 10 else None)[0] == 10


@pytest.mark.parametrize("seen", ["nobody", "silence", "itself"])
def test_who_came_while_data_was_prepared_is_not_fenced(store: LocalStore, tmp_path: Path, seen: str) -> None:
    # Given a start that found nobody alive
    config = resolve(manifest(tmp_path, tmp_path)).model_copy(update={"checkpoint_uri": store.uri})
    open_place(config, store, conditional=store.probe().conditional_writes, revisions=dict)
    if seen != "nobody":
        beat(store, uid=config.job.uid if seen == "itself" else "other")
    ranks = SimpleNamespace(rank=0, local_rank=0, local_world_size=1, world_size=1)
    begins = Trainer(config, ranks, tmp_path)  # type: ignore[arg-type]
    sign = watch(config, store, begins.reporter, sleep=lambda _: None)
    begins.device, begins.store, begins._place = torch.device("cpu"), store, Entered(None, None, sign)

    # When another object has claimed an attempt there before its data was tokenised
    Protocol(store).claim("other")
    beat(store, attempt=4)

    # Then it leaves that one alone,
    with pytest.raises(PlaceInUseError, match=r"is in use: team/tiny \(uid other, attempt 4, on node-7\) trains there"):
        begins._claim()
    assert Catalog(store).newest_attempt() == 1
    # unless a user has asked that it takes the place over, or that one has ended meanwhile
    check_nobody_came(config, store, sign, take_over="now")
    beat(store, attempt=4, count=2, ended="stopped")
    check_nobody_came(config, store, sign)


def test_a_sign_that_says_nothing_is_watched_all_the_same(store: LocalStore, tmp_path: Path) -> None:
    store.put(ALIVE_KEY, b'{"attempt": ')
    assert watched(store, tmp_path)[0] == 180
    with pytest.raises(PlaceInUseError, match="is in use: somebody trains there now"):
        watched(store, tmp_path, lambda at: store.put(ALIVE_KEY, b"{"))


@pytest.mark.parametrize(
    ("error", "asked", "word"),
    [
        (None, False, "complete"),
        (StopRequested("asked"), True, "stopped"),
        (KeyboardInterrupt(), True, "failed"),
        # A supervisor may start it again at once, as it does when another pod was asked to stop
        (StopRequested("asked"), False, ""),
        (KeyboardInterrupt(), False, ""),
    ],
)
def test_the_last_sign_says_how_it_ended_where_nobody_starts_it_again(
    store: LocalStore, tmp_path: Path, error: BaseException | None, asked: bool, word: str
) -> None:
    config = resolve(manifest(tmp_path, tmp_path))

    def count() -> int:
        there = read_beat(store)
        return there.count if isinstance(there, Beat) else 0

    alive, control = Alive(config, store, tmp_path / "stop", beat_seconds=0.01), Control()
    alive.on_claim(Claimed(4, 60), control)
    wait_until(lambda: count() >= 3)
    if asked:
        (tmp_path / "stop").touch()
    alive.on_end(Ended(20, error), control)
    last = read_beat(store)
    assert isinstance(last, Beat)
    assert (last.ended, last.attempt, last.uid) == (word, 4, "parity")


def test_who_ends_it_for_good_says_so_for_its_own_object_alone(store: LocalStore, tmp_path: Path) -> None:
    config = resolve(manifest(tmp_path, tmp_path))
    say_ended(config, store, 3)
    assert read_beat(store) is None
    # The last: who goes on as the same object may be another pod
    for uid, ended, attempt in (("other", "", 3), ("parity", "stopped", 3), ("parity", "", 4)):
        beat(store, uid=uid, ended=ended, attempt=attempt)
        before = store.read(ALIVE_KEY)
        say_ended(config, store, 3)
        assert store.read(ALIVE_KEY) == before
    beat(store, uid="parity", count=7)
    say_ended(config, store, 3)
    last = read_beat(store)
    assert isinstance(last, Beat)
    assert (last.ended, last.count, last.attempt) == ("failed", 8, 3)


def claimed(store: LocalStore, tmp_path: Path, uid: str = "parity") -> tuple[Alive, Control, int]:
    """The signs of a run that has claimed an attempt, before the first one."""
    attempt = Protocol(store).claim(uid).attempt
    config = resolve(manifest(tmp_path, tmp_path))
    return Alive(config, store, tmp_path / "stop", beat_seconds=0.01), Control(), attempt


def stops(control: Control) -> bool:
    return bool(control.asked()[list(Request).index(Request.STOP)])


def test_a_newer_attempt_is_not_written_over(store: LocalStore, tmp_path: Path) -> None:
    alive, control, attempt = claimed(store, tmp_path)
    beat(store, attempt=Protocol(store).claim("parity").attempt)
    before = store.read(ALIVE_KEY)
    alive.on_claim(Claimed(attempt, 60), control)
    alive.on_end(Ended(20), control)
    assert store.read(ALIVE_KEY) == before
    assert stops(control), "no step of the older one is worth its time"
    assert "attempt 1 was superseded: attempt 2" in str(alive.superseded), "so that it is not started again"


def test_a_claim_that_was_taken_back_since_it_was_listed_stops_nobody(tmp_path: Path) -> None:
    # Given a start that was refused after its claim, of which a listing still tells
    class Listed(LocalStore):
        def list(self, prefix: str) -> list[StoredObject]:
            return [*super().list(prefix), StoredObject(attempt_key(3), 1)]

    store = Listed(tmp_path / "store")
    Protocol(LocalStore(tmp_path / "store")).claim("ours")
    Catalog(store).check_newest(1, "ours")

    # But one that stands below it does
    Protocol(LocalStore(tmp_path / "store")).claim("other")
    with pytest.raises(StoreSharedError, match="attempt 1 was superseded: attempt 2 was claimed"):
        Catalog(store).check_newest(1, "ours")


def test_a_sign_that_was_left_behind_stops_nobody(store: LocalStore, tmp_path: Path) -> None:
    # Given a sign with a higher number, of which nothing else is there
    alive, control, attempt = claimed(store, tmp_path)
    beat(store, attempt=9, ended="failed")
    alive.on_claim(Claimed(attempt, 60), control)
    alive.on_end(Ended(20), control)
    last = read_beat(store)
    assert isinstance(last, Beat)
    assert (last.attempt, last.ended) == (attempt, "complete")
    assert not stops(control)


def test_a_place_that_was_removed_meanwhile_gets_no_sign(store: LocalStore, tmp_path: Path) -> None:
    # Given a run whose pod was out of reach when its place was removed
    alive, control, attempt = claimed(store, tmp_path)
    alive.on_claim(Claimed(attempt, 60), control)
    wait_until(lambda: read_beat(store) is not None)
    store.delete([attempt_key(attempt)])

    def found_out() -> bool:
        store.delete([ALIVE_KEY])  # also one that was on its way
        return alive.superseded is not None

    wait_until(found_out)
    alive.on_end(Ended(20), control)
    assert read_beat(store) is None
    assert stops(control)


def test_a_store_that_is_away_keeps_nobody(tmp_path: Path) -> None:
    tried = threading.Event()

    class Away(LocalStore):
        def put(self, key: str, data: bytes) -> None:
            tried.set()
            raise StorageUnavailableError("out")

    alive, control = Alive(resolve(manifest(tmp_path, tmp_path)), Away(tmp_path), tmp_path / "stop"), Control()
    alive.on_claim(Claimed(1, 60), control)
    assert tried.wait(60)
    alive.on_end(Ended(20), control)


def test_a_run_that_never_came_to_an_attempt_leaves_no_sign(store: LocalStore, tmp_path: Path) -> None:
    config = resolve(manifest(tmp_path, tmp_path))
    Alive(config, store, tmp_path / "stop").on_end(Ended(0, KeyboardInterrupt()), Control())
    assert read_beat(store) is None
