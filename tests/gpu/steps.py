"""Checks of steps of the strategy on the device: what of them only a GPU can show."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sft_trainer.data.feed import BinTensors
from sft_trainer.models.causal_lm import build_on_meta
from sft_trainer.models.lora import add_adapters
from sft_trainer.models.quantised import PackedBox
from sft_trainer.models.weights import load_weights
from sft_trainer.strategies.fsdp import FsdpStrategy
from sft_trainer.topology import ALONE
from sft_trainer.trainable import EVERYTHING, trainable_of
from tests.bins import RoomFor, random_bin
from tests.errors import worst
from tests.parity.mixtures import make_mixture
from tests.parity.runs import manifest, resolve
from tests.tensors import gathered

from .figures import Figure
from .kernels import error_of, require

_LENGTHS = ((75, 45), (128,), (1, 17, 100), (16,) * 8, (65, 62))
"""Of the documents of every bin."""
_BIN_TOKENS = 512
"""Of a full bin: as long as an example may be."""


@contextmanager
def _alone(device: torch.device) -> Iterator[None]:
    """A process group of one."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=dist.HashStore(),
        rank=0,
        world_size=1,
        device_id=device if on_gpu else None,
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def _strategy(
    inputs: Path, device: torch.device, memory: RoomFor | None = None, *, fsdp: dict[str, Any] | None = None
) -> FsdpStrategy:
    """The small model of ``inputs`` in bf16, as it is trained; ``fsdp`` is what ``strategy.fsdp`` says."""
    sections = {"training": {"precision": "bf16"}, "strategy": {"fsdp": fsdp or {}}}
    config = resolve(manifest(inputs, inputs.with_name("store"), **sections))
    strategy = FsdpStrategy(config, build_on_meta(inputs / "model"), EVERYTHING, ALONE, device, memory)
    load_weights(strategy.boxes("trained"), strategy.model.names, inputs / "model")
    strategy.loaded()
    return strategy


def _bins() -> tuple[list[BinTensors], int]:
    """Bins, and how many of their tokens are trained."""
    bins = [random_bin(seed, *lengths, vocabulary=512) for seed, lengths in enumerate(_LENGTHS)]
    return bins, sum(len(bin_.labels) for bin_ in bins)


def _gradients(strategy: FsdpStrategy) -> torch.Tensor:
    """All of them as one vector."""
    parts: list[Any] = [parameter.grad for parameter in strategy.model.parameters() if parameter.requires_grad]
    return torch.cat([gathered(part).flatten() for part in parts])


def _state(strategy: FsdpStrategy) -> list[torch.Tensor]:
    """Copies of weights, moments and counts of updates."""
    boxes = strategy.boxes("trained") + strategy.boxes("optimizer")
    counts = [state["step"].clone() for state in strategy.optimizer.state.values()]
    return [*(box.read().clone() for box in boxes), *counts]


def together(inputs: Path, device: torch.device) -> dict[str, Figure]:
    """Several bins in one forward pass in bf16 against one at a time: loss and gradients."""
    bins, trained = _bins()
    with _alone(device):
        alone = _strategy(inputs, device)
        grouped = _strategy(inputs, device, RoomFor(3, _BIN_TOKENS, seen=max(map(sum, _LENGTHS))))
        forwards: list[int] = []
        grouped.model.register_forward_pre_hook(lambda _, arguments: forwards.append(len(arguments[0])))
        # Two steps show it how much memory a bin takes.
        for _ in range(2):
            grouped.forward_backward(bins, trained)
        grouped.optimizer.zero_grad()
        forwards.clear()
        one, several = (float(each.forward_backward(bins, trained)) for each in (alone, grouped))
        error = error_of(_gradients(grouped), _gradients(alone))
    if len(forwards) != 2:
        raise AssertionError(f"{len(bins)} bins, three at a time, took {len(forwards)} forward passes")
    require("several bins at once: error of the loss", abs(several / one - 1), 1e-3)
    require("several bins at once: error of the gradients", error, 2e-2)
    return {"together_loss_error": abs(several / one - 1), "together_gradient_error": error}


def offload(inputs: Path, device: torch.device) -> dict[str, Figure]:
    """Two steps with weights, gradients and moments in host memory against the same on the device, and a step that is
    not finite, which changes nothing; what of them the device holds."""
    bins, trained = _bins()
    on_gpu = device.type == "cuda"
    with _alone(device):
        usual, offloaded = _strategy(inputs, device), _strategy(inputs, device, fsdp={"cpuOffload": True})
        if any(box.read().device.type != "cpu" for box in offloaded.boxes("trained")):
            raise AssertionError("weights that are offloaded must be in host memory")
        losses, norms = [], []
        for ok in (True, False, True):
            before = _state(offloaded)
            for each in (usual, offloaded):
                losses.append(float(each.forward_backward(bins, trained)))
                norms.append(norm := each.grad_norm())
                each.apply(1e-3, 1.0, norm, torch.tensor(ok, device=device))
            kept = all(torch.equal(old, new) for old, new in zip(before, _state(offloaded), strict=True))
            if kept == ok:
                raise AssertionError("a step changes what is offloaded where it is finite, and only there")
        locked = [box.read().is_pinned() for box in offloaded.boxes("trained")] if on_gpu else []
        error = error_of(
            *(torch.cat([box.read().flatten().cpu() for box in of.boxes("trained")]) for of in (offloaded, usual))
        )
    if not all(locked):
        raise AssertionError("copies go on beside the computation from page-locked memory only")
    figures = {
        "offload_loss_error": worst(abs(b / a - 1) for a, b in zip(losses[::2], losses[1::2], strict=True)),
        "offload_norm_error": worst(abs(float(b / a) - 1) for a, b in zip(norms[::2], norms[1::2], strict=True)),
        "offload_weight_error": error,
    }
    for (name, value), limit in zip(figures.items(), (1e-3, 1e-2, 2e-2), strict=True):
        require(name.replace("_", " "), value, limit)
    return dict(figures)


def adapters(inputs: Path, device: torch.device) -> dict[str, Figure]:
    """Adapters in bf16 beside a base that is held in bf16 against one in fp32: the same but for what a kernel rounds,
    and the gradients beside those in fp32; a step changes adapters and nothing else."""
    bins, trained = _bins()
    with _alone(device):
        held, wide, exact = (
            _with_adapters(inputs, device, precision, base)
            for precision, base in (("bf16", "bf16"), ("bf16", "fp32"), ("fp32", "fp32"))
        )
        losses = [float(each.forward_backward(bins, trained)) for each in (held, wide, exact)]
        base = [box.read().clone() for box in held.boxes("base")]
        before = [box.read().clone() for box in held.boxes("trained")]
        found = [_gradients(each) for each in (held, wide, exact)]
        held.apply(1e-3, 1.0, held.grad_norm(), torch.tensor(True, device=device))
        changed = [not torch.equal(old, box.read()) for old, box in zip(before, held.boxes("trained"), strict=True)]
        kept = all(torch.equal(old, box.read()) for old, box in zip(base, held.boxes("base"), strict=True))
    if not (all(changed) and kept):
        raise AssertionError("a step must change all adapters, and nothing of the base")
    figures = {
        "adapters_base_loss_error": abs(losses[0] / losses[1] - 1),
        "adapters_base_gradient_error": error_of(found[0], found[1]),
        "adapters_gradient_error": error_of(found[0], found[2]),
    }
    for (name, error), limit in zip(figures.items(), (1e-3, 2e-2, 1e-1), strict=True):
        require(name.replace("_", " "), error, limit)
    return dict(figures)


def packed_base(inputs: Path, device: torch.device) -> dict[str, Figure]:
    """Adapters beside a base that is rounded to 4 bits on the device, as it is and compiled, against one of fp32
    that was given the same weights."""
    bins, trained = _bins()
    with _alone(device):
        packed, compiled, whole = (
            _with_adapters(inputs, device, "bf16", base, compiles=compiles)
            for base, compiles in (("nf4", False), ("nf4", True), ("fp32", False))
        )
        _round_as(packed, whole)
        losses = [float(each.forward_backward(bins, trained)) for each in (packed, compiled, whole)]
        found = [_gradients(each) for each in (packed, compiled, whole)]
    figures = {
        "packed_base_loss_error": abs(losses[0] / losses[2] - 1),
        "packed_base_gradient_error": error_of(found[0], found[2]),
        "packed_base_compiled_loss_error": abs(losses[1] / losses[2] - 1),
        "packed_base_compiled_gradient_error": error_of(found[1], found[2]),
    }
    for (name, error), limit in zip(figures.items(), (1e-3, 2e-2, 1e-3, 5e-2), strict=True):
        require(name.replace("_", " "), error, limit)
    return dict(figures)


def packed_experts(inputs: Path, device: torch.device) -> dict[str, Figure]:
    """The same of mixtures of experts, which have adapters too: rounded ones, and those of gpt-oss as it is published.
    And the gradients beside those in fp32."""
    bins, trained = _bins()
    figures: dict[str, Figure] = {}
    for kind, base in (("qwen3_moe", "nf4"), ("gpt_oss", "mxfp4")):
        mixture = make_mixture(inputs, inputs.with_name(f"{inputs.name}-{kind}"), kind, width=64)
        with _alone(device):
            packed, whole, exact = (
                _with_adapters(mixture, device, precision, held, experts=True)
                for precision, held in (("bf16", base), ("bf16", "fp32"), ("fp32", "fp32"))
            )
            for each in (whole, exact):
                _round_as(packed, each)
            losses = [float(each.forward_backward(bins, trained)) for each in (packed, whole, exact)]
            found = [_gradients(each) for each in (packed, whole, exact)]
        figures |= {
            f"packed_experts_{base}_loss_error": abs(losses[0] / losses[1] - 1),
            f"packed_experts_{base}_gradient_error": error_of(found[0], found[1]),
            f"adapted_experts_{base}_gradient_error": error_of(found[0], found[2]),
        }
    for name, error in figures.items():
        # Beside fp32 as that of adapters is.
        limit = 1e-1 if name.startswith("adapted") else 1e-3 if "loss" in name else 2e-2
        require(name.replace("_", " "), error, limit)
    return figures


def _round_as(packed: FsdpStrategy, whole: FsdpStrategy) -> None:
    """Give ``whole`` the weights that ``packed`` has, which must be those that a host makes of the same."""
    rounded = 0
    for box, held in zip(whole.boxes("base"), packed.boxes("base"), strict=True):
        if not isinstance(held, PackedBox):
            continue
        values = box.read().cpu()
        turned = values.mT if held.format.turned else values
        values = held.format.unpacked(held.format.pack(turned), torch.float32)
        values = values.mT if held.format.turned else values
        if not torch.equal(held.read().cpu(), values):
            raise AssertionError(f"{box.name} in 4 bits is another one on the device than on its host")
        box.write(values)
        rounded += 1
    if not rounded:
        raise AssertionError("nothing is held in 4 bits")


def _with_adapters(
    inputs: Path, device: torch.device, precision: str, base: str, *, compiles: bool = False, experts: bool = False
) -> FsdpStrategy:
    """The small model of ``inputs`` with adapters that add something, of ``experts`` as well."""
    training = {"precision": precision, "compile": compiles}
    lora: dict[str, Any] = {"rank": 8, "basePrecision": base}
    if experts:
        # Of a rank that no product takes as it is.
        lora |= {"targetModules": ["all-linear", "experts"], "expertRank": 12}
    config = resolve(manifest(inputs, inputs.with_name("store"), lora=lora, training=training))
    blueprint = build_on_meta(inputs / "model")
    assert config.spec.lora is not None
    add_adapters(blueprint.huggingface, config.spec.lora)
    strategy = FsdpStrategy(config, blueprint, trainable_of(config), ALONE, device)
    load_weights(strategy.boxes("base"), strategy.model.names, inputs / "model")
    generator = torch.Generator().manual_seed(0)
    for box in strategy.boxes("trained"):
        box.write(torch.randn(box.shape, generator=generator) * 0.05)
    return strategy


def skipped(inputs: Path, device: torch.device) -> dict[str, Figure]:
    """A step whose gradients are not finite, which only the device knows: it changes nothing, the next one does."""
    bins, trained = _bins()
    with _alone(device):
        strategy = _strategy(inputs, device)

        def step(factor: float) -> list[torch.Tensor]:
            strategy.forward_backward(bins, trained)
            for parameter in strategy.model.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(factor)
            norm = strategy.grad_norm()
            strategy.apply(1e-3, 1.0, norm, torch.isfinite(norm))
            return _state(strategy)

        first = step(1.0)
        for factor in (float("nan"), float("inf")):
            changed = sum(not torch.equal(*pair) for pair in zip(step(factor), first, strict=True))
            if changed:
                raise AssertionError(f"gradients of {factor} changed {changed} of {len(first)} tensors")
        changed = sum(not torch.equal(*pair) for pair in zip(step(1.0), first, strict=True))
        if changed < len(first) // 2 or strategy.updates != 2:
            raise AssertionError(f"a good step changed {changed} of {len(first)} tensors: update {strategy.updates}")
    return {"skipped_steps_changed": 0}
