"""The whole estimate of a GPU's memory beside steps of the strategy itself, on tensors without memory.

The sizes are those of real models but for the number of layers, the processes those of a real run: none of it takes
memory, and a collective of a group that is only pretended returns at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from sft_api.known_models import known_configs
from sft_api.memory import PACKED_AT_ONCE, MemoryEstimate, estimate, sizes_of
from sft_api.model_config import shape_of
from sft_api.trainer_config import TrainerConfig
from sft_trainer import eight_bits, loss, rounded_adamw
from sft_trainer.data.feed import BinTensors
from sft_trainer.loss import PRODUCTS, Logits
from sft_trainer.models import mxfp4, nf4, packed_rows
from sft_trainer.models.attention import Boundaries, register
from sft_trainer.models.causal_lm import CausalLM
from sft_trainer.models.documents_told import keep_documents_apart
from sft_trainer.models.experts import kernel_options
from sft_trainer.models.lora import add_adapters
from sft_trainer.models.packed_rows import Format
from sft_trainer.models.tracking import LiveBytes, count_attention
from sft_trainer.strategies.fsdp import FsdpStrategy, sharding
from sft_trainer.strategies.fsdp import strategy as strategy_module
from sft_trainer.strategies.fsdp.fitting import estimate_blueprint
from sft_trainer.topology import Topology
from sft_trainer.trainable import trainable_of
from sft_trainer.versions import fake_tensors
from tests.parity.runs import manifest, resolve


@pytest.fixture
def world() -> Iterator[Any]:
    """Forms a group of so many processes, all but this one pretended."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def form(size: int, shard: int, sequence: int) -> Topology:
        dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
        return Topology(
            rank=0,
            local_rank=0,
            world_size=size,
            local_world_size=size,
            replicate=size // shard,
            shard=shard // sequence,
            sequence=sequence,
        )

    yield form
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def without_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """What looks at the value of a tensor is left out: here it has none."""

    def handed_over(ctx: Any, *_: Any) -> Any:
        gradients, ctx.gradients = ctx.gradients, None
        return *gradients, *[None] * (len(ctx.needs_input_grad) - len(gradients))

    monkeypatch.setattr(loss._LinearCrossEntropy, "backward", staticmethod(handed_over))
    monkeypatch.setattr(sharding, "initialize_buffers", lambda model: None)
    # As many weights are unpacked, and updated, at a time as on a GPU; unpacked are the first ones
    monkeypatch.setattr(packed_rows, "_AT_ONCE", {})
    for module in (mxfp4, nf4):
        monkeypatch.setattr(module, "some_rows", first_rows)
    monkeypatch.setattr(rounded_adamw, "_SLICE_ELEMENTS", {})
    # Tables that were remembered here would be without values for all that this process runs afterwards
    monkeypatch.setattr(eight_bits, "_tables", eight_bits._tables.__wrapped__)
    monkeypatch.setattr(strategy_module, "part_of", lambda bin_, *_: bin_)
    allocate = CausalLM.to_empty

    def allocated(model: CausalLM, *, device: torch.device) -> CausalLM:
        # Tensors without memory may be remembered by what made them, and then take no other's place.
        left = [
            (module, name, held)
            for module in model.modules()
            for name, held in module.named_parameters(recurse=False, remove_duplicate=False)
            if not isinstance(held, DTensor)
        ]
        for module, name, _ in left:
            setattr(module, name, None)
        if isinstance(model, FSDPModule):
            allocate(model, device=device)
        for module, name, held in left:
            made = torch.empty_like(held, device=device)
            setattr(module, name, torch.nn.Parameter(made, held.requires_grad))
        return model

    monkeypatch.setattr(CausalLM, "to_empty", allocated)


FEW_TIMES = 2


def first_rows(source: torch.Tensor, target: torch.Tensor, columns: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """``some_rows`` up to the second time: nothing stays for the next, so these take as much as all."""
    at_once = packed_rows._AT_ONCE.get(source.device.type, PACKED_AT_ONCE)
    enough = FEW_TIMES * max(1, at_once // columns)
    return packed_rows.some_rows(source[:enough], target[:enough], columns)


def a_bin(tokens: int, sequence: int) -> BinTensors:
    """What one of the processes that share the tokens of a document has of it."""
    numbers = torch.zeros(tokens // sequence, dtype=torch.long)
    return BinTensors(numbers, numbers, Boundaries.of([tokens]), numbers, numbers, seed=1)


ONCE = {"strategy": {"fsdp": {"reduceGradients": "oncePerStep"}}}
KEPT = {"strategy": {"fsdp": {"reshardAfterForward": False}}}
HALF = {"training": {"precision": "bf16", "parameterDtype": "bf16", "optimizer": {"stateDtype": "bf16"}}}
EIGHTH = {"training": {**HALF["training"], "optimizer": {"stateDtype": "int8"}}}
MUON = {"training": {"optimizer": {"type": "muon"}}}
NF4 = {"lora": {"rank": 16, "basePrecision": "nf4"}}
MXFP4 = {"lora": {"rank": 16, "basePrecision": "mxfp4"}}
EXPERTS = {"rank": 16, "expertRank": 8, "targetModules": ["all-linear", "experts"]}
CASES: dict[str, tuple[str, int, int, int, int, dict[str, Any]]] = {
    # Model, layers, tokens, processes, shard degree, spec
    # Of fewer tokens the end of the backward pass takes more
    "8B, the loss": ("meta-llama/Llama-3.1-8B", 2, 8192, 8, 8, {}),
    "8B, activations": ("meta-llama/Llama-3.1-8B", 3, 16384, 8, 8, {}),
    "8B, one block at a time": (
        "meta-llama/Llama-3.1-8B",
        3,
        16384,
        8,
        8,
        {"training": {"activationCheckpointing": "full"}},
    ),
    "8B, adapters": ("meta-llama/Llama-3.1-8B", 3, 8192, 4, 4, {"lora": {"rank": 16}}),
    "8B, adapters, alone": ("meta-llama/Llama-3.1-8B", 3, 8192, 1, 1, {"lora": {"rank": 16}}),
    # The base is then gathered, as it is computed with otherwise than it is held
    "8B, adapters of a base in fp32, alone": (
        "meta-llama/Llama-3.1-8B",
        3,
        8192,
        1,
        1,
        {"lora": {"rank": 16, "basePrecision": "fp32"}},
    ),
    # Of a linear layer the 4 bits are held and gathered, and one whole matrix is there where it is multiplied with
    "8B, adapters of a base in 4 bits, alone": ("meta-llama/Llama-3.1-8B", 6, 4096, 1, 1, NF4),
    "8B, adapters of a base in 4 bits": ("meta-llama/Llama-3.1-8B", 6, 8192, 4, 4, NF4),
    "8B, a base in 4 bits with little": ("meta-llama/Llama-3.1-8B", 12, 64, 4, 4, NF4),
    "8B, a base in 4 bits, in fp32": (
        "meta-llama/Llama-3.1-8B",
        6,
        4096,
        4,
        4,
        {**NF4, "training": {"precision": "fp32"}},
    ),
    "8B, a base in 4 bits that is all gathered at once": ("meta-llama/Llama-3.1-8B", 6, 4096, 4, 4, {**KEPT, **NF4}),
    "8B, a base in 4 bits, some of it again": (
        "meta-llama/Llama-3.1-8B",
        6,
        4096,
        1,
        1,
        {**NF4, "training": {"activationCheckpointing": "selective"}},
    ),
    "8B, a base in 4 bits, one block at a time": (
        "meta-llama/Llama-3.1-8B",
        6,
        4096,
        1,
        1,
        {**NF4, "training": {"activationCheckpointing": "full"}},
    ),
    "8B, a base in 4 bits, of which a layer is trained": (
        "meta-llama/Llama-3.1-8B",
        6,
        4096,
        4,
        4,
        {**NF4, "training": {"trainableModules": ["layers.5"]}},
    ),
    "8B, all gathered at once": ("meta-llama/Llama-3.1-8B", 6, 4096, 8, 8, KEPT),
    "8B, gathered with much to compute": ("meta-llama/Llama-3.1-8B", 6, 16384, 8, 8, KEPT),
    "1B, gathered alone": ("meta-llama/Llama-3.2-1B", 8, 4096, 1, 1, KEPT),
    "1B, gathered, and gradients of the whole model": (
        "meta-llama/Llama-3.2-1B",
        8,
        4096,
        8,
        8,
        {"strategy": {"fsdp": {"reduceGradients": "oncePerStep", "reshardAfterForward": False}}},
    ),
    "8B, gathered, adapters": ("meta-llama/Llama-3.1-8B", 6, 4096, 4, 4, {**KEPT, "lora": {"rank": 16}}),
    # No gradient comes to the layers before them, which keep nothing
    "8B, adapters of the last layers": (
        "meta-llama/Llama-3.1-8B",
        6,
        8192,
        4,
        4,
        {"lora": {"rank": 16, "targetModules": ["layers.4.mlp.down_proj", "layers.5.mlp.down_proj"]}},
    ),
    "7B, some of it again": (
        "Qwen/Qwen2.5-7B",
        3,
        16384,
        16,
        8,
        {"training": {"activationCheckpointing": "selective"}},
    ),
    "8B, shared tokens": (
        "meta-llama/Llama-3.1-8B",
        3,
        32768,
        8,
        8,
        {
            "training": {"activationCheckpointing": "selective"},
            "strategy": {"fsdp": {"sequenceParallelDegree": 4}},
            "compute": {"gpusPerNode": 0, "processesPerNode": 8},
        },
    ),
    "1B, gradients of the whole model": ("meta-llama/Llama-3.2-1B", 4, 4096, 8, 8, ONCE),
    "8B, the same with much to compute": ("meta-llama/Llama-3.1-8B", 4, 16384, 8, 8, ONCE),
    "8B, the same with little": ("meta-llama/Llama-3.1-8B", 2, 64, 8, 8, ONCE),
    "1B, the same with little": ("meta-llama/Llama-3.2-1B", 2, 64, 8, 4, ONCE),
    # Matrices are whole for a moment after the backward pass
    "8B, muon": ("meta-llama/Llama-3.1-8B", 2, 8192, 8, 8, MUON),
    "8B, muon, alone": ("meta-llama/Llama-3.1-8B", 2, 64, 1, 1, MUON),
    "1B, muon and weights in bf16, replicas": (
        "meta-llama/Llama-3.2-1B",
        4,
        256,
        4,
        2,
        {"training": {**HALF["training"], "optimizer": {"type": "muon", "stateDtype": "bf16"}}},
    ),
    "30B of experts, muon": ("Qwen/Qwen3-30B-A3B", 2, 64, 4, 4, MUON),
    "0.6B, alone": ("Qwen/Qwen3-0.6B", 6, 8192, 1, 1, {}),
    "30B of experts, activations": ("Qwen/Qwen3-30B-A3B", 2, 8192, 16, 16, {}),
    "20B of experts with biases, and sinks": ("openai/gpt-oss-20b", 2, 8192, 16, 16, {}),
    "1B of 7B, one block at a time": (
        "allenai/OLMoE-1B-7B-0924",
        3,
        8192,
        8,
        8,
        {"training": {"activationCheckpointing": "full"}},
    ),
    "8x7B, some of it again": (
        "mistralai/Mixtral-8x7B-v0.1",
        2,
        4096,
        8,
        8,
        {"training": {"activationCheckpointing": "selective"}},
    ),
    # Beside what experts compute much is unpacked
    "30B of experts in 4 bits, alone": ("Qwen/Qwen3-30B-A3B", 4, 8192, 1, 1, NF4),
    "30B of experts in 4 bits": ("Qwen/Qwen3-30B-A3B", 4, 4096, 4, 4, NF4),
    "30B of experts in 4 bits, with little": ("Qwen/Qwen3-30B-A3B", 4, 256, 4, 4, NF4),
    "20B of experts in 4 bits, one block at a time": (
        "openai/gpt-oss-20b",
        6,
        8192,
        1,
        1,
        {**NF4, "training": {"activationCheckpointing": "full"}},
    ),
    "20B of experts as they are published": ("openai/gpt-oss-20b", 4, 4096, 2, 2, MXFP4),
    "8x7B, experts in 4 bits, some of it again": (
        "mistralai/Mixtral-8x7B-v0.1",
        4,
        4096,
        2,
        2,
        {**NF4, "training": {"activationCheckpointing": "selective"}},
    ),
    # Of all experts adapters are trained, and gathered, whoever computes with them
    "30B of experts with adapters": ("Qwen/Qwen3-30B-A3B", 4, 8192, 4, 4, {"lora": EXPERTS}),
    "30B of experts in 4 bits with adapters": (
        "Qwen/Qwen3-30B-A3B",
        6,
        4096,
        1,
        1,
        {"lora": {**EXPERTS, "expertRank": 4, "basePrecision": "nf4"}},
    ),
    "8B, weights in bf16": ("meta-llama/Llama-3.1-8B", 3, 4096, 2, 2, HALF),
    "8B, weights in bf16, alone": ("meta-llama/Llama-3.1-8B", 3, 1024, 1, 1, HALF),
    "1B, moments in 8 bits": ("meta-llama/Llama-3.2-1B", 4, 1024, 2, 2, EIGHTH),
    # The gradient of tied weights is made twice, and added up
    "1B, weights in bf16, alone": ("meta-llama/Llama-3.2-1B", 2, 256, 1, 1, HALF),
    # Sums of a replica are in fp32 until the last micro-batch, and so are those of the whole model
    "1B, weights in bf16, replicas": ("meta-llama/Llama-3.2-1B", 4, 256, 2, 1, HALF),
    "1B, weights in bf16, gradients of the whole model": ("meta-llama/Llama-3.2-1B", 4, 256, 8, 8, {**HALF, **ONCE}),
    # Logits that are bent by a cap: one chunk would hold them if they were not
    "1B, capped logits": ("google/gemma-3-1b-pt", 1, 500, 1, 1, {}),
    "0.6B, alone in fp32": ("Qwen/Qwen3-0.6B", 6, 1024, 1, 1, {"training": {"precision": "fp32"}}),
}


@pytest.fixture
def most_held(world: Any, without_values: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The most bytes that steps of a model hold, on one process of the plan of a configuration."""

    def most(config: TrainerConfig, known: Mapping[str, Any], logits: Logits = PRODUCTS) -> int:
        plan, tokens = config.plan, config.plan.max_tokens_per_micro_batch or 0
        topology = world(plan.processes, plan.shard_degree, plan.sequence_parallel)
        mesh, group = topology.parameter_mesh("cpu"), topology.process_group("sequence")
        monkeypatch.setattr(Topology, "parameter_mesh", lambda *_: mesh)
        monkeypatch.setattr(Topology, "process_group", lambda *_: group)
        bin_ = a_bin(tokens, plan.sequence_parallel)
        live = LiveBytes()
        with fake_tensors(), live.watching():
            huggingface = model_of(known)
            count_attention(huggingface)
            if config.spec.lora:
                add_adapters(huggingface, config.spec.lora, config.spec.training.trainable_modules or ())
            model = CausalLM(huggingface, logits=logits)
            strategy = FsdpStrategy(config, model, trainable_of(config), topology, torch.device("cpu"))
            strategy.forward_backward([bin_], tokens)
            strategy.apply(1e-5, 0.0, torch.ones(()), torch.ones((), dtype=torch.bool))
            # Gradients are there from the first micro-batch of a step on, and moments after it.
            strategy.forward_backward([bin_, bin_], tokens)
        return live.most

    return most


def model_of(known: Mapping[str, Any]) -> Any:
    """The model of a config.json, on the meta device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    register()
    kind = {key: value for key, value in known.items() if key != "model_type"}
    with torch.device("meta"):
        config = AutoConfig.for_model(known["model_type"], **kind)
        return AutoModelForCausalLM.from_config(config, **kernel_options(config))


def planned(tokens: int, processes: int, shard: int, spec: dict[str, Any]) -> TrainerConfig:
    """A run of so many tokens a micro-batch."""
    config = resolve(manifest(Path("/inputs"), Path("/store"), **spec))
    given = {
        "precision": config.spec.training.precision or "bf16",
        "sequence_parallel": config.spec.sequence_parallel,
        "processes": processes,
        "shard_degree": shard,
        "max_tokens_per_micro_batch": tokens,
    }
    return config.model_copy(update={"plan": config.plan.model_copy(update=given)})


@pytest.mark.parametrize("case", CASES)
def test_the_estimate_is_within_ten_percent_of_what_steps_hold(case: str, most_held: Any) -> None:
    name, layers, tokens, processes, shard, spec = CASES[case]
    known = {**known_configs()[name], "num_hidden_layers": layers}
    cap = 30.0 if "capped" in case else None
    known |= {"final_logit_softcapping": cap} if cap else {}
    config = planned(tokens, processes, shard, spec)

    held = most_held(config, known, Logits(cap=cap))

    shape = shape_of(known)
    assert shape is not None
    reckoned = estimate(shape, config.spec, config.plan)
    assert reckoned.allocated == pytest.approx(held, rel=0.1), reckoned


def test_layers_that_stay_gathered_leave_what_a_bin_is_seen_to_take_as_it_is(most_held: Any) -> None:
    known = {**known_configs()["meta-llama/Llama-3.1-8B"], "num_hidden_layers": 4}
    shape = shape_of(known)
    assert shape is not None

    def above(spec: dict[str, Any]) -> int:
        """What is reckoned of two bins at once, from steps of one, above what they hold."""
        seen = []
        for tokens in (4096, 8192):
            config = planned(tokens, 8, 8, spec)
            seen.append(most_held(config, known))
            dist.destroy_process_group()
        sizes, reckoned = sizes_of(shape, config.spec), estimate(shape, config.spec, config.plan)
        stay = 2 * (sizes.parameters if spec else sizes.root)
        once = reckoned.parameters + reckoned.gradients + reckoned.optimizer + stay
        return once + 2 * (seen[0] - once) - seen[1]

    # What is there for a moment counts for each bin, as ever; what stays gathered does not
    usual = above({})
    assert usual > 0
    assert above(KEPT) == pytest.approx(usual, rel=0.05)


@pytest.mark.parametrize("packed", [nf4.NF4, mxfp4.MXFP4], ids=["nf4", "mxfp4"])
def test_to_unpack_the_first_rows_takes_as_much_as_to_unpack_all(
    packed: Format, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns, rows = 512, 8
    monkeypatch.setattr(packed_rows, "_AT_ONCE", {"cpu": rows * columns})

    def besides(times: int) -> int:
        """The most bytes that are held beside what is packed, and unpacked."""
        live = LiveBytes()
        with fake_tensors(), live.watching():
            held = torch.empty((times * rows, packed.row_bytes(columns)), dtype=torch.uint8)
            values = packed.unpacked(held, torch.bfloat16)
        return live.most - held.nbytes - values.nbytes

    assert besides(FEW_TIMES) == besides(4 * FEW_TIMES)
    assert besides(FEW_TIMES) > 4 * rows * columns


# Of GLM-4.5-Air, whose first block has one wide MLP
GLM = {
    "model_type": "glm4_moe",
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "n_routed_experts": 128,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "vocab_size": 151552,
    "attention_bias": True,
}
QWEN = {**known_configs()["Qwen/Qwen3-30B-A3B"], "num_hidden_layers": 4, "intermediate_size": 6144}
UNEQUAL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a first block without experts": (GLM, {}),
    "every second block with experts": ({**QWEN, "decoder_sparse_step": 2}, {}),
    "all gathered at once": (
        {**QWEN, "decoder_sparse_step": 2},
        {"strategy": {"fsdp": {"reshardAfterForward": False}}},
    ),
}


@pytest.mark.parametrize("case", UNEQUAL)
def test_blocks_that_differ_are_all_reckoned_as_they_are(case: str, most_held: Any) -> None:
    known, spec = UNEQUAL[case]
    config = planned(16384, 64, 64, spec)

    reckoned = estimate_blueprint(config, CausalLM(model_of(known)), trainable_of(config))

    assert reckoned.allocated == pytest.approx(most_held(config, known), rel=0.1), reckoned
    # Who reads no more than the config says the same
    assert by_formula(config, known).total == pytest.approx(reckoned.total, rel=0.02)


def by_formula(config: TrainerConfig, known: Mapping[str, Any]) -> MemoryEstimate:
    shape = shape_of(known)
    assert shape is not None
    return estimate(shape, config.spec, config.plan)


# Of Qwen3-Next 80B, of whose layers every fourth has attention
DELTA = {
    "model_type": "qwen3_next",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "vocab_size": 151936,
}
SEEN: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {
    "layers of linear attention": (DELTA, 8192, {}),
    "with many tokens": (DELTA, 65536, {"training": {"activationCheckpointing": "selective"}}),
    "with adapters": (DELTA, 8192, {"lora": {"rank": 16}}),
}


@pytest.mark.parametrize("case", SEEN)
def test_what_the_trainer_sees_of_layers_of_linear_attention_the_formula_says(case: str) -> None:
    known, tokens, spec = SEEN[case]
    config = planned(tokens, 64, 64, spec)
    huggingface = model_of(known)
    keep_documents_apart(huggingface)
    if config.spec.lora:
        add_adapters(huggingface, config.spec.lora)

    seen = estimate_blueprint(config, CausalLM(huggingface), trainable_of(config))

    assert by_formula(config, known).total == pytest.approx(seen.total, rel=0.05)
