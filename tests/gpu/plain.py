"""A plain, tuned Hugging Face loop over the same rows: what the trainer's speed is compared with.

    python -m tests.gpu.plain SETTINGS.json

The same model class with transformers' own attention: ``flash_attention_2`` with document boundaries where that package
is installed, else ``sdpa`` over the whole micro-batch, in which documents see one another: wrong, and the fastest that
transformers has without another package. fp32 weights under bf16 autocast, fused AdamW, clipping by the norm, packed
first-fit-decreasing, no activation checkpointing, one host synchronisation a step. Writes what it measured as JSON.
"""

import importlib.util
import json
import resource
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy


@dataclass(frozen=True)
class Settings:
    """What to train, and how long."""

    model: str
    data: str
    device: str
    bin_tokens: int
    bins: int
    warm_up_steps: int
    least_steps: int
    seconds: float
    """Measured for so long, and for so many steps at least."""
    result: str

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))


Example = tuple[torch.Tensor, torch.Tensor]
"""Token ids and labels (-100: not trained) of one row."""


def read_examples(path: str, tokenizer: Any) -> list[Example]:
    """Rows of ``messages`` as the chat template renders them; every assistant turn is trained."""
    examples = []
    for line in Path(path).read_text().splitlines():
        rendered = tokenizer.apply_chat_template(
            json.loads(line)["messages"], return_dict=True, return_assistant_tokens_mask=True
        )
        ids, mask = torch.tensor(rendered["input_ids"]), torch.tensor(rendered["assistant_masks"])
        examples.append((ids, torch.where(mask == 1, ids, -100)))
    return examples


def pack(examples: list[Example], bin_tokens: int) -> list[list[Example]]:
    """First-fit-decreasing into bins, in an order that does not depend on their size."""
    bins: list[list[Example]] = []
    room: list[int] = []
    for example in sorted(examples, key=lambda example: -len(example[0])):
        place = next((index for index, free in enumerate(room) if free >= len(example[0])), None)
        if place is None:
            bins.append([])
            room.append(bin_tokens)
            place = len(bins) - 1
        bins[place].append(example)
        room[place] -= len(example[0])
    order = torch.randperm(len(bins), generator=torch.Generator().manual_seed(0)).tolist()
    return [bins[index] for index in order]


def _arguments(documents: list[Example], device: torch.device, boundaries: bool) -> tuple[dict[str, Any], torch.Tensor]:
    arguments: dict[str, Any] = {"input_ids": torch.cat([ids for ids, _ in documents])[None].to(device)}
    if boundaries:
        positions = torch.cat([torch.arange(len(ids)) for ids, _ in documents])
        arguments["position_ids"] = positions[None].to(device)
    # The first token of a document is not predicted by the last one of another.
    labels = torch.cat([torch.cat([labels[1:], torch.tensor([-100])]) for _, labels in documents])
    return arguments, labels.to(device)


def main() -> None:
    settings = Settings(**json.loads(Path(sys.argv[1]).read_text()))
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = torch.device(settings.device)
    on_gpu = device.type == "cuda"
    boundaries = on_gpu and importlib.util.find_spec("flash_attn") is not None
    attention = "flash_attention_2" if boundaries else "sdpa"
    model: Any = AutoModelForCausalLM.from_pretrained(
        settings.model, dtype=torch.float32, attn_implementation=attention
    )
    model = model.to(device)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    examples = read_examples(settings.data, AutoTokenizer.from_pretrained(settings.model))
    bins = pack([example for example in examples if len(example[0]) <= settings.bin_tokens], settings.bin_tokens)
    step = tokens = 0
    began = 0.0
    while True:
        chosen = [bins[(step * settings.bins + index) % len(bins)] for index in range(settings.bins)]
        inputs = [_arguments(documents, device, boundaries) for documents in chosen]
        trained = sum(int((labels != -100).sum()) for documents in chosen for _, labels in documents)
        total = torch.zeros((), device=device)
        for arguments, labels in inputs:
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=on_gpu):
                logits = model(**arguments, use_cache=False).logits[0]
            loss = cross_entropy(logits.float(), labels, ignore_index=-100, reduction="sum") / trained
            del logits
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if not torch.isfinite(total).item():
            raise RuntimeError(f"the loss of step {step + 1} is {total.item()}")
        step += 1
        if step <= settings.warm_up_steps:
            began = time.perf_counter()
            continue
        tokens += sum(len(ids) for documents in chosen for ids, _ in documents)
        seconds = time.perf_counter() - began
        if step >= settings.warm_up_steps + settings.least_steps and seconds >= settings.seconds:
            break
    peak = torch.cuda.max_memory_allocated() if on_gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    result = {"tokens_per_second": tokens / seconds, "peak_memory": peak, "attention": attention, "steps": step}
    Path(settings.result).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
