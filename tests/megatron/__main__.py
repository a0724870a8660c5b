"""``make parity-megatron``: is the strategy on Megatron-Core right? Prints its figures, exits non-zero when it is not.

max_rel_error     worst relative error of loss, logits, gradients, their norm and an evaluation, over packed documents,
                  against transformers with each document alone; at most 1e-5. And weights that are not those of the
                  files to the last bit, of which there is to be none
cases             models over shapes of processes that are compared
drawn_rel_error   the same of models, shapes, documents and options that seeds give, and of steps, figures and weights,
                  of which others go on with the last (``drawn.py``); at most 1e-5
steps_rel_error   worst relative difference of loss and norm of 20 steps from those of FSDP; at most 1e-4
bf16_rel_error    the same of a run in bf16, from one in fp32; at most 5e-2
bf16_gradient     how far the first step's gradients of a run in bf16 over parts of the tokens and over stages are from
                  those of the same run without, beside how far these are from themselves in fp32 (``rounding.py``); at
                  most 1
bf16_curve        how far 20 steps of the former are from fp32, beside how far those of the latter are; at most 2
bf16_first        the first step's distance of the former, by its own length: at most one rounding to bf16, 2^-8
bf16_stages       the first step's distance where stages alone are added, and no embedding is on two of them: nothing is
                  rounded otherwise, and sums are made in fp32; at most 1e-5
reshard_mismatch  tensors that change on the way of a checkpoint: TP2, PP2, uneven and interleaved stages, FSDP, CP2,
                  both again, DP2, TP2 in bf16, TP2; and of a mixture of experts: CP2 with EP2, two copies, PP2, FSDP,
                  two copies, EP2, CP2 with EP2. And through one process: TP2, it alone, PP2; EP2, it alone, PP2
resume_mismatch   figures and tensors of runs that go on from a checkpoint that differ from those not disturbed
"""

import sys
import tempfile
from pathlib import Path

from tests.errors import worst
from tests.integration.checkpoint import ranks
from tests.megatron.alone import ALONE, resharded_through_one
from tests.megatron.cases import OF_FOUR, OF_THREE, OF_TWO, TRAINED, compared, trained
from tests.megatron.drawn import of_seeds
from tests.megatron.models import save_models
from tests.megatron.rounding import BF16_OF_FOUR, BF16_OF_TWO, EXACT, rounded

LIMIT = 1e-5
STEPS_LIMIT = 1e-4
BF16_LIMIT = 5e-2
GRADIENT_LIMIT = 1.0
CURVE_LIMIT = 2.0
FIRST_LIMIT = 2**-8
DRAWN = range(8)
"""Seeds, of two and of four processes."""
_SECONDS = 1800
"""That processes are waited for."""


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="sft-parity-megatron-") as scratch:
        work = Path(scratch)
        save_models(work / "models")
        errors: dict[str, float] = {}
        for processes, cases in ((2, OF_TWO), (3, OF_THREE), (4, OF_FOUR)):
            for name, figures in ranks.run(processes, work, compared, work / "models", cases, seconds=_SECONDS)[
                0
            ].items():
                print(f"{name}-on{processes} " + " ".join(f"{key}={value:.1e}" for key, value in figures.items()))
                errors |= {f"{name}-on{processes}": worst(figures.values())}
        of_chance: dict[str, float] = {}
        for processes in (2, 4):
            (work / f"drawn-{processes}").mkdir()
            for name, figures in ranks.run(
                processes, work, of_seeds, work / f"drawn-{processes}", DRAWN, seconds=_SECONDS
            )[0].items():
                print(f"drawn: {name} " + " ".join(f"{key}={value:.1e}" for key, value in figures.items()))
                of_chance |= {name: worst(figures.values())}
        in_bf16 = _in_bf16(work)
        found = ranks.run(2, work, trained, work / "models", work, seconds=_SECONDS)[0]
        found["reshard_mismatch"] += sum(resharded_through_one(work, shapes, _SECONDS) for shapes in ALONE)
    steps = found.pop("steps")
    print(" ".join(f"steps_{name}={value:.1e}" for name, value in steps.items()))
    rounded_steps = {case.name for case in TRAINED if case.precision == "bf16"}
    limits = {
        "max_rel_error": (worst(errors.values()), LIMIT),
        "drawn_rel_error": (worst(of_chance.values()), LIMIT),
        "steps_rel_error": (worst(value for name, value in steps.items() if name not in rounded_steps), STEPS_LIMIT),
        "bf16_rel_error": (worst(steps[name] for name in rounded_steps), BF16_LIMIT),
        "bf16_gradient": (worst(each["gradient"] for each in in_bf16.values()), GRADIENT_LIMIT),
        "bf16_curve": (worst(each["curve"] for each in in_bf16.values()), CURVE_LIMIT),
        "bf16_first": (worst(each["first"] for each in in_bf16.values()), FIRST_LIMIT),
        "bf16_stages": (worst(in_bf16[name]["first"] for name in in_bf16 if name in EXACT), LIMIT),
    }
    print(" ".join(f"{key}={value:.1e}" for key, (value, _) in limits.items()))
    print(f"cases={len(errors)} " + " ".join(f"{key}={count}" for key, count in found.items()))
    return 0 if all(value <= limit for value, limit in limits.values()) and not any(found.values()) else 1


def _in_bf16(work: Path) -> dict[str, dict[str, float]]:
    """By name of the case what is found of it, which is printed."""
    found: dict[str, dict[str, float]] = {}
    for processes, cases in ((2, BF16_OF_TWO), (4, BF16_OF_FOUR)):
        found |= ranks.run(processes, work, rounded, work / "models", cases, 20, seconds=_SECONDS)[0]
    for name, figures in found.items():
        print(f"{name} " + " ".join(f"{key}={value:.1e}" for key, value in figures.items()))
    return found


if __name__ == "__main__":
    sys.exit(main())
