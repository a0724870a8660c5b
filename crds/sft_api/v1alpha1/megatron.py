"""``spec.strategy.megatron``, and the rules that it has with other parts of the spec."""

from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from .base import ApiModel, Rule
from .model_config import DROPOUTS
from .transformer_config import OF_STAGES, TransformerConfigOverrides
from .words import does_not_divide

if TYPE_CHECKING:
    from .job import SFTJobSpec

MOST = 1024
"""That a degree may be."""
Degree = Annotated[int, Field(ge=1, le=MOST)]


class MegatronSpec(ApiModel):
    """Layers of Megatron-Core: matrices, stages of layers and experts spread over processes; the rest are copies."""

    tensor_parallel_degree: Degree = Field(
        default=1,
        description="Processes that share every matrix, best those of one node. Must divide the model's attention "
        "heads, its heads of keys and the width of its MLP.",
    )
    context_parallel_degree: Degree = Field(
        default=1,
        description="Processes that share the tokens of each micro-batch (Ulysses), best those of one node: its "
        "activations and logits are divided by it, and so are the shares of a step. Must divide the attention heads "
        "that tensorParallelDegree leaves each of them, and the heads of keys, or be a multiple of these.",
    )
    pipeline_parallel_degree: Degree = Field(
        default=1,
        description="Stages of consecutive layers, each of other processes, through which micro-batches go one after "
        "another (1F1B). Must divide the model's layers, where transformerConfigOverrides does not share them out. "
        "Experimental.",
    )
    virtual_pipeline_parallel_degree: Degree = Field(
        default=1,
        description="Chunks of consecutive layers that each stage has, one after every round of all stages "
        "(interleaved 1F1B): stages wait less, send more, and keep more micro-batches. Must divide the layers of every "
        "stage. Experimental.",
    )
    expert_parallel_degree: Degree = Field(
        default=1,
        description="Processes over which the experts of a layer are spread, neighbours of one stage. Must divide the "
        "model's experts.",
    )
    sequence_parallel: bool | None = Field(
        default=None,
        description="Whether the processes that share matrices share tokens between them: less memory of activations. "
        "true when absent and tensorParallelDegree is more than 1.",
    )
    transformer_config_overrides: TransformerConfigOverrides | None = Field(
        default=None,
        description="Fields of Megatron-Core's TransformerConfig, by its names, that are others in this job: those "
        "that are listed here and no others.",
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!has(self.sequenceParallel) || !self.sequenceParallel || self.tensorParallelDegree > 1",
            "strategy.megatron.sequenceParallel needs tensorParallelDegree, more than 1: it is those processes that "
            "share tokens",
            lambda self: not self.sequence_parallel or self.tensor_parallel_degree > 1,
        ),
        Rule(
            "self.expertParallelDegree == 1 || self.tensorParallelDegree == 1 || !has(self.sequenceParallel) || "
            "self.sequenceParallel",
            "strategy.megatron.expertParallelDegree with tensorParallelDegree needs sequenceParallel: leave it out",
            lambda self: self.expert_parallel_degree == 1 or self.shares_tokens or self.tensor_parallel_degree == 1,
        ),
        Rule(
            "self.virtualPipelineParallelDegree == 1 || self.pipelineParallelDegree > 1",
            "strategy.megatron.virtualPipelineParallelDegree needs pipelineParallelDegree, more than 1: it is those "
            "stages that have chunks",
            lambda self: self.virtual_pipeline_parallel_degree == 1 or self.pipeline_parallel_degree > 1,
        ),
        Rule(
            "self.pipelineParallelDegree > 1 || !has(self.transformerConfigOverrides) || "
            f"({' && '.join(f'!has(self.transformerConfigOverrides.{name})' for name in OF_STAGES)})",
            f"strategy.megatron.transformerConfigOverrides: {', '.join(OF_STAGES)} are about stages, and need "
            "pipelineParallelDegree, more than 1",
            lambda self: self.pipeline_parallel_degree > 1 or self.overrides.keys().isdisjoint(OF_STAGES),
        ),
    )

    @property
    def shares_tokens(self) -> bool:
        """``sequence_parallel``, or what it is when absent."""
        return self.tensor_parallel_degree > 1 if self.sequence_parallel is None else self.sequence_parallel

    @property
    def overrides(self) -> dict[str, Any]:
        """What ``transformer_config_overrides`` sets, by name."""
        return self.transformer_config_overrides.given if self.transformer_config_overrides else {}

    @property
    def with_the_same_data(self) -> int:
        """Processes that compute on the same micro-batches together."""
        return self.tensor_parallel_degree * self.context_parallel_degree * self.pipeline_parallel_degree

    @property
    def apart(self) -> int:
        """Processes that have other layers, or other experts of one."""
        return self.pipeline_parallel_degree * self.expert_parallel_degree


_OF_ITS_MODELS = "attention_dropout"
"""The only field of ``DROPOUTS`` that the models have which it has rules for."""
_MEGATRON = "self.strategy.megatron"
WITH_THE_SAME_DATA = (
    f"{_MEGATRON}.tensorParallelDegree * {_MEGATRON}.contextParallelDegree * {_MEGATRON}.pipelineParallelDegree"
)
"""``MegatronSpec.with_the_same_data`` in CEL, where there is one."""
WITH_THE_SAME_DATA_IN_WORDS = "tensorParallelDegree x contextParallelDegree x pipelineParallelDegree"
_ABSENT = f"!has(self.strategy) || !has({_MEGATRON})"
_OVERRIDES = "self.model.configOverrides"


def megatron_of(spec: "SFTJobSpec") -> MegatronSpec | None:
    """``spec.strategy.megatron``."""
    return spec.strategy.megatron if spec.strategy else None


def _drops(spec: "SFTJobSpec") -> bool:
    overrides = spec.model.config_overrides
    return overrides is not None and any(getattr(overrides, name) for name in DROPOUTS)


def _spread(spec: "SFTJobSpec") -> bool:
    megatron = megatron_of(spec)
    return megatron is None or spec.compute.processes % megatron.with_the_same_data == 0


def _experts(spec: "SFTJobSpec") -> bool:
    megatron = megatron_of(spec)
    return megatron is None or spec.compute.processes % megatron.apart == 0


def _spread_in_numbers(spec: "SFTJobSpec") -> str:
    megatron = megatron_of(spec) or MegatronSpec()
    degrees = (megatron.tensor_parallel_degree, megatron.context_parallel_degree, megatron.pipeline_parallel_degree)
    product = f"{' x '.join(map(str, degrees))} = " if sum(each > 1 for each in degrees) > 1 else ""
    return does_not_divide(megatron.with_the_same_data, spec.compute.processes, "processes", product)


def _experts_in_numbers(spec: "SFTJobSpec") -> str:
    megatron = megatron_of(spec) or MegatronSpec()
    stages, processes = megatron.pipeline_parallel_degree, spec.compute.processes
    if processes % stages:
        return f"it is {megatron.expert_parallel_degree}, and there are {processes} processes and {stages} stages"
    whose = "processes of a stage" if stages > 1 else "processes"
    return does_not_divide(megatron.expert_parallel_degree, processes // stages, whose)


def megatron_rules(processes: str) -> tuple[Rule, ...]:
    """Of a spec whose number of processes is the CEL expression ``processes``."""
    return (
        Rule(
            f"{_ABSENT} || ({processes}) % ({WITH_THE_SAME_DATA}) == 0",
            f"strategy.megatron.{WITH_THE_SAME_DATA_IN_WORDS} must divide the number of processes (compute.nodes x "
            "processes per node)",
            _spread,
            remedy=_spread_in_numbers,
        ),
        Rule(
            f"{_ABSENT} || ({processes}) % ({_MEGATRON}.pipelineParallelDegree * {_MEGATRON}.expertParallelDegree) "
            "== 0",
            "strategy.megatron.expertParallelDegree must divide the processes of a stage (compute.nodes x processes "
            "per node, divided by pipelineParallelDegree)",
            _experts,
            remedy=_experts_in_numbers,
        ),
        Rule(
            f"{_ABSENT} || !has(self.lora)",
            "strategy.megatron trains all weights: leave lora out, or choose strategy.fsdp",
            lambda self: megatron_of(self) is None or self.lora is None,
        ),
        Rule(
            f"{_ABSENT} || !has(self.training.trainableModules)",
            "strategy.megatron trains all weights: leave training.trainableModules out, or choose strategy.fsdp",
            lambda self: megatron_of(self) is None or self.training.trainable_modules is None,
        ),
        Rule(
            f"{_ABSENT} || !has(self.training.compile) || !self.training.compile",
            "strategy.megatron knows no training.compile: leave it out, or choose strategy.fsdp",
            lambda self: megatron_of(self) is None or not self.training.compile,
        ),
        Rule(
            f"{_ABSENT} || !has(self.training.optimizer.type) || self.training.optimizer.type == 'adamw'",
            "strategy.megatron knows no training.optimizer.type: muon; leave it out, or choose strategy.fsdp",
            lambda self: megatron_of(self) is None or not self.training.optimizer.is_muon,
        ),
        Rule(
            f"{_ABSENT} || self.training.optimizer.stateDtype == 'fp32'",
            "strategy.megatron needs training.optimizer.stateDtype: fp32; or choose strategy.fsdp",
            lambda self: megatron_of(self) is None or self.training.optimizer.state_dtype == "fp32",
        ),
        Rule(
            f"{_ABSENT} || !has(self.training.parameterDtype) || self.training.parameterDtype == 'fp32'",
            "strategy.megatron needs training.parameterDtype: fp32; or choose strategy.fsdp",
            lambda self: megatron_of(self) is None or self.training.held_dtype == "fp32",
        ),
        Rule(
            f"{_ABSENT} || self.training.routerAuxLossCoefficient == 0.0",
            "strategy.megatron knows no training.routerAuxLossCoefficient, which is a loss of all layers together: "
            "leave it out, or choose strategy.fsdp",
            lambda self: megatron_of(self) is None or self.training.router_aux_loss_coefficient == 0,
        ),
        Rule(
            f"{_ABSENT} || !has({_OVERRIDES}) || ("
            + " && ".join(f"(!has({_OVERRIDES}.{name}) || {_OVERRIDES}.{name} == 0.0)" for name in DROPOUTS)
            + ")",
            f"strategy.megatron knows no dropout: set {_OF_ITS_MODELS} in model.configOverrides to 0 and leave the "
            "others out, which its models do not have; or choose strategy.fsdp",
            lambda self: megatron_of(self) is None or not _drops(self),
        ),
    )
