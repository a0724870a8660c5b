"""Which models ``strategy.megatron`` can spread, over how many processes, and whether a machine has it. Pure but that.

The trainer refuses by the same words what it sees of a model itself.
"""

import importlib.util

from .model_shape import FAMILIES, ModelShape
from .v1alpha1.job import SFTJobSpec
from .v1alpha1.megatron import MegatronSpec, megatron_of

MODELS = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
"""Values of ``model_type`` for whose weights there are rules."""
MISSING = (
    "strategy.megatron needs Megatron-Core, which is not installed here: take a trainer image that is built with "
    "--target megatron (docs/megatron.md), on a machine of your own pip install megatron-core==0.16.1, or choose "
    "strategy.fsdp"
)
_FIELD = "strategy.megatron"


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


def _or(numbers: list[int]) -> str:
    words = list(map(str, numbers))
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
