"""Compiled layers beside those that are not: time of steps.

    python -m tests.bench.compiled [KIND] [TURNS]

A small model of type KIND (``qwen3_moe``) in fp32 on one thread of a CPU, twice in one process; steps of bins whose
numbers of tokens and documents differ, forward and backward, take turns: plain, compiled, compiled, plain. Printed is
the median ratio of turns (``compiled_ratio``: time of the plain ones by that of the compiled ones, of the thread on its
processor), what is between its quartiles, and the relative difference of their losses.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from sft_trainer.models.causal_lm import build_on_meta
from sft_trainer.models.weights import load_weights
from sft_trainer.strategies.fsdp import FsdpStrategy
from sft_trainer.topology import ALONE
from sft_trainer.trainable import EVERYTHING
from tests.bins import random_bin
from tests.parity.runs import manifest, resolve
from tests.unit.trainer.test_models import save_model

WIDTHS = {"hidden_size": 128, "intermediate_size": 384, "moe_intermediate_size": 128, "head_dim": 32}
SHAPE = {**WIDTHS, "num_hidden_layers": 4, "vocab_size": 2048, "num_experts": 8, "num_local_experts": 8}
BINS = [(400, 300, 250), (128,) * 6, (700, 90, 90, 60), (64,) * 13]
"""Lengths of the documents of each."""


def built(path: Path, *, compiled: bool) -> FsdpStrategy:
    job = manifest(path, path.with_name("store"), model={"uri": f"file://{path}"}, training={"compile": compiled})
    made = FsdpStrategy(resolve(job), build_on_meta(path), EVERYTHING, ALONE, torch.device("cpu"))
    load_weights(made.boxes("trained"), made.model.names, path)
    made.loaded()
    return made


def main() -> None:
    kind, turns = (*sys.argv[1:], *("qwen3_moe", "12")[len(sys.argv) - 1 :])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory(prefix="sft-bench-") as scratch:
        save_model(kind, Path(scratch) / "model", **SHAPE)
        plain, compiled = (built(Path(scratch) / "model", compiled=how) for how in (False, True))
    bins = [random_bin(seed, *lengths, vocabulary=2048) for seed, lengths in enumerate(BINS)]

    def step(of: FsdpStrategy) -> tuple[float, float]:
        begin = time.thread_time()
        loss = float(of.forward_backward(bins, 4000))
        took = time.thread_time() - begin
        of.optimizer.zero_grad()
        return took, loss

    losses = [step(one)[1] for one in (plain, compiled)]
    ratios = []
    for _ in range(int(turns)):
        (one, _), (two, _), (three, _), (four, _) = map(step, (plain, compiled, compiled, plain))
        ratios.append((one + four) / (two + three))
    lower, middle, upper = statistics.quantiles(ratios, n=4)
    print(f"compiled_ratio={middle:.3f} lower={lower:.3f} upper={upper:.3f} loss={abs(losses[1] / losses[0] - 1):.2g}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
