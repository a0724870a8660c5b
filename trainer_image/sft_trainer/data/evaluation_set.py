"""What a run is evaluated on under one name: the examples of one source, or what is held out of several."""

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .tokenized import TokenizedSource


class EvaluationSet:
    """The examples of ``sources``, of one behind those of the other."""

    def __init__(self, sources: Sequence[TokenizedSource]) -> None:
        self.sources = tuple(sources)
        self.lengths: NDArray[np.int32] = np.concatenate([source.lengths for source in sources])
        """Tokens of each example, shape (examples,)."""
        self.trained: NDArray[np.int32] = np.concatenate([source.trained for source in sources])
        """Trained tokens of each example, shape (examples,)."""
        self._starts = np.cumsum([0, *(len(source) for source in sources)])

    @property
    def digest(self) -> str:
        """Of all tokens and masks in order; of one source its own, as checkpoints of before there were several say."""
        first, *others = (source.digest for source in self.sources)
        return hashlib.sha256(" ".join([first, *others]).encode()).hexdigest() if others else first

    def example(self, index: int) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        """``input_ids`` and ``loss_mask`` of example ``index``, as a source gives them."""
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        return self.sources[number].example(index - int(self._starts[number]))
