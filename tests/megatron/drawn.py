"""Models, shapes of processes, documents and options drawn by a seed, against transformers and torch's AdamW.

What a job can have is drawn again where it is refused, and else has to be right: loss, logits, every gradient, an
evaluation; and some steps, the last of them by processes of another shape, which read what the first ones saved.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad_norm_

from sft_trainer.boxes import WEIGHT
from sft_trainer.data.batches import MicroBatch
from sft_trainer.data.feed import BinTensors
from sft_trainer.errors import ConfigError
from sft_trainer.strategies.megatron.layout import FAMILIES, Sizes, check
from tests.errors import worst
from tests.megatron import cases, shim
from tests.megatron.cases import Case
from tests.megatron.models import save_model

_BENDS = {"original_max_position_embeddings": 32, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_ROPES: tuple[dict[str, Any], ...] = (
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    {"rope_type": "llama3", "factor": 8.0, **_BENDS},
)


@dataclass(frozen=True)
class Drawn:
    """What a seed gives: a model's config, by whom the first steps are made and by whom the last, and their bins."""

    config: Any
    first: Case
    second: Case
    bins: list[list[BinTensors]]
    most: float
    """That the norm of gradients may be; 0 for any."""


def drawn(seed: int, processes: int) -> Drawn:
    """A model, and two shapes of ``processes``."""
    dice = random.Random(f"{seed} {processes}")
    betas, decay = dice.choice(([0.9, 0.95], [0.0, 0.5], [0.9, 0.999])), dice.choice((0.0, 0.1, 1.0))
    # With a small eps what rounding leaves of a gradient that is none would be a step of full size.
    optimizer = {"weightDecay": decay, "betas": betas, "eps": 1e-3}
    name, kind = f"{seed}-{processes}", dice.choice([*FAMILIES])
    while True:
        config = _config(dice, kind)
        try:
            shapes = [replace(_shape(dice, config, processes, name), optimizer=optimizer) for _ in range(2)]
        except ConfigError:
            continue
        if dice.random() < 0.2:
            shapes[dice.randrange(2)] = Case(name, fsdp=True, optimizer=optimizer)
            dice.shuffle(shapes)
        bins = [_bins(dice, config.vocab_size) for _ in range(3)]
        return Drawn(config, *shapes, bins, dice.choice((0.0, 0.1, 1.0, 1e3)))


def _config(dice: random.Random, kind: str) -> Any:
    """Of transformers: anything that a small model of the family may have."""
    from transformers import AutoConfig

    groups = dice.choice((1, 2, 2, 3, 4))
    heads, size = groups * dice.choice((1, 1, 2, 3, 4)), dice.choice((2, 4, 6, 8, 10, 16, 20))
    # Experts, whose products are one, are refused with others.
    wide, inner = ((8, 24, 40), (8, 24)) if kind == "qwen3_moe" else ((8, 12, 20, 32, 44), (4, 12, 24, 36, 60))
    width = {"qwen2": heads * size, "llama": heads * dice.choice((2, 3, 8))}.get(kind, dice.choice(wide))
    layers, vocabulary = dice.choice((1, 2, 3, 4, 4, 6, 8)), dice.choice((37, 64, 101, 130))
    given: dict[str, Any] = {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "intermediate_size": dice.choice(inner),
        "vocab_size": vocabulary,
        "max_position_embeddings": 256,
        "tie_word_embeddings": dice.random() < 0.5,
        "rms_norm_eps": dice.choice((1e-6, 1e-5, 1e-2)),
        "rope_parameters": {**dice.choice(_ROPES), "rope_theta": dice.choice((100.0, 1e4, 1e6))},
        "pad_token_id": dice.choice((None, None, 0, vocabulary - 1, dice.randrange(vocabulary))),
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if kind != "qwen2":
        given["head_dim"] = size
    if kind == "mistral":
        given["sliding_window"] = dice.choice((None, 1, 4, 16))
    if kind.startswith("qwen"):
        given |= {"use_sliding_window": dice.random() < 0.6, "sliding_window": dice.choice((1, 3, 8))}
        given["max_window_layers"] = dice.randrange(layers + 1)
        if kind != "qwen3_moe" and dice.random() < 0.3:
            given["layer_types"] = [dice.choice(("full_attention", "sliding_attention")) for _ in range(layers)]
            given["use_sliding_window"] = True
    if kind == "qwen3_moe":
        experts = dice.choice((1, 2, 4, 6, 8))
        given |= {"num_experts": experts, "num_experts_per_tok": dice.randint(1, experts)}
        normed = {"moe_intermediate_size": dice.choice(inner), "norm_topk_prob": dice.random() < 0.5}
        given |= normed if given["num_experts_per_tok"] > 1 else {**normed, "norm_topk_prob": False}
    return AutoConfig.for_model(kind, **given)


def _shape(dice: random.Random, config: Any, processes: int, name: str) -> Case:
    """Raises ``ConfigError`` where none of some fits."""
    sizes = Sizes.of(config)
    for _ in range(20):
        tensor, context, pipeline = (dice.choice((1, 2, 4)) for _ in range(3))
        if processes % (tensor * context * pipeline):
            continue
        expert = dice.choice([each for each in (1, 2, 4) if (processes // pipeline) % each == 0])
        case = Case(
            name,
            tensor=tensor,
            context=context,
            pipeline=pipeline,
            chunks=dice.choice((1, 2, 3)) if pipeline > 1 else 1,
            expert=expert if sizes.experts else 1,
            tokens_too=tensor > 1 and (sizes.experts > 0 or dice.random() < 0.6),
            activations=dice.choice(("none", "none", "selective", "full")),
            overrides={
                end: dice.randint(1, 3) for end in (cases.FIRST, cases.LAST) if pipeline > 1 and dice.random() < 0.3
            },
        )
        try:
            check(sizes, case.megatron, processes)
        except ConfigError:
            continue
        return case
    raise ConfigError("nothing fits")


def _bins(dice: random.Random, vocabulary: int) -> list[BinTensors]:
    """Of documents of any lengths, of whose tokens some are trained: but in the first bin perhaps none."""
    found = []
    for number in range(dice.choice((1, 2, 3, 5))):
        lengths = [dice.choice((1, 2, 3, 7, 12, 30)) for _ in range(dice.randint(1, 5))]
        lengths += [5] * (max(lengths) == 1)
        generator = np.random.default_rng(dice.randrange(2**32))
        ids, ends = generator.integers(0, vocabulary, sum(lengths)), np.cumsum(lengths)
        targets = np.setdiff1d(np.arange(sum(lengths)), ends - 1)
        share = dice.choice((0.0, 0.3, 1.0)) if number else 1.0
        targets = targets[generator.random(len(targets)) < share]
        positions = np.concatenate([np.arange(length) for length in lengths])
        found.append(BinTensors.of(MicroBatch(ids, positions, tuple(lengths), targets, ids[targets + 1]), seed=number))
    return found


def plain(path: Path, case: Drawn) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    """Loss and norm of every step, and the weights after them: of transformers' model, and AdamW, in one process."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    parameters, options, figures = [*model.parameters()], case.first.optimizer, []
    matrices, others = ([each for each in parameters if (each.ndim > 1) == are] for are in (True, False))
    groups = [{"params": matrices, "weight_decay": options["weightDecay"]}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=cases.RATE, betas=options["betas"], eps=options["eps"])
    for bins in case.bins:
        loss = cases.expected(path, bins, model).loss
        figures.append((loss / cases.counted(bins), float(clip_grad_norm_(parameters, case.most or torch.inf))))
        optimizer.step()
        optimizer.zero_grad()
    return figures, cases.canonical(model, {name: parameter.detach() for name, parameter in model.named_parameters()})


def errors(models: Path, case: Drawn, seed: int) -> dict[str, float]:
    """Relative errors of what ``seed`` gave, and how many tensors another shape reads otherwise; a collective call."""
    path = models / case.first.model
    if dist.get_rank() == 0:
        save_model(case.config, path, seed)
    dist.barrier()
    found = {} if case.first.fsdp else cases.against_huggingface(models, case.first, case.bins[0])
    wanted, weights = plain(path, case)
    checkpoints = cases.Checkpoints(path.with_name(f"checkpoints-{path.name}"))
    strategy, topology = cases.built(models, case.first)
    figures = [cases.step(strategy, topology, bins, case.most) for bins in case.bins[:-1]]
    before = cases.everything(strategy)
    checkpoints.save(strategy, topology, len(figures))
    strategy, topology = cases.built(models, case.second, filled=False)
    checkpoints.load(strategy, topology)
    found["resharded"] = float(cases.different(before, cases.everything(strategy)))
    figures.append(cases.step(strategy, topology, case.bins[-1], case.most))
    found["steps"] = worst(abs(a - b) / b for a, b in zip(sum(figures, ()), sum(wanted, ()), strict=True))
    after = {name: whole for (name, kind), whole in cases.everything(strategy).items() if kind == WEIGHT}
    assert after.keys() == weights.keys()
    return found | {"steps_weights": worst(cases.error(whole, weights[name]) for name, whole in after.items())}


def of_seeds(models: Path, seeds: Sequence[int]) -> dict[str, dict[str, float]]:
    """By what ``seeds`` give its errors. Not of very many at once: groups of processes stay, each slows the next."""
    shim.install()
    found = {}
    for seed in seeds:
        case = drawn(seed, dist.get_world_size())
        found[f"{case.config.model_type} {case.first.name} -> {case.second.name}"] = errors(models, case, seed)
    return found
