"""Tokenised examples on disk, memory-mapped, and the report on how they came to be.

One Arrow IPC stream holds a record batch per chunk of rows with the columns ``input_ids`` (list of int32),
``loss_mask`` (list of uint8) and ``trained`` (int32). ``writing.py`` writes it.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

EXAMPLES_FILE = "examples.arrow"
REPORT_FILE = "report.json"
ARRIVING = "arriving"
"""In a folder that is being made: the same files as far as they are fetched."""

_WARN_ABOVE = 0.01


@dataclass(frozen=True)
class Counts:
    """What happened to the rows of a source, or of a part of it."""

    rows: int = 0
    overlong: int = 0
    """Rows longer than ``data.maxLength``, dropped, truncated or split."""
    cut: int = 0
    """Those of them of which something is kept, truncated or split."""
    untrained: int = 0
    """Rows dropped because no token of them would be trained."""
    straddling: int = 0
    """Trained tokens that begin before, or end behind, the text that is trained."""
    incomplete: int = 0
    """Trained messages of which the chat template leaves out text."""
    longest: int = 0
    """Tokens of the longest row, kept or not."""
    context_answers: int = 0
    """Answers that ``data.trainOn`` leaves untrained."""
    empty: int = 0
    """Trained answers that say nothing."""
    answers: int = 0
    """Trained answers; a text is one, and so are the tokens of a row."""

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(
            rows=self.rows + other.rows,
            overlong=self.overlong + other.overlong,
            cut=self.cut + other.cut,
            untrained=self.untrained + other.untrained,
            straddling=self.straddling + other.straddling,
            incomplete=self.incomplete + other.incomplete,
            longest=max(self.longest, other.longest),
            context_answers=self.context_answers + other.context_answers,
            empty=self.empty + other.empty,
            answers=self.answers + other.answers,
        )


@dataclass(frozen=True)
class Chunk:
    """Examples of consecutive rows, flat: example i has ``lengths[i]`` tokens."""

    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    lengths: NDArray[np.int32]
    trained: NDArray[np.int32]
    counts: Counts


@dataclass(frozen=True)
class LengthStatistics:
    """Tokens per kept example."""

    mean: float
    min: int
    quartile1: int
    median: int
    quartile3: int
    max: int
    total: int

    @classmethod
    def of(cls, lengths: NDArray[np.int32]) -> "LengthStatistics":
        low, quartile1, median, quartile3, high = (
            int(value) for value in np.quantile(lengths, (0, 0.25, 0.5, 0.75, 1), method="nearest")
        )
        return cls(
            mean=round(float(lengths.mean()), 2),
            min=low,
            quartile1=quartile1,
            median=median,
            quartile3=quartile3,
            max=high,
            total=int(lengths.sum(dtype=np.int64)),
        )


@dataclass(frozen=True)
class TokenizationReport:
    """What became of a source's rows; shown to the user and kept with the run."""

    rows: int
    kept: int
    dropped_overlong: int
    truncated: int
    dropped_untrained: int
    straddling_tokens: int
    incomplete_messages: int
    longest: int
    max_length: int
    trained_tokens: int
    lengths: LengthStatistics
    split: int = 0
    """Rows longer than ``data.maxLength`` that were split."""
    context_answers: int = 0
    empty_answers: int = 0
    trained_answers: int = 0

    def summary(self) -> str:
        """What there is to train, and everything that happened to rows, however few."""
        happened = [
            (self.dropped_overlong, f"dropped as longer than data.maxLength {self.max_length}"),
            (self.dropped_untrained, "dropped without a trained token"),
            (self.truncated, f"cut at data.maxLength {self.max_length}"),
            (self.split, f"split at data.maxLength {self.max_length}"),
        ]
        of_rows = "".join(f", {count:,} {what}" for count, what in happened if count)
        return (
            f"{self.rows:,} rows{of_rows}; {self.kept:,} examples of {self.lengths.min:,} to {self.lengths.max:,} "
            f"tokens (median {self.lengths.median:,}), {self.lengths.total:,} tokens in all, "
            f"{self.trained_tokens:,} trained{self._of_answers()}"
        )

    def _of_answers(self) -> str:
        found = [
            (self.context_answers, "earlier answers are context only (data.trainOn: lastAssistantMessage)"),
            (self.empty_answers, "answers are empty"),
        ]
        return "".join(f"; {count:,} {what}" for count, what in found if count)

    def warnings(self) -> list[str]:
        """A sentence for everything that happened to more than 1% of the rows (or of the trained answers or tokens)."""
        limit = f"data.maxLength ({self.max_length} tokens; the longest row has {self.longest})"
        events = [
            (self.dropped_overlong, self.rows, "rows", f"were dropped because they are longer than {limit}"),
            (
                self.truncated,
                self.rows,
                "rows",
                f"were cut at {limit}, and with the rest went the end-of-turn token that teaches the model to stop",
            ),
            (
                self.split,
                self.rows,
                "rows",
                f"were split at {limit}: what comes behind does not see what stands before",
            ),
            (
                self.dropped_untrained,
                self.rows,
                "rows",
                "were dropped because no token of them is trained (no assistant message, flags that exclude it, or "
                "an answer that begins behind data.maxLength)",
            ),
            (
                self.empty_answers,
                self.trained_answers,
                "trained answers",
                "are empty, and teach the model to say nothing: remove such rows unless that is meant",
            ),
            (
                self.straddling_tokens,
                self.trained_tokens,
                "trained tokens",
                "begin before the answer does: the prompt that the model sees in use is tokenised differently",
            ),
            (
                self.incomplete_messages,
                self.trained_answers,
                "trained messages",
                "have text that the chat template leaves out, such as reasoning or tools that it does not know",
            ),
        ]
        return [
            f"{count} {what} ({count / whole:.1%}) {sentence}"
            for count, whole, what, sentence in events
            if whole and count / whole > _WARN_ABOVE
        ]

    def to_json(self) -> dict[str, Any]:
        """All fields as plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        return cls(**{**value, "lengths": LengthStatistics(**value["lengths"])})


@dataclass(frozen=True)
class _Batch:
    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    offsets: NDArray[np.int64]


def array_of(column: Any) -> NDArray[Any]:
    """The numbers of Arrow's array ``column``, not copied and read-only.

    Its own ``to_numpy``, as ``pyarrow.array``, imports pandas: a quarter of a second of every start.
    """
    return np.from_dlpack(column)


class Digest:
    """SHA-256 over the tokens and masks of examples in order; it does not depend on where chunks begin."""

    def __init__(self) -> None:
        self._hashed = [hashlib.sha256() for _ in range(3)]  # one for each array

    def add(self, lengths: NDArray[np.int32], input_ids: NDArray[np.int32], loss_mask: NDArray[np.uint8]) -> None:
        """Take in some more examples, flat."""
        for hashed, array in zip(self._hashed, (lengths, input_ids, loss_mask), strict=True):
            hashed.update(np.ascontiguousarray(array).data)

    def hexdigest(self) -> str:
        """Of all so far."""
        return hashlib.sha256(b"".join(hashed.digest() for hashed in self._hashed)).hexdigest()


class TokenizedSource:
    """The examples of one source, memory-mapped: opening costs no memory, and processes share the pages."""

    def __init__(self, folder: Path) -> None:
        """Raises OSError, ValueError or KeyError (pyarrow's errors are such) when ``folder`` is incomplete."""
        import pyarrow as pa

        self.folder = folder
        content = json.loads((folder / REPORT_FILE).read_text())
        self.digest: str = content["digest"]
        """SHA-256 over all tokens and masks in order: equal digests are equal training data."""
        self.report = TokenizationReport.from_json(content["report"])
        self._batches: list[_Batch] = []
        trained, lengths = [], []
        for batch in pa.ipc.open_stream(pa.memory_map(str(folder / EXAMPLES_FILE))):
            input_ids, loss_mask, counts = batch.columns
            offsets = array_of(input_ids.offsets)
            self._batches.append(_Batch(array_of(input_ids.values), array_of(loss_mask.values), offsets))
            lengths.append(np.diff(offsets).astype(np.int32))
            trained.append(array_of(counts))
        self.lengths: NDArray[np.int32] = np.concatenate(lengths)
        """Tokens of each example, shape (examples,)."""
        self.trained: NDArray[np.int32] = np.concatenate(trained)
        """Trained tokens of each example, shape (examples,)."""
        self._starts = np.cumsum([0, *(len(batch.offsets) - 1 for batch in self._batches)])
        if len(self.lengths) != self.report.kept:
            raise ValueError(f"{folder} holds {len(self.lengths)} of {self.report.kept} examples")

    def __len__(self) -> int:
        return len(self.lengths)

    def check(self) -> None:
        """Raises ValueError when what is there is not what was tokenised."""
        digest, trained = Digest(), []
        try:
            for batch in self._batches:
                digest.add(np.diff(batch.offsets).astype(np.int32), batch.input_ids, batch.loss_mask)
                trained.append(np.add.reduceat(batch.loss_mask, batch.offsets[:-1], dtype=np.int64))
            same = digest.hexdigest() == self.digest and np.array_equal(self.trained, np.concatenate(trained))
        except IndexError:  # examples that begin where there are no tokens
            same = False
        if not same:
            raise ValueError("its tokens are not those that were written")

    def tokens_from(self, first: int) -> set[int]:
        """Those that it has of the token ids from ``first`` on; reads all of the data."""
        return {int(token) for batch in self._batches for token in np.unique(batch.input_ids[batch.input_ids >= first])}

    def example(self, index: int) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        """``input_ids`` and ``loss_mask`` of example ``index``, both of shape (tokens,), read-only, not copied.

        ``loss_mask[i]`` is 1 when token i is a target; token 0 never is. Raises IndexError.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        batch = self._batches[number]
        row = index - int(self._starts[number])
        start, stop = int(batch.offsets[row]), int(batch.offsets[row + 1])
        return batch.input_ids[start:stop], batch.loss_mask[start:stop]
