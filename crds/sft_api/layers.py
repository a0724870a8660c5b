"""Which layers of a model of a known shape are trained, get adapters, or are held in 4 bits: by name, of each block."""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TypeVar

from .adapters import ALL_LINEAR, meanings, means_experts, named, named_experts, within
from .model_shape import ModelShape
from .v1alpha1.job import SFTJobSpec
from .v1alpha1.lora import LoraSpec

Size = TypeVar("Size", bound=tuple[int, ...])

HEAD = "lm_head"
EMBEDDINGS, _NORM, _BLOCKS = "model.embed_tokens", "model.norm", "model.layers."
"""How the modules are called of the models that are counted here."""


def trained_weights(shape: ModelShape, spec: SFTJobSpec) -> tuple[Sequence[int], int]:
    """How many of the model's own weights ``spec`` trains: in each block, and outside of blocks."""
    if spec.trains_all:
        return [shape.block_parameters] * shape.layers, shape.root_parameters
    names = spec.training.trainable_modules
    return _named_weights(shape, frozenset(names)) if names else ([0] * shape.layers, 0)


def trained_in_rows_of(shape: ModelShape, spec: SFTJobSpec, multiple: int) -> int:
    """How many of all weights that ``spec`` trains, adapters among them, lie in matrices whose rows are a ``multiple``.

    The first factor of an adapter has a row of inputs for each of its rank, the second one of its rank for each output.
    """
    if spec.trains_all:
        return _in_rows_of(shape, None, multiple)
    names, found = frozenset(spec.training.trainable_modules or ()), 0
    if (lora := spec.lora) is not None:
        adapted = [sizes for block in adapted_of(shape, spec) for sizes in block.values()]
        found = sum(_adapter_in_rows_of(sizes, lora, multiple) for sizes in adapted)
    return found + (_in_rows_of(shape, names, multiple) if names else 0)


@lru_cache(maxsize=32)
def _in_rows_of(shape: ModelShape, names: frozenset[str] | None, multiple: int) -> int:
    """Of the model's own weights, or of those in modules with such ``names``."""
    inside = shape.in_rows_of(multiple)
    outside = {} if shape.hidden_size % multiple else _outside(shape) | {_NORM: 0}
    if names is None:
        return shape.layers * sum(inside.values()) + sum(outside.values())
    blocks = sum(_counted(inside, names, f"{_BLOCKS}{block}.") for block in range(shape.layers))
    return blocks + _counted(outside, names)


def _adapter_in_rows_of(sizes: tuple[int, ...], lora: LoraSpec, multiple: int) -> int:
    *experts, outputs, inputs = sizes
    rank = lora.rank_of_experts if experts else lora.rank
    first, second = (0 if inputs % multiple else inputs), (0 if rank % multiple else outputs)
    return math.prod(experts) * rank * (first + second)


@lru_cache(maxsize=32)
def _named_weights(shape: ModelShape, names: frozenset[str]) -> tuple[Sequence[int], int]:
    """The numbers of ``trained_weights`` where ``names`` are those of ``training.trainableModules``.

    They are asked for again and again by who tries shapes. What means nothing is left to others to refuse.
    """
    inside, outside = shape.modules, _outside(shape)
    blocks = [_counted(inside, names, f"{_BLOCKS}{block}.") for block in range(shape.layers)]
    return tuple(blocks), _counted(outside, names)


def _outside(shape: ModelShape) -> dict[str, int]:
    """Parameters of the modules outside of blocks."""
    head = 0 if shape.tied else shape.head_parameters
    return {EMBEDDINGS: shape.head_parameters, _NORM: shape.hidden_size, HEAD: head}


def _counted(modules: Mapping[str, int], names: frozenset[str], prefix: str = "") -> int:
    return sum(number for name, number in modules.items() if not meanings(f"{prefix}{name}.weight").isdisjoint(names))


@lru_cache(maxsize=32)
def names_of_modules(shape: ModelShape) -> frozenset[str]:
    """All that means a module of the model with weights, or one in which there are some."""
    inside = (f"{_BLOCKS}{block}.{name}" for block in range(shape.layers) for name in shape.modules)
    return frozenset().union(*(meanings(f"{name}.weight") for name in (*inside, *_outside(shape))))


def some_parameters(shape: ModelShape) -> list[str]:
    """Names of parameters, one of each module with weights of its own, of one block only."""
    first, *others = (name for name, number in _outside(shape).items() if number)
    inside = (f"{_BLOCKS}0.{name}" for name in shape.modules)
    return [f"{name}.weight" for name in (first, *inside, *others)]


def trains_module(module: str, spec: SFTJobSpec) -> bool:
    """Whether all of ``module``, of the model's own and outside of blocks, is trained."""
    return spec.trains_all or within(f"{module}.weight", spec.training.trainable_modules or ())


def adapted_of(shape: ModelShape, spec: SFTJobSpec) -> list[dict[str, tuple[int, ...]]]:
    """Of each block the linear layers that get adapters, (outputs, inputs), and the weights of experts that do,
    (experts, outputs, inputs); names that neither has are left to others to refuse."""
    lora = spec.lora
    if lora is None:
        return [{}] * shape.layers
    everything = tuple(shape.linear) if ALL_LINEAR in lora.target_modules else ()
    sizes = {**shape.linear, **shape.of_experts}
    return _layers_of(sizes, shape.layers, spec, (*lora.target_modules, *everything), tuple(lora.exclude_modules))


def linear_of(shape: ModelShape, spec: SFTJobSpec) -> tuple[list[str], list[str]]:
    """Full names of all linear layers but the head, and of those of them that get adapters."""
    adapted = adapted_of(shape, spec)
    every = [(block, name) for block in range(shape.layers) for name in shape.linear]
    full = {(block, name): f"{_BLOCKS}{block}.{name}" for block, name in every}
    return [*full.values()], [full[block, name] for block, name in every if name in adapted[block]]


def packed_of(shape: ModelShape, spec: SFTJobSpec) -> list[dict[str, tuple[int, int]]]:
    """Of each block the weights that are held in 4 bits, those that are not trained: by the names of linear layers,
    and of what experts have; how many rows of how many each."""
    if spec.quantised is None:
        return [{}] * shape.layers
    sizes = {**shape.linear, **shape.stacked} if spec.quantised == "nf4" else shape.stacked
    return _layers_of(sizes, shape.layers, spec, tuple(sizes))


def _layers_of(
    sizes: Mapping[str, Size],
    blocks: int,
    spec: SFTJobSpec,
    targets: tuple[str, ...],
    excluded: tuple[str, ...] = (),
) -> list[dict[str, Size]]:
    trained = tuple(spec.training.trainable_modules or ())
    chosen = _chosen(tuple(sizes), blocks, targets, excluded, trained)
    return [{name: sizes[name] for name in names} for names in chosen]


@lru_cache(maxsize=32)
def _chosen(
    layers: tuple[str, ...], blocks: int, targets: tuple[str, ...], excluded: tuple[str, ...], trained: tuple[str, ...]
) -> list[tuple[str, ...]]:
    """Those of the names ``layers``, of linear ones and of what experts have, that are chosen, of each block: asked
    for again and again by who tries shapes."""

    def is_chosen(name: str) -> bool:
        # What experts have is a parameter itself, and called by names of experts alone.
        is_meant, parameter = (named_experts, name) if means_experts(name) else (named, f"{name}.weight")
        return is_meant(name, targets) and not is_meant(name, excluded) and not within(parameter, trained)

    def of_block(block: int) -> tuple[str, ...]:
        return tuple(name for name in layers if is_chosen(f"{_BLOCKS}{block}.{name}"))

    if any(part.isdigit() for name in (*targets, *excluded, *trained) for part in name.split(".")):
        return [of_block(block) for block in range(blocks)]
    return [of_block(0)] * blocks
