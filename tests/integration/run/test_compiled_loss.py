"""The loss with the part of it that is compiled, by the compiler itself."""

import pytest
import torch

from sft_trainer.loss import CROSS_ENTROPY, Objective
from sft_trainer.models.compiling import compiled_slopes
from tests.unit.trainer.test_compiled_loss import check_numbers
from tests.unit.trainer.test_loss import OBJECTIVES, inputs


@pytest.mark.parametrize(
    ("dtype", "objective"),
    [
        (torch.float32, CROSS_ENTROPY),
        (torch.bfloat16, CROSS_ENTROPY),
        *((torch.bfloat16, other) for other in OBJECTIVES),
    ],
)
def test_what_is_compiled_once_gives_the_numbers_of_what_is_not(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, objective: Objective
) -> None:
    check_numbers("inductor", dtype, monkeypatch, objective)


def test_what_is_compiled_is_as_near_to_the_right_numbers() -> None:
    # Given logits that are far apart, in bf16, and labels likely and unlikely
    torch.compiler.reset()
    compiled = compiled_slopes()
    hidden, weight, labels = (*(each.detach() for each in inputs(torch.bfloat16)[:2]), inputs()[2])
    products = (8 * hidden) @ weight.T
    target = labels[:, None]
    exact = products.double().log_softmax(-1)
    expected = exact.exp().scatter_add_(1, target, -torch.ones(50, 1, dtype=torch.float64)) / 1020

    log_probabilities, gradient = compiled(products, products.gather(1, target), target, torch.tensor(1 / 1020))

    torch.testing.assert_close(log_probabilities.double(), exact.gather(1, target), rtol=1e-6, atol=1e-6)
    # Rounded once, to the nearest: off by half of what numbers of bf16 are apart
    torch.testing.assert_close(gradient.double(), expected, rtol=2**-8, atol=1e-9)
