"""Which models ``strategy.megatron`` can spread, over how many processes, and whether a machine has it. Pure but that.

The trainer refuses by the same words what it sees of a model itself.
"""

import importlib.util

from .model_shape import FAMILIES, ModelShape
from .v1alpha1.job import SFTJobSpec
from .v1alpha1.megatron import MegatronSpec, megatron_of
from .v1alpha1.status import PlanStatus

MODELS = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
"""Values of ``model_type`` for whose weights there are rules."""
MISSING = (
    "strategy.megatron needs Megatron-Core, which is not installed here: take a trainer image that is built with "
    "--target megatron (docs/megatron.md), on a machine of your own pip install megatron-core==0.16.1, or choose "
    "strategy.fsdp"
)
_FIELD = "strategy.megatron"
ENOUGH_A_STAGE = 4
"""Micro-batches of a step: with fewer its stages wait for long until all have one, and until all are done."""


def is_installed() -> bool:
    """Whether this machine has Megatron-Core, which is not imported for that."""
    try:
        return importlib.util.find_spec("megatron.core") is not None
    except ModuleNotFoundError:
        return False


def model_problem(megatron: MegatronSpec, shape: ModelShape) -> str:
    """Why a model of ``shape`` cannot be trained as ``megatron`` says, and what to change; else empty."""
    if shape.family not in [FAMILIES[name] for name in MODELS]:
        return unknown_model("this type of model")
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
    )


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
        "strategy.fsdp, or train a model without experts with tensorParallelDegree and sequenceParallel: false"
    )


def spread_problem(
    megatron: MegatronSpec, *, heads: int, kv_heads: int, inner: int, layers: int, experts: int, vocabulary: int
) -> str:
    """Why a model of these sizes cannot be spread evenly, and what to change; else empty.

    ``inner`` is how wide an MLP is, or one expert of ``experts``, where there are any.
    """
    tensor = megatron.tensor_parallel_degree
    counted = [
        ("tensorParallelDegree", tensor, heads, "attention heads"),
        ("tensorParallelDegree", tensor, kv_heads, "heads of keys and values"),
        ("tensorParallelDegree", tensor, 0 if experts else inner, "rows of up_proj"),
        ("pipelineParallelDegree", megatron.pipeline_parallel_degree, layers, "layers"),
        ("expertParallelDegree", megatron.expert_parallel_degree, experts, "experts"),
    ]
    for name, degree, number, what in counted:
        if not number % degree:
            continue
        numbers = [each for field, _, each, _ in counted if field == name]
        fitting = [each for each in range(1, number + 1) if not any(other % each for other in numbers)]
        return (
            f"{_FIELD}.{name} is {degree}, but the model has {number} {what}, which it does not divide: set it to "
            f"{_or(fitting)}"
        )
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
    return ""


def across_nodes_warning(spec: SFTJobSpec) -> str:
    """What to say when processes that share matrices are on several nodes; else empty."""
    megatron, here = megatron_of(spec), spec.compute.effective_processes_per_node
    if megatron is None or spec.compute.nodes == 1 or here % megatron.tensor_parallel_degree == 0:
        return ""
    return (
        f"strategy.megatron.tensorParallelDegree is {megatron.tensor_parallel_degree}, and a node has {here} "
        "processes: hidden states cross the network between nodes four times a layer; a degree that divides "
        f"{here} stays within them"
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
    stages, micro_batches = plan.pipeline_parallel, plan.gradient_accumulation
    enough = ENOUGH_A_STAGE * stages
    if stages == 1 or micro_batches is None or micro_batches >= enough:
        return ""
    together = enough * plan.data_parallel
    if plan.global_batch_tokens is not None and plan.max_tokens_per_micro_batch is not None:
        larger = f"training.globalBatchTokens: {together * plan.max_tokens_per_micro_batch}"
    else:
        larger = f"training.globalBatchSize: {together * spec.training.micro_batch_size}"
    counted = f"{micro_batches} micro-batch{'es' * (micro_batches > 1)}"
    return (
        f"{_FIELD}.pipelineParallelDegree is {stages}, and a step has only {counted} for each copy of the model: its "
        f"stages wait for {_idle(stages, micro_batches):.0%} of the time; with {larger} it is "
        f"{_idle(stages, enough):.0%}, and less with fewer stages"
    )


def _idle(stages: int, micro_batches: int) -> float:
    """Of a step the share in which a stage waits for others: 1F1B fills and drains once."""
    return (stages - 1) / (micro_batches + stages - 1)


def _or(numbers: list[int]) -> str:
    words = list(map(str, numbers))
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
