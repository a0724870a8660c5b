"""Shares of steps prepared by a thread: in order, bounded, with the thread's errors, and ending with the run."""

import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from threading import current_thread
from typing import Any

import numpy as np
import pytest
import torch

from sft_trainer.data.batches import ExampleBatches, PackedBatches
from sft_trainer.data.feed import BinTensors, Feed, Share, Shares
from sft_trainer.data.stream import ExampleStream, random_seed

CPU = torch.device("cpu")


class Numbers:
    """Examples that say which they are; reading number ``broken`` fails."""

    def __init__(self, count: int = 50, broken: int | None = None) -> None:
        self.lengths = np.array([3 + row % 7 for row in range(count)], dtype=np.int32)
        self.trained = self.lengths - 1
        self.broken = broken
        self.read: list[int] = []

    def example(self, index: int) -> tuple[Any, Any]:
        if index == self.broken:
            raise RuntimeError(f"row {index} cannot be read")
        self.read.append(index)
        return np.full(self.lengths[index], index, dtype=np.int32), np.ones(self.lengths[index], dtype=np.uint8)


def shares(examples: Numbers, *, data_rank: int = 0, data_parallel: int = 1, shuffle: bool = True) -> Shares:
    stream = ExampleStream([len(examples.lengths)], weights=None, seed=1, shuffle=shuffle)
    steps = PackedBatches([examples], stream, bin_tokens=16, bins_per_step=3, epochs=2, seed=1, shuffle=shuffle)
    return Shares(steps, [examples], data_rank, data_parallel, seed=42)


@pytest.fixture
def feeds() -> Iterator[list[Feed]]:
    opened: list[Feed] = []
    yield opened
    for feed in opened:
        feed.close()


def test_the_thread_gives_what_preparing_each_step_gives(feeds: list[Feed]) -> None:
    wanted = shares(Numbers(), data_rank=1, data_parallel=2)
    total = wanted.steps.total_steps
    assert total is not None
    feeds.append(Feed(shares(Numbers(), data_rank=1, data_parallel=2), first=2, total=total, device=CPU))
    given = list(feeds[0])
    assert len(given) == total - 2
    for index, share in enumerate(given, 2):
        direct = wanted.share(index)
        assert share.step.trained_tokens == direct.step.trained_tokens
        assert [bin_.input_ids.tolist() for bin_ in share.bins] == [bin_.input_ids.tolist() for bin_ in direct.bins]
        assert [bin_.seed for bin_ in share.bins] == [bin_.seed for bin_ in direct.bins]
    assert not feeds[0]._thread.is_alive()


def test_a_bin_is_seeded_by_its_place_in_the_run_whoever_computes_it() -> None:
    alone = shares(Numbers()).share(4)
    assert [bin_.seed for bin_ in alone.bins] == [random_seed(42, 4, place) for place in range(3)]
    # Of three bins one of two processes has two, the other one an empty one for company.
    both = [bin_ for rank in range(2) for bin_ in shares(Numbers(), data_rank=rank, data_parallel=2).share(4).bins]
    assert sorted(bin_.counts for bin_ in both) == [False, True, True, True]
    expected = {bin_.seed: bin_.input_ids.tolist() for bin_ in alone.bins}
    assert {bin_.seed: bin_.input_ids.tolist() for bin_ in both if bin_.counts} == expected


def test_the_thread_runs_no_more_than_two_steps_ahead(feeds: list[Feed]) -> None:
    examples = Numbers()
    batches = ExampleBatches(
        [examples],
        ExampleStream([50], weights=None, seed=1, shuffle=False),
        global_batch_size=5,
        epochs=1,
        micro_batch_size=5,
        bin_tokens=None,
    )
    feeds.append(Feed(Shares(batches, [examples], 0, 1, 42), first=0, total=10, device=CPU))
    next(feeds[0])
    deadline = time.monotonic() + 60
    while len(examples.read) < 15 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.3)
    assert examples.read == list(range(15))


def test_an_error_is_raised_at_its_step_with_the_place_where_it_happened(feeds: list[Feed]) -> None:
    examples = Numbers(broken=7)
    feeds.append(Feed(shares(examples, shuffle=False), first=0, total=10, device=CPU))
    given: list[Share] = []
    with pytest.raises(RuntimeError, match="row 7 cannot be read") as raised:
        given.extend(feeds[0])
    assert any(frame.name == "example" for frame in traceback.extract_tb(raised.value.__traceback__))
    # It is over then: nobody waits for a step that does not come.
    assert next(feeds[0], None) is None


def test_whoever_leaves_early_leaves_no_thread(feeds: list[Feed]) -> None:
    feed = Feed(shares(Numbers()), first=0, total=10, device=CPU)
    next(feed)
    feed.close()
    assert not feed._thread.is_alive()


def test_boundaries_are_tensors_beside_the_tokens() -> None:
    share = shares(Numbers()).share(0)
    for bin_ in share.bins:
        lengths = bin_.boundaries.lengths
        assert bin_.boundaries.ends.dtype == torch.int32
        assert bin_.boundaries.ends.tolist() == [0, *np.cumsum(lengths).tolist()]
        assert bin_.to(torch.device("meta")).boundaries.ends.is_meta


def test_what_a_gpu_will_fetch_is_pinned_by_the_thread(monkeypatch: pytest.MonkeyPatch, feeds: list[Feed]) -> None:
    # Given a thread that says which device it opened, and what it pinned
    done: list[tuple[str, object]] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: done.append((current_thread().name, device)))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: done.append((current_thread().name, 0)) or tensor)

    # When the first steps are prepared for a GPU
    feeds.append(Feed(shares(Numbers()), first=0, total=2, device=torch.device("cuda", 3)))
    given = list(feeds[0])

    # Then the thread opened that device alone, and pinned every tensor of all bins
    assert done[0] == ("feed", torch.device("cuda", 3))
    assert done[1:] == [("feed", 0)] * 5 * sum(len(share.bins) for share in given)


def test_what_is_pinned_keeps_its_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    # As without a GPU there is nothing to pin for.
    pinned: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor.clone())
    bin_: BinTensors = shares(Numbers()).share(0).bins[0]
    copy = bin_.pinned()
    assert len(pinned) == 5
    assert torch.equal(copy.boundaries.ends, bin_.boundaries.ends)
    assert (copy.seed, copy.counts) == (bin_.seed, bin_.counts)


def test_bins_are_dealt_out_by_cost_and_keep_their_seeds() -> None:
    # Given steps that two processes share, where a token of a long document costs more
    def squares(lengths: Sequence[int]) -> float:
        return float(sum(length * length for length in lengths))

    def share(data_rank: int, data_parallel: int) -> list[BinTensors]:
        given = replace(shares(Numbers(), data_rank=data_rank, data_parallel=data_parallel), cost=squares)
        return [bin_ for bin_ in given.share(1).bins if bin_.counts]

    # When each prepares what it has of a step
    alone, one, other = share(0, 1), share(0, 2), share(1, 2)

    # Then they have what one process has, with the same random numbers, and of any two the costlier first
    seeds = {bin_.seed: bin_.input_ids.tolist() for bin_ in alone}
    assert seeds == {bin_.seed: bin_.input_ids.tolist() for bin_ in (*one, *other)}
    costs = [squares(bin_.boundaries.lengths) for bin_ in alone]
    assert [squares(bin_.boundaries.lengths) for bin_ in (one[0], other[0])] == sorted(costs, reverse=True)[:2]
