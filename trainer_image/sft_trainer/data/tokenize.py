"""From a data source to tokenised examples with exact loss masks: in parallel, in order, and only once.

The result is cached under a digest of everything that decides it, written to a folder beside it and renamed, under a
lock, so that all processes of a machine may ask for it at the same time and one of them does the work. What a process
that was killed has done of it is gone on with: the folder is named by the same digest. This runs
before the process group exists: collectives time out after minutes, and a large source takes longer.
"""

import hashlib
import json
import os
import shutil
import socket
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import astuple
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from sft_trainer.errors import DISK_FULL, DataError, TrainingError
from sft_trainer.locks import locked

from .examples import Settings, mark_row, to_examples
from .formats import Columns, check_named, detect_format
from .held_out import HeldOutRows, Part, Rows, all_rows
from .hints import beside_text, beside_turns
from .readers import Row
from .source_rows import SourceRows
from .tokenized import ARRIVING, EXAMPLES_FILE, Chunk, Counts, LengthStatistics, TokenizationReport, TokenizedSource
from .tokenizer import Codec
from .writing import ExamplesWriter

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from sft_api.v1alpha1 import DataSource, DataSpec

    from .kept import KeptTokens

VERSION = 9
"""To be raised with every change of this package that changes tokens or masks, or refuses rows: caches of older
versions are left."""

_MEDIA = ("image", "images", "video", "videos", "audio", "audios")
"""Columns of TRL and LLaMA-Factory for what models see and hear."""
_ROWS_PER_CHUNK = 1024
_TEXTS_PER_BATCH = 128
# Below this a pool of processes costs more than it saves: each imports libraries and loads the tokenizer (1-2 s).
_ROWS_FOR_PROCESSES = 2000


def tokenize_source(
    whole: SourceRows,
    source: "DataSource",
    data: "DataSpec",
    tokenizer: "PreTrainedTokenizerFast",
    *,
    cache_dir: Path,
    part: Part = all_rows,
    kept: "KeptTokens | None" = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    on_fetch: Callable[[int], None] = lambda downloaded: None,
    on_wait: Callable[[int], None] = lambda written: None,
    on_warning: Callable[[str], None] = lambda message: None,
) -> TokenizedSource:
    """The examples of ``source`` in the order of its rows, from the cache, from what is ``kept`` of them, or made now.

    ``whole`` are all of these; where a ``part`` is named only that is meant. ``on_progress(rows done, rows in all)`` is
    called when it begins and as chunks of rows are finished, ``on_fetch(bytes downloaded)`` while what is kept comes,
    ``on_wait(bytes written)`` while another process does the same and gets on with it, ``on_warning`` with a sentence
    for what the user may not expect of the files. Raises DataError for rows that cannot be read or have no exact mask,
    saying which and what to change, when no row is left, and what ``part`` raises.
    """
    settings = settings_for(whole, source, data)
    codec = Codec.of(tokenizer)
    for warning in warnings_of(whole, source, settings, codec):
        on_warning(warning)
    rows = part(whole)
    folder = cache_dir / "tokenized" / _cache_key(rows, settings, codec)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.with_suffix(".lock"), lambda: _bytes_written(folder), on_wait):
        if cached := _open_cached(folder):
            on_progress(len(rows), len(rows))
            return cached
        check_named_columns(whole, settings)
        # One a machine: locks do not hold between machines on every file system. A pod that takes the place of another
        # has its name.
        work = folder.with_name(f"{_unfinished(folder)}{socket.gethostname()}")
        work.mkdir(exist_ok=True)
        try:
            if kept is None or not kept.fetch(work, folder.name, on_fetch):
                _write_examples(rows, settings, codec, data.workers, work, on_progress)
            work.rename(folder)
        except (DataError, OSError) as error:
            # These rows will not do, or the disk must not stay full: who comes next has to begin anew.
            if isinstance(error, DataError) or error.errno in DISK_FULL or folder.exists():
                shutil.rmtree(work, ignore_errors=True)
            # Another machine may have been first; what it wrote is the same.
            if not folder.exists():
                raise
    return TokenizedSource(folder)


def _unfinished(folder: Path) -> str:
    """How the names of folders begin in which ``folder`` is being made."""
    return f".{folder.name}-"


def settings_for(rows: SourceRows, source: "DataSource", data: "DataSpec") -> Settings:
    """Settings for a source, with the format found from its first row where it is ``auto``.

    Raises DataError when the source is empty or its columns match no format.
    """
    first = next(rows.read(0, 1), None) if len(rows) else None
    if first is None:
        raise DataError(f"data source {source.uri} (split {source.split or 'train'}) has no rows")
    return settings_of(first[1].keys(), source, data, first[1])


def settings_of(columns: Collection[str], source: "DataSource", data: "DataSpec", first: Row | None = None) -> Settings:
    """Settings for a source whose first row has ``columns``, or is ``first``.

    Raises DataError when they match no format.
    """
    names = Columns(source.messages_key, source.tools_key, source.system_key, tuple(sorted(source.columns.items())))
    try:
        row_format = detect_format(columns, names, first) if source.format == "auto" else source.format
    except DataError as error:
        raise DataError(f"data source {source.uri}: {error}") from error
    return Settings(row_format, names, data.train_on, data.max_length, data.overlong)


def warnings_of(rows: SourceRows, source: "DataSource", settings: Settings, codec: Codec) -> list[str]:
    """A sentence for what the user may not expect: of the files, and of rows whose format nobody has named."""
    found = [*rows.warnings]
    if source.format != "auto" or settings.row_format == "pretokenized":
        return found
    _, first = next(rows.read(0, 1))
    begin, meant = f"data source {rows.name}: its rows", f"set format: {settings.row_format} if that is meant"
    if settings.row_format != "text" and (media := [name for name in _MEDIA if first.get(name)]):
        found.append(
            f"{begin} have {' and '.join(media)}, which are not read: answers are trained that go by what the model "
            f"does not see; {meant}, else leave those rows out"
        )
    if settings.row_format != "text" and isinstance(first.get("label"), bool):
        found.append(
            f"{begin} have a label, true or false, which is not read: completions that it calls bad are trained as "
            f"well; {meant}, else leave those rows out"
        )
    # Looked at, and not read: what is wrong with the row is told where it is read, with its place.
    is_text = settings.row_format == "text" or (
        settings.row_format == "promptCompletion" and isinstance(first.get(settings.columns.of("prompt")), str)
    )
    if not is_text and (unread := beside_turns(first, settings.columns.read_of(settings.row_format))):
        columns, change = unread
        found.append(f"{begin} have {' and '.join(columns)}, which the model does not read; {meant}, else {change}")
    if codec.templates and is_text:
        found.append(
            f"{begin} are text, which the model reads as it stands, without its chat template; {meant}, else write "
            "them as turns"
        )
    if settings.row_format == "text" and isinstance(first.get("role"), str):
        found.append(
            f"{begin} have a role, which is not read: each is trained as a text of its own; {meant}, else write the "
            "turns of a conversation as one row"
        )
    if settings.row_format == "text" and (beside := beside_text(first, settings.columns.of("text"))):
        columns, change = beside
        found.append(f"{begin} have {' and '.join(columns)} beside text, which are not read; {meant}, else {change}")
    return found


def check_named_columns(rows: SourceRows, settings: Settings) -> None:
    """Raises DataError when a column that the manifest names is in none of ``rows``: it was mistyped."""
    names = settings.columns.named.values()
    try:
        if names:
            check_named(rows.columns(names), settings.columns)
    except DataError as error:
        raise DataError(f"data source {rows.name}: {error}") from error


def tokenize_rows(rows: Iterable[tuple[str, Row]], settings: Settings, codec: Codec) -> Chunk:
    """Examples of ``rows``, each given with its place. Raises DataError naming the place."""
    examples: list[tuple[Sequence[int], NDArray[np.uint8]]] = []
    counts = Counts()
    iterator = iter(rows)
    while batch := list(islice(iterator, _TEXTS_PER_BATCH)):
        marked = [(place, mark_row(place, row, settings, codec)) for place, row in batch]
        kept = [(place, row) for place, row in marked if row is not None]
        counts += Counts(rows=len(batch), untrained=len(batch) - len(kept))
        made = to_examples([row for _, row in kept], codec)
        for (place, _), example in zip(kept, made, strict=True):
            length = len(example.ids)
            overlong = length > settings.max_length
            counts += Counts(overlong=int(overlong), longest=length)
            if overlong and settings.overlong == "error":
                raise DataError(
                    f"{place} has {length} tokens, more than data.maxLength {settings.max_length}; raise it, or "
                    "set data.overlong to drop, truncate or split"
                )
            pieces = example.pieces(settings)
            if pieces:
                counts += Counts(
                    cut=int(overlong),
                    straddling=example.straddling,
                    incomplete=example.incomplete,
                    context_answers=example.context_answers,
                    empty=example.empty,
                    answers=example.answers,
                )
            elif not overlong or settings.overlong != "drop":
                counts += Counts(untrained=1)
            examples += pieces
    return Chunk(
        input_ids=np.concatenate([np.asarray(ids, np.int32) for ids, _ in [*examples, ([], None)]]),
        loss_mask=np.concatenate([*(mask for _, mask in examples), np.empty(0, np.uint8)]),
        lengths=np.asarray([len(mask) for _, mask in examples], np.int32),
        trained=np.asarray([mask.sum(dtype=np.int32) for _, mask in examples], np.int32),
        counts=counts,
    )


def _nothing_left(counts: Counts, max_length: int, *, held_out: bool) -> str:
    """Why every row was dropped, and what to change: only what applies."""
    whys, changes = [], []
    if counts.overlong:
        whys.append(
            f"{counts.overlong} are longer than data.maxLength {max_length} (the longest has {counts.longest} tokens)"
        )
        changes.append("raise data.maxLength")
    if counts.untrained:
        whys.append(f"{counts.untrained} have no trained token")
        changes.append("check that the rows have answers to train")
    if held_out:
        changes.append("raise data.heldOut.fraction, which draws more of them")
    return f"none of {counts.rows} rows is left: {', '.join(whys)}; {', or '.join(changes)}"


def _write_examples(
    rows: Rows,
    settings: Settings,
    codec: Codec,
    workers: int,
    folder: Path,
    on_progress: Callable[[int, int], None],
) -> None:
    with ExamplesWriter(folder) as writer:
        on_progress(writer.counts.rows, len(rows))
        for chunk in _chunks(rows, settings, codec, workers, writer.counts.rows):
            writer.write(chunk)
            on_progress(writer.counts.rows, len(rows))
        counts, kept = writer.counts, np.concatenate(writer.lengths)
        if not len(kept):
            left = _nothing_left(counts, settings.max_length, held_out=isinstance(rows, HeldOutRows))
            raise DataError(f"data source {rows.name}: {left}")
        report = TokenizationReport(
            rows=counts.rows,
            kept=len(kept),
            dropped_overlong=counts.overlong if settings.overlong == "drop" else 0,
            truncated=counts.cut if settings.overlong == "truncate" else 0,
            split=counts.cut if settings.overlong == "split" else 0,
            dropped_untrained=counts.untrained,
            straddling_tokens=counts.straddling,
            incomplete_messages=counts.incomplete,
            context_answers=counts.context_answers,
            empty_answers=counts.empty,
            trained_answers=counts.answers,
            longest=counts.longest,
            max_length=settings.max_length,
            trained_tokens=writer.trained,
            lengths=LengthStatistics.of(kept),
        )
        writer.close(report)


def _chunks(rows: Rows, settings: Settings, codec: Codec, workers: int, first: int) -> Iterator[Chunk]:
    """Chunks in the order of the rows from ``first``, whatever the number of processes."""
    starts = range(first, len(rows), _ROWS_PER_CHUNK)
    processes = min(workers, len(starts), _usable_cpus())
    if processes < 2 or len(rows) - first < _ROWS_FOR_PROCESSES:
        for start in starts:
            yield tokenize_rows(rows.read(start, min(start + _ROWS_PER_CHUNK, len(rows))), settings, codec)
        return
    # Spawned, not forked: this process may hold threads of torch or of the tokenizer.
    executor = ProcessPoolExecutor(processes, get_context("spawn"), _start_worker, (rows, settings, codec))
    try:
        pending: deque[Future[Chunk]] = deque()
        for start in starts:
            pending.append(executor.submit(_work, start, min(start + _ROWS_PER_CHUNK, len(rows))))
            if len(pending) > 2 * processes:  # bounds the memory of finished chunks that wait for a slow one
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise TrainingError(
            f"a process that tokenised {rows.name} was ended, as the kernel does where memory runs out: lower "
            "data.workers or make more memory free (in a cluster, compute.resources); rows that are done stay, and the "
            "next start goes on behind them"
        ) from error
    finally:
        executor.shutdown(cancel_futures=True)


_job: tuple[Rows, Settings, Codec]


def _start_worker(rows: Rows, settings: Settings, codec: Codec) -> None:
    global _job  # a worker process has one job, sent once instead of with every chunk
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread a process: the processes are the parallelism
    _job = (rows, settings, codec)


def _work(start: int, stop: int) -> Chunk:
    rows, settings, codec = _job
    return tokenize_rows(rows.read(start, stop), settings, codec)


def _usable_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cache_key(rows: Rows, settings: Settings, codec: Codec) -> str:
    from importlib.metadata import version

    libraries = [version(name) for name in ("tokenizers", "transformers", "jinja2")]
    parts = [VERSION, libraries, rows.digest, codec.digest, astuple(settings)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _open_cached(folder: Path) -> TokenizedSource | None:
    """What an earlier run left, None when there is nothing; incomplete remains are removed."""
    if not folder.exists():
        return None
    try:
        return TokenizedSource(folder)
    except (OSError, ValueError, KeyError, TypeError):
        shutil.rmtree(folder)
        return None


def _bytes_written(folder: Path) -> int:
    sizes = [0]
    for made in (EXAMPLES_FILE, f"{ARRIVING}/{EXAMPLES_FILE}"):
        for file in folder.parent.glob(f"{_unfinished(folder)}*/{made}"):
            with suppress(FileNotFoundError):  # it has just been finished
                sizes.append(file.stat().st_size)
    return max(sizes)
