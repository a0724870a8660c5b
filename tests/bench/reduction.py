"""Gradients summed over processes once a step beside after each micro-batch: time of steps.

    python -m tests.bench.reduction [PROCESSES] [MICRO_BATCHES] [TURNS]

A model of 7 M parameters sharded over so many processes of one machine (gloo), short micro-batches; each process has
a strategy of either kind, whose steps take turns: once, each, each, once. Printed is the median ratio of the turns,
once by each, of the time from a step's first forward pass to its gradients (``time_ratio``, of the first process).
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from sft_trainer.models.causal_lm import build_on_meta
from sft_trainer.models.weights import load_weights
from sft_trainer.strategies.fsdp import FsdpStrategy
from sft_trainer.trainable import EVERYTHING
from tests.bins import random_bin
from tests.integration.checkpoint import ranks
from tests.parity.runs import manifest, resolve
from tests.topologies import here
from tests.unit.trainer.test_models import save_model

_LONGEST = 1800.0
SHAPE = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6, "vocab_size": 1024}


def steps_here(path: Path, micro_batches: int, turns: int) -> list[float]:
    """Ratios of time of this process's turns."""
    built = {}
    for often in ("oncePerStep", "everyMicroBatch"):
        job = manifest(
            path,
            path.with_name("store"),
            model={"uri": f"file://{path}"},
            strategy={"fsdp": {"reduceGradients": often}},
        )
        built[often] = FsdpStrategy(resolve(job), build_on_meta(path), EVERYTHING, here(), torch.device("cpu"))
        load_weights(built[often].boxes("trained"), built[often].model.names, path)
    rank = here().data_rank
    bins = [random_bin(rank * micro_batches + number, 32, vocabulary=1024) for number in range(micro_batches)]

    def seconds(often: str) -> float:
        begin = time.perf_counter()
        built[often].forward_backward(bins, 1000)
        took = time.perf_counter() - begin
        built[often].optimizer.zero_grad()
        return took

    for often in built:
        seconds(often)
    ratios = []
    for _ in range(turns):
        once, each, again, last = map(seconds, (*built, *reversed(built)))
        ratios.append((once + last) / (each + again))
    return ratios


def main() -> None:
    processes, micro_batches, turns = (int(given) for given in (*sys.argv[1:], *("2", "8", "6")[len(sys.argv) - 1 :]))
    with tempfile.TemporaryDirectory(prefix="sft-bench-") as scratch:
        save_model("llama", Path(scratch) / "model", **SHAPE)
        model = Path(scratch) / "model"
        times, *_ = ranks.run(processes, Path(scratch), steps_here, model, micro_batches, turns, seconds=_LONGEST)
    quarter = statistics.quantiles(times, n=4)
    print(f"time_ratio={quarter[1]:.3f} lower={quarter[0]:.3f} upper={quarter[2]:.3f}")


if __name__ == "__main__":
    main()
