"""The loss with the part of it that is compiled, beside the one without: here for a compiler that makes no code."""

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from sft_api.memory import logit_bytes
from sft_trainer import loss as loss_module
from sft_trainer.loss import CROSS_ENTROPY, Logits, Objective, Slopes, linear_cross_entropy
from sft_trainer.models import compiling
from tests.live_bytes import LiveBytes
from tests.unit.trainer.test_loss import OBJECTIVES, VOCABULARY, inputs


def compiled_by(
    backend: str, monkeypatch: pytest.MonkeyPatch, objective: Objective = CROSS_ENTROPY
) -> tuple[Slopes, Any]:
    """Slopes as some compiler makes them, and what counts how often."""
    torch.compiler.reset()
    counter = CompileCounterWithBackend(backend)
    monkeypatch.setattr(compiling, "BACKEND", counter)
    return compiling.compiled_slopes(objective), counter


def check_numbers(
    backend: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, objective: Objective = CROSS_ENTROPY
) -> None:
    """Those of the loss without, from one compilation."""
    # Given chunks of seven rows and what is left: none, one, several; of fewer rows than that, and of one alone
    monkeypatch.setattr(loss_module, "CHUNK_ELEMENTS", 7 * VOCABULARY)
    monkeypatch.setattr(loss_module, "_SLICE_ROWS", 10)
    # A probability is rounded by as much of itself as its logarithm is rounded.
    times = 10 if objective.by_probability else 2 if objective.smoothing else 1
    compiled, counter = compiled_by(backend, monkeypatch, objective)
    for rows, frozen in ((50, ""), (49, "head"), (3, "hidden"), (1, ""), (0, ""), (52, ""), (2, "head"), (8, "")):
        hidden, weight, labels = inputs(dtype, rows)
        hidden.requires_grad_(frozen != "hidden")
        weight.requires_grad_(frozen != "head")
        wanted = [tensor for tensor in (hidden, weight) if tensor.requires_grad]

        # When both are computed
        found, right = (
            linear_cross_entropy(hidden, weight, labels, 1 / (rows + 20), fused=each, objective=objective)
            for each in (compiled, None)
        )
        gradients = (torch.autograd.grad(scaled, wanted) for scaled, _ in (found, right))

        # Then value and gradients are the same but for rounding
        torch.testing.assert_close(found, right, rtol=times * 5e-7, atol=0)
        for one, other in zip(*gradients, strict=True):
            assert one.dtype == dtype
            distance = (one.double() - other.double()).norm()
            assert distance <= times * (1e-6 if dtype == torch.float32 else 2e-3) * other.double().norm()
    # And nothing was compiled for another number of rows, or another scale
    assert counter.frame_count == 1


@pytest.mark.parametrize("objective", [CROSS_ENTROPY, *OBJECTIVES])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_compiled_once_gives_the_numbers_of_what_is_not(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, objective: Objective
) -> None:
    check_numbers("aot_eager", dtype, monkeypatch, objective)


@pytest.mark.parametrize("first", [VOCABULARY, VOCABULARY + 1, 16, 2])
def test_no_number_of_rows_that_comes_first_is_of_the_code(monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    compiled, counter = compiled_by("aot_eager", monkeypatch)
    for rows in (first, 50, VOCABULARY, 2, 300):
        linear_cross_entropy(*inputs(rows=rows), 1 / rows, fused=compiled)
    assert counter.frame_count == 1


@pytest.mark.parametrize("label", [VOCABULARY, -100])
def test_a_label_that_is_no_token_is_an_error_there_as_well(monkeypatch: pytest.MonkeyPatch, label: int) -> None:
    compiled, _ = compiled_by("aot_eager", monkeypatch)
    hidden, weight, labels = inputs()
    labels[3] = label
    for each in (None, compiled):
        with pytest.raises((RuntimeError, IndexError), match="out of bounds"):
            linear_cross_entropy(hidden, weight, labels, 1.0, fused=each)


def test_no_other_logits_and_no_evaluation_are_computed_with_what_is_compiled() -> None:
    def never(*_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        raise AssertionError

    given = inputs()
    linear_cross_entropy(*given, 1.0, Logits(0.5), fused=never)
    with torch.no_grad():
        linear_cross_entropy(*given, 1.0, fused=never)
    with pytest.raises(AssertionError):
        linear_cross_entropy(*given, 1.0, fused=never)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_of_a_chunk_only_the_products_and_their_gradient_are_held(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    # Given several chunks, beside which nothing else is large, and code that makes what it returns and nothing more
    vocabulary, rows = 3000, 8
    monkeypatch.setattr(loss_module, "CHUNK_ELEMENTS", vocabulary * rows)
    weight = torch.randn(vocabulary, 2).to(dtype)
    hidden = torch.randn(3 * rows, 2).to(dtype).requires_grad_()

    def made(products: torch.Tensor, of_labels: torch.Tensor, *_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return of_labels.float(), torch.zeros_like(products)

    with LiveBytes() as live:
        linear_cross_entropy(hidden, weight, torch.arange(3 * rows), 1.0, fused=made)

    held = rows * vocabulary * 2 * dtype.itemsize
    assert live.most == pytest.approx(held, rel=0.02)
    assert held <= rows * vocabulary * logit_bytes("", dtype.itemsize)
