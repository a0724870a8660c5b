"""``make parity-megatron``: is the strategy on Megatron-Core right? Prints its figures, exits non-zero when it is not.

max_rel_error     worst relative error of loss, logits, gradients, their norm and an evaluation, over packed documents,
                  against transformers with each document alone; at most 1e-5
cases             models over shapes of processes that are compared
steps_rel_error   worst relative difference of loss and norm of 20 steps from those of FSDP; at most 1e-4
reshard_mismatch  tensors that change on the way of a checkpoint: TP2, PP2, FSDP, no split but of the optimizer, TP2
resume_mismatch   figures and tensors of runs that go on from a checkpoint that differ from those not disturbed
"""

import sys
import tempfile
from pathlib import Path

from tests.integration.checkpoint import ranks
from tests.megatron.cases import OF_FOUR, OF_TWO, compared, save_models, trained, worst

LIMIT = 1e-5
STEPS_LIMIT = 1e-4
_SECONDS = 1800
"""That processes are waited for."""


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="sft-parity-megatron-") as scratch:
        work = Path(scratch)
        save_models(work / "models")
        errors: dict[str, float] = {}
        for processes, cases in ((2, OF_TWO), (4, OF_FOUR)):
            for name, figures in ranks.run(processes, work, compared, work / "models", cases, seconds=_SECONDS)[
                0
            ].items():
                print(f"{name}-on{processes} " + " ".join(f"{key}={value:.1e}" for key, value in figures.items()))
                errors |= {f"{name}-on{processes}": max(figures.values())}
        found = ranks.run(2, work, trained, work / "models", work, seconds=_SECONDS)[0]
    steps = worst(found["curves"])
    print(" ".join(f"steps_{name}={value:.1e}" for name, value in steps.items()))
    figures = {
        "max_rel_error": max(errors.values()),
        "cases": len(errors),
        "steps_rel_error": max(steps.values()),
        "reshard_mismatch": found["reshard_mismatch"],
        "resume_mismatch": found["resume_mismatch"],
    }
    print(
        " ".join(
            f"{key}={value:.1e}" if isinstance(value, float) else f"{key}={value}" for key, value in figures.items()
        )
    )
    right = figures["max_rel_error"] <= LIMIT and figures["steps_rel_error"] <= STEPS_LIMIT
    return 0 if right and not figures["reshard_mismatch"] and not figures["resume_mismatch"] else 1


if __name__ == "__main__":
    sys.exit(main())
