"""In bf16: does a job whose tokens or layers are spread differ from the same job without that by rounding alone?

What rounding does is not guessed, but measured on the job itself: how far it is in bf16 from itself in fp32.

``gradient``  of the first step, all of them as one vector: its distance by its length
``curve``     of losses and norms of all steps, the root of the mean square of their relative differences. From those in
              fp32: two jobs that round otherwise go apart with every step, and where a router chooses, by leaps
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from tests.errors import worst
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

    ``gradient`` by how far that one is from itself in fp32; ``curve`` how far both are from it, the former by the
    latter; ``first``, the larger of the distances of the first step's figures and gradients, by nothing.
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
            "curve": _apart(spread, exact) / _apart(plain, exact),
            "first": worst([*_differences(spread, plain)[:2], _distance(spread, plain)]),
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


def _apart(these: _Trained, those: _Trained) -> float:
    differences = _differences(these, those)
    return math.sqrt(sum(each**2 for each in differences) / len(differences))


def _differences(these: _Trained, those: _Trained) -> list[float]:
    return [abs(a / b - 1) for a, b in zip(these.figures, those.figures, strict=True)]


def _distance(these: _Trained, those: _Trained) -> float:
    return float((these.gradients - those.gradients).norm() / those.gradients.norm())
