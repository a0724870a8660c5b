"""How much memory one block of a model takes for each token: what torch keeps of it, operator by operator.

Pure: from the block's shape. A test compares it with what is seen on tensors without memory (docs/memory.md).
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import ceil, inf

from .adapters import adapter_parameters
from .model_shape import GatedDelta, ModelShape, StateSpace
from .operator_memory import CONVOLUTION_COPIES, rule_bytes, scan_bytes, score_bytes
from .sequence_parallel import key_repeats
from .v1alpha1.job import SFTJobSpec

BYTES = {"bf16": 2, "fp32": 4}
LOW_RANK = 8
"""Selective checkpointing computes a product of matrices again where the numbers that they share, times this, are fewer
than its columns: that takes less time than to read it. So it does with the second factor of an adapter of low rank."""
ROW_MULTIPLE = 8
"""Numbers: a row of a factor of a product for all experts is a multiple of so many, in any dtype whole 16 bytes."""
KERNEL_SIZE = 256
"""Numbers of the largest head that torch's kernel for documents takes in bf16, on a GPU: larger ones go by blocks."""


@dataclass(frozen=True)
class BlockMemory:
    """Bytes that one block takes for each token."""

    kept: float
    """From its forward to its backward pass."""
    working: float
    """Besides that, at the worst moment of its backward pass."""


NOTHING = BlockMemory(kept=0.0, working=0.0)
"""Of a block before the first one that is trained: no gradient comes so far, and none of it is computed backwards."""


@dataclass(frozen=True)
class _Part:
    """Bytes of a token in a part of a block: a norm, what mixes tokens, or an MLP."""

    kept: float
    """From its forward to its backward pass."""
    working: float
    """Besides that, and what the parts before it keep, at the worst moment of its backward pass."""


@dataclass(frozen=True)
class _Asked:
    """How a block is computed and trained: what ``block_memory`` is given."""

    spec: SFTJobSpec
    computed: int
    adapted: frozenset[str]
    frozen: bool
    compiled: bool
    unpacked: float
    tokens: float

    @property
    def normed(self) -> int:
        """Bytes of a number that are kept for the gradient of a norm's weight: a frozen one has none."""
        return 0 if self.frozen else self.computed

    @property
    def dropout(self) -> float:
        """Of adapters."""
        return self.spec.lora.dropout if self.spec.lora else 0.0

    def share(self, whole: float) -> float:
        """A token's part of what all of a micro-batch share."""
        return whole / self.tokens if self.tokens < inf else 0.0


_ORDER: Mapping[str, tuple[str, ...]] = {
    "before": ("norm", "mixer", "norm", "mlp"),
    "after": ("mixer", "norm", "mlp", "norm"),
    "both": ("norm", "mixer", "norm", "norm", "mlp", "norm"),
    "around": ("norm", "mixer", "norm", "norm", "mlp", "norm"),
    "one": ("norm", "mixer", "mlp"),
}
"""The parts of a block, forwards, by where its norms stand."""


def _order(shape: ModelShape) -> tuple[str, ...]:
    order = _ORDER[shape.family.norms]
    # Experts come last, so backwards first: behind them is their own norm, and the one of the block.
    return (*order[:-2], "norm", "norm", *order[-2:], "norm") if shape.has_norms_beside else order


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

    It is computed backwards part by part: what one keeps is let go of when it is done, so most is held at the part
    where all before it, it itself, and what it works with are most.

    ``adapted`` names its layers with adapters; ``trained`` says whether weights of its own are trained, which is known
    of a spec that trains all or none. One of which some are is taken for one of which all are: a most.
    With activation checkpointing, what it then keeps.

    One that is ``compiled`` keeps what products of matrices read and give, once, and the deviations of norms: all else
    is computed again from these within what reads it. One of experts is taken for one that is not: a most.

    ``unpacked`` is what the largest weight takes that is unpacked to be multiplied with, in bytes. That is there once,
    as copies are of adapters whose rank is filled up: so many ``tokens`` share it.
    """
    asked = _Asked(
        spec=spec,
        computed=computed,
        adapted=frozenset(adapted),
        frozen=not (spec.trains_all if trained is None else trained),
        compiled=compiled and knows_compiled(shape),
        unpacked=unpacked,
        tokens=tokens,
    )
    parts = {"norm": _norm(shape, asked), "mixer": _mixer(shape, asked), "mlp": _mlp(shape, asked)}
    kept = most = 0.0
    if shape.input_width:
        parts["input"] = _input(shape, asked)
    for name in (*_order(shape), *(("input", "norm") if shape.input_width else ())):
        kept += parts[name].kept
        most = max(most, kept + parts[name].working)
    working, how = most - kept, spec.training.activation_checkpointing
    if how == "none":
        return BlockMemory(kept, working)
    # The rest is there again, as a whole, while the block's backward pass is computed.
    least = float(computed * shape.hidden_size)
    if how == "selective":
        least += _worth_it(shape, asked)
        working += 0 if shape.experts else computed * 2 * shape.hidden_size
    if shape.hands_on:
        least += computed * 2 * shape.keys
    return BlockMemory(least, kept + working - least)


def knows_compiled(shape: ModelShape) -> bool:
    """Whether it is known what blocks of ``shape`` keep where they are compiled: of others it is a most."""
    return shape.family.compiled and not shape.dropped


def _norm(shape: ModelShape, asked: _Asked) -> _Part:
    """A norm of the width of the model. It is computed in fp32, and keeps its input in that.

    Backwards it has five tensors of its width in fp32, and the gradients that come in and go past it.
    """
    if asked.compiled:
        # With the rest, in ``_mixer``.
        return _Part(0.0, 0.0)
    family, width = shape.family, shape.hidden_size
    if family.layered:
        # That of torch keeps its input as it is, and two numbers.
        return _Part(asked.computed * width + 8, 3 * asked.computed * width)
    # One that takes the mean away keeps what is left twice.
    kept = (8 if family.centred else 4) + _normed(shape, asked)
    return _Part(width * kept, width * (20 + 2 * asked.computed - _normed(shape, asked)))


def _normed(shape: ModelShape, asked: _Asked) -> int:
    return 4 if asked.normed and shape.family.norms_in_fp32 else asked.normed


def _mixer(shape: ModelShape, asked: _Asked) -> _Part:
    """What mixes tokens: attention, or what stands in its place or beside it, with what that reads."""
    computed, width = asked.computed, shape.hidden_size
    # Of dropout behind it the factors.
    kept, working = float(computed * width * shape.dropped), 0.0
    if asked.compiled:
        kept += computed * width * (3 + shape.norms / 2) + 4 * shape.norms
    elif shape.attends or shape.delta or shape.states or shape.convolved:
        kept += computed * width
    behind = 0.0
    if shape.attends:
        attention = _attention(shape, asked)
        kept, behind, working = kept + attention.kept, attention.kept, attention.working
    if (states := shape.states) is not None:
        if shape.attends:
            # It reads another tensor than attention does, which comes behind it.
            kept += computed * width
        part = _states(states, shape, asked)
        kept, working = kept + part.kept, max(working, part.working - behind)
    if shape.convolved:
        # What is projected, the product of two of its three parts, that convolved, and the product with the third.
        kept += computed * 6 * width
        working = (4 * CONVOLUTION_COPIES + 4 * computed) * width
    if (delta := shape.delta) is not None:
        part = _gated_delta(delta, shape, asked)
        kept, working = kept + part.kept, part.working
    if not shape.intermediate_size:
        working += asked.share(asked.unpacked)
    return _Part(kept + _adapted(shape, shape.linear_of["mixer"], asked), working)


def _input(shape: ModelShape, asked: _Asked) -> _Part:
    """The input that a block has of its own: what its gate reads and gives, and the product with that."""
    kept = asked.computed * (shape.hidden_size + 2 * shape.input_width)
    working = asked.computed * 2 * (shape.hidden_size + shape.input_width)
    return _Part(kept + _adapted(shape, shape.linear_of["input"], asked), working)


def _attention(shape: ModelShape, asked: _Asked) -> _Part:
    """Of attention: queries, keys, values, its output and a number for each token and head; norms of queries and
    keys."""
    queries, keys, computed, degree = shape.queries, shape.keys, asked.computed, asked.spec.sequence_parallel
    normed = _normed(shape, asked) if shape.family.query_key_norms else 0
    if shape.reuses:
        keys = 0
    kept = float(computed * 2 * (queries + keys) + 4 * shape.heads)
    if shape.normed and asked.compiled:
        kept += computed * (queries + keys) + 4 * (shape.heads + shape.kv_heads if shape.normed == "head" else 2)
    elif shape.normed:
        # That of values has no weight.
        kept += (queries + keys) * (4 + normed) + (4 * keys if shape.family.handing else 0)
    if shape.family.fused == "all" and degree == 1:
        # Values are part of what the one projection gave.
        kept += computed * (queries + keys)
    if degree > 1:
        # The output is there by heads and by tokens; heads of keys once for each process that they are sent to.
        kept += computed * (queries + 2 * keys * (key_repeats(shape.kv_heads, degree) - 1))
    if shape.family.gated:
        # The gate, and the product, which is read.
        kept += computed * 2 * queries
        # The norm of queries keeps what it reads in fp32: that is the whole projection where it is so already.
        kept += computed * queries if computed == BYTES["fp32"] and not asked.compiled else 0
        if asked.compiled and "self_attn.q_proj" in asked.adapted:
            # The sum of what both give is kept whole, and its half for the gate once more.
            kept += computed * queries
    if (latent := shape.latent) is not None:
        # Narrow queries and keys are normed. Values are filled up to the width of keys, and cut again; where they are
        # as wide they are a part of what was projected, and kept with the rest of it.
        kept += (latent.queries + latent.keys) * (4 + asked.normed + computed)
        filled = shape.attended != queries
        kept += computed * (shape.attended if filled else queries - shape.heads * latent.rotated)
    # Gradients of the output, queries, keys and values, and those that come in and go past.
    working: float = computed * 2 * (queries + shape.keys + shape.hidden_size) + 4 * shape.heads
    if goes_by_blocks(shape, computed) and asked.tokens < inf:
        heads, everywhere = ceil(shape.heads / degree), int(asked.tokens) * degree
        scores = asked.share(score_bytes(heads, 2 * shape.keys // degree, everywhere, computed))
        working = max(working, scores + computed * (2 * queries + shape.hidden_size))
    return _Part(kept, working)


def goes_by_blocks(shape: ModelShape, computed: int) -> bool:
    """Whether no kernel computes attention of blocks of ``shape``, but plain torch, in blocks of rows."""
    return shape.attends and (
        shape.capped or shape.family.sinks or (computed < BYTES["fp32"] and shape.head_size > KERNEL_SIZE)
    )


def _states(states: StateSpace, shape: ModelShape, asked: _Asked) -> _Part:
    """Of a layer of Mamba 2: what is projected, that convolved and activated, four numbers for each head in fp32, and
    what is behind the scan: its output and gate in fp32, activated and multiplied, normed, and read."""
    computed, values, width = asked.computed, states.values, shape.hidden_size
    if shape.family.states_normed:
        precise, behind = computed, values * ((16 if computed < 4 else 12) + asked.normed + computed)
        # What is read behind the norm is let go of by then; where nothing keeps it it is not there.
        read = 0 if asked.frozen and shape.named("mamba.out_proj") not in asked.adapted else computed
        norm = values * (20 - asked.normed - read) + 2 * computed * width
    else:
        # Scaled by numbers in fp32, all is in that.
        precise, behind, norm = 4, values * (2 * 4 + computed), 0
    into = precise * states.channels + 16 * states.heads
    kept = precise * states.projected + computed * states.channels + into + behind
    scan = asked.share(scan_bytes(states, int(asked.tokens))) if asked.tokens < inf else 0.0
    scan += precise * 3 * values + computed * width
    convolution = 4 * CONVOLUTION_COPIES * states.channels + computed * (states.projected + width)
    return _Part(kept, max(norm, scan - behind, convolution - behind - into))


def _gated_delta(delta: GatedDelta, shape: ModelShape, asked: _Asked) -> _Part:
    """Of a gated delta net: what its convolution reads, what that gives, and that activated; what the two numbers for
    each head of values are made of; and what is behind the rule: a norm in fp32, multiplied by an activated gate in
    fp32, and what the last projection reads."""
    computed = asked.computed
    gates = delta.value_heads * (2 * computed + (8 if asked.compiled else 16))
    behind = delta.values * (3 * computed if asked.compiled else 12 + (2 if asked.frozen else 3) * computed)
    rule = asked.share(rule_bytes(delta, int(asked.tokens))) if asked.tokens < inf else 0.0
    rule += computed * (2 * delta.values + delta.channels)
    convolution = 4 * CONVOLUTION_COPIES * delta.channels + computed * delta.values
    working = max(rule, convolution) + computed * shape.hidden_size - behind
    return _Part(computed * 3 * delta.channels + gates + behind, working)


def _mlp(shape: ModelShape, asked: _Asked) -> _Part:
    """Of an MLP, or a router and experts, with what they read."""
    family, computed = shape.family, asked.computed
    width, inner = shape.hidden_size, shape.intermediate_size
    if not inner:
        return _Part(0.0, 0.0)
    # Two products, the activation of one, and the product of these; without a gate the one, and that activated.
    products = 2 if family.ungated else 3 if asked.compiled else 4
    # What a router alone reads is kept for the gradient of its weights.
    is_kept = not (asked.compiled or (family.norms == "one" and shape.attends))
    is_kept = is_kept and not (asked.frozen and shape.experts and not shape.shared)
    kept = float(computed * width * is_kept)
    working: float = computed * ((3 if family.ungated else 2) * inner + 2 * width)
    if asked.frozen and (asked.dropout or shape.named("mlp.down_proj") not in asked.adapted):
        # What down_proj read is not kept, so nothing is let go of when its gradient is there.
        working += computed * inner
    if shape.experts:
        kept += _mixture(shape, asked)
        working = shape.chosen * (computed * (3 * width + (0 if family.ungated else 2) * inner))
        if family.weighed_in_fp32 and computed < 4:
            working += shape.chosen * 8 * width
        if family.scales_inputs:
            # The gradient of each scaled input, and its product with that: of few experts that is most.
            working = max(working, computed * (5 + 2 * shape.chosen) * width)
        if shape.has_norms_beside:
            # The gradient of what the MLP gave waits for that of experts, as does that of what both read.
            working += 2 * computed * width
    else:
        kept += computed * (products * inner + width * shape.dropped)
    working += asked.share(asked.unpacked)
    if family.biased:
        # The activation is computed again; or, of narrow experts, the sum of what they give is taken apart.
        again = shape.chosen * 7 * inner - 2 * width
        each = computed * shape.chosen * (3 * width + inner) + asked.share(asked.unpacked)
        working = max(computed * again, each)
    own = shape.linear_of["mlp"] | {*shape.of_experts}
    return _Part(kept + _adapted(shape, own, asked), working)


def _mixture(shape: ModelShape, asked: _Asked) -> float:
    """Of a token in the experts of a block, and its router, from the forward to the backward pass.

    For each expert that it is sent to: what goes in, the two projections, the activation, their product, what comes
    out, and its places before and after sorting. Of what goes into a product with ``frozen`` weights nothing is kept,
    but where these have adapters.
    Experts with biases forget the activation, and choose by logits instead of probabilities.
    """
    computed, width, inner, family = asked.computed, shape.hidden_size, shape.intermediate_size, shape.family
    read = sum(inputs for name, (*_, inputs) in shape.of_experts.items() if not asked.frozen or name in asked.adapted)
    numbers = read + (1 if family.ungated else 2 if family.biased else 3) * inner + width
    kept = (0 if family.biased else 4 * shape.experts) + shape.chosen * (computed * numbers + 56)
    if family.routed_in_fp32 and not asked.frozen:
        # What the router reads, for the gradient of its weights.
        kept += 4 * width if computed < 4 else 0
    if shape.has_norms_beside:
        # The router norms, and scales, what experts and MLP have normed: in fp32 all three keep it once.
        kept += (4 if computed < 4 else -4) * width + 2 * asked.normed * width
    if family.shared_gate:
        # What the expert for all tokens gives, and the number that it is weighed by.
        kept += computed * (width + 1)
    if asked.spec.training.router_aux_loss_coefficient:
        kept += 4 * shape.experts
    return kept + computed * (2 if family.ungated else 4) * shape.shared


def _adapted(shape: ModelShape, names: frozenset[str], asked: _Asked) -> float:
    """Of the layers of these ``names`` what their adapters keep, without what they read themselves where their weights
    are frozen and no adapter keeps it. What goes into experts ``_mixture`` leaves out itself."""
    computed, lora, kept = asked.computed, asked.spec.lora, 0.0
    if asked.frozen:
        keeping = frozenset[str]() if asked.dropout else asked.adapted
        readers = ((layers, read) for layers, read in shape.readers.items() if layers[0] in names)
        kept -= computed * sum(read for layers, read in readers if not keeping & {*layers})
    if lora is None:
        return kept
    adapters = _adapters(shape, asked, names)
    kept += computed * sum(rank for rank, _ in adapters)
    copied = {name: sizes for name, sizes in shape.of_experts.items() if name in asked.adapted & names}
    if copied and lora.rank_of_experts % ROW_MULTIPLE:
        kept += asked.share(computed * adapter_parameters(copied, 0, _computed_rank(lora.rank_of_experts)))
    if lora.use_dora:
        # For the gradients of magnitudes: what these are multiplied with.
        kept += computed * sum(outputs for _, outputs in adapters)
    if lora.dropout:
        kept += sum((computed + 1) * shape.linear[name][1] for name in asked.adapted & names)
    return kept


def _adapters(shape: ModelShape, asked: _Asked, names: frozenset[str]) -> list[tuple[int, int]]:
    """Products of a token with the factors of adapters of the layers of these ``names``: numbers between them, and
    outputs. With those of experts for each that it is sent to."""
    lora = asked.spec.lora
    if lora is None:
        return []
    linear = [(lora.rank, shape.linear[name][0]) for name in asked.adapted & names if name in shape.linear]
    experts = [
        (_computed_rank(lora.rank_of_experts), outputs)
        for name, (_, outputs, _) in shape.of_experts.items()
        if name in asked.adapted & names
    ]
    return linear + shape.chosen * experts


def _computed_rank(rank: int) -> int:
    """That which adapters of experts of ``rank`` are computed with: filled up with 0."""
    return ceil(rank / ROW_MULTIPLE) * ROW_MULTIPLE


def _worth_it(shape: ModelShape, asked: _Asked) -> float:
    """What selective checkpointing keeps besides what comes in: products of matrices, those of adapters too, attention,
    and what stands in its place."""
    computed, linear = asked.computed, shape.linear
    products = sum(outputs for outputs, inputs in linear.values() if inputs * LOW_RANK >= outputs)
    kept = 0.0
    if shape.attends:
        products += shape.queries
        kept += 4 * shape.heads
    if shape.delta:
        products += shape.delta.values
    if shape.states:
        kept += (computed if shape.family.states_normed else 4) * shape.states.values
    if shape.experts:
        gate = 1 if shape.family.ungated else 2
        products += shape.experts + shape.chosen * (gate * shape.intermediate_size + shape.hidden_size)
    # What comes out of the first factor of an adapter, and of the second where it shares enough numbers to be worth it.
    adapters = _adapters(shape, asked, frozenset({*linear, *shape.of_experts}))
    products += sum(rank + (outputs if rank * LOW_RANK >= outputs else 0) for rank, outputs in adapters)
    return kept + computed * products
