"""Examples of random tokens, as long as they may be: what a step costs at most, whatever the data will be."""

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
        """As many as make one step of ``config``, of which every bin is full."""
        plan, longest = config.plan, config.spec.data.max_length
        if plan.global_batch_tokens is None or plan.max_tokens_per_micro_batch is None:
            return cls(np.full(plan.global_batch_size or 1, longest, dtype=np.int32), vocabulary)
        bin_tokens = plan.max_tokens_per_micro_batch
        whole, rest = divmod(bin_tokens, longest)
        # One token has none to predict.
        lengths = [longest] * whole + ([rest] if rest > 1 else [])
        return cls(np.array(lengths * (plan.global_batch_tokens // bin_tokens), dtype=np.int32), vocabulary)

    def example(self, index: int) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        """Token ids and loss mask of one example."""
        length = int(self.lengths[index])
        drawn = np.random.default_rng(index).integers(0, self._vocabulary, length, dtype=np.int32)
        return drawn, np.ones(length, dtype=np.uint8)
