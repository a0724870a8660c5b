"""A plain Hugging Face training loop: what the numbers must be, written as simply as possible.

One example at a time, no packing, no sharding, transformers as it comes, torch's cross-entropy, torch's optimizer
without fusion, all in fp32. Only the choice of examples of a step is taken from the product (it has tests of its own).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from sft_api.adapters import within
from sft_api.trainer_config import TrainerConfig
from sft_api.v1alpha1 import LoraSpec
from sft_api.v1alpha1.workload import OptimizerSpec, TrainingSpec
from sft_trainer.boxes import WEIGHT, Box, Rectangle
from sft_trainer.data.tokenized import TokenizedSource
from sft_trainer.models.experts import has_experts
from sft_trainer.models.lora import initialize_adapters
from sft_trainer.models.nf4 import VALUES
from sft_trainer.names.canonical import Names
from sft_trainer.prepared import Prepared
from tests.adapters_of_peft import as_here, experts_of


@dataclass
class ReferenceStep:
    """Loss of one step, the gradients before clipping, and their global norm."""

    loss: float
    gradients: dict[str, torch.Tensor]
    grad_norm: float
    aux_loss: float
    """Of the routers, without its coefficient; 0 where none is trained."""


def reference_model(config: TrainerConfig) -> Any:
    """The model of ``config`` as transformers loads it, of which that is trained which ``config`` says."""
    from transformers import AutoModelForCausalLM

    balanced = {"output_router_logits": True} if config.spec.training.router_aux_loss_coefficient else {}
    model: Any = AutoModelForCausalLM.from_pretrained(
        Path(config.spec.model.uri.removeprefix("file://")), dtype=torch.float32, **balanced
    )
    # transformers 5.17 leaves in bf16 what files have in MXFP4.
    model.float()
    if modules := config.spec.training.trainable_modules:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(within(name, modules))
    return model


def peft_model(config: TrainerConfig) -> Any:
    """The same with adapters by peft, whose first values are those of ``config``."""
    from peft import LoraConfig, get_peft_model

    lora = config.spec.lora
    assert lora is not None
    assert lora.target_modules in (["all-linear"], ["all-linear", "experts"])
    plain = reference_model(config)
    experts, names = experts_of(plain), Names.of(plain.config)
    if lora.quantised == "nf4":
        with torch.no_grad():
            for name, weight in plain.named_parameters():
                if weight.ndim == 3 or name.removesuffix(".weight") in _linear_layers(plain):
                    weight.copy_(rounded_to_4_bits(weight))
    options = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.effective_alpha,  # type: ignore[arg-type]
        target_modules=_linear_layers(plain) if has_experts(plain) else "all-linear",
        exclude_modules=lora.exclude_modules or None,
        task_type="CAUSAL_LM",
        **(_of_experts(lora) if lora.names_experts else {}),
    )
    model = get_peft_model(plain, options)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            ours, values = as_here(name, parameter.data, experts)
            shape = tuple(values.shape)
            (part,) = names.parts(ours, shape)
            box = Box(part.name, WEIGHT, shape, Rectangle.whole(shape), values)
            initialize_adapters([box], lora, config.spec.training.seed)
    return model


def _of_experts(lora: LoraSpec) -> dict[str, Any]:
    """What a ``LoraConfig`` says of adapters of both tensors of experts, of another rank, and as strong as all."""
    names = ["experts.gate_up_proj", "experts.down_proj"]
    rank = lora.rank_of_experts
    return {
        "target_parameters": names,
        "rank_pattern": dict.fromkeys(names, rank),
        "alpha_pattern": dict.fromkeys(names, lora.scaling * rank),
    }


def rounded_to_4_bits(weight: torch.Tensor) -> torch.Tensor:
    """Each of 64 weights in a row as the nearest of the 16 values times the largest of them."""
    blocks = weight.view(-1, 64)
    scales = blocks.abs().amax(1, keepdim=True)
    nearest = (blocks[..., None] / scales[..., None] - torch.tensor(VALUES)).abs().argmin(-1)
    return (torch.tensor(VALUES)[nearest] * scales).view_as(weight)


def _linear_layers(model: Any) -> list[str]:
    """Names of all but the head: by ``all-linear`` peft means the stacked experts of some types as well."""
    head = model.get_output_embeddings()
    return [name for name, part in model.named_modules() if isinstance(part, torch.nn.Linear) and part is not head]


@torch.no_grad()
def reference_loss(model: Any, source: TokenizedSource) -> float:
    """Mean loss of ``model`` over all trained tokens of ``source``."""
    model.eval()
    total, trained = 0.0, 0
    for row in range(len(source.lengths)):
        ids, mask = source.example(row)
        tokens = torch.tensor(ids.tolist())
        labels = torch.where(torch.tensor(mask.tolist()) == 1, tokens, -100)
        logits = model(input_ids=tokens[None]).logits[0]
        total += cross_entropy(logits[:-1], labels[1:], ignore_index=-100, reduction="sum").double().item()
        trained += int(mask[1:].sum())
    return total / trained


def reference_steps(
    config: TrainerConfig, prepared: Prepared, rates: list[float], model: Any = None
) -> list[ReferenceStep]:
    """Train the model, or ``model``, with learning rates ``rates``, one step for each."""
    model = model or reference_model(config)
    model.train()
    experts = experts_of(model)
    objective, options = config.spec.training, config.spec.training.optimizer
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    decayed = {name for name, p in named if p.ndim >= 2 and not name.endswith("bias")}
    by_muon = {name for name in decayed if options.type == "muon" and ".layers." in name}
    muon = PlainMuon([p for name, p in named if name in by_muon], options)
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for name, p in named if name in decayed - by_muon], "weight_decay": options.weight_decay},
            {"params": [p for name, p in named if name not in decayed], "weight_decay": 0.0},
        ],
        betas=(options.betas[0], options.betas[1]),
        eps=options.eps,
        foreach=False,
    )
    steps = []
    for index, rate in enumerate(rates):
        bins = [
            [
                prepared.train[source].example(row)
                for source, row in zip(bin_.sources.tolist(), bin_.rows.tolist(), strict=True)
            ]
            for bin_ in prepared.steps.step(index).bins
        ]
        trained = sum(int(mask[1:].sum()) for examples in bins for _, mask in examples)
        tokens = sum(len(ids) for examples in bins for ids, _ in examples)
        coefficient = config.spec.training.router_aux_loss_coefficient
        total = total_aux = 0.0
        for examples in bins:
            if coefficient:
                both = (_loss_and_routers(model, objective, *example) for example in examples)
                losses, routers = zip(*both, strict=True)
                loss = torch.stack(losses).sum() / trained
                aux = _aux_loss(model, routers) * sum(len(ids) for ids, _ in examples) / tokens
                (loss + coefficient * aux).backward()
                total, total_aux = total + loss.item(), total_aux + aux.item()
                continue
            for example in examples:
                loss = _loss(model, objective, *example) / trained
                loss.backward()
                total += loss.item()
        gradients = dict(
            as_here(name, p.grad.clone(), experts) for name, p in model.named_parameters() if p.grad is not None
        )
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), options.max_grad_norm or math.inf)
        steps.append(ReferenceStep(total, gradients, norm.item(), total_aux))
        for group in optimizer.param_groups:
            group["lr"] = rate
        muon.step(rate)
        optimizer.step()
        model.zero_grad()
    return steps


class PlainMuon:
    """Muon by its formulas, one matrix at a time: singular values are computed, and what the polynomial that it goes
    by makes of them in five steps."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], options: OptimizerSpec) -> None:
        self._averages = {parameter: torch.zeros_like(parameter) for parameter in parameters}
        self._momentum = 0.95 if options.momentum is None else options.momentum
        self._decay = options.weight_decay

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for parameter, average in self._averages.items():
            assert parameter.grad is not None
            average.mul_(self._momentum).add_((1 - self._momentum) * parameter.grad)
            ahead = self._momentum * average + (1 - self._momentum) * parameter.grad
            left, values, right = torch.linalg.svd(ahead.double(), full_matrices=False)
            # Of all matrices of a stack each by itself.
            values = values / torch.linalg.vector_norm(values, dim=-1, keepdim=True).clamp(min=1e-7)
            for _ in range(5):
                values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
            direction = (left * values[..., None, :]) @ right
            parameter.mul_(1 - rate * self._decay)
            parameter.sub_(rate * 0.2 * math.sqrt(max(parameter.shape[-2:])) * direction.float())


def _loss(model: Any, objective: TrainingSpec, ids: Any, mask: Any) -> torch.Tensor:
    """Summed over the trained tokens of one example."""
    return _loss_and_routers(model, objective, ids, mask)[0]


def _loss_and_routers(model: Any, objective: TrainingSpec, ids: Any, mask: Any) -> tuple[torch.Tensor, Any]:
    tokens = torch.tensor(ids.tolist())
    labels = torch.where(torch.tensor(mask.tolist()) == 1, tokens, -100)
    output = model(input_ids=tokens[None])
    smoothing = objective.label_smoothing or 0.0
    each = cross_entropy(
        output.logits[0][:-1], labels[1:], ignore_index=-100, reduction="none", label_smoothing=smoothing
    )
    loss = ((-each).exp().detach() * each if objective.loss == "dft" else each).sum()
    return loss, getattr(output, "router_logits", None)


def _aux_loss(model: Any, routers: Any) -> torch.Tensor:
    """transformers' own, over the tokens of all examples of a bin."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    layers = tuple(torch.cat(layer) for layer in zip(*routers, strict=True))
    loss: torch.Tensor = load_balancing_loss_func(layers, layers[0].shape[-1], model.config.num_experts_per_tok)
    return loss
