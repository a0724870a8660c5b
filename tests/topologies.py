"""The topology of a test's process."""

import torch.distributed as dist

from sft_trainer.topology import ALONE, Topology


def here(shard: int | None = None) -> Topology:
    """Of this process in the group that it is in, of one node; ``shard`` is all of them unless it is given."""
    if not dist.is_initialized():
        return ALONE
    rank, size = dist.get_rank(), dist.get_world_size()
    shard = shard or size
    return Topology(rank, rank, size, size, replicate=size // shard, shard=shard)
