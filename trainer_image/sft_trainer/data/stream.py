"""The order of examples: an infinite stream that is a pure function of sizes, weights and seed.

Position ``i`` of the stream is a row of a source. Nothing depends on the number of processes or on what was read
before, so a resume needs one integer, and any number of processes sees the same data in the same order.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Sources = NDArray[np.int32]
Rows = NDArray[np.int64]


def permutation(size: int, *key: int) -> NDArray[np.int64]:
    """A permutation of ``range(size)`` that depends on ``key`` alone.

    Built from the raw output of PCG64, which numpy guarantees to keep, unlike that of ``Generator.permutation``.
    """
    raw = np.random.PCG64(np.random.SeedSequence(key)).random_raw(size)
    return np.argsort(raw, kind="stable")


def random_seed(*key: int) -> int:
    """A seed for torch's generators that depends on ``key`` alone."""
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> 1)


class ExampleStream:
    """Examples of one or several sources.

    Without weights an epoch is every row of every source once, shuffled together (or in stored order). With weights
    each source is shuffled on its own and drawn from by its share: in any prefix of length ``n`` a source with share
    ``p``, one of ``s``, has ``n * p`` examples, give or take ``(1 + s * p) / 2``: those of equal shares come one behind
    the other. It starts its own next epoch when it is used up.
    """

    def __init__(self, sizes: Sequence[int], *, weights: Sequence[float] | None, seed: int, shuffle: bool) -> None:
        if not sizes or min(sizes) < 1:
            raise ValueError(f"every source needs at least one example, got sizes {list(sizes)}")
        self._sizes = np.asarray(sizes, dtype=np.int64)
        self._ends = np.cumsum(self._sizes)
        self._shares = None if weights is None else np.asarray(weights, dtype=np.float64) / float(sum(weights))
        self._seed = seed
        self._shuffle = shuffle
        # Two epochs are in use at a boundary, for each weighted source.
        self._order = lru_cache(maxsize=2 * len(sizes) + 2)(self._compute_order)

    @property
    def epoch_size(self) -> int:
        """Examples of one epoch: the rows of all sources."""
        return int(self._ends[-1])

    def window(self, start: int, stop: int) -> tuple[Sources, Rows]:
        """Source index and row index of the positions ``start`` to ``stop - 1``; two arrays of that length."""
        if self._shares is None:
            flat = self._draw(0, self.epoch_size, np.arange(start, stop, dtype=np.int64))
            owners = np.searchsorted(self._ends, flat, side="right")
            return owners.astype(np.int32), flat - (self._ends - self._sizes)[owners]
        sources, draws = self._interleave(self._shares, start, stop)
        rows = np.empty(stop - start, dtype=np.int64)
        for source in range(len(self._sizes)):
            mine = sources == source
            rows[mine] = self._draw(source + 1, int(self._sizes[source]), draws[mine])
        return sources, rows

    def _draw(self, key: int, size: int, draws: NDArray[np.int64]) -> NDArray[np.int64]:
        """Rows of the ``draws``-th examples taken from a set of ``size``, reshuffled every epoch."""
        if not self._shuffle:
            return draws % size
        rows = np.empty_like(draws)
        for epoch in np.unique(draws // size):
            mine = draws // size == epoch
            rows[mine] = self._order(key, size, int(epoch))[draws[mine] % size]
        return rows

    def _compute_order(self, key: int, size: int, epoch: int) -> NDArray[np.int64]:
        return permutation(size, self._seed, key, epoch)

    @staticmethod
    def _interleave(shares: NDArray[np.float64], start: int, stop: int) -> tuple[Sources, NDArray[np.int64]]:
        """Source, and which draw from that source, for each position.

        The k-th draw from a source with share p is due at time (k + 1/2) / p; positions are draws in order of time.
        By time t a source is due floor(t p + 1/2) times, so t draws in all, give or take half a draw a source.
        """
        slack = len(shares) + 1
        lowest = max(0.0, float(start - slack))
        first = np.floor(lowest * shares + 0.5).astype(np.int64)
        last = np.floor((stop + slack) * shares + 0.5).astype(np.int64) + 1
        source = np.repeat(np.arange(len(shares), dtype=np.int32), last - first)
        draw = np.concatenate([np.arange(a, b, dtype=np.int64) for a, b in zip(first, last, strict=True)])
        order = np.lexsort((source, (draw + 0.5) / shares[source]))
        chosen = order[start - int(first.sum()) : stop - int(first.sum())]
        return source[chosen], draw[chosen]
