"""Layers that mix tokens are told where documents begin and end, also where transformers' own keep that to themselves.

What is done is done to classes of transformers, and so to all models of them in this process; one that is told of no
documents computes as it did.
"""

import inspect
from functools import partial, wraps
from typing import Any

from . import in_order

KEEPING = ("nemotron", "stablelm")
"""Types whose layers know any argument, and give their attention, which does too, none of these."""
_HANDS_ON = "sft_hands_on"


def keep_documents_apart(huggingface: Any) -> None:
    """Have all layers of a Hugging Face model that mix tokens keep to documents, of which its forward pass is told.

    Raises ``ModelError`` where they cannot.
    """
    in_order.keep_documents_apart(huggingface)
    if huggingface.config.model_type in KEEPING:
        for kind in {type(layer) for layer in huggingface.base_model.layers}:
            if not hasattr(kind, _HANDS_ON):
                kind.forward = _handing_on(kind.forward)
                setattr(kind, _HANDS_ON, True)


def _handing_on(theirs: Any) -> Any:
    """The forward pass ``theirs`` of a layer, whose attention is given what it has no name for."""
    known = inspect.signature(theirs).parameters

    @wraps(theirs)
    def forward(layer: Any, *arguments: Any, **named: Any) -> Any:
        attention = layer.self_attn
        others = {name: value for name, value in named.items() if name not in known}
        # As an attribute of its own, in front of that of its class.
        attention.forward = partial(type(attention).forward, attention, **others)
        try:
            return theirs(layer, *arguments, **named)
        finally:
            del attention.forward

    return forward
