"""What processes that share a copy of the model need not exchange where there is memory for it. Pure."""

from bisect import bisect_right
from itertools import product
from math import ceil, inf

from .block_memory import BYTES
from .memory import computes_with_copies, estimate, gathered_bytes, micro_batch_tokens, offloads, sizes_of, sums_in_bf16
from .model_shape import ModelShape
from .v1alpha1.job import SFTJobSpec
from .v1alpha1.megatron import megatron_of
from .v1alpha1.status import PlanStatus

FILLED_SHARE = 0.8
"""Of the memory that a process can have, which micro-batches in one forward pass may fill: what is left is for holes
between blocks, and for collectives."""
ENOUGH_TOKENS = 16_384
"""Of one forward pass: more of them keep a device no busier, and cost memory."""
_SMALL_BYTES = 2**30
"""Of the gradients of all adapters, for which there is room on a GPU that is not known."""
_SMALL_RANK = 32
"""Of the adapters of a model that is not known."""


def with_traffic(spec: SFTJobSpec, plan: PlanStatus, shape: ModelShape | None, gpu: int | None) -> PlanStatus:
    """``plan`` with whether layers stay gathered from the forward to the backward pass, and whether each process adds
    up the micro-batches of a step before it sums their gradients with the others.

    ``plan`` is the rest of it, ``shape`` that of the model and ``gpu`` the bytes of a GPU; None is not known.
    What the manifest leaves open follows from these alone: it is the same for all processes, and after a restart.
    A micro-batch more in each forward pass saves more than either; of the two the one goes first that saves more.
    """
    if megatron_of(spec) is not None:
        return plan
    fsdp = spec.fsdp
    sums_once, keeps = fsdp.reduce_gradients == "oncePerStep", fsdp.reshard_after_forward is False
    least = _with(plan, keeps, sums_once)
    may_sum_once = fsdp.reduce_gradients == "auto" and _has_sums_to_spare(spec, plan)
    if shape is None or gpu is None or spec.compute.gpus_per_node == 0:
        return _with(plan, keeps, sums_once or (may_sum_once and _has_small_adapters(spec, shape)))
    a_step = inf if plan.gradient_accumulation is None else plan.gradient_accumulation
    # Of more than a step has none would be given up.
    together = min(max(1, _in_one_forward(spec, least, shape, gpu)), a_step)
    passes = inf if a_step == inf else ceil(a_step / together)
    may_keep = (
        fsdp.reshard_after_forward is None
        and not offloads(spec)
        and computes_with_copies(spec, plan.precision, plan.processes)
    )
    ways = product(
        {keeps, True} if may_keep else {keeps}, {sums_once, True} if may_sum_once and passes > 1 else {sums_once}
    )
    sizes = sizes_of(shape, spec)
    _, root, parameters = gathered_bytes(sizes, spec, plan)
    saved = parameters - root, BYTES["fp32"] * sizes.trained * (1 - 1 / passes)

    def saves(way: tuple[bool, bool]) -> tuple[float, bool]:
        # Of two that save as much the one that takes less.
        return sum(size for size, done in zip(saved, way, strict=True) if done), way[0]

    tried = (_with(plan, *way) for way in sorted(ways, key=saves, reverse=True))
    return next((way for way in tried if _in_one_forward(spec, way, shape, gpu) >= together), least)


def _with(plan: PlanStatus, keeps: bool, sums_once: bool) -> PlanStatus:
    reduced = "oncePerStep" if sums_once else "everyMicroBatch"
    return plan.model_copy(update={"reshard_after_forward": not keeps, "reduce_gradients": reduced})


def _has_sums_to_spare(spec: SFTJobSpec, plan: PlanStatus) -> bool:
    """Whether gradients are summed over processes that share a copy, in fp32, more than once a step."""
    return not (plan.shard_degree == 1 or plan.gradient_accumulation == 1 or offloads(spec) or sums_in_bf16(spec))


def _has_small_adapters(spec: SFTJobSpec, shape: ModelShape | None) -> bool:
    """Whether nothing but adapters is trained, for whose gradients there is room without knowing how much there is."""
    if spec.lora is None:
        return False
    if shape is None:
        # How many experts there are, nobody knows: their adapters are many times the others.
        alone = not spec.lora.names_experts and spec.training.trainable_modules is None
        return alone and spec.lora.rank <= _SMALL_RANK
    return 4 * sizes_of(shape, spec).trained <= _SMALL_BYTES


def _in_one_forward(spec: SFTJobSpec, plan: PlanStatus, shape: ModelShape, gpu: int) -> int:
    """Micro-batches for which there is room in one forward pass; 0 where not even for one."""
    tokens = plan.max_tokens_per_micro_batch or spec.training.micro_batch_size * spec.data.max_length
    alone = spec.lora is not None and spec.lora.dropout > 0
    counts = range(1, 1 + (1 if alone else max(1, ENOUGH_TOKENS // micro_batch_tokens(spec, plan))))

    def taken(count: int) -> int:
        together = plan.model_copy(update={"max_tokens_per_micro_batch": count * tokens})
        return estimate(shape, spec, together).total

    return bisect_right(counts, FILLED_SHARE * gpu, key=taken)
