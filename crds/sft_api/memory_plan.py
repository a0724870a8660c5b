"""Whether a run fits its GPUs, and what to change where it does not. Pure."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .adapters import AdapterError, adapted, hint_on_experts, hint_on_peft, no_such_module, within
from .batch import with_batch_of
from .block_memory import knows_compiled
from .families import UNCOMPILED_EXPERTS
from .gpus import declared_gpu_memory
from .known_models import known_shape
from .layers import HEAD, all_linear, embeddings_of, names_of_modules, packed_of, some_parameters
from .megatron import model_problem
from .memory import (
    EXPORT_BYTES,
    NF4_BLOCK,
    MemoryEstimate,
    estimate,
    estimate_states,
    keeps_whole_gradients,
    offloaded_bytes,
    offloads,
    reshards,
    sizes_of,
    staging_bytes,
)
from .memory_megatron import changes, estimate_stage, estimate_stage_states
from .model_shape import ModelShape
from .sequence_parallel import heads_problem, layers_problem, possible
from .v1alpha1.job import SFTJobSpec
from .v1alpha1.lora import LoraSpec
from .v1alpha1.megatron import megatron_of
from .v1alpha1.runtime import StrategySpec
from .v1alpha1.status import MemoryStatus, PlanStatus

REFUSED_SHARE = 1.1
"""Of a GPU's memory: what takes more is not tried. An estimate is up to 15% above what is then held (docs/memory.md),
and a run that takes 96% of a GPU has no room for the holes between its blocks."""
WARNED_SHARE = 0.9
_GIBIBYTE = 2**30
_OF_A_LAYER = re.compile(r"(.*\.)?layers\.(?P<number>\d+)(\..*)?")
_UNITS = {"M": 10**6, "B": 10**9, "T": 10**12}
_STAGED = 1.1
"""Of what is staged: the uploads take some as well."""
_WORTH_SAYING = 0.97
"""A remedy leaves less than this share of what is taken without it."""
_SHOWN = 10
_CHECKPOINTING = ("none", "selective", "full")
"""The longer, the less is kept."""
_STATES = ("fp32", "bf16", "int8")
"""The longer, the less the moments take."""
_MOST_DOUBLED = 4
"""How often the GPUs are doubled in search of enough of them."""


@dataclass(frozen=True)
class Fit:
    """What there is to say of a run's memory; empty sentences where it fits, or nothing is known."""

    refused: str = ""
    """Why it is not tried, and what to change."""
    warning: str = ""
    """Why it may not fit, and what to change."""


def parameter_count(text: str) -> int:
    """The number that ``model.parameters`` stands for: 8B, 0.6B, 350M."""
    return round(float(text[:-1]) * _UNITS[text[-1]])


def memory_of(spec: SFTJobSpec, plan: PlanStatus, shape: ModelShape | None) -> MemoryEstimate | None:
    """Of one GPU, by the model's ``shape`` or, without one, by ``model.parameters``; None where neither is known."""
    whole, states = (estimate_stage, estimate_stage_states) if megatron_of(spec) else (estimate, estimate_states)
    if shape is not None:
        return whole(shape, spec, plan)
    count = spec.model.parameters
    return None if count is None else states(parameter_count(count), spec, plan)


def memory_status(
    spec: SFTJobSpec, plan: PlanStatus, shape: ModelShape | None, gpu_memory: int | None, uncounted: str = ""
) -> MemoryStatus | None:
    """What ``status.plan`` says of memory; None for a run without GPUs, whose memory the host shares out.

    ``uncounted`` is why the model has no ``shape``, where more is known than that the table lacks it.
    """
    if spec.compute.gpus_per_node == 0:
        return None
    memory = memory_of(spec, plan, shape)
    unknown = _unknown(spec, memory, gpu_memory, uncounted)
    gpu = None if gpu_memory is None else gibibytes(gpu_memory)
    if memory is None:
        return MemoryStatus(gpu_memory=gpu, unknown=unknown)
    staged = staging(spec, shape)

    def shown(part: int | None) -> str | None:
        return None if part is None else gibibytes(part)

    return MemoryStatus(
        parameters=shown(memory.parameters),
        gradients=shown(memory.gradients),
        optimizer=shown(memory.optimizer),
        gathered=shown(memory.gathered),
        activations=shown(memory.activations),
        logits=shown(memory.logits),
        reserve=shown(memory.reserve),
        total=shown(memory.total),
        gpu_memory=gpu,
        host_staging=shown(staged or None),
        host_offload=shown(offloaded(spec, shape) or None),
        unknown=unknown,
    )


def _unknown(spec: SFTJobSpec, memory: MemoryEstimate | None, gpu_memory: int | None, uncounted: str) -> str:
    missing, counted = [], _where_counted(spec.model.uri, uncounted)
    if memory is None:
        missing.append(
            f"the shape of {spec.model.uri}, {uncounted or 'which is not in the table of known models'}: give "
            f"model.parameters, e.g. 8B, for the least that it takes; {counted}"
        )
    elif not memory.known:
        missing.append(
            "gathered layers, activations and logits: model.parameters says nothing of the layers, so the total is "
            f"the least that is needed; {counted}"
        )
    if gpu_memory is None:
        profile = spec.compute.pod_profile
        where = f", which the profile {profile} does not say here" if profile else ""
        missing.append(f"the size of the GPUs{where}: give compute.gpuMemory (e.g. 80Gi)")
    return "; ".join(missing)


def _where_counted(uri: str, uncounted: str) -> str:
    """Who counts a model that is not known here, and what to do for it."""
    trainer = "the trainer counts the rest, and refuses what does not fit, before it loads a weight"
    if uncounted:
        return f"{trainer}: try it with training.dummyRun"
    if not (download := config_download(uri)):
        return trainer
    return (
        f"sft plan counts the rest where its config is ({download}) and docs/memory.md has a formula for its type; "
        f"{trainer}"
    )


def config_download(uri: str) -> str:
    """The command that brings the config of the model ``uri`` to this machine; empty where that is not on the hub."""
    if not uri.startswith("hf://"):
        return ""
    name, _, revision = uri.removeprefix("hf://").partition("@")
    return f"hf download {name} config.json{f' --revision {revision}' if revision else ''}"


def staging(spec: SFTJobSpec, shape: ModelShape | None) -> int:
    """Bytes of host memory of a node that a save in the background takes; 0 where none is made, or it is not known."""
    if spec.training.dummy_run is not None:
        return 0
    if shape is not None:
        sizes = sizes_of(shape, spec)
        return staging_bytes(sizes.trained, sizes.in_smaller(spec), spec)
    if spec.model.parameters is None or not spec.trains_all:
        return 0
    count = parameter_count(spec.model.parameters)
    return staging_bytes(count, count, spec)


def offloaded(spec: SFTJobSpec, shape: ModelShape | None) -> int:
    """Bytes of host memory of a node that ``strategy.fsdp.cpuOffload`` takes; 0 without it, or where not known."""
    if shape is not None:
        sizes = sizes_of(shape, spec)
        frozen = sizes.parameters - sizes.trained
        return offloaded_bytes(sizes.trained, sizes.in_smaller(spec), frozen, spec, sizes.packed)
    if spec.model.parameters is None:
        return 0
    count = parameter_count(spec.model.parameters)
    trained = count if spec.trains_all else 0
    return offloaded_bytes(trained, trained, count - trained, spec, count if spec.quantised else 0)


def staging_warning(spec: SFTJobSpec, shape: ModelShape | None, pod_memory: int | None) -> str:
    """What to say when a pod with ``pod_memory`` bytes does not hold what is offloaded, copied to it for a save, or
    exported beside training."""
    staged, held = round(staging(spec, shape) * _STAGED), offloaded(spec, shape)
    exporting = EXPORT_BYTES if spec.export.every_steps and spec.training.dummy_run is None else 0
    if pod_memory is None or staged + held + exporting <= pod_memory:
        return ""
    memory = "give compute.resources.requests.memory and limits.memory"
    if held > pod_memory:
        return (
            f"strategy.fsdp.cpuOffload holds {gibibytes(held)} in the memory of each node, and its pod asks for "
            f"{gibibytes(pod_memory)}: {memory}, take more nodes, or leave cpuOffload out"
        )
    if not staged and not held:
        return (
            f"an export beside training (export.everySteps) takes {gibibytes(exporting)} of the memory of a node, and "
            f"its pod asks for {gibibytes(pod_memory)}: {memory}, or leave export.everySteps out"
        )
    others = [f"{gibibytes(held)} that are offloaded"] if held else []
    others += [f"{gibibytes(exporting)} of an export (export.everySteps)"] if exporting else []
    beside = f" beside {' and '.join(others)}," if others else ","
    return (
        f"a save in the background takes {gibibytes(staged)} of the memory of each node with its uploads{beside} and "
        f"its pod asks for {gibibytes(pod_memory)}: {memory}, or set checkpoint.async: "
        "false; where there is no room, training waits while it is saved"
    )


def fits_a_node(spec: SFTJobSpec, plan: PlanStatus, shape: ModelShape | None, gpu: int | None) -> bool:
    """Whether each of several nodes has room for a replica of its own, with no more than 90% of a GPU taken.

    Layers are then gathered within a node, and only gradients are summed over the network. False where it is not
    known, with ``cpuOffload``, where each replica would take the hosts' memory, and with Megatron, which gathers none.
    """
    if megatron_of(spec) is not None:
        return False
    if spec.compute.nodes == 1 or spec.compute.gpus_per_node == 0 or shape is None or gpu is None or offloads(spec):
        return False
    if spec.compute.effective_processes_per_node % spec.sequence_parallel:
        return False
    within = plan.model_copy(update={"shard_degree": spec.compute.effective_processes_per_node})
    if spec.fsdp.reduce_gradients == "oncePerStep":
        # What the plan leaves open of it follows from what is decided here.
        within = within.model_copy(update={"reduce_gradients": "oncePerStep"})
    return estimate(shape, spec, within).total <= WARNED_SHARE * gpu


def judge(spec: SFTJobSpec, plan: PlanStatus, *, gpu_memory: int | None = None, shape: ModelShape | None = None) -> Fit:
    """Whether ``spec`` fits GPUs of ``gpu_memory`` bytes, where the manifest does not say how large they are.

    ``shape`` is that of its model, where the table does not know it: some cannot have what is asked for.
    With ``compute.memoryCheck: Warn`` nothing is refused for its memory.
    """
    gpu = declared_gpu_memory(spec) or gpu_memory
    shape = shape or known_shape(spec.model.uri)
    if shape and (problem := layers_problem(shape.kind, spec.sequence_parallel)):
        return Fit(refused=problem)
    keys = {kind.kv_heads for kind in shape.distinct} if shape else set[int]()
    if shape and (problem := heads_problem(shape.heads, keys, spec.sequence_parallel, plan.shard_degree)):
        return Fit(refused=problem)
    if shape and (problem := _experts_problem(spec, shape)):
        return Fit(refused=problem)
    if shape and (problem := _adapters_problem(spec, shape) or _packing_problem(spec, shape)):
        return Fit(refused=problem)
    if shape and (problem := _modules_problem(spec, shape)):
        return Fit(refused=problem)
    if shape and (megatron := megatron_of(spec)) and (problem := model_problem(megatron, shape, plan.processes)):
        return Fit(refused=problem)
    memory = memory_of(spec, plan, shape) if spec.compute.gpus_per_node else None
    if memory is None or gpu is None or memory.total <= WARNED_SHARE * gpu:
        return Fit()
    return sentences(spec, plan, shape, memory, gpu)


def _experts_problem(spec: SFTJobSpec, shape: ModelShape) -> str:
    """Why a model of ``shape`` cannot have what ``spec`` asks for and its experts, or their lack, do not know."""
    if spec.training.router_aux_loss_coefficient and not (shape.experts and shape.family.balanced):
        why = "was not trained with a load-balancing loss: transformers knows none for its type"
        return (
            f"training.routerAuxLossCoefficient is {spec.training.router_aux_loss_coefficient:g}, but "
            f"{spec.model.uri} {why if shape.experts else 'sends no tokens to experts'}: leave the field out"
        )
    if spec.training.compile and shape.family.biased:
        return f"training.compile is true, but {spec.model.uri} {UNCOMPILED_EXPERTS}: leave the field out"
    return ""


def _adapters_problem(spec: SFTJobSpec, shape: ModelShape) -> str:
    """Which name of ``lora`` no linear layer and no expert of a model of ``shape`` has, and which there are; else
    empty."""
    lora = spec.lora
    if lora is None:
        return ""
    blocks = [*enumerate(shape.blocks)]
    stacked = [f"model.layers.{layer}.{name}" for layer, block in blocks for name in block.of_experts]
    try:
        modules = spec.training.trainable_modules or ()
        adapted([*all_linear(shape), HEAD], HEAD, lora.target_modules, lora.exclude_modules, modules, stacked)
    except AdapterError as error:
        error = hint_on_peft(error, shape.kind)
        return hint_on_experts(error) if shape.experts else str(error)
    return ""


def _packing_problem(spec: SFTJobSpec, shape: ModelShape) -> str:
    """Why frozen weights of a model of ``shape`` cannot be held in 4 bits where ``spec`` asks for that; else empty."""
    if spec.quantised is None:
        return ""
    if spec.quantised == "mxfp4":
        if shape.in_mxfp4:
            return ""
        return f"lora.basePrecision is mxfp4, and {spec.model.uri} is not, as gpt-oss is published: take nf4, or bf16"
    packed = {name: columns for block in packed_of(shape, spec) for name, (_, columns) in block.items()}
    for name, columns in packed.items():
        if columns % NF4_BLOCK:
            return (
                f"lora.basePrecision is nf4, but rows of {name} of {spec.model.uri} have {columns} weights: they must "
                f"be a multiple of {NF4_BLOCK}, which share a scale; take bf16, or another model"
            )
    return ""


def _modules_problem(spec: SFTJobSpec, shape: ModelShape) -> str:
    """Which name of ``training.trainableModules`` means nothing in a model of ``shape``, or one of two that tied
    weights have; else empty."""
    names = spec.training.trainable_modules or ()
    for name in names:
        layer = _OF_A_LAYER.fullmatch(name)
        if layer and int(layer["number"]) >= shape.layers:
            return (
                f"training.trainableModules names {name!r}, and {spec.model.uri} has {shape.layers} layers, from "
                f"layers.0 to layers.{shape.layers - 1}"
            )
        embeddings = embeddings_of(shape)
        if shape.tied and name == HEAD and not within(f"{embeddings}.weight", names):
            return (
                f"training.trainableModules names {name!r}, which is the same tensor as {embeddings} in "
                f"{spec.model.uri}: name that too, or instead"
            )
        if name not in names_of_modules(shape):
            return no_such_module(name, some_parameters(shape))
    return ""


def sentences(
    spec: SFTJobSpec,
    plan: PlanStatus,
    shape: ModelShape | None,
    memory: MemoryEstimate,
    gpu: int,
    *,
    seen: bool = False,
) -> Fit:
    """The verdict on a run that takes ``memory`` of GPUs of ``gpu`` bytes, with what makes it smaller.

    ``shape`` is that of the model, where a formula knows it; ``seen`` says that what blocks keep is not by a formula.
    """
    if memory.total <= WARNED_SHARE * gpu:
        return Fit()
    remedy = remedies(spec, plan, shape, gpu)
    least = "" if memory.known else "at least "
    what = f"{least}{gibibytes(memory.total)} of each GPU's {gibibytes(gpu)} would be taken ({parts_in_words(memory)})"
    # To see what a dummy run takes is what it is for.
    tried = spec.compute.memory_check == "Warn" or spec.training.dummy_run is not None
    if tried or memory.total - _not_sure(spec, plan, shape, memory, seen=seen) <= REFUSED_SHARE * gpu:
        return Fit(warning=f"it may not fit: {what}; {remedy}")
    return Fit(
        refused=f"it does not fit: {what}; {remedy}. Where you know better, compute.memoryCheck: Warn has it tried"
    )


def _not_sure(
    spec: SFTJobSpec, plan: PlanStatus, shape: ModelShape | None, memory: MemoryEstimate, *, seen: bool
) -> int:
    """Bytes of ``memory`` that are a most, and may be much less."""
    # How much less some compiled layers keep than is reckoned nobody knows, nor how short examples are: data.maxLength
    # is a limit of theirs, to which nothing but packing fills a micro-batch.
    unpacked = spec.data.packing == "none"
    compiled = plan.compile and (shape is None or not knows_compiled(shape))
    activations = (memory.activations or 0) if compiled or unpacked else 0
    not_sure = activations + ((memory.logits or 0) if unpacked else 0)
    if seen or shape is None or not spec.training.trainable_modules:
        return not_sure
    # A block of which some weights are trained is taken for one of which all are.
    return max(not_sure, memory.total - estimate(shape, spec, plan, least=True).total)


def parts_in_words(memory: MemoryEstimate) -> str:
    """The parts of an estimate, the largest first."""
    parts = {
        "weights": memory.parameters,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        "gathered layers": memory.gathered,
        "activations": memory.activations,
        "logits": memory.logits,
        "CUDA and NCCL": memory.reserve,
    }
    known = sorted(((size, name) for name, size in parts.items() if size), reverse=True)
    return ", ".join(f"{name} {size / _GIBIBYTE:.1f}" for size, name in known)


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
    shares = plan.model_copy(update={"reduce_gradients": "everyMicroBatch", "reshard_after_forward": True})
    given = spec.fsdp
    if keeps_whole_gradients(plan):
        yield (
            "strategy.fsdp.reduceGradients: everyMicroBatch",
            spec,
            plan.model_copy(update={"reduce_gradients": "everyMicroBatch"}),
        )
    if not reshards(spec, plan):
        freed = StrategySpec(fsdp=given.model_copy(update={"reshard_after_forward": True}))
        yield "strategy.fsdp.reshardAfterForward: true", spec.model_copy(update={"strategy": freed}), plan
    for how in _CHECKPOINTING[_CHECKPOINTING.index(spec.training.activation_checkpointing) + 1 :]:
        yield (
            f"training.activationCheckpointing: {how}",
            _with(spec, "training", activation_checkpointing=how),
            plan,
        )
    fsdp = megatron_of(spec) is None
    if not fsdp:
        yield from changes(spec, plan, shape, lambda other, then: _takes(other, then, shape) <= WARNED_SHARE * gpu)
    if plan.shard_degree < plan.processes:
        wider = plan.model_copy(update={"shard_degree": plan.processes})
        # Said outright: where the field is left out, each of several nodes has a replica of its own if it fits there.
        yield f"strategy.fsdp.shardDegree: {plan.processes}", spec, wider
    else:
        more = [_over(spec, plan, 2**doubled * plan.processes) for doubled in range(1, _MOST_DOUBLED + 1)]
        yield next((each for each in more if _takes(*each[1:], shape) <= WARNED_SHARE * gpu), more[0])
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
    if adapters.lora and _takes(adapters, plan, shape) > WARNED_SHARE * gpu and (packed := _packed(adapters, shape)):
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
        without = ", without reduceGradients" if given.reduce_gradients == "oncePerStep" else ""
        offloaded = StrategySpec(fsdp=given.model_copy(update={"cpu_offload": True, "reduce_gradients": "auto"}))
        yield f"strategy.fsdp.cpuOffload: true{without}", spec.model_copy(update={"strategy": offloaded}), shares


def _packed(spec: SFTJobSpec, shape: ModelShape | None) -> SFTJobSpec | None:
    """With the base of its adapters in 4 bits; None where that is so already, and where it cannot be, or who knows."""
    if spec.quantised or shape is None:
        return None
    packed = _with(spec, "lora", base_precision="mxfp4" if shape.in_mxfp4 else "nf4")
    return None if _packing_problem(packed, shape) else packed


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
    fitting = (degree for degree in degrees if _takes(*_shared(spec, plan, degree), shape) <= WARNED_SHARE * gpu)
    return next(fitting, degrees[-1] if degrees else None)


def _shared(spec: SFTJobSpec, plan: PlanStatus, degree: int) -> tuple[SFTJobSpec, PlanStatus]:
    """With tokens of a micro-batch shared out to ``degree`` processes."""
    strategy = StrategySpec(fsdp=spec.fsdp.model_copy(update={"sequence_parallel_degree": degree}))
    shared, shares = spec.model_copy(update={"strategy": strategy}), plan.processes // degree
    # Fewer shares of a step have more micro-batches each, between which whole gradients may be held.
    return shared, with_batch_of(shared, plan.model_copy(update={"sequence_parallel": degree, "data_parallel": shares}))


def _over(spec: SFTJobSpec, plan: PlanStatus, processes: int) -> tuple[str, SFTJobSpec, PlanStatus]:
    """Over more ``processes``, all of which share a copy; in words with what else of ``spec`` would keep them from
    it: a degree of fewer, or a step too small to be shared out to them."""
    shares, training, besides = plan.data_parallel * processes // plan.processes, spec.training, list[str]()
    if spec.fsdp.shard_degree is not None:
        besides.append(f"strategy.fsdp.shardDegree: {processes}")
        fsdp = spec.fsdp.model_copy(update={"shard_degree": processes})
        spec = spec.model_copy(update={"strategy": StrategySpec(fsdp=fsdp)})
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


def _takes(spec: SFTJobSpec, plan: PlanStatus, shape: ModelShape | None) -> int:
    memory = memory_of(spec, plan, shape)
    return memory.total if memory else 0


def _with(spec: SFTJobSpec, section: str, **fields: Any) -> SFTJobSpec:
    return spec.model_copy(update={section: getattr(spec, section).model_copy(update=fields)})


def gibibytes(size: int) -> str:
    """A number of bytes as a quantity for people: 61.2Gi."""
    return f"{size / _GIBIBYTE:.1f}Gi"
