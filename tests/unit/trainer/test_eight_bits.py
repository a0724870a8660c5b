"""Numbers of 8 bits with a common power of two: what codes stand for, and how numbers are rounded to them."""

from itertools import pairwise

import pytest
import torch

from sft_api.memory import MOMENT_BLOCK
from sft_trainer.eight_bits import FIRST, SECOND, Codes, magnitudes, packed, unpacked

BOTH = pytest.mark.parametrize("kind", [FIRST, SECOND], ids=["first", "second"])


def held(values: torch.Tensor, kind: Codes, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    return packed(values, torch.rand(len(values), generator=torch.Generator().manual_seed(seed)), kind)


def kept(values: torch.Tensor, kind: Codes, seed: int = 0) -> torch.Tensor:
    return unpacked(*held(values, kind, seed), kind)


def drawn(kind: Codes, blocks: int = 100, spread: float = 2.0) -> torch.Tensor:
    """Numbers of which the largest of a block is e to the fourth or so times the usual one."""
    generator = torch.Generator().manual_seed(1)
    sizes = (torch.randn(blocks * MOMENT_BLOCK, generator=generator) * spread).exp()
    values = torch.randn(blocks * MOMENT_BLOCK, generator=generator) * sizes
    return values if kind.signed else values.square()


@BOTH
def test_there_is_a_number_for_each_code_and_they_lie_the_closer_the_larger_they_are(kind: Codes) -> None:
    numbers = magnitudes(kind.in_octave).tolist()
    assert len(numbers) == 2 ** (7 if kind.signed else 8)
    assert (numbers[0], numbers[1], numbers[-1]) == (0.0, 2.0 ** (-22 if kind.signed else -26), 1.0)
    # In the upper four octaves neighbours differ by one part in so many at most, and nowhere by more than an octave
    apart = [(high - low) / low for low, high in pairwise(numbers[1:])]
    assert max(apart[-4 * kind.in_octave :]) <= 1 / kind.in_octave
    assert max(apart) == 1.0
    # And what one octave has the octave above it, of which it is the half, has as well
    assert {2 * number for number in numbers[:-1] if number <= 0.5} <= {*numbers}


@BOTH
def test_numbers_become_one_of_their_neighbours_and_are_right_on_average(kind: Codes) -> None:
    # Given the same numbers again and again, the largest of which is no power of two
    numbers = magnitudes(kind.in_octave)
    values = torch.rand(MOMENT_BLOCK, generator=torch.Generator().manual_seed(3)).pow(3) + 2e-3
    values[0] = 0.9
    if kind.signed:
        values[1::2] *= -1
    many = kept(values.repeat(20_000), kind).view(-1, MOMENT_BLOCK)

    upper = torch.bucketize(values.abs(), numbers)
    low, high = (values.sign() * numbers[upper - 1], values.sign() * numbers[upper])
    assert ((many == low) | (many == high)).all()
    way = (values - low) / (high - low)
    assert torch.allclose((many == high).float().mean(0), way, atol=0.015)


@BOTH
def test_what_codes_stand_for_stays_what_it_is(kind: Codes) -> None:
    values = kept(drawn(kind), kind)
    assert torch.equal(kept(values, kind, seed=1), values)
    # Also where the largest of a block becomes less, so that others are told apart better
    blocks = values.view(-1, MOMENT_BLOCK)
    smaller = torch.where(blocks.abs() == blocks.abs().amax(1, keepdim=True), blocks / 32, blocks).view(-1)
    others = smaller == values
    assert torch.equal(kept(smaller, kind, seed=2)[others], values[others])


@BOTH
def test_zero_is_zero_and_a_block_of_it_has_the_exponent_of_none(kind: Codes) -> None:
    values = drawn(kind)
    values[:MOMENT_BLOCK] = values[-5:] = 0.0
    codes, exponents = held(values, kind)
    assert not codes[:MOMENT_BLOCK].any()
    assert not codes[-5:].any()
    assert (int(exponents[0]), int(exponents[1]) > 0) == (0, True)
    # As moments begin
    assert not unpacked(torch.zeros_like(codes), torch.zeros_like(exponents), kind).any()


def test_a_second_moment_beside_a_much_larger_one_does_not_become_zero() -> None:
    # Given what is divided by, 12 orders of magnitude below another one of its block
    values = torch.full((1000 * MOMENT_BLOCK,), 1e-12)
    values[::MOMENT_BLOCK] = 1.0
    small = kept(values, SECOND).view(-1, MOMENT_BLOCK)[:, 1:]
    # Then it is the smallest that there is, always
    assert small.unique().tolist() == [2.0**-26]
    # And no number that there are neighbours for falls by more than a half
    values[1::MOMENT_BLOCK] = 2.9e-8
    assert set(kept(values, SECOND)[1::MOMENT_BLOCK].tolist()) == {2.0**-26, 2.0**-25}
    # While what is small of the first moment is right on average, by being 0 mostly
    first = torch.full((1000 * MOMENT_BLOCK,), -(2.0**-24))
    first[::MOMENT_BLOCK] = 1.0
    rest = kept(first, FIRST).view(-1, MOMENT_BLOCK)[:, 1:]
    assert set(rest.unique().tolist()) == {-(2.0**-22), 0.0}
    assert float(rest.mean()) == pytest.approx(-(2.0**-24), rel=0.05)


@BOTH
@pytest.mark.parametrize("size", [1e-45, 1e-38, 1e-30, 1e-12, 1e20, 3e38])
def test_numbers_of_any_size_are_finite_and_no_other_numbers(kind: Codes, size: float) -> None:
    values = torch.full((MOMENT_BLOCK,), size)
    values[1] = 0.0
    found = kept(values, kind)
    assert found.isfinite().all()
    assert found[1] == 0
    if 1e-28 < size < 1e38:
        assert torch.allclose(found[2:], values[2:], rtol=1 / kind.in_octave)
    # No number that a processor may take for 0
    assert not ((found != 0) & (found < torch.finfo(torch.float32).tiny)).any()
