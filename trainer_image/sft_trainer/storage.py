"""Whether a run may save where it is told to; looked at before anything else. Whose place it is, ``place`` knows."""

import shutil

from sft_api.place import Done
from sft_api.progress import Phase
from sft_api.trainer_config import TrainerConfig

from .checkpoint.catalog import Catalog, nothing_removed
from .checkpoint.local import LocalStore
from .checkpoint.opening import store_at
from .checkpoint.protocol import Protocol
from .checkpoint.store import ProbeResult, Store
from .errors import ConfigError, StorageFullError
from .export.record import refuse_other_run
from .place import look, read_done
from .reporting import Reporter


def find_done(config: TrainerConfig, store: Store, reporter: Reporter) -> Done | None:
    """The word that the run in ``store`` is complete. Looked for first: such a run needs no place to write to."""
    reporter.phase(Phase.STARTING, f"checking {config.checkpoint_uri}")
    return read_done(store)


def check_storage(config: TrainerConfig, store: Store, reporter: Reporter) -> bool:
    """Raise what is wrong with the places of checkpoints and export; whether the first has conditional creates.

    For one process, before there is a group, an attempt or any data. Leaves nothing behind where it may remove. Once an
    attempt was claimed it is only warned of that it may not: a right that was revoked keeps no run from its end.
    """
    result = _probe(config, store)
    _tell_not_removed(store, result, store, reporter)
    if not result.conditional_writes:
        reporter.warn(result.message)
    export_uri = config.export_uri
    if export_uri is not None:
        target = store_at(export_uri, config)
        if not export_uri.startswith(f"{config.checkpoint_uri}/"):
            _tell_not_removed(target, target.probe(), store, reporter)
        # Also in the run's own place: an export stays when all else there is removed.
        refuse_other_run(target, config.job.name, config.numbers().digest)
    return result.conditional_writes


def _probe(config: TrainerConfig, store: Store) -> ProbeResult:
    """What ``store`` can do; where it is full, after what a killed save of this very object left there has gone."""
    try:
        return store.probe()
    except StorageFullError:
        protocol = Protocol(store)
        if not protocol.claimed_last_by(config.job.uid) or look(config, store) is None:
            raise
        protocol.make_room()
    return store.probe()


def _tell_not_removed(place: Store, result: ProbeResult, checkpoints: Store, reporter: Reporter) -> None:
    """Raise, before the first attempt in ``checkpoints``, or else tell that in ``place`` nothing may be removed."""
    error = result.not_removed
    if error is None:
        return
    if not Catalog(checkpoints).newest_attempt():
        raise error
    message, begin = nothing_removed(place.uri, error)
    reporter.warn(message, instead_of=begin)


def check_room(store: Store, size: int) -> None:
    """Raise where a folder has no room for the first checkpoint, of ``size`` bytes: training would wait for it in vain.

    What an object store has room for nobody can say; nor what a file system has that says it has no size at all, as
    some do over FUSE, and a tmpfs without a limit.
    """
    if not isinstance(store, LocalStore):
        return
    disk = shutil.disk_usage(store.path)
    if disk.total and disk.free < size:
        raise StorageFullError(
            f"{store.uri} has room for {disk.free / 2**20:,.1f} MiB, and a checkpoint takes {size / 2**20:,.1f} MiB: "
            "make room there, or name another place in checkpoint.uri"
        )


def check_same_base(model_uri: str, recorded: str, here: str) -> None:
    """Refuse to go on on another base than a checkpoint's, which lacks what was not trained.

    ``recorded`` is the digest of the base in the checkpoint's manifest, ``here`` that of the model in ``model_uri``.
    """
    if here != recorded:
        raise ConfigError(
            f"the checkpoints hold only what was trained, and all else comes from the model in {model_uri}, which is "
            f"not the one beside which that was trained: its digest was {recorded[:16] or 'not recorded'} and is "
            f"{here[:16]}; name that model in model.uri, pinned to a commit (@revision), or start anew, with another "
            "metadata.name and without checkpoint.resume.from"
        )
