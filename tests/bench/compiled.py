"""Compiled layers beside those that are not: time of steps.

    python -m tests.bench.compiled [MODEL] [TURNS]

A small model in fp32 on one thread of a CPU, twice in one process: of a type (``qwen3_moe``) with bins that are made
up, or of a size of the trainer's benchmark (``256x6``) with bins of its conversations. Numbers of tokens and of
documents differ from bin to bin. Whole steps take turns: three plain, three compiled, three compiled, three plain. The
ratio is of such a turn, so of six steps of each: what slows the machine for a while slows both, and what two
processes differ by from their start on (2 to 13%, as much as compiling brings) is in neither. Printed are the quartiles
of ``compiled_ratio``: time of the plain steps by that of the compiled ones, of the thread on its processor. Losses are
compared.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from itertools import cycle
from pathlib import Path

import torch
import torch.distributed as dist

from sft_trainer.data.packing import first_fit_decreasing
from sft_trainer.models.causal_lm import build_on_meta
from sft_trainer.models.weights import load_weights
from sft_trainer.strategies.fsdp import FsdpStrategy
from sft_trainer.topology import ALONE
from sft_trainer.trainable import EVERYTHING
from tests.bench.bench_inputs import CONVERSATIONS, SIZES, WORDS, example_lengths, make_bench_inputs
from tests.bins import random_bin
from tests.errors import worst
from tests.parity.runs import manifest, resolve
from tests.unit.trainer.test_models import save_model

WIDTHS = {"hidden_size": 128, "intermediate_size": 384, "moe_intermediate_size": 128, "head_dim": 32}
SHAPE = {**WIDTHS, "num_hidden_layers": 4, "vocab_size": WORDS, "num_experts": 8, "num_local_experts": 8}
MADE_UP = [[(400, 300, 250), (128,) * 6], [(700, 90, 90, 60), (64,) * 13]]
"""Lengths of the documents of each bin of a step."""
BIN = 2048
"""Tokens, at most."""
STEPS = 3
"""In turn."""
LOSS_LIMIT = 1e-5
"""Relative."""


def packed() -> list[list[tuple[int, ...]]]:
    """The same of the conversations of the trainer's benchmark."""
    lengths = example_lengths()
    steps = lengths[: len(lengths) // CONVERSATIONS * CONVERSATIONS].reshape(-1, CONVERSATIONS)
    return [[tuple(step[bin_].tolist()) for bin_ in first_fit_decreasing(step, BIN)] for step in steps]


def built(path: Path, *, compiled: bool) -> FsdpStrategy:
    job = manifest(path, path.with_name("store"), model={"uri": f"file://{path}"}, training={"compile": compiled})
    made = FsdpStrategy(resolve(job), build_on_meta(path), EVERYTHING, ALONE, torch.device("cpu"))
    load_weights(made.boxes("trained"), made.model.names, path)
    made.loaded()
    return made


def step(of: FsdpStrategy, documents: list[tuple[int, ...]]) -> tuple[float, float]:
    """Seconds of the thread, and loss, of one whole step."""
    bins = [random_bin(seed, *lengths, vocabulary=WORDS) for seed, lengths in enumerate(documents)]
    begin = time.thread_time()
    loss = float(of.forward_backward(bins, sum(map(sum, documents))))
    norm = of.grad_norm()
    of.apply(1e-5, 1.0, norm, torch.isfinite(norm))
    return time.thread_time() - begin, loss


def turn(both: Mapping[str, FsdpStrategy], steps: Iterator[list[tuple[int, ...]]]) -> float:
    """The ratio of the next one; raises AssertionError where the losses of one are not those of the other."""
    seconds = dict.fromkeys(both, 0.0)
    for order in (("plain", "compiled"), ("compiled", "plain")):
        some = [next(steps) for _ in range(STEPS)]
        losses = []
        for name in order:
            for took, loss in [step(both[name], documents) for documents in some]:
                seconds[name] += took
                losses.append(loss)
        if worst(abs(one / other - 1) for one, other in zip(losses[:STEPS], losses[STEPS:], strict=True)) > LOSS_LIMIT:
            raise AssertionError(f"losses of the same steps, {order[0]} and then {order[1]}: {losses}")
    return seconds["plain"] / seconds["compiled"]


def main() -> None:
    model, count = (*sys.argv[1:], *("qwen3_moe", "5")[len(sys.argv) - 1 :])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory(prefix="sft-bench-") as scratch:
        path = Path(scratch) / "model"
        if model in SIZES:
            make_bench_inputs(path.parent, model, rows=1)
        else:
            save_model(model, path, **SHAPE)
        both = {name: built(path, compiled=name == "compiled") for name in ("plain", "compiled")}
    steps = cycle(packed() if model in SIZES else MADE_UP)
    turn(both, steps)  # compiles
    lower, middle, upper = statistics.quantiles([turn(both, steps) for _ in range(int(count))], n=4)
    print(f"compiled_ratio={middle:.3f} lower={lower:.3f} upper={upper:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
