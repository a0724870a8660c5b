"""Writes tokenised examples so that work which was interrupted, at any moment and in any way, is gone on with.

Chunks are appended to the examples file; a journal beside it has a line for each: its bytes, their digest, and what
became of its rows. What journal and digests agree on was written whole, whatever a kill or a power cut has left of the
rest.
"""

import hashlib
import json
import os
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from .tokenized import EXAMPLES_FILE, REPORT_FILE, Chunk, Counts, Digest, TokenizationReport, array_of

JOURNAL_FILE = "journal.jsonl"

# Ends a stream of the Arrow IPC format.
_END = b"\xff\xff\xff\xff\0\0\0\0"


class ExamplesWriter:
    """Appends chunks, in order, to what an earlier writer has left in ``folder``."""

    def __init__(self, folder: Path) -> None:
        import pyarrow as pa

        fields = [
            ("input_ids", pa.large_list(pa.int32())),
            ("loss_mask", pa.large_list(pa.uint8())),
            ("trained", pa.int32()),
        ]
        self._schema = pa.schema(fields)
        self.counts = Counts()
        """Of all rows that are written; ``counts.rows`` is the next one."""
        self.trained = 0
        self.lengths: list[NDArray[np.int32]] = []
        self._folder = folder
        self._digest = Digest()
        self._file = (folder / EXAMPLES_FILE).open("a+b")
        self._journal = (folder / JOURNAL_FILE).open("a+b")
        self._recover()

    def write(self, chunk: Chunk) -> None:
        """Append ``chunk``; one without examples leaves no trace but its counts."""
        import pyarrow as pa

        message: bytes | memoryview = b""
        if len(chunk.lengths):
            offsets = _column(np.concatenate(([0], np.cumsum(chunk.lengths, dtype=np.int64))))
            columns = [
                pa.LargeListArray.from_arrays(offsets, _column(chunk.input_ids)),
                pa.LargeListArray.from_arrays(offsets, _column(chunk.loss_mask)),
                _column(chunk.trained),
            ]
            message = memoryview(pa.record_batch(columns, schema=self._schema).serialize())
        self._file.write(message)
        self._file.flush()
        self._note(chunk)
        entry = {
            "bytes": len(message),
            "sha256": hashlib.sha256(message).hexdigest(),
            "counts": asdict(chunk.counts),
        }
        self._journal.write(json.dumps(entry).encode() + b"\n")
        self._journal.flush()

    def close(self, report: TokenizationReport) -> None:
        """Finish the file and write the report; both are on the disk when this returns."""
        self._file.write(_END)
        self._file.flush()
        os.fsync(self._file.fileno())
        with (self._folder / REPORT_FILE).open("w") as file:
            json.dump({"digest": self._digest.hexdigest(), "report": report.to_json()}, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        (self._folder / JOURNAL_FILE).unlink()

    def _recover(self) -> None:
        """Take in what is whole, and cut off the rest."""
        header = self._schema.serialize().to_pybytes()
        self._file.seek(0)
        self._journal.seek(0)
        end, lines = 0, 0
        if self._file.read(len(header)) == header:
            end = len(header)
            for line in self._journal:
                if (chunk := self._read_chunk(line)) is None:
                    break
                self._note(chunk)
                end, lines = self._file.tell(), lines + len(line)
        self._journal.truncate(lines)
        self._file.truncate(end)
        if end == 0:
            self._file.write(header)

    def _read_chunk(self, line: bytes) -> Chunk | None:
        """The chunk that comes next in the file and was noted in ``line``; None when one of both is not whole."""
        import pyarrow as pa

        try:
            entry = json.loads(line)
            counts, size, digest = Counts(**entry["counts"]), entry["bytes"], entry["sha256"]
            message = self._file.read(size)
        except (ValueError, KeyError, TypeError):
            return None
        if not line.endswith(b"\n") or len(message) != size or hashlib.sha256(message).hexdigest() != digest:
            return None
        if not message:
            nothing = np.empty(0, np.int32)
            return Chunk(nothing, np.empty(0, np.uint8), nothing, nothing, counts)
        input_ids, loss_mask, trained = pa.ipc.read_record_batch(pa.py_buffer(message), self._schema).columns
        lengths = np.diff(array_of(input_ids.offsets)).astype(np.int32)
        return Chunk(array_of(input_ids.values), array_of(loss_mask.values), lengths, array_of(trained), counts)

    def _note(self, chunk: Chunk) -> None:
        self.counts += chunk.counts
        self.lengths.append(chunk.lengths)
        self.trained += int(chunk.trained.sum(dtype=np.int64))
        self._digest.add(chunk.lengths, chunk.input_ids, chunk.loss_mask)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._journal.close()


def _column(values: NDArray[Any]) -> Any:
    """The other way round than ``array_of``: ``values`` as an array of Arrow."""
    import pyarrow as pa

    kept = np.ascontiguousarray(values)
    return pa.Array.from_buffers(pa.from_numpy_dtype(kept.dtype), len(kept), [None, pa.py_buffer(kept)])
