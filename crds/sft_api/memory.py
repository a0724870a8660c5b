"""How much memory a run takes: of each GPU, and of each node's host. Pure: from a model's shape and a plan.

What a formula here says of one block is what torch keeps of it, operator by operator; a test compares it with what is
seen on tensors without memory, and the whole estimate with the strategy itself on such (docs/memory.md).
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from itertools import zip_longest
from math import ceil, inf

from .adapters import adapter_parameters
from .layers import EMBEDDINGS, HEAD, adapted_of, packed_of, trained_in_rows_of, trained_weights, trains_module
from .model_shape import GatedDelta, ModelShape, Transformed
from .sequence_parallel import key_repeats
from .v1alpha1.job import SFTJobSpec
from .v1alpha1.lora import LoraSpec, Quantised
from .v1alpha1.status import PlanStatus

MOMENTS = 2
"""Of AdamW, for each parameter."""
CHUNK_ELEMENTS = 2**27
"""Logits that the trainer holds at a time, a third of them where they are not the products as they are."""
CONTEXT_BYTES = 640 * 2**20
"""Of a GPU that torch's allocator does not see: CUDA's context with its kernels, and the workspaces of cuBLAS."""
GROUP_BYTES = 704 * 2**20
"""Buffers of NCCL for each group of processes: 544 to 688 MiB were measured on an A100 (NVIDIA/nccl, issue 964)."""
EXPORT_BYTES = 2 * 2**30
"""Host memory of the process that exports a checkpoint beside training: its libraries, and a few blocks."""
LOW_RANK = 8
"""Selective checkpointing computes a product of matrices again where the numbers that they share, times this, are fewer
than its columns: that takes less time than to read it. So it does with the second factor of an adapter of low rank."""
ROW_MULTIPLE = 8
"""Numbers: a row of a factor of a product for all experts is a multiple of so many, in any dtype whole 16 bytes."""
BYTES = {"bf16": 2, "fp32": 4}
MOMENT_BLOCK = 64
"""Moments in int8 that share a power of two, a byte, and are next to one another in a row."""
NF4_BLOCK = 64
"""Weights in NF4 that share what they are multiplied by, a number in fp32."""
PACKED_BYTES: Mapping[Quantised | None, float] = {None: 0, "nf4": 1 / 2 + 4 / NF4_BLOCK, "mxfp4": 1 / 2 + 1 / 32}
"""Of each weight in 4 bits, with its part of what it is multiplied by."""
RULE_AT_ONCE = 2**17
"""Tokens times heads of values for which the gated delta rule is computed at a time."""
RULE_CHUNK = 64
"""Tokens of a chunk of it, within which all are seen at once."""
CONVOLUTION_COPIES = 4
"""In fp32, of what comes into the convolution of a gated delta net, which its backward pass holds at the most."""
PACKED_AT_ONCE = 2**24
"""Such weights whose values a GPU looks up at a time, in fp32, by an index of 4 bytes for each two of them."""


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
class MemoryEstimate:
    """Bytes of one GPU at the moment when most is held, by what holds them; None is not known."""

    parameters: int
    """This process's share of the weights."""
    gradients: int
    """This process's share, or with ``strategy.fsdp.reduceGradients`` once a step those of the whole model."""
    optimizer: int
    """Moments."""
    gathered: int | None
    """Whole layers, gathered from all shares to be computed with, and their gradients before they are shared out."""
    activations: int | None
    """What the layers keep for the backward pass."""
    logits: int | None
    """Of the loss: logits and their gradients, and the gradient of the head."""
    reserve: int
    """CUDA's context and the buffers of NCCL."""

    @property
    def known(self) -> bool:
        """Whether every part is."""
        return None not in (self.gathered, self.activations, self.logits)

    @property
    def total(self) -> int:
        """Of the parts that are known: at least so much."""
        return sum(getattr(self, part.name) or 0 for part in fields(self))

    @property
    def allocated(self) -> int:
        """``total`` without the reserve: what torch's allocator sees."""
        return self.total - self.reserve


@dataclass(frozen=True)
class Sizes:
    """What of a model, with its adapters, decides about memory besides what its blocks keep; parameters are numbers."""

    hidden_size: int
    vocabulary: int
    block: int
    """Parameters of a block, the largest where they differ."""
    trained_block: int
    root: int
    """Parameters outside of blocks."""
    trained_root: int
    head: int
    """Parameters of the head, which is the embedding where they are tied."""
    trains_head: bool
    parameters: int
    """Of the whole model; tied ones once."""
    trained: int
    in_blocks: int
    """Of the trained ones those whose moments may have 8 bits: in matrices with rows of whole blocks."""
    experts: bool = False
    """Whether tokens are sent to some of the parameters of a block only."""
    logits: Transformed = ""
    packed: int = 0
    """Of the parameters those that are held in 4 bits."""
    packed_block: int = 0
    packed_matrix: int = 0
    """Of the largest of these weights, which is unpacked as a whole."""


def sizes_of(shape: ModelShape, spec: SFTJobSpec) -> Sizes:
    """Of a model of ``shape`` as ``spec`` trains it."""
    lora = spec.lora
    adapted = adapted_of(shape, spec)
    adapters = [*map(lora.parameters_on, adapted)] if lora else [0]
    weights, trained_root = trained_weights(shape, spec)
    trained = [sum(both) for both in zip_longest(adapters, weights, fillvalue=0)]
    matrices = [[outputs * inputs for outputs, inputs in packed.values()] for packed in packed_of(shape, spec)]
    packed = [*map(sum, matrices)]
    own = [block.block_parameters for block in shape.blocks]
    blocks = zip_longest(own, adapters, packed, fillvalue=0)
    block, packed_block = largest_block(((weights + added, of) for weights, added, of in blocks), spec.quantised)
    return Sizes(
        hidden_size=shape.hidden_size,
        vocabulary=shape.vocabulary,
        block=block,
        trained_block=max(trained),
        root=shape.root_parameters,
        trained_root=trained_root,
        head=shape.head_parameters,
        trains_head=trains_module(EMBEDDINGS if shape.tied else HEAD, spec),
        parameters=shape.parameters + sum(adapters),
        trained=sum(trained) + trained_root,
        in_blocks=trained_in_rows_of(shape, spec, MOMENT_BLOCK),
        experts=any(kind.experts for kind in shape.distinct),
        logits=shape.logits,
        packed=sum(packed),
        packed_block=packed_block,
        packed_matrix=max((matrix for block in matrices for matrix in block), default=0),
    )


def largest_block(blocks: Iterable[tuple[int, int]], quantised: Quantised | None) -> tuple[int, int]:
    """Of blocks with so many parameters, and so many of them ``quantised``, the one that takes most."""
    return max(blocks, key=lambda block: _bytes(block[0], block[1], BYTES["bf16"], quantised))


def _bytes(parameters: int, packed: int, each: int, quantised: Quantised | None) -> float:
    """Of so many ``parameters`` that take so much ``each``, but for those ``packed`` of them that are ``quantised``."""
    return each * (parameters - packed) + PACKED_BYTES[quantised] * packed


def estimate(shape: ModelShape, spec: SFTJobSpec, plan: PlanStatus, *, least: bool = False) -> MemoryEstimate:
    """Memory of one process of ``plan`` that trains a model of ``shape``, by formula alone.

    Of a block of which some weights are trained, what it keeps where all are: a most; a ``least`` where none is.
    """
    adapted = adapted_of(shape, spec)
    weights, _ = trained_weights(shape, spec)
    first = next((i for i, block in enumerate(zip(adapted, weights, strict=True)) if any(block)), shape.layers)
    kinds_of_blocks = shape.order or (0,) * shape.layers
    enough = [kind.block_parameters if least else 1 for kind in shape.distinct]
    blocks = [
        (kind, tuple(names), trained >= enough[kind])
        for kind, names, trained in zip(kinds_of_blocks, adapted, weights, strict=True)
    ]
    if trains_module(EMBEDDINGS, spec):
        first = 0
    kinds: Counter[BlockMemory] = Counter({NOTHING: first} if first else {})
    sizes, computed = sizes_of(shape, spec), BYTES[plan.precision]
    unpacked, tokens = computed * sizes.packed_matrix, micro_batch_tokens(spec, plan)
    for (number, names, trained), count in Counter(blocks[first:]).items():
        kind, compiled = shape.distinct[number], plan.compile
        taken = block_memory(
            kind, spec, computed, names, trained=trained, compiled=compiled, unpacked=unpacked, tokens=tokens
        )
        kinds[taken] += count
    return estimate_of(sizes, kinds, spec, plan)


def estimate_of(sizes: Sizes, kinds: Mapping[BlockMemory, int], spec: SFTJobSpec, plan: PlanStatus) -> MemoryEstimate:
    """Memory of one process of ``plan`` that trains a model of ``sizes``; ``kinds`` says how many blocks take what.

    One micro-batch goes through the model at a time, as in the first steps: several do only where there is room.
    Where blocks differ, the largest are gathered, and all keep what they do, while the one is computed that takes
    most besides: a most, above the truth by a part of what one block takes. What a block takes besides has the largest
    of its weights in it that is unpacked to be multiplied with, and not what that takes on its way.
    """
    computed = BYTES[plan.precision]
    tokens = micro_batch_tokens(spec, plan)
    layers = tokens * sum(count * kind.kept for kind, count in kinds.items())
    # Of the last norm, and of its output where it is trained.
    top = tokens * sizes.hidden_size * (4 + 3 * computed)

    copies = computes_with_copies(spec, plan.precision, plan.processes)
    block, root, parameters = gathered_bytes(sizes, spec, plan)
    whole = not reshards(spec, plan)
    blocks = parameters - root if whole else 2 * block
    fsdp = spec.strategy.fsdp if spec.strategy else None
    # A gradient in the dtype of the computation, and the same in that in which it is summed over the processes: where
    # there are none it is added to what stays.
    shared = copies and not holds_copies(spec, plan, plan.processes)
    summed = BYTES[fsdp.reduce_dtype if fsdp else "fp32"] if shared else 0

    on_its_way = 0
    if offloads(spec):
        # A share, in the precision that it is held in.
        held = _trained_bytes(spec)
        on_its_way = ceil(
            max(held * sizes.root, _bytes(sizes.block, sizes.packed_block, held, spec.quantised)) / plan.shard_degree
        )
    begin = 2 * root + block + on_its_way
    root += on_its_way

    head = sizes.head if sizes.trains_head else 0
    at_a_time = CHUNK_ELEMENTS // (3 if sizes.logits else 1)
    elements = min(tokens * sizes.vocabulary, max(at_a_time, sizes.vocabulary))
    several = tokens * sizes.vocabulary > at_a_time
    # Added up in fp32 where there are several chunks, and rounded when the last one is gone.
    chunk = elements * logit_bytes(sizes.logits, computed) + head * (4 if several else computed)
    loss = tokens * sizes.hidden_size * computed + max(chunk, head * (4 + computed) if several else 0)
    # What is gathered, kept by layers, and held by the loss, at the moments when most is held: at the loss, in the
    # backward pass of blocks, and at the end of all.
    alone, working = blocks if whole else block, tokens * max(kind.working for kind in kinds)
    if not plan.compile:
        working += 6 * min(PACKED_AT_ONCE, sizes.packed_matrix)
    earlier = layers - tokens * min((kind.kept for kind in kinds if kind != NOTHING), default=0.0)
    backward = [(root + blocks + (computed + summed) * sizes.trained_block, layers + working, computed * head)]
    if sizes.experts:
        # Blocks are large beside what they compute: not all of that is there at once. In the last block there are no
        # gradients yet, in one before it those of the block after it are summed, at its end it is forgotten.
        backward = [
            (root + blocks, layers + working, computed * head),
            (root + blocks + summed * sizes.trained_block, earlier + working, computed * head),
            (root + alone + (computed + summed) * sizes.trained_block, earlier, computed * head),
        ]
    ends = [root + (computed + summed) * sizes.trained_root + summed * sizes.trained_block]
    tied = sizes.root < 2 * head
    if tied and not copies:
        # Both gradients of tied weights, and what becomes of them, before that is added to what stays.
        ends = [3 * computed * head]
    if copies and keeps_whole_gradients(plan):
        # At the end of the first pass the root's gradients become fp32 as they are made, both of tied weights before
        # one is added to the other.
        ends = [root + (8 * head if tied else computed * (sizes.trained_root - head))]
    if casts_sums(spec, plan):
        ends = [end + _trained_bytes(spec) * ceil(sizes.trained / plan.shard_degree) for end in ends]
    if shared:
        # Where a pass begins, weights are there as gathered and as computed with.
        ends.append(begin)
    moments = ((root + alone, layers + top, loss), *backward, *((end, 0, 0) for end in ends))
    gathered, activations, logits = max(moments, key=sum)
    return MemoryEstimate(
        **_states(sizes.trained, sizes.in_blocks, sizes.parameters - sizes.trained, sizes.packed, spec, plan),
        gathered=ceil(gathered),
        activations=ceil(activations),
        logits=ceil(logits),
    )


def gathered_bytes(sizes: Sizes, spec: SFTJobSpec, plan: PlanStatus) -> tuple[float, float, float]:
    """What of the parameters is gathered, and so copied, takes: of the largest block, outside of blocks, in all."""
    computed = BYTES[plan.precision]
    if not computes_with_copies(spec, plan.precision, plan.processes):
        return 0, 0, 0
    if not gathers_base(spec, plan.precision, plan.processes):
        return computed * sizes.trained_block, computed * sizes.trained_root, computed * sizes.trained
    block = _bytes(sizes.block, sizes.packed_block, computed, spec.quantised)
    return block, computed * sizes.root, _bytes(sizes.parameters, sizes.packed, computed, spec.quantised)


def logit_bytes(logits: Transformed, computed: int) -> int:
    """Of each logit of a chunk: the product and, in fp32, its log probability; where they differ the logit between
    them, which a cap bends once more."""
    if not logits:
        return computed + 4
    # In fp32 the product itself is scaled, and bent.
    products = computed if computed < 4 else 0
    return products + (12 if logits == "capped" else 8)


def estimate_states(parameters: int, spec: SFTJobSpec, plan: PlanStatus) -> MemoryEstimate:
    """What is known of a model of which only the number of ``parameters`` is: weights, gradients, moments."""
    trained = parameters if spec.trains_all else 0
    frozen = parameters - trained
    # How many of them can be nobody knows, nor how many of the trained ones are in matrices.
    packed = frozen if spec.quantised else 0
    states = _states(trained, trained, frozen, packed, spec, plan)
    return MemoryEstimate(**states, gathered=None, activations=None, logits=None)


def moment_bytes(trained: int, in_blocks: int, spec: SFTJobSpec) -> float:
    """Of the moments of so many ``trained`` parameters, of which so many are ``in_blocks``."""
    dtype = spec.training.optimizer.state_dtype
    if dtype != "int8":
        return MOMENTS * BYTES[dtype] * trained
    return MOMENTS * ((1 + 1 / MOMENT_BLOCK) * in_blocks + BYTES["fp32"] * (trained - in_blocks))


def staging_bytes(trained: int, in_blocks: int, spec: SFTJobSpec) -> int:
    """Host memory of one node that a save in the background takes: weights and moments, which the nodes share out."""
    copied = _trained_bytes(spec) * trained + moment_bytes(trained, in_blocks, spec)
    return ceil(copied / spec.compute.nodes) if spec.checkpoint.asynchronous else 0


def offloaded_bytes(trained: int, in_blocks: int, frozen: int, spec: SFTJobSpec, packed: int = 0) -> int:
    """Host memory of one node that ``strategy.fsdp.cpuOffload`` takes: weights, gradients and moments.

    Of the ``frozen`` weights so many are ``packed``.
    """
    if not offloads(spec):
        return 0
    processes = spec.compute.processes
    fsdp = spec.strategy.fsdp if spec.strategy else None
    replicas = processes // ((fsdp.shard_degree if fsdp else None) or processes)
    held = 2 * _trained_bytes(spec) * trained + moment_bytes(trained, in_blocks, spec)
    held += _bytes(frozen, packed, _base_bytes(spec, spec.precision), spec.quantised)
    return ceil(replicas * held / spec.compute.nodes)


def offloads(spec: SFTJobSpec) -> bool:
    """Whether weights, gradients and moments are held in host memory."""
    return bool(spec.strategy and spec.strategy.fsdp and spec.strategy.fsdp.cpu_offload)


def sums_in_bf16(spec: SFTJobSpec) -> bool:
    """Whether gradients are summed over the processes in bf16."""
    return bool(spec.strategy and spec.strategy.fsdp and spec.strategy.fsdp.reduce_dtype == "bf16")


def keeps_whole_gradients(plan: PlanStatus) -> bool:
    """Whether gradients of the whole model are held from one micro-batch of a step to the next."""
    return plan.reduce_gradients == "oncePerStep" and plan.gradient_accumulation != 1


def casts_sums(spec: SFTJobSpec, plan: PlanStatus) -> bool:
    """Whether replicas sum their gradients up in another precision than they hold them in.

    FSDP keeps these sums until the end of a backward pass, and without an end those that are not summed over replicas
    yet, from one micro-batch of a step to the next.
    """
    return plan.shard_degree < plan.processes and not sums_in_bf16(spec) and _trained_bytes(spec) < BYTES["fp32"]


def reshards(spec: SFTJobSpec, plan: PlanStatus) -> bool:
    """Whether a layer's gathered weights are freed after its forward pass: as ``spec`` says, else as ``plan`` does."""
    fsdp = spec.strategy.fsdp if spec.strategy else None
    given = fsdp.reshard_after_forward if fsdp else None
    return plan.reshard_after_forward if given is None else given


def computes_with_copies(spec: SFTJobSpec, precision: str, processes: int) -> bool:
    """Whether weights are copied to be computed with, and gradients to be added up.

    They are gathered from other processes, cast to another ``precision`` than they are held in, or brought from the
    host. One process that holds all as it computes with it needs none of that; nor is a copy made of what is packed,
    which is unpacked where it is multiplied with.
    """
    held = {_trained_bytes(spec), _base_bytes(spec, precision)}
    return processes > 1 or held != {BYTES[precision]} or sums_in_bf16(spec) or offloads(spec)


def holds_copies(spec: SFTJobSpec, plan: PlanStatus, processes: int) -> bool:
    """Whether the copies are a single process's own, all made at once: it has nobody to gather from, and memory for
    them."""
    copies = computes_with_copies(spec, plan.precision, processes)
    return copies and processes == 1 and not (sums_in_bf16(spec) or offloads(spec) or reshards(spec, plan))


def gathers_base(spec: SFTJobSpec, precision: str, processes: int) -> bool:
    """Whether frozen weights are among what is copied: one process that holds them as it computes with them needs no
    copies of them, though adapters beside them are cast."""
    return processes > 1 or _base_bytes(spec, precision) != BYTES[precision] or offloads(spec)


def _trained_bytes(spec: SFTJobSpec) -> int:
    """Of each trained weight, and of its gradient."""
    return BYTES[spec.training.held_dtype]


def _base_bytes(spec: SFTJobSpec, precision: str) -> int:
    """Of each frozen weight that is not packed; where there is none, of each trained one."""
    return _trained_bytes(spec) if spec.trains_all else BYTES[spec.frozen_precision(precision)]


def micro_batch_tokens(spec: SFTJobSpec, plan: PlanStatus) -> int:
    """Tokens of the largest micro-batch that one process computes: its part of those that several share."""
    tokens = plan.max_tokens_per_micro_batch or spec.training.micro_batch_size * spec.data.max_length
    return ceil(tokens / plan.sequence_parallel)


def _states(
    trained: int, in_blocks: int, frozen: int, packed: int, spec: SFTJobSpec, plan: PlanStatus
) -> dict[str, int]:
    share = ceil(trained / plan.shard_degree)
    # All together, for the sums of a step; replicas and shards, where they are not the same group; shared tokens.
    replicated = 1 < plan.shard_degree < plan.processes
    groups = (plan.processes > 1) + 2 * replicated + (plan.sequence_parallel > 1)
    reserve = CONTEXT_BYTES + groups * GROUP_BYTES
    base = _bytes(frozen, packed, _base_bytes(spec, plan.precision), spec.quantised)
    if offloads(spec):
        return {"parameters": 0, "gradients": 0, "optimizer": 0, "reserve": reserve}
    held = _trained_bytes(spec)
    gradients = BYTES["fp32" if casts_sums(spec, plan) else spec.training.held_dtype] * share
    return {
        "parameters": held * share + ceil(base / plan.shard_degree),
        # One process has nobody to sum them with: they are added up where they stay, as they are held.
        "gradients": 4 * trained if plan.processes > 1 and keeps_whole_gradients(plan) else gradients,
        "optimizer": ceil(moment_bytes(share, ceil(in_blocks / plan.shard_degree), spec)),
        "reserve": reserve,
    }


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
