"""Adapters that a run begins with, as peft writes them, into boxes: what an export writes is read back here."""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sft_api.peft_files import FIELD, FILES, PeftFiles, StoredTensor, plain_name
from sft_api.place import EXPORT_ADAPTER
from sft_api.v1alpha1.lora import LoraSpec

from .adapter_files import read_adapters
from .boxes import Box, Rectangle
from .errors import ConfigError, ModelError
from .export.plan import Entry, plan_adapter
from .models.causal_lm import CausalLM
from .models.lora import LoraLinear, is_adapter
from .models.routers import within_routers
from .models.trained_rows import is_row, rows_of
from .models.weight_files import opened
from .trainable import Trainable


@dataclass(frozen=True)
class FirstAdapters:
    """The values of a folder, for the adapters and modules that one run trains."""

    uri: str
    folder: Path
    files: PeftFiles
    sources: Mapping[str, tuple[Entry, str]]
    """By the canonical name of what they hold: how it lies in a tensor of the file, and the key of that."""
    digest: str
    """Of both files."""

    @classmethod
    def of(cls, folder: Path, uri: str, lora: LoraSpec, model: CausalLM, trainable: Trainable) -> "FirstAdapters":
        """Those in ``folder``, from ``uri``, for ``model`` on the meta device, which has the adapters of ``lora``.

        Raises ``ModelError`` for files that cannot be used, ``ConfigError`` where the run has other adapters than they.
        """
        routers, named = within_routers(model.huggingface), model.huggingface.named_modules()
        modules = [(name, part) for name, part in named if isinstance(part, nn.Linear) and part not in routers]
        head = model.huggingface.get_output_embeddings()  # type: ignore[operator]
        linear = [name for name, part in modules if part is not head and not is_adapter(f"{name}.weight")]
        adapted = [name for name, part in modules if isinstance(part, LoraLinear)]
        files = read_adapters(folder, uri, lora, linear, adapted)
        rows = next(([*each.numbers] for each in rows_of(model.huggingface).values()), [])
        if other := files.other_tokens(rows):
            raise ConfigError(
                f"{uri}, which {FIELD} names, has rows of tokens {other} (trainable_token_indices), and this run "
                f"trains those of {str(rows) if rows else 'none':.200}: name the same ones in lora.trainableTokens "
                "or model.addedTokens, by what they are in the tokenizer"
            )
        sources = _sources(uri, folder, files, model, trainable)
        return cls(uri, folder, files, sources, _digest(folder))

    @torch.no_grad()
    def fill(self, boxes: Sequence[Box]) -> None:
        """Give those of ``boxes`` that the file has something of its values. Raises ``ModelError`` for such as are no
        numbers, or where the file is not what it was."""
        with opened(self.folder / EXPORT_ADAPTER) as reader:
            for box in boxes:
                for part, values in self._values(box, reader):
                    box.write(values, part)

    def _values(self, box: Box, reader: Any) -> Iterator[tuple[Rectangle, torch.Tensor]]:
        """Rectangles of the tensor of ``box`` that are within it, and what they begin as; none of what is not here."""
        if box.name not in self.sources:
            return
        entry, key = self.sources[box.name]
        places = self.files.token_places if is_row(box.name) else None
        for place, values in _read(entry, key, box, reader, places):
            if not bool(values.isfinite().all()):
                raise ModelError(
                    f"{self.uri}: tensor {key!r} holds NaN or infinities: no step could be finite, name other adapters"
                )
            yield place, values


def _read(
    entry: Entry, key: str, box: Box, reader: Any, rows: Sequence[int] | None
) -> Iterator[tuple[Rectangle, torch.Tensor]]:
    """Where the tensor has its ``rows`` in another order, these are of the first, the second and so on of the box's."""
    first = entry.parts[0]
    if rows is not None:
        yield box.place, reader.get_tensor(key)[rows][box.place.within(Rectangle.whole(first.shape))]
        return
    if entry.shape == first.shape:
        yield box.place, reader.get_slice(key)[box.place.within(Rectangle.whole(first.shape))]
        return
    # Experts, which lie otherwise in the file: small ones, or rows of several tensors one after the other.
    flat, begin = reader.get_tensor(key).flatten(), 0
    for part in entry.parts:
        end = begin + math.prod(part.place.sizes)
        if part.name == box.name and (common := part.place.overlap(box.place)) is not None:
            order = part.order or tuple(range(len(part.shape)))
            stored = flat[begin:end].view([part.place.sizes[dimension] for dimension in order])
            whole = stored.permute([order.index(dimension) for dimension in range(len(order))])
            yield common, whole[common.within(part.place)]
        begin = end


def _sources(
    uri: str, folder: Path, files: PeftFiles, model: CausalLM, trainable: Trainable
) -> dict[str, tuple[Entry, str]]:
    """Of all that ``trainable`` trains of ``model``, where it lies in ``files``. Modules that are not there begin as
    those of the model, adapters must be there, and nothing may be left."""
    entries = {plain_name(entry.name): entry for entry in plan_adapter(model, trainable.trains).files[0].entries}
    for name, entry in entries.items():
        stored = files.tensors.get(name)
        if stored is None and is_adapter(entry.parts[0].name) and not is_row(entry.parts[0].name):
            raise ConfigError(
                f"{uri}, which {FIELD} names, has no {name}, and lora means it: take what the adapters lack out of "
                "lora.targetModules (lora.excludeModules)"
            )
        if stored is not None and stored.shape != entry.shape:
            raise ConfigError(
                f"{uri}, which {FIELD} names: tensor {stored.key!r} has shape {stored.shape}, and here it has "
                f"{entry.shape}: the adapters are of another model than model.uri, or of other ranks"
            )
    if left := [files.tensors[name].key for name in files.tensors if name not in entries]:
        raise ConfigError(
            f"{uri}, which {FIELD} names, has {len(left)} tensors of which nothing becomes anything here, the first is "
            f"{left[0]!r}: name modules that were trained whole (modules_to_save) in training.trainableModules; what "
            "is no adapter of this model can only be merged into it with peft, and named in model.uri"
        )
    found: dict[str, tuple[Entry, StoredTensor | None]] = {}
    for name, entry in entries.items():
        stored = files.tensors.get(name)
        for part in entry.parts:
            # Tied weights are there under both of their names: peft ties nothing, and may have trained them apart, or
            # one of them alone.
            first, other = found.setdefault(part.name, (entry, stored))
            if other != stored and not (other and stored and _equal(folder, other.key, stored.key)):
                raise ModelError(
                    f"{uri}, which {FIELD} names, has other values for {entry.name!r} than for {first.name!r}, which "
                    "is the same tensor in this model: merge the adapters into it with peft, untied "
                    "(tie_word_embeddings: false), and name that in model.uri"
                )
    return {name: (entry, stored.key) for name, (entry, stored) in found.items() if stored}


def _equal(folder: Path, name: str, other: str) -> bool:
    with opened(folder / EXPORT_ADAPTER) as reader:
        return torch.equal(reader.get_tensor(name), reader.get_tensor(other))


def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for name in FILES:
        with (folder / name).open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
