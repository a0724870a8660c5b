"""The chunked loss against plain cross-entropy: value and gradients."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_scale_of_the_loss_is_not_rounded(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    # Given a denominator whose inverse bf16 cannot hold
    monkeypatch.setattr(loss_module, "CHUNK_ELEMENTS", 1)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(50, 16, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(97, 16, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(0, 97, (50,), generator=generator)
    scale = torch.tensor(1 / 1027, dtype=torch.float32)

    unscaled = torch.autograd.grad(loss_module.linear_cross_entropy_sum(hidden, weight, labels), hidden)[0]
    scaled = torch.autograd.grad(loss_module.linear_cross_entropy_sum(hidden, weight, labels) * scale, hidden)[0]

    # Then each gradient is rounded once, at the end
    assert scaled.dtype == dtype
    assert torch.equal(scaled, (unscaled.double() * scale.double()).float().to(dtype))


class _Products(TorchDispatchMode):
    """Counts products of matrices, and remembers the largest tensors that are made besides."""

    def __init__(self) -> None:
        super().__init__()
        self.products = 0
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.products += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        if isinstance(result, torch.Tensor) and func not in (torch.ops.aten.t.default, torch.ops.aten.detach.default):
            self.shapes.add(tuple(result.shape))
        return result


@pytest.mark.parametrize("evaluates", [False, True])
def test_an_evaluation_does_no_work_for_gradients(monkeypatch: pytest.MonkeyPatch, evaluates: bool) -> None:
    # Given a head that is trained, and two chunks
    monkeypatch.setattr(loss_module, "CHUNK_ELEMENTS", 2 * 5)
    weight = torch.ones(5, 4, requires_grad=True)
    hidden = torch.ones(4, 4, requires_grad=not evaluates)

    # When its loss is computed
    with _Products() as work, torch.set_grad_enabled(not evaluates):
        value = loss_module.linear_cross_entropy_sum(hidden, weight, torch.tensor([0, 1, 2, 3]))

    # Then without gradients it takes one product a chunk, not three, and no room for a gradient of the head
    assert value.item() == pytest.approx(4 * torch.log(torch.tensor(5.0)).item())
    assert work.products == (2 if evaluates else 6)
    assert ((5, 4) in work.shapes) == (not evaluates)
    assert value.requires_grad == (not evaluates)
