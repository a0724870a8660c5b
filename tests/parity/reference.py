"""A plain Hugging Face training loop: what the numbers must be, written as simply as possible.

One example at a time, no packing, no sharding, transformers as it comes, torch's cross-entropy, torch's optimizer
without fusion, all in fp32. Only the choice of examples of a step is taken from the product (it has tests of its own).
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from sft_api.trainer_config import TrainerConfig
from sft_trainer.preparation import Prepared


@dataclass
class ReferenceStep:
    """Loss of one step, the gradients before clipping, and their global norm."""

    loss: float
    gradients: dict[str, torch.Tensor]
    grad_norm: float


def reference_steps(config: TrainerConfig, prepared: Prepared, rates: list[float]) -> list[ReferenceStep]:
    """Train the model with learning rates ``rates``, one step for each."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        Path(config.spec.model.uri.removeprefix("file://")), dtype=torch.float32
    )
    model.train()
    options = config.spec.training.optimizer
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": options.weight_decay},
            {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ],
        betas=(options.betas[0], options.betas[1]),
        eps=options.eps,
        foreach=False,
    )
    steps = []
    for index, rate in enumerate(rates):
        examples = [
            prepared.train[source].example(row)
            for bin_ in prepared.steps.step(index).bins
            for source, row in zip(bin_.sources.tolist(), bin_.rows.tolist(), strict=True)
        ]
        trained = sum(int(mask[1:].sum()) for _, mask in examples)
        total = 0.0
        for ids, mask in examples:
            tokens = torch.tensor(ids.tolist())
            labels = torch.where(torch.tensor(mask.tolist()) == 1, tokens, -100)
            logits = model(input_ids=tokens[None]).logits[0]
            loss = cross_entropy(logits[:-1], labels[1:], ignore_index=-100, reduction="sum") / trained
            loss.backward()
            total += loss.item()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), options.max_grad_norm)
        steps.append(ReferenceStep(total, gradients, norm.item()))
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
    return steps
