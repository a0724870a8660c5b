"""Who has which part of a run, and which factor is wrong when the parts do not fit the processes."""

import pytest

from sft_trainer.distributed import Ranks
from sft_trainer.errors import ConfigError
from sft_trainer.topology import Topology


def topologies(world_size: int, **sizes: int) -> list[Topology]:
    return [Topology(rank=rank, local_rank=rank, world_size=world_size, **sizes) for rank in range(world_size)]


def ranks(world_size: int) -> Ranks:
    return Ranks(world_size - 1, 0, 1, world_size, "127.0.0.1", 1, "1")


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"shard": 3, "replicate": 2}, r"replicate 2 x shard 3 .* is 6, but there are 8 processes: shard 3 does not"),
        ({"shard": 2, "replicate": 2}, r"is 4, .* 8 processes: .* would take pipeline 2 or replicate 4 or shard 4 or"),
        ({"shard": 8, "tensor": 2}, r"is 16, .* it would take shard 4 or tensor 1"),
        ({"shard": 0}, "the shard degree must be at least 1, not 0"),
        ({"shard": 8, "expert": 3}, "expert degree 3 does not divide the 8 processes"),
    ],
)
def test_what_does_not_fit_the_processes_is_named(sizes: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Topology(rank=0, local_rank=0, world_size=8, **sizes)


def test_a_shard_degree_that_does_not_divide_the_processes_is_refused() -> None:
    with pytest.raises(ConfigError, match="shard 3 does not divide 4"):
        Topology.of(ranks(4), shard=3)
    assert Topology.of(ranks(6), shard=3) == Topology(5, 0, 6, 1, replicate=2, shard=3)


def test_every_process_of_a_data_parallel_run_has_a_share_of_its_own() -> None:
    hybrid = topologies(6, replicate=3, shard=2)
    assert [one.data_rank for one in hybrid] == [0, 1, 2, 3, 4, 5]
    assert {one.data_parallel for one in hybrid} == {6}
    assert [one.place("shard") for one in hybrid] == [0, 1, 0, 1, 0, 1]
    assert [one.place("replicate") for one in hybrid] == [0, 0, 1, 1, 2, 2]
    assert all(one.counts_loss for one in hybrid)


def test_processes_that_share_a_model_share_its_data_and_count_once() -> None:
    # Given two stages of two shards of two halves of every matrix
    all_of_them = topologies(8, pipeline=2, shard=2, tensor=2)
    # Then there are two shares, each of them counted by one process, of the last stage
    assert [one.data_rank for one in all_of_them] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [one.rank for one in all_of_them if one.counts_loss] == [4, 6]
    assert sorted({(one.place("pipeline"), one.place("shard"), one.place("tensor")) for one in all_of_them}) == sorted(
        {(p, s, t) for p in range(2) for s in range(2) for t in range(2)}
    )


def test_the_tokens_of_a_shared_bin_all_count() -> None:
    sequence = topologies(4, shard=2, sequence=2)
    assert [one.data_rank for one in sequence] == [0, 0, 1, 1]
    assert all(one.counts_loss for one in sequence)


def test_experts_are_spread_within_the_processes_of_a_layer() -> None:
    assert [one.place("expert") for one in topologies(8, replicate=2, shard=4, expert=2)] == [0, 1] * 4


def test_one_process_writes_and_tells_and_one_of_a_node_prepares() -> None:
    group = [Topology(rank=rank, local_rank=rank % 2, world_size=4, shard=4) for rank in range(4)]
    assert [one.writes for one in group] == [one.tells for one in group] == [True, False, False, False]
    assert [one.prepares for one in group] == [True, False, True, False]
    assert not any(one.alone for one in group)
    assert Topology(rank=0, local_rank=0, world_size=1).alone


def test_files_of_an_export_are_written_by_those_that_see_one_place() -> None:
    one = Topology(rank=5, local_rank=1, world_size=8, local_world_size=4, shard=8)
    assert [one.exporters(uri) for uri in ("s3://b/e", "pvc://c/e", "file:///e")] == [8, 8, 4]
