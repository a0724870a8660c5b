"""AdamW whose moments, weights, or both are bf16: half their memory, and no change of them is lost to rounding.

A step is made in fp32, slice by slice, by torch's own kernel. Only what is kept is rounded. Weights stochastically: at
a learning rate of 1e-5 a step changes most by less than half of what bf16 numbers of their size are apart, and rounded
to the nearest they would stay where they are. Of the moments the first, of which a step changes a tenth, to the nearest
number; the second stochastically. With the usual beta of 0.999 a step changes it by at most 0.1% downwards, and bf16
numbers are 0.4 to 0.8% apart: rounded to the nearest it would never decay, and the learning rate of a parameter be that
of its largest gradient ever. So is the first where its beta is as near to 1: a weight that has no gradient any more
would be moved on by those of before for ever.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.optim.adamw import adamw

_SLICE_ELEMENTS = 2**22
"""Of a parameter that are updated at once: their moments exist in fp32 meanwhile."""
_FAST_BETA = 0.98
"""Up to here a step changes a moment by several times what rounding to the nearest number may take away."""
_LOW_BITS = 0xFFFF
"""Of an fp32 number, those that bf16 does not have."""


class RoundedAdamW(torch.optim.Optimizer):
    """``torch.optim.AdamW`` for parameters in fp32 or bf16, with moments in either.

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
    ) -> None:
        """``held`` gives what this process has of a tensor, and which of all elements, by rows, is the first of it.

        ``state_dtype`` is that of the moments.
        """
        super().__init__([dict(group) for group in groups], {"lr": lr, "betas": betas, "eps": eps})
        self._held = held
        self._places = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                digest = hashlib.sha256(names[parameter].encode()).digest()
                self._places[parameter] = (int.from_bytes(digest[:4], "big", signed=True), held(parameter)[1])
                self.state[parameter] = {
                    "step": torch.zeros((), device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter, dtype=state_dtype),
                    "exp_avg_sq": torch.zeros_like(parameter, dtype=state_dtype),
                }

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient; ``closure`` is not called."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: torch.Tensor, group: Mapping[str, Any]) -> None:
        gradient = parameter.grad
        assert gradient is not None  # noqa: S101 - the caller looked
        state = self.state[parameter]
        step = state["step"]
        name, first = self._places[parameter]
        key = (step.to(torch.int32) + 1).mul_(_ODD[0]).add_(name)
        values = [self._held(each)[0].view(-1) for each in (parameter, gradient, state["exp_avg"], state["exp_avg_sq"])]
        for start in range(0, values[0].numel(), _SLICE_ELEMENTS):
            parts = [value[start : start + _SLICE_ELEMENTS] for value in values]
            # What is in fp32 is not copied, but changed where it is.
            weight, slope, first_moment, second_moment = (part.float() for part in parts)
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
            if parts[0].dtype == torch.bfloat16:
                parts[0].copy_(round_stochastically_(weight, key.bitwise_xor(_OF_WEIGHTS), first + start))
            if parts[2].dtype == torch.bfloat16:
                if group["betas"][0] > _FAST_BETA:
                    round_stochastically_(first_moment, key.bitwise_not(), first + start)
                parts[2].copy_(first_moment)
                parts[3].copy_(round_stochastically_(second_moment, key, first + start))
        step += 1 if self.found_inf is None else 1 - self.found_inf


_ODD = (-1640531535, -2048144789, -1028477387, 747796405)
"""Numbers by which bits are mixed, as Knuth and MurmurHash3 do: 32 bits, with a sign because torch's have one."""
_OF_WEIGHTS = 0x5BD1E995
"""What of a key is another bit where weights are rounded."""


def round_stochastically_(values: torch.Tensor, key: torch.Tensor, first: int) -> torch.Tensor:
    """Round ``values`` (fp32, one dimension) in place to numbers of bf16, up or down.

    Each as probable as it is near, so that the mean is right. What bf16 holds stays as it is. The same ``key``, an
    int32 scalar, and place, counted from ``first``, give the same random bits.
    """
    bits = torch.arange(values.numel(), dtype=torch.int32, device=values.device)
    bits.add_((first + 2**31) % 2**32 - 2**31).mul_(_ODD[3]).bitwise_xor_(key)
    for shift, odd in ((16, _ODD[1]), (13, _ODD[2])):
        bits.bitwise_xor_(bits >> shift).mul_(odd)
    bits.bitwise_xor_(bits >> 16).bitwise_and_(_LOW_BITS)
    values.view(torch.int32).add_(bits).bitwise_and_(~_LOW_BITS)
    return values
