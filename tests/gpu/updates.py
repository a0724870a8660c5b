"""What an update of weights takes on the device, by how these and their moments are held; and that 8 bits are the same
bits there."""

import timeit
from functools import partial
from pathlib import Path

import torch

from sft_api.v1alpha1 import SFTJobSpec
from sft_trainer.eight_bits import FIRST, SECOND, packed, unpacked
from sft_trainer.muon import orthogonalise_all
from sft_trainer.optim import build_optimizer, update
from sft_trainer.trainable import DTYPES
from tests.parity.runs import manifest, resolve

from .figures import Figure
from .kernels import seconds_of

_WAYS = {
    # Weights and moments, and whose these are
    "fp32": ("fp32", "fp32", "adamw"),
    "moments_bf16": ("fp32", "bf16", "adamw"),
    "moments_int8": ("fp32", "int8", "adamw"),
    "bf16": ("bf16", "fp32", "adamw"),
    "bf16_moments_bf16": ("bf16", "bf16", "adamw"),
    "bf16_moments_int8": ("bf16", "int8", "adamw"),
    "muon": ("fp32", "fp32", "muon"),
    "bf16_muon_bf16": ("bf16", "bf16", "muon"),
}
_ROWS = {"cuda": 2**14, "cpu": 2**7}
_COLUMNS = 2**13
"""Of the matrix that is updated: on a GPU 128 million weights, more than are updated at once."""


def updates(inputs: Path, device: torch.device) -> dict[str, Figure]:
    """Of each way of holding them bytes of a weight, its gradient and its moments, and what the allocator gave out
    besides while an update was made, and seconds for a billion weights.

    Raises where codes and exponents made on the device differ from those that the host makes of the same numbers.
    """
    _compare(device)
    figures: dict[str, Figure] = {}
    for name, (weights, states, kind) in _WAYS.items():
        optimizer = {"type": kind, "stateDtype": states}
        training = {"precision": "bf16", "parameterDtype": weights, "optimizer": optimizer}
        spec = resolve(manifest(inputs, inputs.with_name("store"), training=training)).spec
        figures |= {f"update_{name}_{what}": value for what, value in _of(spec, DTYPES[weights], device).items()}
    return figures


def _of(spec: SFTJobSpec, dtype: torch.dtype, device: torch.device) -> dict[str, float]:
    on_gpu, before = device.type == "cuda", _allocated(device)
    weight = torch.nn.Parameter(torch.randn(_ROWS[device.type], _COLUMNS, device=device, dtype=dtype))
    weight.grad, finite = torch.randn_like(weight), torch.zeros((), device=device)
    in_bf16 = partial(orthogonalise_all, dtype=torch.bfloat16)
    named = [("layers.0.mlp.up_proj.weight", weight)]
    optimizer = build_optimizer(named, spec, 1e-5, matrices=[weight], orthogonalise=in_bf16)
    slope = weight.grad

    def step() -> None:
        weight.grad = slope
        update(optimizer, 1e-5, finite)

    # Moments are made by the first.
    step()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    seconds = seconds_of(device, 5, step) if on_gpu else timeit.timeit(step, number=3) / 3
    held = [weight, slope, *(value for value in optimizer.state[weight].values() if value.ndim)]
    figures = {
        "bytes": sum(each.nbytes for each in held) / weight.numel(),
        "seconds_of_1b": seconds * 1e9 / weight.numel(),
    }
    if on_gpu:
        now = _allocated(device)
        besides = torch.cuda.max_memory_allocated(device) - now
        figures |= {"bytes_held": (now - before) / weight.numel(), "mib_besides": besides / 2**20}
    return figures


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _compare(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(2**16, generator=generator) * torch.randn(2**16, generator=generator).mul(4).exp()
    values[:100] = 0.0
    uniform = torch.rand(2**16, generator=generator)
    for kind, numbers in ((FIRST, values), (SECOND, values.square())):
        made = []
        for where in (torch.device("cpu"), device):
            codes, exponents = packed(numbers.to(where), uniform.to(where), kind)
            made.append([each.cpu() for each in (codes, exponents, unpacked(codes, exponents, kind))])
        if not all(torch.equal(here, there) for here, there in zip(*made, strict=True)):
            raise AssertionError(f"{kind.dtype} codes of the device are not those of the host")
