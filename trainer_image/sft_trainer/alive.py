"""Does anybody train here? Who does puts a sign of life into the place each minute, and who comes watches for one.

No clocks are compared, and none of the store is needed: what changes while it is watched is alive.
"""

import logging
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from pydantic import ValidationError

from sft_api.place import ALIVE_KEY, LONGEST_RECORD, Beat
from sft_api.progress import Phase
from sft_api.trainer_config import TrainerConfig

from .checkpoint.catalog import Catalog
from .checkpoint.errors import AttemptSupersededError
from .checkpoint.store import Store
from .errors import PlaceInUseError, StorageNotFoundError
from .events import Claimed, Control, Ended, Listener, Outcome, Request
from .reporting import Reporter

log = logging.getLogger("sft_trainer")

BEAT_SECONDS = 60.0
WATCH_SECONDS = 3 * BEAT_SECONDS
_LOOK_SECONDS = 5.0
_LAST_WORD_SECONDS = 10.0
"""The end of a run waits no longer for its last sign: a store that is away takes it for dead after a while."""


class Alive(Listener):
    """Puts signs of life by a thread that no step waits for. The last one says how the run ended, where this process
    knows that nobody starts it again: it is complete, or its pod was asked to stop. Else its supervisor says so."""

    def __init__(
        self, config: TrainerConfig, store: Store, stop_file: Path, *, beat_seconds: float = BEAT_SECONDS
    ) -> None:
        """``stop_file`` is there once this pod was asked to stop."""
        self._config = config
        self._store = store
        self._stop_file = stop_file
        self._seconds = beat_seconds
        self._thread: threading.Thread | None = None
        self._control = Control()
        self._over = threading.Event()
        self._ended = ""
        self.superseded: AttemptSupersededError | None = None
        """Why this attempt must stop, once a newer one was found in its place."""

    def on_claim(self, event: Claimed, control: Control) -> None:
        first = sign(self._config, event.attempt)
        self._control = control
        self._thread = threading.Thread(target=self._put, args=(first,), name="alive", daemon=True)
        self._thread.start()

    def on_end(self, event: Ended, control: Control) -> None:
        if event.outcome is Outcome.COMPLETE or self._stop_file.exists():
            self._ended = event.outcome.value
        self._over.set()
        if self._thread is not None:
            self._thread.join(_LAST_WORD_SECONDS)

    def _put(self, beat: Beat) -> None:
        last = False
        while not last:
            last = self._over.is_set()
            if last and not self._ended:
                return  # a start that follows does not wait for a sign that says nothing
            try:
                there = read_beat(self._store)
                newer = isinstance(there, Beat) and there.attempt > beat.attempt
                if newer or (there is None and beat.count):
                    # What is left of signs says nothing by itself: the claims do.
                    Catalog(self._store).check_newest(beat.attempt, beat.uid)
                beat = beat.model_copy(update={"count": beat.count + 1, "ended": self._ended if last else ""})
                self._store.put(ALIVE_KEY, beat.model_dump_json(by_alias=True).encode())
            except AttemptSupersededError as error:
                # It is theirs now. What this attempt would save says so, and no step after that is worth its time.
                self.superseded = error
                self._control.ask(Request.STOP)
                return
            except Exception as error:  # of whatever kind: who lives must not look dead for one sign that is missing
                log.info("%s was not written: %s: %s", ALIVE_KEY, type(error).__name__, error)
            if not last:
                self._over.wait(self._seconds)


def sign(config: TrainerConfig, attempt: int) -> Beat:
    """The sign of life of ``attempt`` on this machine."""
    job = config.job
    return Beat(attempt=attempt, name=job.name, namespace=job.namespace, uid=job.uid, host=socket.gethostname())


def say_ended(config: TrainerConfig, store: Store, attempt: int) -> None:
    """Have the last sign of life say that the run failed: by who knows that nothing starts it again, as its processes
    did not. ``attempt`` is its last one: signs of a later one, of another object, and such words stay as they are."""
    there = read_beat(store)
    if isinstance(there, Beat) and there.uid == config.job.uid and there.attempt <= attempt and not there.ended:
        last = there.model_copy(update={"count": there.count + 1, "ended": Outcome.FAILED.value})
        store.put(ALIVE_KEY, last.model_dump_json(by_alias=True).encode())


def read_beat(store: Store) -> Beat | bytes | None:
    """The sign of life in ``store``; its bytes when they say nothing to this program."""
    try:
        raw = store.read(ALIVE_KEY, LONGEST_RECORD)
    except StorageNotFoundError:
        return None
    try:
        return Beat.model_validate_json(raw)
    except ValidationError:
        return raw


def watch(
    config: TrainerConfig,
    store: Store,
    reporter: Reporter,
    *,
    take_over: str = "",
    sleep: Callable[[float], None] = time.sleep,
) -> Beat | bytes | None:
    """Return when nobody else trains in ``store``, or nobody gives a sign of life for ``WATCH_SECONDS``; with the sign
    there.

    This very object need not be watched: it is about to fence itself. Nor does who was asked to ``take_over`` by a word
    that has not counted yet. Raises ``PlaceInUseError`` as soon as there is another sign. Says all the time what it
    waits for.
    """
    first = read_beat(store)
    if not _may_be_anothers(first, config):
        return first
    holder = name_of(first)
    if take_over and not _has_counted(take_over, config, store):
        reporter.say("%s is taken over from %s, as was asked", store.uri, holder)
        return first

    def tell(waited: float) -> None:
        reporter.phase(
            Phase.STARTING,
            f"{holder} trained in {store.uri} and did not say that it ended: it is watched for a sign of life, "
            f"{waited:.0f} of {WATCH_SECONDS:.0f} s",
        )

    found, waited = next_sign(store, first, tell, sleep=sleep)
    if found is not None:
        raise _in_use(store, str(found) if isinstance(found, Beat) else holder)
    if waited >= WATCH_SECONDS:
        reporter.say("%s gave no sign of life for %.0f s: the run in %s goes on here", holder, waited, store.uri)
    return first


def check_nobody_came(config: TrainerConfig, store: Store, seen: Beat | bytes | None, *, take_over: str = "") -> None:
    """Raise ``PlaceInUseError`` when another object has given a sign of life in ``store`` since ``watch`` has ``seen``
    the one there: what a start fetches and tokenises between that and its claim may take hours.

    Not for who was asked to ``take_over`` by a word that has not counted yet.
    """
    now = read_beat(store)
    if now == seen or not _may_be_anothers(now, config):
        return
    if not take_over or _has_counted(take_over, config, store):
        raise _in_use(store, name_of(now))


def _may_be_anothers(sign: Beat | bytes | None, config: TrainerConfig) -> bool:
    """Whether ``sign`` may be that of another object than this one, which has not said that it ended."""
    return sign is not None and not (isinstance(sign, Beat) and (sign.ended or sign.uid == config.job.uid))


def _in_use(store: Store, holder: str) -> PlaceInUseError:
    return PlaceInUseError(
        f"{store.uri} is in use: {holder} trains there now. Delete or suspend that job and start this one again, which "
        "then goes on from its last checkpoint; or end it from here: sft retry --take-over (sft run --take-over); or "
        "give this one another metadata.name and checkpoint.uri"
    )


def _has_counted(word: str, config: TrainerConfig, store: Store) -> bool:
    """Whether an earlier start of this object has claimed an attempt because of ``word``: who came since may stay."""
    claim = Catalog(store).newest_claim_of(config.job.uid)
    return claim is not None and claim.took_over == word


def next_sign(
    store: Store,
    first: Beat | bytes | None,
    tell: Callable[[float], None],
    *,
    sleep: Callable[[float], None],
) -> tuple[Beat | bytes | None, float]:
    """Watch for a sign of life other than ``first``, for ``WATCH_SECONDS``; that sign, and how long it took.

    No sign: nobody gave one, or somebody said meanwhile that it ended. ``tell`` is told how long it has been watched.
    """
    waited = 0.0
    while waited < WATCH_SECONDS:
        tell(waited)
        pause = min(_LOOK_SECONDS, WATCH_SECONDS - waited)
        sleep(pause)
        waited += pause
        now = read_beat(store)
        if (now is None and first is not None) or (isinstance(now, Beat) and now.ended):
            break
        if now != first:
            return now, waited
    return None, waited


def name_of(sign: Beat | bytes | None) -> str:
    """Who gave that sign of life."""
    return str(sign) if isinstance(sign, Beat) else "somebody"
