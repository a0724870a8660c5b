"""Weights in FP8 with a scale for each block of 128 rows and columns, as DeepSeek V3 is published.

Read from files as what they mean: a value in E4M3 times the scale of its block, in fp32, rounded to bf16. Those are the
numbers of a copy in bf16 that is made with the program which DeepSeek publishes beside its weights.
"""

from typing import Any

import torch

from sft_trainer.errors import ModelError

BLOCK = 128
"""Rows, and columns, that share a scale; the last block of either may have fewer."""
SCALES = "_scale_inv"
"""How the name of the scales ends, behind that of their weight."""
DTYPE = "FP8"
"""What such a weight is stored as."""
_VALUES = "F8_E4M3"
_OF_SCALES = ("F32", "BF16")


class ScaledSlices:
    """A matrix in a file as a slice reader of safetensors gives one that is not scaled.

    Read are ``values`` (rows, columns) and ``scales`` (blocks of rows, blocks of columns), slice readers. Raises
    ``ModelError`` where they are not such.
    """

    def __init__(self, name: str, values: Any, scales: Any) -> None:
        self._shape, shape_of_scales = tuple(values.get_shape()), tuple(scales.get_shape())
        dtype, dtype_of_scales = values.get_dtype(), scales.get_dtype()
        blocks = tuple(-(-size // BLOCK) for size in self._shape)
        whole = len(blocks) == 2 and blocks == shape_of_scales
        if not whole or dtype != _VALUES or dtype_of_scales not in _OF_SCALES:
            raise ModelError(
                f"{name} of shape {self._shape} ({dtype}) and {name}{SCALES} of shape {shape_of_scales} "
                f"({dtype_of_scales}) are no weight in FP8: a matrix of {_VALUES} must be, and a scale of "
                f"{' or '.join(_OF_SCALES)} for each block of {BLOCK} x {BLOCK}; give the model in bf16"
            )
        self._values, self._scales = values, scales

    def get_shape(self) -> tuple[int, ...]:
        """Of the weight."""
        return self._shape

    def get_dtype(self) -> str:
        return DTYPE

    def __getitem__(self, place: tuple[slice, ...]) -> torch.Tensor:
        """bf16 values of ``place``, one slice with both ends for each dimension."""
        rows, columns = place
        sizes = rows.stop - rows.start, columns.stop - columns.start
        if 0 in sizes:
            return torch.empty(sizes, dtype=torch.bfloat16)
        values: torch.Tensor = self._values[rows, columns].float()
        scales = self._scales[_blocks(rows), _blocks(columns)].float()
        for dimension, part in enumerate(place):
            first = part.start % BLOCK
            scales = scales.repeat_interleave(BLOCK, dimension).narrow(dimension, first, sizes[dimension])
        return values.mul_(scales).bfloat16()


def _blocks(part: slice) -> slice:
    return slice(part.start // BLOCK, -(-part.stop // BLOCK))
