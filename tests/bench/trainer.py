"""Our trainer beside TRL's and beside a bare loop, step by step in turn, on one thread: ratios of tokens a second.

    python -m tests.bench.trainer PYTHON_WITH_TRL [--steps 13] [--sizes 128x4 256x6]

All train the same Qwen3 in fp32 on the same conversations with AdamW at a constant rate, 32 of them a step in the same
order (rows that TRL packs hold as many on average). Runs that are compared live at the same time, each in a process of
its own, and take turns: a step of each, then a step of each the other way round (A, B, B, A), so that whatever slows
the machine, for seconds or for minutes, slows all alike. Time is that of the process on the processor, in its turns
from the fourth on: what is compiled, and what else the machine does, does not count. Of every such pair of steps the
ratio (of three pairs for ``overhead``); printed is the lower quartile (of ``overhead`` the upper one), the worse of the
sizes. ``ratio_compiled`` is of steps in one process (``compiled``): two differ by as much from their start on. Our runs
and TRL's are without gradient checkpointing, except ``default``, which is each as it comes (TRL's: with it, padded;
ours: packed, without it).
``--steps 5 --sizes 128x4`` is the short form: about five minutes of processor time.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from sft_trainer.data.packing import first_fit_decreasing
from tests.errors import worst
from tests.parity.runs import manifest, resolve, worker_environment

from .bench_inputs import CONVERSATIONS, SIZES, example_lengths, make_bench_inputs
from .taking_turns import MARK

WARM_UP_STEPS = 3
_LORA = {"lora": {"rank": 16, "alpha": 32}}
OURS: dict[str, dict[str, Any]] = {
    "packed": {"data": {"packing": "ffd"}, "training": {"maxTokensPerMicroBatch": 2048}},
    "unpacked": {"data": {"packing": "none"}, "training": {"microBatchSize": 8}},
    "compiled": {"data": {"packing": "ffd"}, "training": {"maxTokensPerMicroBatch": 2048, "compile": True}},
    "default": {},
    "lora": {"data": {"packing": "none"}, "training": {"microBatchSize": 8}, **_LORA},
}
TRL_MODES = ("trl packed", "trl padded", "trl single", "trl flattened", "trl wrapped")
TOGETHER = (
    ("packed", "compiled"),
    ("packed", "unpacked", *TRL_MODES),
    ("default", "trl default"),
    ("lora", "trl lora"),
)
"""Runs that take turns: no more at once than fit into the memory of a small machine."""
BESIDE: dict[str, tuple[Sequence[str], Sequence[str]]] = {
    "ratio_packed": (["packed"], ["trl packed"]),
    "ratio_unpacked": (["unpacked"], ["trl padded"]),
    "ratio_best": (["packed", "unpacked"], TRL_MODES),
    "ratio_default": (["default"], ["trl default"]),
    "ratio_lora": (["lora"], ["trl lora"]),
}
"""Tokens a second of the fastest of the first by those of the fastest of the second."""
OVERHEAD_TIMES = 3
"""How many times as many steps runs for ``overhead`` make, and each of its ratios is of: it is about a few percent, and
the machine itself makes as many of two steps."""
OTHER_STEPS = ("trl packed", "trl wrapped")
"""Runs whose steps have about as many tokens as those of the others: which ones, is for TRL to choose."""
COMPILED_TURNS = 9
"""Of which ``ratio_compiled`` is the lower quartile."""
ADAPTERS = ("lora", "trl lora")
"""Runs whose losses are those of the others until adapters differ from nothing, that is in the first step."""


@dataclass
class Run:
    """What a process told of its steps."""

    ready: float
    """Seconds on the processor until its first step could begin."""
    tokens: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def rates(self, steps: int = 2) -> list[float]:
        """Tokens a second on the processor of every so many ``steps``, the first ones left out."""
        firsts = range(WARM_UP_STEPS, len(self.tokens) - steps + 1, steps)
        return [sum(self.tokens[at : at + steps]) / sum(self.seconds[at : at + steps]) for at in firsts]


class Process:
    """A run that takes its turns."""

    def __init__(self, name: str, command: Sequence[str], environment: dict[str, str], log: Path) -> None:
        self.name, self._log = name, log
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log.open("w"), text=True, env=environment
        )
        try:
            self.run = Run(self._told()["ready"])
        except BaseException:
            self.stop()
            raise
        print(f"# {name}: ready after {self.run.ready:.0f} s", flush=True)

    def step(self) -> None:
        """The next one."""
        self._go_on()
        told = self._told()
        self.run.tokens.append(int(told["tokens"]))
        self.run.losses.append(told["loss"])
        self.run.seconds.append(told["seconds"])

    def end(self) -> None:
        """After its last step; raises RuntimeError when it fails then."""
        self._go_on()
        assert self._process.stdout is not None
        self._process.stdout.read()
        if self._process.wait() != 0:
            raise self._failure()

    def stop(self) -> None:
        """Whatever it does."""
        self._process.kill()
        self._process.wait()

    def _go_on(self) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure() from None

    def _told(self) -> dict[str, float]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                told: dict[str, float] = json.loads(line.removeprefix(MARK))
                return told
        raise self._failure()

    def _failure(self) -> RuntimeError:
        return RuntimeError(f"{self.name} ended with {self._process.wait()}: {self._log.read_text()[-3000:]}")


class Bench:
    """Runs of one size of model."""

    def __init__(self, python: str, work: Path, size: str, steps: int) -> None:
        self._python, self._work, self._steps, self._count = python, work / f"{size}-{steps}", steps, 0
        make_bench_inputs(self._work / "inputs", size, rows=CONVERSATIONS * steps)

    def runs(self, names: Sequence[str]) -> dict[str, Run]:
        """Those of these names, step by step in turn."""
        with ExitStack() as stack:
            processes = [stack.enter_context(self._process(name)) for name in names]
            for number in range(self._steps):
                for process in processes if number % 2 == 0 else reversed(processes):
                    process.step()
            for process in processes:
                process.end()
        return {process.name: process.run for process in processes}

    @contextmanager
    def _process(self, name: str) -> Iterator[Process]:
        self._count += 1
        command, environment = self._theirs(name[4:]) if name.startswith("trl ") else self._ours(name)
        process = Process(name, command, environment, self._work / f"log-{self._count}")
        try:
            yield process
        finally:
            process.stop()

    def _ours(self, name: str) -> tuple[list[str], dict[str, str]]:
        folder = self._work / f"run-{self._count}"
        sections = OURS["packed" if name == "bare" else name]
        training = {
            "steps": self._steps,
            "globalBatchSize": CONVERSATIONS,
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


def compiled_ratios(size: str) -> dict[str, float]:
    """Lower quartile and median of ``compiled``, in a process of its own."""
    command = [sys.executable, "-m", "tests.bench.compiled", size, str(COMPILED_TURNS)]
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1]
    return {name: float(value) for name, _, value in (each.partition("=") for each in said.split())}


def check_alike(size: str, expected: Run, runs: dict[str, Run]) -> None:
    """Raise where ``runs`` did not train the same tokens as ``expected``, or had other losses.

    Those of which TRL chooses the steps are compared by the means of all.
    """
    for name, run in runs.items():
        if name in OTHER_STEPS:
            share = statistics.mean(run.tokens) / statistics.mean(expected.tokens)
            if abs(share - 1) > 0.05:
                raise AssertionError(f"{size}, {name}: steps of {share:.2f} of the tokens of the others")
            mean, expected_mean = statistics.mean(run.losses), statistics.mean(expected.losses)
            if abs(mean / expected_mean - 1) > 0.05:
                raise AssertionError(f"{size}, {name}: losses of {mean:.3f} on average, not {expected_mean:.3f}")
            continue
        if run.tokens != expected.tokens:
            raise AssertionError(f"{size}, {name}: steps of {run.tokens}, not {expected.tokens} tokens")
        losses = list(zip(run.losses, expected.losses, strict=True))[: 1 if name in ADAPTERS else None]
        if worst(abs(one / other - 1) for one, other in losses) > 2e-3:
            raise AssertionError(f"{size}, {name}: losses {run.losses}, not {expected.losses}")


def ratios(runs: dict[str, Run], one: Sequence[str], other: Sequence[str], steps: int = 2) -> list[float]:
    """Of every so many ``steps``: the rate of the fastest of ``one`` by that of the fastest of ``other``."""
    fastest = [
        [max(rates) for rates in zip(*(runs[name].rates(steps) for name in names), strict=True)]
        for names in (one, other)
    ]
    return [a / b for a, b in zip(*fastest, strict=True)]


def overhead(python: str, work: Path, size: str, steps: int) -> list[float]:
    """Time of our steps by that of a bare loop."""
    runs = Bench(python, work, size, WARM_UP_STEPS + OVERHEAD_TIMES * (steps - WARM_UP_STEPS)).runs(("packed", "bare"))
    check_alike(size, runs["packed"], runs)
    return ratios(runs, ["bare"], ["packed"], 2 * OVERHEAD_TIMES)


def quartile(of_steps: list[float], which: float = 0.25) -> float:
    """The lower one, or another."""
    return float(np.quantile(of_steps, which))


def packer_fill() -> float:
    """How full bins of 2048 tokens are, of a window of 4096 examples."""
    window = np.random.default_rng(0).choice(example_lengths(), 4096)
    return float(window.sum() / (2048 * len(first_fit_decreasing(window, 2048))))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.trainer")
    parser.add_argument("python", help="with TRL and peft installed")
    parser.add_argument("--steps", type=int, default=13, help="of each run, three to warm up included")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    options = parser.parse_args()
    if options.steps < WARM_UP_STEPS + 2:
        parser.error(f"--steps {options.steps}: {WARM_UP_STEPS} to warm up and two that count are the fewest")
    figures: dict[str, list[float]] = {}
    print("# gradient checkpointing: none, but in TRL's default", flush=True)
    with tempfile.TemporaryDirectory(prefix="sft-bench-") as scratch:
        for size in options.sizes:
            over = overhead(options.python, Path(scratch), size, options.steps)
            figures.setdefault("overhead", []).append(quartile(over, 0.75))
            print(f"{size}_overhead={quartile(over, 0.75):.3f}  # median {quartile(over, 0.5):.3f}", flush=True)
            bench = Bench(options.python, Path(scratch), size, options.steps)
            expected: Run | None = None
            for names in TOGETHER:
                runs = bench.runs(names)
                expected = expected or runs["packed"]
                check_alike(size, expected, runs)
                for figure, (one, other) in BESIDE.items():
                    if {*one, *other} <= {*runs}:
                        of_steps = ratios(runs, one, other)
                        figures.setdefault(figure, []).append(quartile(of_steps))
                        print(f"{size}_{figure}={quartile(of_steps):.3f}  # median {quartile(of_steps, 0.5):.3f}")
                for name, run in runs.items():
                    key = f"{size}_{name.replace(' ', '_')}"
                    print(f"{key}_tokens_per_second={statistics.median(run.rates()):.0f}")
                    print(f"{key}_last_loss={run.losses[-1]:.4f}", flush=True)
                if "compiled" in runs:
                    print(f"{size}_compile_seconds={runs['compiled'].ready - runs['packed'].ready:.1f}")
            in_one = compiled_ratios(size)
            figures.setdefault("ratio_compiled", []).append(in_one["lower"])
            print(f"{size}_ratio_compiled={in_one['lower']:.3f}  # median {in_one['compiled_ratio']:.3f}", flush=True)
    for figure, of_sizes in figures.items():
        # Of an overhead the larger one counts.
        print(f"{figure}={max(of_sizes) if figure == 'overhead' else min(of_sizes):.3f}")
    print(f"packer_fill={packer_fill():.4f}")


if __name__ == "__main__":
    main()
