"""A run that is complete is not trained again, whoever starts it: its export is made if it is missing, and no more."""

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from sft_api.checkpoints import STATUS_KEY, CheckpointId, Manifest
from sft_api.place import DONE_KEY, LONGEST_RECORD, Done, ExportRecord, complete_progress, encode_done, form_of
from sft_api.progress import Phase, TrainingProgress
from sft_api.trainer_config import TrainerConfig
from sft_api.v1alpha1 import ExportStatus

from .cache import cache_directory
from .checkpoint.catalog import Catalog, Skipped
from .checkpoint.errors import CheckpointCorruptError
from .checkpoint.group import CheckpointGroup
from .checkpoint.opening import store_at
from .checkpoint.store import S3Settings, Store
from .errors import ConfigError, StorageNotFoundError, TrainingError
from .events import Control, Ended, Listener, Outcome
from .export.record import is_finished, refuse_other_run
from .fetch import localise
from .figures import Figures
from .outage import of_another_place
from .reporting import Reporter
from .revisions import pinned
from .saving import Saving
from .topology import ALONE

log = logging.getLogger("sft_trainer")


class DoneFile(Listener):
    """Writes the word when the run is complete and its last checkpoint is found whole; for one process of a run."""

    def __init__(self, store: Store, saving: Saving) -> None:
        self._store = store
        self._saving = saving
        self._written = False

    def on_end(self, event: Ended, control: Control) -> None:
        if event.outcome is Outcome.COMPLETE and not self._written:
            self.write(event.step)

    def write(self, step: int) -> None:
        """Write it, after the last ``step``."""
        last = self._saving.checkpoint_of(step)
        try:
            catalog = Catalog(self._store)
            found = catalog.find(last)
            if isinstance(found, Skipped):
                log.warning("%s is not written: %s", DONE_KEY, found)
            else:
                why, best = Figures.recorded(found).stopped_early, _best(catalog)
                done = Done(step=last.step, attempt=last.attempt, stopped_early=why, best=best)
                self._store.put(DONE_KEY, encode_done(done))
                self._written = True
        except TrainingError as error:
            # Who starts the run again finds the last checkpoint, no step to do, and writes it then.
            log.warning("%s was not written: %s", DONE_KEY, error)


def _best(catalog: Catalog) -> str:
    best = catalog.best()
    return best.id.folder if best else ""


def end_again(
    config: TrainerConfig,
    store: Store,
    done: Done,
    revisions: Mapping[str, str],
    reporter: Reporter,
    copied: Callable[[ExportStatus], ExportStatus] = lambda export: export,
) -> None:
    """Report the run in ``store`` as the complete one that it is, after its export was made if that is missing.

    For the one process that writes for all. ``copied`` has the export, once it is there, uploaded where that is
    missing. Raises ``ConfigError`` when neither its last checkpoint nor its export is
    there, or the export is missing and its checkpoint damaged, and what the export raises.
    """
    catalog = Catalog(store)
    found = catalog.find(CheckpointId(done.attempt, done.step))
    if config.spec.export.checkpoint == "best" and not done.best:
        done = done.model_copy(update={"best": _best(catalog)})
    chosen = catalog.find(done.exported(config.spec.export.checkpoint))
    exports = _exports(config, done, chosen, reporter, store, revisions)
    # What is exported is the last one or the best: without it, and without an export that is there, none can be made.
    needed = found if config.export_uri is None else chosen
    if isinstance(needed, Skipped) and exports is None:
        which = f"{'last' if needed == found else 'best'} checkpoint"
        wanted = f" nor its export in {config.export_uri}" if config.export_uri else ""
        raise ConfigError(
            f"the run in {store.uri} is complete since step {done.step}, but neither its {which}{wanted} can be used "
            f"({needed}): restore one of them; to train it again, name another place in checkpoint.uri"
        )
    last = found if isinstance(found, Manifest) else None
    exports = copied(exports) if exports is not None else None
    progress = complete_progress(store.uri, done, last, _reported(store), exports)
    of_this_start = ("warnings", "phase", "phase_detail", "storage_outage", "spent", "data_seconds", "update_time")
    told = [name for name in TrainingProgress.model_fields if name not in of_this_start]
    reporter.update(**{name: getattr(progress, name) for name in told})
    reporter.say("the run in %s is complete since step %s: nothing is left to train", store.uri, done.step)
    reporter.phase(Phase.COMPLETE)


def _exports(
    config: TrainerConfig,
    done: Done,
    found: Manifest | Skipped,
    reporter: Reporter,
    store: Store,
    revisions: Mapping[str, str],
) -> ExportStatus | None:
    """The export of the checkpoint ``found``, made if it is missing; None where none is asked for, or can be had."""
    uri = config.export_uri
    if uri is None:
        return None
    target = store_at(uri, config)
    numbers, choice = config.numbers(), config.spec.export.checkpoint
    manifest = found if isinstance(found, Manifest) else None
    refuse_other_run(target, config.job.name, numbers.digest)
    wanted = ExportRecord.of_done(config.job.name, numbers, done, manifest, form_of(config.spec), choice)
    if not is_finished(target, wanted):
        if isinstance(found, Skipped):
            return None
        try:
            _export(config, found, store, target, revisions, reporter)
        except CheckpointCorruptError as error:
            # Bytes that lie there do not mend themselves: who tries again, as after damage on the way, tries in vain.
            raise ConfigError(
                f"the run in {store.uri} is complete since step {done.step}, but its export in {uri} is missing, and "
                f"{error}: restore that checkpoint, or export another one (sft export --step); to train it again, name "
                "another place in checkpoint.uri"
            ) from error
    return ExportStatus(uri=uri, step=done.exported(choice).step)


def _export(
    config: TrainerConfig,
    manifest: Manifest,
    store: Store,
    target: Store,
    revisions: Mapping[str, str],
    reporter: Reporter,
) -> None:
    # Not at the top: the look before the imports needs none of what these need.
    from .export.alone import exported_alone
    from .export.exporting import export_checkpoint

    s3 = S3Settings.from_spec(config.spec.checkpoint.s3)

    def fetch(uri: str, kind: Literal["model", "tokenizer"]) -> Path:
        def told(count: int) -> None:
            reporter.alive(Phase.EXPORTING, f"fetching {uri}: {count / 2**30:.1f} GiB")

        reporter.phase(Phase.EXPORTING, f"fetching {uri}")
        with of_another_place():
            return localise(uri, cache_directory(), s3, os.environ.get("HF_TOKEN"), kind=kind, on_progress=told)

    done = 0

    def count(more: int) -> None:
        nonlocal done
        done += more
        reporter.alive(Phase.EXPORTING, f"{target.uri}: {done / 2**20:.0f} MiB read and written")

    exported = exported_alone(config, pinned(config, revisions).spec.model, store, manifest, fetch, reporter.warn)
    export_checkpoint(exported, target, CheckpointGroup(ALONE), on_bytes=count)


def _reported(store: Store) -> TrainingProgress | None:
    """What the run reported last; None where that cannot be read."""
    try:
        return TrainingProgress.model_validate_json(store.read(STATUS_KEY, LONGEST_RECORD), extra="ignore")
    except (StorageNotFoundError, ValidationError):
        return None
