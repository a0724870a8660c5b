"""Shapes of processes with which a job fits its GPUs: of each strategy the one that costs least. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from pydantic import ValidationError

from .megatron import ENDS, even_enough, model_problem
from .memory_plan import WARNED_SHARE, memory_of
from .model_shape import ModelShape
from .plan import make_plan
from .sequence_parallel import possible
from .v1alpha1.job import SFTJobSpec
from .v1alpha1.megatron import megatron_of
from .v1alpha1.transformer_config import OF_STAGES

_LITTLE, _ALL = ("none", "selective"), "full"
"""Activations that are computed twice."""
_Tried = tuple[dict[str, Any], str]
"""The section ``strategy``, and ``training.activationCheckpointing``."""


@dataclass(frozen=True)
class Suggestion:
    """Sections of a spec, as a manifest has them, and what a GPU then holds."""

    sections: dict[str, Any]
    bytes: int


def suggestions(spec: SFTJobSpec, shape: ModelShape, gpu: int) -> dict[str, Suggestion | None]:
    """By strategy the first shape of the processes of ``spec`` with which it takes no more than 90% of a GPU.

    ``gpu`` are its bytes. None where there is none, or the strategy does not train such a job. Earlier are those with
    less to send, and to compute twice. Processes that share tokens or matrices are of one node.
    """
    return {
        "fsdp": _first(spec, shape, gpu, _fsdp(spec, shape)),
        "megatron": _first(spec, shape, gpu, _megatron(spec, shape)),
    }


def _first(spec: SFTJobSpec, shape: ModelShape, gpu: int, tried: Iterator[_Tried]) -> Suggestion | None:
    given = spec.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_unset=True)
    for strategy, how in tried:
        training = {**given.get("training", {}), "activationCheckpointing": how}
        try:
            asked = SFTJobSpec.model_validate({**given, "training": training, "strategy": strategy})
        except ValidationError:
            continue
        megatron = megatron_of(asked)
        if megatron is not None and model_problem(megatron, shape):
            continue
        plan = make_plan(asked, gpu_memory=gpu, shape=shape)
        if plan.gradient_accumulation is not None and plan.pipeline_parallel > plan.gradient_accumulation:
            continue  # some stage has always nothing to do
        memory = memory_of(asked, plan, shape)
        if memory is not None and memory.total <= WARNED_SHARE * gpu:
            return Suggestion({"training": {"activationCheckpointing": how}, "strategy": strategy}, memory.total)
    return None


def _fsdp(spec: SFTJobSpec, shape: ModelShape) -> Iterator[_Tried]:
    given = spec.strategy.fsdp if spec.strategy else None
    kept = given.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_unset=True) if given else {}
    for degree in _divisors(spec.compute.effective_processes_per_node):
        if possible(shape.heads, shape.kv_heads, degree):
            shared = {"sequenceParallelDegree": degree} if degree > 1 else {}
            yield from (({"fsdp": {**kept, **shared}}, how) for how in (*_LITTLE, _ALL))


def _megatron(spec: SFTJobSpec, shape: ModelShape) -> Iterator[_Tried]:
    here = spec.compute.effective_processes_per_node
    within = [both for both in product(_divisors(here), repeat=2) if here % (both[0] * both[1]) == 0]
    shapes = list(product(within, _divisors(shape.experts or 1)))
    megatron = megatron_of(spec)
    given = {name: value for name, value in (megatron.overrides if megatron else {}).items() if name not in ENDS}
    for pipeline in _divisors(spec.compute.nodes * here):
        kept = {name: value for name, value in given.items() if pipeline > 1 or name not in OF_STAGES}
        overrides = kept | even_enough(shape.layers, pipeline)
        others = {"transformerConfigOverrides": overrides} if overrides else {}
        # To share tokens, or matrices, within a node costs less than to compute all twice.
        for hows in (_LITTLE, (_ALL,)):
            for ((tensor, context), expert), how in product(shapes, hows):
                degrees = {
                    "tensorParallelDegree": tensor,
                    "contextParallelDegree": context,
                    "pipelineParallelDegree": pipeline,
                    "expertParallelDegree": expert,
                }
                yield {"megatron": {name: degree for name, degree in degrees.items() if degree > 1} | others}, how


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]
