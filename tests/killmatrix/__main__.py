"""``make kill-matrix``: kills at every phase of a run, and all that an object store and its network can do wrong.

    python -m tests.killmatrix [--seed 1] [--list] [CASE ...]

The same small run of two processes is made once undisturbed. Then cases are done to others, several to one run after
each other: its workers stand still before every save, where each case is judged by itself (oracles.py) before the next
begins. ``--seed`` shuffles which cases share a run, and where connections are cut. The last lines:

cases           that were judged
bad             those of which something did not hold; each is printed with what differed and the folder of its run
flips_missed    single bytes of what lies in a store, changed one at a time, that nothing noticed
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

from .cases import CASES
from .flips import FLIPS, flips_missed
from .matrix import open_matrix
from .parts import PARTS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="these only; all when absent")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--flips", type=int, default=FLIPS)
    parser.add_argument("--list", action="store_true", help="print the names of all cases")
    options = parser.parse_args()
    if options.list:
        print("\n".join([*CASES, *PARTS]))
        return 0
    if unknown := set(options.cases) - {*CASES, *PARTS}:
        parser.error(f"unknown cases: {', '.join(sorted(unknown))}; --list names all")
    began = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="sft-kill-matrix-"))
    names = options.cases or [*CASES, *PARTS]
    with open_matrix(folder) as matrix:
        dice = random.Random(options.seed)
        results = matrix.play_parts([name for name in names if name in PARTS], dice)
        results += matrix.play([CASES[name] for name in names if name in CASES], dice)
        missed = flips_missed(matrix.undisturbed.oracles.folder, options.flips, random.Random(options.seed))
    bad = [result for result in results if result.breaches]
    for result in bad:
        print(f"bad: {result.name} in {result.folder}")
        for breach in result.breaches:
            print(f"  {breach}")
    for line in missed:
        print(f"missed: {line}")
    if not bad:
        shutil.rmtree(folder)
    print(f"seed={options.seed}")
    print(f"seconds={time.monotonic() - began:.0f}")
    print(f"cases={len(results)}")
    print(f"bad={len(bad)}")
    print(f"flips_missed={len(missed)}")
    return 1 if bad or missed else 0


if __name__ == "__main__":
    sys.exit(main())
