"""Bins of random tokens, and a device that has room for some of them at once."""

from dataclasses import dataclass

import numpy as np

from sft_trainer.data.batches import MicroBatch
from sft_trainer.data.feed import BinTensors

_HELD = 2**30
_TOKEN = 2**20
"""Bytes: weights of a small model, gathered, are few beside those of some tokens."""


def random_bin(seed: int, *lengths: int, vocabulary: int = 128) -> BinTensors:
    """Documents of ``lengths``, all of whose tokens but the first are trained."""
    ids = np.random.default_rng(seed).integers(3, vocabulary, sum(lengths))
    ends = np.cumsum(lengths)
    targets = np.setdiff1d(np.arange(sum(lengths)), ends - 1)
    positions = np.concatenate([np.arange(length) for length in lengths])
    return BinTensors.of(MicroBatch(ids, positions, lengths, targets, ids[targets + 1]), seed=seed)


@dataclass(frozen=True)
class RoomFor:
    """Memory for so many full bins; a token takes a MiB, and ``seen`` is how many the largest bin had so far."""

    bins: int
    bin_tokens: int
    seen: int

    def allocated(self) -> int:
        return _HELD

    def most_allocated(self) -> int:
        return _HELD + self.seen * _TOKEN

    def total(self) -> int:
        return 2**60

    def available(self) -> int:
        return int((_HELD + (self.bins + 0.5) * self.bin_tokens * _TOKEN) / 0.8)
