"""Groups and meshes of a topology, over processes that really speak to each other."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from sft_trainer.topology import DIMENSIONS, Topology
from tests.integration.checkpoint import ranks

TIMEOUT = timedelta(minutes=2)


def sums_of_ranks(sizes: dict[str, int], *wanted: tuple[str, ...]) -> list[int]:
    """In each of the ``wanted`` groups of this process the sum of all ranks; its own where there is no group."""
    topology = Topology(dist.get_rank(), dist.get_rank(), dist.get_world_size(), **sizes)
    answers = []
    for names in wanted:
        total = torch.tensor(topology.rank)
        group = topology.process_group(*names, backend="gloo", timeout=TIMEOUT)
        if group is not None:
            dist.all_reduce(total, group=group)
        assert int(total) == sum(topology.members(*names))
        answers.append(int(total))
    return answers


def test_each_dimension_has_a_group_that_speaks(tmp_path: Path) -> None:
    sizes = {"pipeline": 2, "tensor": 2, "expert": 2}
    wanted = (("pipeline",), ("tensor",), ("expert",), ("shard",), DIMENSIONS)
    answers = ranks.run(4, tmp_path, sums_of_ranks, sizes, *wanted)
    assert answers == [[2, 1, 1, 0, 6], [4, 1, 1, 1, 6], [2, 5, 5, 2, 6], [4, 5, 5, 3, 6]]


def timeouts(sizes: dict[str, int]) -> list[float]:
    """Seconds for which the groups of this process wait, of those that are not the default one."""
    # torch has a default of its own for each backend, which of NCCL's groups is shorter than what the default group has
    dist.distributed_c10d.default_pg_timeout = timedelta(minutes=3)
    topology = Topology(dist.get_rank(), dist.get_rank(), dist.get_world_size(), **sizes, timeout=timedelta(minutes=47))
    mesh = topology.parameter_mesh("cpu")
    groups = [mesh.get_group(name) for name in mesh.mesh_dim_names or ()]
    if (shared := topology.process_group("sequence")) is not None:
        groups.append(shared)
    return [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]


def test_all_groups_wait_as_long_as_the_default_one(tmp_path: Path) -> None:
    assert ranks.run(4, tmp_path, timeouts, {"replicate": 2, "sequence": 2}) == [[47 * 60] * 3] * 4


def parameter_mesh(sizes: dict[str, int]) -> tuple[tuple[str, ...] | None, list[int]]:
    topology = Topology(dist.get_rank(), dist.get_rank(), dist.get_world_size(), **sizes)
    mesh = topology.parameter_mesh("cpu")
    assert tuple(mesh.get_coordinate() or ()) == tuple(topology.place(name) for name in mesh.mesh_dim_names or ())
    return mesh.mesh_dim_names, mesh.mesh.flatten().tolist()


def test_parameters_are_split_within_a_stage(tmp_path: Path) -> None:
    answers = ranks.run(4, tmp_path, parameter_mesh, {"pipeline": 2, "shard": 2})
    assert answers == [(("shard",), [0, 1])] * 2 + [(("shard",), [2, 3])] * 2
    answers = ranks.run(4, tmp_path, parameter_mesh, {"replicate": 2, "shard": 2})
    assert answers == [(("replicate", "shard"), [0, 1, 2, 3])] * 4
    assert ranks.run(1, tmp_path, parameter_mesh, {}) == [(("shard",), [0])]
