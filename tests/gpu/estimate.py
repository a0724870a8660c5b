"""The estimate of a GPU's memory beside what it has held: steps of a model in a real shape, with random weights."""

import gc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from sft_api.known_models import known_configs
from sft_api.memory import micro_batch_tokens
from sft_api.trainer_config import TrainerConfig
from sft_api.v1alpha1.megatron import megatron_of
from sft_trainer.data.feed import BinTensors
from sft_trainer.models.attention import Boundaries, register
from sft_trainer.models.causal_lm import CausalLM, build_on_meta
from sft_trainer.models.lora import add_adapters
from sft_trainer.strategies import Strategy
from sft_trainer.strategies.fsdp import FsdpStrategy
from sft_trainer.strategies.fsdp.fitting import estimate_blueprint
from sft_trainer.strategies.megatron.fitting import estimate_blueprint as estimate_stage
from sft_trainer.topology import ALONE
from sft_trainer.trainable import Trainable, trainable_of
from tests.parity.runs import manifest, resolve

from .figures import Figure
from .isolated import WrongFigures
from .steps import _alone

_LEAST, _MOST = -0.05, 0.15
"""By how much the estimate, without its reserve, may differ from what torch's allocator has given out at a time."""
_MODEL, _TOKENS = "Qwen/Qwen3-0.6B", 8192
"""Whose shape the steps are of, and how many tokens a bin has."""
_LARGE_MODEL, _LARGE_TOKENS = "Qwen/Qwen3-8B", 4096
_CASES: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"training": {"activationCheckpointing": "selective"}},
    "full": {"training": {"activationCheckpointing": "full"}},
    "adapters": {"lora": {"rank": 16}},
}
_PACKED: dict[str, Any] = {"lora": {"rank": 16, "basePrecision": "nf4"}}
_COMPILED: dict[str, Any] = {"training": {"compile": True}}


def estimates(
    inputs: Path,
    device: torch.device,
    cases: Mapping[str, dict[str, Any]] | None = None,
    model: str = _MODEL,
    tokens: int = _TOKENS,
) -> dict[str, Figure]:
    """Estimate over peak, less 1, for each way of training, on a GPU also of compiled layers; a CPU, which counts no
    peak, makes the same few steps.

    Of one narrow layer, and few tokens, on a CPU.
    """
    cases = cases or _CASES | ({"compiled": _COMPILED} if device.type == "cuda" else {})
    figures: dict[str, Figure] = {}
    wrong = []
    with _alone(device):
        for name, spec in cases.items():
            reckoned, held = _both(inputs, device, spec, model, tokens)
            figures[f"memory_{name}_estimate_gib"] = reckoned / 2**30
            if held is None:
                continue
            error = reckoned / held - 1
            figures[f"memory_{name}_peak_gib"] = held / 2**30
            figures[f"memory_{name}_error"] = error
            if not _LEAST <= error <= _MOST:
                wrong.append(f"{name}: {error:+.1%}")
    if wrong:
        raise WrongFigures(f"the estimate of memory is off by more than -5 to +15%: {', '.join(wrong)}", figures)
    return figures


def of_8b(inputs: Path, device: torch.device) -> dict[str, Figure]:
    """As ``estimates``, of adapters beside a base of 8 B parameters in bf16 and in 4 bits, whose head is not its
    embedding."""
    cases = {"adapters_8b": _CASES["adapters"], "adapters_8b_packed": _PACKED}
    if device.type == "cuda":
        cases |= {f"{name}_compiled": how | _COMPILED for name, how in cases.items()}
    return estimates(inputs, device, cases, model=_LARGE_MODEL, tokens=_LARGE_TOKENS)


def of_folder(model: Path, config: TrainerConfig, bins: int) -> list[int]:
    """What ``config`` takes of a GPU without the reserve: with one bin in a forward pass, with two, to ``bins``.

    In steps of the trainer several go through at once where there is room.
    """
    blueprint = build_on_meta(model)
    if config.spec.lora:
        add_adapters(blueprint.huggingface, config.spec.lora)
    trainable, tokens = trainable_of(config), micro_batch_tokens(config.spec, config.plan)
    reckoned = []
    for count in range(1, bins + 1):
        plan = config.plan.model_copy(update={"max_tokens_per_micro_batch": count * tokens})
        together = config.model_copy(update={"plan": plan})
        reckoned.append(estimate_blueprint(together, blueprint, trainable).allocated)
    return reckoned


def _both(inputs: Path, device: torch.device, spec: dict[str, Any], model: str, tokens: int) -> tuple[int, int | None]:
    """Bytes that a step takes: reckoned, and held at a time; None where that is not counted."""
    from transformers import AutoConfig, AutoModelForCausalLM

    on_gpu = device.type == "cuda"
    known = dict(known_configs()[model])
    if not on_gpu:
        # A CPU may have no fast products in bf16: of the shape only what is tied is left.
        tokens = 64
        known |= {"num_hidden_layers": 1, "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256}
        known |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    kind = known.pop("model_type")
    spec = {**spec, "training": {**spec.get("training", {}), "precision": "bf16"}}
    config = resolve(manifest(inputs, inputs.with_name("store"), **spec))
    plan = config.plan.model_copy(update={"max_tokens_per_micro_batch": tokens})
    config = config.model_copy(update={"plan": plan})
    register()
    with torch.device("meta"):
        huggingface = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(kind, **known), attn_implementation="sft_documents"
        )
    if config.spec.lora:
        add_adapters(huggingface, config.spec.lora)
    blueprint, trainable = CausalLM(huggingface), trainable_of(config)
    if megatron_of(config.spec) is not None:
        reckoned = estimate_stage(config, blueprint).allocated
    else:
        reckoned = estimate_blueprint(config, blueprint, trainable).allocated
    gc.collect()
    before = _begun(device) if on_gpu else 0
    strategy = built(config, blueprint, trainable, device)
    for which in ("base", "trained"):
        for box in strategy.boxes(which):  # type: ignore[arg-type]
            # On the device itself: the host takes many seconds for 8 B zeros.
            box.write(torch.zeros((), device=device).expand(box.place.sizes))
    strategy.loaded()
    numbers = torch.zeros(tokens, dtype=torch.long)
    bin_ = BinTensors(numbers, numbers, Boundaries.of([tokens]), numbers, numbers, seed=1)
    for _ in range(3):
        strategy.forward_backward([bin_, bin_], 2 * tokens)
        strategy.apply(1e-5, 1.0, strategy.grad_norm(), torch.tensor(True, device=device))
    if not on_gpu:
        return reckoned, None
    torch.cuda.synchronize(device)
    return reckoned, torch.cuda.max_memory_allocated(device) - before


def _begun(device: torch.device) -> int:
    """Bytes that are held where a peak is counted from now on."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def built(config: TrainerConfig, blueprint: CausalLM, trainable: Trainable, device: torch.device) -> Strategy:
    """The strategy that ``config`` asks for, on one process, which computes one bin at a time."""
    if megatron_of(config.spec) is None:
        return FsdpStrategy(config, blueprint, trainable, ALONE, device)
    from megatron.core import parallel_state

    from sft_trainer.strategies.megatron.strategy import MegatronStrategy

    # Of the one before.
    parallel_state.destroy_model_parallel()
    return MegatronStrategy(config, blueprint, trainable, ALONE, device)
