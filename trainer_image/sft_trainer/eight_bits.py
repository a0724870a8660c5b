"""Moments in 8 bits: 64 numbers that are next to one another in a row share a power of two, and each has a code.

A code stands for a number from 0 to 1, with a sign where there are any. Of those in the upper four octaves, from 1/16
on, numbers can be told apart best; with every four octaves further down half as well, until one number is left for
each octave. So codes reach over 26 octaves where there is no sign, and 22 where there is one, which is what the
magnitudes of gradients differ by within a row, and are near to one another where most of them are. (Dettmers et al.
2022, arXiv 2110.02861, have a table of that kind, in decades.)

Because what a block shares is a power of two, it is one byte as well, all products with it are exact, and a number that
a code stands for stays what it is when another one of its block shrinks: coarser numbers are among the finer ones.

Numbers are rounded stochastically to one of their two neighbours. Only those that have no sign and lie below the
smallest are made that one: they are what is divided by, and must not be 0.
"""

from dataclasses import dataclass
from functools import cache

import torch

from sft_api.memory import MOMENT_BLOCK

_OCTAVES_ALIKE = 4
_LEAST, _MOST = 30, 253
"""Exponents as fp32 has them, of what a block shares: so that neither its inverse nor any number is below those that
fp32 holds in full, which some devices take for 0."""
_TOLD = 18
"""Bits of fp32 below those by which the numbers of codes differ: these have at most five behind the first one."""


@dataclass(frozen=True)
class Codes:
    """How numbers are held."""

    dtype: torch.dtype
    """Of the codes; 0 is that of 0, and a number below 0 has the code of its magnitude with a sign."""
    signed: bool
    in_octave: int
    """Numbers of each of the upper octaves."""


FIRST = Codes(torch.int8, signed=True, in_octave=16)
"""Of the first moment."""
SECOND = Codes(torch.uint8, signed=False, in_octave=32)
"""Of the second moment."""


def magnitudes(in_octave: int) -> torch.Tensor:
    """What codes stand for, by code: 0, and all numbers from the smallest one to 1."""
    above: list[float] = []
    octave = 0
    # Fours of octaves down to one number each, and three such octaves more: one for every code.
    while len(above) < _OCTAVES_ALIKE * (2 * in_octave - 1) + 3:
        apart = max(1, in_octave >> octave // _OCTAVES_ALIKE)
        # From the upper end of the octave, which is among them, to the lower one, which is the next octave's.
        above += [2.0 ** -(octave + 1) * (1 + step / apart) for step in range(apart, 0, -1)]
        octave += 1
    return torch.tensor([0.0, *reversed(above)])


@cache
def _tables(kind: Codes, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numbers of codes by code, from the lowest on; how far the next one is from that of each code but the last; and
    the code of the number that is not above another one, by the upper bits of that."""
    numbers = magnitudes(kind.in_octave)
    upper = (torch.arange(2 ** (30 - _TOLD), dtype=torch.int32) << _TOLD).view(torch.float32)
    below = torch.bucketize(upper, numbers, out_int32=True, right=True).sub_(1).clamp_(max=len(numbers) - 2)
    signed = torch.cat([-numbers[1:].flip(0), numbers]) if kind.signed else numbers
    return signed.to(device), numbers.diff().to(device), below.to(device)


def unpacked(codes: torch.Tensor, exponents: torch.Tensor, kind: Codes) -> torch.Tensor:
    """The numbers, fp32, of ``codes``, whole blocks one behind the other, and of the ``exponents`` of these."""
    numbers, *_ = _tables(kind, codes.device)
    places = codes.to(torch.int32)
    if kind.signed:
        places += len(numbers) // 2
    blocks = numbers.index_select(0, places).view(-1, MOMENT_BLOCK)
    return blocks.mul_(_power(exponents.to(torch.int32))).view(-1)


def packed(values: torch.Tensor, uniform: torch.Tensor, kind: Codes) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes, and exponents of blocks, of ``values``: fp32, and whole blocks one behind the other.

    Away from 0 where the numbers ``uniform``, at least 0 and below 1, are below the way that a value has made from the
    one neighbour to the other. Values are finite, and beyond 2^126 they become that. What codes stand for stays what it
    is, if by other codes where the largest of a block became half of a power of two.
    """
    numbers, ways, below = _tables(kind, values.device)
    from_zero = numbers[-len(ways) - 1 :]
    blocks = values.abs().view(-1, MOMENT_BLOCK)
    # The power of two that is as large as the largest, or the next one.
    shared = blocks.amax(1).view(torch.int32).add_(2**23 - 1).bitwise_right_shift_(23)
    shared = torch.where(shared > 0, shared.clamp(_LEAST, _MOST), 0)
    parts = blocks.mul_(_power(2 * 127 - shared.clamp_min(1))).clamp_(max=1.0).view(-1)
    places = below.index_select(0, parts.view(torch.int32) >> _TOLD)
    way = parts.sub_(from_zero.index_select(0, places)).div_(ways.index_select(0, places))
    upwards = uniform < way
    if not kind.signed:
        upwards |= (places == 0) & (way > 0)
    places += upwards
    codes = places.mul_(values.sign().to(torch.int32)) if kind.signed else places
    return codes.to(kind.dtype), shared.to(torch.uint8)


def _power(exponents: torch.Tensor) -> torch.Tensor:
    """2 to the ``exponents``, int32 and as fp32 has them, in a column; 0 where they are 0."""
    return exponents.bitwise_left_shift(23).view(torch.float32)[:, None]
