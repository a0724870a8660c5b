"""What transformers, peft and torch make of a run: its export, and its first steps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from sft_api.trainer_config import TrainerConfig
from sft_trainer.models.lora import taken_for_experts
from sft_trainer.optim import learning_rate
from sft_trainer.prepared import Prepared
from tests.parity.reference import peft_model, reference_model, reference_steps, rounded_to_4_bits

_STEPS = 2
_SIMPLE = {
    "all": _STEPS,
    "a layer": _STEPS,
    "a layer and head": _STEPS,
    "adapters": _STEPS,
    "adapters in 4 bits": _STEPS,
    "adapters beside bf16": _STEPS,
    "adapters, B faster": 1,
}
"""What is trained by values of ``features``, and steps up to which the plain loop does the same."""


def exported_model(config: TrainerConfig, export: Path) -> Any:
    """The model in ``export``, in fp32."""
    if not (export / "adapter_config.json").exists():
        return _text_of(export)
    from peft import PeftModel
    from transformers import AutoTokenizer

    base = _text_of(Path(config.spec.model.uri.removeprefix("file://")))
    if config.spec.quantised == "nf4":
        _round(base)
    if (tokens := len(AutoTokenizer.from_pretrained(export))) > base.get_input_embeddings().num_embeddings:
        base.resize_token_embeddings(tokens, mean_resizing=False)
    return PeftModel.from_pretrained(base, export).float()


def _text_of(folder: Path) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    whole = hasattr(AutoConfig.from_pretrained(folder), "text_config")
    kind = AutoModelForImageTextToText if whole else AutoModelForCausalLM
    return kind.from_pretrained(folder, dtype=torch.float32).float()


def _round(model: Any) -> None:
    head = model.get_output_embeddings()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Linear) and module is not head:
                module.weight.copy_(rounded_to_4_bits(module.weight))
        for weight in model.parameters():
            if weight.ndim == 3:
                weight.copy_(rounded_to_4_bits(weight))


@torch.no_grad()
def mean_losses(model: Any, sets: Mapping[str, Any]) -> tuple[float, dict[str, float]]:
    """Over all trained tokens of all ``sets``, and of each by its name; one row at a time."""
    model.eval()
    totals, trained = dict.fromkeys(sets, 0.0), dict.fromkeys(sets, 0)
    for name, one in sets.items():
        for row in range(len(one.lengths)):
            ids, mask = one.example(row)
            tokens = torch.tensor(ids.tolist())
            labels = torch.where(torch.tensor(mask.tolist()) == 1, tokens, -100)
            logits = model(input_ids=tokens[None]).logits[0].float()
            totals[name] += cross_entropy(logits[:-1], labels[1:], ignore_index=-100, reduction="sum").item()
            trained[name] += int(mask[1:].sum())
    return sum(totals.values()) / sum(trained.values()), {name: totals[name] / trained[name] for name in sets}


def first_steps(config: TrainerConfig, prepared: Prepared, values: Mapping[str, str]) -> list[tuple[float, float]]:
    """Loss and gradient norm of each of the first steps in a plain loop; none where that is not simple."""
    spec = config.spec
    simple = (
        values["trained"] in _SIMPLE
        and values["loss"] != "noise"
        and values["config"] == "published"
        and values["new tokens"] == "none"
        and prepared.model.blueprint.whole is None
        # Of these peft adapts experts by the names of layers.
        and not (spec.lora and taken_for_experts(prepared.model.blueprint.huggingface))
    )
    if not simple:
        return []
    # Moments that are rounded change the second update, and no loss of before it.
    rounded = spec.training.optimizer.state_dtype != "fp32"
    count = min(1 if rounded else _SIMPLE[values["trained"]], prepared.total_steps)
    rates = [learning_rate(spec, config.plan.learning_rate, step, prepared.total_steps) for step in range(count)]
    model = peft_model(config) if spec.lora else reference_model(config)
    if spec.lora and spec.lora.base_precision == "bf16":
        with torch.no_grad():
            for frozen in (each for each in model.parameters() if not each.requires_grad):
                frozen.copy_(frozen.bfloat16())
    return [(step.loss, step.grad_norm) for step in reference_steps(config, prepared, rates, model)]
