"""Whose model lies in a folder: an export never takes away that of another run, nor writes again what is there."""

import json
import logging
from typing import Annotated

from pydantic import Field, ValidationError

from sft_api.checkpoints import Manifest, StoredModel
from sft_api.numbers import Numbers, NumbersError
from sft_trainer.checkpoint.store import Store
from sft_trainer.errors import AccessDeniedError, ConfigError, StorageNotFoundError

log = logging.getLogger("sft_trainer")

CONFIG = "config.json"
"""The last file of an export: a folder without it is not a model yet."""
RECORD = "training-run.json"
"""Lies beside ``config.json``, from before the first file of weights on."""
MARK = "unfinished-export.json"
"""Lies in the folder while an export goes on, and says of what."""


class ExportRecord(StoredModel):
    """Of which run and checkpoint the model in a folder is. Equal for equal models."""

    name: str
    digest: str
    """Of the numbers of the run."""
    checkpoint: str
    """Its folder."""
    index: str = ""
    """SHA-256 of its index, which has a digest of every piece; empty where it has none, or is gone."""
    files: dict[str, Annotated[int, Field(ge=0)]] = Field(default_factory=dict)
    """Bytes of each file of weights, once all are there."""

    @classmethod
    def of(cls, name: str, manifest: Manifest) -> "ExportRecord":
        """The record of an export of the checkpoint of ``manifest`` that begins."""
        try:
            digest = Numbers.read(manifest.run.numbers).digest
        except NumbersError:
            digest = manifest.run.config_digest
        return cls(name=name, digest=digest, checkpoint=manifest.id.folder, index=index_of(manifest))

    def encoded(self) -> bytes:
        return json.dumps(self.model_dump(mode="json", by_alias=True), indent=1).encode() + b"\n"


def index_of(manifest: Manifest) -> str:
    """The digest of the index of a checkpoint; empty where its format has none."""
    return manifest.index.sha256 if manifest.index else ""


def read_export(target: Store) -> ExportRecord | None:
    """The record in ``target``; None where there is none that says anything."""
    try:
        return ExportRecord.model_validate_json(target.read(RECORD))
    except (StorageNotFoundError, AccessDeniedError):
        return None
    except ValidationError as error:
        log.warning("%s/%s says nothing: %s", target.uri, RECORD, error.errors()[0]["msg"])
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
    """Whether the model that ``wanted`` names lies in ``target``, whole as far as sizes tell.

    A run that was removed and trained again has checkpoints of the same names: they are told apart by their indices,
    where ``wanted`` has one.
    """
    found = read_export(target)
    if found is None or not found.files:
        return False
    if found.model_copy(update={"files": {}}) != wanted.model_copy(update={"index": wanted.index or found.index}):
        return False
    try:
        present = {entry.key: entry.size for entry in target.list("model")}
        target.read(CONFIG)
    except (StorageNotFoundError, AccessDeniedError):
        return False
    return all(present.get(name) == size for name, size in found.files.items()) and not _unfinished(target)


def _unfinished(target: Store) -> bool:
    try:
        target.read(MARK)
    except StorageNotFoundError:
        return False
    return True
