"""Splits and slices as the hub writes them, without any I/O.

``train-00000-of-00002.parquet`` names its split, otherwise the words train, test, validation … in a file's name or
folder do, otherwise everything is ``train``. Slices are ``train[:500]``, ``train[10%:20%]``, ``train[-100:]``, joined
by ``+``.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sft_trainer.errors import DataError

_SHARD_NAME = re.compile(r"(?:^|/)(?P<split>\w[\w.]*?)-\d{5}-of-\d{5}[^/]*$")
_SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_SLICE = re.compile(
    r"^(?P<split>\w[\w.-]*)(?:\["
    r"(?:(?P<start>-?\d+(?:_\d+)*)(?P<start_percent>%)?)?:(?:(?P<stop>-?\d+(?:_\d+)*)(?P<stop_percent>%)?)?"
    r"\])?$"
)


@dataclass(frozen=True)
class Slice:
    """Part of a split; bounds as written, None where there is none."""

    split: str
    start: int | None
    stop: int | None
    percent: bool

    def bounds(self, count: int) -> tuple[int, int]:
        """First row and the one after the last, of ``count``; percentages round to the nearest row."""

        def row(boundary: int) -> int:
            number = round(boundary * count / 100) if self.percent else boundary
            return min(max(number + count, 0) if number < 0 else number, count)

        start = 0 if self.start is None else row(self.start)
        return start, max(start, count if self.stop is None else row(self.stop))


def parse_split(text: str) -> list[Slice]:
    """The slices of ``text``, in order. Raises DataError when it is not in the hub's notation."""
    slices = []
    for part in text.split("+"):
        match = _SLICE.match(part)
        if match is None:
            raise DataError(
                f"split '{text}' is no split or slice; write for example train, train[:500], train[10%:20%] or "
                "train[:50%]+test"
            )
        start, stop = (int(match[name]) if match[name] else None for name in ("start", "stop"))
        slices.append(Slice(match["split"], start, stop, bool(match["start_percent"] or match["stop_percent"])))
    return slices


def choose(split: str | None, names: Sequence[str]) -> list[Slice]:
    """The slices that ``split`` asks for, of a source with the splits ``names``: train when it says nothing.

    Raises DataError when a split is not there, or there are several and none is called train.
    """
    known = ", ".join(sorted(names))
    if split is None and "train" not in names and len(names) > 1:
        raise DataError(f"several splits ({known}) and none called train; set split")
    slices = parse_split(split or ("train" if "train" in names else names[0]))
    for piece in slices:
        if piece.split not in names:
            raise DataError(f"no split '{piece.split}', found {known}; set split")
    return slices


def group_by_split(names: Sequence[str]) -> Mapping[str, list[str]]:
    """File names (paths with ``/``) by the split that they belong to; files of no split beside others are left out."""
    shards = {name: match["split"] for name in names if (match := _SHARD_NAME.search(name))}
    worded = {name: split for name in names if (split := _worded_split(name))}
    chosen = shards if len(shards) == len(names) else worded or dict.fromkeys(names, "train")
    splits: dict[str, list[str]] = {}
    for name, split in chosen.items():
        splits.setdefault(split, []).append(name)
    return splits


def _worded_split(name: str) -> str | None:
    words = re.split(r"[^a-z]+", name.lower())
    return next((split for split, known in _SPLIT_WORDS.items() if any(word in words for word in known)), None)
