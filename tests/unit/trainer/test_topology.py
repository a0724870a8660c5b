"""Who has which part of a run, and which factor is wrong when the parts do not fit the processes."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import sft_trainer
from sft_api.plan import make_plan
from sft_trainer import topology
from sft_trainer.distributed import Ranks
from sft_trainer.errors import ConfigError
from sft_trainer.topology import ALONE, DIMENSIONS, Topology
from tests.unit.cli.jobs import job


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
    assert ALONE.alone


def test_files_of_an_export_are_written_by_those_that_see_one_place() -> None:
    one = Topology(rank=5, local_rank=1, world_size=8, local_world_size=4, shard=8)
    assert [one.exporters(uri) for uri in ("s3://b/e", "pvc://c/e", "file:///e")] == [8, 8, 4]
    # Each file is written once, by them in turn
    files = ["a", "b", "c", "d", "e"]
    for uri, writers in (("s3://b/e", 4), ("file:///e", 2)):
        group = [Topology(rank, rank % 2, 4, 2, shard=4) for rank in range(4)]
        assert [one.turn(files, uri) for one in group] == [files[n::writers] if n < writers else [] for n in range(4)]


def test_a_factor_of_1_has_rank_0_and_a_group_of_one() -> None:
    plain = Topology(rank=2, local_rank=0, world_size=4, shard=4)
    for name in (*DIMENSIONS, "expert"):
        alone = name != "shard"
        assert plain.members(name) == ((2,) if alone else (0, 1, 2, 3)), name
        assert not alone or plain.place(name) == 0
        assert not alone or plain.process_group(name) is None, "there is nobody to speak to"
    assert plain.members(*DIMENSIONS) == (0, 1, 2, 3)
    with pytest.raises(ValueError, match="expert"):
        plain.groups("expert", "tensor")


def test_processes_that_differ_in_some_dimensions_only_are_a_group() -> None:
    # Given two stages of two replicas of two halves of every matrix, experts over both halves
    sizes = {"pipeline": 2, "replicate": 2, "tensor": 2, "expert": 2}
    one = topologies(8, **sizes)[5]
    assert [one.members(name) for name in ("pipeline", "replicate", "tensor")] == [(1, 5), (5, 7), (4, 5)]
    assert one.members("replicate", "shard", "sequence", "tensor") == (4, 5, 6, 7)
    # Experts are spread over neighbours: pairs of the processes of a layer
    experts = topologies(8, shard=2, tensor=4, expert=2)
    assert experts[0].groups("expert") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    # And every process is in one group, whichever dimensions it is of
    for names in (("pipeline",), ("replicate", "tensor"), ("expert",), DIMENSIONS):
        assert sorted(rank for group in one.groups(*names) for rank in group) == list(range(8))


def test_whoever_forms_a_group_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given groups whose forming is watched, and forming them that shows whether it was said
    said: list[str] = []

    @contextmanager
    def forming() -> Iterator[None]:
        said.append("begins")
        yield
        said.append("over")

    class Formed(Exception):
        """There is no group to be had here."""

    def form(*_: object, **__: object) -> None:
        said.append("formed")
        raise Formed

    monkeypatch.setattr(topology.dist, "new_subgroups_by_enumeration", form)
    monkeypatch.setattr(topology, "init_device_mesh", form)
    one = Topology.of(ranks(4), shard=2, forming=forming)

    # When the group of all is formed, and the mesh of a model
    for wanted in (lambda: one.process_group(*DIMENSIONS), lambda: one.parameter_mesh("cpu")):
        said.clear()
        with pytest.raises(Formed):
            wanted()
        assert said == ["begins", "formed"]

    # Then nothing is said where there is nobody to form one with
    said.clear()
    assert Topology(rank=0, local_rank=0, world_size=1, forming=forming).process_group(*DIMENSIONS) is None
    assert said == []
    assert one == Topology.of(ranks(4), shard=2), "the same place, whoever is told"


def test_who_holds_the_same_part_of_a_tensor_is_a_replica() -> None:
    hybrid = topologies(6, replicate=3, shard=2)
    assert [one.replica(frozenset({"shard"})) for one in hybrid] == [(0, 3), (0, 3), (1, 3), (1, 3), (2, 3), (2, 3)]
    assert [one.replica(frozenset()) for one in hybrid] == [(rank, 6) for rank in range(6)]
    # A stage of a pipeline holds what no other has; a matrix that is split twice has copies in replicas only.
    stages = topologies(8, pipeline=2, replicate=2, tensor=2)
    assert [one.replica(frozenset()) for one in stages] == [(0, 4), (1, 4), (2, 4), (3, 4)] * 2
    assert [one.replica(frozenset({"tensor"})) for one in stages] == [(0, 2), (0, 2), (1, 2), (1, 2)] * 2
    experts = topologies(4, replicate=2, tensor=2, expert=2)
    assert [one.replica(frozenset({"expert"})) for one in experts] == [(0, 2), (0, 2), (1, 2), (1, 2)]


def test_replicas_are_what_is_left_when_the_other_degrees_are_given() -> None:
    one = Topology.of(ranks(32), shard=2, sequence=2, tensor=2, pipeline=2, expert=4)
    assert (one.replicate, one.data_parallel) == (2, 4)
    with pytest.raises(ConfigError, match="shard 3 does not divide 32"):
        Topology.of(ranks(32), shard=3, tensor=2)


_ASKS = re.compile(r"get_(local_)?rank\(|get_world_size\(|\brank\s*(==|!=|%|<|>)|(==|!=|%)\s*[\w.]*\brank\b")
"""A decision by rank, or a question for it."""
_MAY_ASK = {
    "topology.py": "it answers",
    "distributed.py": "it forms the group, before there is a topology",
    "alike.py": "it says of every rank what it holds, and decides nothing",
}


def decisions_by_rank() -> Iterator[str]:
    root = Path(*sft_trainer.__path__)
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        # Supervisor and launcher know ranks as processes that are started; they have no part of a run.
        if name in _MAY_ASK or name.startswith(("supervisor/", "launch.py", "on_ray/")):
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if _ASKS.search(line.partition("#")[0]):
                yield f"{name}:{number}: {line.strip()}"


def test_what_a_plan_says_of_degrees_is_what_there_is() -> None:
    degrees = {"tensorParallelDegree": 2, "pipelineParallelDegree": 2, "expertParallelDegree": 4}
    plan = make_plan(job(strategy={"megatron": degrees}, compute={"gpusPerNode": 8}).spec)

    topology = Topology.planned(plan, Ranks(5, 5, 8, 8, "", 0, ""))

    assert (topology.shard, topology.tensor, topology.pipeline, topology.expert) == (2, 2, 2, 4)
    assert (topology.data_parallel, topology.replicate) == (plan.data_parallel, 1)

    of_tokens = {"megatron": degrees | {"contextParallelDegree": 2}}
    plan = make_plan(job(strategy=of_tokens, compute={"gpusPerNode": 8, "nodes": 2}).spec)
    topology = Topology.planned(plan, Ranks(13, 5, 8, 16, "", 0, ""))
    assert (topology.shard, topology.sequence, topology.tensor, topology.pipeline) == (2, 2, 2, 2)
    assert (topology.data_parallel, topology.data_rank, topology.holder) == (plan.data_parallel, 1, 2)


def test_nobody_else_decides_by_rank() -> None:
    assert list(decisions_by_rank()) == []
