"""Rows of single tokens, trained in place of those of embeddings and head, all others of which stay as they are.

As peft has it (``trainable_token_indices``): a table keeps its weight under its name, and beside it has as many rows as
there are such tokens, in ``<table>.trained_rows.weight`` (tokens, width), in the order of the tokens' numbers. They
begin as the rows that they stand for. Of embeddings and head that are one tensor there is one such table.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from sft_api.adapters import within
from sft_trainer.boxes import WEIGHT, Box, Rectangle
from sft_trainer.errors import ConfigError
from sft_trainer.loss import OtherRows
from sft_trainer.names.canonical import Part

if TYPE_CHECKING:  # it computes with them
    from .causal_lm import CausalLM

_MODULE = "trained_rows"


def is_row(name: str) -> bool:
    """Whether the parameter ``name``, canonical or of a module, is of rows that are trained in place of others."""
    return name.endswith(f".{_MODULE}.weight")


def beside_rows(name: str) -> str:
    """What the module is called that the rows ``name`` are beside."""
    return name.removesuffix(f".{_MODULE}.weight")


class TrainedRows(nn.Module):
    """Rows of the tokens ``numbers``, ascending, in place of those of a ``table``, which may be the head too."""

    def __init__(self, numbers: Sequence[int], table: torch.Tensor, *, of_head: bool) -> None:
        super().__init__()
        self.numbers, self.of_head = tuple(numbers), of_head
        self.weight = nn.Parameter(torch.empty(len(numbers), table.shape[1], device=table.device, dtype=torch.float32))
        self._on_device = torch.tensor(self.numbers, device="cpu")

    def numbers_on(self, device: torch.device) -> torch.Tensor:
        """``numbers`` as a tensor there."""
        if self._on_device.device != device:
            self._on_device = self._on_device.to(device)
        return self._on_device

    def embedded(self, ids: torch.Tensor, found: torch.Tensor, scale: torch.Tensor | float) -> torch.Tensor:
        """``found``, the embeddings of ``ids`` (..., width), with those of these rows, times ``scale``, in their
        places."""
        numbers = self.numbers_on(ids.device)
        places = torch.searchsorted(numbers, ids).clamp_max(len(numbers) - 1)
        rows = functional.embedding(places, self.weight)
        rows = rows * (scale.to(rows.dtype) if isinstance(scale, torch.Tensor) else scale)
        return torch.where((numbers[places] == ids).unsqueeze(-1), rows, found)


def _in_place(embeddings: Any, inputs: tuple[torch.Tensor], found: torch.Tensor) -> torch.Tensor:
    """The forward hook of ``embeddings`` that have some."""
    rows: TrainedRows = embeddings.get_submodule(_MODULE)
    return rows.embedded(inputs[0], found, getattr(embeddings, "embed_scale", 1.0))


def other_rows(embeddings: Any, head: Any) -> OtherRows | None:
    """What ``head`` has in place of its own rows: where it is the ``embeddings``, what these have."""
    modules = (getattr(table, _MODULE, None) for table in (head, embeddings))
    rows = next((each for each in modules if each is not None and each.of_head), None)
    return None if rows is None else OtherRows(rows.numbers_on(rows.weight.device), rows.weight)


def rows_of(huggingface: Any) -> dict[str, TrainedRows]:
    """Those that a Hugging Face model has, by the names of the modules that they are beside."""
    end = f".{_MODULE}"
    found = ((name, module) for name, module in huggingface.named_modules() if isinstance(module, TrainedRows))
    return {name.removesuffix(end): module for name, module in found}


def _tied(huggingface: Any) -> bool:
    return huggingface.get_output_embeddings().weight is huggingface.get_input_embeddings().weight


def tables_with_rows(model: "CausalLM", numbers: Sequence[int], trained: Collection[str]) -> list[str]:
    """Names of the modules of ``model`` in which rows of the tokens ``numbers`` can be trained: embeddings and head,
    but for those that lie in the modules ``trained``, all of which is trained.

    Raises ``ConfigError`` for a model in which none can be, or that has no rows for them.
    """
    huggingface: Any = model.huggingface
    embeddings, head = huggingface.get_input_embeddings(), huggingface.get_output_embeddings()
    kind, names = huggingface.config.model_type, {module: name for name, module in huggingface.named_modules()}
    tables = [embeddings] if _tied(huggingface) else [embeddings, head]
    found = [table for table in tables if not within(f"{names[table]}.weight", trained)]
    instead = f"train {' and '.join(names[table].rpartition('.')[2] for table in tables)} whole"
    if head.bias is not None and tables[-1] in found:
        raise ConfigError(
            f"the head of a model of type {kind!r} has a bias, beside which peft trains no rows of tokens alone: "
            f"{instead} (training.trainableModules)"
        )
    is_plain = type(embeddings).forward is nn.Embedding.forward or hasattr(embeddings, "embed_scale")
    if embeddings in found and not is_plain:
        raise ConfigError(
            f"the embeddings of a model of type {kind!r} are a {type(embeddings).__name__}, in which no rows of tokens "
            f"are trained alone: {instead} (training.trainableModules)"
        )
    if found and numbers[-1] >= (rows := embeddings.weight.shape[0]):
        raise ConfigError(
            f"lora.trainableTokens names token {numbers[-1]} of the tokenizer, and the model has rows for {rows}: name "
            "it in model.addedTokens, which gives it one"
        )
    if embeddings in found and embeddings.padding_idx in numbers:
        raise ConfigError(
            f"config.json says that token {embeddings.padding_idx} is for padding (pad_token_id), of which embeddings "
            "learn nothing, and its row is to be trained: leave it out of lora.trainableTokens, or correct "
            "pad_token_id, null says that there is none"
        )
    return [names[table] for table in found]


def add_rows(model: "CausalLM", numbers: Sequence[int], trained: Collection[str]) -> list[str]:
    """Have rows of the tokens ``numbers``, ascending, trained in ``model`` (on the meta device); names of the modules
    that have them now. As ``tables_with_rows``, with its errors."""
    huggingface: Any = model.huggingface
    names, embeddings = tables_with_rows(model, numbers, trained), huggingface.get_input_embeddings()
    for name in names:
        table = huggingface.get_submodule(name)
        of_head = table is not embeddings or _tied(huggingface)
        table.add_module(_MODULE, TrainedRows(numbers, table.weight, of_head=of_head))
        if table is embeddings:
            table.register_forward_hook(_in_place)
    return names


@dataclass(frozen=True)
class InPlace:
    """Rows that a canonical tensor has in place of its own."""

    part: Part
    """(tokens, width)."""
    numbers: tuple[int, ...]
    """Which rows of the tensor they are, ascending."""


def rows_in_tables(model: "CausalLM", names: Iterable[str], numbers: Sequence[int]) -> dict[str, InPlace]:
    """What ``add_rows`` gives the modules ``names`` of ``model``, by the canonical name of what they are beside."""
    found = {}
    for name in names:
        shape = tuple(model.huggingface.get_parameter(f"{name}.weight").shape)
        (table,) = model.names.parts(f"{name}.weight", shape)
        (part,) = model.names.parts(f"{name}.{_MODULE}.weight", (len(numbers), *shape[1:]))
        found[table.name] = InPlace(part, tuple(numbers))
    return found


def first_rows(model: "CausalLM", boxes: Iterable[Box]) -> Iterator[Box]:
    """Boxes of tables, by which those of ``boxes`` that are of trained rows are filled: with the rows that they stand
    for."""
    rows = rows_of(model.huggingface)
    if not rows:
        return
    huggingface: Any = model.huggingface
    numbers, vocabulary = next(iter(rows.values())).numbers, huggingface.get_input_embeddings().weight.shape[0]
    beside = {each.part.name: table for table, each in rows_in_tables(model, rows, numbers).items()}
    for box in boxes:
        if (table := beside.get(box.name)) is None:
            continue
        (first, left), (count, columns) = box.place.offsets, box.place.sizes
        # Those next to one another at once: the mean that new ones begin as is computed for each.
        held = enumerate(numbers[first : first + count])
        for _, run in groupby(held, key=lambda each: each[1] - each[0]):
            (begin, number), *more = run
            sizes = (1 + len(more), columns)
            yield Box(
                table,
                WEIGHT,
                (vocabulary, box.shape[1]),
                Rectangle((number, left), sizes),
                box.local[begin : begin + sizes[0]],
            )
