"""Layers of linear attention on the device: their operators against each document alone in double precision."""

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
    """Rule and convolution, output and gradients, in the precision of training and in fp32, and what they take."""
    from sft_trainer.models.delta_rule import rule_operator
    from sft_trainer.models.gated_delta import convolution_operator

    figures: dict[str, Figure] = {}
    for dtype, limit in _LIMITS.items():
        worst = 0.0
        for operator, drawn in (
            (rule_operator, _of_rule(sum(_DOCUMENTS), _HEADS)),
            (convolution_operator, _filtered()),
        ):
            error = _error(operator, drawn, dtype, device)
            require(f"{operator} in {dtype}: error", error, limit)
            worst = max(worst, error)
        figures[f"gated_delta_nets_{str(dtype).removeprefix('torch.')}_error"] = worst
    if device.type == "cuda":
        figures["gated_delta_rule_milliseconds"] = 1e3 * _seconds(rule_operator, device)
    return figures


def _of_rule(tokens: int, keys: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    values = keys * _SHARING
    query, key, value = (torch.randn(1, tokens, heads, _SIZE, generator=generator) for heads in (keys, keys, values))
    decay, beta = (torch.randn(1, tokens, values, generator=generator) for _ in range(2))
    return [query, key, value, -softplus(3 * decay - 2), beta.sigmoid()]


def _filtered() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randn(1, sum(_DOCUMENTS), _CHANNELS, generator=generator)
    return [tokens, torch.randn(_CHANNELS, _WIDTH, generator=generator)]


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


def _seconds(operator: Any, device: Device) -> float:
    """Of forward and backward of a layer with half the heads of Qwen3-Next, in bf16."""
    inputs = [each.to(device, torch.bfloat16) for each in _of_rule(_MEASURED_TOKENS, _MEASURED_HEADS // _SHARING)]
    inputs[3] = inputs[3].float()
    inputs, ends = [each.requires_grad_() for each in inputs], _ends((_MEASURED_TOKENS,), device)

    def once() -> None:
        output = operator(*inputs, ends)
        torch.autograd.grad(output, inputs, output.detach())

    return seconds_of(device, 5, once)
