"""Which part of the run this process has: its place in every dimension of parallelism, and with whom it shares it.

Whoever decides about data, loss, saving, export or reporting asks here, never for "the rank": with tensor or pipeline
parallelism several processes have the same data, and one of them counts.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from math import prod
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from sft_api.v1alpha1.status import PlanStatus

from .distributed import COLLECTIVE_TIMEOUT, Ranks
from .errors import ConfigError
from .versions import set_group_timeout

T = TypeVar("T")

DIMENSIONS = ("pipeline", "replicate", "shard", "sequence", "tensor")
"""From the outermost to the innermost: neighbouring ranks, mostly of one node, differ in the last ones. Their sizes
multiply to the number of processes; ``expert`` is no factor of its own."""


@dataclass(frozen=True)
class Topology:
    """Sizes of all dimensions, and where this process is in them; the product of the sizes is ``world_size``."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int = 1
    """Processes of this node."""
    replicate: int = 1
    """Groups of processes that hold the same parameters and compute on other data."""
    shard: int = 1
    """Processes over which parameters, gradients and optimizer state are split, and which compute on other data."""
    sequence: int = 1
    """Processes that share the tokens of a bin."""
    tensor: int = 1
    """Processes that share every matrix."""
    pipeline: int = 1
    """Stages of consecutive blocks."""
    expert: int = 1
    """Processes over which the experts of a layer are spread: neighbours among its shard x sequence x tensor."""
    forming: Callable[[], AbstractContextManager[None]] = field(default=nullcontext, compare=False, repr=False)
    """Entered while a group is formed, which none of its processes ends before all have begun."""
    timeout: timedelta = field(default=COLLECTIVE_TIMEOUT, compare=False, repr=False)
    """Of the collectives of groups."""

    def __post_init__(self) -> None:
        """Raise ``ConfigError`` naming the factor that is wrong."""
        for name in (*DIMENSIONS, "expert"):
            if getattr(self, name) < 1:
                raise ConfigError(f"the {name} degree must be at least 1, not {getattr(self, name)}")
        sizes = {name: getattr(self, name) for name in DIMENSIONS}
        product = prod(sizes.values())
        if product != self.world_size:
            raise ConfigError(
                f"{' x '.join(f'{name} {size}' for name, size in sizes.items())} is {product}, but there are "
                f"{self.world_size} processes: {self._wrong_factor(sizes, product)}"
            )
        layer = self.shard * self.sequence * self.tensor
        if layer % self.expert:
            raise ConfigError(
                f"the expert degree {self.expert} does not divide the {layer} processes that hold a layer (shard x "
                "sequence x tensor)"
            )

    def _wrong_factor(self, sizes: dict[str, int], product: int) -> str:
        indivisible = [f"{name} {size}" for name, size in sizes.items() if self.world_size % size]
        if indivisible:
            return f"{' and '.join(indivisible)} does not divide {self.world_size}"
        wanted = [
            f"{name} {self.world_size * size // product}"
            for name, size in sizes.items()
            if self.world_size * size % product == 0
        ]
        return (
            f"with the others as they are it would take {' or '.join(wanted)}" if wanted else "no factor alone is wrong"
        )

    @classmethod
    def of(
        cls,
        ranks: Ranks,
        *,
        shard: int,
        sequence: int = 1,
        tensor: int = 1,
        pipeline: int = 1,
        expert: int = 1,
        forming: Callable[[], AbstractContextManager[None]] = nullcontext,
        timeout: timedelta = COLLECTIVE_TIMEOUT,
    ) -> "Topology":
        """That of ``ranks``, with as many replicas as there are processes for; ``ConfigError`` where none fit."""
        return cls(
            rank=ranks.rank,
            local_rank=ranks.local_rank,
            world_size=ranks.world_size,
            local_world_size=ranks.local_world_size,
            replicate=max(1, ranks.world_size // max(1, shard * sequence * tensor * pipeline)),
            shard=shard,
            sequence=sequence,
            tensor=tensor,
            pipeline=pipeline,
            expert=expert,
            forming=forming,
            timeout=timeout,
        )

    @classmethod
    def planned(
        cls,
        plan: PlanStatus,
        ranks: Ranks,
        forming: Callable[[], AbstractContextManager[None]] = nullcontext,
        timeout: timedelta = COLLECTIVE_TIMEOUT,
    ) -> "Topology":
        """That of ``plan``; what its degrees leave of the processes that share a copy computes on other data."""
        together = plan.sequence_parallel * plan.tensor_parallel * plan.pipeline_parallel
        return cls.of(
            ranks,
            shard=plan.shard_degree // together,
            sequence=plan.sequence_parallel,
            tensor=plan.tensor_parallel,
            pipeline=plan.pipeline_parallel,
            expert=plan.expert_parallel,
            forming=forming,
            timeout=timeout,
        )

    def place(self, dimension: str) -> int:
        """Rank of this process within ``dimension``, one of the names of the sizes: 0 where its size is 1.

        Or within ``expert copy``, those that have the same experts.
        """
        return self._place_of(self.rank, dimension)

    def _place_of(self, rank: int, dimension: str) -> int:
        # The processes of a layer are neighbours, and divide evenly among the places of experts, again and again.
        if dimension == "expert":
            return rank % self.expert
        if dimension == "expert copy":
            return rank // self.expert % self.expert_copies
        inner = DIMENSIONS[DIMENSIONS.index(dimension) + 1 :]
        place: int = rank // prod(getattr(self, name) for name in inner) % getattr(self, dimension)
        return place

    # Data and loss

    @property
    def data_parallel(self) -> int:
        """How many shares a step has."""
        return self.replicate * self.shard

    @property
    def data_rank(self) -> int:
        """Which share of a step this process computes on; others may have the same one."""
        return self.place("replicate") * self.shard + self.place("shard")

    @property
    def holders(self) -> int:
        """Processes over which the parameters of a replica are split: also those that share the tokens of a bin."""
        return self.shard * self.sequence

    @property
    def holder(self) -> int:
        """Which of the ``holders`` this process is."""
        return self.place("shard") * self.sequence + self.place("sequence")

    @property
    def expert_copies(self) -> int:
        """Processes that have the same experts, each in its place among those of their layer."""
        return self.shard * self.sequence * self.tensor // self.expert

    @property
    def counts_loss(self) -> bool:
        """Whether the loss that this process computes goes into the sum: no bin is counted twice."""
        return self.place("tensor") == 0 and self.place("pipeline") == self.pipeline - 1

    # Files and words

    @property
    def alone(self) -> bool:
        """Whether there is nobody to wait for, or to agree with."""
        return self.world_size == 1

    @property
    def prepares(self) -> bool:
        """Whether this process prepares the data of its node, on which the others find it."""
        return self.local_rank == 0

    @property
    def leader(self) -> int:
        """Rank of the process that does what a run does once."""
        return 0

    @property
    def writes(self) -> bool:
        """Whether this process writes what a run has once: manifest, status, records."""
        return self.rank == self.leader

    @property
    def tells(self) -> bool:
        """Whether this process reports for all."""
        return self.rank == self.leader

    def exporters(self, uri: str) -> int:
        """How many processes, from the first on, write the files of an export to ``uri``: those that see one place."""
        # A folder is perhaps that of one node; a volume or a bucket is the same for all.
        return self.local_world_size if uri.startswith("file://") else self.world_size

    def turn(self, files: Sequence[T], uri: str) -> list[T]:
        """Those of ``files``, of an export to ``uri``, that this process writes: each is written by one."""
        return [file for place, file in enumerate(files) if place % self.exporters(uri) == self.rank]

    @cache  # noqa: B019 - few topologies are ever made, and they live as long as the process
    def replica(self, split: frozenset[str]) -> tuple[int, int]:
        """Which of the processes that hold the same part of a tensor this one is, and how many these are.

        ``split`` names the dimensions over which the tensor is split, ``expert`` and ``expert copy`` may be among them:
        processes that differ in others only hold the same. Stages of a pipeline hold other tensors.
        """
        told_apart = ("pipeline", *split)
        holders = [
            rank
            for rank in range(self.world_size)
            if all(self._place_of(rank, name) == self.place(name) for name in told_apart)
        ]
        return holders.index(self.rank), len(holders)

    # Groups

    def groups(self, *dimensions: str) -> list[tuple[int, ...]]:
        """Ranks of all processes, grouped: those of a group differ in ``dimensions`` only, and ascend.

        Where these have size 1 every process is a group of its own. ``expert`` is given alone or not at all.
        """
        if dimensions != ("expert",) and (unknown := set(dimensions) - set(DIMENSIONS)):
            raise ValueError(f"{sorted(unknown)} are no dimensions that form groups with {dimensions}")
        others = [name for name in DIMENSIONS if name not in dimensions]
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            places = tuple(self._place_of(rank, name) for name in others)
            # Experts are spread over neighbours.
            found.setdefault((rank // self.expert,) if dimensions == ("expert",) else places, []).append(rank)
        return [tuple(group) for group in found.values()]

    def members(self, *dimensions: str) -> tuple[int, ...]:
        """The group of this process among ``groups``."""
        return next(group for group in self.groups(*dimensions) if self.rank in group)

    def process_group(
        self, *dimensions: str, backend: str | None = None, timeout: timedelta | None = None
    ) -> dist.ProcessGroup | None:
        """A new process group of ``members``; None where this process is alone, and has nobody to speak to.

        A collective call of all processes, whatever group they are in. ``backend`` is that of the default group where
        it is not given, ``timeout`` that of this topology.
        """
        groups = self.groups(*dimensions)
        if len(groups) == self.world_size:
            return None
        with self.forming():
            # By itself torch gives a group of NCCL's ten minutes, whatever the default group has.
            given = timeout or self.timeout
            mine, _ = dist.new_subgroups_by_enumeration([list(group) for group in groups], given, backend)
        assert isinstance(mine, dist.ProcessGroup)  # noqa: S101 - every process is in one of them
        return mine

    def parameter_mesh(self, device_type: str) -> DeviceMesh:
        """The mesh over which FSDP splits parameters: shard, or replicate x shard. A collective call.

        Its shard are the ``holders``.
        """
        sizes = {name: getattr(self, name) for name in DIMENSIONS if name != "sequence"} | {"shard": self.holders}
        used = tuple(name for name, size in sizes.items() if name == "shard" or size > 1)
        with self.forming():
            mesh = init_device_mesh(device_type, tuple(sizes[name] for name in used), mesh_dim_names=used)
        names = tuple(name for name in used if name in ("replicate", "shard"))
        if len(used) > 1:
            # Of one dimension there is no group but the default one; a mesh takes no time-out.
            for name in names:
                set_group_timeout(mesh.get_group(name), self.timeout)
        return mesh if names == used else mesh[names]


ALONE = Topology(rank=0, local_rank=0, world_size=1)
"""Of one process that is all there is."""
