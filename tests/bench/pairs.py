"""Tokens a second of this tree's trainer beside those of another tree (a worktree of an earlier commit), at once.

    python -m tests.bench.pairs OTHER_TREE [REPEATS]

Each trains the run of ``tests/bench/throughput.py`` in its own environment (``make setup`` there first), on one thread
and one processor; the two change places from run to run, so that whatever slows the machine slows both alike.
Prints the median of the pairs' ratios, this tree by the other: ``packed_ratio_before``, ``unpacked_ratio_before``, and
the smaller one as ``ratio_before``.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.fixtures_inputs import make_inputs

_RUN = """
import json, sys
from pathlib import Path
from tests.bench.throughput import WARM_UP_STEPS, ours
from tests.parity.runs import step_records
inputs, work = map(Path, sys.argv[1:3])
ours(inputs, work, sys.argv[3])
records = list(step_records(work / "store").values())[WARM_UP_STEPS - 1:]
print(json.dumps(sum(each["tokens"] for each in records[1:]) / (records[-1]["time"] - records[0]["time"])))
"""
"""From the end of the warm-up to the last step: also what is done between steps."""


def begin(tree: Path, processor: int, inputs: Path, work: Path, packing: str) -> subprocess.Popen[str]:
    """One run with the code and the environment of ``tree``, on one processor."""
    return subprocess.Popen(
        ["taskset", "-c", str(processor), tree / ".venv" / "bin" / "python", "-c", _RUN, inputs, work, packing],
        cwd=tree,
        stdout=subprocess.PIPE,
        text=True,
    )


def rate_of(run: subprocess.Popen[str]) -> float:
    """Tokens a second, when it has ended."""
    told, _ = run.communicate()
    if run.returncode != 0:
        raise RuntimeError(f"{run.args!r} ended with {run.returncode}")
    rate: float = json.loads(told.splitlines()[-1])
    return rate


def main() -> None:
    here, other = Path(__file__).resolve().parents[2], Path(sys.argv[1]).resolve()
    repeats = int(sys.argv[2]) if len(sys.argv) > 2 else 6
    medians = {}
    with tempfile.TemporaryDirectory(prefix="sft-bench-") as scratch:
        work = Path(scratch)
        make_inputs(work / "inputs", size="small")
        for packing, name in (("ffd", "packed"), ("none", "unpacked")):
            ratios = []
            for repeat in range(repeats):
                places = (0, 1) if repeat % 2 == 0 else (1, 0)
                runs = [
                    begin(tree, place, work / "inputs", work / f"{name}-{repeat}-{place}", packing)
                    for tree, place in zip((here, other), places, strict=True)
                ]
                ours, theirs = [rate_of(run) for run in runs]
                ratios.append(ours / theirs)
                print(f"# {name}: {ours:.0f} and {theirs:.0f} tokens a second", flush=True)
            medians[name] = statistics.median(ratios)
            print(f"{name}_ratio_before={medians[name]:.3f}", flush=True)
    print(f"ratio_before={min(medians.values()):.3f}")


if __name__ == "__main__":
    main()
