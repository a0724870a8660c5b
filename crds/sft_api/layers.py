"""Which layers of a model of a known shape are trained, get adapters, or are held in 4 bits: by name, of each block."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TypeVar

from .adapters import ALL_LINEAR, meanings, means_experts, named, named_experts, refused_by_peft, within
from .model_shape import ModelShape
from .v1alpha1.job import SFTJobSpec
from .v1alpha1.lora import LoraSpec

Size = TypeVar("Size", bound=tuple[int, ...])
Each = TypeVar("Each")

HEAD, _BLOCKS = "lm_head", "model.layers."
"""How the modules are called of the models that are counted here."""


ROWS_MULTIPLE = 64
"""Of rows where embeddings and head get more for added tokens: products with an odd number are slow on GPUs."""


def embeddings_of(shape: ModelShape) -> str:
    """What the embedding of a model is called."""
    return f"model.{shape.family.embeddings}"


def _last_norm(shape: ModelShape) -> str:
    return f"model.{shape.family.last_norm}"


def trained_weights(shape: ModelShape, spec: SFTJobSpec) -> tuple[Sequence[int], int]:
    """How many of the model's own weights ``spec`` trains: in each block, and outside of blocks."""
    if spec.trains_all:
        return [block.block_parameters for block in shape.blocks], shape.root_parameters
    names = spec.training.trainable_modules
    return _named_weights(shape, frozenset(names)) if names else ([0] * shape.layers, 0)


def trained_in_rows_of(shape: ModelShape, spec: SFTJobSpec, multiple: int) -> int:
    """How many of all weights that ``spec`` trains, adapters among them, lie in matrices whose rows are a ``multiple``.

    The first factor of an adapter has a row of inputs for each of its rank, the second one of its rank for each output.
    """
    return sum(_trained_in_rows_of(shape, spec, multiple))


def trained_in_matrices_of_blocks(shape: ModelShape, spec: SFTJobSpec) -> int:
    """How many of all weights that ``spec`` trains, adapters among them, lie in matrices of blocks, whatever their
    rows."""
    inside, _ = _trained_in_rows_of(shape, spec, 1)
    return inside


def _trained_in_rows_of(shape: ModelShape, spec: SFTJobSpec, multiple: int) -> tuple[int, int]:
    """In blocks, and outside of them."""
    if spec.trains_all:
        return _in_rows_of(shape, None, multiple)
    names, found = frozenset(spec.training.trainable_modules or ()), 0
    if (lora := spec.lora) is not None:
        adapted = [sizes for block in adapted_of(shape, spec) for sizes in block.values()]
        found = sum(_adapter_in_rows_of(sizes, lora, multiple) for sizes in adapted)
    inside, outside = _in_rows_of(shape, names, multiple) if names else (0, 0)
    rows = 0 if shape.hidden_size % multiple else parameters_of_rows(shape, spec)
    return found + inside, outside + rows


@lru_cache(maxsize=32)
def _in_rows_of(shape: ModelShape, names: frozenset[str] | None, multiple: int) -> tuple[int, int]:
    """Of the model's own weights, or of those in modules with such ``names``: in blocks, and outside of them."""
    inside = _of_blocks(shape, lambda kind: kind.in_rows_of(multiple))
    outside = {} if shape.hidden_size % multiple else _outside(shape) | {_last_norm(shape): 0}
    if names is None:
        return sum(sum(block.values()) for block in inside), sum(outside.values())
    blocks = sum(_counted(block, names, f"{_BLOCKS}{number}.") for number, block in enumerate(inside))
    return blocks, _counted(outside, names)


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
    inside = _of_blocks(shape, lambda kind: kind.modules)
    blocks = [_counted(block, names, f"{_BLOCKS}{number}.") for number, block in enumerate(inside)]
    return tuple(blocks), _counted(_outside(shape), names)


def _of_blocks(shape: ModelShape, made: Callable[[ModelShape], Each]) -> list[Each]:
    """What is ``made`` of each block: once of those that are alike."""
    found = [made(kind) for kind in shape.distinct]
    return [found[number] for number in shape.kind_of_each]


def _outside(shape: ModelShape) -> dict[str, int]:
    """Parameters of the modules outside of blocks."""
    head = 0 if shape.tied else shape.head_parameters
    usual = {embeddings_of(shape): shape.head_parameters, _last_norm(shape): shape.hidden_size, HEAD: head}
    return {**usual, **shape.outside}


def _counted(modules: Mapping[str, int], names: frozenset[str], prefix: str = "") -> int:
    return sum(number for name, number in modules.items() if not meanings(f"{prefix}{name}.weight").isdisjoint(names))


@lru_cache(maxsize=32)
def names_of_modules(shape: ModelShape) -> frozenset[str]:
    """All that means a module of the model with weights, or one in which there are some."""
    blocks = enumerate(_of_blocks(shape, lambda kind: kind.modules))
    inside = (f"{_BLOCKS}{number}.{name}" for number, block in blocks for name in block)
    return frozenset().union(*(meanings(f"{name}.weight") for name in (*inside, *_outside(shape))))


def some_parameters(shape: ModelShape) -> list[str]:
    """Names of parameters, one of each module with weights of its own, of one block of each kind only."""
    first, *others = (name for name, number in _outside(shape).items() if number)
    blocks = map(shape.kind_of_each.index, range(len(shape.distinct)))
    kinds = zip(blocks, shape.distinct, strict=True)
    inside = (f"{_BLOCKS}{block}.{name}" for block, kind in kinds for name in kind.modules)
    return [f"{name}.weight" for name in (first, *inside, *others)]


def trains_module(module: str, spec: SFTJobSpec) -> bool:
    """Whether all of ``module``, of the model's own and outside of blocks, is trained."""
    return spec.trains_all or within(f"{module}.weight", spec.training.trainable_modules or ())


def with_added_tokens(shape: ModelShape, spec: SFTJobSpec) -> ModelShape:
    """``shape`` with rows for the tokens that ``spec`` adds, as if it had none to spare, and its tokenizer none of
    these: a most."""
    if not spec.model.new_tokens:
        return shape
    rows = shape.vocabulary + len(spec.model.new_tokens)
    return replace(shape, vocabulary=-(-rows // ROWS_MULTIPLE) * ROWS_MULTIPLE)


def tables_with_rows(shape: ModelShape, spec: SFTJobSpec) -> list[str]:
    """Embeddings and head, but for those that are trained whole, where ``spec`` trains rows of tokens beside
    adapters."""
    if not spec.tokens_with_rows:
        return []
    tables = [embeddings_of(shape)] if shape.tied else [embeddings_of(shape), HEAD]
    return [table for table in tables if not trains_module(table, spec)]


def parameters_of_rows(shape: ModelShape, spec: SFTJobSpec) -> int:
    """Of the rows of tokens that ``spec`` trains beside adapters."""
    return len(spec.tokens_with_rows) * shape.hidden_size * len(tables_with_rows(shape, spec))


def adapted_of(shape: ModelShape, spec: SFTJobSpec) -> list[dict[str, tuple[int, ...]]]:
    """Of each block the linear layers that get adapters, (outputs, inputs), and the weights of experts that do,
    (experts, outputs, inputs); names that neither has are left to others to refuse."""
    lora = spec.lora
    if lora is None:
        return [{}] * shape.layers

    def of_block(kind: ModelShape) -> tuple[dict[str, tuple[int, ...]], tuple[str, ...]]:
        linear = {name: sizes for name, sizes in kind.linear.items() if not refused_by_peft(kind.kind, name)}
        everything = tuple(linear) if ALL_LINEAR in lora.target_modules else ()
        return {**linear, **kind.of_experts}, (*lora.target_modules, *everything)

    return _layers_of(shape, spec, of_block, tuple(lora.exclude_modules))


def linear_of(shape: ModelShape, spec: SFTJobSpec) -> tuple[list[str], list[str]]:
    """Full names of all linear layers but the head that can get adapters, and of those of them that do."""
    adapted, linear = adapted_of(shape, spec), all_linear(shape)
    chosen = {f"{_BLOCKS}{block}.{name}" for block, names in enumerate(adapted) for name in names}
    if (lora := spec.lora) is not None:
        targets, excluded, trained = lora.target_modules, lora.exclude_modules, spec.training.trainable_modules or ()
        chosen |= {
            name
            for name in linear
            if not name.startswith(_BLOCKS)
            and (ALL_LINEAR in targets or named(name, targets))
            and not (named(name, excluded) or within(f"{name}.weight", trained))
        }
    return linear, [name for name in linear if name in chosen]


def all_linear(shape: ModelShape) -> list[str]:
    """Full names of all linear layers but the head that can get adapters, in order."""
    of_blocks = _of_blocks(shape, lambda kind: [name for name in kind.linear if not refused_by_peft(kind.kind, name)])
    inside = [f"{_BLOCKS}{block}.{name}" for block, names in enumerate(of_blocks) for name in names]
    return inside + [name for name in shape.outside if name.endswith("_model_projection")]


def packed_of(shape: ModelShape, spec: SFTJobSpec) -> list[dict[str, tuple[int, int]]]:
    """Of each block the weights that are held in 4 bits, those that are not trained: by the names of linear layers,
    and of what experts have; how many rows of how many each."""
    if spec.quantised is None:
        return [{}] * shape.layers

    def of_block(kind: ModelShape) -> tuple[dict[str, tuple[int, int]], tuple[str, ...]]:
        sizes = {**kind.linear, **kind.stacked} if spec.quantised == "nf4" else kind.stacked
        return sizes, tuple(sizes)

    return _layers_of(shape, spec, of_block)


def _layers_of(
    shape: ModelShape,
    spec: SFTJobSpec,
    of_block: Callable[[ModelShape], tuple[Mapping[str, Size], tuple[str, ...]]],
    excluded: tuple[str, ...] = (),
) -> list[dict[str, Size]]:
    """Of each block the layers that are chosen; ``of_block`` gives those of one, with what names the chosen ones."""
    trained = tuple(spec.training.trainable_modules or ())

    def of_kind(kind: ModelShape) -> list[dict[str, Size]]:
        sizes, targets = of_block(kind)
        chosen = _chosen(tuple(sizes), shape.layers, targets, excluded, trained)
        return [{name: sizes[name] for name in names} for names in chosen]

    kinds = [of_kind(kind) for kind in shape.distinct]
    return [kinds[number][block] for block, number in enumerate(shape.kind_of_each)]


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
