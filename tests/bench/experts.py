"""Adapters beside the experts of a layer, and what peft makes of the same: time of the thread, and memory.

    python -m tests.bench.experts [--turns 5] [--experts 64] [--rank 8]

Forward and backward pass of the experts of a Qwen3-MoE's layer with frozen weights, in fp32, by the same products of
matrices: ours (two products more, of tokens), peft's (``target_parameters``: what is added to whole weights), and
without adapters. They take turns, forth and back. A line for each: median time by ours, and the most memory of tensors
that are made, in MB.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from sft_api.v1alpha1 import LoraSpec
from sft_trainer.models.lora import add_adapters, is_adapter

TOKENS, WIDTH, INNER, CHOSEN = 1024, 256, 192, 8


def model(experts: int) -> Any:
    """One layer, with frozen weights."""
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=64,
        hidden_size=WIDTH,
        moe_intermediate_size=INNER,
        num_experts=experts,
        num_experts_per_tok=CHOSEN,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
    )
    torch.manual_seed(7)
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32, experts_implementation="grouped_mm")
    return made.requires_grad_(requires_grad=False).train()


class Case:
    """A layer's feed-forward part, and what a pass of it takes."""

    def __init__(self, huggingface: Any) -> None:
        self.layer = huggingface.model.layers[0].mlp
        self.trained = [parameter for parameter in self.layer.parameters() if parameter.requires_grad]
        self.hidden = torch.randn(1, TOKENS, WIDTH, generator=torch.Generator().manual_seed(3)).requires_grad_()

    def step(self) -> None:
        """Forward and backward."""
        for each in (self.hidden, *self.trained):
            each.grad = None
        self.layer(self.hidden).square().sum().backward()

    def seconds(self) -> float:
        """Of the thread."""
        start = time.thread_time()
        self.step()
        return time.thread_time() - start

    def megabytes(self) -> float:
        """The most that is held beside what is there before."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as seen:
            self.step()
        changes = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
        held = itertools.accumulate(event.nbytes() for event in sorted(changes, key=lambda event: event.start_ns()))
        return float(max(held)) / 1e6


def cases(experts: int, rank: int) -> dict[str, Case]:
    """What is compared, by name; ours first."""
    ours, plain = model(experts), model(experts)
    add_adapters(ours, LoraSpec(rank=rank, target_modules=["experts"]))
    for name, parameter in ours.named_parameters():
        if is_adapter(name):
            torch.nn.init.normal_(parameter, std=0.01)
    names = ["experts.gate_up_proj", "experts.down_proj"]
    options = LoraConfig(r=rank, lora_alpha=rank, target_modules=[], target_parameters=names, init_lora_weights=False)
    theirs = get_peft_model(model(experts), options).base_model.model
    return {"ours": Case(ours), "peft": Case(theirs), "without": Case(plain)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--rank", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    compared = cases(options.experts, options.rank)
    times: dict[str, list[float]] = {name: [] for name in compared}
    for turn in range(options.turns + 1):
        for name in (*compared, *reversed(compared)):
            took = compared[name].seconds()
            if turn:
                times[name].append(took)
    for name, case in compared.items():
        ratio = statistics.median(a / b for a, b in zip(times[name], times["ours"], strict=True))
        print(f"{name}: time={ratio:.3f} megabytes={case.megabytes():.0f}")


if __name__ == "__main__":
    main()
