"""Which groups Megatron-Core forms of processes, beside those of the topology."""

import torch.distributed as dist

from sft_trainer.topology import Topology

PROCESSES = 8
SHAPES: list[dict[str, int]] = [
    {"shard": 2, "sequence": 2, "tensor": 2, "expert": 4},
    {"pipeline": 2, "sequence": 2, "tensor": 2, "expert": 2},
    {"pipeline": 2, "shard": 2, "sequence": 2, "expert": 4},
    {"shard": 2, "sequence": 4, "expert": 2},
    {"pipeline": 2, "shard": 2, "tensor": 2},
]


def different() -> list[tuple[int, int, str]]:
    """Places among ``SHAPES``, processes and dimensions whose groups differ, or have another order."""
    return [
        (place, rank, name)
        for place, sizes in enumerate(SHAPES)
        for rank in range(PROCESSES)
        for name, (theirs, ours) in _both(Topology(rank, rank, PROCESSES, PROCESSES, **sizes)).items()
        if theirs != ours
    ]


def _both(topology: Topology) -> dict[str, tuple[list[int], list[int]]]:
    """Ranks of the groups of one process, Megatron-Core's and the topology's."""
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=topology.rank, world_size=PROCESSES, store=FakeStore())
    parallel_state.initialize_model_parallel(
        topology.tensor,
        topology.pipeline,
        context_parallel_size=topology.sequence,
        expert_model_parallel_size=topology.expert,
        expert_tensor_parallel_size=1,
        create_gloo_process_groups=False,
    )
    layer = topology.members("shard", "sequence", "tensor")
    groups = {
        "tensor": (parallel_state.get_tensor_model_parallel_group(), topology.members("tensor")),
        "sequence": (parallel_state.get_context_parallel_group(), topology.members("sequence")),
        "holders": (
            parallel_state.get_data_parallel_group(with_context_parallel=True),
            topology.members("shard", "sequence"),
        ),
        "pipeline": (parallel_state.get_pipeline_model_parallel_group(), topology.members("pipeline")),
        "expert": (parallel_state.get_expert_model_parallel_group(), topology.members("expert")),
        "the same experts": (
            parallel_state.get_expert_data_parallel_group(),
            [rank for rank in layer if rank % topology.expert == topology.place("expert")],
        ),
    }
    found = {name: (dist.get_process_group_ranks(group), list(ours)) for name, (group, ours) in groups.items()}
    # Rows are gathered in the order of who holds them.
    found["holder"] = ([found["holders"][0].index(topology.rank)], [topology.holder])
    found["expert copy"] = ([found["the same experts"][0].index(topology.rank)], [topology.place("expert copy")])
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    return found
