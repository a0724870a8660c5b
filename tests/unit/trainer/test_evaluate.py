"""Evaluations: what each process computes of them, prepared ahead by the thread that training has too."""

import threading
from typing import Any

import numpy as np
import pytest
import torch

from sft_trainer import evaluate as evaluating
from sft_trainer.data.feed import BinTensors, Feed
from sft_trainer.evaluate import EvaluationBins, evaluate
from sft_trainer.late import LateFigures
from sft_trainer.topology import Topology
from tests.unit.trainer.test_feed import Numbers

pytestmark = pytest.mark.usefixtures("process_group")

CPU = torch.device("cpu")


def process(rank: int, of: int) -> Topology:
    return Topology(rank=rank, local_rank=rank, world_size=of, local_world_size=of, shard=of)


def awkward(bin_: BinTensors) -> torch.Tensor:
    """A loss whose sums depend on their order in the last bits, and a count."""
    return torch.stack([(bin_.labels.double() + 0.1).sqrt().sum() / 3, torch.tensor(len(bin_.labels) / 2).double()])


class Computes:
    """Has ``awkward`` losses; writes down its bins, and how many rows of ``read`` were prepared ahead of each."""

    def __init__(self, *read: Numbers) -> None:
        self.bins: list[BinTensors] = []
        self.ahead: list[int] = []
        self._read = read

    def forward_sums(self, bins: Any) -> torch.Tensor:
        (bin_,) = bins
        self.bins.append(bin_)
        taken = sum(len(bin_.boundaries.lengths) for bin_ in self.bins if bin_.counts)
        self.ahead.append(sum(len(examples.read) for examples in self._read) - taken)
        return awkward(bin_) if bin_.counts else torch.zeros((2,), dtype=torch.float64)


@pytest.mark.parametrize("of", [1, 3])
def test_sums_are_those_of_one_bin_after_the_other_to_the_last_bit(monkeypatch: pytest.MonkeyPatch, of: int) -> None:
    sets = {"a": Numbers(50), "b": Numbers(7)}
    shared: list[torch.Tensor] = []
    monkeypatch.setattr(evaluating, "sum_over_ranks", lambda values, device: shared.extend(values) or [1.0] * 4)
    computed = []
    for rank in range(of):
        computes = Computes()
        evaluate(computes, sets, bin_tokens=16, topology=process(rank, of), device=CPU)  # type: ignore[arg-type]
        computed.append(computes.bins)

    # All have as many, and together each example once
    assert len({len(bins) for bins in computed}) == 1
    rows = [row for bins in computed for bin_ in bins if bin_.counts for row in set(bin_.input_ids.tolist())]
    assert sorted(rows) == sorted([*range(50), *range(7)])
    # Each process's sum of a set is that of its bins in their order
    for rank, bins in enumerate(computed):
        prepared = EvaluationBins(sets, 16, process(rank, of))
        sums = {name: torch.zeros((2,), dtype=torch.float64) for name in sets}
        for index, name in enumerate(prepared.names):
            direct = prepared.share(index)
            assert torch.equal(direct.input_ids, bins[index].input_ids)
            sums[name] += awkward(direct) if direct.counts else 0.0
        assert [float(value) for value in shared[4 * rank : 4 * rank + 4]] == torch.cat([*sums.values()]).tolist()


def test_bins_are_prepared_by_a_thread_no_more_than_two_ahead(
    process_group: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: set[str] = set()
    read = Numbers.example
    monkeypatch.setattr(
        Numbers, "example", lambda self, row: threads.add(threading.current_thread().name) or read(self, row)
    )
    examples = Numbers(12)
    examples.lengths = np.full(12, 8, dtype=np.int32)
    computes = Computes(examples)

    evaluate(computes, {"a": examples}, bin_tokens=8, topology=process(0, 1), device=CPU)  # type: ignore[arg-type]

    assert threads == {"feed"}
    assert len(computes.bins) == 12
    assert max(computes.ahead) <= 2
    assert not any(thread.name == "feed" for thread in threading.enumerate())


def test_stages_are_given_several_bins_of_a_set_at_a_time(
    process_group: None,
) -> None:
    """One alone goes through stages of which all but one wait."""
    given: list[int] = []

    class Stages(Computes):
        def forward_sums(self, bins: Any) -> torch.Tensor:
            given.append(len(bins))
            return torch.stack([super(Stages, self).forward_sums([bin_]) for bin_ in bins]).sum(dim=0)

    sets = {"a": Numbers(50), "b": Numbers(7)}
    one = Topology(rank=0, local_rank=0, world_size=2, local_world_size=2, pipeline=2)
    told: list[tuple[int, int]] = []

    evaluate(
        Stages(),  # type: ignore[arg-type]
        sets,
        bin_tokens=16,
        topology=one,
        device=CPU,
        on_batch=lambda done, batches: told.append((done, batches)),
    )

    counts = [EvaluationBins(sets, 16, one).names.count(name) for name in sets]
    assert given == [min(8, count - first) for count in counts for first in range(0, count, 8)]
    assert max(given) == 8
    assert told[-1] == (sum(counts), sum(counts))
    assert len(told) == len(given)


@pytest.mark.parametrize(("device", "batches"), [("cpu", 3), ("cuda", 4)])
def test_who_is_asked_to_stop_leaves_after_a_batch_and_its_thread_ends(
    monkeypatch: pytest.MonkeyPatch, device: str, batches: int
) -> None:
    """On a GPU after the next one: it has something to compute while the host learns of it."""
    monkeypatch.setattr(evaluating, "steps_behind", lambda _: 1 if device == "cuda" else 0)
    asked = iter([0.0, 0.0, 2.0, 2.0, 2.0])
    computes = Computes()

    result = evaluate(
        computes,  # type: ignore[arg-type]
        {"a": Numbers(50), "b": Numbers(7)},
        bin_tokens=16,
        topology=process(0, 1),
        device=CPU,
        leaving=lambda: LateFigures(torch.tensor([next(asked)])),
    )

    assert result is None
    assert len(computes.bins) == batches
    assert not any(thread.name == "feed" for thread in threading.enumerate())


def test_a_row_that_cannot_be_read_ends_the_evaluation_and_its_thread() -> None:
    with pytest.raises(RuntimeError, match="row 3 cannot be read"):
        evaluate(
            Computes(),  # type: ignore[arg-type]
            {"a": Numbers(12, broken=3)},
            bin_tokens=16,
            topology=process(0, 1),
            device=CPU,
        )
    assert not any(thread.name == "feed" for thread in threading.enumerate())


def test_bins_of_an_evaluation_are_pinned_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[BinTensors] = []
    monkeypatch.setattr(BinTensors, "pinned", lambda bin_: pinned.append(bin_) or bin_)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    bins = EvaluationBins({"a": Numbers(12)}, 16, process(0, 1))

    given = list(Feed(bins, first=0, total=len(bins.names), device=torch.device("cuda", 0)))

    assert given == pinned
    assert len(given) > 3
