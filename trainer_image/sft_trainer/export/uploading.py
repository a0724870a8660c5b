"""A copy of an export on the hub: one commit that has all of it, made at most once.

The export stays where it is. Beside it ``HUB_RECORD`` says which commit has its copy. Where that word was lost, the
``EXPORT_RECORD`` in the repository says so: it comes with the model, in the same commit.
"""

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from pydantic import ValidationError

from sft_api.place import EXPORT_RECORD, HUB_RECORD, ExportRecord, HubRecord
from sft_api.trainer_config import TrainerConfig
from sft_api.v1alpha1 import HubSpec, HubStatus
from sft_trainer.cache import cache_directory
from sft_trainer.checkpoint.local import LocalStore
from sft_trainer.checkpoint.opening import store_at
from sft_trainer.checkpoint.store import READ_BLOCK, Store, check_key
from sft_trainer.errors import AccessDeniedError, ConfigError, StorageNotFoundError
from sft_trainer.fetch import check_free, disk_error

from .hub import Head, Repository
from .record import is_finished, read_export

_CARD = "README.md"
_PLACE = re.compile(r"\b(s3|pvc|file)://[^\s`]+")

Told = Callable[[str], None]
"""Told what is being done, in a few words."""


def export_target(config: TrainerConfig) -> Store:
    """Where the run exports to."""
    assert config.export_uri is not None  # noqa: S101 - a rule of the API
    return store_at(config.export_uri, config)


def known_copy(hub: HubSpec, target: Store) -> HubStatus | None:
    """The copy of the export in ``target`` that ``hub`` asks for, where it is known to have been made."""
    try:
        return HubRecord.model_validate_json(target.read(HUB_RECORD)).copy_of(hub, target.read(EXPORT_RECORD))
    except (StorageNotFoundError, AccessDeniedError, ValidationError):
        # Of what is not there some buckets say that it may not be read.
        return None


def upload(hub: HubSpec, target: Store, on_work: Told = lambda words: None) -> HubStatus:
    """Have the repository that ``hub`` names hold the model in ``target``; which commit does.

    Files that the hub has got already are not sent again, and a model that is there already is not committed again. A
    model card that is in the repository stays as it is. Raises ConfigError where there is no whole model in
    ``target``, what the store raises, and what ``Repository`` does.
    """
    record = read_export(target)
    if record is None or not is_finished(target, record.model_copy(update={"files": {}, "beside": []})):
        raise ConfigError(f"there is no whole model in {target.uri} that could be uploaded: export it anew")
    if not record.beside:
        raise ConfigError(
            f"the model in {target.uri} was exported by an older version, which did not write down all its files: "
            "export it to another place (sft export --to), or remove it there"
        )
    repository = Repository(hub, os.environ.get("HF_TOKEN"))
    on_work(repository.url)
    repository.make_ready()
    head, word = repository.head(), target.read(EXPORT_RECORD)
    commit = head.commit if _holds(head, record, word) else _commit(repository, head, target, record, word, on_work)
    copy = HubStatus(url=repository.url, revision=hub.branch, commit=commit)
    target.put(HUB_RECORD, HubRecord.of(hub, word, copy).encoded())
    return copy


def _holds(head: Head, record: ExportRecord, word: bytes) -> bool:
    """Whether the model of ``record``, whose ``EXPORT_RECORD`` is ``word``, is in the branch, whole as sizes tell."""
    if head.blobs.get(EXPORT_RECORD) != _git_blob(word):
        return False
    weights = all(head.sizes.get(name) == size for name, size in record.files.items())
    return weights and all(name in head.sizes for name in record.beside)


def _git_blob(content: bytes) -> str:
    """By which git names a file of ``content``."""
    return hashlib.sha1(b"blob %d\0%s" % (len(content), content), usedforsecurity=False).hexdigest()


def _commit(repository: Repository, head: Head, target: Store, record: ExportRecord, word: bytes, on_work: Told) -> str:
    additions: list[Any] = []
    for number, (name, size) in enumerate(record.files.items(), 1):
        on_work(f"{repository.url}: {name} ({size / 2**20:.0f} MiB, {number} of {len(record.files)})")
        with _as_file(target, name, size) as path:
            additions += repository.send({name: path})
    beside: dict[str, str | bytes] = {EXPORT_RECORD: word}
    beside |= {name: target.read(name) for name in record.beside if name != _CARD}
    if _CARD in record.beside and _CARD not in head.sizes:
        beside[_CARD] = card_for_others(target.read(_CARD).decode()).encode()
    additions += repository.send(beside)
    on_work(f"{repository.url}: the commit")
    title = f"Upload the model of {record.name}, {record.checkpoint}"
    return repository.commit(additions, head, title, f"Digest of the numbers of the run: {record.digest}")


def card_for_others(card: str) -> str:
    """A model card without where things lie in stores and on disks, which are no concern of who reads it on the hub."""
    return _PLACE.sub(r"\1://…", card)


@contextmanager
def _as_file(target: Store, name: str, size: int) -> Iterator[str]:
    """The path of a file of the export, which is copied to this machine's cache for so long where it is in a bucket.

    The library reads a path by several threads, and what it has read is known to the hub by its content.
    """
    if isinstance(target, LocalStore):
        yield str(target.path / check_key(name))
        return
    # One for each export: what a killed upload left there goes first.
    folder = cache_directory() / "uploads" / hashlib.sha256(target.uri.encode()).hexdigest()[:16]
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        check_free(folder, size)
        with (folder / "part").open("wb") as file, target.open_read(name) as stream:
            shutil.copyfileobj(stream, file, READ_BLOCK)
        yield str(folder / "part")
    except OSError as error:
        raise disk_error(error, folder) from error
    finally:
        with suppress(OSError):
            shutil.rmtree(folder)
