"""Which GPUs are called slow, by what they took for the same work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from sft_api.rundir import GPU_TIMES_FOLDER
from sft_api.slow_gpus import slow_gpu, slow_gpus
from sft_trainer.supervisor.clock import AwakeClock
from sft_trainer.supervisor.coordinator import Coordinator
from sft_trainer.supervisor.gpu_times import TimesTold
from sft_trainer.supervisor.metrics import render_machine
from sft_trainer.supervisor.monitor import Sample
from sft_trainer.supervisor.output import Output
from sft_trainer.supervisor.protocol import RankTimes, Report
from sft_trainer.supervisor.slow_gpus import LATE_SECONDS, SlowGpus, ratios
from tests.unit.supervisor.test_environment import SETTINGS

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
H100 = "NVIDIA H100 80GB HBM3"


def times(rank: int, products: float = 1.0, memory: float = 1.0, *, look: int = 1, model: str = H100) -> RankTimes:
    gpu = rank % 2
    return RankTimes(look=look, gpu=gpu, uuid=f"GPU-{rank}", model=model, products=products, memory=memory, rank=rank)


def judged(*seconds: float, model: str = H100) -> dict[int, float]:
    found = ratios({rank: times(rank, each, model=model) for rank, each in enumerate(seconds)})
    return {rank: round(ratio.products, 2) for rank, ratio in found.items()}


class Run:
    """Pods of ``size`` processes each, that tell of one look after the other."""

    def __init__(self, processes: int = 4, *, size: int = 2) -> None:
        self.processes, self.size = processes, size
        self.slow = SlowGpus(processes)
        self.looks = 0
        self.start = 7

    def look(
        self,
        products: Mapping[int, float] | None = None,
        memory: Mapping[int, float] | None = None,
        *,
        without: int = -1,
    ) -> list[str]:
        """All but the pod ``without`` tell; ranks that are not named take a second."""
        self.looks += 1
        said = []
        for pod in range(self.processes // self.size):
            if pod != without:
                said += self.tell(pod, products or {}, memory or {})
        return said

    def tell(
        self, pod: int, products: Mapping[int, float], memory: Mapping[int, float], later: float = 0.0
    ) -> list[str]:
        ranks = range(self.size * pod, self.size * (pod + 1))
        told = tuple(times(rank, products.get(rank, 1.0), memory.get(rank, 1.0), look=self.looks) for rank in ranks)
        return self.hear(pod, told, later)

    def hear(self, pod: int, told: tuple[RankTimes, ...], later: float = 0.0) -> list[str]:
        report = Report(
            job_uid="u",
            node=pod,
            processes=self.size,
            instance="i",
            host=f"node-{pod}",
            running=self.start,
            gpu_times=told,
        )
        seconds = 600.0 * self.looks + later
        return self.slow.hear(report, seconds, NOW + timedelta(seconds=seconds))

    @property
    def ranks(self) -> list[int]:
        return [each.rank for each in self.slow.slow]


def test_what_is_usual_is_the_median_of_one_model() -> None:
    assert judged(1, 1, 1.5) == {0: 1, 1: 1, 2: 1.5}
    # Of two halves the slow one is slow; of a slow majority nobody knows that it is.
    assert judged(1, 1, 1.5, 1.5) == {0: 1, 1: 1, 2: 1.5, 3: 1.5}
    assert judged(1, 1.5, 1.5) == {0: 0.67, 1: 1, 2: 1}
    assert judged(1, 1.5) == {}
    mixed = {rank: times(rank, seconds, model=model) for rank, (seconds, model) in enumerate([(1, "a"), (3, "b")] * 3)}
    assert {ratio.products for ratio in ratios(mixed).values()} == {1.0}
    assert ratios({}) == {}


def test_a_gpu_is_slow_after_two_looks_and_until_two_say_that_it_is_not() -> None:
    # Given a run of four, of which one was slow in one look, as a process is that was held up for a moment
    run = Run()
    run.look({2: 1.4})
    run.look()
    assert (run.look({2: 1.4}), run.ranks) == ([], [])

    # When it is slow in the next one too
    (said,) = run.look({2: 1.45})

    # Then it is called so, with all that tells which it is
    (slow,) = run.slow.slow
    assert said == f"warning: {slow_gpu(slow)}"
    assert (slow.pod, slow.node, slow.gpu, slow.rank, slow.uuid, slow.model) == (1, "node-1", 0, 2, "GPU-2", H100)
    assert (slow.products_speed, slow.memory_speed) == (0.69, 1.0)
    assert slow.since == "2026-01-01T12:30:00Z", "when the first of the two was"

    # Nor does it pass by one look, or where it is only nearly as fast
    assert run.look() == run.look({2: 1.12}) == run.look() == []
    assert run.ranks == [2]
    assert run.look() == ["GPU 0 of pod 1 (GPU-2, rank 2) is as fast as the others again"]
    assert run.ranks == []


@pytest.mark.parametrize(("seconds", "slow"), [(1.14, []), (1.16, [3])])
def test_slow_memory_counts_as_slow_products_do(seconds: float, slow: list[int]) -> None:
    run = Run()
    for _ in range(2):
        run.look(memory={3: seconds})
    assert run.ranks == slow


def test_a_new_start_of_the_workers_counts_its_looks_anew_and_goes_on() -> None:
    run = Run()
    run.look({1: 2.0})
    run.start, run.looks = 8, 0
    assert len(run.look({1: 2.0})) == 1
    # What an earlier start has told comes too late
    run.start, run.looks = 7, 90
    assert (run.look(), run.ranks) == ([], [1])
    run.start, run.looks = 8, 1
    assert (run.look(), run.ranks) == ([], [1])
    assert len(run.look()) == 1
    assert run.ranks == []


def test_of_a_model_of_which_too_few_are_left_none_is_slow() -> None:
    run = Run()
    for _ in range(2):
        run.look({2: 2.0})
    assert run.ranks == [2]

    run.looks += 1
    run.hear(0, tuple(times(rank, look=run.looks, model="NVIDIA H200") for rank in (0, 1)))
    run.tell(1, {2: 2.0}, {})

    assert run.ranks == []


def test_of_a_pod_that_was_replaced_the_gpu_is_forgotten() -> None:
    run = Run()
    run.look({2: 2.0})
    run.look({2: 2.0})
    assert run.ranks == [2]

    # When pod 1 is replaced by one on another node
    run.looks += 1
    run.tell(0, {}, {})
    other = tuple(times(rank, look=run.looks).model_copy(update={"uuid": f"GPU-new-{rank}"}) for rank in (2, 3))
    run.hear(1, other)

    assert run.ranks == []


def test_it_is_forgotten_also_where_some_gpu_never_tells() -> None:
    # Given a slow GPU in a run of which another one never has room for the work
    run = Run(8)

    def look(slow: float, uuid: str = "GPU-2", without: tuple[int, ...] = (0,)) -> None:
        run.looks += 1
        for pod in range(4):
            ranks = [rank for rank in (2 * pod, 2 * pod + 1) if rank not in without]
            told = {rank: times(rank, slow if rank == 2 else 1.0, look=run.looks) for rank in ranks}
            if 2 in told:
                told[2] = told[2].model_copy(update={"uuid": uuid})
            run.hear(pod, tuple(told.values()))
        run.hear(3, (), LATE_SECONDS + 1)

    look(2.0)
    look(2.0)
    # One look without it says nothing of it
    look(2.0, without=(0, 2))
    look(2.0)
    look(2.0, without=(0, 2))
    assert run.ranks == [2]

    # When its pod is replaced by one on another node
    look(2.0)
    look(1.0, uuid="GPU-new")
    look(1.0, uuid="GPU-new")

    assert run.ranks == []


def test_a_pod_that_tells_nothing_holds_up_no_verdict() -> None:
    # Given one whose disk is full, so that its looks are never told
    run = Run(8)
    run.look({2: 2.0}, without=3)
    # They are judged without it when the next look comes, or after a minute, by whatever report
    run.look({2: 2.0}, without=3)
    assert run.ranks == []
    assert run.tell(0, {}, {}, LATE_SECONDS - 1) == []
    assert len(run.hear(0, (), LATE_SECONDS + 1)) == 1
    assert run.ranks == [2]


def test_what_is_told_after_the_verdict_is_no_look_of_its_own() -> None:
    # Given a look that was judged without pod 2
    run = Run(12, size=4)
    run.look({9: 2.0}, without=2)
    run.hear(0, (), LATE_SECONDS + 1)

    # When that tells of it all the same
    run.tell(2, {9: 2.0}, {}, LATE_SECONDS + 2)
    run.hear(0, (), 3 * LATE_SECONDS)

    # Then it takes two more
    run.look({9: 2.0})
    assert run.ranks == []
    run.look({9: 2.0})
    assert run.ranks == [9]


def test_a_process_that_has_not_looked_yet_tells_of_the_look_before() -> None:
    """Those of one pod write one after the other."""
    run = Run()
    run.look({3: 9.0})
    for _ in range(2):
        run.looks += 1
        run.tell(0, {}, {})
        run.hear(1, (times(2, look=run.looks), times(3, 9.0, look=run.looks - 1)))
        run.tell(1, {}, {})
    assert run.ranks == []


def test_more_than_are_told_are_those_that_were_slow_first() -> None:
    run = Run(40)
    for seconds in (
        {39: 2.0},
        {39: 2.0},
        dict.fromkeys((39, *range(15)), 2.0),
        dict.fromkeys((39, *range(15)), 2.0),
    ):
        run.look(seconds)
    assert run.ranks == [39, *range(9)]
    assert slow_gpus(run.slow.slow).endswith(". So are 9 more: status.slowGpus")


def test_ranks_that_are_not_a_pods_own_are_none_of_its_words() -> None:
    run = Run()
    for _ in range(3):
        run.looks += 1
        run.tell(1, {}, {})
        run.hear(0, tuple(times(rank, 9.0 if rank == 3 else 1.0, look=run.looks) for rank in (-1, 0, 3, 10**6)))
        run.tell(0, {}, {})
    assert run.ranks == []


@pytest.mark.parametrize(
    "written",
    [
        '{"look":1,"gpu":0,"uuid":"u","model":"m","products":NaN,"memory":1}',
        '{"look":1,"gpu":0,"uuid":"u","model":"m","products":1,"memory":-1}',
        '{"look":1,"gpu":0,"uuid":"u","model":"m","products":1,"memory":1e999}',
        '{"look":1,"gpu":0,"uuid":"u","model":"m","products":"fast","memory":1}',
        '{"look":0,"gpu":0,"uuid":"u","model":"m","products":1,"memory":1}',
        '{"look":1,"gpu":0,"uuid":"' + "u" * 1000 + '","model":"m","products":1,"memory":1}',
        "[",
        "",
    ],
)
def test_what_no_trainer_writes_is_not_passed_on(written: str, tmp_path: Path) -> None:
    folder = tmp_path / GPU_TIMES_FOLDER
    folder.mkdir()
    told = TimesTold(tmp_path, [0, 1])
    (folder / "rank-0.json").write_text(written)
    told.read()
    assert not told.told

    (folder / "rank-1.json").write_text(times(1).model_dump_json(by_alias=True))
    told.read()
    assert told.told == (times(1),)


def test_prometheus_is_told_of_each_rank_by_its_own_pod() -> None:
    lines = render_machine(Sample(), [times(8, 0.004, 0.002)]).decode().splitlines()

    assert 'sft_trainer_gpu_work_seconds{rank="8",work="products"} 0.004' in lines
    assert 'sft_trainer_gpu_work_seconds{rank="8",work="memory"} 0.002' in lines


def test_index_0_tells_of_the_start_that_is_under_way(tmp_path: Path) -> None:
    # Given a group of one pod with three GPUs that trains
    settings = replace(SETTINGS, nodes=1, node=0, processes=3, run_dir=tmp_path)
    coordinator = Coordinator(settings, instance="zero", output=Output(), clock=AwakeClock())
    report = Report(job_uid=settings.job_uid, node=0, processes=3, instance="zero", host="one")
    report = report.model_copy(update={"received": coordinator.step(report).id})
    generation = coordinator.step(report).generation
    assert generation is not None

    def tell(look: int, running: int) -> list[str]:
        told = tuple(times(rank, 1.0 + rank / 4, look=look) for rank in range(3))
        coordinator.step(report.model_copy(update={"running": running, "gpu_times": told}))
        return [each.uuid for each in coordinator.progress().training.slow_gpus]

    # When a start of before, and then this one tells of two looks
    assert tell(1, generation.id - 1) == tell(2, generation.id - 1) == tell(1, generation.id) == []

    # Then it is told
    assert tell(2, generation.id) == ["GPU-2"]
