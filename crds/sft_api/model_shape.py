"""The sizes of a decoder, by which its parameters and its memory are counted. Pure: from the words of a config."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

Transformed = Literal["", "scaled", "capped"]
"""Logits: the products of hidden states and head as they are, multiplied by a number, or bent by tanh."""


UNCOMPILED_EXPERTS = "has experts with biases, whose layers cannot be compiled"
"""Of models whose family is ``biased``."""


@dataclass(frozen=True)
class Family:
    """What the decoders of one ``model_type`` have in common, and differ in from those of another."""

    attention_bias: bool = False
    """Of the projections to queries, keys and values, where the config does not say."""
    query_key_norm: Literal["", "head", "whole"] = ""
    """A norm of queries and keys: over each head, or over all of them."""
    norms: Literal["before", "after", "both"] = "before"
    """Where the norms of a block stand: before attention and MLP, after them, or both."""
    norms_in_fp32: bool = False
    """Whether the weight of a norm is multiplied in fp32, before the result is rounded."""
    fused: bool = False
    """Whether queries, keys and values are one projection, and gate and up another."""
    tied: bool = False
    """Whether embedding and head are one, where the config does not say."""
    head_size: int | None = None
    """Where the config does not say; hidden size / heads when None."""
    mixture: bool = False
    """Whether a block has experts in place of one MLP."""
    expert_size: Literal["intermediate_size", "moe_intermediate_size"] = "intermediate_size"
    """Where it says how wide the MLP of each is."""
    weighed_in_fp32: bool = False
    """Whether the outputs of experts are multiplied by what the router gives in fp32."""
    biased: bool = False
    """Whether experts and routers have biases, and attention where the config does not say otherwise."""
    sinks: bool = False
    """Whether attention has a number for each head besides."""
    unsaid: tuple[tuple[str, int], ...] = ()
    """Sizes of a config that does not say them, where every other one of the type's does."""


FAMILIES: Mapping[str, Family] = {
    "llama": Family(),
    "mistral": Family(),
    "qwen2": Family(attention_bias=True),
    "gpt_oss": Family(norms_in_fp32=True, head_size=64, mixture=True, biased=True, sinks=True),
    "mixtral": Family(mixture=True, weighed_in_fp32=True),
    "olmoe": Family(query_key_norm="whole", mixture=True),
    "qwen3": Family(query_key_norm="head", head_size=128),
    "qwen3_moe": Family(query_key_norm="head", mixture=True, expert_size="moe_intermediate_size"),
    "phi3": Family(fused=True),
    "smollm3": Family(tied=True),
    "olmo2": Family(query_key_norm="whole", norms="after", norms_in_fp32=True),
    "gemma3_text": Family(
        query_key_norm="head",
        norms="both",
        norms_in_fp32=True,
        tied=True,
        head_size=256,
        unsaid=(("num_attention_heads", 8), ("num_key_value_heads", 4), ("vocab_size", 262208)),
    ),
}
"""The architectures that are counted by a formula; the trainer counts any other one as it is."""


_NORMS = {
    "before": ("input_layernorm", "post_attention_layernorm"),
    "after": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "both": (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
}
"""Names of those of a block that are as wide as the model."""


@dataclass(frozen=True)
class ModelShape:
    """A decoder of equal blocks with a gated MLP: attention, MLP, norms; embedding, last norm and head around them.

    In a mixture of experts each block has several MLPs, and a router that sends every token to some of them.
    """

    family: Family
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate_size: int
    vocabulary: int
    tied: bool
    """Whether embedding and head are one tensor."""
    attention_bias: bool
    """Of the projections to queries, keys and values."""
    output_bias: bool = False
    """Of the projection after attention."""
    logits: Transformed = ""
    """What becomes of the products of the last hidden states and the head."""
    experts: int = 0
    """MLPs of a block; 0 where there is one, to which all tokens go."""
    chosen: int = 0
    """Experts that a token is sent to."""
    positions: int | None = field(default=None, compare=False)
    """Tokens of the longest document that it was made for, where its config says so; no size of anything."""
    in_mxfp4: bool = field(default=False, compare=False)
    """Whether its files have experts in that, as its config says; no size either."""
    is_part: bool = field(default=False, compare=False)
    """Whether it is the text part of a model of several; no size either."""

    @property
    def queries(self) -> int:
        """Width of all queries together."""
        return self.heads * self.head_size

    @property
    def keys(self) -> int:
        """Width of all keys together, and of all values."""
        return self.kv_heads * self.head_size

    @property
    def linear(self) -> dict[str, tuple[int, int]]:
        """The linear layers of a block by name: (outputs, inputs); experts and routers are none."""
        attention = {
            "self_attn.q_proj": (self.queries, self.hidden_size),
            "self_attn.k_proj": (self.keys, self.hidden_size),
            "self_attn.v_proj": (self.keys, self.hidden_size),
        }
        mlp = {
            "mlp.gate_proj": (self.intermediate_size, self.hidden_size),
            "mlp.up_proj": (self.intermediate_size, self.hidden_size),
        }
        if self.family.fused:
            attention = {"self_attn.qkv_proj": (self.queries + 2 * self.keys, self.hidden_size)}
            mlp = {"mlp.gate_up_proj": (2 * self.intermediate_size, self.hidden_size)}
        attention["self_attn.o_proj"] = (self.hidden_size, self.queries)
        if self.experts:
            return attention
        return {**attention, **mlp, "mlp.down_proj": (self.hidden_size, self.intermediate_size)}

    @property
    def stacked(self) -> dict[str, tuple[int, int]]:
        """The weights of all experts of a block by name: (rows, of so many weights each)."""
        sizes = self.of_experts.items()
        if self.family.biased:
            # As biases are, inputs by outputs.
            return {name: (experts * inputs, outputs) for name, (experts, outputs, inputs) in sizes}
        return {name: (experts * outputs, inputs) for name, (experts, outputs, inputs) in sizes}

    @property
    def of_experts(self) -> dict[str, tuple[int, int, int]]:
        """Products with the weights of experts of a block by name: (experts, outputs, inputs)."""
        if not self.experts:
            return {}
        return {
            "mlp.experts.gate_up_proj": (self.experts, 2 * self.intermediate_size, self.hidden_size),
            "mlp.experts.down_proj": (self.experts, self.hidden_size, self.intermediate_size),
        }

    @property
    def norms(self) -> int:
        """Norms of the width of the model in a block."""
        return len(_NORMS[self.family.norms])

    @property
    def modules(self) -> dict[str, int]:
        """Parameters of each module of a block that has some of its own, by name."""
        found = {name: outputs * inputs for name, (outputs, inputs) in self.linear.items()}
        if self.attention_bias:
            projections = dict.fromkeys(("q_proj", "k_proj", "v_proj"), self.keys) | {"q_proj": self.queries}
            if self.family.fused:
                projections = {"qkv_proj": self.queries + 2 * self.keys}
            for name, outputs in projections.items():
                found[f"self_attn.{name}"] += outputs
        if self.output_bias:
            found["self_attn.o_proj"] += self.hidden_size
        if self.family.sinks:
            found["self_attn"] = self.heads
        if self.family.query_key_norm:
            over_heads = self.family.query_key_norm == "head"
            found["self_attn.q_norm"] = self.head_size if over_heads else self.queries
            found["self_attn.k_norm"] = self.head_size if over_heads else self.keys
        if self.experts:
            router = self.hidden_size + (1 if self.family.biased else 0)
            found["mlp.router" if self.family.biased else "mlp.gate"] = self.experts * router
            found["mlp.experts"] = self.experts * self._expert_parameters
        return found | dict.fromkeys(_NORMS[self.family.norms], self.hidden_size)

    def in_rows_of(self, multiple: int) -> dict[str, int]:
        """What of ``modules`` lies in matrices, biases of experts not among them, whose rows are a ``multiple``."""
        router = "mlp.router" if self.family.biased else "mlp.gate"
        matrices = {**self.linear, **self.stacked} | (
            {router: (self.experts, self.hidden_size)} if self.experts else {}
        )
        found: dict[str, int] = {}
        for name, (rows, columns) in matrices.items():
            module = "mlp.experts" if name in self.of_experts else name
            found[module] = found.get(module, 0) + (0 if columns % multiple else rows * columns)
        return found

    @cached_property
    def block_parameters(self) -> int:
        """Of one block."""
        return sum(self.modules.values())

    @property
    def _expert_parameters(self) -> int:
        biases = 2 * self.intermediate_size + self.hidden_size if self.family.biased else 0
        return 3 * self.hidden_size * self.intermediate_size + biases

    @property
    def active_parameters(self) -> int:
        """Of the whole model those that take part in the computation of one token."""
        return self.parameters - self.layers * (self.experts - self.chosen) * self._expert_parameters

    @property
    def head_parameters(self) -> int:
        """Of the head, which is the embedding where they are tied."""
        return self.vocabulary * self.hidden_size

    @property
    def root_parameters(self) -> int:
        """Of all that is in no block: embedding, last norm, head."""
        return self.head_parameters * (1 if self.tied else 2) + self.hidden_size

    @property
    def parameters(self) -> int:
        """Of the whole model; tied ones once."""
        return self.layers * self.block_parameters + self.root_parameters


_SHOWN = 40
"""Characters of a value that a sentence quotes."""
LARGEST_SIZE = 2**31 - 1
"""Of what a config counts: of larger ones memory is no number that says anything."""
_CHOSEN = "num_experts_per_tok"
_OF_EXPERTS = ("num_experts", "num_local_experts", _CHOSEN)
_SIZES = (
    *("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size", "num_hidden_layers"),
    "vocab_size",
)
_OPTIONAL = ("num_key_value_heads", "head_dim")
"""Of these sizes those that follow from others where a config does not say them."""
_WITHOUT_BIASES = ("mistral", "mixtral", "phi3")
"""Types of models that have none in attention whatever a config says: they do not read attention_bias."""


def shape_of(config: Mapping[str, Any]) -> ModelShape | None:
    """The shape that ``config``, the content of a model's config.json, describes; None where no formula counts it.

    Of a model of several parts it is that of its text part: no other is held.
    """
    is_part = isinstance(config.get("text_config"), Mapping)
    config = of_text(config)
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None or wrong_sizes(config):
        return None
    heads = _size(config, "num_attention_heads")
    hidden = _size(config, "hidden_size")
    layers, intermediate = _size(config, "num_hidden_layers"), _size(config, family.expert_size)
    vocabulary = _size(config, "vocab_size")
    if heads is None or hidden is None or layers is None or intermediate is None or vocabulary is None:
        return None
    if config.get("mlp_bias"):
        return None
    experts, chosen = 0, 0
    if family.mixture:
        # transformers writes the one as the other.
        experts = _size(config, "num_experts") or _size(config, "num_local_experts") or 0
        chosen = _size(config, "num_experts_per_tok") or 0
        if not experts or not chosen or _dense_blocks(config):
            return None
    bias, tied = config.get("attention_bias", family.biased), config.get("tie_word_embeddings")
    if config.get("model_type") in _WITHOUT_BIASES:
        bias = False
    own = family.attention_bias  # of families whose config has no such field
    return ModelShape(
        family=family,
        hidden_size=hidden,
        layers=layers,
        heads=heads,
        kv_heads=_size(config, "num_key_value_heads") or heads,
        head_size=_size(config, "head_dim") or family.head_size or hidden // heads,
        intermediate_size=intermediate,
        vocabulary=vocabulary,
        tied=family.tied if tied is None else bool(tied),
        attention_bias=own or bool(bias),
        output_bias=bool(bias) and not own,
        logits="capped" if config.get("final_logit_softcapping") else "",
        experts=experts,
        chosen=chosen,
        positions=_size(config, "max_position_embeddings"),
        in_mxfp4=family.biased and _is_in_mxfp4(config),
        is_part=is_part,
    )


def uncounted(config: Mapping[str, Any]) -> str:
    """Why ``shape_of`` has none for ``config``, as a relative clause on the model; empty where it has one."""
    if shape_of(config) is not None:
        return ""
    config = of_text(config)
    kind = config.get("model_type")
    family = FAMILIES.get(str(kind))
    if family is None:
        return f"of whose type {kind!r} there is no formula" if kind else "whose config.json names no model_type"
    if wrong := wrong_sizes(config):
        return f"whose config.json has no size in {', '.join(wrong)}"
    if config.get("mlp_bias"):
        return "whose MLPs have biases (mlp_bias), as those of no formula"
    if family.mixture and (differing := _dense_blocks(config)):
        fields = (f"{name}: {str(value)[:_SHOWN]}" for name, value in differing.items())
        return f"whose blocks differ ({', '.join(fields)})"
    names = (*_SIZES, family.expert_size, *((_CHOSEN,) if family.mixture else ()))
    lacking = [name for name in names if name not in _OPTIONAL and _size(config, name) is None]
    return f"whose config.json lacks {', '.join(lacking) or 'num_experts'}"


def wrong_sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``config`` by which a formula would count, and that are no such size; of other models none."""
    config = of_text(config)
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        return {}
    names = (*_SIZES, family.expert_size, *(_OF_EXPERTS if family.mixture else ()))
    wrong = {name: config[name] for name in names if config.get(name) is not None and _size(config, name) is None}
    experts = _size(config, "num_experts") or _size(config, "num_local_experts")
    chosen = _size(config, _CHOSEN)
    if family.mixture and experts and chosen and chosen > experts:
        wrong[_CHOSEN] = chosen
    return wrong


def of_text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """``config``, or that of the text part where it describes several; with the sizes that its type leaves unsaid.

    Whether embedding and head are one is then what ``config`` itself says.
    """
    text = config.get("text_config")
    if isinstance(text, Mapping):
        tied = config.get("tie_word_embeddings")
        config = {**text, **({} if tied is None else {"tie_word_embeddings": tied})}
    family = FAMILIES.get(str(config.get("model_type")))
    return config if family is None or not family.unsaid else {**dict(family.unsaid), **config}


def _dense_blocks(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields by which some blocks of a mixture of experts have one MLP: blocks are not equal then."""
    listed, every = config.get("mlp_only_layers"), config.get("decoder_sparse_step", 1)
    return ({"mlp_only_layers": listed} if listed else {}) | ({"decoder_sparse_step": every} if every != 1 else {})


def _is_in_mxfp4(config: Mapping[str, Any]) -> bool:
    given = config.get("quantization_config")
    return isinstance(given, Mapping) and given.get("quant_method") == "mxfp4"


def _size(config: Mapping[str, Any], name: str) -> int | None:
    """What ``config`` says of it; None where it says nothing, or something that is no size."""
    value = config.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= LARGEST_SIZE else None
