"""Tokens shared by several processes: attention over them is that of one process which has them all."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sft_trainer.models.attention import Boundaries, boundary_arguments, document_attention
from sft_trainer.models.exchange import shared_tokens
from tests.errors import worst
from tests.integration.checkpoint.ranks import run

LENGTHS = (5, 1, 12, 2, 4)
"""Documents that begin and end anywhere within the parts of 2 and 4 processes."""
CASES = [*itertools.product((8, 4, 2, 1), (None, 3), (torch.float32, torch.bfloat16))]
"""Heads of keys, of 8; window; dtype."""


def attended(
    tensors: list[torch.Tensor], upstream: torch.Tensor, window: int | None, **more: Any
) -> list[torch.Tensor]:
    """The output, and the gradients of ``tensors``, all with tokens first."""
    query, key, value = (tensor.transpose(1, 2).requires_grad_() for tensor in tensors)
    arguments = boundary_arguments(Boundaries.of(LENGTHS)) | more
    output, _ = document_attention(
        torch.nn.Identity(), query, key, value, None, scaling=0.3, sliding_window=window, **arguments
    )
    given = [query, key, value, *([more["s_aux"]] if "s_aux" in more else [])]
    gradients = torch.autograd.grad(output, given, upstream)
    if "s_aux" in more:
        more["s_aux"].grad = gradients[3]
    return [output.detach(), *(gradient.transpose(1, 2) for gradient in gradients[:3])]


def _compared() -> list[float]:
    """For each case the largest difference from attention on one process, as a share of what there is."""
    rank, degree, tokens = dist.get_rank(), dist.get_world_size(), sum(LENGTHS)
    here = slice(rank * tokens // degree, (rank + 1) * tokens // degree)
    shared = shared_tokens(dist.group.WORLD, dist.get_rank())
    worst = []
    for kv_heads, window, dtype in CASES:
        generator = torch.Generator().manual_seed(0)
        drawn = [torch.randn(1, tokens, n, 16, generator=generator).to(dtype) for n in (8, kv_heads, kv_heads, 8)]
        expected = attended(drawn[:3], drawn[3], window)
        found = attended([tensor[:, here] for tensor in drawn[:3]], drawn[3][:, here], window, shared_tokens=shared)
        errors = [(a - b[:, here]).abs().max() / b.abs().max() for a, b in zip(found, expected, strict=True)]
        worst.append(float(torch.stack(errors).max()))
    return worst


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_output_and_gradients_are_those_of_one_process(degree: int, tmp_path: Path) -> None:
    for answers in run(degree, tmp_path, _compared):
        # Where heads of keys go to several processes their gradients are added up in another order.
        for (kv_heads, _, dtype), error in zip(CASES, answers, strict=True):
            exact = kv_heads >= degree
            assert error <= (0 if exact else 1e-6 if dtype == torch.float32 else 2e-2), (kv_heads, dtype)


def _capped_with_sinks() -> list[float]:
    """Differences of output and gradients, as above, and of the gradient of sinks, which all processes have."""
    rank, degree, tokens = dist.get_rank(), dist.get_world_size(), sum(LENGTHS)
    here = slice(rank * tokens // degree, (rank + 1) * tokens // degree)
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(1, tokens, n, 16, generator=generator) for n in (8, 2, 2, 8)]
    sinks = torch.randn(8, generator=generator).requires_grad_()
    expected = attended(drawn[:3], drawn[3], None, softcap=2.0, s_aux=sinks)
    of_sinks, sinks.grad = sinks.grad, None
    found = attended(
        [tensor[:, here] for tensor in drawn[:3]],
        drawn[3][:, here],
        None,
        softcap=2.0,
        s_aux=sinks,
        shared_tokens=shared_tokens(dist.group.WORLD, dist.get_rank()),
    )
    assert sinks.grad is not None
    dist.all_reduce(sinks.grad)
    pairs = [(sinks.grad, of_sinks), *((a, b[:, here]) for a, b in zip(found, expected, strict=True))]
    return [float((one - other).abs().max() / other.abs().max()) for one, other in pairs if other is not None]


def test_each_process_has_the_sinks_of_its_heads(tmp_path: Path) -> None:
    for errors in run(4, tmp_path, _capped_with_sinks):
        assert len(errors) == 5
        assert worst(errors) <= 1e-6
