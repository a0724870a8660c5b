"""The chunked loss against plain cross-entropy: value and gradients."""

import pytest
import torch

from sft_trainer import loss as loss_module


@pytest.mark.parametrize("elements", [8 * 50 * 97, 7 * 97, 97])
@pytest.mark.parametrize("frozen_head", [False, True])
def test_equals_cross_entropy(monkeypatch: pytest.MonkeyPatch, elements: int, frozen_head: bool) -> None:
    # Given room for all logits, for seven rows, and for one row at a time
    monkeypatch.setattr(loss_module, "CHUNK_ELEMENTS", elements)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(50, 16, generator=generator, requires_grad=True)
    weight = torch.randn(97, 16, generator=generator, requires_grad=not frozen_head)
    labels = torch.randint(0, 97, (50,), generator=generator)

    expected = torch.nn.functional.cross_entropy(hidden @ weight.T, labels, reduction="sum")
    inputs = [hidden] if frozen_head else [hidden, weight]
    expected_gradients = torch.autograd.grad(expected / 7, inputs)
    actual = loss_module.linear_cross_entropy_sum(hidden, weight, labels)
    gradients = torch.autograd.grad(actual / 7, inputs)

    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=0)
    for one, other in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_no_gradients_are_computed_when_none_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "CHUNK_ELEMENTS", 1)
    with torch.no_grad():
        value = loss_module.linear_cross_entropy_sum(torch.ones(3, 4), torch.ones(5, 4), torch.tensor([0, 1, 2]))
    assert value.item() == pytest.approx(3 * torch.log(torch.tensor(5.0)).item())
