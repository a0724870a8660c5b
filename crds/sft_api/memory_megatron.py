"""How much memory one process of ``strategy.megatron`` takes. Pure: from a model's shape and a plan.

Formulas are of what torch keeps of a layer of Megatron-Core as ``sft_trainer.strategies.megatron`` builds it, operator
by operator; a test compares them with what is seen on tensors without memory (docs/memory.md).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import ceil
from typing import Any

from .block_memory import BYTES, BlockMemory
from .megatron import layers_of, model_problem
from .memory import CHUNK_ELEMENTS, CONTEXT_BYTES, GROUP_BYTES, MOMENTS, MemoryEstimate
from .memory import micro_batch_tokens as whole_tokens
from .model_shape import ModelShape
from .sequence_parallel import key_repeats
from .v1alpha1.job import SFTJobSpec
from .v1alpha1.megatron import MOST, MegatronSpec, megatron_of
from .v1alpha1.runtime import StrategySpec
from .v1alpha1.status import PlanStatus

_WITHIN_A_NODE = ("tensor_parallel", "sequence_parallel")
_ROUTED = {"fp32": 4, "fp64": 8}
"""Bytes of a number of a router that is computed in its own precision."""
BUCKET_BYTES = 2**27
"""Of what processes that hold the same parameters exchange in one collective call, at most."""


@dataclass(frozen=True)
class Held:
    """Numbers of parameters that one process has."""

    dense: int
    """Whose rows are updated by one process each of those that have the same ones."""
    experts: int
    """Of experts, which other processes have the same of."""
    updated_experts: int
    """Of these, those whose masters and moments it has: whole experts, the most that one has."""
    largest: int
    """Of one parameter."""


def estimate_stage(shape: ModelShape, spec: SFTJobSpec, plan: PlanStatus) -> MemoryEstimate:
    """Memory of that process of ``plan`` which takes most, of a model of ``shape``.

    The first stage has most micro-batches under way, of those between the ends the first one, which may have more
    layers, and the last one the loss: whichever takes most.
    """
    last = plan.pipeline_parallel - 1
    return max(
        (_of_stage(shape, spec, plan, stage) for stage in {0, min(1, last), last}), key=lambda memory: memory.total
    )


def estimate_stage_states(parameters: int, spec: SFTJobSpec, plan: PlanStatus) -> MemoryEstimate:
    """What is known of a model of which only the number of ``parameters`` is: weights, gradients, moments."""
    here = ceil(parameters / (plan.tensor_parallel * plan.pipeline_parallel))
    return MemoryEstimate(**_states(Held(here, 0, 0, 0), spec, plan), gathered=None, activations=None, logits=None)


def _of_stage(shape: ModelShape, spec: SFTJobSpec, plan: PlanStatus, stage: int) -> MemoryEstimate:
    computed, tokens, width = BYTES[plan.precision], whole_tokens(spec, plan), shape.hidden_size
    layer = layer_memory(shape, spec, plan, computed)
    tensor, stages = plan.tensor_parallel, plan.pipeline_parallel
    ends = stage == stages - 1
    held = held_by(shape, spec, plan, stage)
    share = _share(spec, plan)

    under_way = _under_way(spec, plan, stage)
    # One buffer for all layers, in which the tokens of all are gathered.
    buffer = tokens * width * computed if share < 1 else 0
    layers = under_way * tokens * layer.kept * _layers(shape, spec)[stage] + buffer
    if not _overrides(spec).get("deallocate_pipeline_outputs", True):
        # What is sent on, of each chunk: of the last one there is the loss instead.
        layers += (under_way * _chunks(spec) - ends) * tokens * width * computed * share
    top = loss = 0.0
    if ends:
        # Of the last norm: its output, those of all tokens, of these the ones that are trained, and their gradient.
        top = tokens * width * computed * (1 + share)
        vocabulary = ceil(shape.vocabulary / tensor)
        head = vocabulary * width
        elements = min(tokens * vocabulary, max(CHUNK_ELEMENTS, vocabulary))
        several = tokens * vocabulary > CHUNK_ELEMENTS
        # The gradient of the head is added up in fp32, from the second chunk on, the first one's being there still.
        loss = 2 * tokens * width * computed + elements * (computed + 4) + head * (computed + (4 if several else 0))
    moments = (
        (0, layers + top, loss),
        # A gradient before it is added to the sum.
        (computed * held.largest, layers + tokens * layer.working, 0),
        (_exchanged(held, shape, plan, stage), buffer, 0),
    )
    gathered, activations, logits = max(moments, key=sum)
    return MemoryEstimate(
        **_states(held, spec, plan), gathered=ceil(gathered), activations=ceil(activations), logits=ceil(logits)
    )


def _exchanged(held: Held, shape: ModelShape, plan: PlanStatus, stage: int) -> float:
    """Bytes of sums of gradients, or of updated rows, on their way: of a bucket of them."""
    last = plan.pipeline_parallel - 1
    if plan.processes > plan.pipeline_parallel:
        # And what one process, of two or more, has of it.
        return 1.5 * min(BUCKET_BYTES, 4 * (held.dense + held.experts))
    if shape.tied and last and stage in (0, last):
        # Nobody holds the same as another but the ends, copies of the embedding.
        return min(BUCKET_BYTES, 4 * shape.vocabulary * shape.hidden_size)
    return 0


def _under_way(spec: SFTJobSpec, plan: PlanStatus, stage: int) -> float:
    """Micro-batches of which ``stage`` keeps what its layers do, at the most; of some with chunks a part of them."""
    stages, chunks = plan.pipeline_parallel, _chunks(spec)
    if chunks == 1:
        return min(stages - stage, plan.gradient_accumulation or stages)
    # All chunks but the last compute a round of all stages before one goes back, and then one after the other.
    ahead = 2 * (stages - stage - 1) + (chunks - 1) * stages + 1
    rounds = ceil((plan.gradient_accumulation or ahead) / stages)
    return min(ahead, rounds * stages * chunks) / chunks


def held_by(shape: ModelShape, spec: SFTJobSpec, plan: PlanStatus, stage: int) -> Held:
    """Parameters of a process of ``stage``, counted from 0; of those without padding the most that one has."""
    tensor, stages = plan.tensor_parallel, plan.pipeline_parallel
    matrices = [outputs * inputs // tensor for outputs, inputs in _matrices(shape).values()]
    biases = (shape.queries + 2 * shape.keys) // tensor if shape.attention_bias else 0
    norms = shape.norms * shape.hidden_size + (2 * shape.head_size if shape.family.query_key_norm else 0)
    layer = sum(matrices) + biases + norms + shape.experts * shape.hidden_size
    experts, one = shape.experts // plan.expert_parallel, shape.hidden_size * shape.intermediate_size
    copies = plan.processes // (plan.pipeline_parallel * plan.expert_parallel)
    here = _layers(shape, spec)[stage]
    vocabulary = ceil(shape.vocabulary / tensor) * shape.hidden_size
    begins, ends = stage == 0, stage == stages - 1
    root = vocabulary * begins + (vocabulary * (not (begins and shape.tied)) + shape.hidden_size) * ends
    return Held(
        dense=here * layer + root,
        experts=here * experts * 3 * one,
        updated_experts=here * ceil(experts / copies) * 3 * one,
        largest=max(*matrices, 2 * experts * one, vocabulary * (begins or ends)),
    )


def _layers(shape: ModelShape, spec: SFTJobSpec) -> list[int]:
    """Of each stage."""
    return layers_of(megatron_of(spec) or MegatronSpec(), shape.layers)


def _chunks(spec: SFTJobSpec) -> int:
    """Of each stage."""
    return (megatron_of(spec) or MegatronSpec()).virtual_pipeline_parallel_degree


def _overrides(spec: SFTJobSpec) -> dict[str, Any]:
    megatron = megatron_of(spec)
    return megatron.overrides if megatron else {}


def _matrices(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of those of a layer that tensor parallelism splits, as Megatron-Core joins them."""
    width, found = shape.hidden_size, {}
    found["qkv"] = (shape.queries + 2 * shape.keys, width)
    found["proj"] = (width, shape.queries)
    if not shape.experts:
        found["fc1"] = (2 * shape.intermediate_size, width)
        found["fc2"] = (width, shape.intermediate_size)
    return found


def changes(
    spec: SFTJobSpec, plan: PlanStatus, shape: ModelShape | None, fits: Callable[[SFTJobSpec, PlanStatus], bool]
) -> Iterator[tuple[str, SFTJobSpec, PlanStatus]]:
    """More processes for each copy of the model, by which it takes less: in words, as a spec, as its plan."""
    megatron = megatron_of(spec)
    if megatron is None:
        return
    for field, name in (
        ("sequence_parallel", "contextParallelDegree"),
        ("tensor_parallel", "tensorParallelDegree"),
        ("pipeline_parallel", "pipelineParallelDegree"),
        ("expert_parallel", "expertParallelDegree"),
    ):
        # A job may ask for a quarter of a million processes: only what divides them is looked at.
        degrees = range(getattr(plan, field) + 1, min(MOST, plan.processes) + 1)
        wider = [
            _spread(spec, plan, field, degree)
            for degree in degrees
            if not plan.processes % degree and _possible(spec, plan, shape, field, degree)
        ]
        if wider:
            chosen = next((each for each in wider if fits(*each)), wider[-1])
            yield f"strategy.megatron.{name}: {getattr(chosen[1], field)}", *chosen


def _possible(spec: SFTJobSpec, plan: PlanStatus, shape: ModelShape | None, field: str, degree: int) -> bool:
    """Whether processes and model can be shared out so; over one node at most, where matrices or tokens are."""
    # Degrees have rules among themselves, by which a strategy that breaks one cannot even be made.
    if not all(rule.check(_wider(spec, field, degree)) for rule in MegatronSpec.rules):
        return False
    spec, plan = _spread(spec, plan, field, degree)
    megatron = megatron_of(spec)
    here = spec.compute.effective_processes_per_node
    return (
        megatron is not None
        and not plan.processes % megatron.with_the_same_data
        and not plan.processes % megatron.apart
        and (field not in _WITHIN_A_NODE or not here % (plan.tensor_parallel * plan.sequence_parallel))
        and (field != "expert_parallel" or (shape is not None and shape.experts > 0))
        and (shape is None or not model_problem(megatron, shape))
    )


def _spread(spec: SFTJobSpec, plan: PlanStatus, field: str, degree: int) -> tuple[SFTJobSpec, PlanStatus]:
    megatron = _wider(spec, field, degree)
    shares = max(1, plan.processes // megatron.with_the_same_data)
    changed = plan.model_copy(update={field: degree, "data_parallel": shares})
    if plan.gradient_accumulation is not None:
        # Fewer copies have more micro-batches each, of which stages keep some.
        micro_batches = -(-plan.gradient_accumulation * plan.data_parallel // shares)
        changed = changed.model_copy(update={"gradient_accumulation": micro_batches})
    return spec.model_copy(update={"strategy": StrategySpec(megatron=megatron)}), changed


def _wider(spec: SFTJobSpec, field: str, degree: int) -> MegatronSpec:
    """``strategy.megatron`` with ``degree`` for that of ``field`` of a plan, which may be one that no rule allows."""
    given = field.replace("sequence", "context")
    return (megatron_of(spec) or MegatronSpec()).model_copy(update={f"{given}_degree": degree})


def _share(spec: SFTJobSpec, plan: PlanStatus) -> float:
    """Of the tokens of a micro-batch that this process computes those that it has between matrices."""
    megatron = megatron_of(spec)
    return 1 / plan.tensor_parallel if megatron is not None and megatron.shares_tokens else 1.0


def layer_memory(shape: ModelShape, spec: SFTJobSpec, plan: PlanStatus, computed: int) -> BlockMemory:
    """Of a layer, for each token that a process computes, with ``computed`` bytes a number.

    With activation checkpointing, what it then keeps. Norms are one kernel, which keeps its input; queries, keys and
    values come out of one projection, and queries and keys are there again rotated; with norms of their own queries
    a third time, put together from several groups of heads. Where tokens are shared attention keeps what arrived, and
    its output is there by heads and by tokens.
    """
    tensor, share = plan.tensor_parallel, _share(spec, plan)
    routed = _ROUTED.get(_overrides(spec).get("moe_router_dtype", ""), computed)
    width, queries, keys, inner = shape.hidden_size, shape.queries, shape.keys, shape.intermediate_size
    projected = queries + 2 * keys
    attention = computed * (projected + 2 * queries + keys) + 4 * shape.heads
    if plan.sequence_parallel > 1:
        repeats = key_repeats(max(1, shape.kv_heads // tensor), plan.sequence_parallel)
        # Of what the projection gave nothing is kept but what norms came from.
        given = projected if shape.family.query_key_norm else 0
        attention = computed * (given + 3 * queries + 2 * keys * repeats) + 4 * shape.heads
    if shape.family.query_key_norm:
        copied = queries if shape.kv_heads > tensor else 0
        attention += computed * copied + 4 * (shape.heads + shape.kv_heads)
    kept = 4 * computed * width * share + attention / tensor + 8 * share
    if shape.experts:
        # Of each expert that a token is sent to: what goes in, both projections, activation, products, and its places.
        kept += share * (shape.chosen * (computed * (width + 5 * inner) + 24) + 10 * shape.experts)
        # What a router in its own precision sees, in place of what the model has, and what it finds.
        kept += share * (routed - computed) * (width + 3 * shape.experts + shape.chosen)
        most = max(computed * max(3 * width, width + 2 * inner), (3 * routed + computed) * inner)
        working = share * shape.chosen * most
    else:
        kept += computed * 5 * inner / tensor
        working = computed * (3 * inner / tensor + 2 * width * share + (width if share < 1 else 0))
    how = spec.training.activation_checkpointing
    if how == "none":
        return BlockMemory(kept, working)
    least = computed * width * share
    # Where tokens were sent, which the layer itself holds.
    least += share * ((routed + 1) * shape.experts + 8 * shape.chosen)
    if how == "selective":
        # Products of matrices, of all tokens where they are summed over processes afterwards, and attention.
        least += (computed * (projected + queries) + 4 * shape.heads) / tensor + computed * width
        if shape.experts:
            least += share * (computed * shape.chosen * (2 * inner + width) + routed * shape.experts)
        else:
            least += computed * (2 * inner / tensor + width)
    return BlockMemory(least, kept + working - least)


def _states(held: Held, spec: SFTJobSpec, plan: PlanStatus) -> dict[str, int]:
    """Weights, with those in fp32 that are updated where they are computed with in bf16; sums of gradients in fp32."""
    copies = plan.data_parallel * plan.sequence_parallel
    rows = ceil(held.dense / copies) + held.updated_experts
    whole = held.dense + held.experts
    dimensions = (plan.tensor_parallel, plan.pipeline_parallel, plan.expert_parallel, plan.sequence_parallel, copies)
    groups = (plan.processes > 1) + sum(degree > 1 for degree in dimensions)
    return {
        "parameters": 4 * whole if plan.precision == "fp32" else 2 * whole + 4 * rows,
        "gradients": 4 * whole,
        "optimizer": MOMENTS * BYTES[spec.training.optimizer.state_dtype] * rows,
        "reserve": CONTEXT_BYTES + groups * GROUP_BYTES,
    }
