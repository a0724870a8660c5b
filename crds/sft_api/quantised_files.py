"""In which of the ways that are read the files of a model may have quantised weights, as its config.json says.

Pure, so that what is not read is refused before a GPU is asked for.
"""

from collections.abc import Mapping
from typing import Any

FIELDS = ("quantization_config", "compression_config")
"""Of config.json: older files of compressed-tensors say it in the second."""
FP8_BLOCK = 128
"""Rows, and columns, of a weight in FP8 that share a scale where blocks do; the last block of either may have fewer."""
_MXFP4 = "mxfp4"
_FP8 = ("fp8", "compressed-tensors")
"""What ``quant_method`` calls those that files in FP8 are published by."""
_STRATEGIES = ("tensor", "channel", "block")
"""What compressed-tensors calls the ways in which values share a scale that are read."""


def reading_of(fields: Mapping[str, Any], *, packs: bool) -> str:
    """``mxfp4`` or ``fp8``, as what files are read by whose config has a quantization_config with these ``fields``;
    empty where they are not read. ``packs`` says whether the model is of a type that is published in MXFP4."""
    method = fields.get("quant_method")
    if method == _MXFP4 and packs:
        return _MXFP4
    return "fp8" if method in _FP8 and not _not_read(fields) else ""


def quantised_in(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The one of ``FIELDS`` that ``config`` says something in, and what; the first, and nothing, where it says none."""
    said = ((field, _fields_of(config.get(field))) for field in FIELDS)
    return next(((field, fields) for field, fields in said if fields), (FIELDS[0], {}))


def refusal(model_type: Any, field: str, fields: Mapping[str, Any]) -> str:
    """Why a model with these ``fields`` in the ``field`` of its config, which are not read, is not trained."""
    method, detail = fields.get("quant_method"), ""
    if method in _FP8:
        detail = f", of which weights in FP8 are read, and not {_not_read(fields)}"
    return (
        f"a model of type {model_type!r} with a {field} (quant_method {method!r}{detail}) in its config.json is not "
        "supported: it would be trained as a plain model, which is another one; name a checkpoint in model.uri that is "
        "not quantised, or remove the field from config.json if the weights beside it are plain (bf16, fp16, fp32)"
    )


def refused_by_config(config: Mapping[str, Any]) -> str:
    """``refusal`` of the model whose config.json has this content; empty where it is read, or only its type says so."""
    for part in (config, _fields_of(config.get("text_config"))):
        field, fields = quantised_in(part)
        if fields and not reading_of(fields, packs=True):
            return refusal(part.get("model_type", config.get("model_type")), field, fields)
    return ""


def _not_read(fields: Mapping[str, Any]) -> str:
    """What of the ``quantization_config`` with these ``fields``, by one of ``_FP8``, is not read; empty for nothing.

    How many values share a scale is seen in files; only that blocks have another size is not, for some shapes.
    """
    if fields["quant_method"] == "fp8":
        return _other_blocks("weight_block_size", fields)
    for name in ("transform_config", "sparsity_config"):
        given = _fields_of(fields.get(name))
        if given.get("config_groups") or given.get("format", "dense") != "dense":
            return f"{name} {dict(given)}"
    groups = _fields_of(fields.get("config_groups"))
    if not groups:
        return f"config_groups {fields.get('config_groups')!r}"
    kinds = (_fields_of(_fields_of(group).get("weights")) for group in groups.values())
    return next(filter(None, map(_other_kind, kinds)), "")


def _other_kind(weights: Mapping[str, Any]) -> str:
    """What of ``weights``, of a group of layers that compressed-tensors describes, is not read; empty for nothing."""
    if not weights:
        return ""
    if (weights.get("type"), weights.get("num_bits"), weights.get("symmetric", True)) != ("float", 8, True):
        even = "" if weights.get("symmetric", True) else " with zero points"
        return f"weights of type {weights.get('type')!r} in {weights.get('num_bits')} bits{even}"
    if weights.get("strategy") not in _STRATEGIES:
        return f"weights with a scale for each {weights.get('strategy')!r}"
    return _other_blocks("block_structure", weights)


def _other_blocks(name: str, fields: Mapping[str, Any]) -> str:
    return "" if fields.get(name) in (None, [FP8_BLOCK, FP8_BLOCK]) else f"{name} {fields[name]!r}"


def _fields_of(given: Any) -> Mapping[str, Any]:
    return given if isinstance(given, Mapping) else {}
