"""The loss of the head beside those of kept libraries: time of the thread, memory, and how wrong the gradients are.

    python -m tests.bench.loss [--device cuda] [--turns 5]

Forward and backward pass of summed cross-entropy times a scale, from hidden states (positions, width) and the head
(vocabulary, width): ours (``sft_trainer/loss.py``), the same with its part that is compiled (``compiled``), on a GPU
also with products made apart from their sum (``apart``), as a CPU does it; torch's ``linear_cross_entropy`` whole
(``plain``), in its own chunks (``torch``) and in ours (``torch_as_ours``), and Liger's where it is installed and there
is a GPU. They take turns, forth and back. A line for each size: median time by ours, the most memory of tensors made,
in MB, and the relative distance of the worse of both gradients from what it is in fp64 (on a GPU in fp32).
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch.nn import functional

from sft_trainer.loss import PRODUCTS, linear_cross_entropy
from sft_trainer.models.compiling import compiled_slopes

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
SIZES = {"cpu": ((512, 256, 8192), (1024, 512, 32768)), "cuda": ((4096, 2048, 128256), (16384, 4096, 128256))}
"""Positions, width, vocabulary."""
SCALE = 1 / 3000
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}


def _of_torch(options: Any) -> Loss:
    def loss(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, scale: float) -> torch.Tensor:
        chosen = {} if options is None else {"options": options}
        return functional.linear_cross_entropy(hidden, weight, labels, reduction="sum", **chosen) * scale

    return loss


def _apart(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, scale: float) -> torch.Tensor:
    with patch("sft_trainer.loss._gives_fp32", lambda _: False):
        return linear_cross_entropy(hidden, weight, labels, scale)[0]


def candidates(device: str, vocabulary: int) -> dict[str, Loss]:
    """What is compared, by name; ours first."""
    fused = compiled_slopes()
    found: dict[str, Loss] = {
        "ours": lambda *given: linear_cross_entropy(*given)[0],
        "compiled": lambda *given: linear_cross_entropy(*given, fused=fused)[0],
    }
    if device == "cuda":
        found["apart"] = _apart
    if hasattr(functional, "linear_cross_entropy"):
        found |= {"plain": _of_torch(None), "torch": _of_torch(torch.nn.LinearCrossEntropyOptions())}
        as_ours = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=PRODUCTS.rows(vocabulary), chunking_method=None)
        found["torch_as_ours"] = _of_torch(as_ours)
    if device == "cuda" and importlib.util.find_spec("liger_kernel"):
        liger = importlib.import_module("liger_kernel.transformers.functional").liger_fused_linear_cross_entropy
        found["liger"] = lambda hidden, weight, labels, scale: liger(hidden, weight, labels, reduction="sum") * scale
    return found


class Case:
    """Tensors of one size, and what computing a loss of them takes and gives."""

    def __init__(self, device: str, dtype: torch.dtype, positions: int, width: int, vocabulary: int) -> None:
        made = torch.Generator(device).manual_seed(7)
        self.hidden = torch.randn(positions, width, generator=made, device=device).to(dtype).requires_grad_()
        weight = torch.randn(vocabulary, width, generator=made, device=device) / width**0.5
        self.weight = weight.to(dtype).requires_grad_()
        self.labels = torch.randint(vocabulary, (positions,), generator=made, device=device)
        self.device = device

    def gradients(self, loss: Loss) -> tuple[torch.Tensor, torch.Tensor]:
        self.hidden.grad = self.weight.grad = None
        loss(self.hidden, self.weight, self.labels, SCALE).backward()
        assert self.hidden.grad is not None
        assert self.weight.grad is not None
        return self.hidden.grad, self.weight.grad

    def right(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Gradients in fp64, by formula; on a GPU in fp32, a few positions at a time."""
        exact = torch.float64 if self.device == "cpu" else torch.float32
        hidden, weight = self.hidden.detach().to(exact), self.weight.detach().to(exact)
        of_hidden, of_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        for rows in torch.arange(hidden.shape[0], device=hidden.device).split(512):
            slope = torch.softmax(hidden[rows] @ weight.T, dim=-1)
            slope[torch.arange(len(rows), device=rows.device), self.labels[rows]] -= 1
            slope *= SCALE
            of_hidden[rows] = slope @ weight
            of_weight += slope.T @ hidden[rows]
        return of_hidden, of_weight

    def seconds(self, loss: Loss) -> float:
        """Of the thread; on a GPU of the device."""
        if self.device == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            self.gradients(loss)
            end.record()
            torch.cuda.synchronize()
            took: float = begin.elapsed_time(end) / 1000
            return took
        start = time.thread_time()
        self.gradients(loss)
        return time.thread_time() - start

    def megabytes(self, loss: Loss) -> float:
        """The most that is held beside what is there before."""
        self.hidden.grad = self.weight.grad = None
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            self.gradients(loss)
            return (torch.cuda.max_memory_allocated() - before) / 1e6
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as seen:
            self.gradients(loss)
        # What an operator allocates within itself is seen by the allocator only.
        changes = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
        held = itertools.accumulate(event.nbytes() for event in sorted(changes, key=lambda event: event.start_ns()))
        return float(max(held)) / 1e6


def measure(case: Case, losses: dict[str, Loss], turns: int) -> dict[str, tuple[float, float, float]]:
    """Of each loss: time by the first one's, megabytes, relative error of the worse gradient."""
    times: dict[str, list[float]] = {name: [] for name in losses}
    for turn in range(turns + 1):
        for name in (*losses, *reversed(losses)):
            took = case.seconds(losses[name])
            if turn:
                times[name].append(took)
    right = case.right()
    first = next(iter(losses))
    found = {}
    for name, loss in losses.items():
        errors = [
            ((one.to(other.dtype) - other).norm() / other.norm()).item()
            for one, other in zip(case.gradients(loss), right, strict=True)
        ]
        ratio = statistics.median(a / b for a, b in zip(times[name], times[first], strict=True))
        found[name] = ratio, case.megabytes(loss), max(errors)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for size in SIZES[options.device]:
        case = Case(options.device, DTYPES[options.device], *size)
        for name, figures in measure(case, candidates(options.device, size[2]), options.turns).items():
            ratio, megabytes, error = figures
            print(f"{size} {name}: time={ratio:.3f} megabytes={megabytes:.0f} error={error:.2g}")


if __name__ == "__main__":
    main()
