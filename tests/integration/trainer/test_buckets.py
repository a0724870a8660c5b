"""Tensors exchanged in buckets: sums, parts of which each process receives, and the whole put together of these."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sft_trainer.strategies.megatron import buckets
from sft_trainer.strategies.megatron.buckets import Shared
from tests.collectives import noted_calls
from tests.integration.checkpoint.ranks import run

SHAPES = [(7, 3), (1,), (2, 5), (96,), (12, 2, 2), (4, 1)]
"""Rows that divide among three processes and that do not, and fewer than there are processes."""


def rows_each(shape: tuple[int, ...]) -> int:
    return -(-shape[0] // dist.get_world_size())


def shared(tensor: torch.Tensor) -> Shared:
    return Shared(tensor, rows_each(tuple(tensor.shape)) * tensor[0].numel())


def own_rows(tensor: torch.Tensor) -> torch.Tensor:
    each = rows_each(tuple(tensor.shape))
    return tensor[each * dist.get_rank() : each * (dist.get_rank() + 1)]


def random_tensors(seed: int, *dtypes: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for dtype in dtypes for shape in SHAPES]


def exchanged(bucket_bytes: int) -> dict[str, Any]:
    """What is wrong with sums and gathered tensors of this process, and the calls by which they were made."""
    group: Any = dist.group.WORLD
    buckets.BUCKET_BYTES = bucket_bytes
    rank, world = dist.get_rank(), dist.get_world_size()
    every = [random_tensors(seed, torch.float32) for seed in range(world)]
    wanted = [torch.stack(same).double().sum(0) for same in zip(*every, strict=True)]

    mine = [tensor.clone() for tensor in every[rank]]
    with noted_calls() as calls:
        buckets.scatter_sums(map(shared, mine), group)
    pairs = [(own_rows(a), own_rows(b)) for a, b in zip(mine, wanted, strict=True)]
    scattered = max(float((a - b).abs().max()) for a, b in pairs if a.numel())
    mine = [tensor.clone() for tensor in every[rank]]
    with noted_calls() as adding:
        buckets.add_up(mine, group)
    added = max(float((a - b).abs().max()) for a, b in zip(mine, wanted, strict=True))

    right = random_tensors(0, torch.bfloat16, torch.float32)
    parts = [torch.full_like(tensor, torch.nan) for tensor in right]
    for part, whole in zip(parts, right, strict=True):
        own_rows(part).copy_(own_rows(whole))
    with noted_calls() as gathering:
        buckets.gather(map(shared, parts), group)
    return {
        "error": max(scattered, added),
        "not gathered": sum(not torch.equal(a, b) for a, b in zip(parts, right, strict=True)),
        "calls": calls + adding + gathering,
    }


@pytest.mark.parametrize("bucket_bytes", [2**20, 64, 12])
def test_sums_and_gathered_tensors_are_right_whatever_goes_together(bucket_bytes: int, tmp_path: Path) -> None:
    for found in run(3, tmp_path, exchanged, bucket_bytes):
        assert found["error"] < 1e-6
        assert found["not gathered"] == 0
        assert max(call.whole for call in found["calls"]) <= bucket_bytes


def test_what_fits_one_bucket_is_one_call_of_each_type(tmp_path: Path) -> None:
    for found in run(3, tmp_path, exchanged, 2**20):
        names = ["reduce_scatter_tensor", "all_reduce", *["all_gather_into_tensor"] * 2]
        assert [call.name for call in found["calls"]] == names


def of_no_contiguous_tensor() -> str:
    group: Any = dist.group.WORLD
    try:
        buckets.add_up([torch.zeros(3, 2).t()], group)
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_tensor_that_could_not_be_written_to_is_refused(tmp_path: Path) -> None:
    assert all("view" in said for said in run(2, tmp_path, of_no_contiguous_tensor))
