"""AdamW whose moments, weights, or both are bf16, or moments 8 bits: less memory, and no change is lost to rounding.

A step is made in fp32, slice by slice, by torch's own kernel. Only what is kept is rounded. Weights stochastically: at
a learning rate of 1e-5 a step changes most by less than half of what bf16 numbers of their size are apart, and rounded
to the nearest they would stay where they are. Of the moments the first, of which a step changes a tenth, to the nearest
number; the second stochastically. With the usual beta of 0.999 a step changes it by at most 0.1% downwards, and bf16
numbers are 0.4 to 0.8% apart: rounded to the nearest it would never decay, and the learning rate of a parameter be that
of its largest gradient ever. So is the first where its beta is as near to 1: a weight that has no gradient any more
would be moved on by those of before for ever. What 8 bits tell apart is coarser: there both are rounded
stochastically.
"""

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim.adamw import adamw

from sft_api.memory import MOMENT_BLOCK

from .eight_bits import FIRST, SECOND, Codes, packed, unpacked

_SLICE_ELEMENTS = {"cpu": 2**16}
"""Of a parameter that are updated at once, whole blocks: their moments exist in fp32 meanwhile. A processor's cache
holds these."""
_MOST_ELEMENTS = 2**22
"""The same of any other device."""
_EXPONENTS = "_exponents"
"""What the name of a moment in 8 bits ends with where its blocks' exponents are meant."""
_FAST_BETA = 0.98
"""Up to here a step changes a moment by several times what rounding to the nearest number may take away."""
_LOW_BITS = 0xFFFF
"""Of an fp32 number, those that bf16 does not have."""


class RoundedAdamW(torch.optim.Optimizer):
    """``torch.optim.AdamW`` for parameters in fp32 or bf16, with moments in either, or in 8 bits.

    Random bits are a function of a parameter's name, the element's place in it and the count of updates: the same on
    every process that holds the element, on any number of them, and after a resume.
    """

    found_inf: torch.Tensor | None = None
    """As of torch's fused optimizers: where this scalar is 1, a step changes nothing."""

    def __init__(
        self,
        groups: Iterable[Mapping[str, Any]],
        names: Mapping[torch.Tensor, str],
        held: Callable[[torch.Tensor], tuple[torch.Tensor, int]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        state_dtype: torch.dtype = torch.bfloat16,
        in_blocks: Collection[torch.Tensor] = (),
    ) -> None:
        """``held`` gives what this process has of a tensor, and which of all elements, by rows, is the first of it.

        ``state_dtype`` is that of the moments, but of parameters ``in_blocks``, whose rows are whole blocks: theirs
        have 8 bits.
        """
        super().__init__([dict(group) for group in groups], {"lr": lr, "betas": betas, "eps": eps})
        self._held, self._state_dtype, self._in_blocks = held, state_dtype, {*in_blocks}
        self._places = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                digest = hashlib.sha256(names[parameter].encode()).digest()
                self._places[parameter] = (int.from_bytes(digest[:4], "big", signed=True), held(parameter)[1])
                step = torch.zeros((), device=parameter.device)
                self.state[parameter] = {"step": step, **self.moments_of(parameter, group)}

    def moments_of(self, parameter: torch.Tensor, group: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Those of ``parameter``, a member of ``group``, before its first update, by name."""
        found: dict[str, torch.Tensor] = {}
        for kind, codes in _KINDS.items():
            found |= zeros(kind, parameter, codes if parameter in self._in_blocks else self._state_dtype)
        return found

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient; ``closure`` is not called."""
        for group in self.param_groups:
            self.update_all([each for each in group["params"] if each.grad is not None], group)

    def update_all(self, parameters: Sequence[torch.Tensor], group: Mapping[str, Any]) -> None:
        """Update ``parameters`` of ``group``, which have gradients."""
        for parameter in parameters:
            self._update(parameter, group)

    def _update(self, parameter: torch.Tensor, group: Mapping[str, Any]) -> None:
        state = self.state[parameter]
        step = state["step"]
        key, first = self._key(parameter)
        held = {kind: self._flat(value) for kind, value in state.items() if kind != "step"}
        weights, slopes = self._flat(parameter), self._flat(gradient_of(parameter))
        for part in slices(weights):
            # What is in fp32 is not copied, but changed where it is.
            weight, slope = weights[part].float(), slopes[part].float()
            first_moment, second_moment = (_read(held, kind, part) for kind in _KINDS)
            adamw(
                [weight],
                [slope],
                [first_moment],
                [second_moment],
                [],
                # It counts a step for each slice.
                [step.clone()],
                fused=True,
                found_inf=self.found_inf,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
            # Each by bits of its own: else all would be rounded up, or down, together.
            if weights.dtype == torch.bfloat16:
                self._keep_weights(weights, part, weight, key, first)
            slow = group["betas"][0] > _FAST_BETA
            self._keep(held, "exp_avg", part, first_moment, key.bitwise_xor(_OF_FIRST), first, stochastically=slow)
            self._keep(held, "exp_avg_sq", part, second_moment, key, first, stochastically=True)
        self._count(step)

    def _flat(self, tensor: torch.Tensor) -> torch.Tensor:
        """What this process has of ``tensor``, one row behind the other."""
        return self._held(tensor)[0].view(-1)

    def _key(self, parameter: torch.Tensor) -> tuple[torch.Tensor, int]:
        """What random bits of the update that comes are made of, and which element of the whole is the first here."""
        name, first = self._places[parameter]
        return (self.state[parameter]["step"].to(torch.int32) + 1).mul_(_ODD[0]).add_(name), first

    def _count(self, step: torch.Tensor) -> None:
        step += 1 if self.found_inf is None else 1 - self.found_inf

    def _unless_skipped(self, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """``new``, or ``old`` where this step changes nothing."""
        return new if self.found_inf is None else torch.where(self.found_inf > 0, old, new)

    def _keep_weights(
        self, weights: torch.Tensor, part: slice, values: torch.Tensor, key: torch.Tensor, first: int
    ) -> None:
        """Round ``values``, fp32, which ``part`` of the ``weights`` has become, to what these are held in."""
        if weights.dtype == torch.bfloat16:
            round_stochastically_(values, key.bitwise_xor(_OF_WEIGHTS), first + part.start)
        weights[part].copy_(values)

    def _keep(
        self,
        held: Mapping[str, torch.Tensor],
        kind: str,
        part: slice,
        values: torch.Tensor,
        key: torch.Tensor,
        first: int,
        *,
        stochastically: bool,
    ) -> None:
        """Round ``values``, which ``part`` of the moment ``kind`` has become, to what it is held in: of bf16 to the
        nearest unless ``stochastically``."""
        target, place = held[kind][part], first + part.start
        if (exponents := held.get(f"{kind}{_EXPONENTS}")) is not None:
            new = packed(values, _uniform(values, key, place), _KINDS[kind])
            for old, made in zip((target, exponents[_blocks(part)]), new, strict=True):
                # The same values may have other codes.
                old.copy_(self._unless_skipped(old, made))
        elif target.dtype == torch.bfloat16:
            target.copy_(round_stochastically_(values, key, place) if stochastically else values)


_KINDS: Mapping[str, Codes] = {"exp_avg": FIRST, "exp_avg_sq": SECOND}
"""The moments, and how they are held in 8 bits."""


def gradient_of(parameter: torch.Tensor) -> torch.Tensor:
    """Of a parameter that has one."""
    assert parameter.grad is not None  # noqa: S101 - the caller looked
    return parameter.grad


def zeros(kind: str, parameter: torch.Tensor, held: torch.dtype | Codes) -> dict[str, torch.Tensor]:
    """The moment ``kind`` of ``parameter``, shared out as that is: so are the exponents, of which each row has some."""
    if isinstance(held, torch.dtype):
        return {kind: torch.zeros_like(parameter, dtype=held)}
    one_of_each = parameter.detach()[..., ::MOMENT_BLOCK]
    exponents = torch.zeros_like(one_of_each, dtype=torch.uint8, memory_format=torch.contiguous_format)
    return {kind: torch.zeros_like(parameter, dtype=held.dtype), f"{kind}{_EXPONENTS}": exponents}


def slices(values: torch.Tensor) -> Iterator[slice]:
    """What of ``values``, of one dimension, is updated at once."""
    at_once = _SLICE_ELEMENTS.get(values.device.type, _MOST_ELEMENTS)
    return (slice(start, start + at_once) for start in range(0, values.numel(), at_once))


def _read(held: Mapping[str, torch.Tensor], kind: str, part: slice) -> torch.Tensor:
    """``part`` of the moment ``kind``, fp32; where it is held so, no copy."""
    if (exponents := held.get(f"{kind}{_EXPONENTS}")) is None:
        return held[kind][part].float()
    return unpacked(held[kind][part], exponents[_blocks(part)], _KINDS[kind])


def _blocks(part: slice) -> slice:
    return slice(part.start // MOMENT_BLOCK, part.stop // MOMENT_BLOCK)


_ODD = (-1640531535, -2048144789, -1028477387, 747796405)
"""Numbers by which bits are mixed, as Knuth and MurmurHash3 do: 32 bits, with a sign because torch's have one."""
_OF_WEIGHTS, _OF_FIRST = 0x5BD1E995, 0x1B873593
"""What of a key is another bit where weights, and first moments, are rounded. Not all of them: of a number with all
bits turned the same bits are made."""


def round_stochastically_(values: torch.Tensor, key: torch.Tensor, first: int) -> torch.Tensor:
    """Round ``values`` (fp32, one dimension) in place to numbers of bf16, up or down.

    Each as probable as it is near, so that the mean is right. What bf16 holds stays as it is. The same ``key``, an
    int32 scalar, and place, counted from ``first``, give the same random bits.
    """
    values.view(torch.int32).add_(_random_bits(values, key, first).bitwise_and_(_LOW_BITS)).bitwise_and_(~_LOW_BITS)
    return values


def _uniform(values: torch.Tensor, key: torch.Tensor, first: int) -> torch.Tensor:
    """A random number for each of ``values``, at least 0 and below 1, of 24 bits."""
    return _random_bits(values, key, first).bitwise_and_(2**24 - 1).float().mul_(2.0**-24)


def _random_bits(values: torch.Tensor, key: torch.Tensor, first: int) -> torch.Tensor:
    """For each of ``values`` 31, but for the sign of an int32, by its place, counted from ``first``, and ``key``."""
    bits = torch.arange(values.numel(), dtype=torch.int32, device=values.device)
    bits.add_((first + 2**31) % 2**32 - 2**31).mul_(_ODD[3]).bitwise_xor_(key)
    for shift, odd in ((16, _ODD[1]), (13, _ODD[2])):
        bits.bitwise_xor_(bits >> shift).mul_(odd)
    return bits.bitwise_xor_(bits >> 16)
