"""Frozen weights in NF4, 4 bits each, as QLoRA holds them (Dettmers et al. 2023, arXiv 2305.14314), and their products.

A weight is one of 16 values (the quantiles of a normal distribution, and 0) times the largest magnitude of the 64
weights of its row that it is among, in fp32. bitsandbytes makes the same bits of the same weights, without its
quantised scales: those are shared by 16384 weights, whatever rows they are of, and rows are what processes share out.

A packed row is what is gathered from other processes and lies in memory: the 4 bits of all its weights, and then its
scales. It is unpacked where it is multiplied with, forwards, and once more backwards; nobody keeps it so. Its bytes are
held in a tensor of the dtype that is computed in: FSDP then takes them for what it need not cast, and torch 2.11's
shards nothing but numbers with a fraction.
"""

from typing import Any

import torch
from torch.nn.functional import embedding
from torch.nn.functional import linear as linear_function

from sft_api.memory import NF4_BLOCK

from .packed_rows import Format, some_rows

VALUES = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""By code. From appendix E of the paper."""
_PAIRS = torch.tensor([[VALUES[byte >> 4], VALUES[byte & 15]] for byte in range(256)])
"""The two values in a byte, that of its upper half first."""
_ROW_BYTES = NF4_BLOCK // 2 + 4
"""Of each block in a packed row."""

_pairs = {torch.device("cpu"): _PAIRS}


def linear(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """What torch's function of this name gives, of a ``weight`` that may be packed; such a one has no gradient."""
    if weight.shape[1] == inputs.shape[-1]:
        return linear_function(inputs, weight, bias)
    output: torch.Tensor = _Product.apply(inputs, weight, bias)
    return output


def values_of(weight: torch.Tensor, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Of a ``weight`` with so many ``columns``; a packed one is what products in ``dtype`` take it for."""
    return weight if weight.shape[1] == columns else unpacked(weight, dtype)


class _Product(torch.autograd.Function):
    """Keeps the packed weight for the backward pass, where autograd would keep the whole one of every layer."""

    @staticmethod
    def forward(inputs: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return linear_function(inputs, unpacked(packed, inputs.dtype), bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (packed,), (gradient,) = ctx.saved_tensors, gradients
        return gradient @ unpacked(packed, gradient.dtype, again=True), None, None


def pack(values: torch.Tensor) -> torch.Tensor:
    """``values`` (..., columns) of any dtype, rounded to packed rows, uint8; columns are a multiple of the block."""
    rows = values.reshape(-1, values.shape[-1])
    packed = values.new_empty((rows.shape[0], row_bytes(rows.shape[1])), dtype=torch.uint8)
    for some, into in some_rows(rows, packed, rows.shape[1]):
        into.copy_(_pack(some))
    return packed.view(*values.shape[:-1], -1)


def unpacked(packed: torch.Tensor, dtype: torch.dtype, *, again: bool = False) -> torch.Tensor:
    """The values (..., columns) of ``packed`` rows, bytes in any dtype, rounded to ``dtype`` once.

    ``again`` in a backward pass: what is compiled then looks values up by another integer. Of two ways that are the
    same to the letter the compiler takes one, and keeps the whole weight of every layer for the backward pass.
    """
    rows, columns = packed.view(torch.uint8).flatten(0, -2), columns_of(packed)
    if torch.compiler.is_compiling():
        values = _unpack(rows, torch.int64 if again else torch.int32).to(dtype)
    else:
        values = packed.new_empty((rows.shape[0], columns), dtype=dtype)
        for some, into in some_rows(rows, values, columns):
            into.copy_(_unpack(some))
    return values.view(*packed.shape[:-1], columns)


def prepare(device: torch.device) -> None:
    """Have what ``unpacked`` looks values up in on ``device``; before the first layer there is computed."""
    pairs = _PAIRS.to(device)
    # A tensor's own device has an index, which a name of one may lack.
    _pairs[pairs.device] = pairs


def _pack(values: torch.Tensor) -> torch.Tensor:
    blocks = values.float().reshape(values.shape[0], -1, NF4_BLOCK)
    scales = blocks.abs().amax(-1)
    # Of a block of zeros nothing is divided by 0.
    ones = (blocks * (1.0 / scales.clamp_min(torch.finfo(torch.float32).tiny))[..., None]).clamp_(-1.0, 1.0)
    between = (_PAIRS.new_tensor(VALUES[:-1]) + _PAIRS.new_tensor(VALUES[1:])) / 2
    codes = torch.bucketize(ones.view(values.shape[0], -1), between.to(values.device), out_int32=True).to(torch.uint8)
    return torch.cat([codes[:, ::2] << 4 | codes[:, 1::2], scales.view(torch.uint8)], dim=1)


def _unpack(packed: torch.Tensor, index: torch.dtype = torch.int32) -> torch.Tensor:
    """fp32, looked up by integers of the dtype ``index``."""
    rows, columns = packed.shape[0], columns_of(packed)
    scales = packed[:, columns // 2 :].view(torch.float32)
    values = embedding(packed[:, : columns // 2].to(index), _pairs[packed.device])
    return values.view(rows, -1, NF4_BLOCK).mul_(scales[..., None]).view(rows, columns)


def row_bytes(columns: int) -> int:
    """Of a packed row of ``columns`` weights."""
    return columns // NF4_BLOCK * _ROW_BYTES


def columns_of(packed: torch.Tensor) -> int:
    """Weights in each of ``packed`` rows."""
    return packed.shape[-1] * packed.itemsize // _ROW_BYTES * NF4_BLOCK


NF4 = Format(NF4_BLOCK, row_bytes, columns_of, pack, unpacked, prepare)
"""As ``lora.basePrecision`` calls it."""
