"""Weights in MXFP4, as gpt-oss is published: values of four bits in blocks of 32 that share a scale of eight.

Read from files as what they mean, and held so where that is asked for, in packed rows: the values of a row of inputs,
then its scales, filled up to whole numbers of four bytes.

By the Open Compute Project's specification of microscaling formats (MX 1.0): a value is E2M1, a sign, two bits of
exponent with bias 1, one of mantissa, without infinities and NaN; a scale is E8M0, a power of 2 with bias 127, of which
255 is NaN. Every product of the two is a number that bf16 has, so that what is read here is exact; but for some of the
largest scales, beyond what bf16 and fp32 can hold: those are infinite, and refused as such where weights are loaded.
"""

from typing import Any

import torch

from sft_trainer.errors import ModelError

from .packed_rows import Format, some_rows

BLOCK = 32
"""Values that share a scale."""
BLOCKS, SCALES = "_blocks", "_scales"
"""How the names of the two tensors of a weight end, behind its own."""
DTYPE = "MXFP4"
"""What such a weight is stored as."""
_SCALE_BIAS = 127
_NAN_SCALE = 255


def _value(code: int) -> float:
    """Of four bits in E2M1."""
    exponent, mantissa = code >> 1 & 3, code & 1
    size = (1 + mantissa / 2) * 2.0 ** (exponent - 1) if exponent else mantissa / 2
    return -size if code & 8 else size


_PAIRS = torch.tensor([[_value(byte & 15), _value(byte >> 4)] for byte in range(256)]).bfloat16()
"""The two values in a byte, that of its lower half first."""
_POWERS = torch.tensor([2.0 ** (scale - _SCALE_BIAS) for scale in range(_NAN_SCALE)] + [torch.nan]).bfloat16()
_BETWEEN = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
"""Where one size of a value is as near as the next."""
_ROW_BYTES = BLOCK // 2 + 1
"""Of each block in a packed row."""
_WHOLE = 4
"""Bytes that packed rows are a multiple of: those of the largest number that is computed with."""

_tables = {torch.device("cpu"): (_PAIRS.view(torch.int32).flatten(), _POWERS)}
"""Two values are four bytes, looked up as one number; by ``index_select`` many times as fast as by brackets."""


def dequantised(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """bf16 values (..., 32 * blocks) of ``blocks`` (..., blocks, 16) and their ``scales`` (..., blocks), both uint8."""
    values_of, powers_of = _tables[blocks.device]
    pairs = values_of.index_select(0, blocks.flatten().int()).view(torch.bfloat16)
    powers = powers_of.index_select(0, scales.flatten().int())
    return (pairs.view(-1, BLOCK) * powers[:, None]).view(*scales.shape[:-1], -1)


def prepare(device: torch.device) -> None:
    """Have what values are looked up in on ``device``; before the first layer there is computed."""
    values, powers = (table.to(device) for table in _tables[torch.device("cpu")])
    # A tensor's own device has an index, which a name of one may lack.
    _tables[values.device] = values, powers


def row_bytes(columns: int) -> int:
    """Of a packed row of ``columns`` weights."""
    return -(-(columns // BLOCK * _ROW_BYTES) // _WHOLE) * _WHOLE


def columns_of(packed: torch.Tensor) -> int:
    """Weights in each of ``packed`` rows."""
    return packed.shape[-1] * packed.itemsize // _ROW_BYTES * BLOCK


def pack(values: torch.Tensor) -> torch.Tensor:
    """``values`` (..., columns), packed rows, uint8: those that MXFP4 holds exactly, and others rounded."""
    # Of one expert the rows of outputs are a view, across those that it came in.
    rows = values.reshape(-1, values.shape[-1]).contiguous()
    packed = values.new_zeros((rows.shape[0], row_bytes(rows.shape[1])), dtype=torch.uint8)
    for some, into in some_rows(rows, packed, rows.shape[1]):
        blocks = some.float().view(len(some), -1, BLOCK)
        mantissas, exponents = torch.frexp(blocks.abs().amax(-1))
        # The smallest by which the largest is at most 6: what a larger one holds, this one does too.
        exponents = (exponents - 3 + (mantissas > 6 / 8)).clamp_min(-_SCALE_BIAS)
        ones = torch.ldexp(blocks, -exponents[..., None])
        codes = torch.bucketize(ones.abs(), _BETWEEN.to(ones.device), out_int32=True) | ones.signbit().int() << 3
        codes = codes.view(len(some), -1).to(torch.uint8)
        used = codes.shape[1] // BLOCK * _ROW_BYTES
        into[:, :used] = torch.cat([codes[:, ::2] | codes[:, 1::2] << 4, (exponents + _SCALE_BIAS).to(torch.uint8)], 1)
    return packed.view(*values.shape[:-1], -1)


def unpacked(packed: torch.Tensor, dtype: torch.dtype, *, again: bool = False) -> torch.Tensor:
    """The values (..., columns) of ``packed`` rows, bytes in any dtype, exact in ``dtype``.

    Nothing is compiled around it, so that a backward pass (``again``) needs nothing else.
    """
    rows, columns = packed.view(torch.uint8).flatten(0, -2), columns_of(packed)
    values = packed.new_empty((len(rows), columns), dtype=dtype)
    for some, into in some_rows(rows, values, columns):
        blocks, scales = some[:, : columns // 2], some[:, columns // 2 : columns // BLOCK * _ROW_BYTES]
        into.copy_(dequantised(blocks.reshape(len(some), -1, BLOCK // 2), scales).view(len(some), -1))
    return values.view(*packed.shape[:-1], columns)


MXFP4 = Format(BLOCK, row_bytes, columns_of, pack, unpacked, prepare, exact=True, turned=True)
"""As ``lora.basePrecision`` calls it."""


class PackedSlices:
    """A weight (experts, inputs, outputs) in a file as a slice reader of safetensors gives one that is not packed.

    Read are ``blocks`` (experts, outputs, inputs / 32, 16) and ``scales`` (experts, outputs, inputs / 32), slice
    readers of uint8. Raises ``ModelError`` where they are not such.
    """

    def __init__(self, name: str, blocks: Any, scales: Any) -> None:
        shape, shape_of_scales = tuple(blocks.get_shape()), tuple(scales.get_shape())
        dtypes = {blocks.get_dtype(), scales.get_dtype()}
        if len(shape) != 4 or shape[3] * 2 != BLOCK or shape[:3] != shape_of_scales or dtypes != {"U8"}:
            raise ModelError(
                f"{name}{BLOCKS} of shape {shape} and {name}{SCALES} of shape {shape_of_scales} "
                f"({', '.join(sorted(dtypes))}) are no weight in MXFP4: (experts, outputs, blocks, 16) and (experts, "
                "outputs, blocks) of U8 must be; fetch the model again"
            )
        self._blocks, self._scales = blocks, scales
        self._shape = (shape[0], shape[2] * BLOCK, shape[1])

    def get_shape(self) -> tuple[int, ...]:
        """Of the weight as the model has it."""
        return self._shape

    def get_dtype(self) -> str:
        return DTYPE

    def __getitem__(self, place: tuple[slice, ...]) -> torch.Tensor:
        """bf16 values of ``place``, one slice with both ends for each dimension; one expert is read at a time."""
        experts, inputs, outputs = place
        first, last = inputs.start // BLOCK, -(-inputs.stop // BLOCK)
        within = slice(inputs.start - first * BLOCK, inputs.stop - first * BLOCK)
        values = torch.empty([each.stop - each.start for each in place], dtype=torch.bfloat16)
        for index, expert in enumerate(range(experts.start, experts.stop)):
            part = slice(expert, expert + 1), outputs, slice(first, last)
            values[index] = dequantised(self._blocks[part], self._scales[part])[0, :, within].T
        return values
