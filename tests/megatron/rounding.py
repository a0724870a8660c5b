"""In bf16: does a job whose tokens or layers are spread differ from the same job without that by rounding alone?

What rounding does is not guessed, but measured on the job itself: how far it is in bf16 from itself in fp32.

``gradient``  of the first step, all of them as one vector: its distance by its length
``curve``     of losses and norms of all steps, the largest relative difference
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from tests.megatron import shim
from tests.megatron.cases import Case, built, everything, step

BF16_OF_TWO = (
    Case("qwen3", context=2, precision="bf16"),
    Case("qwen3_tied", context=2, precision="bf16"),
    Case("qwen3_moe", context=2, expert=2, precision="bf16"),
    Case("qwen3", pipeline=2, precision="bf16"),
    Case("qwen3_tied", pipeline=2, precision="bf16"),
    Case("qwen3_moe", pipeline=2, precision="bf16"),
    Case("qwen3", pipeline=2, chunks=2, precision="bf16"),
    Case("qwen3_tied", pipeline=2, chunks=2, precision="bf16"),
)
BF16_OF_FOUR = (
    Case("qwen3_tied", context=2, pipeline=2, precision="bf16"),
    Case("qwen3_tied", context=2, pipeline=2, chunks=2, precision="bf16"),
)
EXACT = {case.name for case in BF16_OF_TWO if case.context == 1 and not case.model.endswith("_tied")}
"""Each process rounds what one alone would: copies of an embedding, and parts of the tokens, are added otherwise."""


class _Trained(NamedTuple):
    """Losses and norms of steps, in turn, and the gradients of the first step as one vector."""

    figures: list[float]
    gradients: torch.Tensor


def rounded(models: Path, cases: Sequence[Case], steps: int) -> dict[str, dict[str, float]]:
    """Of each of ``cases`` how far it is from the same job without context and stages, a collective call.

    ``gradient`` and ``curve`` are divided by how far that one is from itself in fp32; ``first``, the larger of both of
    the first step, by nothing.
    """
    shim.install()
    known: dict[str, _Trained] = {}

    def trained(case: Case) -> _Trained:
        if case.name not in known:
            known[case.name] = _train(models, case, steps)
        return known[case.name]

    found = {}
    for case in cases:
        without = replace(case, context=1, pipeline=1, chunks=1)
        spread, plain, exact = trained(case), trained(without), trained(replace(without, precision="fp32"))
        found[case.name] = {
            "gradient": _distance(spread, plain) / _distance(plain, exact),
            "curve": _apart(spread.figures, plain.figures) / _apart(plain.figures, exact.figures),
            "first": max(_apart(spread.figures[:2], plain.figures[:2]), _distance(spread, plain)),
        }
    return found


def _train(models: Path, case: Case, steps: int) -> _Trained:
    strategy, topology = built(models, case)
    figures = [*step(strategy, topology, 0)]
    # After its first step AdamW's means are the gradients, but for a factor.
    means = {name: values for (name, kind), values in everything(strategy).items() if kind == "exp_avg"}
    for number in range(1, steps):
        figures += step(strategy, topology, number)
    return _Trained(figures, torch.cat([means[name].flatten().double() for name in sorted(means)]))


def _apart(these: Sequence[float], those: Sequence[float]) -> float:
    return max(abs(a / b - 1) for a, b in zip(these, those, strict=True))


def _distance(these: _Trained, those: _Trained) -> float:
    return float((these.gradients - those.gradients).norm() / those.gradients.norm())
