"""Weights in FP8 as they are published: with a scale for a whole tensor, for each row, or for each block.

Ministral 3 and Devstral 2 have one scale for a tensor, files of compressed-tensors mostly one for a row, DeepSeek V3
and Qwen one for each block of 128 rows and columns. Read from files as what they mean: a value in E4M3 times its scale,
in fp32, rounded to bf16. Those are the numbers that transformers has of them in bf16, and of a copy that is made with
the program which DeepSeek publishes beside its weights. Scales of activations and of caches say how a server computes,
and are not read.
"""

import math
from collections.abc import Collection
from typing import Any

import torch

from sft_api.quantised_files import FP8_BLOCK
from sft_trainer.errors import ModelError

DTYPE = "FP8"
"""What such a weight is stored as."""
VALUES = "F8_E4M3"
"""What safetensors calls the dtype of its values."""
_SCALES = ("_scale_inv", "_scale")
"""How the name of the scales may end, behind that of their weight."""
_NOT_READ = ("activation_scale", ".input_scale", ".output_scale", ".q_scale", ".k_scale", ".v_scale")
"""How the names end of what such files have besides, for servers."""
_OF_SCALES = ("F32", "BF16")


def with_scales(name: str, files: Collection[str]) -> tuple[str, ...]:
    """Names of the tensors that ``files`` have of the tensor ``name``: its own, and that of its scales if any."""
    return name, *[scales for ending in _SCALES if (scales := f"{name}{ending}") in files][:1]


def is_not_read(name: str) -> bool:
    """Whether the tensor ``name`` of files in FP8 is of what they have for servers."""
    return name.endswith(_NOT_READ)


class ScaledSlices:
    """A tensor in a file as a slice reader of safetensors gives one that is not scaled.

    Read are ``values`` (rows, columns), or (experts, rows, columns), and ``scales``, slice readers: of one number,
    (rows, 1), or (blocks of rows, blocks of columns), of experts with as many of these in front. Raises ``ModelError``
    where they are not such.
    """

    def __init__(self, name: str, values: Any, name_of_scales: str, scales: Any) -> None:
        self._shape, shape_of_scales = tuple(values.get_shape()), tuple(scales.get_shape())
        dtype, dtype_of_scales = values.get_dtype(), scales.get_dtype()
        steps = _steps(self._shape, shape_of_scales)
        if steps is None or dtype != VALUES or dtype_of_scales not in _OF_SCALES:
            raise ModelError(
                f"{name} of shape {self._shape} ({dtype}) and {name_of_scales} of shape {shape_of_scales} "
                f"({dtype_of_scales}) are no weight in FP8: a matrix of {VALUES} must be, or one for each expert, and "
                f"of {' or '.join(_OF_SCALES)} one scale, one for each row, or one for each block of {FP8_BLOCK} x "
                f"{FP8_BLOCK}; give the model in bf16"
            )
        self._values, self._scales, self._steps = values, scales, steps
        self._one = math.prod(shape_of_scales) == 1

    def get_shape(self) -> tuple[int, ...]:
        """Of the weight."""
        return self._shape

    def get_dtype(self) -> str:
        return DTYPE

    def __getitem__(self, place: tuple[slice, ...]) -> torch.Tensor:
        """bf16 values of ``place``, one slice with both ends for each dimension; one expert is read at a time."""
        values = torch.empty([part.stop - part.start for part in place], dtype=torch.bfloat16)
        if not values.numel():
            return values
        *experts, rows, columns = place
        for index, expert in enumerate(range(experts[0].start, experts[0].stop) if experts else (None,)):
            of_expert = () if expert is None else (slice(expert, expert + 1),)
            into = values if expert is None else values[index : index + 1]
            into.copy_(self._scaled((*of_expert, rows, columns)))
        return values

    def _scaled(self, place: tuple[slice, ...]) -> torch.Tensor:
        """fp32 values of ``place``, which is not empty."""
        values: torch.Tensor = self._values[place].float()
        if self._one:
            return values.mul_(self._scales[...].float().view(()))
        parts = [*zip(place, self._steps, strict=True)]
        scales = self._scales[tuple(slice(part.start // step, -(-part.stop // step)) for part, step in parts)].float()
        for dimension, (part, step) in enumerate(parts):
            if scales.shape[dimension] > 1:
                scales = scales.repeat_interleave(step, dimension)
                scales = scales.narrow(dimension, part.start % step, part.stop - part.start)
        return values.mul_(scales)


def _steps(shape: tuple[int, ...], scales: tuple[int, ...]) -> tuple[int, ...] | None:
    """How many elements of each dimension of a tensor of ``shape`` share one of ``scales``, the shape of these; None
    where that is not known."""
    if len(shape) not in (2, 3) or 0 in shape:
        return None
    *experts, rows, columns = shape
    if math.prod(scales) == 1 and len(scales) <= len(shape):
        return shape
    known: dict[tuple[int, ...], tuple[int, int]] = {
        (1, 1): (rows, columns),
        (rows, 1): (1, columns),
        (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK)): (FP8_BLOCK, FP8_BLOCK),
    }
    found = known.get(scales[len(experts) :])
    return None if found is None or list(scales[: len(experts)]) != experts else (*(1 for _ in experts), *found)
