"""Frozen weights of linear layers in NF4, 4 bits each, as QLoRA holds them (Dettmers et al. 2023, arXiv 2305.14314).

A weight is one of 16 values (the quantiles of a normal distribution, and 0) times the largest magnitude of the 64
weights of its row that it is among, in fp32. bitsandbytes makes the same bits of the same weights, without its
quantised scales: those are shared by 16384 weights, whatever rows they are of, and rows are what processes share out.

A packed row is what is gathered from other processes and lies in memory: the 4 bits of all its weights, and then its
scales. It is unpacked where it is multiplied with, forwards, and once more backwards; nobody keeps it so. Its bytes are
held in a tensor of the dtype that is computed in: FSDP then takes them for what it need not cast, and torch 2.11's
shards nothing but numbers with a fraction.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import embedding
from torch.nn.functional import linear as linear_function

from sft_api.memory import NF4_AT_ONCE, NF4_BLOCK
from sft_trainer.boxes import Box, Rectangle
from sft_trainer.errors import ConfigError

from .experts import has_experts

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
_AT_ONCE = {"cpu": 2**20}
"""Weights that are packed or unpacked at a time, where that is another number than ``NF4_AT_ONCE``: what is looked up
fits into a cache."""

_pairs = {torch.device("cpu"): _PAIRS}


class Nf4Linear(nn.Linear):
    """A linear layer with a packed weight."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """(..., inputs) to (..., outputs)."""
        return linear(inputs, self.weight, self.bias)


def linear(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """What torch's function of this name gives, of a ``weight`` that may be packed; such a one has no gradient."""
    if weight.shape[1] == inputs.shape[-1]:
        return linear_function(inputs, weight, bias)
    output: torch.Tensor = _Product.apply(inputs, weight, bias)
    return output


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
    """``values`` (rows, columns) of any dtype, rounded to packed rows, uint8; columns are a multiple of the block."""
    packed = values.new_empty((values.shape[0], _row_bytes(values.shape[1])), dtype=torch.uint8)
    for some, into in _some_rows(values, packed, values.shape[1]):
        into.copy_(_pack(some))
    return packed


def unpacked(packed: torch.Tensor, dtype: torch.dtype, *, again: bool = False) -> torch.Tensor:
    """The values of ``packed`` rows, bytes in any dtype, rounded to ``dtype`` once.

    ``again`` in a backward pass: what is compiled then looks values up by another integer. Of two ways that are the
    same to the letter the compiler takes one, and keeps the whole weight of every layer for the backward pass.
    """
    packed = packed.view(torch.uint8)
    columns = columns_of(packed)
    if torch.compiler.is_compiling():
        return _unpack(packed, torch.int64 if again else torch.int32).to(dtype)
    values = packed.new_empty((packed.shape[0], columns), dtype=dtype)
    for some, into in _some_rows(packed, values, columns):
        into.copy_(_unpack(some))
    return values


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


def _some_rows(source: torch.Tensor, target: torch.Tensor, columns: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Both, as many rows of ``columns`` weights at a time as shall be held in fp32."""
    at_once = _AT_ONCE.get(source.device.type, NF4_AT_ONCE)
    rows = max(1, at_once // max(1, columns))
    return zip(source.split(rows), target.split(rows), strict=True)


def _row_bytes(columns: int) -> int:
    return columns // NF4_BLOCK * _ROW_BYTES


def columns_of(packed: torch.Tensor) -> int:
    """Weights in each of ``packed`` rows."""
    return packed.shape[1] * packed.itemsize // _ROW_BYTES * NF4_BLOCK


def packed_weights(huggingface: Any, trains: Callable[[str], bool]) -> list[str]:
    """Names of the weights of ``huggingface`` that are packed: of its linear layers but for the head, and for those of
    which ``trains`` says so. Raises ``ConfigError`` for a layer whose rows are no whole blocks, and for experts, which
    are no linear layers: what is most of such a model would stay as it is."""
    if has_experts(huggingface):
        raise ConfigError(
            f"lora.basePrecision is nf4, but a model of type {huggingface.config.model_type!r} has experts, whose "
            "weights are not held in 4 bits here: take bf16, or a dense model"
        )
    head = huggingface.get_output_embeddings()
    names = []
    for name, module in huggingface.named_modules():
        if not isinstance(module, nn.Linear) or module is head or trains(f"{name}.weight"):
            continue
        if module.in_features % NF4_BLOCK:
            raise ConfigError(
                f"lora.basePrecision is nf4, but {name} has {module.in_features} inputs: they must be a multiple of "
                f"{NF4_BLOCK}, which share a scale; take bf16, or another model"
            )
        names.append(f"{name}.weight")
    return names


def pack_layers(huggingface: Any, weights: Iterable[str], dtype: torch.dtype) -> None:
    """Have the linear layers of ``huggingface`` (on the meta device) hold ``weights``, by name, as packed rows, whose
    bytes lie in tensors of ``dtype``."""
    for weight in weights:
        name = weight.removesuffix(".weight")
        layer = huggingface.get_submodule(name)
        rows, columns = layer.weight.shape
        if type(layer) is nn.Linear:
            packed = Nf4Linear(columns, rows, bias=layer.bias is not None, device="meta")
            packed.bias = layer.bias
            huggingface.set_submodule(name, packed)
            layer = packed
        held = torch.empty((rows, _row_bytes(columns) // dtype.itemsize), dtype=dtype, device="meta")
        layer.weight = nn.Parameter(held, requires_grad=False)


@dataclass(frozen=True)
class PackedBox(Box):
    """A box of a weight whose rows are packed where they are held, in ``local``."""

    def __post_init__(self) -> None:
        held = self.local.shape[0], columns_of(self.local)
        if held != self.place.sizes or held[1] != self.shape[1]:
            raise ValueError(f"{self.name}: a box of {self.place.sizes}, but packed rows of {held}")

    def read(self) -> torch.Tensor:
        return unpacked(self.local.detach(), torch.float32)

    def write(self, values: torch.Tensor, part: Rectangle | None = None) -> None:
        """Round ``values`` in, where the rows are held; whole rows only."""
        rows = part.within(self.place)[0] if part else slice(None)
        target = self.local.detach()[rows].view(torch.uint8)
        target.copy_(pack(values.detach().to(target.device)))
