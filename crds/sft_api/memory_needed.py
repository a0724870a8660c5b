"""What memory of its GPUs and of its nodes a run takes, by what is known of its model. Pure."""

from .layers import with_added_tokens
from .memory import MemoryEstimate, estimate, estimate_states, offloaded_bytes, sizes_of, staging_bytes
from .memory_megatron import estimate_stage, estimate_stage_states
from .model_shape import ModelShape
from .v1alpha1.job import SFTJobSpec
from .v1alpha1.megatron import megatron_of
from .v1alpha1.status import PlanStatus

WARNED_SHARE = 0.9
"""Of a GPU's memory: what takes more may not fit."""
_GIBIBYTE = 2**30
_UNITS = {"M": 10**6, "B": 10**9, "T": 10**12}


def parameter_count(text: str) -> int:
    """The number that ``model.parameters`` stands for: 8B, 0.6B, 350M."""
    return round(float(text[:-1]) * _UNITS[text[-1]])


def memory_of(spec: SFTJobSpec, plan: PlanStatus, shape: ModelShape | None) -> MemoryEstimate | None:
    """Of one GPU, by the ``shape`` of the model's files or, without one, by ``model.parameters``; None where neither is
    known."""
    whole, states = (estimate_stage, estimate_stage_states) if megatron_of(spec) else (estimate, estimate_states)
    if shape is not None:
        return whole(with_added_tokens(shape, spec), spec, plan)
    count = spec.model.parameters
    return None if count is None else states(parameter_count(count), spec, plan)


def staging(spec: SFTJobSpec, shape: ModelShape | None) -> int:
    """Bytes of host memory of a node that a save in the background takes; 0 where none is made, or it is not known."""
    if spec.training.dummy_run is not None:
        return 0
    if shape is not None:
        sizes = sizes_of(with_added_tokens(shape, spec), spec)
        return staging_bytes(sizes.trained, sizes.in_smaller(spec), spec)
    if spec.model.parameters is None or not spec.trains_all:
        return 0
    count = parameter_count(spec.model.parameters)
    return staging_bytes(count, count, spec)


def offloaded(spec: SFTJobSpec, shape: ModelShape | None) -> int:
    """Bytes of host memory of a node that ``strategy.fsdp.cpuOffload`` takes; 0 without it, or where not known."""
    if shape is not None:
        sizes = sizes_of(with_added_tokens(shape, spec), spec)
        frozen = sizes.parameters - sizes.trained
        return offloaded_bytes(sizes.trained, sizes.in_smaller(spec), frozen, spec, sizes.packed)
    if spec.model.parameters is None:
        return 0
    count = parameter_count(spec.model.parameters)
    trained = count if spec.trains_all else 0
    return offloaded_bytes(trained, trained, count - trained, spec, count if spec.quantised else 0)


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


def gibibytes(size: int) -> str:
    """A number of bytes as a quantity for people: 61.2Gi."""
    return f"{size / _GIBIBYTE:.1f}Gi"
