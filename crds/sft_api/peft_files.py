"""Adapters as peft writes them: what their two files say, and whether a run that begins with them has the same ones.

Of ``adapter_model.safetensors`` the header is read, and no values. Others wrote these files: whatever they hold, the
only error is ``AdapterFilesError``. What changes values and is not known here is refused, never passed over.
"""

import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from .adapters import ALL_LINEAR, means_experts, named, shortest
from .place import EXPORT_ADAPTER, EXPORT_ADAPTER_CONFIG
from .safetensors_header import read_header
from .v1alpha1.lora import LoraSpec

FIELD = "lora.adapterUri"
FILES = (EXPORT_ADAPTER_CONFIG, EXPORT_ADAPTER)
"""What of a folder is read."""

_MERGE = "merge them into the model with peft (merge_and_unload), and name that in model.uri, without lora.adapterUri"
_PICKLED = "adapter_model.bin"
_LONGEST_NAME = 512
_DTYPES = ("F64", "F32", "F16", "BF16")
_PREFIX = "base_model.model."
_NAME_OF_ADAPTER = re.compile(r"\.(lora_[AB])\.[^.]+\.weight$")
_NAME_OF_MODULES = re.compile(r"\.modules_to_save\.[^.]+\.")
_ROWS_OF_TOKENS = ".token_adapter.trainable_tokens_delta"
_DECODER_OF_PART = re.compile(r"^(\^?)(?:model\.(?:language_model|text_model)|language_model\.model)\.")
_HEAD_OF_PART = re.compile(r"^(\^?)language_model\.lm_head(?=\.|$)")
"""How versions of transformers call decoder and head of the text part of a model of several."""
_FACTOR = re.compile(r"(?P<layer>.+)\.lora_[AB]\.weight")
_PLAIN = re.compile(r"\^?[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*")

_READ = {
    *("peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "init_lora_weights"),
    *("target_parameters", "base_model_name_or_path", "trainable_token_indices"),
}
_SHOWN_BY_TENSORS = {"target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "modules_to_save"}
_WITHOUT_EFFECT = {
    *("task_type", "auto_mapping", "peft_version", "revision", "inference_mode", "lora_dropout", "megatron_core"),
    *("qalora_group_size", "eva_config", "corda_config", "loftq_config", "lora_ga_config", "runtime_config"),
    "ensure_weight_tying",
}
"""Of training, of first values, or of what another field asks for."""
_KNOWN = _READ | _SHOWN_BY_TENSORS | _WITHOUT_EFFECT
_FIRST_VALUES = (None, True, False, "gaussian", "eva", "orthogonal")
"""Of ``init_lora_weights``, those that leave the model as it is: others take from its weights what these begin as."""


class AdapterFilesError(ValueError):
    """Files that are broken, or hold what no run can have; the text says what to do."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the file, by its header."""

    key: str
    """Its name there."""
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class PeftFiles:
    """The adapters of a folder."""

    config: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    """By the name of the parameter in the model that has these adapters."""

    @classmethod
    def read(cls, folder: Path) -> "PeftFiles":
        """Those in ``folder``; raises ``AdapterFilesError``."""
        if not (folder / EXPORT_ADAPTER_CONFIG).is_file():
            if (folder / "config.json").is_file():
                raise AdapterFilesError(f"{folder} holds a model, and no adapters: name it in model.uri")
            raise AdapterFilesError(f"{folder} has no {EXPORT_ADAPTER_CONFIG}: name the folder of adapters of peft")
        if not (folder / EXPORT_ADAPTER).is_file():
            there = f" ({_PICKLED} is there)" if (folder / _PICKLED).exists() else ""
            raise AdapterFilesError(
                f"{folder} has no {EXPORT_ADAPTER}{there}: only safetensors are read, as pickled files may run "
                "anything; load the adapters with peft, and save them with save_pretrained"
            )
        found = cls(_config(folder / EXPORT_ADAPTER_CONFIG), _tensors(folder / EXPORT_ADAPTER))
        found._check()
        return found

    @cached_property
    def ranks(self) -> Mapping[str, int]:
        """Of every linear layer with adapters, in the order of the file, as its tensors have it."""
        a = {name.removesuffix(".lora_A.weight"): each for name, each in self.tensors.items() if ".lora_A." in name}
        return {layer: each.shape[0] for layer, each in a.items() if not self._of_experts(layer) and each.shape}

    @cached_property
    def experts(self) -> list[str]:
        """Names of the tensors of experts that have adapters, as peft was told them."""
        given = self.config.get("target_parameters")
        names = given if isinstance(given, list) else []
        plain = (in_text_part(name) for name in names if isinstance(name, str) and _PLAIN.fullmatch(name))
        return [name for name in plain if means_experts(name)]

    @property
    def _tokens(self) -> list[Any]:
        """Those whose rows were trained alone, of each table that has some, as it has them."""
        given = self.config.get("trainable_token_indices") or []
        return [*given.values()] if isinstance(given, dict) else [given] if given else []

    def other_tokens(self, numbers: Sequence[int]) -> str:
        """The tokens whose rows were trained alone, where a table has others than those with these ``numbers``, which
        ascend, or in another order than the first one; else empty."""
        first, *others = self._tokens or [[]]
        is_there = first != [] or any(name.endswith(_ROWS_OF_TOKENS) for name in self.tensors)
        if is_there and not _are(first, numbers):
            return _shown(first)
        return next((_shown(each) for each in others if each != first), "")

    @property
    def token_places(self) -> list[int]:
        """Where each of these tokens has its row in a table of the file, by ascending numbers: peft leaves them in the
        order in which they were named."""
        first, *_ = self._tokens or [[]]
        return sorted(range(len(first)), key=first.__getitem__)

    def problem(
        self, lora: LoraSpec, linear: Collection[str] | None = None, adapted: Collection[str] | None = None
    ) -> str:
        """What ``lora`` says otherwise than these files, and what to write instead; empty where it is the same.

        ``linear`` are all linear layers of the model but its head, ``adapted`` those that ``lora`` means, full names;
        None where nobody knows them yet. Raises ``AdapterFilesError`` for adapters that no ``lora`` has.
        """
        if linear is not None and (others := [*self.ranks.keys() - {*linear}]):
            raise AdapterFilesError(
                f"it has adapters of {min(others)}, which is no linear layer of this model that can have some here "
                f"(its head has none): name the model that they belong to in model.uri, or {_MERGE}"
            )
        of_layers, of_experts = self._one("rank", self.ranks), self._one("rank of experts", self._ranks_of_experts)
        scaling = self._one("scale (alpha / rank)", self._scalings)
        ranks = [(of_layers, lora.rank), (of_experts, lora.rank_of_experts)]
        is_same = all(theirs in (None, ours) for theirs, ours in ranks)
        if is_same and _is_close(scaling, lora.scaling) and self._is_on(lora, adapted):
            return ""
        rank = of_layers or of_experts
        words: dict[str, Any] = {
            "rank": rank,
            "alpha": self._alpha(rank, scaling),
            **({"expertRank": of_experts} if of_experts not in (None, rank) else {}),
            "targetModules": f"[{', '.join(self._targets(linear))}]",
            # What it writes is taken as it is: with no more QLoRA would be none.
            **({"dropout": lora.dropout} if lora.dropout else {}),
            **({"basePrecision": lora.base_precision} if lora.base_precision else {}),
        }
        write = ", ".join(f"{name}: {value}" for name, value in words.items())
        without = ", without excludeModules" if lora.exclude_modules else ""
        on = f"{', '.join(lora.target_modules)}" + (f", not {', '.join(lora.exclude_modules)}" * bool(without))
        return (
            f"its adapters are others than those of lora ({lora.in_words}, on {on}): write lora: "
            f"{{{write}, adapterUri: …}}{without}"
        )

    def other_base(self, model_uri: str) -> str:
        """What to say where these were trained beside a model that is called otherwise than ``model_uri``; else empty.

        One model has many names: only who trained them knows whether it is the same.
        """
        base = self.config.get("base_model_name_or_path")
        if not isinstance(base, str) or not base:
            return ""
        here = model_uri.removeprefix("hf://").partition("@")[0] if model_uri.startswith("hf://") else model_uri
        if Path(base).name.lower() == Path(here).name.lower():
            return ""
        return (
            f"the adapters were trained beside {base[:200]!r} (base_model_name_or_path), and model.uri is {model_uri}: "
            "beside other weights they mean something else"
        )

    def _is_on(self, lora: LoraSpec, adapted: Collection[str] | None) -> bool:
        """Whether the layers with adapters are those that ``lora`` means, as far as that is known."""
        if bool(self.experts) != lora.names_experts:
            return False
        if adapted is not None:
            return {*adapted} == self.ranks.keys()
        names = [name for name in lora.target_modules if name != ALL_LINEAR and not means_experts(name)]
        if any(not any(named(layer, [name]) for layer in self.ranks) for name in names):
            return False
        meant = [layer for layer in self.ranks if ALL_LINEAR in lora.target_modules or named(layer, names)]
        return len(meant) == len(self.ranks) and not any(named(layer, lora.exclude_modules) for layer in meant)

    def _targets(self, linear: Collection[str] | None) -> list[str]:
        """The fewest names that are known to mean the layers that have adapters."""
        layers = [*self.ranks]
        if linear is not None:
            if {*linear} == {*layers}:
                return [ALL_LINEAR, *self.experts]
            return [*shortest(layers, linear), *self.experts]
        # In the same model they mean the same; those that mean nothing there peft passes over.
        told = self.config.get("target_modules")
        names = [in_text_part(name) for name in told if isinstance(name, str)] if isinstance(told, list) else []
        names = sorted(name for name in names if any(named(layer, [name]) for layer in layers))
        only_some = self.config.get("layers_to_transform") is not None or self.config.get("exclude_modules")
        are_named = all(named(layer, names) for layer in layers)
        return [*(names if are_named and not only_some else sorted(layers)), *self.experts]

    @property
    def _ranks_of_experts(self) -> dict[str, int]:
        return {name: self._rank(name) for name in self._every_experts}

    @cached_property
    def _every_experts(self) -> list[str]:
        """Full names of what ``experts`` mean, which patterns may tell apart."""
        layers = [layer.replace(".base_layer", "") for layer in self._adapted if self._of_experts(layer)]
        found = [(f"{layer}.{name.rpartition('.')[2]}", name) for layer in layers for name in self.experts]
        return [*dict.fromkeys(full for full, name in found if named(full, [name]))]

    @cached_property
    def _adapted(self) -> list[str]:
        """Names of all modules that have a matrix of adapters."""
        return sorted({found["layer"] for found in map(_FACTOR.fullmatch, self.tensors) if found})

    @property
    def _scalings(self) -> dict[str, float]:
        """By which what is added to each layer is multiplied, as peft reads its patterns."""
        found = {}
        for name in (*self.ranks, *self._every_experts):
            rank = self._rank(name)
            alpha = _of_pattern(self.config, "alpha_pattern", name, _number(self.config, "lora_alpha", 8))
            found[name] = alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)
        return found

    def _alpha(self, rank: int, scaling: float) -> str:
        """The ``lora.alpha`` of these, all digits of it."""
        exact = _number(self.config, "lora_alpha", 8)
        alpha = exact if exact / rank == scaling else scaling * rank
        return str(int(alpha)) if float(alpha).is_integer() else repr(alpha)

    def _rank(self, name: str) -> int:
        rank = _of_pattern(self.config, "rank_pattern", name, _number(self.config, "r", 8))
        if rank != int(rank) or rank < 1:
            raise AdapterFilesError(f"{EXPORT_ADAPTER_CONFIG} says rank {rank!r} of {name}, which is none")
        return int(rank)

    def _one(self, what: str, numbers: Mapping[str, Any]) -> Any:
        """The number that all of these have; None where there are none."""
        if not numbers:
            return None
        (first, one), *others = numbers.items()
        if differs := next((name for name, other in others if not _is_close(one, other)), None):
            raise AdapterFilesError(
                f"its adapters have not one {what}: {one:g} of {first}, {numbers[differs]:g} of {differs}; a run has "
                f"one for all of them: {_MERGE}"
            )
        return one

    @staticmethod
    def _of_experts(layer: str) -> bool:
        return means_experts(layer.replace(".base_layer", ""))

    def _check(self) -> None:
        """Raise ``AdapterFilesError`` for what no run can have, whatever its manifest says."""
        kind = self.config.get("peft_type")
        if kind != "LORA":
            raise AdapterFilesError(
                f"its peft_type is {kind!r:.100}, and only LORA can be trained here: where peft can, {_MERGE}"
            )
        for field, value in self.config.items():
            if field not in _KNOWN and value not in (None, False, 0, "none", "", [], {}):
                said = f"{json.dumps(field):.100}: {_shown(value)}"
                raise AdapterFilesError(
                    f"its {EXPORT_ADAPTER_CONFIG} has {said}, which no run begins with here: {_MERGE}"
                )
        if (begun := self.config.get("init_lora_weights")) not in _FIRST_VALUES:
            raise AdapterFilesError(
                f"its init_lora_weights is {begun!r:.100}: such adapters belong to weights that were changed for them, "
                "not to those of the model; have peft convert them (path_initial_model_for_weight_conversion), or "
                f"{_MERGE}"
            )
        for name in ("rank_pattern", "alpha_pattern"):
            if not isinstance(self.config.get(name) or {}, dict):
                raise AdapterFilesError(f"its {name} is no mapping: save the adapters anew")
        if (unnamed := next(filter(self._of_experts, self._adapted), None)) and not self.experts:
            raise AdapterFilesError(
                f"it has adapters of {unnamed}, and target_parameters names no experts: they lie there in a form that "
                f"is not read here; {_MERGE}"
            )
        if not self.ranks and not self._every_experts:
            raise AdapterFilesError(f"its {EXPORT_ADAPTER} holds no adapters (lora_A, lora_B): save them anew")
        for layer, rank in self.ranks.items():
            if rank != self._rank(layer):
                raise AdapterFilesError(
                    f"{EXPORT_ADAPTER_CONFIG} says rank {self._rank(layer)} of {layer}, and its tensor has {rank}: "
                    "these two files are not of the same adapters"
                )
        for name, tensor in self.tensors.items():
            if tensor.dtype not in _DTYPES:
                raise AdapterFilesError(
                    f"tensor {tensor.key!r} is stored as {tensor.dtype!r:.100}: adapters are read in fp32, bf16 or fp16"
                )
            if (found := _FACTOR.fullmatch(name)) and len(tensor.shape) != 2:
                raise AdapterFilesError(
                    f"{found['layer']} has adapters of shape {tensor.shape!s:.100}, and no matrices"
                )


def plain_name(key: str) -> str:
    """The name in the model of what peft calls ``key``: without what it puts around model, adapter and module.

    Of a model of several parts that in its text part.
    """
    name = _NAME_OF_ADAPTER.sub(r".\1.weight", key.removeprefix(_PREFIX))
    return in_text_part(_NAME_OF_MODULES.sub(".", name))


def in_text_part(name: str) -> str:
    """What ``name``, of a module or a tensor of a model of several parts, is called in its text part by itself; other
    names as they are."""
    name = _DECODER_OF_PART.sub(r"\1model.", name)
    return _HEAD_OF_PART.sub(r"\1lm_head", name)


def _are(tokens: Any, numbers: Sequence[int]) -> bool:
    """Whether ``tokens`` are a list of ``numbers``, in any order."""
    return isinstance(tokens, list) and all(type(each) is int for each in tokens) and sorted(tokens) == [*numbers]


def _is_close(one: float, other: float) -> bool:
    """Whether two scales are one, but for roundings that no number in fp32 can tell."""
    return math.isclose(one, other, rel_tol=1e-9)


def _config(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise AdapterFilesError(f"{file} cannot be read ({error}): fetch the adapters again") from error
    if not isinstance(config, dict):
        raise AdapterFilesError(f"{file} is no mapping: save the adapters anew")
    return config


def _tensors(file: Path) -> dict[str, StoredTensor]:
    found: dict[str, StoredTensor] = {}
    try:
        with file.open("rb") as opened:
            begin, entries = read_header(opened)
        stored = [
            StoredTensor(key, str(each["dtype"]), tuple(map(int, each["shape"]))) for key, each in entries.items()
        ]
        end = begin + max((int(each["data_offsets"][1]) for each in entries.values()), default=0)
        size = file.stat().st_size
    except (OSError, ValueError, OverflowError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise AdapterFilesError(f"{file} is not a safetensors file ({error}): fetch the adapters again") from error
    if size != end:
        raise AdapterFilesError(f"{file} has {size} bytes, and its header says {end}: fetch it again")
    for tensor in stored:
        # They are told to people, and may be anybody's.
        if not (tensor.key.isascii() and tensor.key.isprintable() and len(tensor.key) <= _LONGEST_NAME):
            raise AdapterFilesError(f"{file} has a tensor {tensor.key!a:.200}, which no model has: save them anew")
        name = plain_name(tensor.key)
        if name in found:
            raise AdapterFilesError(f"{found[name].key!r} and {tensor.key!r} are both {name}: save one adapter alone")
        found[name] = tensor
    return found


def _number(config: Mapping[str, Any], field: str, default: float) -> float:
    return _positive(field, config.get(field, default))


def _of_pattern(config: Mapping[str, Any], field: str, name: str, default: float) -> float:
    """What ``field`` says of the layer ``name``: peft takes the first of its patterns that fits."""
    for key, value in (config.get(field) or {}).items():
        if not _PLAIN.fullmatch(key):
            raise AdapterFilesError(f"its {field} has the pattern {key!r:.100}, and only names are read: {_MERGE}")
        key = in_text_part(key)
        if name == key.removeprefix("^") if key.startswith("^") else named(name, [key]):
            return _positive(f"{field}[{key!r}]", value)
    return default


def _positive(field: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise AdapterFilesError(f"{EXPORT_ADAPTER_CONFIG} has {field}: {_shown(value)}, which is none")
    return value


def _shown(value: Any) -> str:
    try:
        return json.dumps(value)[:200]
    except RecursionError:  # it was read a call or two higher up
        return "what is nested too deep"
