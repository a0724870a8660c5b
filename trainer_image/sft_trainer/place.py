"""Whose place this is: a run is known by what lies where it saves, not by the object that started it (0013).

The record is made by the one process that writes for all, and read by every later start. Without conditional creates it
is written, and after a while read back: of two that begin at once the last one stays.
"""

import logging
import time
import uuid
from collections.abc import Callable, Mapping
from datetime import UTC, datetime

from sft_api.checkpoints import Manifest, RunState
from sft_api.numbers import Numbers, NumbersError
from sft_api.peft_files import FIELD as ADAPTER_FIELD
from sft_api.place import (
    DONE_KEY,
    LONGEST_RECORD,
    ORIGIN_FIELD,
    RUN_KEY,
    Done,
    RecordError,
    RunRecord,
    continued_from,
    decode_done,
    decode_record,
    doubts_of_weights,
    encode_record,
)
from sft_api.trainer_config import TrainerConfig

from .checkpoint.catalog import Catalog
from .checkpoint.store import Store
from .errors import ConfigError, StorageNotFoundError, StorageUnavailableError

log = logging.getLogger("sft_trainer")

SETTLE_SECONDS = 3.0
"""How long a record that was written without a condition, or that cannot be read yet, is given."""
_ELSE = "give this run another metadata.name or checkpoint.uri"


def read_record(store: Store, sleep: Callable[[float], None] = time.sleep) -> RunRecord | None:
    """The record in ``store``; None where there is none. Raises ``ConfigError`` for one that cannot be read."""
    problem = None
    for wait in (0.0, SETTLE_SECONDS):
        # On file systems without hard links it is empty for an instant.
        sleep(wait)
        try:
            return decode_record(store.read(RUN_KEY, LONGEST_RECORD))
        except StorageNotFoundError:
            return None
        except RecordError as error:
            problem = error
    raise ConfigError(
        f"{store.uri}/{RUN_KEY} says whose checkpoints these are, and cannot be used: {problem}; it is never written "
        f"over: restore it, remove it where the checkpoints beside it are this run's, or {_ELSE}"
    ) from problem


def read_done(store: Store) -> Done | None:
    """The word that the run in ``store`` is complete; raises ``ConfigError`` for one that cannot be read."""
    try:
        return decode_done(store.read(DONE_KEY, LONGEST_RECORD))
    except StorageNotFoundError:
        return None
    except RecordError as error:
        raise ConfigError(
            f"{store.uri}/{DONE_KEY} says that this run is complete, and cannot be used: {error}; restore it, or "
            "remove it to go on from the newest checkpoint beside it"
        ) from error


def look(config: TrainerConfig, store: Store) -> RunRecord | None:
    """The record of this very run; None when the place is free for it. Changes nothing.

    Raises ``ConfigError`` when the place is another run's, with what differs; when ``resume.policy`` is never and
    another start of the run has saved there. A record of a run that has saved nothing keeps nobody away.
    """
    record, stale = _look(config, store)
    return None if stale else record


def read_own_record(config: TrainerConfig, store: Store) -> RunRecord | None:
    """The record in ``store`` if it is this very run's; None too where another one is about to be replaced, or refused.

    For who does not make it. Raises ``ConfigError`` for one that cannot be read.
    """
    record = read_record(store)
    return None if record is None or _differences(config, record) else record


def _look(config: TrainerConfig, store: Store) -> tuple[RunRecord | None, bool]:
    """The record that is there, and whether it is that of a run that has saved nothing; raises what ``look`` raises."""
    record = read_record(store)
    saved = _newest(store)
    if saved is not None and config.spec.checkpoint.resume.policy == "never":
        _refuse_others(config, saved.job_uid)
    if record is None:
        if saved is not None:
            check_same_run(config, saved.run)
        return None, False
    changes = _differences(config, record)
    if not changes:
        return record, False
    if saved is None and nothing_saved(store):
        return record, True
    raise ConfigError(_other_run(config, record, changes) + _to_go_on(config, saved))


def open_place(
    config: TrainerConfig,
    store: Store,
    *,
    conditional: bool,
    revisions: Callable[[], Mapping[str, str]],
    sleep: Callable[[float], None] = time.sleep,
) -> RunRecord:
    """The record of this run, made with the ``revisions`` of now where there is none. For one process of a run.

    ``conditional``: the store has conditional creates. Raises what ``look`` raises.
    """
    found, stale = _look(config, store)
    if found is not None and not stale:
        return found
    mine = _record(config, revisions())
    # To find these out may take long: what has come meanwhile is not written over. Reading and writing are two steps:
    # who loses its own record in between learns it from `check_record`.
    unchanged = read_record(store) == found
    if conditional:
        if found is not None and unchanged:
            store.delete([RUN_KEY])
        store.create(RUN_KEY, encode_record(mine))
    elif unchanged:
        store.put(RUN_KEY, encode_record(mine))
        sleep(SETTLE_SECONDS)
    return _the_same(config, store, mine)


def forget_unbegun(config: TrainerConfig, store: Store) -> None:
    """Take back the record of this run, which ended for its model or data before an attempt was ever claimed here.

    It pins branches of the hub to what was wrong: mended there, it would never be seen. What a checkpoint of another
    run was chosen for stays as it was.
    """
    record = read_own_record(config, store)
    if record is None or ORIGIN_FIELD in record.revisions:
        return
    if Catalog(store).newest_attempt() == 0 and nothing_saved(store):
        store.delete([RUN_KEY])


def check_record(config: TrainerConfig, store: Store) -> None:
    """Raise ``ConfigError`` unless the record in ``store`` is still this run's; when it is gone, to try again.

    After the claim of an attempt: whoever writes another record later claims later too, and stops this one.
    """
    record = read_record(store)
    if record is None:
        raise StorageUnavailableError(f"{store.uri}/{RUN_KEY} was removed while this run began")
    if changes := _differences(config, record):
        raise ConfigError(_other_run(config, record, changes))


def check_same_run(config: TrainerConfig, run: RunState) -> None:
    """Refuse a checkpoint of other numbers: going on from it would train something nobody asked for."""
    try:
        changes = Numbers.read(run.numbers).differences(config.numbers())
    except NumbersError as error:
        raise ConfigError(
            f"{config.checkpoint_uri} holds checkpoints that cannot be compared with this run: {error}; go on with the "
            f"version of the trainer that wrote them, or {_ELSE}"
        ) from error
    if changes:
        raise ConfigError(
            f"{config.checkpoint_uri} holds checkpoints of a run with other settings ({', '.join(changes)}): {_ELSE}, "
            "or restore the settings"
        )


def of_another_start(config: TrainerConfig, manifest: Manifest) -> list[str]:
    """What to tell of a run that goes on from what another object saved; nothing when it is its own."""
    if manifest.job_uid == config.job.uid:
        return []
    return [
        f"this run goes on from step {manifest.step}, which attempt {manifest.attempt} of an earlier start saved in "
        f"{config.checkpoint_uri} (its uid was {manifest.job_uid})"
    ]


def begins_anew(config: TrainerConfig) -> str:
    """What to tell of a run that never goes on, and finds what an earlier start of its own has saved."""
    return (
        "checkpoint.resume.policy is never: this start trains from its beginning, and what it saves takes the place of "
        f"the checkpoints in {config.checkpoint_uri}"
    )


def _newest(store: Store) -> Manifest | None:
    """The manifest of the newest checkpoint that is sound."""
    return next((found for found in Catalog(store).candidates() if isinstance(found, Manifest)), None)


def nothing_saved(store: Store) -> bool:
    """Whether there is no checkpoint, sound or not."""
    return next(Catalog(store).candidates(), None) is None


def _differences(config: TrainerConfig, record: RunRecord) -> list[str]:
    try:
        return record.differences(config.job.name, config.numbers())
    except NumbersError as error:  # cannot be: it was read already
        raise ConfigError(f"{config.checkpoint_uri}/{RUN_KEY}: {error}") from error


def _other_run(config: TrainerConfig, record: RunRecord, changes: list[str]) -> str:
    return (
        f"{config.checkpoint_uri} belongs to the run {record.name} with other settings ({', '.join(changes)}); it was "
        f"begun on {record.created:%Y-%m-%d} in namespace {record.namespace}: {_ELSE}, or restore the settings"
    )


def _to_go_on(config: TrainerConfig, saved: Manifest | None) -> str:
    """How another run goes on where this place has ``saved``."""
    if saved is None:
        return ""
    try:
        theirs = Numbers.read(saved.run.numbers)
    except NumbersError:
        return ""
    paste = continued_from(config.checkpoint_uri, saved.step, theirs, config.numbers())
    if not paste:
        return ""
    other = doubts_of_weights(theirs, config.numbers())
    return (
        f"; to go on after its step {saved.step} as another run, give that one a place of its own and, in spec, {paste}"
        + (f", without {ADAPTER_FIELD}" if config.spec.lora and config.spec.lora.adapter_uri else "")
        + (f", but {other}" if other else "")
    )


def _refuse_others(config: TrainerConfig, uid: str) -> None:
    if uid != config.job.uid:
        raise ConfigError(
            f"checkpoint.resume.policy is never, and {config.checkpoint_uri} holds checkpoints of an earlier start "
            f"(uid {uid}): name an empty place in checkpoint.uri, remove what is there, or set the policy to auto"
        )


def _record(config: TrainerConfig, revisions: Mapping[str, str]) -> RunRecord:
    numbers = config.numbers()
    return RunRecord(
        name=config.job.name,
        digest=numbers.digest,
        numbers=numbers.as_record(),
        revisions=dict(revisions),
        namespace=config.job.namespace,
        uid=config.job.uid,
        created=datetime.now(UTC),
        record_id=uuid.uuid4().hex,
    )


def _the_same(config: TrainerConfig, store: Store, mine: RunRecord) -> RunRecord:
    """What stands there after all: this run's record, or that of one that began at the same time."""
    check_record(config, store)
    found = read_record(store)
    if found is None or found.record_id == mine.record_id:
        return mine
    log.info("%s was begun at the same time by %s (uid %s)", store.uri, found.namespace, found.uid)
    return found
