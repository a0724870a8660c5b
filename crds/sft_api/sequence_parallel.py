"""Which models and nodes the tokens of a micro-batch can be shared out for (Ulysses), in either strategy. Pure.

Within attention each process has all tokens of a part of the heads, so that heads are what is divided
(Jacobs et al. 2023, arXiv 2309.14509).
"""

from collections.abc import Collection, Sequence
from typing import Any

from .v1alpha1.job import SFTJobSpec
from .v1alpha1.words import either

LINEAR_ATTENTION = ("olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
"""Values of ``model_type`` of those models with layers of linear attention, gated delta nets, that are trained."""
SHORT_CONVOLUTIONS = ("lfm2", "lfm2_moe", "lfm3")
"""Of those with layers of short convolutions."""
MAMBA_2 = ("bamba", "falcon_h1", "granitemoehybrid", "nemotron_h")
"""Of those with layers of Mamba 2."""
IN_ORDER = {
    **dict.fromkeys(LINEAR_ATTENTION, "layers of linear attention"),
    **dict.fromkeys(SHORT_CONVOLUTIONS, "layers of short convolutions"),
    **dict.fromkeys(MAMBA_2, "layers of Mamba 2"),
}
"""Of all that have layers beside attention that go through tokens in order: what these are called."""
_FIELD = "strategy.fsdp.sequenceParallelDegree"


def key_repeats(kv_heads: int, degree: int) -> int:
    """How often each head of keys and values is sent, so that every one of ``degree`` processes gets whole heads."""
    return max(1, degree // kv_heads)


def possible(heads: int, kv_heads: int, degree: int) -> bool:
    """Whether ``degree`` processes can share out ``heads`` of queries and ``kv_heads`` of keys and values."""
    return heads % degree == 0 and (kv_heads % degree == 0 or degree % kv_heads == 0)


def heads_problem(heads: int, kv_heads: int | Collection[int], degree: int, shard_degree: int) -> str:
    """Why ``degree`` processes cannot share tokens of a model with so many heads, and what to change; else empty.

    Layers may differ in their heads of keys: then ``kv_heads`` are those of each. A copy of the model is sharded over
    ``shard_degree`` processes: other degrees that can be divide that too.
    """
    every = {kv_heads} if isinstance(kv_heads, int) else {*kv_heads}
    tried = [
        each
        for each in range(1, min(heads, shard_degree) + 1)
        if shard_degree % each == 0 and all(possible(heads, keys, each) for keys in every)
    ]
    problems = (unshared_heads(_FIELD, "the model", heads, keys, degree, tried) for keys in sorted(every))
    return next(filter(None, problems), "")


def layers_problem(kind: Any, degree: int) -> str:
    """Why ``degree`` processes cannot share tokens of a model of type ``kind``, and what to change; else empty."""
    if degree == 1 or not isinstance(kind, str) or kind not in IN_ORDER:
        return ""
    return (
        f"{_FIELD} is {degree}, but a model of type {kind!r} has {IN_ORDER[kind]}, which go through all tokens of a "
        "document in order: leave it out"
    )


def unshared_heads(field: str, whose: str, heads: int, kv_heads: int, degree: int, tried: Sequence[int]) -> str:
    """``heads_problem`` of the heads of ``whose``, of which ``field`` is the degree; others are among ``tried``."""
    if possible(heads, kv_heads, degree):
        return ""
    if heads % degree:
        why = f"which does not divide the {heads} attention heads of {whose}"
    else:
        why = f"which neither divides the {kv_heads} heads of keys of {whose} nor is a multiple of them"
    fitting = [each for each in tried if possible(heads, kv_heads, each)]
    return f"{field} is {degree}, {why}: {f'set it to {either(fitting)}' if fitting else 'leave it out'}"


def nodes_warning(spec: SFTJobSpec) -> str:
    """What to say when processes that share tokens are on several nodes; else empty."""
    here, degree = spec.compute.effective_processes_per_node, spec.sequence_parallel
    if spec.compute.nodes == 1 or here % degree == 0:
        return ""
    return (
        f"{_FIELD} is {degree}, and a node has {here} processes: queries, keys and values of every layer cross the "
        f"network between nodes; a degree that divides {here} stays within them"
    )
