"""How many bins go through the model at once is decided by memory, once, and by all processes together."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from sft_trainer.strategies.fsdp.memory import BinsPerForward, Pass, bins_that_fit
from tests.integration.checkpoint.ranks import run

GIB = 2**30


@dataclass
class Known:
    """A device on which one bin took a GiB beside 10 of weights, moments and gradients."""

    has: float
    between: int = 0
    """GiB that were held from one pass to the next."""
    gathered: int = 0
    """GiB of weights that stayed gathered in a pass."""

    def allocated(self) -> int:
        return 10 * GIB

    def most_allocated(self) -> int:
        return (11 + self.between + self.gathered) * GIB

    def total(self) -> int:
        return self.available()

    def available(self) -> int:
        return int(self.has * GIB)


@pytest.mark.parametrize(
    ("seen", "bin_tokens", "fit"),
    [
        (Pass(4096, 10 * GIB, 11 * GIB, 80 * GIB), 4096, 4),  # more would fit, and are not faster
        (Pass(4096, 10 * GIB, 11 * GIB, 80 * GIB), 512, 32),  # a full bin was seen to take more than these will
        (Pass(2048, 10 * GIB, 11 * GIB, 80 * GIB), 2048, 8),
        (Pass(1024, 10 * GIB, 14 * GIB, 80 * GIB), 2048, 6),  # the bin that was seen was half full
        (Pass(4096, 30 * GIB, 50 * GIB, 80 * GIB), 4096, 1),  # a fifth of the memory stays free
        (Pass(4096, 70 * GIB, 75 * GIB, 80 * GIB), 4096, 1),
        (Pass(32768, 10 * GIB, 11 * GIB, 80 * GIB), 32768, 1),
        (Pass(4096, 10 * GIB, 10 * GIB, 80 * GIB), 4096, 1),  # nothing was seen
    ],
)
def test_so_many_fit_as_there_is_memory_for_and_use_in(seen: Pass, bin_tokens: int, fit: int) -> None:
    assert bins_that_fit(seen, bin_tokens) == fit


def _chosen(tokens: dict[int, int], has: dict[int, float]) -> list[int]:
    rank = dist.get_rank()
    together = BinsPerForward(Known(has[rank]), 2048, torch.device("cpu"))
    counts = []
    for _ in range(3):
        together.after_pass(tokens[rank])
        counts.append(together.count)
    return counts


@pytest.mark.parametrize(
    ("tokens", "has", "count"),
    [
        ({0: 2048, 1: 2048}, {0: 80.0, 1: 16.5}, 3),  # less memory on one, where something else holds some
        ({0: 2048, 1: 0}, {0: 16.5, 1: 1.0}, 3),  # one that has no bin of its own knows nothing
        ({0: 2048, 1: 2048}, {0: 80.0, 1: 80.0}, 8),
    ],
)
def test_all_processes_agree_after_the_second_step(
    tokens: dict[int, int], has: dict[int, float], count: int, tmp_path: Path
) -> None:
    # Collectives of their forward passes must be as many, and the first step has no moments yet.
    assert run(2, tmp_path, _chosen, tokens, has) == [[1, count, count]] * 2


def _chosen_beside(held: int, passes: int) -> int:
    seen = Known(25.0, held if passes > 1 else 0)
    together = BinsPerForward(seen, 2048, torch.device("cpu"))
    together.held_between = held * GIB
    for _ in range(2):
        together.after_pass(2048, passes)
    return together.count


@pytest.mark.parametrize(("held", "passes", "count"), [(0, 3, 8), (6, 3, 4), (6, 1, 4)])
def test_what_passes_leave_for_one_another_is_held_once(held: int, passes: int, count: int, tmp_path: Path) -> None:
    # Given 10 GiB of states and 1 of a bin; of a step of one pass nothing was left, of another one it will be
    assert run(1, tmp_path, _chosen_beside, held, passes) == [count]


def _chosen_gathered(gathered: int) -> int:
    together = BinsPerForward(Known(25.0, gathered=gathered), 2048, torch.device("cpu"))
    together.gathered = gathered * GIB
    for _ in range(2):
        together.after_pass(2048)
    return together.count


@pytest.mark.parametrize(("gathered", "count"), [(0, 8), (4, 6), (9, 1)])
def test_what_stays_gathered_is_there_once(gathered: int, count: int, tmp_path: Path) -> None:
    # Given 10 GiB of states, 1 of a bin, and room for 10 more
    assert run(1, tmp_path, _chosen_gathered, gathered) == [count]
