"""Which part of which canonical tensor the parameters of a pipeline stage hold: pure, without Megatron-Core.

A stage has ``embedding.weight``, ``layers.<number in the model>.…``, ``norm.weight`` and ``head``: the first those at
the beginning, the last those at the end, a tied head on the last stage being a copy of the embedding.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal

import torch

from sft_api.megatron import MODELS, ends_of, layers_of_stages, spread_problem, unknown_model
from sft_api.v1alpha1.megatron import MegatronSpec
from sft_trainer.boxes import Box, Rectangle, Writers, share_of_rows
from sft_trainer.errors import ConfigError
from sft_trainer.topology import ALONE, Topology

_EMBEDDING = "model.embed_tokens.weight"
_NORMS = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
}
_HEAD_NORMS = {
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
}
_NOWHERE: frozenset[str] = frozenset()
_TENSOR = frozenset({"tensor"})
_EXPERT = frozenset({"expert"})
_HOLDERS = frozenset({"shard", "sequence"})
_COPIES = frozenset({"expert copy"})


@dataclass(frozen=True)
class Sizes:
    """Of a decoder, as the config of transformers names them, and of its stages."""

    kind: str
    layers: int
    width: int
    inner: int
    """Rows of ``up_proj``; of one expert where there are any."""
    heads: int
    groups: int
    """Heads of keys and values."""
    head_size: int
    vocabulary: int
    tied: bool
    padding: int | None = None
    """Token by which transformers' embedding learns nothing: a tied head does."""
    experts: int = 0
    ends: tuple[int | None, int | None] = (None, None)
    """Layers of the first and of the last of several stages; None: as many as the others have."""
    chunks: int = 1
    """Of consecutive layers, that each of several stages has."""

    @classmethod
    def of(cls, config: Any, megatron: MegatronSpec | None = None) -> "Sizes":
        """Raises ``ConfigError`` for an architecture without rules."""
        if config.model_type not in FAMILIES:
            raise ConfigError(unknown_model(repr(config.model_type)))
        experts, padding = FAMILIES[config.model_type].experts, getattr(config, "pad_token_id", None)
        return cls(
            kind=config.model_type,
            layers=config.num_hidden_layers,
            width=config.hidden_size,
            inner=config.moe_intermediate_size if experts else config.intermediate_size,
            heads=config.num_attention_heads,
            groups=config.num_key_value_heads,
            head_size=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            vocabulary=config.vocab_size,
            tied=config.tie_word_embeddings,
            # Counted from the end where it is negative.
            padding=None if padding is None else padding % config.vocab_size,
            experts=config.num_experts if experts else 0,
            ends=ends_of(megatron) if megatron else (None, None),
            chunks=megatron.virtual_pipeline_parallel_degree if megatron else 1,
        )


@dataclass(frozen=True)
class Family:
    """What an architecture has besides what all have."""

    biases: bool = False
    """Of queries, keys and values."""
    head_norms: bool = False
    """Of queries and keys, head by head."""
    experts: bool = False
    """In every layer."""
    windows: Literal["", "all", "some"] = ""
    """Layers that attend within a window, where the config gives one."""


_OTHER = {
    "mistral": Family(windows="all"),
    "qwen2": Family(biases=True, windows="some"),
    "qwen3": Family(head_norms=True, windows="some"),
    "qwen3_moe": Family(head_norms=True, experts=True, windows="all"),
}
FAMILIES: Mapping[str, Family] = {name: _OTHER.get(name, Family()) for name in MODELS}


@dataclass(frozen=True)
class Piece:
    """A rectangle of a canonical tensor, and where it lies in a parameter."""

    name: str
    shape: tuple[int, ...]
    """Of the whole canonical tensor."""
    place: Rectangle
    start: tuple[int, ...]
    """Where it begins in the parameter."""
    split: frozenset[str] = _NOWHERE
    """Dimensions of the topology that the tensor is split over."""
    copy: bool = False
    """Whether another stage has it too, and saves it."""

    def of_rows(self, first: int, rows: int) -> "Piece | None":
        """What of it lies in ``rows`` of the parameter from ``first`` on, which begin there; None for nothing."""
        start = max(self.start[0], first)
        count = min(self.start[0] + self.place.sizes[0], first + rows) - start
        if count <= 0:
            return None
        offset = self.place.offsets[0] + start - self.start[0]
        place = Rectangle((offset, *self.place.offsets[1:]), (count, *self.place.sizes[1:]))
        return replace(self, place=place, start=(start - first, *self.start[1:]))

    def of(self, parameter: torch.Tensor) -> torch.Tensor:
        """The view of ``parameter`` that it is."""
        return parameter[Rectangle(self.start, self.place.sizes).within(Rectangle.whole(tuple(parameter.shape)))]


def check(sizes: Sizes, megatron: MegatronSpec, processes: int = 0) -> None:
    """Raise ``ConfigError`` for degrees over which this model cannot be spread evenly.

    Those that it names are such that ``processes`` can have, where it is given.
    """
    problem = spread_problem(
        megatron,
        heads=sizes.heads,
        kv_heads=sizes.groups,
        inner=sizes.inner,
        layers=sizes.layers,
        experts=sizes.experts,
        vocabulary=sizes.vocabulary,
        processes=processes,
    )
    if problem:
        raise ConfigError(problem)


def check_model(shapes: Mapping[str, tuple[int, ...]], sizes: Sizes) -> None:
    """Raise ``ConfigError`` where ``shapes``, by canonical name, are not those of the model that ``sizes`` describe."""
    known = {piece.name: piece.shape for name in parameter_shapes(sizes, ALONE) for piece in pieces(name, sizes, ALONE)}
    if different := sorted(name for name in {*shapes, *known} if shapes.get(name) != known.get(name)):
        name = different[0]
        raise ConfigError(
            f"strategy.megatron knows models of type {sizes.kind!r} in which {name} has the shape {known.get(name)}, "
            f"and here it has {shapes.get(name)}, as {len(different)} tensors differ: choose strategy.fsdp"
        )


def padded_rows(sizes: Sizes, topology: Topology) -> int:
    """Rows of embedding and head that a process has: all have as many, the last ones perhaps some of no token."""
    return -(-sizes.vocabulary // topology.tensor)


def own_layers(sizes: Sizes, topology: Topology) -> list[range]:
    """Numbers in the model of the layers of this process, of each chunk: these go around all stages in turn."""
    chunks = sizes.chunks if topology.pipeline > 1 else 1
    each = [layers // chunks for layers in layers_of_stages(sizes.layers, topology.pipeline, *sizes.ends)]
    stage = topology.place("pipeline")
    starts = (chunk * sum(each) + sum(each[:stage]) for chunk in range(chunks))
    return [range(start, start + each[stage]) for start in starts]


def parameter_shapes(sizes: Sizes, topology: Topology) -> dict[str, tuple[int, ...]]:
    """Name and shape of all parameters of the stage of this process."""
    family, tensor = FAMILIES[sizes.kind], topology.tensor
    vocabulary = (padded_rows(sizes, topology), sizes.width)
    stage, stages = topology.place("pipeline"), topology.pipeline
    shapes: dict[str, tuple[int, ...]] = {}
    if stage == 0:
        shapes["embedding.weight"] = vocabulary
    queries, pairs = sizes.heads * sizes.head_size // tensor, 2 * sizes.groups * sizes.head_size // tensor
    layer: dict[str, tuple[int, ...]] = {
        **dict.fromkeys(_NORMS, (sizes.width,)),
        "self_attention.linear_qkv.weight": (queries + pairs, sizes.width),
        "self_attention.linear_proj.weight": (sizes.width, queries),
    }
    if family.biases:
        layer["self_attention.linear_qkv.bias"] = (queries + pairs,)
    if family.head_norms:
        layer |= dict.fromkeys(_HEAD_NORMS, (sizes.head_size,))
    if family.experts:
        here = sizes.experts // topology.expert
        layer["mlp.router.weight"] = (sizes.experts, sizes.width)
        layer["mlp.experts.linear_fc1"] = (here, 2 * sizes.inner, sizes.width)
        layer["mlp.experts.linear_fc2"] = (here, sizes.width, sizes.inner)
    else:
        layer["mlp.linear_fc1.weight"] = (2 * sizes.inner // tensor, sizes.width)
        layer["mlp.linear_fc2.weight"] = (sizes.width, sizes.inner // tensor)
    for number in chain(*own_layers(sizes, topology)):
        shapes |= {f"layers.{number}.{name}": shape for name, shape in layer.items()}
    if stage == stages - 1:
        shapes["norm.weight"] = (sizes.width,)
        if stages > 1 or not sizes.tied:
            shapes["head"] = vocabulary
    return shapes


def pieces(name: str, sizes: Sizes, topology: Topology) -> Iterator[Piece]:
    """What the parameter ``name`` of the stage of this process holds; all of it, but rows of no token."""
    if name in ("embedding.weight", "head"):
        yield from _vocabulary(name, sizes, topology)
    elif name == "norm.weight":
        yield _whole("model.norm.weight", (sizes.width,))
    else:
        _, number, rest = name.split(".", 2)
        yield from _layer(f"model.layers.{number}.", rest, sizes, topology)


def is_of_experts(name: str) -> bool:
    """Whether the parameter ``name`` is one of experts, which other processes have the same of than of all the rest."""
    return ".experts." in name


def rows_each(name: str, rows: int, topology: Topology) -> int:
    """How many of the ``rows`` of the parameter ``name`` a process updates of those that have the same: at the most."""
    return share_of_rows(rows, topology.expert_copies if is_of_experts(name) else topology.holders, 0)[1]


def rows_of(name: str, rows: int, topology: Topology) -> tuple[int, int]:
    """Which of the ``rows`` of the parameter ``name`` this process updates: the first one, and how many."""
    if is_of_experts(name):
        return share_of_rows(rows, topology.expert_copies, topology.place("expert copy"))
    return share_of_rows(rows, topology.holders, topology.holder)


def held_pieces(name: str, rows: int, sizes: Sizes, topology: Topology) -> Iterator[Piece]:
    """What the rows of ``rows_of`` of the parameter ``name`` hold; pieces start so far from the first of these."""
    first, count = rows_of(name, rows, topology)
    split = _COPIES if is_of_experts(name) else _HOLDERS
    for piece in pieces(name, sizes, topology):
        held = piece.of_rows(first, count)
        if held is not None:
            yield replace(held, split=piece.split | split)


def stage_boxes(
    tensors: Mapping[str, torch.Tensor], kind: str, sizes: Sizes, topology: Topology, writers: Writers
) -> list[Box]:
    """Boxes of the ``kind`` of ``tensors``: by name of a parameter of this stage, its rows of ``rows_of``."""
    shapes = parameter_shapes(sizes, topology)
    return [
        Box(
            piece.name,
            kind,
            piece.shape,
            piece.place,
            piece.of(tensor.detach()),
            writes=not piece.copy and writers.is_writer(piece.split, piece.of(tensor).numel()),
        )
        for name, tensor in tensors.items()
        for piece in held_pieces(name, shapes[name][0], sizes, topology)
    ]


def _vocabulary(name: str, sizes: Sizes, topology: Topology) -> Iterator[Piece]:
    rows = padded_rows(sizes, topology)
    first = topology.place("tensor") * rows
    tokens = min(rows, sizes.vocabulary - first)
    if tokens <= 0:
        return
    copy = name == "head" and sizes.tied
    yield Piece(
        _EMBEDDING if copy or name != "head" else "lm_head.weight",
        (sizes.vocabulary, sizes.width),
        Rectangle((first, 0), (tokens, sizes.width)),
        (0, 0),
        _TENSOR,
        copy,
    )


def _layer(layer: str, name: str, sizes: Sizes, topology: Topology) -> Iterator[Piece]:
    inner, width = sizes.inner, sizes.width
    if name in _NORMS:
        yield _whole(layer + _NORMS[name], (width,))
    elif name in _HEAD_NORMS:
        yield _whole(layer + _HEAD_NORMS[name], (sizes.head_size,))
    elif name == "mlp.router.weight":
        yield _whole(layer + "mlp.gate.weight", (sizes.experts, width))
    elif name == "self_attention.linear_qkv.weight":
        yield from _grouped(layer, "weight", (width,), sizes, topology)
    elif name == "self_attention.linear_qkv.bias":
        yield from _grouped(layer, "bias", (), sizes, topology)
    elif name == "self_attention.linear_proj.weight":
        yield _columns(layer + "self_attn.o_proj.weight", (width, sizes.heads * sizes.head_size), topology)
    elif name == "mlp.linear_fc2.weight":
        yield _columns(layer + "mlp.down_proj.weight", (width, inner), topology)
    elif name == "mlp.linear_fc1.weight":
        rows = inner // topology.tensor
        for half, projection in enumerate(("gate_proj", "up_proj")):
            place = Rectangle((topology.place("tensor") * rows, 0), (rows, width))
            yield Piece(f"{layer}mlp.{projection}.weight", (inner, width), place, (half * rows, 0), _TENSOR)
    elif name == "mlp.experts.linear_fc1":
        for half, projection in enumerate(("gate_proj", "up_proj")):
            yield _experts(f"{layer}mlp.experts.{projection}.weight", (inner, width), half * inner, sizes, topology)
    elif name == "mlp.experts.linear_fc2":
        yield _experts(f"{layer}mlp.experts.down_proj.weight", (width, inner), 0, sizes, topology)
    else:
        raise ValueError(f"{name!r} is no parameter of a layer")


def _whole(name: str, shape: tuple[int, ...]) -> Piece:
    return Piece(name, shape, Rectangle.whole(shape), (0,) * len(shape))


def _columns(name: str, shape: tuple[int, int], topology: Topology) -> Piece:
    columns = shape[1] // topology.tensor
    place = Rectangle((0, topology.place("tensor") * columns), (shape[0], columns))
    return Piece(name, shape, place, (0, 0), _TENSOR)


def _experts(name: str, shape: tuple[int, int], row: int, sizes: Sizes, topology: Topology) -> Piece:
    """Of every expert of this process ``shape``, from ``row`` of the parameter on."""
    here = sizes.experts // topology.expert
    place = Rectangle((topology.place("expert") * here, 0, 0), (here, *shape))
    return Piece(name, (sizes.experts, *shape), place, (0, row, 0), _EXPERT)


def _grouped(layer: str, kind: str, columns: tuple[int, ...], sizes: Sizes, topology: Topology) -> Iterator[Piece]:
    """Queries, key and value of one group of heads after those of the other."""
    here, size, nil = sizes.groups // topology.tensor, sizes.head_size, (0,) * len(columns)
    queries = sizes.heads // sizes.groups * size
    row = 0
    for group in range(topology.place("tensor") * here, (topology.place("tensor") + 1) * here):
        for projection, rows in (("q_proj", queries), ("k_proj", size), ("v_proj", size)):
            yield Piece(
                f"{layer}self_attn.{projection}.{kind}",
                (rows * sizes.groups, *columns),
                Rectangle((group * rows, *nil), (rows, *columns)),
                (row, *nil),
                _TENSOR,
            )
            row += rows
