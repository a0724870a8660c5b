"""The sizes of a decoder, by which its parameters and its memory are counted. Pure: from the words of a config."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, TypeVar

from .families import Family

Each = TypeVar("Each")

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
    "one": ("input_layernorm",),
}
"""Names of those of a block that are as wide as the model."""
_NORMS_BESIDE = ("post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2")
"""Of those besides where experts have some of their own."""


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
class StateSpace:
    """Sizes of a layer of Mamba 2."""

    heads: int
    groups: int
    """Of heads that share B and C."""
    head_size: int
    state_size: int
    kernel: int
    """Tokens that its convolution sees."""
    biased: bool = False
    """Whether that has biases."""

    @property
    def values(self) -> int:
        """Width of all heads together, and of their gate."""
        return self.heads * self.head_size

    @property
    def channels(self) -> int:
        """Of the convolution: values, B and C."""
        return self.values + 2 * self.groups * self.state_size

    @property
    def projected(self) -> int:
        """Width of what one projection gives: the gate, what goes into the convolution, and steps."""
        return self.values + self.channels + self.heads


@dataclass(frozen=True)
class ModelShape:
    """A decoder of blocks with an MLP: attention, MLP, norms; embedding, last norm and head around them.

    In a mixture of experts each block has several MLPs, and a router that sends every token to some of them. Some
    blocks have another layer in place of attention, or beside it, or one layer only. Where blocks differ, ``kinds`` has
    the shape of a model of each of them, and what is said of a block here is of none.
    """

    family: Family
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate_size: int
    """Width of an MLP; 0 in blocks without any."""
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
    attends: bool = True
    """Whether a block has attention."""
    delta: GatedDelta | None = None
    """Of the blocks that have a gated delta net for attention."""
    states: StateSpace | None = None
    """Of the blocks that have a layer of Mamba 2."""
    convolved: int = 0
    """Tokens that a short convolution sees, of the blocks that have one for attention; 0 in others."""
    dropped: bool = False
    """Whether dropout comes behind attention and MLP."""
    values_are_keys: bool = False
    """Whether values of attention are what keys are projected from, and not projected themselves."""
    hands_on: bool = False
    """Whether later blocks use its keys and values."""
    reuses: bool = False
    """Whether a block uses those of an earlier one, and has none itself."""
    input_width: int = 0
    """Of the input that each block has of its own, from a second table of embeddings; 0 where there is none."""
    inputs: int = 0
    """Rows of that table."""
    capped: bool = False
    """Whether the scores of attention are bent by tanh."""
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
    def kind_of_each(self) -> Sequence[int]:
        """Of each block which of ``distinct`` it is of."""
        return self.order if self.kinds else (0,) * self.layers

    @property
    def blocks(self) -> Sequence["ModelShape"]:
        """Of each block the one of ``distinct`` that it is of."""
        return [self.distinct[number] for number in self.kind_of_each]

    def named(self, name: str) -> str:
        """What the type calls the module of a block that most call ``name``, by which formulas know it."""
        return next((f"{own}{name[len(most) :]}" for most, own in self.family.names if _is_in(name, most)), name)

    @property
    def linear_of(self) -> dict[str, frozenset[str]]:
        """Names of ``linear`` by the part of a block that they are in."""
        parts = {"mixer": self._mixer, "mlp": self._of_mlp, "input": self._of_input}
        return {part: frozenset(map(self.named, names)) for part, names in parts.items()}

    def _all_named(self, found: Mapping[str, Each]) -> dict[str, Each]:
        return {self.named(name): each for name, each in found.items()}

    @property
    def linear(self) -> dict[str, tuple[int, int]]:
        """The linear layers of a block by name: (outputs, inputs); experts and routers are none."""
        return self._all_named({**self._mixer, **self._of_mlp, **self._of_input})

    @property
    def _of_input(self) -> dict[str, tuple[int, int]]:
        if not self.input_width:
            return {}
        gate, back = (self.input_width, self.hidden_size), (self.hidden_size, self.input_width)
        return {"per_layer_input_gate": gate, "per_layer_projection": back}

    @property
    def _of_mlp(self) -> dict[str, tuple[int, int]]:
        if not self.experts:
            return self._mlp("mlp", self.intermediate_size) if self.intermediate_size else {}
        if not self.shared:
            return {}
        weighed = {f"mlp.{self.family.shared_gate}": (1, self.hidden_size)} if self.family.shared_gate else {}
        return {**self._mlp(f"mlp.{self.family.shared}", self.shared), **weighed}

    def _mlp(self, module: str, inner: int) -> dict[str, tuple[int, int]]:
        first = {"gate_proj": inner, "up_proj": inner}
        if self.family.fused:
            first = {"gate_up_proj": 2 * inner}
        elif self.family.ungated:
            first = {"up_proj": inner}
        found = {f"{module}.{name}": (outputs, self.hidden_size) for name, outputs in first.items()}
        return {**found, f"{module}.down_proj": (self.hidden_size, inner)}

    @property
    def _mixer(self) -> dict[str, tuple[int, int]]:
        """Of what mixes tokens: attention, or what stands in its place or beside it."""
        found, width = self._attention if self.attends else {}, self.hidden_size
        if (states := self.states) is not None:
            found = {"mamba.in_proj": (states.projected, width), "mamba.out_proj": (width, states.values), **found}
        if self.convolved:
            found = {"conv.in_proj": (3 * width, width), "conv.out_proj": (width, width)}
        if (delta := self.delta) is not None:
            sizes = {"qkv": delta.channels, "z": delta.values, "b": delta.value_heads, "a": delta.value_heads}
            if self.family.delta == "together":
                sizes = {"qkvz": delta.channels + delta.values, "ba": 2 * delta.value_heads}
            elif self.family.delta == "each":
                sizes = {"q": delta.keys, "k": delta.keys, "v": delta.values, **sizes}
                del sizes["qkv"]
            found = {f"linear_attn.in_proj_{name}": (outputs, width) for name, outputs in sizes.items()}
            found["linear_attn.out_proj"] = (width, delta.values)
        return found

    @property
    def _attention(self) -> dict[str, tuple[int, int]]:
        width = self.hidden_size
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
        found = {"self_attn.q_proj": (self.queries * (2 if self.family.gated else 1), width)}
        if not self.reuses:
            found["self_attn.k_proj"] = (self.keys, width)
        if not (self.reuses or self.values_are_keys):
            found["self_attn.v_proj"] = (self.keys, width)
        return found | output

    @property
    def readers(self) -> dict[tuple[str, ...], int]:
        """The linear layers of a block that read one tensor, which is there for them alone, and how wide that is.

        What the projection after attention reads is there anyway, where nothing comes between.
        """
        return {tuple(map(self.named, names)): numbers for names, numbers in self._readers.items()}

    @property
    def _readers(self) -> dict[tuple[str, ...], int]:
        mixer, mlp = self._mixer, self._of_mlp
        behind = ("linear_attn.out_proj", "mamba.out_proj", "conv.out_proj", "self_attn.o_proj")
        narrow = ("self_attn.q_b_proj", "self_attn.kv_b_proj")
        alone = {"mamba.in_proj"} if self.attends else set()
        first = tuple(name for name in mixer if name not in (*behind, *narrow) and name not in alone)
        into = tuple(name for name in mlp if not name.endswith("down_proj"))
        if self.family.norms == "one" and first and into:
            first, into = first + into, ()
        found = dict.fromkeys((*((name,) for name in mixer if name in alone), first, into), self.hidden_size)
        between = self.family.gated or (self.latent and self.attended != self.queries)
        kept = (*narrow, *behind[:3], *(behind[3:] if between else ()))
        found |= {(name,): mixer[name][1] for name in kept if name in mixer}
        found |= {(name,): sizes[1] for name, sizes in mlp.items() if name.endswith("down_proj")}
        found |= {(name,): inputs for name, (_, inputs) in self._of_input.items()}
        return {names: numbers for names, numbers in found.items() if names}

    @property
    def stacked(self) -> dict[str, tuple[int, int]]:
        """The weights of all experts of a block by name: (rows, of so many weights each)."""
        sizes = self.of_experts.items()
        if self.family.turned:
            # Inputs by outputs.
            return {name: (experts * inputs, outputs) for name, (experts, outputs, inputs) in sizes}
        return {name: (experts * outputs, inputs) for name, (experts, outputs, inputs) in sizes}

    @property
    def of_experts(self) -> dict[str, tuple[int, int, int]]:
        """Products with the weights of experts of a block by name: (experts, outputs, inputs)."""
        if not self.experts:
            return {}
        first, gate = ("up_proj", 1) if self.family.ungated else ("gate_up_proj", 2)
        found = {
            f"mlp.experts.{first}": (self.experts, gate * self.intermediate_size, self.hidden_size),
            "mlp.experts.down_proj": (self.experts, self.hidden_size, self.intermediate_size),
        }
        return self._all_named(found)

    @property
    def normed(self) -> Literal["", "head", "whole"]:
        """How queries and keys of a block are, where it has some."""
        return self.family.query_key_norm if self.attends else ""

    @property
    def norms(self) -> int:
        """Norms of the width of the model in a block."""
        return len(self._norms)

    @property
    def has_norms_beside(self) -> bool:
        """Whether experts of a block, and their router, have norms of their own."""
        return self.family.beside and self.experts > 0

    @property
    def _of_norm(self) -> int:
        return self.hidden_size * (2 if self.family.layered else 1)

    @property
    def _norms(self) -> tuple[str, ...]:
        return _NORMS[self.family.norms] + (_NORMS_BESIDE if self.has_norms_beside else ())

    @property
    def modules(self) -> dict[str, int]:
        """Parameters of each module of a block that has some of its own, by name."""
        layers = {**self._mixer, **self._of_mlp, **self._of_input}
        found = {name: outputs * inputs for name, (outputs, inputs) in layers.items()}
        # What stands in the place of attention has none, whatever the config says of that.
        if self.attention_bias and self.attends:
            for name, (outputs, _) in self._attention.items():
                found[name] += 0 if name.endswith("o_proj") else outputs
        if self.output_bias and self.attends:
            found["self_attn.o_proj"] += self.hidden_size
        if self.family.sinks:
            found["self_attn"] = self.heads
        if (delta := self.delta) is not None:
            found["linear_attn"] = 2 * delta.value_heads
            found["linear_attn.conv1d"] = delta.channels * delta.kernel
            found["linear_attn.norm"] = delta.value_size
        if (states := self.states) is not None:
            found["mamba"] = 3 * states.heads
            found["mamba.conv1d"] = states.channels * (states.kernel + states.biased)
            if self.family.states_normed:
                found["mamba.norm"] = states.values
        if self.convolved:
            found["conv.conv"] = self.hidden_size * self.convolved
        if self.latent:
            narrow = {"q_a_layernorm": self.latent.queries, "kv_a_layernorm": self.latent.keys}
            found |= {f"self_attn.{name}": size for name, size in narrow.items() if size}
        if self.normed and self.family.query_key_norms:
            over_heads = self.family.query_key_norm == "head"
            for name, whole in zip(self.family.query_key_norms, (self.queries, self.keys), strict=True):
                found[f"self_attn.{name}"] = self.head_size if over_heads else whole
        if self.reuses:
            del found[f"self_attn.{self.family.query_key_norms[1]}"]
        if self.input_width:
            found["post_per_layer_input_norm"] = self.hidden_size
        found |= dict.fromkeys(self._norms, self._of_norm)
        if self.has_norms_beside:
            # What is multiplied by before it, and after it.
            found["router"] = self.hidden_size + self.experts
        if self.experts:
            found[self._router] = self.experts * (self.hidden_size + (1 if self.family.biased else 0))
            found["mlp.experts"] = self.experts * self._expert_parameters
        return self._all_named(found)

    @property
    def _router(self) -> str:
        return "mlp.router" if self.family.biased else "mlp.gate"

    def in_rows_of(self, multiple: int) -> dict[str, int]:
        """What of ``modules`` lies in matrices, biases of experts not among them, whose rows are a ``multiple``."""
        router = {self.named(self._router): (self.experts, self.hidden_size)} if self.experts else {}
        found: dict[str, int] = {}
        for name, (rows, columns) in {**self.linear, **self.stacked, **router}.items():
            module = name.rpartition(".")[0] if name in self.of_experts else name
            found[module] = found.get(module, 0) + (0 if columns % multiple else rows * columns)
        return found

    @cached_property
    def block_parameters(self) -> int:
        """Of one block."""
        return sum(self.modules.values())

    @property
    def _expert_parameters(self) -> int:
        biases = 2 * self.intermediate_size + self.hidden_size if self.family.biased else 0
        return (2 if self.family.ungated else 3) * self.hidden_size * self.intermediate_size + biases

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
        beside = sum(self.outside.values())
        return self.head_parameters * (1 if self.tied else 2) + self._of_norm + beside

    @property
    def outside(self) -> dict[str, int]:
        """Parameters of modules beside blocks, embedding, last norm and head: what makes inputs of blocks."""
        if not self.input_width:
            return {}
        every = self.layers * self.input_width
        return {
            "model.embed_tokens_per_layer": self.inputs * every,
            "model.per_layer_model_projection": self.hidden_size * every,
            "model.per_layer_projection_norm": self.input_width,
        }

    @property
    def parameters(self) -> int:
        """Of the whole model; tied ones once."""
        blocks = sum(block.block_parameters for block in self.blocks) if self.kinds else None
        return (self.layers * self.block_parameters if blocks is None else blocks) + self.root_parameters


def _is_in(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")
