"""How much memory one block of a model takes for each token: what torch keeps of it, operator by operator.

Pure: from the block's shape. A test compares it with what is seen on tensors without memory (docs/memory.md).
"""

from collections.abc import Collection
from dataclasses import dataclass
from math import ceil, inf

from .adapters import adapter_parameters
from .model_shape import GatedDelta, ModelShape
from .sequence_parallel import key_repeats
from .v1alpha1.job import SFTJobSpec
from .v1alpha1.lora import LoraSpec

LOW_RANK = 8
"""Selective checkpointing computes a product of matrices again where the numbers that they share, times this, are fewer
than its columns: that takes less time than to read it. So it does with the second factor of an adapter of low rank."""
ROW_MULTIPLE = 8
"""Numbers: a row of a factor of a product for all experts is a multiple of so many, in any dtype whole 16 bytes."""
BYTES = {"bf16": 2, "fp32": 4}
RULE_AT_ONCE = 2**17
"""Tokens times heads of values for which the gated delta rule is computed at a time."""
RULE_CHUNK = 64
"""Tokens of a chunk of it, within which all are seen at once."""
CONVOLUTION_COPIES = 4
"""In fp32, of what comes into the convolution of a gated delta net, which its backward pass holds at the most."""


@dataclass(frozen=True)
class BlockMemory:
    """Bytes that one block takes for each token."""

    kept: float
    """From its forward to its backward pass."""
    working: float
    """Besides that, at the worst moment of its backward pass."""


NOTHING = BlockMemory(kept=0.0, working=0.0)
"""Of a block before the first one that is trained: no gradient comes so far, and none of it is computed backwards."""


def block_memory(
    shape: ModelShape,
    spec: SFTJobSpec,
    computed: int,
    adapted: Collection[str],
    *,
    trained: bool | None = None,
    compiled: bool = False,
    unpacked: int = 0,
    tokens: float = inf,
) -> BlockMemory:
    """Of a block of ``shape``, computed with ``computed`` bytes a number, operator by operator as transformers has it.

    ``adapted`` names its layers with adapters; ``trained`` says whether weights of its own are trained, which is known
    of a spec that trains all or none. One of which some are is taken for one of which all are: a most.
    With activation checkpointing, what it then keeps. Attention keeps queries, keys, values, its output and a number
    for each token and head. A norm is computed in fp32 and keeps its input in fp32.

    One that is ``compiled`` keeps what products of matrices read and give, once, and the deviations of norms: all else
    is computed again from these within what reads it. One of experts is taken for one that is not: a most.

    ``unpacked`` is what the largest weight takes that is unpacked to be multiplied with, in bytes. That is there once,
    as copies are of adapters whose rank is filled up: so many ``tokens`` share it.
    """
    family, width = shape.family, shape.hidden_size
    queries, keys, inner = shape.queries, shape.keys, shape.intermediate_size
    frozen = not (spec.trains_all if trained is None else trained)
    lora = spec.lora
    dropout = lora.dropout if lora else 0.0
    # The normed value is kept for the gradient of the norm's weight: a frozen one has none.
    normed = 0 if frozen else (4 if family.norms_in_fp32 else computed)
    norms: float = shape.norms * width * (4 + normed) + 2 * width * computed
    between = (queries + keys) * (4 + normed) if shape.normed else 0
    compiled = compiled and knows_compiled(shape)
    attention = _attention(shape, spec, computed, frozen=frozen, compiled=compiled)
    mlp: float = computed * 4 * inner
    if shape.experts:
        mlp = _mixture(shape, computed, adapted, frozen=frozen)
        if spec.training.router_aux_loss_coefficient:
            mlp += 4 * shape.experts
    if compiled:
        norms = computed * width * (3 + shape.norms / 2) + 4 * shape.norms
        if shape.family.gated and "self_attn.q_proj" in adapted:
            # The sum of what both give is kept whole, and its half for the gate once more.
            attention += computed * queries
        deviations = shape.heads + shape.kv_heads if shape.normed == "head" else 2
        between = computed * (queries + keys) + 4 * deviations if shape.normed else 0
        mlp = computed * 3 * inner
    kept = norms + between + attention + mlp
    if frozen:
        kept -= computed * _unread(shape, [] if dropout else adapted)
    adapters = _adapters(shape, lora, adapted) if lora else []
    kept += computed * sum(rank for rank, _ in adapters)
    if lora and lora.rank_of_experts % ROW_MULTIPLE:
        copied = {name: sizes for name, sizes in shape.of_experts.items() if name in adapted}
        kept += computed * adapter_parameters(copied, 0, _computed_rank(lora.rank_of_experts)) / tokens
    if lora and lora.use_dora:
        # For the gradients of magnitudes: what these are multiplied with.
        kept += computed * sum(outputs for _, outputs in adapters)
    if lora and dropout:
        kept += sum((computed + 1) * shape.linear[name][1] for name in adapted)
    working: float = computed * 2 * (inner + width)
    if frozen and (dropout or "mlp.down_proj" not in adapted):
        # What down_proj read is not kept, so nothing is let go of when its gradient is there.
        working += computed * inner
    if shape.experts:
        working = shape.chosen * (computed * (3 * width + 2 * inner))
        if family.weighed_in_fp32 and computed < 4:
            working += shape.chosen * 8 * width
    working += unpacked / tokens
    if family.biased:
        # The activation is computed again; or, of narrow experts, the sum of what they give is taken apart.
        again = shape.chosen * 7 * inner - 2 * width
        working = max(computed * again, computed * shape.chosen * (3 * width + inner) + unpacked / tokens)
    if shape.delta:
        # What the MLP and the norm before it keep is let go of by then.
        gone = mlp + width * (4 + normed + computed)
        gone += _behind_the_rule(shape.delta, computed, frozen=frozen, compiled=compiled)
        working = max(working, _delta_working(shape.delta, computed, tokens) + computed * width - gone)
    how = spec.training.activation_checkpointing
    if how == "none":
        return BlockMemory(kept, working)
    # The rest is there again, as a whole, while the block's backward pass is computed.
    least = float(computed * width)
    if how == "selective":
        # Products of matrices, those of adapters too, and attention.
        worth_it = (outputs for outputs, inputs in shape.linear.values() if inputs * LOW_RANK >= outputs)
        products = sum(worth_it) + (shape.delta.values if shape.delta else queries)
        if shape.experts:
            products += shape.experts + shape.chosen * (2 * inner + width)
        # What comes out of the first factor of an adapter, and of the second where it shares enough numbers to be
        # worth it.
        products += sum(rank + (outputs if rank * LOW_RANK >= outputs else 0) for rank, outputs in adapters)
        least += computed * products + (0 if shape.delta else 4 * shape.heads)
        working += 0 if shape.experts else computed * 2 * width
    return BlockMemory(least, kept + working - least)


def knows_compiled(shape: ModelShape) -> bool:
    """Whether it is known what blocks of ``shape`` keep where they are compiled: of others it is a most."""
    return shape.family.compiled


def _attention(shape: ModelShape, spec: SFTJobSpec, computed: int, *, frozen: bool, compiled: bool) -> float:
    """Of a token in what a block has for attention, but the norms of queries and keys."""
    queries, keys, normed = shape.queries, shape.keys, 0 if frozen else computed
    if (delta := shape.delta) is not None:
        # The convolution keeps what it reads, what it gives, and that activated; the rule what its two numbers for each
        # head of values are made of.
        gates = delta.value_heads * (2 * computed + (8 if compiled else 16))
        behind = _behind_the_rule(delta, computed, frozen=frozen, compiled=compiled)
        return computed * 3 * delta.channels + gates + behind
    attention: float = computed * 2 * (queries + keys) + 4 * shape.heads
    if shape.family.fused == "all" and spec.sequence_parallel == 1:
        # Values are part of what the one projection gave.
        attention += computed * (queries + keys)
    if spec.sequence_parallel > 1:
        # The output is there by heads and by tokens; heads of keys once for each process that they are sent to.
        repeats = key_repeats(shape.kv_heads, spec.sequence_parallel)
        attention += computed * (queries + 2 * keys * (repeats - 1))
    if shape.family.gated:
        # The gate, and the product, which is read.
        attention += computed * 2 * queries
        # The norm of queries keeps what it reads in fp32: that is the whole projection where it is so already.
        attention += computed * queries if computed == BYTES["fp32"] and not compiled else 0
    if (latent := shape.latent) is not None:
        # Narrow queries and keys are normed. Values are filled up to the width of keys, and cut again; where they are
        # as wide they are a part of what was projected, and kept with the rest of it.
        attention += (latent.queries + latent.keys) * (4 + normed + computed)
        filled = shape.attended != queries
        attention += computed * (shape.attended if filled else queries - shape.heads * latent.rotated)
    return attention


def _behind_the_rule(delta: GatedDelta, computed: int, *, frozen: bool, compiled: bool) -> float:
    """Of a token in a gated delta net what is kept behind its rule: a norm in fp32, multiplied by an activated gate in
    fp32, and what the last projection reads."""
    return delta.values * (3 * computed if compiled else 12 + (2 if frozen else 3) * computed)


def _delta_working(delta: GatedDelta, computed: int, tokens: float) -> float:
    """Of a token in a gated delta net, what its rule or its convolution take backwards besides what is kept."""
    rule = rule_bytes(delta, int(tokens)) / tokens if tokens < inf else 0.0
    rule += computed * (2 * delta.values + delta.channels)
    return max(rule, CONVOLUTION_COPIES * 4 * delta.channels + computed * delta.values)


def rule_bytes(delta: GatedDelta, tokens: int, at_once: int = RULE_AT_ONCE) -> int:
    """What the backward pass of the gated delta rule, in fp32, holds at the most besides tensors of the sizes of what
    came in; so many tokens times heads of values are computed ``at_once``."""
    sharing = delta.value_heads // delta.key_heads
    heads = min(max(1, at_once // (tokens * sharing)), delta.key_heads) * sharing
    k, v, filled = delta.key_size, delta.value_size, ceil(tokens / RULE_CHUNK) * RULE_CHUNK
    # For each token: what is as wide as keys or values, as a chunk, and its part of what each chunk has one of.
    of_values = 11 * k + 8 * v + 8 * RULE_CHUNK + (3 * k * v + k * k) // RULE_CHUNK
    # And, whatever the heads, which tokens are of one document.
    return filled * (heads * of_values + 6 * RULE_CHUNK) * 4


def _adapters(shape: ModelShape, lora: LoraSpec, adapted: Collection[str]) -> list[tuple[int, int]]:
    """Products of a token with the factors of adapters of ``adapted`` layers: numbers between them, and outputs.

    With those of experts for each that it is sent to.
    """
    linear = [(lora.rank, shape.linear[name][0]) for name in adapted if name in shape.linear]
    experts = [
        (_computed_rank(lora.rank_of_experts), outputs)
        for name, (_, outputs, _) in shape.of_experts.items()
        if name in adapted
    ]
    return linear + shape.chosen * experts


def _computed_rank(rank: int) -> int:
    """That which adapters of experts of ``rank`` are computed with: filled up with 0."""
    return ceil(rank / ROW_MULTIPLE) * ROW_MULTIPLE


def _unread(shape: ModelShape, read: Collection[str]) -> int:
    """Numbers of a token that go into layers with frozen weights and that no adapter keeps: it does of those ``read``.

    What goes into experts ``_mixture`` leaves out itself.
    """
    return sum(numbers for names, numbers in shape.readers.items() if not set(names) & set(read))


def _mixture(shape: ModelShape, computed: int, adapted: Collection[str], *, frozen: bool) -> float:
    """Of a token in the experts of a block, and its router, from the forward to the backward pass.

    For each expert that it is sent to: what goes in, the two projections, the activation, their product, what comes
    out, and its places before and after sorting. Of what goes into a product with ``frozen`` weights nothing is kept,
    but where these have adapters.
    Experts with biases forget the activation, and choose by logits instead of probabilities.
    """
    width, inner = shape.hidden_size, shape.intermediate_size
    biased = shape.family.biased
    read = sum(inputs for name, (*_, inputs) in shape.of_experts.items() if not frozen or name in adapted)
    numbers = read + (2 if biased else 3) * inner + width
    kept = (0 if biased else 4 * shape.experts) + shape.chosen * (computed * numbers + 56)
    if shape.family.routed_in_fp32 and not frozen:
        # What the router reads, for the gradient of its weights.
        kept += 4 * width if computed < 4 else 0
    if shape.family.shared_gate:
        # What the expert for all tokens gives, and the number that it is weighed by.
        kept += computed * (width + 1)
    return kept + computed * 4 * shape.shared
