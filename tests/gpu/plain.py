"""A plain, tuned Hugging Face loop over the same rows: what the trainer's speed is compared with.

    python -m tests.gpu.plain SETTINGS.json

The same model class with transformers' own attention: ``flash_attention_2`` with document boundaries where that package
is installed, else ``sdpa`` over whole bins, in which documents see one another: wrong, and the fastest that
transformers has without another package. fp32 weights under bf16 autocast, fused AdamW, clipping by the norm, packed
first-fit-decreasing, no activation checkpointing, not compiled, one host synchronisation a step. As many bins go
through one forward pass as were the fastest of 1, 2 and 4 in steps before those that count. Adapters are peft's, in
fp32, beside a base in bf16. Not packed, each document is a row that is padded to the longest of its forward pass, as
many of them in a step as fill its bins on average; padding counts as no token. Writes what it measured as JSON.
"""

import gc
import importlib
import importlib.util
import json
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from sft_trainer.versions import show_flash_attention

_AT_ONCE = (1, 2, 4)
"""Bins in one forward pass that are tried."""
_NOT_TRAINED = -100


@dataclass(frozen=True)
class Settings:
    """What to train, and how long."""

    model: str
    data: str
    device: str
    bin_tokens: int
    bins: int
    rank: int
    """Of peft's adapters on all linear layers; 0: all weights are trained."""
    packed: bool
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
        examples.append((ids, torch.where(mask == 1, ids, _NOT_TRAINED)))
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
    return shuffled(bins)


def shuffled(rows: list[list[Example]]) -> list[list[Example]]:
    """In an order that depends on their number alone."""
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
    return [rows[index] for index in order]


def _arguments(
    bins: Sequence[list[Example]], device: torch.device, boundaries: bool
) -> tuple[dict[str, Any], torch.Tensor]:
    """Of one forward pass over ``bins``, and the labels: one row of all documents where their ``boundaries`` are told,
    else a row for each bin, as long as the longest."""
    rows = [[document for documents in bins for document in documents]] if boundaries else bins
    ids = [torch.cat([ids for ids, _ in documents]) for documents in rows]
    arguments: dict[str, Any] = {"input_ids": pad_sequence(ids, batch_first=True).to(device)}
    if boundaries:
        positions = torch.cat([torch.arange(len(ids)) for ids, _ in rows[0]])
        arguments["position_ids"] = positions[None].to(device)
    # The first token of a document is not predicted by the last one of another.
    last = torch.tensor([_NOT_TRAINED])
    labels = [torch.cat([torch.cat([labels[1:], last]) for _, labels in documents]) for documents in rows]
    return arguments, pad_sequence(labels, batch_first=True, padding_value=_NOT_TRAINED).to(device)


def fastest(counts: Sequence[int], seconds_with: Callable[[int], float]) -> int:
    """Which of ``counts``, least first, takes the fewest seconds; where one has no room those after it have none."""
    seconds: dict[int, float] = {}
    for count in counts:
        try:
            seconds[count] = seconds_with(count)
        except torch.OutOfMemoryError:
            if not seconds:
                raise
            break
    return min(seconds, key=seconds.__getitem__)


def _find_flash_attention_2() -> bool:
    """Whether it is there, and have transformers find it. FlashAttention 4 has a package of the same name, which the
    process that this one was forked from hides."""
    from transformers.utils import import_utils

    show_flash_attention()
    try:
        there = importlib.util.find_spec("flash_attn.flash_attn_interface") is not None
    except ModuleNotFoundError:
        there = False
    if there:
        # That there is none was looked up, and is kept, while it was hidden.
        import_utils.is_flash_attn_2_available.cache_clear()
        import_utils.is_flash_attn_greater_or_equal.cache_clear()
    return there


class _Loop:
    """Model, optimizer and packed rows."""

    def __init__(self, settings: Settings) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.settings, self.device = settings, torch.device(settings.device)
        self.on_gpu = self.device.type == "cuda"
        has_flash = self.on_gpu and _find_flash_attention_2()
        self._boundaries = has_flash and settings.packed
        self.attention = "flash_attention_2" if has_flash else "sdpa"
        dtype = torch.bfloat16 if settings.rank and self.on_gpu else torch.float32
        model: Any = AutoModelForCausalLM.from_pretrained(
            settings.model, dtype=dtype, attn_implementation=self.attention
        )
        model = model.to(self.device)
        if settings.rank:
            peft = importlib.import_module("peft")
            model = peft.get_peft_model(model, peft.LoraConfig(r=settings.rank, target_modules="all-linear"))
        self._model = model.train()
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(self._trained, lr=1e-5, fused=True)
        examples = read_examples(settings.data, AutoTokenizer.from_pretrained(settings.model))
        fitting = [example for example in examples if len(example[0]) <= settings.bin_tokens]
        self._rows = pack(fitting, settings.bin_tokens) if settings.packed else shuffled([[each] for each in fitting])
        self._of_step = settings.bins
        if not settings.packed:
            of_a_row = sum(len(ids) for ids, _ in fitting) / len(fitting)
            self._of_step = max(settings.bins, round(settings.bins * settings.bin_tokens / of_a_row))

    def step(self, number: int, at_once: int) -> int:
        """Make the step of that number, ``at_once`` bins (or the rows of so many) in a forward pass; its tokens."""
        count, rows = self._of_step, self._rows
        chosen = [rows[(number * count + index) % len(rows)] for index in range(count)]
        together = ceil(count * at_once / self.settings.bins)
        passes = [chosen[start : start + together] for start in range(0, count, together)]
        inputs = [_arguments(part, self.device, self._boundaries) for part in passes]
        trained = sum(int((labels != _NOT_TRAINED).sum()) for documents in chosen for _, labels in documents)
        total = torch.zeros((), device=self.device)
        for arguments, labels in inputs:
            with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.on_gpu):
                logits = self._model(**arguments, use_cache=False).logits.flatten(0, 1)
            loss = cross_entropy(logits.float(), labels.flatten(), ignore_index=_NOT_TRAINED, reduction="sum") / trained
            del logits
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(self._trained, 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        if not torch.isfinite(total).item():
            raise RuntimeError(f"the loss of step {number + 1} is {total.item()}")
        return sum(len(ids) for documents in chosen for ids, _ in documents)

    def seconds_with(self, at_once: int) -> float:
        """Of the second of two steps; where there is no room for them, nothing is left of them."""
        try:
            self.step(0, at_once)
            began = time.perf_counter()
            self.step(0, at_once)
            return time.perf_counter() - began
        finally:
            self._optimizer.zero_grad()


def main() -> None:
    settings = Settings(**json.loads(Path(sys.argv[1]).read_text()))
    loop = _Loop(settings)
    at_once = fastest([count for count in _AT_ONCE if count <= settings.bins], loop.seconds_with)
    if loop.on_gpu:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    step = tokens = 0
    began = 0.0
    while True:
        of_step = loop.step(step, at_once)
        step += 1
        if step <= settings.warm_up_steps:
            began = time.perf_counter()
            continue
        tokens += of_step
        seconds = time.perf_counter() - began
        if step >= settings.warm_up_steps + settings.least_steps and seconds >= settings.seconds:
            break
    peak = (
        torch.cuda.max_memory_allocated() if loop.on_gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    )
    result = {
        "tokens_per_second": tokens / seconds,
        "peak_memory": peak,
        "attention": loop.attention,
        "bins_at_once": at_once,
        "steps": step,
    }
    Path(settings.result).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
