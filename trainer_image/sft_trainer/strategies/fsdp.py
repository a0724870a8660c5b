"""FSDP2: parameters, gradients and optimizer state sharded over the processes."""

import functools

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from sft_api.trainer_config import TrainerConfig
from sft_trainer.models.causal_lm import CausalLM
from sft_trainer.models.weights import initialize_buffers


def build_model(config: TrainerConfig, model: CausalLM, device: torch.device) -> CausalLM:
    """``model`` (on the meta device) sharded and on ``device``, its parameters allocated but not filled.

    A collective call. Order: activation checkpointing, shard every block and then the root, allocate. Embedding and
    head are in the root unit, so that tied ones stay tied.
    """
    if config.spec.training.activation_checkpointing == "full":
        for block in model.blocks:
            # Inside the block's forward, so that FSDP's own hooks stay outside of what is recomputed.
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    fsdp = config.spec.strategy.fsdp if config.spec.strategy else None
    mesh = _mesh(device, config.plan.processes, config.plan.shard_degree)
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if config.plan.precision == "bf16" else None, reduce_dtype=torch.float32
    )
    for block in model.blocks:
        fully_shard(
            block,
            mesh=mesh,
            mp_policy=policy,
            reshard_after_forward=fsdp.reshard_after_forward if fsdp else True,
        )
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    _sum_gradients(model)
    model.to_empty(device=device)
    initialize_buffers(model)
    return model.train()


def _mesh(device: torch.device, processes: int, shard_degree: int) -> DeviceMesh:
    if shard_degree == processes:
        return init_device_mesh(device.type, (processes,), mesh_dim_names=("shard",))
    return init_device_mesh(
        device.type, (processes // shard_degree, shard_degree), mesh_dim_names=("replicate", "shard")
    )


def _sum_gradients(model: nn.Module) -> None:
    """Gradients are summed over processes, never averaged: the loss is divided by the global token count already."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def clip_gradients(model: nn.Module, max_norm: float) -> torch.Tensor:
    """Scale all gradients so that their global norm is at most ``max_norm`` (0: leave them); returns the norm before.

    A collective call; the norm is the same scalar on every process.
    """
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    if max_norm > 0:
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)
    return norm
