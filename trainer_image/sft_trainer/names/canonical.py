"""Canonical names of tensors: the hub's, but experts are stacked on a leading dimension and a tied weight exists once.

Checkpoints hold them, so that neither the layout of modules in one version of transformers nor our own root module
is part of a checkpoint. A change of what a name means is a new ``VERSION``.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from types import MappingProxyType
from typing import Any

from .places import Place
from .rules import RULES, Rules
from .tables import Table

VERSION = 1
_NO_TABLES: Mapping[str, Table] = MappingProxyType({})


@dataclass(frozen=True)
class Part:
    """A canonical tensor that lies, whole, in a parameter (or stored buffer) of a module."""

    name: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    """Where it begins in the parameter, elements in every dimension."""


@dataclass(frozen=True)
class HubTensor:
    """A tensor of a hub file that a canonical tensor is made of."""

    name: str
    index: int | None
    """Its place in the leading dimension of the canonical tensor; None where it is the whole of it."""
    turned: bool = False
    """Whether its last two dimensions are those of the canonical tensor, turned; it is the whole of it then."""


@dataclass(frozen=True)
class Divided:
    """Where a hub tensor lies among several whose rows are those of one parameter."""

    tensors: tuple[str, ...]
    """All of them, in order."""
    start: int
    """The first of its rows."""
    rows: int
    total: int
    """Rows of all."""


class Names:
    """Translates names of one architecture: ``Names.of(config)``."""

    def __init__(self, rules: Rules, place: Place | None = None, tables: Mapping[str, Table] = _NO_TABLES) -> None:
        self.tables = tables
        """By canonical name those that have rows of added tokens."""
        self._rules = rules
        self._place = place
        projections = "|".join(re.escape(name) for names in rules.experts.values() for name in names)
        self._stacked = re.compile(rf"(?P<experts>.*\.experts)\.(?P<projection>{projections})\.weight")

    @classmethod
    def of(cls, config: Any, place: Place | None = None, tables: Mapping[str, Table] = _NO_TABLES) -> "Names":
        """Of the architecture that ``config``, of transformers, describes.

        Where such a model is a part of another one ``place`` is what it is called in the files of that. ``tables`` are
        those, by canonical name, of which files have rows for other tokens.
        """
        given = RULES.get(config.model_type, Rules())
        rules = given if isinstance(given, Rules) else given(config)
        own = replace(rules, experts={}) if place is not None and place.stacks_experts else rules
        return cls(own, place, tables)

    def parts(self, parameter: str, shape: tuple[int, ...]) -> list[Part]:
        """The canonical tensors in ``parameter``, of the Hugging Face model, of ``shape``: they tile it.

        Raises ``ValueError`` for a fused parameter that cannot be divided among its projections.
        """
        name = parameter
        for module, hub in self._rules.renamed:
            name = name.replace(module, hub)
        for end, sizes in self._rules.divided.items():
            if name.endswith(end):
                return _rows_of(name.removesuffix(end), sizes, shape)
        module, _, leaf = name.rpartition(".")
        projections = self._rules.experts.get(leaf, ()) if module.endswith(".experts") else ()
        if not projections:
            return [Part(name, shape, (0,) * len(shape))]
        experts, rows, *columns = shape
        if rows % len(projections):
            raise ValueError(f"{parameter} has {rows} rows, for the {len(projections)} projections {projections}")
        size = rows // len(projections)
        return [
            Part(f"{module}.{projection}.weight", (experts, size, *columns), (0, index * size, *(0 for _ in columns)))
            for index, projection in enumerate(projections)
        ]

    def is_stacked(self, name: str) -> bool:
        """Whether the canonical tensor ``name`` is that of all experts, of which files have one each."""
        return bool(self._rules.experts) and self._stacked.fullmatch(name) is not None

    @property
    def packs(self) -> bool:
        """Whether files may have some tensors in MXFP4."""
        return bool(self._rules.packed)

    def may_be_packed(self, name: str) -> bool:
        """Whether files may have the hub tensor ``name`` in MXFP4 instead, as two others."""
        module, _, leaf = name.rpartition(".")
        return leaf in self._rules.packed and module.endswith(".experts")

    def divided(self, name: str) -> Divided | None:
        """Where the hub tensor ``name`` lies among those of one parameter; None where it is not one of several."""
        for sizes in self._rules.divided.values():
            for place, (end, rows) in enumerate(sizes.items()):
                if name.endswith(end):
                    whole, every = name.removesuffix(end), [*sizes.values()]
                    tensors = tuple(f"{whole}{each}" for each in sizes)
                    return Divided(tensors, sum(every[:place]), rows, sum(every))
        return None

    def as_saved(self, name: str) -> str:
        """What files that transformers itself saved may call the hub tensor ``name``."""
        for piece, other in self._rules.saved:
            name = name.replace(piece, other)
        return name

    def hub(self, name: str, shape: tuple[int, ...]) -> list[HubTensor]:
        """The tensors of hub files that the canonical tensor ``name``, of ``shape``, is made of."""
        found = self._stacked.fullmatch(name) if self._rules.experts else None
        if found is None:
            module, _, leaf = name.rpartition(".")
            turned = leaf in self._rules.turned and module.endswith(".experts")
            return [HubTensor(self._in_files(name), None, turned)]
        experts = self._in_files(found["experts"])
        return [HubTensor(f"{experts}.{expert}.{found['projection']}.weight", expert) for expert in range(shape[0])]

    def stored(self, parameter: str) -> str:
        """The name in hub files of ``parameter``, of the Hugging Face model, which is one tensor there."""
        return self._in_files(self.parts(parameter, (1,))[0].name)

    def _in_files(self, name: str) -> str:
        return name if self._place is None else self._place.outside(name)


def _rows_of(module: str, sizes: Mapping[str, int], shape: tuple[int, ...]) -> list[Part]:
    """The canonical tensors, called by these ends of ``module``, that so many rows each of a parameter are."""
    rows, *others = shape
    if rows != sum(sizes.values()):
        raise ValueError(f"a parameter of {module} has {rows} rows, for {dict(sizes)}")
    starts = accumulate(sizes.values(), initial=0)
    return [
        Part(f"{module}{end}", (size, *others), (start, *(0 for _ in others)))
        for start, (end, size) in zip(starts, sizes.items(), strict=False)
    ]
