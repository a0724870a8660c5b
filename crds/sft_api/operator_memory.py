"""What operators of the trainer's own hold for a moment of their backward pass, besides tensors of the sizes of what
came in. Pure: the operators themselves tell by this when a block is looked at."""

from math import ceil
from typing import Protocol

from .model_shape import GatedDelta


class States(Protocol):
    """Sizes of states that go from token to token, as ``StateSpace`` has them."""

    @property
    def heads(self) -> int: ...
    @property
    def groups(self) -> int: ...
    @property
    def head_size(self) -> int: ...
    @property
    def state_size(self) -> int: ...


CHUNK_TOKENS = 64
"""Tokens of a chunk of what goes from token to token, within which all are seen at once."""
HEADS_AT_ONCE = 2**17
"""Tokens times heads, of values or of states, that are computed at a time."""
CONVOLUTION_COPIES = 4
"""In fp32, of what comes into a short convolution, which its backward pass holds at the most."""
SCORES_AT_ONCE = 2**24
"""Scores, of all heads together, that plain torch computes at a time."""
ROWS_AT_ONCE = 256
"""Tokens whose scores it computes at a time, at the most."""


def rule_bytes(delta: GatedDelta, tokens: int, at_once: int = HEADS_AT_ONCE) -> int:
    """Of the gated delta rule, in fp32; so many tokens times heads of values are computed ``at_once``."""
    sharing = delta.value_heads // delta.key_heads
    heads = min(max(1, at_once // (tokens * sharing)), delta.key_heads) * sharing
    k, v, filled = delta.key_size, delta.value_size, ceil(tokens / CHUNK_TOKENS) * CHUNK_TOKENS
    # For each token: what is as wide as keys or values, as a chunk, and its part of what each chunk has one of.
    of_values = 11 * k + 8 * v + 8 * CHUNK_TOKENS + (3 * k * v + k * k) // CHUNK_TOKENS
    # And, whatever the heads, which tokens are of one document.
    return filled * (heads * of_values + 6 * CHUNK_TOKENS) * 4


def scan_bytes(states: States, tokens: int, at_once: int = HEADS_AT_ONCE) -> int:
    """Of the scan of a state space, in fp32; so many tokens times heads of one group are computed ``at_once``."""
    heads = min(max(1, at_once // tokens), states.heads // states.groups)
    head, state, filled = states.head_size, states.state_size, ceil(tokens / CHUNK_TOKENS) * CHUNK_TOKENS
    # For each token: of a head what is as wide as it, as a chunk, and its part of the two states of a chunk.
    numbers = heads * (10 * head + 4 * CHUNK_TOKENS + 2 * head * state // CHUNK_TOKENS)
    # And B and C of a group, their gradients of all groups, and which tokens are of one document.
    numbers += (6 + 2 * states.groups) * state + 4 * CHUNK_TOKENS
    return filled * numbers * 4


def score_bytes(
    heads: int, keys_and_values: int, tokens: int, computed: int, exact: int = 4, at_once: int = SCORES_AT_ONCE
) -> int:
    """Of attention whose scores are computed in blocks of rows, so many ``at_once``, as numbers of ``computed`` bytes
    and, for a moment, of ``exact``: ``keys_and_values`` is the width of both together."""
    scores = heads * min(ROWS_AT_ONCE, tokens) * tokens
    if scores > at_once:
        scores = max(at_once, heads * tokens)
    return scores * (3 * exact + 2 * computed) + exact * tokens * keys_and_values
