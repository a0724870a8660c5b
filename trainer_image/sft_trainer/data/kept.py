"""Tokenised sources beside the checkpoints, so that a pod on another node reads them in place of tokenising anew.

By the names of their folders in the cache, which are digests of all that decides their content: rows, tokenizer,
settings, versions. What lies there is the same whoever wrote it, so nobody waits for anybody, and nothing is written
over. It is never needed: whatever goes wrong, the rows are tokenised.
"""

import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Event

from sft_api.checkpoints import TOKENIZED_KEY, TOKENIZED_PREFIX, digest_of
from sft_api.place import LONGEST_RECORD
from sft_trainer.checkpoint.errors import ObjectNotFoundError
from sft_trainer.checkpoint.store import READ_BLOCK, Store
from sft_trainer.errors import DISK_FULL, AccessDeniedError, ConfigError, TrainingError

from .tokenized import ARRIVING, EXAMPLES_FILE, REPORT_FILE, TokenizedSource
from .writing import JOURNAL_FILE

log = logging.getLogger("sft_trainer")

LEAST_TOKENS = 1_000_000
"""Fewer are tokenised again sooner than they are fetched."""


class KeptTokens:
    """The tokenised sources in the place of a run."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def fetch(self, folder: Path, name: str, on_fetch: Callable[[int], None]) -> bool:
        """Put the source ``name`` into ``folder``, where it is kept and whole; else leave the folder as it is.

        ``on_fetch`` is called with the bytes so far. Raises OSError when this machine's disk is full.
        """
        arriving = folder / ARRIVING
        try:
            record = _read(self._store.read(_record_key(name), LONGEST_RECORD))
            arriving.mkdir(exist_ok=True)
            # Arrow takes a file for what it says it is: reading a damaged one may end the process.
            if self._copy(_examples_key(name), arriving / EXAMPLES_FILE, on_fetch) != record["file"]:
                raise ValueError("its bytes are not those that were written")
            (arriving / REPORT_FILE).write_text(json.dumps(record["source"], indent=2))
            TokenizedSource(arriving).check()
            (folder / JOURNAL_FILE).unlink(missing_ok=True)
            for file in (EXAMPLES_FILE, REPORT_FILE):
                (arriving / file).replace(folder / file)
        except ObjectNotFoundError:
            return False
        except Exception as error:  # what reads a damaged file may raise anything
            if isinstance(error, OSError) and error.errno in DISK_FULL:
                raise
            log.warning("%s/%s is not used, and the rows are tokenised again: %s", self._store.uri, _key(name), error)
            if not isinstance(error, TrainingError | OSError):
                self._forget(name)
            return False
        finally:
            shutil.rmtree(arriving, ignore_errors=True)
        log.info("%s/%s is used, and the rows are not tokenised again", self._store.uri, _key(name))
        return True

    def _copy(self, key: str, path: Path, on_fetch: Callable[[int], None]) -> str:
        """SHA-256 of the object, which is written to ``path``."""
        hashed = hashlib.sha256()
        with self._store.open_read(key) as stream, path.open("wb") as file:
            while block := stream.read(READ_BLOCK):
                hashed.update(block)
                file.write(block)
                file.flush()  # those that wait for it look at its size
                on_fetch(file.tell())
        return hashed.hexdigest()

    def keep(self, source: TokenizedSource, stop: Event) -> None:
        """Write ``source`` unless it is there; in vain when ``stop`` is set meanwhile. Raises TrainingError."""
        name, path = source.folder.name, source.folder / EXAMPLES_FILE
        there = {entry.key: entry.size for entry in self._store.list(_key(name))}
        if _record_key(name) in there and there.get(_examples_key(name)) == path.stat().st_size:
            return
        self._drop_begun(name)
        hashed = hashlib.sha256()
        stream = self._store.open_write(_examples_key(name), size_hint=path.stat().st_size)
        try:
            with path.open("rb") as file:
                while (block := file.read(READ_BLOCK)) and not stop.is_set():
                    hashed.update(block)
                    stream.write(block)
            if stop.is_set():
                return
            stream.close()
        finally:
            stream.abort()
        record = {"source": json.loads((source.folder / REPORT_FILE).read_text()), "file": hashed.hexdigest()}
        self._store.put(_record_key(name), json.dumps({**record, "sha256": digest_of(record)}).encode())

    def _forget(self, name: str) -> None:
        """Let whoever keeps the source ``name`` next write it anew: what is damaged may have the size that it had."""
        with suppress(TrainingError):
            self._store.delete([_record_key(name)])

    def remove(self, sources: Sequence[TokenizedSource]) -> None:
        """Take away all that is kept, and what was begun of ``sources``. Raises TrainingError.

        Only what has the names that are given here: other data may lie in a folder that is called so.
        """
        kept = [entry.key for entry in self._store.list(TOKENIZED_PREFIX) if TOKENIZED_KEY.fullmatch(entry.key)]
        self._store.delete(kept)
        for source in sources:
            self._drop_begun(source.folder.name)

    def _drop_begun(self, name: str) -> None:
        """What uploads of the source ``name`` have left that were cut off."""
        try:
            self._store.abort_incomplete_uploads(_key(name))
        except (AccessDeniedError, ConfigError) as error:
            # Some servers cannot list uploads, some policies do not allow it: leftovers cost space, not safety.
            log.warning("what was begun of %s/%s was not dropped: %s", self._store.uri, _key(name), error)


def _read(raw: bytes) -> dict[str, object]:
    """A record. Raises ValueError for one that is damaged."""
    record: dict[str, object] = json.loads(raw)
    if record.pop("sha256") != digest_of(record):
        raise ValueError("its record is damaged")
    return record


def _key(name: str) -> str:
    return f"{TOKENIZED_PREFIX}{name}"


def _record_key(name: str) -> str:
    return f"{_key(name)}.json"


def _examples_key(name: str) -> str:
    return f"{_key(name)}.arrow"
