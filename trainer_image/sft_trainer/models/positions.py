"""Up to which length a model has positions, and rotary ones that do not depend on what else is in a forward pass."""

from collections.abc import Iterator, Mapping
from typing import Any

from sft_trainer.errors import ConfigError

_FIXED_BY_ALPHA = ("hunyuan_v1_dense",)
"""Types of models that are published as ``dynamic`` and, with ``alpha``, have the same frequencies at any length."""


def check_positions(config: Any, max_length: int) -> None:
    """Raise ``ConfigError`` when examples of up to ``max_length`` tokens have no positions, or change those of others.

    ``config`` is a model's, of transformers. Without rotary positions it has a learnt one for each of
    ``max_position_embeddings`` tokens. Its layers with ``longrope`` or ``dynamic`` scaling choose the frequencies for
    all tokens of a forward pass by the longest document in it; up to the length of the original model they are always
    the same.
    """
    rotary = getattr(config, "rope_parameters", None)
    learnt = None if rotary else getattr(config, "max_position_embeddings", None)
    if learnt is not None and max_length > learnt:
        raise ConfigError(
            f"data.maxLength is {max_length}, but a model of type {config.model_type!r} has learnt a position for each "
            f"of {learnt} tokens (max_position_embeddings), and has none beyond: set data.maxLength to {learnt} at most"
        )
    for parameters in _rope_parameters(rotary):
        if not follow_the_longest(config.model_type, parameters):
            continue
        kind = str(parameters.get("rope_type"))
        limit = parameters.get("original_max_position_embeddings") or config.max_position_embeddings
        if max_length > limit:
            raise ConfigError(
                f"data.maxLength is {max_length}, but a model of type {config.model_type!r} with rope scaling "
                f"{kind!r} turns the positions of all documents of a micro-batch otherwise once one of them is longer "
                f"than {limit} tokens: what is learnt of one would depend on the others; set data.maxLength to {limit} "
                "at most"
            )


def follow_the_longest(model_type: str, parameters: Mapping[str, Any]) -> bool:
    """Whether frequencies of a model by rotary ``parameters`` follow from the length of the longest document."""
    if parameters.get("alpha") and model_type in _FIXED_BY_ALPHA:
        return False
    kind = str(parameters.get("rope_type"))
    return kind == "longrope" or "dynamic" in kind


def _rope_parameters(found: Any) -> Iterator[Mapping[str, Any]]:
    """Of all layers, or of each type of layers."""
    if isinstance(found, Mapping):
        if "rope_type" in found:
            yield found
        for inner in found.values():
            yield from _rope_parameters(inner)
