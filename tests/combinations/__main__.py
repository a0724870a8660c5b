"""``make combinations``: features of a run in combinations that nobody chose.

Draws manifests from the fields that change numbers or flow, so that every two values of two features meet that can, on
small models of many families, and runs each as ``sft run`` does: from its beginning to its end; killed or stopped after
a step, and begun again; begun by another number of processes; gone on with by another run, from a checkpoint, or from
its export. Prints seed, number and manifest of each in which something does not hold, and as its last line

cases        manifests that were tried
bad          of these how many broke what must hold
refused      of these how many were refused before the first step, in words about the manifest
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import yaml

from . import inputs
from .features import Draws
from .trial import Trial


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.combinations", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1_000_000))
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--first", type=int, default=0, help="number of the first manifest that is tried")
    parser.add_argument("--cases", type=int, default=sys.maxsize, help="how many are tried at the most")
    options = parser.parse_args()
    # As Ctrl-C: no worker is left behind, which would wait for a store that is gone.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    print(f"seed={options.seed}", flush=True)
    end = time.monotonic() + 60 * options.minutes
    asked = Counter[str]()
    bad = cases = refused = 0
    with tempfile.TemporaryDirectory(prefix="sft-combinations-") as scratch:
        work = Path(scratch)
        made = inputs.make(work / "inputs")
        draws = Draws(made, options.seed)
        for number, drawn in enumerate(draws):
            if number < options.first:
                continue
            if cases == options.cases or time.monotonic() > end:
                break
            began = time.monotonic()
            folder = work / f"case-{number}"
            inputs.make_adapters(made, drawn.job, folder / "adapters")
            outcome = Trial(drawn.job, drawn.values, folder, work / "cache", seed=number).run()
            cases += 1
            asked += outcome.asked
            verdict = "refused" if outcome.refused else "trained"
            if outcome.breaches:
                bad += 1
                verdict = "BAD"
                print(yaml.safe_dump(drawn.job, sort_keys=False))
                for breach in outcome.breaches:
                    print(f"  {breach}")
            elif outcome.refused:
                refused += 1
            print(f"{number} {verdict} {time.monotonic() - began:.0f} s {outcome.refused[:300]}", flush=True)
            shutil.rmtree(folder)
    print(
        f"pairs={draws.met} " + " ".join(f"{name.replace(' ', '_')}={count}" for name, count in sorted(asked.items()))
    )
    print(f"cases={cases} bad={bad} refused={refused}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
