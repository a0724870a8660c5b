"""How long processes wait for one another in a step, by who computes which bins: reckoned, nothing is trained.

    python -m tests.bench.dealing

Bins of a step are computed side by side, one of each process at a time, and take as long as the costliest. Printed is
that, summed over steps, by the mean cost of a process, for bins dealt out in turn and by cost. Costs are the FLOPs of
an 8B model (Llama 3.1); the steps are those of the trainer's own schedule. ``committed``: the lengths of
``lengths.json``, 8 examples a micro-batch, unpacked, and packed to 2048 tokens. ``long``: packed to 65,536 tokens, of
which half are in documents of 32,768 to 65,536 and half in conversations of about 500, eight bins a process and step.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from sft_trainer.data.batches import ExampleBatches, PackedBatches, StepSchedule
from sft_trainer.data.dealing import dealt
from sft_trainer.data.stream import ExampleStream

from .bench_inputs import example_lengths

LAYERS, HEADS, HEAD_SIZE, MATRICES = 32, 32, 128, 7.5e9
"""Of Llama 3.1 8B; the embedding is looked up."""
PROCESSES = (2, 8, 16)


class Lengths:
    """Examples of which only the lengths are looked at."""

    def __init__(self, lengths: NDArray[np.int32]) -> None:
        self.lengths, self.trained = lengths, lengths - 1

    def example(self, index: int) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        raise NotImplementedError(f"example {index} has no tokens")


def cost(lengths: Sequence[int]) -> float:
    """FLOPs of a bin, as ``sft_trainer/flops.py`` counts them."""
    squares = sum(length * length for length in lengths)
    return 6.0 * MATRICES * sum(lengths) + 6.0 * LAYERS * HEADS * HEAD_SIZE * squares


def in_turn(costs: Sequence[float], processes: int) -> list[list[int | None]]:
    """Bin ``j`` to process ``j mod processes``."""
    slots = range(0, len(costs), processes)
    return [[s + rank if s + rank < len(costs) else None for s in slots] for rank in range(processes)]


def waiting(schedule: StepSchedule, steps: int, processes: int, deal: Callable[..., list[list[int | None]]]) -> float:
    """Time of ``steps`` steps by that of processes that never wait."""
    longest = alone = 0.0
    for index in range(steps):
        costs = [cost(bin_.lengths.tolist()) for bin_ in schedule.step(index).bins]
        hands = deal(costs, processes)
        times = np.array([[0.0 if place is None else costs[place] for place in hand] for hand in hands])
        longest += times.max(axis=0).sum()
        alone += times.sum() / processes
    return longest / alone


def schedules(processes: int) -> dict[str, StepSchedule]:
    """By name, eight bins a process and step."""
    drawn = np.random.default_rng(0)
    committed = example_lengths()
    short = Lengths(drawn.choice(committed, 40_000).astype(np.int32))
    books = drawn.integers(32_768, 65_537, 1000)
    talks = np.clip(drawn.lognormal(5.9, 0.8, 100_000), 16, 4096)
    long = Lengths(drawn.permutation(np.concatenate([books, talks])).astype(np.int32))

    def stream(of: Lengths) -> ExampleStream:
        return ExampleStream([len(of.lengths)], weights=None, seed=1, shuffle=True)

    def packed(of: Lengths, tokens: int) -> StepSchedule:
        return PackedBatches(
            [of], stream(of), bin_tokens=tokens, bins_per_step=8 * processes, epochs=None, seed=1, shuffle=True
        )

    unpacked = ExampleBatches(
        [short], stream(short), global_batch_size=64 * processes, epochs=None, micro_batch_size=8, bin_tokens=None
    )
    return {"unpacked": unpacked, "packed": packed(short, 2048), "long": packed(long, 65_536)}


def main() -> None:
    for processes in PROCESSES:
        for name, schedule in schedules(processes).items():
            before, after = (waiting(schedule, 10, processes, deal) for deal in (in_turn, dealt))
            print(f"{name}_{processes}_processes_in_turn={before:.3f}")
            print(f"{name}_{processes}_processes_by_cost={after:.3f}")


if __name__ == "__main__":
    main()
