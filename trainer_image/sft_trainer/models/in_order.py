"""Layers that go through the tokens of a document in order, where attention looks at all of them at once.

What is known of them, by the type of a model, and what computes them here: operators of our own, which keep the
documents of a micro-batch apart, in the place of transformers' functions, which do not. See docs/design/0033, 0038.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sft_api.sequence_parallel import LINEAR_ATTENTION, SHORT_CONVOLUTIONS
from sft_trainer.errors import ModelError
from sft_trainer.versions import compute_with

from . import gated_delta, state_space
from .convolution import convolved


@dataclass(frozen=True)
class _Kind:
    """Of some types of models, whose loss and gradients are compared with transformers' own by a test."""

    types: tuple[str, ...]
    layers: frozenset[str]
    """What ``layer_types`` of their configs calls layers without attention; others have something else that is called
    so."""
    functions: Mapping[str, Callable[..., Any]]
    """By the names of transformers' beside the class of the model."""
    with_states: str = ""
    """What they call layers with a state that goes from token to token."""
    state_flops: Callable[[Any], int] = lambda config: 0
    """Of a token in the states of such a layer, forwards, by a config."""
    check: Callable[[Any], None] = lambda config: None
    """Raises ``ModelError`` for sizes in a config that cannot be computed with."""


_KINDS = (
    _Kind(
        LINEAR_ATTENTION,
        frozenset({"linear_attention"}),
        {"causal_conv1d_fn": convolved, "torch_chunk_gated_delta_rule": gated_delta.ruled},
        "linear_attention",
        gated_delta.state_flops,
        gated_delta.check_sizes,
    ),
    _Kind(SHORT_CONVOLUTIONS, frozenset({"conv"}), {"causal_conv1d_fn": convolved}),
    *(
        _Kind(
            types,
            layers,
            {
                "causal_conv1d_fn": convolved,
                "mamba2_chunk_scan": state_space.scanned,
                "mamba2_split_conv1d_scan_combined": state_space.not_fused,
            },
            with_states,
            state_space.state_flops,
            state_space.check_sizes,
        )
        for types, layers, with_states in (
            (("bamba", "granitemoehybrid"), frozenset({"linear_attention"}), "linear_attention"),
            (("nemotron_h",), frozenset({"linear_attention", "mlp", "moe"}), "linear_attention"),
            # Both beside one another in every layer.
            (("falcon_h1",), frozenset[str](), "hybrid"),
        )
    ),
)
_BY_TYPE = {name: kind for kind in _KINDS for name in kind.types}


def layers_in_order(config: Any) -> frozenset[str]:
    """What ``layer_types`` of ``config``, of transformers, calls layers that are trained besides those of attention
    alone; empty where the model is of no type that has any."""
    kind = _BY_TYPE.get(config.model_type)
    return frozenset() if kind is None else kind.layers | ({kind.with_states} - {""})


def layers_without_attention(config: Any) -> frozenset[str]:
    """Those of ``layers_in_order`` that have no attention."""
    kind = _BY_TYPE.get(config.model_type)
    return frozenset() if kind is None else kind.layers


def state_flops(huggingface: Any) -> list[int]:
    """FLOPs of a token, forwards, in the states of each layer of the model; 0 in one that has none."""
    config = huggingface.config
    kind = _BY_TYPE.get(config.model_type)
    if kind is None or not kind.with_states:
        return [0] * len(huggingface.base_model.layers)
    return [kind.state_flops(config) if layer == kind.with_states else 0 for layer in config.layer_types]


def keep_documents_apart(huggingface: Any) -> None:
    """Have these layers of a Hugging Face model be computed by what is here, where they are told of documents.

    That is of all models of its class in this process; one that is told of no documents computes as it did.
    Raises ``ModelError`` for sizes that cannot be computed with, or a transformers that computes them otherwise.
    """
    config = huggingface.config
    kind = _BY_TYPE.get(config.model_type)
    if kind is None:
        return
    kind.check(config)
    try:
        compute_with(huggingface, kind.functions)
    except AttributeError as error:
        raise ModelError(
            f"a model of type {config.model_type!r} is not supported with this version of transformers, which "
            f"computes its layers otherwise ({error}): use the version of the trainer's image"
        ) from error
