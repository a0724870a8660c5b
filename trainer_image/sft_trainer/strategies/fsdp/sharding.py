"""A model on the meta device, sharded by FSDP2 where there is anything to share out; its gradients and their norm."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from sft_api.block_memory import BYTES
from sft_api.memory import computes_with_copies, gathers_base, holds_copies, offloads, reshards
from sft_api.trainer_config import TrainerConfig
from sft_trainer.errors import ConfigError
from sft_trainer.loss import Objective
from sft_trainer.models.activations import checkpoint_activations
from sft_trainer.models.causal_lm import CausalLM, draws_random_numbers
from sft_trainer.models.compiling import compile_layers, compiled_slopes
from sft_trainer.models.exchange import shared_tokens
from sft_trainer.models.quantised import FORMATS
from sft_trainer.models.weights import initialize_buffers
from sft_trainer.topology import Topology
from sft_trainer.trainable import Trainable

_PART = 2**16
"""Elements of which a CPU takes the norm at once: it is off by 3e-7 (drawn from a normal distribution), and smaller
parts take more time."""


def build_model(
    config: TrainerConfig, model: CausalLM, trainable: Trainable, topology: Topology, device: torch.device
) -> CausalLM:
    """``model`` (on the meta device) sharded, to be computed on ``device``, its parameters allocated but not filled.

    A collective call. Raises ``ConfigError`` for a topology with tensor, pipeline or expert parallelism. Order:
    activation checkpointing, compile every block, shard every block and then the root, allocate. Embedding and head
    are in the root unit, so that tied ones stay tied. One process that computes with what it holds shards nothing, and
    where that is so of the base alone, nothing but what is trained.
    """
    if topology.data_parallel * topology.sequence != topology.world_size or topology.expert > 1:
        raise ConfigError(
            "FSDP splits parameters only over processes that compute on other tokens: choose another strategy"
        )
    if topology.sequence > 1:
        model.shared_tokens = shared_tokens(topology.process_group("sequence"), topology.place("sequence"))
    model.objective = Objective.of(config.spec.training)
    trainable.mark(model.huggingface)
    if trainable.quantised:
        FORMATS[trainable.quantised].prepare(device)
    checkpoint_activations(model, config.spec.training.activation_checkpointing)
    if config.plan.compile:
        # With what is recomputed, and within what FSDP does before and after.
        asked = config.spec.training.compile is not None
        compile_layers(model.blocks, draws_random_numbers=draws_random_numbers(model), asked=asked)
        model.fused = compiled_slopes(model.objective, asked=asked)
    run = (config.spec, config.plan.precision, topology.world_size)
    left = set() if gathers_base(*run) else {each for each in model.parameters() if not each.requires_grad}
    if computes_with_copies(*run) and not holds_copies(config.spec, config.plan, topology.world_size):
        _shard(config, model, trainable, topology.parameter_mesh(device.type), device, left)
    else:
        left = set(model.parameters())
    model.to_empty(device=holding_device(config, device))
    if left:
        # Each of those that are one tensor was allocated by itself.
        model.tie_weights()
    initialize_buffers(model)
    _move_buffers(model, device)
    return model.train()


def _shard(
    config: TrainerConfig,
    model: CausalLM,
    trainable: Trainable,
    mesh: DeviceMesh,
    device: torch.device,
    left: set[nn.Parameter],
) -> None:
    """Every block over ``mesh``, and then the root, but for the parameters that are ``left`` as they are."""
    fsdp = config.spec.strategy.fsdp if config.spec.strategy else None
    computed = computed_dtype(config)
    # What is held in another precision than it is computed in is cast when it is gathered.
    held = {trainable.trained_dtype, trainable.base_dtype}
    policy = MixedPrecisionPolicy(
        param_dtype=None if held == {computed} else computed,
        reduce_dtype=torch.bfloat16 if fsdp and fsdp.reduce_dtype == "bf16" else torch.float32,
        # What a model computes in fp32 beside its layers (rotations) stays so, as in transformers.
        cast_forward_inputs=False,
    )
    # Copies from and to page-locked memory go on beside the computation.
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if offloads(config.spec) else OffloadPolicy()
    how: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": policy,
        "offload_policy": offload,
        "ignored_params": left or None,
    }
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=reshards(config.spec, config.plan), **how)
    fully_shard(model, reshard_after_forward=False, **how)
    _sum_gradients(model)


def computed_dtype(config: TrainerConfig) -> torch.dtype:
    """Of what products of matrices are computed in."""
    return torch.bfloat16 if config.plan.precision == "bf16" else torch.float32


def holding_device(config: TrainerConfig, device: torch.device) -> torch.device:
    """Where parameters, gradients and moments are held that are computed with on ``device``."""
    return torch.device("cpu") if offloads(config.spec) else device


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    """To ``device``, where they are computed with: FSDP moves parameters only."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


def _sum_gradients(model: nn.Module) -> None:
    """Gradients are summed over processes, never averaged: the loss is divided by the global token count already."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def may_add_up_later(config: TrainerConfig) -> bool:
    """Whether a replica may keep the sums of its gradients over several passes.

    Not in bf16, in which what the last passes add would get lost, and not where gradients are held in host memory:
    until they are added up they lie on the device.
    """
    fsdp = config.spec.strategy.fsdp if config.spec.strategy else None
    return fsdp is None or (fsdp.reduce_dtype != "bf16" and not fsdp.cpu_offload)


def add_up_replicas(model: nn.Module, *, after_this_pass: bool) -> None:
    """Whether the next backward pass adds the gradients of the replicas up, with those of all passes before it.

    Until one does each keeps its own sums, in its own share: no more memory than those of all take afterwards.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_requires_all_reduce(after_this_pass, recurse=False)


def add_up_processes(model: nn.Module, *, after_this_pass: bool) -> None:
    """The same of all processes: until a pass adds them up each keeps its own sums, of the whole model, in fp32."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(after_this_pass, recurse=False)


def whole_gradient_bytes(model: nn.Module) -> int:
    """What these sums take more than the shares of them that are left afterwards."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    shares = [(p, p.to_local()) for p in trained if isinstance(p, DTensor)]
    return sum(4 * p.numel() - share.element_size() * share.numel() for p, share in shares)


def kept_gathered_bytes(config: TrainerConfig, model: CausalLM) -> int:
    """Of weights that are gathered from their forward to their backward pass: outside of blocks, and maybe in them."""
    kept = {*model.parameters()}
    if reshards(config.spec, config.plan):
        kept -= {*model.blocks.parameters()}
    return sum(BYTES[config.plan.precision] * parameter.numel() for parameter in kept if isinstance(parameter, DTensor))


def gradient_norm(model: nn.Module, device: torch.device) -> torch.Tensor:
    """Norm of all gradients together, a scalar on ``device`` that is the same on every process; a collective call.

    Processes add up on ``device``, wherever gradients are held: their group knows that one alone.
    """
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    held = [each.to_local() if isinstance(each, DTensor) else each for each in gradients]
    norm = torch.nn.utils.get_total_norm([_in_fp32(part) for each in held for part in _parts(each)]).to(device)
    sharded = next((each for each in gradients if isinstance(each, DTensor)), None)
    if sharded is None:
        return norm
    square = norm.square()
    dist.all_reduce(square, group=sharded.device_mesh.get_group("shard"))
    return square.sqrt()


def _in_fp32(gradient: torch.Tensor) -> torch.Tensor:
    """What has the norm of ``gradient``: the norm itself where that would be told in bf16, as of gradients in bf16."""
    if gradient.dtype == torch.float32:
        return gradient
    norm: torch.Tensor = torch.linalg.vector_norm(gradient, dtype=torch.float32)
    return norm


def _parts(gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What torch can tell the norm of to 1e-6: on a CPU it adds squares up one behind the other, in fp32, and the norm
    of 1e7 elements is off by 4e-4, that of 1e8 by 1e-2; a GPU adds them up in trees."""
    return gradient.reshape(-1).split(_PART) if gradient.device.type == "cpu" else (gradient,)
