"""The operator for attention within documents: the bits of torch's attention, one document after the other."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import library
from torch.utils.checkpoint import checkpoint

from sft_trainer.models.attention import (
    Boundaries,
    _per_document,
    boundary_arguments,
    document_attention,
    goes_by_blocks,
)
from sft_trainer.models.documents import attend, attention_operator, gradients_operator
from sft_trainer.models.flash_attention import Kind

LENGTHS = (5, 1, 12, 2)


def drawn(*, heads: int, shared: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Query, key and value as a model's projections lay them out, and the gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    tokens = sum(LENGTHS)
    by_tokens = [torch.randn(1, tokens, n, 16, generator=generator).to(dtype) for n in (heads, shared, shared, heads)]
    query, key, value = (tensor.transpose(1, 2).requires_grad_() for tensor in by_tokens[:3])
    return query, key, value, by_tokens[3]


@pytest.mark.parametrize(
    ("dtype", "shared", "window", "scale"),
    [*itertools.product((torch.float32, torch.bfloat16), (4, 2, 1), (None, 4), (None, 0.3))],
)
@pytest.mark.parametrize("attention", [attend, lambda *arguments: attention_operator(*arguments)[0]])
def test_output_and_gradients_have_the_bits_of_one_document_after_the_other(
    dtype: torch.dtype, shared: int, window: int | None, scale: float | None, attention: Callable[..., torch.Tensor]
) -> None:
    query, key, value, upstream = drawn(heads=4, shared=shared, dtype=dtype)
    expected = _per_document(query, key, value, list(LENGTHS), 0.0, scale, window)
    wanted = torch.autograd.grad(expected, (query, key, value), upstream)

    output = attention(query, key, value, Boundaries.of(LENGTHS).host_ends, scale, window)
    found = torch.autograd.grad(output, (query, key, value), upstream)

    assert torch.equal(output, expected)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize("lengths", [LENGTHS, (20,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_compiler_is_told_the_shapes_strides_and_gradients_that_there_are(
    lengths: tuple[int, ...], dtype: torch.dtype
) -> None:
    query, key, value, upstream = drawn(heads=4, shared=2, dtype=dtype)
    ends = Boundaries.of(lengths).host_ends
    library.opcheck(attention_operator, (query, key, value, ends, 0.3, 6))
    output, logarithms = attention_operator(query, key, value, ends, 0.3, 6)
    plain = [tensor.detach() for tensor in (upstream, query, key, value, output, logarithms)]
    library.opcheck(gradients_operator, (*plain, ends, 0.3, 6))


@pytest.mark.parametrize(
    ("device", "dtype", "size", "cap", "sinks", "by_blocks"),
    [
        ("cuda", torch.bfloat16, 256, None, False, False),
        ("cuda", torch.bfloat16, 512, None, False, True),
        ("cuda", torch.float32, 512, None, False, False),
        ("cpu", torch.bfloat16, 512, None, False, False),
        ("cuda", torch.bfloat16, 128, 50.0, False, True),
        ("cpu", torch.float32, 128, None, True, True),
    ],
)
def test_what_no_kernel_computes_goes_by_blocks(
    device: str, dtype: torch.dtype, size: int, cap: float | None, sinks: bool, by_blocks: bool
) -> None:
    assert goes_by_blocks(Kind(8, size, size, False, cap, sinks), device, dtype) == by_blocks


def test_what_is_recomputed_is_the_same() -> None:
    query, key, value, upstream = drawn(heads=4, shared=2, dtype=torch.float32)
    arguments = boundary_arguments(Boundaries.of(LENGTHS))

    def attended(*tensors: torch.Tensor) -> torch.Tensor:
        return document_attention(torch.nn.Identity(), *tensors, None, **arguments)[0]

    kept = torch.autograd.grad(attended(query, key, value), (query, key, value), upstream)
    again: Any = checkpoint(attended, query, key, value, use_reentrant=False)
    recomputed = torch.autograd.grad(again, (query, key, value), upstream)
    assert all(torch.equal(one, other) for one, other in zip(kept, recomputed, strict=True))


def test_only_what_needs_a_gradient_gets_one() -> None:
    query, key, value, upstream = drawn(heads=4, shared=2, dtype=torch.float32)
    output = attend(query, key.detach(), value, Boundaries.of(LENGTHS).host_ends, None, None)
    output.backward(upstream)
    assert query.grad is not None
    assert key.grad is None


@pytest.mark.parametrize(("longest", "bound"), [(1, 256), (256, 256), (257, 512), (4096, 4096), (5000, 8192)])
def test_the_longest_document_is_told_as_one_of_few_bounds(longest: int, bound: int) -> None:
    told = boundary_arguments(Boundaries.of((1, longest)))
    assert told["max_length_q"] == told["max_length_k"] == bound
