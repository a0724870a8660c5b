"""Examples of random tokens, as long as they may be: what a step costs at most, whatever the data will be."""

from itertools import cycle, islice
from typing import Self

import numpy as np
from numpy.typing import NDArray

from sft_api.trainer_config import TrainerConfig


class RandomExamples:
    """Examples of given lengths; all tokens of each are trained but the first, which nothing predicts."""

    def __init__(self, lengths: NDArray[np.int32], vocabulary: int) -> None:
        """Tokens are drawn from ``range(vocabulary)``, those of an example always the same."""
        self.lengths = lengths
        self.trained: NDArray[np.int32] = lengths - 1
        self._vocabulary = vocabulary

    @classmethod
    def filling(cls, config: TrainerConfig, vocabulary: int) -> Self:
        """As many as make one step of ``config``, of which every bin is full, or all but the last one."""
        plan, longest = config.plan, config.spec.data.max_length
        bin_tokens = plan.max_tokens_per_micro_batch or longest
        whole, rest = divmod(bin_tokens, longest)
        # One token has none to predict.
        lengths = [longest] * whole + ([rest] if rest > 1 else [])
        if plan.global_batch_tokens is None:
            lengths = list(islice(cycle(lengths), plan.global_batch_size or 1))
        else:
            lengths *= plan.global_batch_tokens // bin_tokens
        return cls(np.array(lengths, dtype=np.int32), vocabulary)

    def example(self, index: int) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        """Token ids and loss mask of one example."""
        length = int(self.lengths[index])
        drawn = np.random.default_rng(index).integers(0, self._vocabulary, length, dtype=np.int32)
        return drawn, np.ones(length, dtype=np.uint8)
