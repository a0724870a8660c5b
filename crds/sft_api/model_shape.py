"""The sizes of a decoder, by which its parameters and its memory are counted. Pure: from the words of a config."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from .families import Family

Transformed = Literal["", "scaled", "capped"]
"""Logits: the products of hidden states and head as they are, multiplied by a number, or bent by tanh."""

_NORMS = {
    "before": ("input_layernorm", "post_attention_layernorm"),
    "after": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "both": (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    "around": (
        "input_layernorm",
        "post_self_attn_layernorm",
        "post_attention_layernorm",
        "post_mlp_layernorm",
    ),
}
"""Names of those of a block that are as wide as the model."""


@dataclass(frozen=True)
class Latent:
    """Sizes of attention whose queries and keys come from narrow ones."""

    queries: int
    """Width of the narrow queries; 0 where they are projected at once."""
    keys: int
    """Width of what keys and values come from."""
    rotated: int
    """Of the numbers of a head those that are rotated; of keys all heads have the same."""
    values: int
    """Numbers of a head of values."""


@dataclass(frozen=True)
class GatedDelta:
    """Sizes of a gated delta net."""

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    kernel: int
    """Tokens that its convolution sees."""

    @property
    def keys(self) -> int:
        """Width of all keys together, and of all queries."""
        return self.key_heads * self.key_size

    @property
    def values(self) -> int:
        """Width of all values together."""
        return self.value_heads * self.value_size

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys and values."""
        return 2 * self.keys + self.values


@dataclass(frozen=True)
class ModelShape:
    """A decoder of blocks with a gated MLP: attention, MLP, norms; embedding, last norm and head around them.

    In a mixture of experts each block has several MLPs, and a router that sends every token to some of them. Where
    blocks differ, ``kinds`` has the shape of a model of each of them, and what is said of a block here is of none.
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
    shared: int = 0
    """Width of the MLP that all tokens go to beside the experts; 0 where there is none."""
    latent: Latent | None = None
    delta: GatedDelta | None = None
    """Of the blocks that have a gated delta net for attention."""
    kinds: tuple["ModelShape", ...] = ()
    """Where blocks differ, a model of each kind of them; empty where all are alike."""
    order: tuple[int, ...] = ()
    """Which of the ``kinds`` each block is."""
    kind: str = field(default="", compare=False)
    """``model_type`` in its config."""
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
    def attended(self) -> int:
        """Width of what attention gives."""
        return self.heads * self.latent.values if self.latent else self.queries

    @property
    def distinct(self) -> tuple["ModelShape", ...]:
        """A model of each kind of blocks: itself where all are alike."""
        return self.kinds or (self,)

    @property
    def blocks(self) -> Sequence["ModelShape"]:
        """Of each block the one of ``distinct`` that it is of."""
        return [self.kinds[number] for number in self.order] if self.kinds else [self] * self.layers

    @property
    def linear(self) -> dict[str, tuple[int, int]]:
        """The linear layers of a block by name: (outputs, inputs); experts and routers are none."""
        width = self.hidden_size
        if not self.experts:
            fused = {"mlp.gate_up_proj": (2 * self.intermediate_size, width)} if self.family.fused else None
            return {**self._attention, **_gated_mlp("mlp", width, self.intermediate_size, fused)}
        if not self.shared:
            return self._attention
        weighed = {f"mlp.{self.family.shared_gate}": (1, width)} if self.family.shared_gate else {}
        return {**self._attention, **_gated_mlp(f"mlp.{self.family.shared}", width, self.shared), **weighed}

    @property
    def _attention(self) -> dict[str, tuple[int, int]]:
        width = self.hidden_size
        if (delta := self.delta) is not None:
            sizes = {"qkv": delta.channels, "z": delta.values, "b": delta.value_heads, "a": delta.value_heads}
            if self.family.delta == "together":
                sizes = {"qkvz": delta.channels + delta.values, "ba": 2 * delta.value_heads}
            projected = {f"linear_attn.in_proj_{name}": (outputs, width) for name, outputs in sizes.items()}
            return {**projected, "linear_attn.out_proj": (width, delta.values)}
        output = {"self_attn.o_proj": (width, self.attended)}
        if (latent := self.latent) is not None:
            queries = {"q_proj": (self.queries, width)}
            if latent.queries:
                queries = {"q_a_proj": (latent.queries, width), "q_b_proj": (self.queries, latent.queries)}
            # Of keys what is not rotated, and values.
            expanded = self.queries - self.heads * latent.rotated + self.attended
            keys = {"kv_a_proj_with_mqa": (latent.keys + latent.rotated, width), "kv_b_proj": (expanded, latent.keys)}
            return {f"self_attn.{name}": sizes for name, sizes in {**queries, **keys}.items()} | output
        if self.family.fused == "all":
            return {"self_attn.qkv_proj": (self.queries + 2 * self.keys, width), **output}
        return {
            "self_attn.q_proj": (self.queries * (2 if self.family.gated else 1), width),
            "self_attn.k_proj": (self.keys, width),
            "self_attn.v_proj": (self.keys, width),
            **output,
        }

    @property
    def readers(self) -> dict[tuple[str, ...], int]:
        """The linear layers of a block that read one tensor, which is there for them alone, and how wide that is.

        What the projection after attention reads is there anyway, where nothing comes between.
        """
        linear = self.linear
        first = tuple(name for name, (_, inputs) in self._attention.items() if inputs == self.hidden_size)
        if self.delta:
            first = tuple(name for name in first if name != "linear_attn.out_proj")
            found = {first: self.hidden_size, ("linear_attn.out_proj",): self.delta.values}
        else:
            first = tuple(name for name in first if name != "self_attn.o_proj")
            found = {first: self.hidden_size}
            narrow = ("self_attn.q_b_proj", "self_attn.kv_b_proj")
            found |= {(name,): linear[name][1] for name in narrow if name in linear}
            if self.family.gated or (self.latent and self.attended != self.queries):
                found[("self_attn.o_proj",)] = self.attended
        into = tuple(name for name in linear if name.startswith("mlp.") and not name.endswith("down_proj"))
        found[into] = self.hidden_size
        return found | {(name,): sizes[1] for name, sizes in linear.items() if name.endswith("down_proj")}

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
    def normed(self) -> Literal["", "head", "whole"]:
        """How queries and keys of a block are, where it has some."""
        return "" if self.delta else self.family.query_key_norm

    @property
    def norms(self) -> int:
        """Norms of the width of the model in a block."""
        return len(_NORMS[self.family.norms])

    @property
    def modules(self) -> dict[str, int]:
        """Parameters of each module of a block that has some of its own, by name."""
        found = {name: outputs * inputs for name, (outputs, inputs) in self.linear.items()}
        # A gated delta net has none, whatever the config says of attention.
        if self.attention_bias and not self.delta:
            for name, (outputs, _) in self._attention.items():
                found[name] += 0 if name.endswith("o_proj") else outputs
        if self.output_bias and not self.delta:
            found["self_attn.o_proj"] += self.hidden_size
        if self.family.sinks:
            found["self_attn"] = self.heads
        if (delta := self.delta) is not None:
            found["linear_attn"] = 2 * delta.value_heads
            found["linear_attn.conv1d"] = delta.channels * delta.kernel
            found["linear_attn.norm"] = delta.value_size
        if self.latent:
            narrow = {"q_a_layernorm": self.latent.queries, "kv_a_layernorm": self.latent.keys}
            found |= {f"self_attn.{name}": size for name, size in narrow.items() if size}
        if self.normed:
            over_heads = self.family.query_key_norm == "head"
            for name, whole in zip(self.family.query_key_norms, (self.queries, self.keys), strict=True):
                found[f"self_attn.{name}"] = self.head_size if over_heads else whole
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
        idle = (block.experts and (block.experts - block.chosen) * block._expert_parameters for block in self.blocks)
        return self.parameters - sum(idle)

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
        blocks = sum(block.block_parameters for block in self.blocks) if self.kinds else None
        return (self.layers * self.block_parameters if blocks is None else blocks) + self.root_parameters


def _gated_mlp(
    module: str, width: int, inner: int, first: Mapping[str, tuple[int, int]] | None = None
) -> dict[str, tuple[int, int]]:
    """The linear layers of one, by name: (outputs, inputs); ``first`` are those of another kind before its product."""
    usual = {f"{module}.gate_proj": (inner, width), f"{module}.up_proj": (inner, width)}
    return {**(first or usual), f"{module}.down_proj": (width, inner)}
