"""Products of the linear layers on a CPU whose wide registers torch's own library does not use.

torch multiplies fp32 matrices with MKL, which on AMD's processors with AVX-512 is half as fast as oneDNN, which comes
with torch too. Same numbers but for their last bits. See docs/design/0029.
"""

import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from sft_trainer.versions import linear_product

_CPUINFO = Path("/proc/cpuinfo")


def multiply_by_onednn(blocks: Iterable[nn.Module]) -> None:
    """Have the linear layers in ``blocks`` compute by oneDNN what they compute in fp32; names and parameters stay."""
    for block in blocks:
        for module in block.modules():
            if type(module) is nn.Linear:
                layer: Any = module
                layer.forward = functools.partial(_forward, module)


def onednn_wins(device: torch.device) -> bool:
    """Whether oneDNN multiplies faster than MKL on ``device``: AVX-512 on a processor of AMD's."""
    return device.type == "cpu" and _wide_registers() and _is_amd(_CPUINFO)


def _wide_registers() -> bool:
    return torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX512"


def _is_amd(told: Path) -> bool:
    """By what the kernel tells of the processors."""
    try:
        return "vendor_id\t: AuthenticAMD" in told.read_text()
    except OSError:
        return False


def _forward(module: nn.Linear, inputs: torch.Tensor) -> torch.Tensor:
    if inputs.dtype != torch.float32 or module.weight.dtype != torch.float32 or inputs.device.type != "cpu":
        return linear(inputs, module.weight, module.bias)
    output: torch.Tensor = _Product.apply(inputs, module.weight)
    return output if module.bias is None else output + module.bias


class _Product(torch.autograd.Function):
    """``inputs`` (…, width) times the transposed ``weight`` (outputs, width)."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        return linear_product(inputs, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        of_inputs = of_weight = None
        if ctx.needs_input_grad[0]:
            of_inputs = linear_product(gradients[0], weight.T)
        if ctx.needs_input_grad[1]:
            # The first factor is copied by rows: the smaller one goes there.
            left, right = (each.reshape(-1, each.shape[-1]).T for each in (gradients[0], inputs))
            if left.shape[0] <= right.shape[0]:
                of_weight = linear_product(left, right)
            else:
                of_weight = linear_product(right, left).T
        return of_inputs, of_weight
