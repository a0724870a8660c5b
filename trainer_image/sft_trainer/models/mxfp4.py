"""Weights in MXFP4, as gpt-oss is published: values of four bits in blocks of 32 that share a scale of eight.

By the Open Compute Project's specification of microscaling formats (MX 1.0): a value is E2M1, a sign, two bits of
exponent with bias 1, one of mantissa, without infinities and NaN; a scale is E8M0, a power of 2 with bias 127, of which
255 is NaN. Every product of the two is a number that bf16 has, so that what is read here is exact; but for some of the
largest scales, beyond what bf16 and fp32 can hold: those are infinite, and refused as such where weights are loaded.
"""

from typing import Any

import torch

from sft_trainer.errors import ModelError

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


def dequantised(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """bf16 values (..., 32 * blocks) of ``blocks`` (..., blocks, 16) and their ``scales`` (..., blocks), both uint8."""
    # Two values are four bytes, looked up as one number; by this function many times as fast as by brackets.
    pairs = _PAIRS.view(torch.int32).flatten().index_select(0, blocks.flatten().int()).view(torch.bfloat16)
    powers = _POWERS.index_select(0, scales.flatten().int())
    return (pairs.view(-1, BLOCK) * powers[:, None]).view(*scales.shape[:-1], -1)


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
