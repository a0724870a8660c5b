"""Our trainer beside TRL's and beside a bare loop, in turn, on one thread: ratios of tokens a second.

    python -m tests.bench.trainer PYTHON_WITH_TRL [--rounds 2] [--steps 8] [--sizes 128x4 256x6]

Both train the same Qwen3 in fp32 on the same conversations with AdamW at a constant rate, 32 of them a step in the same
order (rows that TRL packs hold as many on average). Time is that of the process on the processor, from the end of the
third step on: what is compiled, and what else the machine does, does not count. Of every pair of runs, A/B/B/A, the
ratio; printed is the lower quartile (of ``overhead`` the upper one), the worse of the sizes. Our runs and TRL's are
without gradient checkpointing, except ``default``, which is each as it comes (TRL's: with it, padded; ours: packed,
without it). ``--rounds 1 --steps 5 --sizes 128x4`` is the short form, of ten minutes at most.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from sft_trainer.data.packing import first_fit_decreasing
from tests.parity.runs import manifest, resolve, worker_environment

from .bench_inputs import LENGTHS, SIZES, make_bench_inputs

EXAMPLES, WARM_UP_STEPS = 32, 3
Run = dict[str, Any]
_LORA = {"lora": {"rank": 16, "alpha": 32}}
OURS: dict[str, dict[str, Any]] = {
    "packed": {"data": {"packing": "ffd"}, "training": {"maxTokensPerMicroBatch": 2048}},
    "unpacked": {"data": {"packing": "none"}, "training": {"microBatchSize": 8}},
    "compiled": {"data": {"packing": "ffd"}, "training": {"maxTokensPerMicroBatch": 2048, "compile": True}},
    "default": {},
    "lora": {"data": {"packing": "none"}, "training": {"microBatchSize": 8}, **_LORA},
}
PAIRS = {
    "ratio_packed": ("packed", "trl packed"),
    "ratio_unpacked": ("unpacked", "trl padded"),
    "ratio_default": ("default", "trl default"),
    "ratio_compiled": ("compiled", "packed"),
    "ratio_lora": ("lora", "trl lora"),
    "overhead": ("bare", "packed"),
}
"""Tokens a second of the first by those of the second."""
TRL_MODES = ("trl packed", "trl padded", "trl single", "trl flattened")
SAME_STEPS = (
    "packed",
    "unpacked",
    "compiled",
    "default",
    "bare",
    "trl padded",
    "trl single",
    "trl flattened",
    "trl default",
)
"""Runs whose steps have the same tokens, and whose losses must be equal."""


class Bench:
    """Runs of one size of model."""

    def __init__(self, python: str, work: Path, size: str, steps: int) -> None:
        self._python, self._work, self._steps, self._count = python, work / size, steps, 0
        make_bench_inputs(self._work / "inputs", size, rows=EXAMPLES * steps)

    def run(self, name: str) -> Run:
        """One run by its name."""
        command, environment = self._theirs(name[4:]) if name.startswith("trl ") else self._ours(name)
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{name} ended with {done.returncode}: {done.stderr[-3000:]}")
        run: Run = json.loads(done.stdout.splitlines()[-1])
        print(f"# {name}: {rate(run):.0f} tokens a second, ready after {run['ready']:.0f} s", flush=True)
        return run

    def _ours(self, name: str) -> tuple[list[str], dict[str, str]]:
        self._count += 1
        folder = self._work / f"run-{self._count}"
        sections = OURS["packed" if name == "bare" else name]
        training = {
            "steps": self._steps,
            "globalBatchSize": EXAMPLES,
            "optimizer": {"learningRate": 1e-3, "weightDecay": 0},
            "schedule": {"type": "constant"},
            **sections.get("training", {}),
        }
        data = {"trainOn": "allAssistantMessages", "sampler": "sequential", **sections.get("data", {})}
        others = {key: value for key, value in sections.items() if key not in ("training", "data")}
        job = manifest(
            self._work / "inputs", folder / "store", training=training, data=data, export={"atEnd": False}, **others
        )
        environment = worker_environment(resolve(job), folder)
        # As on the second start of a run: what was compiled is there.
        environment["SFT_CACHE_DIR"] = str(self._work / "cache")
        environment |= {"RANK": "0", "LOCAL_RANK": "0"}
        return [sys.executable, "-m", "tests.bench.own_run", "bare" if name == "bare" else "trainer"], environment

    def _theirs(self, mode: str) -> tuple[list[str], dict[str, str]]:
        inputs = self._work / "inputs"
        script = str(Path(__file__).with_name("trl_run.py"))
        command = [self._python, "-P", script, str(inputs / "model"), str(inputs / "data" / "train.jsonl"), mode]
        environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HOME": os.environ.get("HOME", "/tmp")}
        return [*command, str(self._steps)], {**environment, "PATH": os.environ["PATH"]}


def rate(run: Run) -> float:
    """Tokens a second on the processor, the first steps left out."""
    tokens: float = sum(run["tokens"][WARM_UP_STEPS:])
    return tokens / sum(run["seconds"][WARM_UP_STEPS:])


def check_alike(size: str, runs: dict[str, list[Run]]) -> None:
    """Raise where runs that are compared did not train the same tokens, or had other losses."""
    expected = runs["packed"][0]
    for name, of_name in runs.items():
        for run in of_name:
            if name in SAME_STEPS:
                if run["tokens"] != expected["tokens"]:
                    raise AssertionError(f"{size}, {name}: steps of {run['tokens']}, not {expected['tokens']} tokens")
                worst = max(abs(a / b - 1) for a, b in zip(run["losses"], expected["losses"], strict=True))
                if worst > 2e-3:
                    raise AssertionError(f"{size}, {name}: losses {run['losses']}, not {expected['losses']}")
            else:
                share = statistics.mean(run["tokens"]) / statistics.mean(expected["tokens"])
                if abs(share - 1) > 0.05:
                    raise AssertionError(f"{size}, {name}: steps of {share:.2f} of the tokens of the others")


def in_turn(names: tuple[str, ...], rounds: int) -> Iterable[str]:
    """All names, forwards and backwards in turn."""
    for number in range(rounds):
        yield from names if number % 2 == 0 else names[::-1]


def quartile(ratios: list[float], which: float = 0.25) -> float:
    """The lower one, or another."""
    return float(np.quantile(ratios, which))


def packer_fill() -> float:
    """How full bins of 2048 tokens are, of a window of 4096 examples."""
    lengths = np.array([sum(each) for each in json.loads(LENGTHS.read_text())])
    window = np.random.default_rng(0).choice(lengths, 4096)
    return float(window.sum() / (2048 * len(first_fit_decreasing(window, 2048))))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.trainer")
    parser.add_argument("python", help="with TRL and peft installed")
    parser.add_argument("--rounds", type=int, default=2, help="every second one backwards")
    parser.add_argument("--steps", type=int, default=8, help="of each run, three to warm up included")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    options = parser.parse_args()
    names = tuple(dict.fromkeys([*(name for pair in PAIRS.values() for name in pair), *TRL_MODES]))
    figures: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="sft-bench-") as scratch:
        for size in options.sizes:
            bench = Bench(options.python, Path(scratch), size, options.steps)
            runs: dict[str, list[Run]] = {name: [] for name in names}
            for name in in_turn(names, options.rounds):
                runs[name].append(bench.run(name))
            check_alike(size, runs)
            for figure, (one, other) in PAIRS.items():
                ratios = [rate(a) / rate(b) for a, b in zip(runs[one], runs[other], strict=True)]
                figures.setdefault(figure, []).append(quartile(ratios, 0.75 if figure == "overhead" else 0.25))
            best = [
                max(rate(a) for a in ours) / max(rate(b) for b in theirs)
                for ours, theirs in zip(
                    zip(*(runs[name] for name in ("packed", "unpacked")), strict=True),
                    zip(*(runs[name] for name in TRL_MODES), strict=True),
                    strict=True,
                )
            ]
            figures.setdefault("ratio_best", []).append(quartile(best))
            for name, of_name in runs.items():
                print(f"{size}_{name.replace(' ', '_')}_tokens_per_second={statistics.median(map(rate, of_name)):.0f}")
            first = runs["compiled"][0]["ready"] - runs["packed"][0]["ready"]
            print(f"{size}_compile_seconds={first:.1f}")
            for name in ("packed", "trl padded"):
                print(f"{size}_{name.replace(' ', '_')}_last_loss={runs[name][0]['losses'][-1]:.4f}")
    for figure, of_sizes in figures.items():
        # Of an overhead the larger one counts.
        print(f"{figure}={max(of_sizes) if figure == 'overhead' else min(of_sizes):.2f}")
    print(f"packer_fill={packer_fill():.4f}")


if __name__ == "__main__":
    main()
