"""Which files make up a split, and which splits a source means, without any I/O.

``train-00000-of-00002.parquet`` names its split, otherwise the words train, test, validation … in a file's name or
folder do (also of ``test/part-00000-of-00002.parquet``), otherwise everything is ``train``.
"""

import re
from collections.abc import Mapping, Sequence

from sft_api.splits import Slice, parse_split
from sft_trainer.errors import DataError

_SHARD_NAME = re.compile(r"(?:^|/)(?P<split>\w[\w.]*?)-\d{5}-of-\d{5}[^/]*$")
_SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}


def choose(split: str | None, names: Sequence[str]) -> list[Slice]:
    """The slices that ``split`` asks for, of a source with the splits ``names``: train when it says nothing.

    Raises DataError when a split is not there, or there are several and none is called train.
    """
    known = ", ".join(sorted(names))
    if split is None and "train" not in names and len(names) > 1:
        raise DataError(f"several splits ({known}) and none called train; set split")
    if split is None:
        return [Slice("train" if "train" in names else names[0], None, None, percent=False)]
    slices = parse_split(split)
    for piece in slices:
        if piece.split not in names:
            raise DataError(f"no split '{piece.split}', found {known}; set split")
    return slices


def group_by_split(names: Sequence[str]) -> Mapping[str, list[str]]:
    """File names (paths with ``/``) by the split that they belong to; files of no split beside others are left out."""
    shards = {name: match["split"] for name in names if (match := _SHARD_NAME.search(name))}
    worded = {name: split for name in names if (split := worded_split(name))}
    # Many writers call all their shards part or data: then it is the folders that say the split, where any does.
    by_shard = len(shards) == len(names) and (not worded or any(map(worded_split, shards.values())))
    chosen = shards if by_shard else worded or dict.fromkeys(names, "train")
    splits: dict[str, list[str]] = {}
    for name, split in chosen.items():
        splits.setdefault(split, []).append(name)
    return splits


def worded_split(name: str) -> str | None:
    """The split that words in ``name`` say; None where there are none."""
    words = re.split(r"[^a-z]+", name.lower())
    return next((split for split, known in _SPLIT_WORDS.items() if any(word in words for word in known)), None)
