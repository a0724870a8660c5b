"""What each process has of a bin whose tokens several share."""

import pytest
import torch

from sft_trainer.data.batches import empty_micro_batch
from sft_trainer.data.feed import BinTensors
from sft_trainer.data.parts import part_of
from sft_trainer.strategies.fsdp.grouping import grouped
from tests.bins import random_bin


@pytest.mark.parametrize("lengths", [(16,), (5, 9, 1), (3, 1, 4, 6, 3), (2,), (33, 7)])
@pytest.mark.parametrize("degree", [2, 3, 4, 8])
def test_parts_together_are_the_bin_and_nothing_is_there_twice(degree: int, lengths: tuple[int, ...]) -> None:
    bin_ = random_bin(1, *lengths)
    parts = [part_of(bin_, place, degree) for place in range(degree)]

    # All have as many tokens, and all of them together begin with those of the bin
    each = len(parts[0].input_ids)
    assert {len(part.input_ids) for part in parts} == {each} == {len(part.position_ids) for part in parts}
    tokens = sum(lengths)
    assert tokens <= degree * each < max(tokens + degree, 2 * degree + 1)
    assert each > 1, "a size of 1 is one of its own to a compiler"
    assert torch.equal(torch.cat([part.input_ids for part in parts])[:tokens], bin_.input_ids)
    assert torch.equal(torch.cat([part.position_ids for part in parts])[:tokens], bin_.position_ids)

    # What is trained is trained once, by the process that has the token before it
    assert torch.equal(torch.cat([part.targets + place * each for place, part in enumerate(parts)]), bin_.targets)
    assert torch.equal(torch.cat([part.labels for part in parts]), bin_.labels)
    assert all(((part.targets >= 0) & (part.targets < each)).all() for part in parts)

    # Documents are those of all tokens, and what fills up is one more
    (boundaries,) = {part.boundaries.lengths for part in parts}
    missing = degree * each - tokens
    assert boundaries == (lengths if missing == 0 else (*lengths, missing))


@pytest.mark.parametrize(("tokens", "each"), [(16, 8), (17, 12), (3, 4)])
def test_parts_are_filled_up_for_those_who_share_them_between_matrices(tokens: int, each: int) -> None:
    bin_ = random_bin(1, tokens)
    parts = [part_of(bin_, place, 2, multiple=4) for place in range(2)]
    assert [len(part.input_ids) for part in parts] == [each, each]
    assert torch.equal(torch.cat([part.input_ids for part in parts])[:tokens], bin_.input_ids)
    assert sum(parts[0].boundaries.lengths) == 2 * each
    assert torch.equal(torch.cat([part.labels for part in parts]), bin_.labels)


def test_what_fills_a_bin_up_is_a_document_of_which_nothing_is_trained() -> None:
    bin_ = random_bin(1, 5, 9)
    filled = bin_.filled_up(16)

    assert (len(filled.input_ids), filled.position_ids[14:].tolist()) == (16, [0, 1])
    assert filled.boundaries.lengths == (5, 9, 2)
    assert (filled.targets, filled.labels, filled.sizes) == (bin_.targets, bin_.labels, bin_.sizes)
    assert bin_.filled_up(14) is bin_


@pytest.mark.parametrize(
    ("sizes", "degree", "held"),
    [
        ((16,), 2, [(8,), (8,)]),
        ((5, 3, 2), 4, [(3, 0, 0), (2, 1, 0), (0, 2, 1), (0, 0, 1)]),
        ((2, 1), 4, [(2, 0), (0, 1), (0, 0), (0, 0)]),
    ],
)
def test_each_knows_how_many_tokens_of_every_bin_it_has(
    sizes: tuple[int, ...], degree: int, held: list[tuple[int, ...]]
) -> None:
    (together,) = grouped([random_bin(1, size) for size in sizes], len(sizes))
    parts = [part_of(together, place, degree) for place in range(degree)]

    assert together.held == together.sizes == sizes
    assert [part.held for part in parts] == held
    assert {part.sizes for part in parts} == {sizes}
    assert [part.to(torch.device("cpu")).held for part in parts] == held


def test_each_draws_random_numbers_of_its_own() -> None:
    bin_ = random_bin(7, 16)
    assert [part_of(bin_, place, 4).seed for place in range(4)] == [7, 8, 9, 10]


def test_parts_of_a_bin_that_does_not_count_do_not_either() -> None:
    empty = BinTensors.of(empty_micro_batch(), counts=False)
    parts = [part_of(empty, place, 4) for place in range(4)]
    assert [part.counts for part in parts] == [False] * 4
    assert [len(part.targets) for part in parts] == [1, 0, 0, 0]
