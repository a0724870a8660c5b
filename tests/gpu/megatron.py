"""The strategy on Megatron-Core beside FSDP2, one process: the numbers of steps, and memory beside its estimate.

Where Megatron-Core is not installed these checks say ``skipped=no_megatron_core``.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from sft_api.megatron import is_installed
from sft_trainer.boxes import Box
from sft_trainer.models.causal_lm import build_on_meta
from sft_trainer.models.weights import load_weights
from sft_trainer.strategies import Strategy
from sft_trainer.trainable import EVERYTHING
from tests.errors import worst
from tests.parity.runs import manifest, resolve

from . import estimate
from .figures import Figure
from .isolated import Skipped
from .kernels import error_of, require
from .steps import _alone, _bins

_LIMITS = {"fp32": (1e-4, 1e-3, 1e-3), "bf16": (1e-2, 5e-2, 5e-2)}
"""How far losses, norms of gradients, and the gradients themselves may be apart, relative."""


def _require_megatron() -> None:
    if not is_installed():
        raise Skipped("no_megatron_core")


def beside_fsdp(inputs: Path, device: torch.device) -> dict[str, Figure]:
    """Three steps of the small model by either strategy, one of which is not to be made: losses, norms, gradients.

    In bf16 both update weights in fp32.
    """
    _require_megatron()
    figures: dict[str, Figure] = {}
    with _alone(device):
        for precision, limits in _LIMITS.items():
            (losses, norms, gradients), (others, other_norms, expected) = (
                _steps(_built(inputs, device, precision, kind), device) for kind in ("megatron", "fsdp")
            )
            found = (
                worst(abs(a / b - 1) for a, b in zip(losses, others, strict=True)),
                worst(abs(a / b - 1) for a, b in zip(norms, other_norms, strict=True)),
                error_of(gradients, expected),
            )
            for name, error, limit in zip(("loss", "norm", "gradient"), found, limits, strict=True):
                require(f"Megatron beside FSDP in {precision}: error of the {name}", error, limit)
                figures[f"megatron_{precision}_{name}_error"] = error
    return figures


def estimates(inputs: Path, device: torch.device) -> dict[str, Figure]:
    """As ``estimate.estimates``, of the strategy on Megatron-Core."""
    _require_megatron()
    cases: dict[str, dict[str, Any]] = {
        f"megatron_{how}": {"training": {"activationCheckpointing": how}, "strategy": {"megatron": {}}}
        for how in ("none", "selective", "full")
    }
    return estimate.estimates(inputs, device, cases)


def _built(inputs: Path, device: torch.device, precision: str, kind: str) -> Strategy:
    config = resolve(
        manifest(inputs, inputs.with_name("store"), training={"precision": precision}, strategy={kind: {}})
    )
    blueprint = build_on_meta(inputs / "model")
    names = blueprint.names
    strategy = estimate.built(config, blueprint, EVERYTHING, device)
    load_weights(strategy.boxes("trained"), names, inputs / "model")
    strategy.loaded()
    return strategy


def _steps(strategy: Strategy, device: torch.device) -> tuple[list[float], list[float], torch.Tensor]:
    """Losses and norms, and the mean of gradients that AdamW has then."""
    bins, trained = _bins()
    losses, norms = [], []
    for ok in (True, False, True):
        before = _vector(strategy.boxes("trained"))
        losses.append(float(strategy.forward_backward(bins, trained)))
        norm = strategy.grad_norm()
        norms.append(float(norm))
        strategy.apply(1e-4, 1.0, norm, torch.tensor(ok, device=device))
        if torch.equal(before, _vector(strategy.boxes("trained"))) == ok:
            raise AssertionError("a step changes weights where it is to be made, and only there")
    return losses, norms, _vector(box for box in strategy.boxes("optimizer") if box.kind == "exp_avg")


def _vector(boxes: Iterable[Box]) -> torch.Tensor:
    """A copy of all values, in the same order for every strategy: parts of a tensor are some of its rows."""
    ordered = sorted(boxes, key=lambda box: (box.name, box.place.offsets))
    return torch.cat([box.read().flatten() for box in ordered])
