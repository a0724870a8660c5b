"""Noise on embeddings in training (NEFTune, arXiv 2310.05914), a function of each token's place in the run alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sft_trainer.data.feed import BinTensors
from sft_trainer.data.stream import random_seed
from sft_trainer.errors import ConfigError

from .attention import Boundaries

_BLOCK = 1024
"""Tokens of a bin that are drawn together, whichever of them are here: more than that is drawn by none for others."""


@dataclass(frozen=True)
class Noise:
    """For the tokens of some bins, one after the other, or a part of these tokens.

    Of each the numbers are from -1 to 1, uniform, times ``alpha / sqrt(length * width)``, where the length is that of
    its own document: what else is packed beside it does not matter.
    """

    alpha: float
    seeds: tuple[int, ...]
    """Of each bin, a function of its place in the run."""
    sizes: tuple[int, ...]
    """Tokens of each bin."""
    first: int = 0
    """Place of the first token that is here."""

    @classmethod
    def of(cls, bin_: BinTensors, alpha: float) -> "Noise | None":
        """That of the tokens of ``bin_`` in a step; None where there is none."""
        return cls(alpha, bin_.seeds, bin_.sizes, bin_.first) if alpha else None

    @contextmanager
    def added_to(self, embeddings: nn.Module, boundaries: Boundaries) -> Iterator[None]:
        """Have it added to what ``embeddings`` give meanwhile, for the documents in ``boundaries``."""
        times = 0

        def add(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
            nonlocal times
            times += 1
            return output + self.values(output, boundaries.ends)

        hook = embeddings.register_forward_hook(add)
        try:
            yield
        finally:
            hook.remove()
        if times != 1:
            raise ConfigError(
                f"training.neftuneNoiseAlpha is {self.alpha:g}, and this model looks its embeddings up {times} times "
                "in a forward pass, not once: leave it out"
            )

    def values(self, embedded: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """What is added to ``embedded`` (…, tokens, width), of documents with these ``ends``; (tokens, width).

        Tokens behind all bins, which fill a part up, have none.
        """
        tokens, width = embedded.shape[-2:]
        noise = torch.zeros((tokens, width), dtype=embedded.dtype, device=embedded.device)
        places = torch.arange(self.first, self.first + tokens, dtype=ends.dtype, device=ends.device)
        lengths = ends.diff()[torch.searchsorted(ends, places, right=True) - 1]
        scales = self.alpha * (lengths.float() * width).rsqrt()[:, None]
        generator = torch.Generator(embedded.device)
        for seed, start, stop in self._blocks():
            begin, end = max(start, self.first), min(stop, self.first + tokens)
            if begin >= end:
                continue
            generator.manual_seed(seed)
            drawn = torch.empty((stop - start, width), device=embedded.device).uniform_(-1, 1, generator=generator)
            here = slice(begin - self.first, end - self.first)
            noise[here] = drawn[begin - start : end - start] * scales[here]
        return noise

    def _blocks(self) -> Iterator[tuple[int, int, int]]:
        """Seed, first place and the one behind the last, of all that is drawn together."""
        begin = 0
        for seed, size in zip(self.seeds, self.sizes, strict=True):
            for block, start in enumerate(range(begin, begin + size, _BLOCK)):
                yield random_seed(seed, block), start, min(start + _BLOCK, begin + size)
            begin += size
