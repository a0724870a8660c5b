"""Whose model lies in a folder: an export never takes away that of another run, nor writes again what is there."""

import contextlib
import logging

from pydantic import ValidationError

from sft_api.place import EXPORT_MARK, EXPORT_RECORD, ExportRecord
from sft_trainer.checkpoint.store import Store
from sft_trainer.errors import AccessDeniedError, ConfigError, StorageNotFoundError

log = logging.getLogger("sft_trainer")


def read_export(target: Store) -> ExportRecord | None:
    """The record in ``target``; None where there is none that says anything."""
    try:
        return ExportRecord.model_validate_json(target.read(EXPORT_RECORD))
    except (StorageNotFoundError, AccessDeniedError):
        return None
    except ValidationError as error:
        log.warning("%s/%s says nothing: %s", target.uri, EXPORT_RECORD, error.errors()[0]["msg"])
        return None


def refuse_other_run(target: Store, name: str, digest: str) -> None:
    """Raise ``ConfigError`` when another run's model lies in ``target``, or was begun there."""
    found = read_export(target)
    if found is not None and (found.name, found.digest) != (name, digest):
        other = found.name if found.name != name else f"{found.name} with other settings"
        raise ConfigError(
            f"{target.uri} holds the model of the run {other} ({found.checkpoint}), which is not written over: name "
            "another place in export.uri, or remove what is there"
        )


def is_finished(target: Store, wanted: ExportRecord) -> bool:
    """Whether the model that ``wanted`` names lies in ``target``, whole as far as sizes tell."""
    found = read_export(target)
    if found is None or not found.files:
        return False
    try:
        sizes = {entry.key: entry.size for entry in target.list(wanted.weights)}
        sizes[wanted.config] = len(target.read(wanted.config))
    except (StorageNotFoundError, AccessDeniedError):
        return False
    with contextlib.suppress(StorageNotFoundError):
        sizes[EXPORT_MARK] = len(target.read(EXPORT_MARK))
    return wanted.is_whole(found, sizes)
