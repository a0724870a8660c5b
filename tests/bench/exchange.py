"""What processes that hold the same exchange in a step of ``strategy.megatron``, beside one call for each parameter.

    python -m tests.bench.exchange [PROCESSES] [TURNS] [MIB]

A Qwen3 of 9.7 M parameters on so many data-parallel processes of one machine (gloo). The sums of a step's gradients,
and the gathered weights after it: in buckets, each process receiving the rows that it updates, and as it was before,
whole gradients and then weights parameter by parameter. They take turns: buckets, each, each, buckets. Buckets are of
so many MiB: 128 as in a run, or fewer. Printed is the median ratio of turns
(``time_ratio``, wall clock of the first process), and of one step of either the collective calls, the bytes that a
process must at least send for them (``bytes``: those of a ring), and those that went over the loopback device for each
process (``sent``). Of a machine with other traffic the last mean nothing: run it where there is none,

    unshare --map-root-user --net sh -c 'ip link set lo up && GLOO_SOCKET_IFNAME=lo python -m tests.bench.exchange'
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.collectives import noted_calls
from tests.integration.checkpoint import ranks
from tests.megatron import shim

_LONGEST = 1800.0
_SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 8192,
    "tie_word_embeddings": True,
}


def save_model(folder: Path) -> None:
    """With random weights."""
    import transformers

    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(transformers.Qwen3Config(**_SHAPE)).save_pretrained(folder)


def _each_alone(held: Any, group: Any) -> None:
    """A step's exchange as it was: one call, and then another, for each parameter."""
    for each in held:
        dist.all_reduce(each.gradient, group=group)
        each.hand_over()
    for each in held:
        parameter = each.parameter.detach()
        rows = -(-parameter.shape[0] // group.size())
        part = parameter.new_zeros((rows, *parameter.shape[1:]))
        part[: each.rows.shape[0]] = each.rows.detach()
        whole = part.new_empty((rows * group.size(), *parameter.shape[1:]))
        dist.all_gather_into_tensor(whole, part, group=group)
        parameter.copy_(whole[: parameter.shape[0]])


def _in_buckets(strategy: Any, topology: Any) -> None:
    from sft_trainer.strategies.megatron import gradients

    gradients.add_up(strategy.held, topology, sequence_parallel=False, tied=True)
    gradients.publish(strategy.held)


def _sent() -> int:
    """Bytes that went over the loopback device."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[0])


def exchanges_here(models: Path, turns: int, mebibytes: int) -> tuple[list[float], dict[str, dict[str, int]]]:
    """Ratios of this process's turns, and by kind of exchange what one of it takes."""
    shim.install()
    from megatron.core import parallel_state

    from sft_trainer.strategies.megatron import buckets
    from tests.megatron.cases import Case, bins_of, built, counted, share

    buckets.BUCKET_BYTES = mebibytes * 2**20
    strategy, topology = built(models, Case("model"))
    bins = bins_of(0)
    strategy.forward_backward(share(bins, topology), counted(bins))
    group = parallel_state.get_data_parallel_group()
    kinds = {
        "buckets": lambda: _in_buckets(strategy, topology),
        "each": lambda: _each_alone(strategy.held, group),
    }
    taken: dict[str, dict[str, int]] = {}
    for name, kind in kinds.items():
        kind()
        dist.barrier()
        before = _sent()
        dist.barrier()
        with noted_calls() as calls:
            kind()
        dist.barrier()
        sent = (_sent() - before) // dist.get_world_size()
        taken[name] = {"calls": len(calls), "bytes": sum(call.sent for call in calls), "sent": sent}

    def seconds(name: str) -> float:
        dist.barrier()
        begin = time.perf_counter()
        kinds[name]()
        return time.perf_counter() - begin

    ratios = []
    for _ in range(turns):
        ours, each, again, last = map(seconds, (*kinds, *reversed(kinds)))
        ratios.append((ours + last) / (each + again))
    return ratios, taken


def main() -> None:
    processes, turns, mebibytes = map(int, (*sys.argv[1:], *("2", "8", "128")[len(sys.argv) - 1 :]))
    with tempfile.TemporaryDirectory(prefix="sft-bench-") as scratch:
        save_model(Path(scratch) / "models" / "model")
        models = Path(scratch) / "models"
        found = ranks.run(processes, Path(scratch), exchanges_here, models, turns, mebibytes, seconds=_LONGEST)
    times, taken = found[0]
    quarter = statistics.quantiles(times, n=4)
    print(f"time_ratio={quarter[1]:.3f} lower={quarter[0]:.3f} upper={quarter[2]:.3f}")
    for kind, figures in taken.items():
        print(" ".join(f"{kind}_{name}={value}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
