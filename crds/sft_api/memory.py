"""How much memory a run takes: of each GPU, and of each node's host. Pure: from a model's shape and a plan.

What one block takes is given, by formula (``block_memory``) or as the trainer sees it; a test compares the estimate
with the strategy itself on tensors without memory (docs/memory.md).
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from itertools import zip_longest
from math import ceil

from .block_memory import BYTES, NOTHING, BlockMemory, block_memory
from .layers import (
    HEAD,
    adapted_of,
    embeddings_of,
    packed_of,
    parameters_of_rows,
    tables_with_rows,
    trained_in_matrices_of_blocks,
    trained_in_rows_of,
    trained_weights,
    trains_module,
)
from .model_shape import ModelShape, Transformed
from .v1alpha1.job import SFTJobSpec
from .v1alpha1.lora import Quantised
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
MOMENT_BLOCK = 64
"""Moments in int8 that share a power of two, a byte, and are next to one another in a row."""
NF4_BLOCK = 64
"""Weights in NF4 that share what they are multiplied by, a number in fp32."""
PACKED_BYTES: Mapping[Quantised | None, float] = {None: 0, "nf4": 1 / 2 + 4 / NF4_BLOCK, "mxfp4": 1 / 2 + 1 / 32}
"""Of each weight in 4 bits, with its part of what it is multiplied by."""
PACKED_AT_ONCE = 2**24
"""Such weights whose values a GPU looks up at a time, in fp32, by an index of 4 bytes for each two of them."""


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
    in_matrices: int
    """Of the trained ones those of which Muon has a momentum, and no second moment: in matrices of transformer
    blocks."""
    experts: bool = False
    """Whether tokens are sent to some of the parameters of a block only."""
    logits: Transformed = ""
    packed: int = 0
    """Of the parameters those that are held in 4 bits."""
    packed_block: int = 0
    packed_matrix: int = 0
    """Of the largest of these weights, which is unpacked as a whole."""

    def in_smaller(self, spec: SFTJobSpec) -> int:
        """Of the trained ones those whose moments may take less than those of others, as ``spec`` has them."""
        return self.in_matrices if spec.training.optimizer.is_muon else self.in_blocks


def sizes_of(shape: ModelShape, spec: SFTJobSpec) -> Sizes:
    """Of a model of ``shape`` as ``spec`` trains it."""
    lora, rows = spec.lora, parameters_of_rows(shape, spec)
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
        root=shape.root_parameters + rows,
        trained_root=trained_root + rows,
        head=shape.head_parameters,
        trains_head=trains_module(embeddings_of(shape) if shape.tied else HEAD, spec),
        parameters=shape.parameters + sum(adapters) + rows,
        trained=sum(trained) + trained_root + rows,
        in_blocks=trained_in_rows_of(shape, spec, MOMENT_BLOCK),
        in_matrices=trained_in_matrices_of_blocks(shape, spec),
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
    enough = [kind.block_parameters if least else 1 for kind in shape.distinct]
    blocks = [
        (kind, tuple(names), trained >= enough[kind])
        for kind, names, trained in zip(shape.kind_of_each, adapted, weights, strict=True)
    ]
    if trains_module(embeddings_of(shape), spec) or embeddings_of(shape) in tables_with_rows(shape, spec):
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
    # A gradient in the dtype of the computation, and the same in that in which it is summed over the processes: where
    # there are none it is added to what stays.
    shared = copies and not holds_copies(spec, plan, plan.processes)
    summed = BYTES[spec.fsdp.reduce_dtype] if shared else 0

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
        **_states(sizes.trained, sizes.in_smaller(spec), sizes.parameters - sizes.trained, sizes.packed, spec, plan),
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


def moment_bytes(trained: int, in_smaller: int, spec: SFTJobSpec) -> float:
    """Of the moments of so many ``trained`` parameters; those of so many of these are ``in_smaller``."""
    optimizer = spec.training.optimizer
    if optimizer.state_dtype == "int8":
        return MOMENTS * ((1 + 1 / MOMENT_BLOCK) * in_smaller + BYTES["fp32"] * (trained - in_smaller))
    moments = MOMENTS * trained - (in_smaller if optimizer.is_muon else 0)
    return BYTES[optimizer.state_dtype] * moments


def staging_bytes(trained: int, in_smaller: int, spec: SFTJobSpec) -> int:
    """Host memory of one node that a save in the background takes: weights and moments, which the nodes share out."""
    copied = _trained_bytes(spec) * trained + moment_bytes(trained, in_smaller, spec)
    return ceil(copied / spec.compute.nodes) if spec.checkpoint.asynchronous else 0


def offloaded_bytes(trained: int, in_smaller: int, frozen: int, spec: SFTJobSpec, packed: int = 0) -> int:
    """Host memory of one node that ``strategy.fsdp.cpuOffload`` takes: weights, gradients and moments.

    Of the ``frozen`` weights so many are ``packed``.
    """
    if not offloads(spec):
        return 0
    processes = spec.compute.processes
    replicas = processes // (spec.fsdp.shard_degree or processes)
    held = 2 * _trained_bytes(spec) * trained + moment_bytes(trained, in_smaller, spec)
    held += _bytes(frozen, packed, _base_bytes(spec, spec.precision), spec.quantised)
    return ceil(replicas * held / spec.compute.nodes)


def offloads(spec: SFTJobSpec) -> bool:
    """Whether weights, gradients and moments are held in host memory."""
    return spec.fsdp.cpu_offload


def sums_in_bf16(spec: SFTJobSpec) -> bool:
    """Whether gradients are summed over the processes in bf16."""
    return spec.fsdp.reduce_dtype == "bf16"


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
    given = spec.fsdp.reshard_after_forward
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
    trained: int, in_smaller: int, frozen: int, packed: int, spec: SFTJobSpec, plan: PlanStatus
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
        "optimizer": ceil(moment_bytes(share, ceil(in_smaller / plan.shard_degree), spec)),
        "reserve": reserve,
    }
