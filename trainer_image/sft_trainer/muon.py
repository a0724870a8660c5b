"""Muon: an update of a matrix is its momentum with all singular values made about 1.

As ``torch.optim.Muon`` has it with ``adjust_lr_fn="match_rms_adamw"`` (Jordan et al. 2024; Liu et al. 2025, arXiv
2502.16982): Nesterov's momentum, five steps of Newton and Schulz with the same coefficients, decoupled weight decay,
and updates as large as those of AdamW, so that its learning rates fit. What is no matrix of a layer is AdamW's.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from .rounded_adamw import RoundedAdamW, gradient_of, slices, zeros

MOMENTUM = "momentum_buffer"
"""The kind of Muon's only moment, as torch calls it."""
_STEPS = 5
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the odd polynomial of degree 5 that brings singular values near 1: the steepest at 0, which leaves them between
0.7 and 1.2."""
_LEAST_NORM = 1e-7
"""Of what is divided by its norm: less is brought to 0."""
_AS_ADAMW = 0.2
"""Root of the mean square of an update of AdamW, times its learning rate."""
_STACKED_ELEMENTS = 2**26
"""Of the matrices of a stack that are orthogonalised at once."""

Ahead = Callable[[torch.Tensor], torch.Tensor]
"""What of a parameter's momentum, looking ahead, this process holds: new, and fp32."""
Orthogonalise = Callable[[Sequence[torch.Tensor], Ahead], Iterable[tuple[torch.Tensor, torch.Tensor]]]
"""Each of some parameters with what this process holds of its orthogonalised momentum; a collective call where
parameters are shared out."""


class Muon(RoundedAdamW):
    """Muon for those groups that have a ``momentum``, whose parameters are matrices or stacks of them: (…, rows,
    columns). For all others AdamW."""

    def __init__(
        self,
        groups: Iterable[Mapping[str, Any]],
        names: Mapping[torch.Tensor, str],
        held: Callable[[torch.Tensor], tuple[torch.Tensor, int]],
        orthogonalise: Orthogonalise,
        **options: Any,
    ) -> None:
        """``options`` are those of ``RoundedAdamW``."""
        super().__init__(groups, names, held, **options)
        self._orthogonalise = orthogonalise

    def moments_of(self, parameter: torch.Tensor, group: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        if "momentum" not in group:
            return super().moments_of(parameter, group)
        return zeros(MOMENTUM, parameter, self._state_dtype)

    def update_all(self, parameters: Sequence[torch.Tensor], group: Mapping[str, Any]) -> None:
        if "momentum" not in group:
            super().update_all(parameters, group)
            return
        for parameter in parameters:
            self._accumulate(parameter, group["momentum"])
        ahead = partial(self._look_ahead, momentum=group["momentum"])
        for parameter, direction in self._orthogonalise(parameters, ahead):
            self._move(parameter, direction.reshape(-1), group)

    def _accumulate(self, parameter: torch.Tensor, momentum: float) -> None:
        """Add the gradient of ``parameter`` to its momentum."""
        held = {MOMENTUM: self._flat(self.state[parameter][MOMENTUM])}
        slopes = self._flat(gradient_of(parameter))
        key, first = self._key(parameter)
        for part in slices(slopes):
            # What is in fp32 is not copied, but changed where it is; and what is skipped is averaged with itself.
            average = held[MOMENTUM][part].float()
            average.lerp_(self._unless_skipped(average, slopes[part].float()), 1 - momentum)
            self._keep(held, MOMENTUM, part, average, key, first, stochastically=True)

    def _look_ahead(self, parameter: torch.Tensor, momentum: float) -> torch.Tensor:
        """Nesterov's: the momentum with the gradient added once more."""
        slope, average = (
            self._held(each)[0].float() for each in (gradient_of(parameter), self.state[parameter][MOMENTUM])
        )
        return slope.lerp(average, momentum)

    def _move(self, parameter: torch.Tensor, direction: torch.Tensor, group: Mapping[str, Any]) -> None:
        """Update ``parameter`` by what this process holds of ``direction``, one row behind the other."""
        rate, (key, first), weights = group["lr"], self._key(parameter), self._flat(parameter)
        scale = _AS_ADAMW * math.sqrt(max(parameter.shape[-2:]))
        for part in slices(weights):
            weight = weights[part].float()
            moved = (weight * (1 - rate * group["weight_decay"])).add_(direction[part], alpha=-rate * scale)
            self._keep_weights(weights, part, self._unless_skipped(weight, moved), key, first)
        self._count(self.state[parameter]["step"])


def orthogonalise_all(
    parameters: Sequence[torch.Tensor], ahead: Ahead, dtype: torch.dtype = torch.float32
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """``Orthogonalise`` where this process holds all of them, computed in ``dtype``."""
    for parameter in parameters:
        yield parameter, orthogonalise_(ahead(parameter).to(dtype))


def orthogonalise_(matrices: torch.Tensor) -> torch.Tensor:
    """Bring all singular values of ``matrices``, (rows, columns) or (matrices, rows, columns), near 1, in place.

    U V^T of the singular value decomposition U S V^T, but for values between 0.7 and 1.2 in place of 1, and smaller
    ones of what was far below the norm. Computed in the dtype of ``matrices``.
    """
    at_once = max(1, _STACKED_ELEMENTS // max(1, math.prod(matrices.shape[-2:])))
    for some in [matrices] if matrices.ndim == 2 else matrices.split(at_once):
        if some.numel():
            some.copy_(_orthogonal(some))
    return matrices


def _orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    first, third, fifth = _COEFFICIENTS
    add_product: Callable[..., torch.Tensor] = torch.addmm if matrices.ndim == 2 else torch.baddbmm
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    # The product with itself is of the shorter side.
    values = matrices.mT if is_tall else matrices
    values = values / torch.linalg.vector_norm(values, dim=(-2, -1), keepdim=True).clamp(min=_LEAST_NORM)
    for _ in range(_STEPS):
        gram = values @ values.mT
        values = add_product(values, add_product(gram, gram, gram, beta=third, alpha=fifth), values, beta=first)
    return values.mT if is_tall else values
