"""Tokenised sources made of numbers, for tests of what comes after tokenisation."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class FakeExamples:
    """Example ``i`` has ``lengths[i]`` tokens, all of them ``base + i``; all but the first are trained."""

    def __init__(self, lengths: Sequence[int], base: int = 0) -> None:
        self.lengths: NDArray[np.int32] = np.asarray(lengths, dtype=np.int32)
        self.trained: NDArray[np.int32] = self.lengths - 1
        self._base = base

    def example(self, index: int) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        length = int(self.lengths[index])
        mask = np.ones(length, dtype=np.uint8)
        mask[0] = 0
        return np.full(length, self._base + index, dtype=np.int32), mask
