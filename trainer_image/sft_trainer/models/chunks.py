"""Documents in chunks of tokens, for layers with a state that goes from token to token and decays.

Within a chunk all is computed by products of matrices, and the state goes from chunk to chunk; what decays between two
tokens is the sum over those between them, and no token reads, or writes, a state of another document. By masks: see
docs/design/0033.
"""

from typing import NamedTuple

import torch
from torch.nn.functional import pad

from sft_api.operator_memory import CHUNK_TOKENS

CHUNK = CHUNK_TOKENS
"""Tokens of one, as transformers and flash-linear-attention have it for the gated delta rule."""


def exact(dtype: torch.dtype) -> torch.dtype:
    """In which numbers of ``dtype`` are computed with here."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def documents_of(tokens: int, ends: torch.Tensor) -> torch.Tensor:
    """The number of the document of each of ``tokens``, (tokens,); those behind the last document are another."""
    return torch.bucketize(torch.arange(tokens, device=ends.device, dtype=ends.dtype), ends[1:], right=True)


class Chunks(NamedTuple):
    """How documents lie in chunks, of which the last is filled up with tokens of none."""

    together: torch.Tensor
    """Which token (columns) is of the document of each (rows), and not after it: (chunks, 1, tokens, tokens)."""
    goes_on: torch.Tensor
    """Which tokens are of the document that the chunk before ended with: (chunks, 1, tokens)."""
    is_filled: torch.Tensor
    """Whether that is also the one that goes on, which fills the chunk then: (chunks, 1)."""

    @classmethod
    def of(cls, tokens: int, ends: torch.Tensor, size: int) -> "Chunks":
        document = documents_of(-(-tokens // size) * size, ends).view(-1, size)
        # Nothing goes on in the first chunk.
        before = pad(document[:-1, -1:], (0, 0, 1, 0), value=-1)
        same = document[:, :, None] == document[:, None, :]
        return cls(
            together=same.tril()[:, None],
            goes_on=(document == before)[:, None],
            is_filled=document[:, -1:] == before,
        )


class Decays(NamedTuple):
    """What is left of a state, by heads, from the logarithms of what each token multiplies it by."""

    between: torch.Tensor
    """The decay from one token of a document to a later one, else 0: (chunks, heads, tokens, tokens)."""
    reach: torch.Tensor
    """What of the state from before the chunk is left at each token, (chunks, heads, tokens)."""
    rest: torch.Tensor
    """What of each token's part in it is left at the end of the chunk, (chunks, heads, tokens)."""
    left: torch.Tensor
    """What of the state from before is left there, (chunks, heads)."""

    @classmethod
    def of(cls, decay: torch.Tensor, chunks: Chunks) -> "Decays":
        """Of logarithms ``decay`` (chunks, heads, tokens)."""
        # Nothing is added that would have to be taken away again: neither of other documents, nor of tokens before. Of
        # sums with what cuts a state off in them, differences would have lost all others.
        sums = (chunks.together.to(decay.dtype) @ decay[..., None])[..., 0]
        apart = decay[..., None].expand(*decay.shape, decay.shape[-1]).tril(-1).cumsum_(-2)
        between = apart.masked_fill_(~chunks.together, -torch.inf).exp_()
        return cls(
            between=between,
            reach=sums.exp() * chunks.goes_on,
            rest=between[..., -1, :],
            left=sums[..., -1].exp() * chunks.is_filled,
        )


def of_decay(of: Decays, chunks: Chunks) -> torch.Tensor:
    """The gradient of the logarithms that ``Decays`` are of, from those of the logarithms of each: ``of``, changed."""
    # Each token's is in what is between all before it and all from it on.
    of.between[..., -1, :] += of.rest
    later = torch.ones_like(of.between[0, 0]).triu_()
    of_between = (later @ of.between).tril_(-1).sum(-1)
    # And in all sums from its own on.
    of_sums = of.reach.clone()
    of_sums[..., -1] += of.left
    return of_between + (chunks.together.to(of_sums.dtype).mT @ of_sums[..., None])[..., 0]


def in_chunks(numbers: torch.Tensor, size: int) -> torch.Tensor:
    """(tokens, …) as (chunks, size, …), exact, filled up with zeros."""
    numbers = numbers.to(exact(numbers.dtype))
    missing = -numbers.shape[0] % size
    filled = pad(numbers, (0, 0) * (numbers.ndim - 1) + (0, missing))
    chunks: torch.Tensor = filled.unflatten(0, (-1, size))
    return chunks


def in_a_row(chunks: torch.Tensor, tokens: int) -> torch.Tensor:
    """The inverse of ``in_chunks``."""
    return chunks.flatten(0, 1)[:tokens]
