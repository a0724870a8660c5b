"""What the tensors of a model are called where it is a part of another one, such as the text part of one of images."""

from collections.abc import Collection
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Place:
    """Of a model that is a part of another."""

    decoder: tuple[str, str]
    """Its decoder by its own name, and by that which it has in the other: ``model``, ``model.language_model``."""
    head: tuple[str, str]
    """Its head by both."""
    stacks_experts: bool = False
    """Whether files have experts stacked, as the modules have them, of which a model by itself has files with each."""

    def outside(self, name: str) -> str:
        """What is called ``name``, a module or a tensor, in the other model; other names as they are."""
        for inner, outer in (self.decoder, self.head):
            if name == inner or name.startswith(f"{inner}."):
                return outer + name[len(inner) :]
        return name

    def has(self, name: str) -> bool:
        """Whether the tensor ``name`` of the other model is called as one of this part."""
        return any(name.startswith(f"{outer}.") for _, outer in (self.decoder, self.head))


_OLDER = (("language_model.model", "language_model.lm_head"), ("model", "lm_head"))
"""Decoder and head in the files of most models of images that are published, and of the first Qwen VL: transformers
reads these still, and calls its modules otherwise."""


def place_in_files(modules: Place, embedding: str, stacked: Collection[str], files: Collection[str]) -> Place:
    """How ``files``, all tensors of the whole model, name the part that is called as ``modules`` says in the whole.

    ``embedding`` is the tensor of the part that every file has; where none is called so it is as ``modules`` says.
    ``stacked`` are parameters of the part with all experts of a layer.
    """
    newest = (modules.decoder[1], modules.head[1])
    places = (Place((modules.decoder[0], decoder), (modules.head[0], head)) for decoder, head in (newest, *_OLDER))
    found = next((place for place in places if place.outside(embedding) in files), modules)
    return replace(found, stacks_experts=any(found.outside(name) in files for name in stacked))
