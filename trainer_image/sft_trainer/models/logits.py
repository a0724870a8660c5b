"""What a model makes of its logits after the head, found out with a small one of the same architecture.

Names of fields do not say it: of two architectures with ``logits_scaling`` one divides by it and one multiplies.
"""

from itertools import product
from typing import Any

import torch

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
    given = [value for name in _FACTORS if (value := getattr(config, name, None))]
    factors = [1.0, *map(float, given), *(1 / value for value in given)]
    caps = [None, float(cap)] if (cap := getattr(config, _CAP, None)) else [None]
    kind = config.model_type
    try:
        products, wanted = _products_and_logits(small_model(model))
    except Exception as error:  # layers and heads that want other arguments
        text = " ".join(str(error).split())[:300]
        raise ModelError(
            f"a model of type {kind!r} is not supported: what it makes of its logits cannot be found out "
            f"({type(error).__name__}: {text}); choose another model"
        ) from error
    for cap, factor in product(caps, factors):
        logits = Logits(factor, cap)
        # Without a constant that depends on the rows: as far as the loss sees them.
        found, _ = logits.log_probabilities(products.clone())
        if wanted.shape == found.shape:
            expected = wanted.log_softmax(-1)
            if (found - expected).abs().max() <= _TOLERANCE * expected.abs().max():
                return logits
    raise ModelError(
        f"a model of type {kind!r} is not supported: it changes its logits after the head in a way that is not known "
        "here, and without that another model would be trained; choose another model"
    )


@torch.no_grad()
def _products_and_logits(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states times head, and the logits that ``model`` itself makes; both (tokens, vocabulary)."""
    head = model.get_output_embeddings().weight
    head.mul_(_LARGE)
    arguments = boundary_arguments(Boundaries.of((_TOKENS,)))
    hidden: list[torch.Tensor] = []
    # Not every one hands unknown arguments on.
    model.base_model.register_forward_pre_hook(lambda _, args, given: (args, {**given, **arguments}), with_kwargs=True)
    model.base_model.register_forward_hook(lambda _, args, output: hidden.append(output.last_hidden_state[0]))
    ids = torch.randint(3, head.shape[0], (1, _TOKENS), generator=torch.Generator().manual_seed(0))
    logits: torch.Tensor = model(input_ids=ids, position_ids=torch.arange(_TOKENS)[None], use_cache=False).logits[0]
    return hidden[0] @ head.T, logits
