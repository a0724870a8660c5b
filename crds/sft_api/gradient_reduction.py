"""How often gradients are summed over the processes that share a copy of the model: where it is left open. Pure."""

from bisect import bisect_right

from .memory import estimate, micro_batch_tokens, offloads, sizes_of
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


def reduces_once(spec: SFTJobSpec, plan: PlanStatus, shape: ModelShape | None, gpu: int | None) -> bool:
    """Whether each process adds up the micro-batches of a step before it sums their gradients with the others.

    ``plan`` is the rest of the plan, ``shape`` that of the model and ``gpu`` the bytes of a GPU; None is not known.
    What the manifest leaves open follows from these alone: it is the same for all processes, and after a restart.
    """
    fsdp = spec.strategy.fsdp if spec.strategy else None
    if fsdp and fsdp.reduce_gradients != "auto":
        return fsdp.reduce_gradients == "oncePerStep"
    if megatron_of(spec) is not None:
        return False
    if plan.shard_degree == 1 or plan.gradient_accumulation == 1 or offloads(spec):
        return False
    if fsdp and fsdp.reduce_dtype == "bf16":
        return False
    if shape is None or gpu is None or spec.compute.gpus_per_node == 0:
        return _has_small_adapters(spec, shape)
    # A micro-batch more in each forward pass saves more than that: weights are gathered less often too.
    together = max(1, _in_one_forward(spec, plan, shape, gpu))
    if plan.gradient_accumulation is not None and together >= plan.gradient_accumulation:
        return False
    once = plan.model_copy(update={"reduce_gradients": "oncePerStep"})
    return _in_one_forward(spec, once, shape, gpu) >= together


def _has_small_adapters(spec: SFTJobSpec, shape: ModelShape | None) -> bool:
    """Whether nothing but adapters is trained, for whose gradients there is room without knowing how much there is."""
    if spec.lora is None:
        return False
    return spec.lora.rank <= _SMALL_RANK if shape is None else 4 * sizes_of(shape, spec).trained <= _SMALL_BYTES


def _in_one_forward(spec: SFTJobSpec, plan: PlanStatus, shape: ModelShape, gpu: int) -> int:
    """Micro-batches for which there is room in one forward pass; 0 where not even for one."""
    tokens = plan.max_tokens_per_micro_batch or spec.training.micro_batch_size * spec.data.max_length
    alone = spec.lora is not None and spec.lora.dropout > 0
    counts = range(1, 1 + (1 if alone else max(1, ENOUGH_TOKENS // micro_batch_tokens(spec, plan))))

    def taken(count: int) -> int:
        together = plan.model_copy(update={"max_tokens_per_micro_batch": count * tokens})
        return estimate(shape, spec, together).total

    return bisect_right(counts, FILLED_SHARE * gpu, key=taken)
