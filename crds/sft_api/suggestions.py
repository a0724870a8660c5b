"""Shapes of processes with which a job fits its GPUs: of each strategy the one that costs least. Pure."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from pydantic import ValidationError

from .megatron import ENDS, even_enough, model_problem
from .memory import MemoryEstimate
from .memory_needed import WARNED_SHARE, gibibytes, memory_of
from .memory_remedies import remedies
from .model_shape import ModelShape
from .plan import make_plan
from .sequence_parallel import layers_problem, possible
from .v1alpha1.job import SFTJobSpec
from .v1alpha1.megatron import megatron_of
from .v1alpha1.status import PlanStatus
from .v1alpha1.transformer_config import OF_STAGES
from .v1alpha1.words import divisors

_LITTLE, _ALL = ("none", "selective"), "full"
"""Activations that are computed twice."""
_CHECKPOINTING = "activationCheckpointing"
_Tried = tuple[dict[str, Any], str]
"""The section ``strategy``, and ``training.activationCheckpointing``."""


@dataclass(frozen=True)
class Suggestion:
    """Sections of a spec, whole as a manifest has them, and what a GPU then holds."""

    sections: dict[str, Any]
    bytes: int


@dataclass(frozen=True)
class _Shape:
    """A job that is valid with its model, and what it takes."""

    sections: dict[str, Any]
    spec: SFTJobSpec
    plan: PlanStatus
    memory: MemoryEstimate

    def fits(self, gpu: int) -> bool:
        return self.memory.total <= WARNED_SHARE * gpu

    @property
    def waits(self) -> bool:
        """Whether some stage has always nothing to do."""
        micro_batches = self.plan.gradient_accumulation
        return micro_batches is not None and self.plan.pipeline_parallel > micro_batches

    @property
    def enough(self) -> str:
        """A batch with which no stage ``waits``, as a manifest says it."""
        each, together = self.plan.max_tokens_per_micro_batch, self.plan.pipeline_parallel * self.plan.data_parallel
        if each is not None and self.plan.global_batch_tokens is not None:
            return f"training.globalBatchTokens: {together * each}"
        return f"training.globalBatchSize: {together * self.spec.training.micro_batch_size}"

    def __str__(self) -> str:
        strategy = json.dumps(self.sections["strategy"]).replace('"', "")
        return f"strategy: {strategy} and activationCheckpointing: {self.sections['training'][_CHECKPOINTING]}"


def suggestions(spec: SFTJobSpec, shape: ModelShape, gpu: int) -> dict[str, Suggestion | str]:
    """By strategy the first shape of the processes of ``spec`` with which it takes no more than 90% of a GPU.

    ``gpu`` are its bytes. Where there is none, a sentence says what to change. Earlier are those with less to send,
    and to compute twice: tokens and matrices are shared within a node, then tokens over several. The last is the shape
    that ``spec`` itself has.
    """
    given = spec.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_unset=True)
    found: dict[str, Suggestion | str] = {}
    for name, tried in (("fsdp", _fsdp(spec, shape)), ("megatron", _megatron(spec, shape))):
        found[name] = _first(given, shape, gpu, tried)
        own = given.get("strategy") or {}
        if isinstance(found[name], str) and name in own:
            asked = (_shape(given, shape, gpu, own, how) for how in (*_LITTLE, _ALL))
            fitting = (each for each in asked if isinstance(each, _Shape) and each.fits(gpu))
            found[name] = next((Suggestion(each.sections, each.memory.total) for each in fitting), found[name])
    return found


def _first(given: dict[str, Any], shape: ModelShape, gpu: int, tried: Iterator[_Tried]) -> Suggestion | str:
    """Of ``tried`` the first that fits and whose stages all have something to do; else what to change."""
    refused, waiting, smallest = "", None, None
    for strategy, how in tried:
        found = _shape(given, shape, gpu, strategy, how)
        if isinstance(found, str):
            refused = found
        elif found.fits(gpu) and not found.waits:
            return Suggestion(found.sections, found.memory.total)
        elif found.fits(gpu):
            waiting = waiting or found
        elif smallest is None or found.memory.total < smallest.memory.total:
            smallest = found
    if waiting:
        return (
            f"{waiting} has room for it, and more stages than a step has micro-batches: set {waiting.enough}, or more"
        )
    if not smallest:
        return refused
    least, whole, count = gibibytes(smallest.memory.total), gibibytes(gpu), smallest.plan.processes
    processes = f"{count} process{'es' * (count > 1)}"
    return (
        f"no shape of {processes} has room for it; {smallest} takes least, {least} of each "
        f"GPU's {whole}: {remedies(smallest.spec, smallest.plan, shape, gpu)}"
    )


def _shape(given: dict[str, Any], shape: ModelShape, gpu: int, strategy: dict[str, Any], how: str) -> _Shape | str:
    """The job ``given`` with another ``strategy``; why it is none, and what to change, where it is not valid."""
    sections = {"training": {**given.get("training", {}), _CHECKPOINTING: how}, "strategy": strategy}
    try:
        asked = SFTJobSpec.model_validate({**given, **sections})
    except ValidationError as error:
        return "; ".join(line for each in error.errors() for line in each["msg"].splitlines())
    megatron = megatron_of(asked)
    if megatron is not None and (problem := model_problem(megatron, shape, asked.compute.processes)):
        return problem
    plan = make_plan(asked, gpu_memory=gpu, shape=shape)
    memory = memory_of(asked, plan, shape)
    return "its memory is not known" if memory is None else _Shape(sections, asked, plan, memory)


def _fsdp(spec: SFTJobSpec, shape: ModelShape) -> Iterator[_Tried]:
    kept = spec.fsdp.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_unset=True)
    here = spec.compute.effective_processes_per_node
    for degree in sorted(divisors(spec.compute.processes), key=lambda degree: (here % degree > 0, degree)):
        if possible(shape.heads, shape.kv_heads, degree) and not layers_problem(shape.kind, degree):
            others = {name: value for name, value in kept.items() if name != "sequenceParallelDegree"}
            shared = {"sequenceParallelDegree": degree} if degree > 1 else {}
            yield from (({"fsdp": {**others, **shared}}, how) for how in (*_LITTLE, _ALL))


def _megatron(spec: SFTJobSpec, shape: ModelShape) -> Iterator[_Tried]:
    here, processes = spec.compute.effective_processes_per_node, spec.compute.processes
    both = [
        (tensor, context)
        for tensor in divisors(here)
        for context in divisors(processes // tensor)
        if possible(max(1, shape.heads // tensor), max(1, shape.kv_heads // tensor), context)
    ]
    within = [(tensor, context) for tensor, context in both if here % (tensor * context) == 0]
    across = sorted({*both}.difference(within), key=lambda pair: (pair[0] * pair[1], pair[1]))
    megatron = megatron_of(spec)
    given = {name: value for name, value in (megatron.overrides if megatron else {}).items() if name not in ENDS}
    for shared, pipeline in product((within, across), divisors(processes)):
        kept = {name: value for name, value in given.items() if pipeline > 1 or name not in OF_STAGES}
        overrides = kept | even_enough(shape.layers, pipeline)
        others = {"transformerConfigOverrides": overrides} if overrides else {}
        # To share tokens, or matrices, within a node costs less than to compute all twice.
        for hows in (_LITTLE, (_ALL,)):
            for (tensor, context), expert, how in product(shared, divisors(shape.experts or 1), hows):
                if processes % (tensor * context * pipeline) or processes % (pipeline * expert):
                    continue
                degrees = {
                    "tensorParallelDegree": tensor,
                    "contextParallelDegree": context,
                    "pipelineParallelDegree": pipeline,
                    "expertParallelDegree": expert,
                }
                yield {"megatron": {name: degree for name, degree in degrees.items() if degree > 1} | others}, how
