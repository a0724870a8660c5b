"""What a Hugging Face model says and how well it does, by plain transformers: independent of the trainer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def answers(model_path: Path, questions: Sequence[str]) -> list[str]:
    """What the model in `model_path` answers to each question, asked alone, greedily, in at most 24 tokens."""
    import torch

    tokenizer, model = _load(model_path)
    given = []
    for question in questions:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        with torch.no_grad():
            output = model.generate(**prompt, max_new_tokens=24, do_sample=False)
        given.append(tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))
    return given


def held_out_loss(model_path: Path, rows: Path) -> float:
    """Mean loss per assistant token over the conversations in `rows`."""
    import torch
    from torch.nn.functional import cross_entropy

    tokenizer, model = _load(model_path)
    total, count = 0.0, 0
    for line in rows.read_text().splitlines():
        encoded = tokenizer.apply_chat_template(
            json.loads(line)["messages"], return_dict=True, return_assistant_tokens_mask=True
        )
        ids, mask = torch.tensor(encoded["input_ids"]), torch.tensor(encoded["assistant_masks"])
        labels = torch.where(mask == 1, ids, -100)[1:]
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0, :-1]
        total += cross_entropy(logits, labels, reduction="sum").item()
        count += int((labels != -100).sum())
    return total / count


def _load(model_path: Path) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoTokenizer.from_pretrained(model_path), AutoModelForCausalLM.from_pretrained(model_path)
