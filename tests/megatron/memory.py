"""What layers and steps of the strategy Megatron hold on tensors without memory, of processes that are pretended.

Each function is called in a process of its own: the shim stays, and so do the stand-ins.
"""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sft_api.known_models import known_configs
from sft_api.v1alpha1.megatron import MegatronSpec
from sft_api.v1alpha1.transformer_config import TransformerConfigOverrides
from sft_trainer import loss
from sft_trainer.models.attention import Boundaries, boundary_arguments, register
from sft_trainer.models.causal_lm import CausalLM
from sft_trainer.models.exchange import shared_tokens
from sft_trainer.models.tracking import LiveBytes, _attention, count_attention
from sft_trainer.topology import Topology
from sft_trainer.trainable import trainable_of
from sft_trainer.versions import fake_tensors
from tests.megatron import shim
from tests.parity.runs import manifest, resolve

TOKENS = 512
SIZES = {
    "vocab_size": 1000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}
OF_EXPERTS = {
    **SIZES,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
}


def config_of(kind: str) -> dict[str, Any]:
    """Of a model of type ``kind`` whose layers are looked at."""
    head = {"head_dim": 128 if kind == "qwen3" else 64}
    return {"model_type": kind, **(OF_EXPERTS if kind == "qwen3_moe" else SIZES), **head}


class _Norm(torch.autograd.Function):
    """One kernel, as on a GPU: keeps what comes in, and a number for each token."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, _: Any, weight: torch.Tensor, eps: float) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight, hidden.new_empty(hidden.shape[:-1], dtype=torch.float32))
        return hidden * 1

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return gradients[0] * 1, None, torch.zeros_like(ctx.saved_tensors[1]), None


def _handed_over(ctx: Any, *_: Any) -> Any:
    gradients, ctx.gradients = ctx.gradients, None
    return *gradients, *[None] * (len(ctx.needs_input_grad) - len(gradients))


def _allocated(stage: Any, *, device: Any) -> Any:
    """``to_empty``, which replaces no tensor that has no memory."""
    for module in stage.modules():
        for name, parameter in [*module.named_parameters(recurse=False)]:
            new = torch.nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype))
            # What Megatron-Core has noted on it.
            new.__dict__.update({key: value for key, value in vars(parameter).items() if key not in vars(new)})
            setattr(module, name, new)
    return stage


def _pretend(processes: int, tensor: int, sequence: int = 1) -> Topology:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=processes, store=FakeStore())
    return Topology(
        rank=0,
        local_rank=0,
        world_size=processes,
        local_world_size=processes,
        shard=processes // tensor // sequence,
        sequence=sequence,
        tensor=tensor,
    )


def layers(cases: list[tuple[str, int, int, bool, str, dict[str, Any], str]]) -> list[tuple[float, float]]:
    """Bytes for each token here that a layer keeps, and the most besides, by ``kind``, degrees of tensor and context
    parallelism, whether tokens are shared between matrices, precision, ``transformerConfigOverrides``, and what is
    forgotten."""
    shim.install()
    return [_layer(*case) for case in cases]


def _layer(
    kind: str, tensor: int, context: int, shares: bool, precision: str, overrides: dict[str, Any], how: Any
) -> tuple[float, float]:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import initialize_rng_tracker
    from transformers import AutoConfig

    from sft_trainer.strategies.megatron import layers as module
    from sft_trainer.strategies.megatron import layout
    from sft_trainer.strategies.megatron.stage import Stage

    module.rms_norm = _Norm.apply
    given = config_of(kind)
    sizes = layout.Sizes.of(AutoConfig.for_model(**given))
    if not sizes.experts:  # what attention takes of a GPU; experts are sorted by values, which takes real tensors
        module.document_attention = _attention
    parallel_state.destroy_model_parallel()
    topology = _pretend(tensor * context, tensor, context)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    parallel_state.initialize_model_parallel(
        tensor,
        context_parallel_size=context,
        expert_tensor_parallel_size=1 if sizes.experts else None,
        create_gloo_process_groups=False,
    )
    initialize_rng_tracker(inference_rng_tracker=True)
    spec = MegatronSpec(
        tensor_parallel_degree=tensor,
        context_parallel_degree=context,
        sequence_parallel=shares,
        transformer_config_overrides=TransformerConfigOverrides(**overrides),
    )
    config = module.transformer_config(AutoConfig.for_model(**given), sizes, topology, dtype, spec)
    with nullcontext() if sizes.experts else fake_tensors():
        return _watched(Stage(config, sizes, topology, [None, None], how), topology, shares, dtype, sizes, LiveBytes())


def _watched(
    stage: Any, topology: Topology, shares: bool, dtype: torch.dtype, sizes: Any, live: LiveBytes
) -> tuple[float, float]:
    from megatron.core import parallel_state

    from sft_trainer.strategies.megatron.layers import Documents

    for parameter in stage.parameters():
        parameter.detach().normal_(0, 0.02)
    between = TOKENS // topology.tensor if shares else TOKENS
    given = torch.ones(between, 1, sizes.width, dtype=dtype).requires_grad_()
    cos, sin = (torch.ones(1, TOKENS, sizes.head_size, dtype=dtype) for _ in range(2))
    boundaries = boundary_arguments(Boundaries.of([TOKENS * topology.sequence]))
    if topology.sequence > 1:
        boundaries["shared_tokens"] = shared_tokens(parallel_state.get_context_parallel_group(), 0)
    documents = Documents(qkv_format="sbhd", boundaries=boundaries, cos=cos, sin=sin)
    for held in (given, cos, sin, *stage.parameters(), *stage.buffers()):
        live.add(held)
    with live.watching():
        before = live.reset()
        hidden = given * 1
        output, _ = stage._forwards[0](hidden, attention_mask=None, packed_seq_params=documents)
        del hidden
        kept = live.now() - before - output.nbytes
        torch.autograd.grad(output, [given], torch.ones_like(output))
    # One buffer for all layers, in which the tokens of all are gathered, is no part of one.
    buffer = TOKENS * sizes.width * dtype.itemsize if shares else 0
    return (kept - buffer) / TOKENS, (live.most - before - kept) / TOKENS


def steps(cases: list[tuple[str, int, int, int, dict[str, Any], str]]) -> list[tuple[int, Any, Any]]:
    """The most that steps hold, with the configuration and the model's: by model, layers, tokens, processes, spec and
    precision."""
    shim.install()
    return [_step(*case) for case in cases]


def _step(
    name: str, layers: int, tokens: int, processes: int, spec: dict[str, Any], precision: str
) -> tuple[int, Any, Any]:
    from megatron.core import parallel_state
    from transformers import AutoConfig, AutoModelForCausalLM

    from sft_trainer.data.feed import BinTensors
    from sft_trainer.strategies.megatron import layers as module
    from sft_trainer.strategies.megatron import strategy as strategies
    from sft_trainer.strategies.megatron.stage import Stage

    module.rms_norm, module.document_attention = _Norm.apply, _attention
    strategies.initialize_buffers = lambda model: None
    loss._LinearCrossEntropy.backward = staticmethod(_handed_over)
    Stage.to_empty = _allocated  # type: ignore[assignment]
    known = {**known_configs()[name], "num_hidden_layers": layers}
    compute = {"gpusPerNode": 0, "processesPerNode": processes}
    config = resolve(manifest(Path("/inputs"), Path("/store"), compute=compute, **spec))
    given = {"precision": precision, "max_tokens_per_micro_batch": tokens}
    config = config.model_copy(update={"plan": config.plan.model_copy(update=given)})
    parallel_state.destroy_model_parallel()
    topology = _pretend(processes, config.plan.tensor_parallel, config.plan.sequence_parallel)
    # The part of the tokens that this process has of a bin.
    strategies.part_of = lambda bin_, *_: bin_
    numbers = torch.zeros(tokens // topology.sequence, dtype=torch.long)
    bin_ = BinTensors(numbers, numbers, Boundaries.of([tokens]), numbers, numbers, seed=1)
    register()
    live = LiveBytes()
    with fake_tensors(), live.watching():
        with torch.device("meta"):
            huggingface = AutoModelForCausalLM.from_config(AutoConfig.for_model(**known))
        count_attention(huggingface)
        strategy = strategies.MegatronStrategy(
            config, CausalLM(huggingface), trainable_of(config), topology, torch.device("cpu")
        )
        for _ in range(2):
            strategy.forward_backward([bin_], tokens)
            strategy.apply(1e-5, 0.0, torch.ones(()), torch.ones((), dtype=torch.bool))
        # Gradients are there from the first micro-batch of a step on, and moments after it.
        strategy.forward_backward([bin_, bin_], tokens)
    return live.most, config, known
