"""Whether a run fits its GPUs, and what is said of its memory. Pure."""

from dataclasses import dataclass

from .block_memory import knows_compiled
from .gpus import declared_gpu_memory
from .known_models import known_shape
from .memory import EXPORT_BYTES, MemoryEstimate, estimate, offloads
from .memory_needed import WARNED_SHARE, gibibytes, memory_of, offloaded, parts_in_words, staging
from .memory_remedies import remedies
from .model_shape import ModelShape
from .shape_problems import shape_problem
from .v1alpha1.job import SFTJobSpec
from .v1alpha1.megatron import megatron_of
from .v1alpha1.status import MemoryStatus, PlanStatus

REFUSED_SHARE = 1.1
"""Of a GPU's memory: what takes more is not tried. An estimate is up to 15% above what is then held (docs/memory.md),
and a run that takes 96% of a GPU has no room for the holes between its blocks."""
_STAGED = 1.1
"""Of what is staged: the uploads take some as well."""


@dataclass(frozen=True)
class Fit:
    """What there is to say of a run's memory; empty sentences where it fits, or nothing is known."""

    refused: str = ""
    """Why it is not tried, and what to change."""
    warning: str = ""
    """Why it may not fit, and what to change."""


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
    if shape and (problem := shape_problem(spec, plan, shape)):
        return Fit(refused=problem)
    memory = memory_of(spec, plan, shape) if spec.compute.gpus_per_node else None
    if memory is None or gpu is None or memory.total <= WARNED_SHARE * gpu:
        return Fit()
    return sentences(spec, plan, shape, memory, gpu)


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
