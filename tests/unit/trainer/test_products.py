"""Linear layers that multiply by oneDNN give what torch's do, forward and backward."""

from pathlib import Path

import pytest
import torch
from torch import nn

from sft_trainer.models import products


class Block(nn.Module):
    """One with a bias, one without: wider than it is long, and the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(24, 40)
        self.down = nn.Linear(40, 24, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.down(self.up(inputs).sigmoid())
        return output


def _both() -> tuple[Block, Block]:
    torch.manual_seed(0)
    plain, other = Block(), Block()
    other.load_state_dict(plain.state_dict())
    products.multiply_by_onednn([other])
    return plain, other


@pytest.mark.parametrize("tokens", [1, 2, 77])
def test_output_and_gradients_are_those_of_torch(tokens: int) -> None:
    plain, other = _both()
    inputs = torch.randn(1, tokens, 24)
    found = []
    for block in (plain, other):
        given = inputs.clone().requires_grad_()
        output = block(given)
        (output * torch.arange(24)).sum().backward()
        gradients = [parameter.grad for parameter in block.parameters()]
        found.append([output, given.grad, *gradients])
    for one, same in zip(*found, strict=True):
        torch.testing.assert_close(same, one, rtol=1e-5, atol=1e-4)


def test_layers_of_another_precision_are_left_to_torch() -> None:
    plain, other = (block.to(torch.bfloat16) for block in _both())
    inputs = torch.randn(1, 5, 24, dtype=torch.bfloat16)

    assert torch.equal(other(inputs), plain(inputs))


def test_a_frozen_weight_has_no_gradient() -> None:
    _, other = _both()
    other.requires_grad_(False)
    inputs = torch.randn(1, 5, 24, requires_grad=True)

    other(inputs).sum().backward()

    assert inputs.grad is not None
    assert other.up.weight.grad is None


@pytest.mark.parametrize(
    ("vendor", "wide", "device", "wins"),
    [
        ("AuthenticAMD", True, "cpu", True),
        ("GenuineIntel", True, "cpu", False),
        ("AuthenticAMD", False, "cpu", False),
        ("AuthenticAMD", True, "cuda", False),
    ],
)
def test_onednn_is_for_wide_registers_of_other_makers(
    vendor: str, wide: bool, device: str, wins: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told = tmp_path / "cpuinfo"
    told.write_text(f"processor\t: 0\nvendor_id\t: {vendor}\n")
    monkeypatch.setattr(products, "_CPUINFO", told)
    monkeypatch.setattr(products, "_wide_registers", lambda: wide)

    assert products.onednn_wins(torch.device(device)) is wins
