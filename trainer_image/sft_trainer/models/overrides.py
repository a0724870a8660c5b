"""A model's config as a run has it: as it is published, with what ``spec.model.configOverrides`` says in its place."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from sft_api.v1alpha1.model_config import DROPOUTS, ConfigOverrides, RopeParameters
from sft_trainer.errors import ConfigError

from .positions import follow_the_longest
from .text_part import published_config

_OF_EVERY_TYPE = ("rope_theta", "partial_rotary_factor")
"""Of the model's own rotary parameters: they say nothing about scaling, and stay."""
_KNOWN = {*_OF_EVERY_TYPE, "type", *RopeParameters.model_fields}
"""Of the model's own rotary parameters: those that stay, or that overrides have too. Any other would be lost."""


def config_of(path: Path, overrides: ConfigOverrides | None) -> Any:
    """The config of transformers in the folder ``path``, with ``overrides`` in it: of a model of several parts that of
    its text part.

    Raises ``ConfigError`` for overrides that the model has no place for; transformers' own errors for its config.
    """
    from transformers import AutoConfig

    published = published_config(path)
    config = AutoConfig.from_pretrained(path, trust_remote_code=False) if published is None else published.text_config
    if overrides is None or not overrides.given:
        return config
    values = overrides.given
    _check_names(config, values)
    if "rope_parameters" in values:
        values["rope_parameters"] = _rotary(config, values["rope_parameters"])
    if published is None:
        overridden = AutoConfig.from_pretrained(path, trust_remote_code=False, **values)
    else:
        overridden = type(config).from_dict(config.to_dict(), **values)
    _check_it_stays(overridden, values)
    if "rope_parameters" in values:
        _check_frequencies(overridden, values["rope_parameters"])
    return overridden


def in_words(overrides: ConfigOverrides | None, of_part: bool = False, rows: int = 0) -> str:
    """For the card of adapters: how their base is loaded; empty where it is loaded as it is published.

    The overrides are ``of_part`` where they are those of the text part of a model of several. ``rows`` are those of its
    embeddings where the run has added some.
    """
    values = overrides.given if overrides is not None else {}
    if not values and not rows:
        return ""
    rotary = values.pop("rope_parameters", None)
    auto, whole = ("AutoModelForMultimodalLM", "whole") if of_part else ("AutoModelForCausalLM", "config")
    # Which model it is stands beside the card: where it lies, and its revision.
    lines = [
        "from peft import PeftConfig, PeftModel",
        f"from transformers import AutoConfig, {auto}",
        "",
        'adapters = "."  # the folder of this file',
        "saved = PeftConfig.from_pretrained(adapters)",
        "base, revision = saved.base_model_name_or_path, saved.revision",
        f"{whole} = AutoConfig.from_pretrained(base, revision=revision)",
        *(["config = whole.text_config"] if of_part else []),
    ]
    if rotary is not None:
        kept = ", ".join(map(repr, _OF_EVERY_TYPE))
        lines += [
            f"own = {{k: v for k, v in config.rope_parameters.items() if k in ({kept})}}",
            f"config.rope_parameters = own | {rotary!r}",
        ]
    lines += [f"config.{name} = {value!r}" for name, value in values.items()]
    lines += [
        f"model = {auto}.from_pretrained(base, revision=revision, config={whole})",
        *([f"model.resize_token_embeddings({rows}, mean_resizing=False)"] if rows else []),
        "model = PeftModel.from_pretrained(model, adapters)",
    ]
    code = "\n".join(lines)
    why = (
        "a base whose config is not the published one; beside that as it is they give other values"
        if values
        else "a base with rows for added tokens"
    )
    return f"\nThe adapters were trained beside {why}. Load them so:\n\n```python\n{code}\n```\n"


def _check_names(config: Any, values: Mapping[str, Any]) -> None:
    kind = config.model_type
    rotary = getattr(config, "rope_parameters", None)
    for name, value in values.items():
        reason = ""
        if name in ("rope_parameters", "max_position_embeddings"):
            if not rotary:
                reason = "has no rotary positions"
            elif name == "rope_parameters" and "rope_type" not in rotary:
                reason = "has other rotary positions for each kind of layer"
            elif name == "rope_parameters" and (lost := _lost(rotary)):
                reason = f"has {', '.join(lost)} of its own there, which these would take away"
            elif name == "max_position_embeddings" and follow_the_longest(kind, rotary):
                reason = "scales its positions by that length itself"
            elif name == "max_position_embeddings" and "rope_parameters" not in values and value > _reach(rotary):
                reason = f"scales its positions to {_reach(rotary):.0f} by yarn, and has none beyond"
        elif getattr(config, name, None) is None:
            reason = _missing(config, name)
        elif name == "sliding_window" and "sliding_attention" not in (
            getattr(config, "layer_types", None) or ["sliding_attention"]
        ):
            reason = "has no layer with a sliding window"
        if reason:
            raise ConfigError(
                f"model.configOverrides.{name} is {value!r}, but a model of type {kind!r} {reason}: leave it out"
            )


def _missing(config: Any, name: str) -> str:
    """Why ``config`` takes no ``name``; of a dropout also by which names it has its own."""
    reason = "has that switched off in its config.json" if hasattr(config, name) else "has no such field"
    if name not in DROPOUTS:
        return reason
    own = ", ".join(each for each in DROPOUTS if getattr(config, each, None) is not None)
    return f"{reason} (its dropouts: {own or 'none'})"


def _reach(rotary: Mapping[str, Any]) -> float:
    """Tokens up to which the model's own ``rotary`` parameters scale by yarn; of other types nothing is said."""
    factor, original = rotary.get("factor"), rotary.get("original_max_position_embeddings")
    return factor * original if rotary.get("rope_type") == "yarn" and factor and original else math.inf


def _lost(rotary: Mapping[str, Any]) -> list[str]:
    """Of the model's own ``rotary`` parameters, those that no overrides can say again."""
    return sorted(name for name, value in rotary.items() if value is not None and name not in _KNOWN)


def _rotary(config: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """``given`` with what the model's own parameters say besides scaling. Raises ``ConfigError`` for a wrong length."""
    own = config.rope_parameters
    trained = config.max_position_embeddings
    original = given.get("original_max_position_embeddings")
    if original is not None and original > trained:
        raise ConfigError(
            f"model.configOverrides.rope_parameters.original_max_position_embeddings is {original}, but the model of "
            f"type {config.model_type!r} has {trained} positions (max_position_embeddings): say that, or less"
        )
    return {**{name: own[name] for name in _OF_EVERY_TYPE if name in own}, **given}


def _check_frequencies(config: Any, rotary: Mapping[str, Any]) -> None:
    """Raise ``ConfigError`` where frequencies by ``rotary``, the model's rotary parameters in this run, are no numbers.

    Found here the values are named; where the model computes them, it seems to be one that cannot be trained.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    compute = ROPE_INIT_FUNCTIONS.get(rotary["rope_type"])
    if compute is None:  # what the model computes without scaling, of a rope_theta above 1
        return
    try:
        frequencies, scale = compute(config, torch.device("cpu"))
        reason = "" if bool((frequencies * scale).isfinite().all()) else "some are infinite or no number"
    except (ArithmeticError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
    if reason:
        raise ConfigError(
            f"model.configOverrides.rope_parameters gives a model of type {config.model_type!r} {dict(rotary)!r}, by "
            f"which its frequencies cannot be computed ({reason}): choose values as models have them"
        )


def _check_it_stays(config: Any, values: Mapping[str, Any]) -> None:
    """An export carries the config: what reads it must find the same values."""
    try:
        again = type(config).from_dict(config.to_dict())
    except Exception as error:  # a class that knows other types of scaling alone
        text = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"model.configOverrides is {dict(values)!r}, which a model of type {config.model_type!r} cannot have "
            f"({type(error).__name__}: {text}): leave out what it does not know"
        ) from error
    for name, value in values.items():
        if getattr(again, name) != value:
            raise ConfigError(
                f"model.configOverrides.{name} is {value!r}, but a model of type {config.model_type!r} makes "
                f"{getattr(again, name)!r} of it: leave it out"
            )
