"""Options in combinations that nobody chose: fixed seeds draw them, a plain loop says what the numbers must be."""

import random
from pathlib import Path
from typing import Any

import pytest

from tests.errors import worst
from tests.parity import checks
from tests.parity.__main__ import LIMIT
from tests.parity.mixtures import KINDS, make_mixture


def _strategy(draw: random.Random, processes: int) -> dict[str, Any]:
    """The section ``strategy.fsdp``."""
    strategy: dict[str, Any] = {"reduceGradients": draw.choice(["auto", "everyMicroBatch", "oncePerStep"])}
    if processes > 1:
        strategy["sequenceParallelDegree"] = draw.choice([1, 2])
        strategy["shardDegree"] = draw.choice([strategy["sequenceParallelDegree"], 2])
    if strategy["reduceGradients"] != "oncePerStep":
        strategy["cpuOffload"] = draw.random() < 0.4
    return strategy | draw.choice([{}, {"reshardAfterForward": True}, {"reshardAfterForward": False}])


def _training(draw: random.Random) -> dict[str, Any]:
    """Of the section ``training`` what goes with every model and packing."""
    optimizer = {
        "learningRate": 1e-3,
        # As in ``checks``: moments of rounding shall move nothing.
        "eps": 1e-4,
        "betas": [draw.choice([0.0, 0.9]), draw.choice([0.95, 0.999])],
        "weightDecay": draw.choice([0, 0.01, 0.5]),
        "maxGradNorm": draw.choice([0, 0.05, 1.0]),
    }
    schedules = [
        {"type": "constant"},
        {"type": "linear", "warmupSteps": 1},
        {"type": "cosine", "minRatio": 0.1},
        {"type": "warmupStableDecay", "decayRatio": 0.5},
    ]
    return {
        "optimizer": optimizer,
        "schedule": draw.choice(schedules),
        "activationCheckpointing": draw.choice(["none", "selective", "full"]),
        "seed": draw.randrange(1000),
    }


# One packed, one not.
@pytest.mark.parametrize("seed", [4, 9])
def test_what_is_drawn_equals_a_plain_loop(seed: int, tiny_inputs: Any, tmp_path: Path) -> None:
    draw = random.Random(seed)
    kind, processes, packing = draw.choice(["", *KINDS]), draw.choice([1, 2]), draw.choice(["ffd", "none"])
    inputs = tiny_inputs.model.parent
    if kind:
        inputs = make_mixture(inputs, tmp_path / "inputs", kind)
    chosen = _training(draw)
    if kind and draw.random() < 0.5:
        chosen["routerAuxLossCoefficient"] = draw.choice([0.01, 0.3])
    if packing == "ffd":
        chosen["maxTokensPerMicroBatch"] = draw.choice([512, 1027])

    figures = checks.against_reference(
        inputs,
        tmp_path / "run",
        packing=packing,
        processes=processes,
        steps=2,
        strategy=_strategy(draw, processes),
        **chosen,
    )

    assert worst(figures.values()) <= LIMIT, (kind, processes, packing, chosen, figures)
