"""What a model makes of its logits after the head, found out with a small one of the same architecture.

Names of fields do not say it: of two architectures with ``logits_scaling`` one divides by it and one multiplies.
"""

from itertools import product
from typing import Any

import torch
from torch import nn

from sft_trainer.errors import ModelError
from sft_trainer.loss import Logits

from .attention import Boundaries, boundary_arguments
from .probe import small_model

_FACTORS = ("logit_scale", "logits_scaling", "lm_head_multiplier")
_CAP = "final_logit_softcapping"
_TOKENS = 12
_LARGE = 30.0
"""Times the usual weights of a head: its products are then where a cap bends them."""
_TOLERANCE = 1e-5


def logits_of(model: Any) -> Logits:
    """Of the Hugging Face ``model`` (on the meta device). Raises ``ModelError`` when they are none that is known."""
    config = model.config
    caps = [None, float(cap)] if (cap := getattr(config, _CAP, None)) else [None]
    kind = config.model_type
    try:
        small = small_model(model)
        products, wanted = _products_and_logits(small)
    except Exception as error:  # layers and heads that want other arguments
        text = " ".join(str(error).split())[:300]
        raise ModelError(
            f"a model of type {kind!r} is not supported: what it makes of its logits cannot be found out "
            f"({type(error).__name__}: {text}); choose another model"
        ) from error
    # By its width one may be another in the small one.
    factors = [(1.0, 1.0), *zip(_factors(small.config), _factors(config), strict=True)]
    if any(of_small == 1 != own for of_small, own in factors):
        factors = []
    for cap, (of_small, own) in product(caps, factors):
        # Without a constant that depends on the rows: as far as the loss sees them.
        found, _ = Logits(of_small, cap).log_probabilities(products.clone())
        if wanted.shape == found.shape:
            expected = wanted.log_softmax(-1)
            if (found - expected).abs().max() <= _TOLERANCE * expected.abs().max():
                return Logits(own, cap)
    raise ModelError(
        f"a model of type {kind!r} is not supported: it changes its logits after the head in a way that is not known "
        "here, and without that another model would be trained; choose another model"
    )


def _factors(config: Any) -> list[float]:
    """By which a model of ``config`` may multiply its logits, as its fields say it."""
    given = [float(value) for name in _FACTORS if (value := getattr(config, name, None))]
    return [*given, *(1 / value for value in given)]


@torch.no_grad()
def _products_and_logits(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states times head, with its bias, and the logits that ``model`` itself makes; (tokens, vocabulary)."""
    head = model.get_output_embeddings()
    head.weight.mul_(_LARGE)
    arguments = boundary_arguments(Boundaries.of((_TOKENS,)))
    hidden: list[torch.Tensor] = []
    # Not every one hands unknown arguments on.
    model.base_model.register_forward_pre_hook(lambda _, args, given: (args, {**given, **arguments}), with_kwargs=True)
    model.base_model.register_forward_hook(lambda _, args, output: hidden.append(output.last_hidden_state[0]))
    ids = torch.randint(3, head.out_features, (1, _TOKENS), generator=torch.Generator().manual_seed(0))
    logits: torch.Tensor = model(input_ids=ids, position_ids=torch.arange(_TOKENS)[None], use_cache=False).logits[0]
    return nn.functional.linear(hidden[0], head.weight, head.bias), logits
