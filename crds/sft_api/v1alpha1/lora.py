"""``spec.lora``: small matrices beside frozen weights are trained in place of the weights."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from sft_api.adapters import ALL_LINEAR, EXPERTS, adapter_parameters, means_experts

from .base import ApiModel, Rule, in_cel, matches
from .uris import ModelUri

Quantised = Literal["nf4", "mxfp4"]
"""A ``basePrecision`` that is no dtype: 4 bits for each weight, and what they are multiplied by."""

ModuleName = Annotated[
    str,
    Field(max_length=253),
    matches(
        rf"^({ALL_LINEAR}|[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*)$",
        "must be the name of a module, whole or its end (q_proj, self_attn.q_proj), or all-linear; no pattern",
    ),
]


WeightsName = Annotated[
    str,
    Field(max_length=253),
    matches(
        r"^[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*$",
        "must be the name of a module, whole or its end (layers.27, mlp.down_proj, lm_head); no pattern",
    ),
]


_MEANS_EXPERTS = f"name.matches({in_cel(EXPERTS)})"
_NAMES_EXPERTS = f"has(self.targetModules) && self.targetModules.exists(name, {_MEANS_EXPERTS})"


class LoraSpec(ApiModel):
    """Low-rank adapters (LoRA): the model stays as it is, and what is added to its weights is trained."""

    rank: Annotated[int, Field(ge=1, le=4096)] = Field(default=32, description="Rank of what is added to each weight.")
    alpha: Annotated[float, Field(gt=0, le=1_000_000)] | None = Field(
        default=None, description="What is added is scaled by alpha / rank; as rank when absent."
    )
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.0, description="Probability with which an input of an adapter is dropped in training."
    )
    expert_rank: Annotated[int, Field(ge=1, le=4096)] | None = Field(
        default=None,
        description="Rank of what is added to the weights of each expert, where targetModules names experts; rank when "
        "absent. Scaled as all else.",
    )
    target_modules: Annotated[list[ModuleName], Field(min_length=1, max_length=128)] = Field(
        default_factory=lambda: [ALL_LINEAR],
        description="Linear layers that get adapters, by name or the end of it (q_proj, self_attn.q_proj); "
        "all-linear: all of the model but its head. Experts of a mixture only by a name that says so (experts, "
        "experts.down_proj), also beside all-linear. A name that means nothing in the model is an error.",
    )
    exclude_modules: Annotated[list[ModuleName], Field(max_length=128)] = Field(
        default_factory=list, description="Of those, the ones that get none; by name or the end of it."
    )
    init_method: Literal["kaiming", "gaussian"] = Field(
        default="kaiming",
        description="First values of the matrix A: kaiming, uniform within 1 / sqrt(inputs) of 0, or gaussian, with a "
        "deviation of 1 / rank. B is 0: training starts from the model as it is.",
    )
    learning_rate_ratio: Annotated[float, Field(gt=0, le=1000)] | None = Field(
        default=None,
        description="By which the learning rate is multiplied for the matrix B alone (LoRA+): 16 as its authors have "
        "it. 1 when absent.",
    )
    use_dora: bool | None = Field(
        default=None,
        description="Whether adapters change the direction of each row of a weight, and a number of its own its "
        "magnitude (DoRA). false when absent.",
    )
    trainable_tokens: (
        Annotated[list[Annotated[str, Field(min_length=1, max_length=128)]], Field(min_length=1, max_length=1024)]
        | None
    ) = Field(
        default=None,
        description="Tokens of the tokenizer whose rows in embeddings and head are trained, and no others, as those of "
        "model.addedTokens are. See docs/added-tokens.md.",
    )
    adapter_uri: ModelUri | None = Field(
        default=None,
        description="Where adapters are from which training starts, as peft writes them (adapter_config.json, "
        "adapter_model.safetensors): of the kinds that model.uri has. rank, alpha, expertRank and targetModules must "
        "be theirs. New ones, which add nothing yet, when absent.",
    )
    base_precision: Literal["bf16", "fp32", "nf4", "mxfp4"] | None = Field(
        default=None,
        description="In which the frozen weights are held; adapters are fp32. As training.precision when absent. bf16 "
        "takes half the memory and loses nothing of a model that is stored in bf16, as most are. nf4 (QLoRA): weights "
        "of linear layers but the head, and of experts, in 4 bits, rounded when they are loaded, with a scale for each "
        "64 of them. mxfp4: experts of gpt-oss as they are published, in 4 bits, with nothing rounded. The others, and "
        "all that is computed, in training.precision.",
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            f"!has(self.targetModules) || !('{ALL_LINEAR}' in self.targetModules) || self.targetModules.all(name, "
            f"name == '{ALL_LINEAR}' || {_MEANS_EXPERTS})",
            "lora.targetModules is all-linear, or names of modules: not both, but for names of experts",
            lambda self: (
                ALL_LINEAR not in self.target_modules
                or all(name == ALL_LINEAR or means_experts(name) for name in self.target_modules)
            ),
        ),
        Rule(
            f"!has(self.excludeModules) || !('{ALL_LINEAR}' in self.excludeModules)",
            "lora.excludeModules names modules: with all-linear nothing would be left to train",
            lambda self: ALL_LINEAR not in self.exclude_modules,
        ),
        Rule(
            f"!has(self.expertRank) || {_NAMES_EXPERTS}",
            "lora.expertRank is that of experts: name them in lora.targetModules (experts), or leave it out",
            lambda self: self.expert_rank is None or self.names_experts,
        ),
        Rule(
            f"!(has(self.dropout) && self.dropout > 0.0) || !({_NAMES_EXPERTS})",
            "lora.dropout is of linear layers, and lora.targetModules names experts, which have none: leave one out",
            lambda self: not self.dropout or not self.names_experts,
        ),
        Rule(
            "!has(self.adapterUri) || !has(self.initMethod) || self.initMethod == 'kaiming'",
            "lora.initMethod is that of new adapters, and lora.adapterUri names some: leave one out",
            lambda self: self.adapter_uri is None or self.init_method == "kaiming",
        ),
        Rule(
            f"!(has(self.useDora) && self.useDora) || !({_NAMES_EXPERTS})",
            "lora.useDora is of linear layers, and lora.targetModules names experts: leave one out",
            lambda self: not self.use_dora or not self.names_experts,
        ),
        Rule(
            "!(has(self.useDora) && self.useDora) || !(has(self.dropout) && self.dropout > 0.0)",
            "lora.dropout is not there with lora.useDora, which computes with the sum of both: leave one out",
            lambda self: not self.use_dora or not self.dropout,
        ),
        Rule(
            "!(has(self.useDora) && self.useDora) || !has(self.adapterUri)",
            "lora.adapterUri names adapters as LoRA has them, and lora.useDora is true: leave one out",
            lambda self: not self.use_dora or self.adapter_uri is None,
        ),
    )

    @property
    def names_experts(self) -> bool:
        """Whether experts are to get adapters."""
        return any(map(means_experts, self.target_modules))

    @property
    def rank_of_experts(self) -> int:
        """Of the adapters of each expert."""
        return self.rank if self.expert_rank is None else self.expert_rank

    def parameters_on(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        """Of the adapters of layers with weights of these ``shapes`` (``adapter_parameters``)."""
        return adapter_parameters(shapes, self.rank, self.rank_of_experts, dora=bool(self.use_dora))

    @property
    def in_words(self) -> str:
        """Its ranks and alpha, for people."""
        of_experts = f", of experts {self.rank_of_experts}" if self.names_experts else ""
        return f"rank {self.rank}{of_experts}, alpha {self.effective_alpha:g}{', DoRA' * bool(self.use_dora)}"

    @property
    def scaling(self) -> float:
        """By which what an adapter adds is multiplied."""
        return self.effective_alpha / self.rank

    @property
    def quantised(self) -> Quantised | None:
        """In which frozen weights of layers and experts, or experts alone, are held; None where it is a dtype."""
        return self.base_precision if self.base_precision in ("nf4", "mxfp4") else None

    @property
    def effective_alpha(self) -> float:
        """``alpha``, or what it is when absent."""
        return self.rank if self.alpha is None else self.alpha
