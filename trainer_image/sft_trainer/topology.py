"""Which part of the run this process has: its place in every dimension of parallelism.

Whoever decides about data, loss, saving, export or reporting asks here, never for "the rank": with tensor or pipeline
parallelism several processes have the same data, and one of them counts.
"""

from dataclasses import dataclass
from math import prod

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .distributed import Ranks
from .errors import ConfigError

_ORDER = ("pipeline", "replicate", "shard", "sequence", "tensor")
"""Dimensions from the outermost to the innermost: neighbouring ranks, mostly of one node, differ in the last ones."""


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
    """Processes over which the experts of a layer are spread: a part of shard x sequence x tensor."""

    def __post_init__(self) -> None:
        """Raise ``ConfigError`` naming the factor that is wrong."""
        for name in (*_ORDER, "expert"):
            if getattr(self, name) < 1:
                raise ConfigError(f"the {name} degree must be at least 1, not {getattr(self, name)}")
        sizes = {name: getattr(self, name) for name in _ORDER}
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
    def of(cls, ranks: Ranks, *, shard: int) -> "Topology":
        """Data parallelism over all processes: parameters split over ``shard`` of them, replicated over the groups."""
        return cls(
            rank=ranks.rank,
            local_rank=ranks.local_rank,
            world_size=ranks.world_size,
            local_world_size=ranks.local_world_size,
            replicate=max(1, ranks.world_size // shard),
            shard=shard,
        )

    def place(self, dimension: str) -> int:
        """Rank of this process within ``dimension``, one of the names of the sizes."""
        if dimension == "expert":
            return self.rank % (self.shard * self.sequence * self.tensor) % self.expert
        inner = _ORDER[_ORDER.index(dimension) + 1 :]
        place: int = self.rank // prod(getattr(self, name) for name in inner) % getattr(self, dimension)
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
    def writes(self) -> bool:
        """Whether this process writes what a run has once: manifest, status, records."""
        return self.rank == 0

    def exporters(self, uri: str) -> int:
        """How many processes, from the first on, write the files of an export to ``uri``: those that see one place."""
        # A folder is perhaps that of one node; a volume or a bucket is the same for all.
        return self.local_world_size if uri.startswith("file://") else self.world_size

    @property
    def tells(self) -> bool:
        """Whether this process reports for all."""
        return self.rank == 0

    # Groups

    def parameter_mesh(self, device_type: str) -> DeviceMesh:
        """The mesh over which FSDP splits parameters: shard, or replicate x shard. A collective call."""
        if self.replicate == 1:
            return init_device_mesh(device_type, (self.shard,), mesh_dim_names=("shard",))
        return init_device_mesh(device_type, (self.replicate, self.shard), mesh_dim_names=("replicate", "shard"))
