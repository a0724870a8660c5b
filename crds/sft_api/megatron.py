"""Which models ``strategy.megatron`` can spread, over how many processes, and whether a machine has it. Pure but that.

The trainer refuses by the same words what it sees of a model itself.
"""

import importlib.util
import json
from collections.abc import Iterable, Mapping, Sequence
from math import gcd
from typing import Any

from .model_shape import ModelShape
from .sequence_parallel import possible, unshared_heads
from .v1alpha1.job import SFTJobSpec
from .v1alpha1.megatron import MOST, MegatronSpec, megatron_of
from .v1alpha1.status import PlanStatus
from .v1alpha1.words import either

MODELS = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
"""Values of ``model_type`` for whose weights there are rules."""
MISSING = (
    "strategy.megatron needs Megatron-Core, which is not installed here: take a trainer image that is built with "
    "--target megatron (docs/megatron.md), on a machine of your own pip install megatron-core==0.16.1, or choose "
    "strategy.fsdp"
)
_FIELD = "strategy.megatron"
ENDS = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
"""Of ``transformerConfigOverrides``: how many layers the first and the last stage have."""
_BIAS, _EXPERTS = {"attention_bias": False}, {"mlp_only_layers": [], "decoder_sparse_step": 1}
_USUAL: Mapping[str, Mapping[str, Any]] = {
    "llama": {**_BIAS, "mlp_bias": False},
    "mistral": {},
    "qwen2": {},
    "qwen3": _BIAS,
    "qwen3_moe": {**_BIAS, **_EXPERTS},
}
"""By type of ``MODELS``, fields of a config that its models read and by which they get other tensors than it is known
for, and their values where not: Qwen 2 has biases whatever a config says of them, and Mistral none."""
ENOUGH_A_STAGE = 4
"""Micro-batches of a step: with fewer its stages wait for long until all have one, and until all are done."""


def is_installed() -> bool:
    """Whether this machine has Megatron-Core, which is not imported for that."""
    try:
        return importlib.util.find_spec("megatron.core") is not None
    except ModuleNotFoundError:
        return False


def model_problem(megatron: MegatronSpec, shape: ModelShape, processes: int = 0) -> str:
    """Why a model of ``shape`` cannot be trained as ``megatron`` says, and what to change; else empty.

    Degrees that are named are such that ``processes`` can have, where it is given.
    """
    if shape.is_part:
        return unknown_model("the text part of a model of several")
    if shape.kind not in MODELS:
        return unknown_model("this type of model")
    if shape.kinds:
        return no_rules_for("layers that differ")
    if shape.output_bias:
        return no_rules_for("attention_bias: true")
    if shape.experts and megatron.tensor_parallel_degree > 1 and not megatron.shares_tokens:
        return f"{_FIELD}.sequenceParallel is false, which experts under tensorParallelDegree do not know: leave it out"
    return spread_problem(
        megatron,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        inner=shape.intermediate_size,
        layers=shape.layers,
        experts=shape.experts,
        vocabulary=shape.vocabulary,
        processes=processes,
    )


def config_problem(config: Mapping[str, Any]) -> str:
    """Why there are no rules for the weights of a model with this config.json, and what to change; else empty."""
    if (kind := config.get("model_type")) not in MODELS:
        return unknown_model(f"a model of type {kind!r}")
    other = {name: value for name, usual in _USUAL[kind].items() if (value := config.get(name) or usual) != usual}
    return no_rules_for(_in_words(dict([*other.items()][:1]))) if other else ""


def layers_of_stages(layers: int, stages: int, first: int | None = None, last: int | None = None) -> list[int]:
    """How many of so many ``layers`` each stage has: what ``first`` and ``last`` leave is shared out evenly."""
    if stages == 1:
        return [layers]
    given = [each for each in (first, last) if each is not None]
    others = stages - len(given)
    found = [max(0, layers - sum(given)) // others if others else 0] * stages
    found[0] = found[0] if first is None else first
    found[-1] = found[-1] if last is None else last
    return found


def layers_of(megatron: MegatronSpec, layers: int) -> list[int]:
    """``layers_of_stages`` as ``megatron`` says."""
    return layers_of_stages(layers, megatron.pipeline_parallel_degree, *ends_of(megatron))


def ends_of(megatron: MegatronSpec) -> tuple[int | None, int | None]:
    """Layers of the first and of the last stage; None where these have as many as the others."""
    first, last = (megatron.overrides.get(name) for name in ENDS)
    return first, last


def even_enough(layers: int, stages: int, chunks: int = 1) -> dict[str, int]:
    """``transformerConfigOverrides`` by which as many ``stages`` have the same number of layers but the ends.

    These have fewer, where that is possible, and all have whole ``chunks``. Empty where there is no need, or no way.
    """
    # Each chunk is as one layer.
    layers, rest = divmod(layers, chunks)
    if rest or layers % stages == 0 or layers < stages:
        return {}
    each = next(each for each in (-(-layers // stages), layers // stages) if layers - each * (stages - 2) >= 2)
    both = layers - each * (stages - 2)
    return dict(zip(ENDS, (chunks * (both - both // 2), chunks * (both // 2)), strict=True))


def unknown_model(what: str) -> str:
    """That there are no rules for the weights of ``what``."""
    return (
        f"{_FIELD} has no rules for the weights of {what}: choose a model of type {', '.join(MODELS)}, or strategy.fsdp"
    )


def no_rules_for(what: str) -> str:
    """That models of a known type have no rules with ``what``, in the words of their config.json."""
    return f"{_FIELD} has no rules for the weights of a model with {what} in its config.json: choose strategy.fsdp"


def no_gpu_problem(megatron: MegatronSpec, experts: int) -> str:
    """Why ``megatron`` has to have GPUs with a model of so many ``experts``, and what to change; else empty."""
    on_gpus = {
        "pipelineParallelDegree": megatron.pipeline_parallel_degree > 1,
        "expertParallelDegree": megatron.expert_parallel_degree > 1,
        "sequenceParallel": megatron.shares_tokens,
    }
    asked = [f"{_FIELD}.{name}" for name, is_asked in on_gpus.items() if is_asked]
    asked = asked or ([f"{_FIELD} with a mixture of experts"] if experts else [])
    if not asked:
        return ""
    return (
        f"{' and '.join(asked)} needs GPUs, and there is none: set compute.gpusPerNode where there are, choose "
        "strategy.fsdp, or train a model without experts with contextParallelDegree, or with tensorParallelDegree and "
        "sequenceParallel: false"
    )


def spread_problem(
    megatron: MegatronSpec,
    *,
    heads: int,
    kv_heads: int,
    inner: int,
    layers: int,
    experts: int,
    vocabulary: int,
    processes: int = 0,
) -> str:
    """Why a model of these sizes cannot be spread evenly, and what to change; else empty.

    ``inner`` is how wide an MLP is, or one expert of ``experts``, where there are any; ``processes`` are those that
    degrees have to be of, where it is given.
    """

    def of_processes(name: str, degrees: Iterable[int]) -> list[int]:
        changed = ((each, megatron.model_copy(update={name: each})) for each in degrees)
        return [each for each, other in changed if can_be(other)]

    def can_be(other: MegatronSpec) -> bool:
        if processes % other.with_the_same_data or processes % other.apart:
            return False
        split = other.tensor_parallel_degree
        if split != tensor and not possible(heads // split, kv_heads // split, other.context_parallel_degree):
            return False
        # With chunks a single stage is another remedy's.
        whole = other.model_copy(update={"virtual_pipeline_parallel_degree": 1})
        return all(rule.check(whole) for rule in MegatronSpec.rules)

    tensor, stages = megatron.tensor_parallel_degree, megatron.pipeline_parallel_degree
    counted = [
        ("tensor_parallel_degree", tensor, heads, "attention heads"),
        ("tensor_parallel_degree", tensor, kv_heads, "heads of keys and values"),
        ("tensor_parallel_degree", tensor, 0 if experts else inner, "rows of up_proj"),
        ("pipeline_parallel_degree", 1 if any(ends_of(megatron)) else stages, layers, "layers"),
        ("expert_parallel_degree", megatron.expert_parallel_degree, experts, "experts"),
    ]
    for name, degree, number, what in counted:
        if not number % degree:
            continue
        numbers = [each for field, _, each, _ in counted if field == name]
        dividing = (each for each in range(1, min(number, MOST) + 1) if not any(other % each for other in numbers))
        fitting, field = of_processes(name, dividing), MegatronSpec.model_fields[name].alias
        remedy = f"set it to {either(fitting)}" if fitting else "leave it out, and sequenceParallel"
        if name == "pipeline_parallel_degree":
            remedy = _stages_remedy(fitting, stages, layers, megatron.virtual_pipeline_parallel_degree)
        return f"{_FIELD}.{field} is {degree}, but the model has {number} {what}, which it does not divide: {remedy}"
    if problem := _uneven_problem(megatron, layers) or _chunks_problem(megatron, layers):
        return problem
    if -(-vocabulary // tensor) * (tensor - 1) >= vocabulary:
        return (
            f"{_FIELD}.tensorParallelDegree is {tensor}, of which the last would have none of the {vocabulary} tokens "
            "of the vocabulary: set it to less"
        )
    if megatron.expert_parallel_degree > 1 and not experts:
        return (
            f"{_FIELD}.expertParallelDegree is {megatron.expert_parallel_degree}, but the model has no experts: leave "
            "it out"
        )
    if "moe_router_dtype" in megatron.overrides and not experts:
        return f"{_FIELD}.transformerConfigOverrides has moe_router_dtype, but the model has no routers: leave it out"
    whose = f"a process of tensorParallelDegree: {tensor}" if tensor > 1 else "the model"
    here, keys = heads // tensor, kv_heads // tensor
    if possible(here, keys, context := megatron.context_parallel_degree):
        return ""
    tried = of_processes("context_parallel_degree", range(1, min(here, MOST) + 1))
    return unshared_heads(f"{_FIELD}.contextParallelDegree", whose, here, keys, context, tried)


def _stages_remedy(fitting: Sequence[int], stages: int, layers: int, chunks: int) -> str:
    """What to change where so many ``stages`` do not divide ``layers``, as those that are ``fitting`` do."""
    uneven = even_enough(layers, stages, chunks)
    # Of these with chunks only those whose stages have whole ones; of a single stage there are none.
    whole = [each for each in fitting if chunks == 1 or (each > 1 and layers // each % chunks == 0)]
    if not fitting and not uneven:
        return "leave it out, and what transformerConfigOverrides has of stages"
    if not whole and not uneven:
        return f"leave virtualPipelineParallelDegree out and set pipelineParallelDegree to {either(fitting)}"
    degrees = f"it to {either(whole)}" if whole else ""
    ends = f"{_FIELD}.transformerConfigOverrides to {_in_words(uneven)}" if uneven else ""
    return f"set {', or '.join(filter(None, (degrees, ends)))}"


def _uneven_problem(megatron: MegatronSpec, layers: int) -> str:
    """Why stages cannot have as many of the model's ``layers`` as is said of the first and the last; else empty."""
    given = {name: number for name, number in zip(ENDS, ends_of(megatron), strict=True) if number is not None}
    stages = megatron.pipeline_parallel_degree
    others, left = stages - len(given), layers - sum(given.values())
    if not given or (left >= others and left % others == 0 if others else left == 0):
        return ""
    if others:
        which = f"the {others} other stages, which all need as many" if others > 1 else "the other stage"
        wrong = f"which leaves {max(left, 0)} of the model's {layers} layers for {which}"
    else:
        wrong = f"together {sum(given.values())}, but the model has {layers} layers"
    chunks = megatron.virtual_pipeline_parallel_degree
    ends = even_enough(layers, stages, chunks) or _nearest_end(given, layers, stages, chunks)
    remedy = f"{_in_words(ends)} would do" if ends else "leave it out, or set another pipelineParallelDegree"
    if layers % (stages * chunks) == 0:
        remedy = f"leave it out ({layers // stages} each){f', or set {_in_words(ends)}' if ends else ''}"
    return f"{_FIELD}.transformerConfigOverrides has {_in_words(given)}, {wrong}: {remedy}"


def _nearest_end(given: Mapping[str, int], layers: int, stages: int, chunks: int) -> dict[str, int]:
    """``given`` with another number of its last end, the nearest with which stages of whole ``chunks`` come out even.

    Empty where there is none, but all having as many.
    """
    name, number = [*given.items()][-1]

    def comes_out(other: int) -> bool:
        ends = {**given, name: other}
        each = layers_of_stages(layers, stages, *(ends.get(end) for end in ENDS))
        return sum(each) == layers and len({*each}) > 1 and all(part > 0 and part % chunks == 0 for part in each)

    nearest = min(filter(comes_out, range(1, min(layers, MOST))), key=lambda other: abs(other - number), default=None)
    return {} if nearest is None else {**given, name: nearest}


def _chunks_problem(megatron: MegatronSpec, layers: int) -> str:
    """Why the layers of stages, of ``layers`` in all, cannot be divided into chunks, and what to change; else empty."""
    chunks, each = megatron.virtual_pipeline_parallel_degree, sorted({*layers_of(megatron, layers)})
    common = gcd(*each)
    if common % chunks == 0:
        return ""
    fitting = [number for number in range(1, min(common, MOST) + 1) if common % number == 0]
    return (
        f"{_FIELD}.virtualPipelineParallelDegree is {chunks}, but stages have {either(each)} of the model's {layers} "
        f"layers, which it does not divide: set it to {either(fitting)}"
    )


def stages_in_words(megatron: MegatronSpec) -> str:
    """How many stages there are, and which of them have their own number of layers."""
    ends = zip(("first", "last"), ends_of(megatron), strict=True)
    uneven = [f"{number} in the {which}" for which, number in ends if number is not None]
    chunks = megatron.virtual_pipeline_parallel_degree
    each = f"of {chunks} chunks of other layers each" if chunks > 1 else "of other layers each"
    return ", ".join([f"{megatron.pipeline_parallel_degree}, {each}", *uneven])


def given_in_words(megatron: MegatronSpec) -> str:
    """Where it is described, and what is said in Megatron-Core's own words."""
    page, overrides = f"{_FIELD}: docs/megatron.md", _in_words(megatron.overrides)
    return f"{page}; transformerConfigOverrides: {overrides}" if overrides else page


def across_nodes_warning(spec: SFTJobSpec) -> str:
    """What to say when processes that share matrices, or tokens, are on several nodes; else empty."""
    megatron, here = megatron_of(spec), spec.compute.effective_processes_per_node
    if megatron is None or spec.compute.nodes == 1:
        return ""
    tensor = megatron.tensor_parallel_degree
    both = tensor * megatron.context_parallel_degree
    if here % both == 0:
        return ""
    name, degree, what = "tensorParallelDegree", tensor, "hidden states cross the network between nodes four times a"
    if here % tensor == 0:
        name, degree = "tensorParallelDegree x contextParallelDegree", both
        what = "queries, keys and values cross the network between nodes in every"
    return (
        f"{_FIELD}.{name} is {degree}, and a node has {here} processes: {what} layer; a degree that divides {here} "
        "stays within them"
    )


def no_gpu_warning(spec: SFTJobSpec, shape: ModelShape | None) -> str:
    """What to say of a job without GPUs that the trainer refuses for that; else empty. None is not known."""
    megatron = megatron_of(spec)
    if megatron is None or spec.compute.gpus_per_node:
        return ""
    problem = no_gpu_problem(megatron, shape.experts if shape else 0)
    return f"with compute.gpusPerNode: 0 the trainer refuses this job: {problem}" if problem else ""


def idle_warning(spec: SFTJobSpec, plan: PlanStatus) -> str:
    """What to say where stages have so few micro-batches that they wait for long; else empty."""
    stages, micro_batches, megatron = plan.pipeline_parallel, plan.gradient_accumulation, megatron_of(spec)
    chunks = megatron.virtual_pipeline_parallel_degree if megatron else 1
    # Chunks fill and drain in a part of the time; what a step lacks to a whole group of all stages is empty.
    enough = max(stages, -(-ENOUGH_A_STAGE // chunks) * stages)
    if stages == 1 or micro_batches is None:
        return ""
    if _idle(stages, micro_batches, chunks) <= _idle(stages, enough, chunks):
        return ""
    enough = max(enough, -(-micro_batches // stages) * stages)
    together = enough * plan.data_parallel
    if plan.global_batch_tokens is not None and plan.max_tokens_per_micro_batch is not None:
        larger = f"training.globalBatchTokens: {together * plan.max_tokens_per_micro_batch}"
    else:
        larger = f"training.globalBatchSize: {together * spec.training.micro_batch_size}"
    counted = f"{micro_batches} micro-batch{'es' * (micro_batches > 1)}"
    return (
        f"{_FIELD}.pipelineParallelDegree is {stages}, and a step has only {counted} for each copy of the model: its "
        f"stages wait for {_idle(stages, micro_batches, chunks):.0%} of the time; with {larger} it is "
        f"{_idle(stages, enough, chunks):.0%}, and less with fewer stages or more virtualPipelineParallelDegree"
    )


def _idle(stages: int, micro_batches: int, chunks: int) -> float:
    """Of a step the share in which a stage waits for others: 1F1B fills and drains once, by one of its ``chunks``."""
    computed = micro_batches if chunks == 1 else -(-micro_batches // stages) * stages
    return 1 - chunks * micro_batches / (chunks * computed + stages - 1)


def _in_words(overrides: Mapping[str, Any]) -> str:
    """As a manifest has them, on one line."""
    return ", ".join(f"{name}: {json.dumps(value)}" for name, value in overrides.items())
