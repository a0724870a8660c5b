"""How many parameters a run trains that does not train all, by the model's files where this machine has them, or by its
shape."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sft_api.adapters import (
    AdapterError,
    adapted,
    hint_on_experts,
    hint_on_peft,
    refused_by_peft,
    within,
)
from sft_api.layers import adapted_of, with_added_tokens
from sft_api.memory import sizes_of
from sft_api.model_shape import ModelShape
from sft_api.peft_files import in_text_part
from sft_api.safetensors_header import read_header
from sft_api.v1alpha1.job import SFTJobSpec

from .files import path_of

_HEADS = ("lm_head", "embed_out")
"""Names of output layers; a tied one is in no file."""
_EMBEDDINGS = (".embed_tokens.weight", ".embed_in.weight", ".wte.weight", ".word_embeddings.weight")
_SCALE = ".layer_scalar"
_FURTHER = "mtp."
"""How names of layers begin that predict further tokens, and stand beside the model."""
_OF_A_LAYER = re.compile(r"(?P<layer>.*\.layers\.\d+\..+|model\.per_layer_model_projection)\.weight")
"""And one of Gemma 4's beside them, which makes an input of its own for each."""
_KEYS_AND_VALUES = re.compile(r".*\.layers\.(?P<number>\d+)\.self_attn\.[kv]_(proj|norm)\.weight")
_NUMBER = re.compile(r"\.layers\.(?P<number>\d+)\.")
_OF_EXPERTS = re.compile(
    r".*\.(experts\..*|router\.proj|(mlp|block_sparse_moe|feed_forward|mixer)\.(router|gate)(\.(layer|gate|wg))?)\.weight"
)
"""Experts, which the model has stacked in one tensor, and routers: neither is a linear layer there."""
_PACKED = re.compile(r".*\.experts\.\w+_(?P<of>blocks|scales)")
_OF_FP8 = re.compile(r".*(_scale_inv|\b(weight|input|output|q|k|v)_scale|_proj_scale|activation_scale)")
"""What files in FP8 have beside weights."""
_ONE_EXPERT = re.compile(r"(?P<experts>.*\.experts)\.\d+\.(?P<of>\w+)\.weight")
_ALL_EXPERTS = re.compile(
    r"(?P<block>.*)\.(?P<of>experts\.(gate_up|down)_proj(_blocks)?|(input|output)_linear\.weight)"
)
_CALLED_OTHERWISE = {"hy_v3": (".mlp.shared_mlp.", ".mlp.shared_experts."), "nemotron_h": ("backbone.", "model.")}
"""Layers of a type by their names in files, and in the model: in that of another type they have the first too."""
_STACKED = {"gate_proj": ("gate_up_proj", 2), "w1": ("gate_up_proj", 2)} | dict.fromkeys(
    ("down_proj", "w2"), ("down_proj", 1)
)
"""Of what one expert has in files, the name of the tensor in which the model has it, and how many times as large that
is for each expert: gate and up are one there."""


@dataclass(frozen=True)
class Trained:
    """Of a model of which not all is trained."""

    parameters: int
    """That are trained."""
    frozen: int
    """That are not."""
    layers: int
    """Linear ones that have adapters."""
    experts: int
    """Layers whose experts have some."""
    by: str
    """What it is known by."""


def measure_trained(spec: SFTJobSpec, shape: ModelShape | None = None) -> Trained | str | None:
    """What ``spec`` trains of its model, or what is wrong with its names; None when it cannot be told, and where it is
    all.

    By the model's files where they are on this machine, else by its ``shape``, where that is known.
    """
    if spec.trains_all:
        return None
    folder = path_of(spec.model.uri)
    found = _by_files(spec, folder) if folder else None
    return found if found is not None or shape is None else _by_shape(shape, spec)


def _by_shape(shape: ModelShape, spec: SFTJobSpec) -> Trained | None:
    adapted, sizes = adapted_of(shape, spec), sizes_of(with_added_tokens(shape, spec), spec)
    # Names that no layer has are refused with the memory, which follows from them.
    if not sizes.trained or (spec.lora and not any(adapted)):
        return None
    by = "the sizes that memory is counted by"
    layers = sum(len(names.keys() - shape.of_experts.keys()) for names in adapted)
    experts = sum(not names.keys().isdisjoint(shape.of_experts) for names in adapted)
    return Trained(sizes.trained, sizes.parameters - sizes.trained, layers, experts, by)


def _by_files(spec: SFTJobSpec, folder: Path) -> Trained | str | None:
    """By the headers: linear layers are the matrices within the decoder's layers, and its head."""
    try:
        config = _config(folder)
        shapes, layers_here = _of_text(_shapes(folder), config), _layers(config)
        kind, own_keys = str(config.get("model_type")), layers_here - config.get("num_kv_shared_layers", 0)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None  # sft run says what is wrong with the files
    # Those that predict further tokens stand behind the others (GLM-4.5's) or beside them (Qwen 3.5's), and are not
    # loaded, nor are keys and values of layers that use those of others (Gemma 4's), which have a scale that is trained
    # by nobody.
    shapes = {
        name.replace(*_CALLED_OTHERWISE.get(kind, ("", ""))): shape
        for name, shape in shapes.items()
        if not name.startswith(_FURTHER)
        and not name.endswith(_SCALE)
        and ((keys := _KEYS_AND_VALUES.fullmatch(name)) is None or int(keys["number"]) < own_keys)
        and ((found := _NUMBER.search(name)) is None or int(found["number"]) < layers_here)
    }
    matrices = {found["layer"]: tuple(shape) for name, shape in shapes.items() if (found := _matrix(kind, name, shape))}
    if not matrices:
        return None
    head = next((name for name in _HEADS if f"{name}.weight" in shapes), _HEADS[0])
    modules, lora, stacked, layers = spec.training.trainable_modules or (), spec.lora, _stacked(shapes), list[str]()
    try:
        if lora is not None:
            layers = adapted([*matrices, head], head, lora.target_modules, lora.exclude_modules, modules, [*stacked])
    except AdapterError as error:
        told = hint_on_peft(error, kind)
        return hint_on_experts(told) if any(map(_OF_EXPERTS.fullmatch, shapes)) else str(told)
    sizes = {**matrices, **stacked}
    added = lora.parameters_on({name: sizes[name] for name in layers}) if lora else 0
    of_head = "" if config.get("tie_word_embeddings") else f"{head}.weight"
    tables = [name for name in shapes if name == of_head or name.endswith(_EMBEDDINGS)]
    alone = [shapes[name] for name in tables if not within(_as_module(name), modules)]
    added += len(spec.tokens_with_rows) * sum(shape[1] for shape in alone if len(shape) == 2)
    experts = {name.rpartition(".")[0] for name in layers if name in stacked}
    inside = [name for name in shapes if within(_as_module(name), modules)]
    if any(not any(within(_as_module(name), [module]) for name in inside) for module in {*modules} - {*_HEADS}):
        return None  # such as the name of a module whose tensors have others in the files
    trained = sum(_numbers(name, shapes[name]) for name in inside)
    if modules and not trained:
        return None
    whole = sum(_numbers(name, shape) for name, shape in shapes.items())
    linear = sum(name not in stacked for name in layers)
    return Trained(added + trained, whole - trained, linear, len(experts), "the files of model.uri")


def _stacked(shapes: Mapping[str, list[int]]) -> dict[str, tuple[int, int, int]]:
    """What of experts the model has stacked, by its names: so many, of so many rows and columns each."""
    found: dict[str, tuple[int, int, int]] = {}
    for name, shape in shapes.items():
        if (one := _ONE_EXPERT.fullmatch(_as_module(name))) and len(shape) == 2:
            if one["of"] == "up_proj" and name.replace(".up_proj.", ".gate_proj.") not in shapes:
                leaf, times = "up_proj", 1
            elif one["of"] in _STACKED:
                leaf, times = _STACKED[one["of"]]
            else:
                continue
            stacked = f"{one['experts']}.{leaf}"
            before = found[stacked][0] if stacked in found else 0
            found[stacked] = (before + 1, times * shape[0], shape[1])
        elif (several := _ALL_EXPERTS.fullmatch(name)) and len(shape) > 2:
            leaf = "down_proj" if several["of"].startswith(("experts.down", "output")) else "gate_up_proj"
            found[f"{several['block']}.experts.{leaf}"] = (shape[0], shape[1], _numbers(name, shape[2:]))
    return found


def names_warning(found: Trained | str | None, refused: str) -> str:
    """What is wrong with names of adapters, by what was ``found``; empty where the run is ``refused`` for them."""
    return found if isinstance(found, str) and not refused.startswith("lora.") else ""


def _numbers(name: str, shape: list[int]) -> int:
    """Of the model, in the tensor ``name``: of experts in MXFP4 a byte of blocks holds two; scales are none, nor those
    of FP8."""
    if _OF_FP8.fullmatch(name):
        return 0
    packed = _PACKED.fullmatch(name)
    return math.prod(shape) * (1 if packed is None else 2 if packed["of"] == "blocks" else 0)


def _as_module(name: str) -> str:
    """How the module is called whose tensor files have as ``name``."""
    return name.replace(".block_sparse_moe.", ".mlp.").replace("embed_out.", "lm_head.")


def _matrix(kind: str, name: str, shape: list[int]) -> "re.Match[str] | None":
    if len(shape) != 2 or _OF_EXPERTS.fullmatch(name):
        return None
    found = _OF_A_LAYER.fullmatch(name)
    return None if found is None or refused_by_peft(kind, found["layer"]) else found


def _config(folder: Path) -> dict[str, Any]:
    """The content of config.json, of a model of several parts with that of its text part over it; nothing without."""
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return {**config, **config.get("text_config", {})}


def _layers(config: Mapping[str, Any]) -> float:
    """How many a model of ``config`` has; infinitely many where that does not say it."""
    found = config.get("num_hidden_layers")
    return found if isinstance(found, int) else math.inf


def _of_text(shapes: Mapping[str, list[int]], config: Mapping[str, Any]) -> dict[str, list[int]]:
    """Of the tensors ``shapes`` of a model of ``config`` those of its text part, by the names of that by itself."""
    if "text_config" not in config:
        return dict(shapes)
    renamed = {name: in_text_part(name) for name in shapes}
    named_apart = any(renamed[name] != name for name in shapes)
    return {
        renamed[name]: shape
        for name, shape in shapes.items()
        if renamed[name] != name or name.startswith(_HEADS) or (name.startswith("model.") and not named_apart)
    }


def _files(folder: Path) -> list[Path]:
    """The safetensors files that make up the model in ``folder``: the one file, else those of its index, no others."""
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        return [folder / name for name in sorted({*names})]
    return sorted(folder.glob("*.safetensors"))


def _shapes(folder: Path) -> dict[str, list[int]]:
    """Of every tensor in the safetensors files of ``folder``; raises what reading wrong ones does."""
    shapes: dict[str, list[int]] = {}
    for file in _files(folder):
        with file.open("rb") as opened:
            _, entries = read_header(opened)
        shapes |= {name: [*map(int, entry["shape"])] for name, entry in entries.items()}
    return shapes
