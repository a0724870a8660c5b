"""Layers that go through tokens in order on the device: their operators against each document alone in double
precision."""

from typing import Any

import torch
from torch.nn.functional import softplus

from .figures import Figure
from .kernels import Device, error_of, require, seconds_of

# Of one token, of a chunk and its neighbours, and of several.
_DOCUMENTS = (1, 64, 63, 301, 2, 130)
_LIMITS = {torch.bfloat16: 2e-2, torch.float32: 1e-4}
_HEADS, _SHARING, _SIZE, _CHANNELS, _WIDTH = 4, 2, 128, 512, 4
_MEASURED_TOKENS, _MEASURED_HEADS = 8192, 16


def gated_delta_nets(device: Device) -> dict[str, Figure]:
    """Rule, scan and convolution, output and gradients, in bf16 and in fp32, and what the first two take."""
    from sft_trainer.models.convolution import convolution_operator
    from sft_trainer.models.delta_rule import rule_operator
    from sft_trainer.models.state_space import scan_operator

    figures: dict[str, Figure] = {}
    for dtype, limit in _LIMITS.items():
        worst = 0.0
        for operator, drawn in (
            (rule_operator, _of_rule(sum(_DOCUMENTS), _HEADS)),
            (scan_operator, _of_scan(sum(_DOCUMENTS), _HEADS)),
            (convolution_operator, _filtered()),
        ):
            error = _error(operator, drawn, dtype, device)
            require(f"{operator} in {dtype}: error", error, limit)
            worst = max(worst, error)
        figures[f"gated_delta_nets_{str(dtype).removeprefix('torch.')}_error"] = worst
    if device.type == "cuda":
        # Half the heads of a layer of Qwen3-Next, and a group of those of Nemotron Nano, in bf16 but for their decays.
        for name, operator, drawn, exact in (
            ("gated_delta_rule", rule_operator, _of_rule(_MEASURED_TOKENS, _MEASURED_HEADS // _SHARING), (3,)),
            ("state_space_scan", scan_operator, _of_scan(_MEASURED_TOKENS, _MEASURED_HEADS), (1, 2)),
        ):
            inputs = [
                each.to(device, torch.float32 if place in exact else torch.bfloat16) for place, each in enumerate(drawn)
            ]
            figures[f"{name}_milliseconds"] = 1e3 * _seconds(operator, inputs, device)
    return figures


def _of_rule(tokens: int, keys: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    values = keys * _SHARING
    query, key, value = (torch.randn(1, tokens, heads, _SIZE, generator=generator) for heads in (keys, keys, values))
    decay, beta = (torch.randn(1, tokens, values, generator=generator) for _ in range(2))
    return [query, key, value, -softplus(3 * decay - 2), beta.sigmoid()]


def _of_scan(tokens: int, heads: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(1, tokens, *shape, generator=generator)

    steps = softplus(some(heads) - 2)
    return [some(heads, _SIZE // 2), steps, -2 * steps, *(some(1, _SIZE) for _ in range(2)), some(heads)[0, 0]]


def _filtered() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randn(1, sum(_DOCUMENTS), _CHANNELS, generator=generator)
    return [tokens, *(torch.randn(*shape, generator=generator) for shape in ((_CHANNELS, _WIDTH), (_CHANNELS,)))]


def _ends(lengths: tuple[int, ...], device: Device) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int().to(device)


def _error(operator: Any, drawn: list[torch.Tensor], dtype: torch.dtype, device: Device) -> float:
    """The largest, of output and gradients."""
    ours = [each.to(device, dtype).requires_grad_() for each in drawn]
    output = operator(*ours, _ends(_DOCUMENTS, device))
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(2)).to(device, dtype)
    found = [output, *torch.autograd.grad(output, ours, upstream)]
    right = [each.detach().double().requires_grad_() for each in ours]
    pieces = [each.split(_DOCUMENTS, dim=1) if each.shape[:1] == (1,) else [each] * len(_DOCUMENTS) for each in right]
    expected = torch.cat(
        [operator(*document, _ends((length,), device)) for length, *document in zip(_DOCUMENTS, *pieces, strict=True)],
        dim=1,
    )
    wanted = [expected, *torch.autograd.grad(expected, right, upstream.double())]
    return max(error_of(one.detach(), other.detach()) for one, other in zip(found, wanted, strict=True))


def _seconds(operator: Any, given: list[torch.Tensor], device: Device) -> float:
    """Of forward and backward."""
    inputs, ends = [each.requires_grad_() for each in given], _ends((_MEASURED_TOKENS,), device)

    def once() -> None:
        output = operator(*inputs, ends)
        torch.autograd.grad(output, inputs, output.detach())

    return seconds_of(device, 5, once)
