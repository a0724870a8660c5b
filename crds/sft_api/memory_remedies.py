"""What to change of a run so that it takes less memory. Pure."""

from collections.abc import Iterator
from typing import Any

from .batch import with_batch_of
from .memory import keeps_whole_gradients, offloads, reshards
from .memory_megatron import changes
from .memory_needed import WARNED_SHARE, gibibytes, memory_of
from .model_shape import ModelShape
from .sequence_parallel import layers_problem, possible
from .shape_problems import packing_problem
from .v1alpha1.job import SFTJobSpec
from .v1alpha1.lora import LoraSpec
from .v1alpha1.megatron import megatron_of
from .v1alpha1.runtime import StrategySpec
from .v1alpha1.status import PlanStatus

_WORTH_SAYING = 0.97
"""A remedy leaves less than this share of what is taken without it."""
_SHOWN = 10
_CHECKPOINTING = ("none", "selective", "full")
"""The longer, the less is kept."""
_STATES = ("fp32", "bf16", "int8")
"""The longer, the less the moments take."""
_MOST_DOUBLED = 4
"""How often the GPUs are doubled in search of enough of them."""


def remedies(spec: SFTJobSpec, plan: PlanStatus, shape: ModelShape | None, gpu: int) -> str:
    """What to change so that less is taken of GPUs of ``gpu`` bytes, with what is taken then: the most useful first."""
    now = memory_of(spec, plan, shape)
    found = []
    for words, other, changed in _changes(spec, plan, shape, gpu):
        then = memory_of(other, changed, shape)
        if now is None or then is None:
            found.append(words)
        elif then.total < _WORTH_SAYING * now.total:
            found.append(f"{words} ({gibibytes(then.total)})")
    if not found:
        return "take GPUs with more memory"
    return f"change one or several of: {', '.join(found[:_SHOWN])}{_two(spec, plan, shape, gpu)}"


def _two(spec: SFTJobSpec, plan: PlanStatus, shape: ModelShape | None, gpu: int) -> str:
    """Where no change fits alone, the first two that do together; of those that take no more GPUs and cut no example.

    Empty where one fits, or no two do, or where memory is not known.
    """

    def changes_of(spec: SFTJobSpec, plan: PlanStatus) -> list[tuple[str, SFTJobSpec, PlanStatus, int]]:
        return [
            (words, other, changed, then.total)
            for words, other, changed in _changes(spec, plan, shape, gpu)
            if changed.processes == plan.processes and other.data.max_length == spec.data.max_length
            if (then := memory_of(other, changed, shape)) and then.known
        ]

    ones = changes_of(spec, plan)
    if any(total <= WARNED_SHARE * gpu for *_, total in ones):
        return ""
    for one, other, changed, _ in ones:
        for two, _, _, total in changes_of(other, changed):
            if total <= WARNED_SHARE * gpu and one.partition(":")[0] != two.partition(":")[0]:
                return f"; {one} and {two} fit together ({gibibytes(total)})"
    return ""


def _changes(
    spec: SFTJobSpec, plan: PlanStatus, shape: ModelShape | None, gpu: int
) -> Iterator[tuple[str, SFTJobSpec, PlanStatus]]:
    """In words, as a spec and as its plan: only what of them decides about memory is right."""
    if keeps_whole_gradients(plan):
        summed = plan.model_copy(update={"reduce_gradients": "everyMicroBatch"})
        yield "strategy.fsdp.reduceGradients: everyMicroBatch", spec, summed
    if not reshards(spec, plan):
        yield "strategy.fsdp.reshardAfterForward: true", _with_fsdp(spec, reshard_after_forward=True), plan
    for how in _CHECKPOINTING[_CHECKPOINTING.index(spec.training.activation_checkpointing) + 1 :]:
        yield f"training.activationCheckpointing: {how}", _with(spec, "training", activation_checkpointing=how), plan
    fsdp = megatron_of(spec) is None
    if not fsdp:
        yield from changes(spec, plan, shape, lambda other, then: _fits(other, then, shape, gpu))
    if plan.shard_degree < plan.processes:
        wider = plan.model_copy(update={"shard_degree": plan.processes})
        # Said outright: where the field is left out, each of several nodes has a replica of its own if it fits there.
        yield f"strategy.fsdp.shardDegree: {plan.processes}", spec, wider
    else:
        more = [_over(spec, plan, 2**doubled * plan.processes) for doubled in range(1, _MOST_DOUBLED + 1)]
        yield next((each for each in more if _fits(*each[1:], shape, gpu)), more[0])
    if fsdp and (degree := _longer_sequence(spec, plan, shape, gpu)) is not None:
        shared, fewer = _shared(spec, plan, degree)
        yield f"strategy.fsdp.sequenceParallelDegree: {degree}", shared, fewer
    if spec.lora and not spec.lora.adapter_uri and spec.lora.names_experts and spec.lora.rank_of_experts > 1:
        lower = spec.lora.rank_of_experts // 2
        yield f"lora.expertRank: {lower}", _with(spec, "lora", expert_rank=lower), plan
    adapters, whole = spec, ""
    if fsdp and spec.trains_all:
        # Adapters are fp32.
        whole = "" if spec.training.held_dtype == "fp32" else ", without parameterDtype"
        adapters = _with(spec.model_copy(update={"lora": LoraSpec()}), "training", parameter_dtype=None)
        yield f"lora{whole}", adapters, plan
    if adapters.lora and not _fits(adapters, plan, shape, gpu) and (packed := _packed(adapters, shape)):
        yield f"lora{' with ' if spec.trains_all else '.'}basePrecision: {packed.quantised}{whole}", packed, plan
    for words, smaller in _smaller_micro_batches(spec):
        yield words, smaller, with_batch_of(smaller, plan)
    if not fsdp:
        return
    muon = spec.training.optimizer.is_muon
    for dtype in _STATES[_STATES.index(spec.training.optimizer.state_dtype) + 1 :]:
        if muon and dtype == "int8":
            continue
        optimizer = spec.training.optimizer.model_copy(update={"state_dtype": dtype})
        yield f"training.optimizer.stateDtype: {dtype}", _with(spec, "training", optimizer=optimizer), plan
    if spec.training.held_dtype == "fp32" and plan.precision == "bf16" and spec.lora is None:
        yield "training.parameterDtype: bf16", _with(spec, "training", parameter_dtype="bf16"), plan
    if not (offloads(spec) or muon):
        without = ", without reduceGradients" if spec.fsdp.reduce_gradients == "oncePerStep" else ""
        offloaded = _with_fsdp(spec, cpu_offload=True, reduce_gradients="auto")
        shares = plan.model_copy(update={"reduce_gradients": "everyMicroBatch", "reshard_after_forward": True})
        yield f"strategy.fsdp.cpuOffload: true{without}", offloaded, shares


def _packed(spec: SFTJobSpec, shape: ModelShape | None) -> SFTJobSpec | None:
    """With the base of its adapters in 4 bits; None where that is so already, and where it cannot be, or who knows."""
    if spec.quantised or shape is None:
        return None
    packed = _with(spec, "lora", base_precision="mxfp4" if shape.in_mxfp4 else "nf4")
    return None if packing_problem(packed, shape) else packed


def _smaller_micro_batches(spec: SFTJobSpec) -> Iterator[tuple[str, SFTJobSpec]]:
    """Fewer tokens at a time, in words and as a spec."""
    longest, tokens = spec.data.max_length, spec.training.max_tokens_per_micro_batch
    half = max(8, longest // 2)
    shorter = _with(spec, "data", max_length=half)
    if spec.data.packing == "none":
        if spec.training.micro_batch_size > 1:
            yield "training.microBatchSize: 1", _with(spec, "training", micro_batch_size=1)
        else:
            yield f"data.maxLength: {half}", shorter
    elif tokens is None:
        yield f"data.maxLength: {half}", shorter
    elif tokens > longest:
        yield f"training.maxTokensPerMicroBatch: {longest}", _with(spec, "training", max_tokens_per_micro_batch=longest)
    else:
        both = _with(shorter, "training", max_tokens_per_micro_batch=half)
        yield f"data.maxLength and training.maxTokensPerMicroBatch: {half}", both


def _longer_sequence(spec: SFTJobSpec, plan: PlanStatus, shape: ModelShape | None, gpu: int) -> int | None:
    """The smallest larger degree, within a node, with which the run fits, else the largest; None without any."""
    here = spec.compute.effective_processes_per_node
    degrees = [
        degree
        for degree in range(spec.sequence_parallel + 1, here + 1)
        if here % degree == plan.shard_degree % degree == 0
        and shape is not None
        and not layers_problem(shape.kind, degree)
        and possible(shape.heads, shape.kv_heads, degree)
    ]
    fitting = (degree for degree in degrees if _fits(*_shared(spec, plan, degree), shape, gpu))
    return next(fitting, degrees[-1] if degrees else None)


def _shared(spec: SFTJobSpec, plan: PlanStatus, degree: int) -> tuple[SFTJobSpec, PlanStatus]:
    """With tokens of a micro-batch shared out to ``degree`` processes."""
    shared, shares = _with_fsdp(spec, sequence_parallel_degree=degree), plan.processes // degree
    # Fewer shares of a step have more micro-batches each, between which whole gradients may be held.
    return shared, with_batch_of(shared, plan.model_copy(update={"sequence_parallel": degree, "data_parallel": shares}))


def _over(spec: SFTJobSpec, plan: PlanStatus, processes: int) -> tuple[str, SFTJobSpec, PlanStatus]:
    """Over more ``processes``, all of which share a copy; in words with what else of ``spec`` would keep them from
    it: a degree of fewer, or a step too small to be shared out to them."""
    shares, training, besides = plan.data_parallel * processes // plan.processes, spec.training, list[str]()
    if spec.fsdp.shard_degree is not None:
        besides.append(f"strategy.fsdp.shardDegree: {processes}")
        spec = _with_fsdp(spec, shard_degree=processes)
    each = training.max_tokens_per_micro_batch or spec.data.max_length
    if training.global_batch_size is not None and training.global_batch_size % (shares * training.micro_batch_size):
        at_once = shares * training.micro_batch_size
        examples = -(-training.global_batch_size // at_once) * at_once
        besides.append(f"training.globalBatchSize: {examples}")
        spec = _with(spec, "training", global_batch_size=examples)
    elif training.global_batch_tokens is not None and training.global_batch_tokens < shares * each:
        besides.append(f"training.globalBatchTokens: {shares * each}")
        spec = _with(spec, "training", global_batch_tokens=shares * each)
    wider = plan.model_copy(update={"shard_degree": processes, "processes": processes, "data_parallel": shares})
    words = f"{processes} GPUs in compute{' with ' if besides else ''}{' and '.join(besides)}"
    return words, spec, with_batch_of(spec, wider)


def _fits(spec: SFTJobSpec, plan: PlanStatus, shape: ModelShape | None, gpu: int) -> bool:
    """Whether it fits, as far as anything is known of that."""
    memory = memory_of(spec, plan, shape)
    return memory is None or memory.total <= WARNED_SHARE * gpu


def _with(spec: SFTJobSpec, section: str, **fields: Any) -> SFTJobSpec:
    return spec.model_copy(update={section: getattr(spec, section).model_copy(update=fields)})


def _with_fsdp(spec: SFTJobSpec, **fields: Any) -> SFTJobSpec:
    return spec.model_copy(update={"strategy": StrategySpec(fsdp=spec.fsdp.model_copy(update=fields))})
