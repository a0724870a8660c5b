"""What the formula says of a block's memory, beside what torch keeps of one on tensors without memory."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from sft_api.block_memory import NOTHING, BlockMemory, block_memory
from sft_api.layers import (
    adapted_of,
    linear_of,
    packed_of,
    some_parameters,
    trained_in_matrices_of_blocks,
    trained_in_rows_of,
)
from sft_api.memory import MOMENT_BLOCK
from sft_api.model_config import shape_of
from sft_api.model_shape import ModelShape
from sft_trainer.models import convolution, gated_delta, quantised, state_space, tracking
from sft_trainer.models.activations import checkpoint_activations
from sft_trainer.models.attention import IMPLEMENTATION, register
from sft_trainer.models.causal_lm import CausalLM, _class_for
from sft_trainer.models.documents_told import keep_documents_apart
from sft_trainer.models.experts import keep_corrections, kernel_options
from sft_trainer.models.lora import adapted_layers, add_adapters, is_adapter, linear_layers
from sft_trainer.models.tracking import track_blocks
from sft_trainer.optim import has_blocks, matrices_of
from tests.architectures import accepted, small_config
from tests.unit.cli.jobs import job
from tests.unit.trainer.published_configs import PUBLISHED, PUBLISHED_OF_EXPERTS

TOKENS = 512
SIZES = {
    "vocab_size": 1000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}
EXPERTS = {"num_experts": 32, "num_local_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 256}
_ROUTED = {"n_routed_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 256, "first_k_dense_replace": 1}
_SHARED = {**EXPERTS, "shared_expert_intermediate_size": 320}
_LATENT = {"q_lora_rank": 384, "kv_lora_rank": 128, "qk_rope_head_dim": 32, "qk_nope_head_dim": 64, "v_head_dim": 64}
_LATENT_HEADS = {**_LATENT, "head_dim": 32, "num_key_value_heads": 16, "n_group": 4, "topk_group": 2}
_DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 64,
    "head_dim": 128,
}
_MAMBA_2 = {
    "mamba_n_heads": 32,
    "mamba_d_head": 64,
    "mamba_n_groups": 2,
    "mamba_d_state": 64,
}
_BESIDE = {**_MAMBA_2, "mamba_d_ssm": 1536, "mamba_n_heads": 24, "mamba_n_groups": 1}
_ALONE = {
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"],
    "num_hidden_layers": 4,
    "mamba_num_heads": 32,
    "mamba_head_dim": 64,
    "n_groups": 4,
    "ssm_state_size": 64,
    "moe_shared_expert_intermediate_size": 320,
}
_HANDING = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 64,
    "vocab_size_per_layer_input": 100,
}
_CONVOLUTIONS = {"layer_types": ["conv", "full_attention"]}
OTHERS: dict[str, dict[str, Any]] = {
    **{kind: {} for kind in ("cwm", "ernie4_5", "exaone4", "gemma", "granite", "hunyuan_v1_dense", "internlm3")},
    **{kind: {} for kind in ("glm", "glm4", "ministral", "ministral3", "olmo3")},
    **{kind: {} for kind in ("cohere", "cohere2", "gemma2", "granite_swa", "iquestcoder", "seed_oss")},
    **{kind: {**EXPERTS, "intermediate_size": 256} for kind in ("granitemoe", "mellum")},
    "gemma4_text": _HANDING,
    "gemma4_text of experts": {
        **EXPERTS,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "enable_moe_block": True,
        "top_k_experts": 4,
        "hidden_size_per_layer_input": 0,
        "attention_k_eq_v": True,
        "global_head_dim": 128,
        "num_global_key_value_heads": 2,
    },
    "gemma4_unified_text": {**_HANDING, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0},
    "granitemoeshared": {**EXPERTS, "intermediate_size": 256, "shared_intermediate_size": 320},
    "hunyuan_v1_moe": {**EXPERTS, "intermediate_size": 256, "moe_topk": [4, 4]},
    # Every second block has experts, every fourth no positions.
    "llama4_text": {
        **EXPERTS,
        "intermediate_size": 256,
        "intermediate_size_mlp": 2816,
        "interleave_moe_layer_step": 2,
        "num_hidden_layers": 8,
    },
    "mistral4": {**_ROUTED, **_LATENT_HEADS, "n_shared_experts": 1, "head_dim": 96},
    "solar_open": {**_ROUTED, "n_shared_experts": 1},
    "minicpm3": {**_LATENT, "num_key_value_heads": 16},
    "stablelm": {},
    "nemotron": {},
    "glm4v_moe_text": {
        **_ROUTED,
        "n_shared_experts": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 4, 4]},
    },
    "youtu": {**_LATENT, "head_dim": 32, "num_key_value_heads": 16},
    "lfm2": _CONVOLUTIONS,
    "lfm2_moe": {**_CONVOLUTIONS, **EXPERTS, "num_dense_layers": 1},
    "bamba": {**_MAMBA_2, "attn_layer_indices": [1]},
    "falcon_h1": _BESIDE,
    "granitemoehybrid": {
        **_MAMBA_2,
        **EXPERTS,
        "intermediate_size": 256,
        "shared_intermediate_size": 320,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "nemotron_h": {**EXPERTS, **_ALONE, "n_routed_experts": 32},
    "minimax_m2": {**EXPERTS, "intermediate_size": 256},
    "qwen2_moe": {**_SHARED, "mlp_only_layers": [0]},
    "qwen3_moe": {**EXPERTS, "intermediate_size": 2816, "decoder_sparse_step": 2},
    "glm4_moe": {**_ROUTED, "use_qk_norm": True, "attention_bias": True},
    "dots1": {**_ROUTED, "n_shared_experts": 2},
    "exaone_moe": {**EXPERTS, "first_k_dense_replace": 1},
    "ernie4_5_moe": {"moe_num_experts": 32, "moe_k": 4, "moe_intermediate_size": 256},
    "deepseek_v2": {**_ROUTED, **_LATENT_HEADS, "q_lora_rank": None},
    "deepseek_v3": {**_ROUTED, **_LATENT_HEADS},
    "glm4_moe_lite": {**_ROUTED, **_LATENT_HEADS, "v_head_dim": 96},
    "olmo_hybrid": _DELTA,
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": {**_DELTA, **_SHARED},
    "qwen3_next": {**_DELTA, **_SHARED, "mlp_only_layers": [0]},
}
"""Other types with a formula; of many the first block differs from the second. Of some there are several models."""
OF_EXPERTS = ["mixtral", "olmoe", "qwen3_moe", "qwen3_vl_moe_text", "gpt_oss"]
FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "phi3", "smollm3", "olmo2", "gemma3_text", *OF_EXPERTS]


def model_of(kind: str, **options: Any) -> CausalLM:
    kind = kind.partition(" ")[0]
    head = {} if kind == "phi3" else {"head_dim": 128 if kind == "qwen3" else 64}
    mixture = {**EXPERTS, "intermediate_size": 256} if kind in OF_EXPERTS else {}
    if kind == "gpt_oss":
        # As wide as the model, as all that are published: in its attention less is held than in its experts.
        mixture["intermediate_size"] = SIZES["hidden_size"]
    if kind == "qwen3_vl_moe_text":
        mixture["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [16, 8, 8]}
    given = {**SIZES, **head, **mixture, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **options}
    return made_of(kind, given)


def made_of(kind: str, given: dict[str, Any]) -> CausalLM:
    """A model of ``kind`` on the meta device, whose config has what is ``given``."""
    from transformers import AutoConfig

    register()
    config = AutoConfig.for_model(kind, **given)
    with torch.device("meta"):
        made = _class_for(config, config)(config, attn_implementation=IMPLEMENTATION, **kernel_options(config))
    keep_documents_apart(made)
    keep_corrections(made)
    return CausalLM(made)


def one_kind(*arguments: Any) -> BlockMemory:
    """What each block of a model takes, whose blocks are all alike."""
    ((seen, count),) = track_blocks(*arguments).items()
    assert count == SIZES["num_hidden_layers"]
    return seen


def both(kind: str, computed: torch.dtype = torch.bfloat16, **spec: Any) -> tuple[Any, Any]:
    """The block's memory by formula, and as it was seen."""
    asked = job(**spec).spec
    model = model_of(kind)
    huggingface: Any = model.huggingface
    shape = shape_of(huggingface.config.to_dict())
    assert shape is not None
    if asked.lora:
        add_adapters(huggingface, asked.lora)
    how = asked.training.activation_checkpointing

    def prepared(copied: CausalLM) -> None:
        if asked.quantised:
            packed = quantised.packed_weights(copied.huggingface, asked.quantised, is_adapter)
            formats = dict.fromkeys(packed, quantised.FORMATS[asked.quantised])
            quantised.pack_layers(copied.huggingface, formats, computed)
        checkpoint_activations(copied, how)

    seen = one_kind(
        model,
        computed,
        is_adapter if asked.lora else lambda name: True,
        TOKENS,
        prepared,
        asked.sequence_parallel,
    )
    adapted = adapted_of(shape, asked)[0]
    return block_memory(shape, asked, computed.itemsize, adapted, tokens=TOKENS), seen


WITH_BIASES = ("llama", "qwen3", "olmo2", "gemma3_text", "olmoe", "qwen3_moe", "qwen3_next", "qwen3_5_text")


@pytest.mark.parametrize(
    ("kind", "biased"), [*((kind, False) for kind in FAMILIES), *((kind, True) for kind in WITH_BIASES)]
)
def test_modules_and_their_parameters_are_those_of_transformers(kind: str, biased: bool) -> None:
    # Given a model, also with biases where its config can say so
    check_modules(model_of(kind, **({"attention_bias": True} if biased else {})).huggingface)


def check_modules(huggingface: Any) -> ModelShape:
    """The shape of a model, whose modules and parameters are those that the model has."""
    shape = shape_of(huggingface.config.to_dict())
    assert shape is not None

    own = {
        name: sum(parameter.numel() for parameter in module.parameters(recurse=False))
        for name, module in huggingface.named_modules()
    }

    blocks = enumerate(shape.blocks)
    inside = {f"model.layers.{number}.{name}": n for number, block in blocks for name, n in block.modules.items()}
    assert {name: number for name, number in own.items() if number and ".layers." in name} == inside
    ours = [name.rpartition(".")[0] for name, _ in huggingface.named_parameters()]
    told = [parameter.removesuffix(".weight") for parameter in some_parameters(shape)]
    firsts = tuple(f".layers.{shape.order.index(kind) if shape.kinds else 0}." for kind in range(len(shape.distinct)))
    assert {*told} == {name for name in ours if ".layers." not in name or any(first in name for first in firsts)}
    return shape


@pytest.mark.parametrize(
    "kind",
    [
        *("glm4", "deepseek_v3", "glm4_moe", "qwen2_moe", "olmo_hybrid", "qwen3_5_text", "qwen3_next"),
        *("cohere2", "falcon_h1", "granitemoehybrid", "lfm2_moe", "nemotron_h"),
        *("gemma4_text of experts", "hunyuan_v1_moe", "llama4_text", "nemotron", "stablelm"),
    ],
)
def test_layers_that_get_adapters_and_weights_in_4_bits_are_those_of_the_trainer(kind: str) -> None:
    huggingface: Any = model_of(kind, **OTHERS[kind]).huggingface
    shape, asked = shape_of(huggingface.config.to_dict()), job(lora={"rank": 8, "basePrecision": "nf4"}).spec
    assert shape is not None
    assert asked.lora
    parameters = dict(huggingface.named_parameters())

    linear, adapted = linear_of(shape, asked)
    packed = [
        (f"model.layers.{block}.{name}", rows * columns)
        for block, sizes in enumerate(packed_of(shape, asked))
        for name, (rows, columns) in sizes.items()
    ]

    assert {*linear} | {"lm_head"} == {*linear_layers(huggingface)[0]}
    assert {*adapted} == {*adapted_layers(huggingface, asked.lora)}
    names = quantised.packed_weights(huggingface, "nf4", is_adapter)
    assert dict(packed) == {name.removesuffix(".weight"): parameters[name].numel() for name in names}
    in_blocks = sum(each.numel() for name, each in parameters.items() if has_blocks(name, each))
    assert trained_in_rows_of(shape, job().spec, MOMENT_BLOCK) == in_blocks
    by_muon = sum(each.numel() for each in matrices_of(huggingface.base_model.layers))
    assert trained_in_matrices_of_blocks(shape, job().spec) == by_muon


_OTHER_WAYS = (
    *("qwen2_moe", "deepseek_v3", "olmo_hybrid", "qwen3_5_text", "qwen3_next"),
    *("cohere2", "falcon_h1", "gemma2", "gemma4_text", "granitemoehybrid", "lfm2_moe", "nemotron_h", "seed_oss"),
    *("gemma4_text of experts", "llama4_text", "nemotron"),
)


@pytest.mark.parametrize(
    ("kind", "how", "computed", "lora"),
    [
        *((kind, "none", torch.bfloat16, False) for kind in OTHERS),
        *((kind, how, torch.bfloat16, False) for kind in _OTHER_WAYS for how in ("selective", "full")),
        *((kind, "none", torch.float32, False) for kind in _OTHER_WAYS),
        *((kind, "none", torch.bfloat16, True) for kind in _OTHER_WAYS if not kind.startswith("gemma4")),
    ],
)
def test_each_kind_of_block_keeps_what_the_formula_says(kind: str, how: Any, computed: torch.dtype, lora: bool) -> None:
    # Given a model of few layers, of which some differ
    asked = job(training={"activationCheckpointing": how}, **({"lora": {"rank": 8}} if lora else {})).spec
    model = model_of(kind, **OTHERS[kind])
    shape = check_modules(model.huggingface)
    if asked.lora:
        add_adapters(model.huggingface, asked.lora)

    # When one block of each kind is looked at
    seen = track_blocks(
        model,
        computed,
        is_adapter if lora else lambda name: True,
        TOKENS,
        lambda copied: checkpoint_activations(copied, how),
    )

    # Then each takes what the formula says, in their order
    adapted = dict(zip(shape.order or (0, 0), adapted_of(shape, asked), strict=True))
    assert seen.total() == shape.layers
    kinds = [
        block_memory(block, asked, computed.itemsize, adapted[number], tokens=TOKENS)
        for number, block in enumerate(shape.distinct)
    ]
    for found, reckoned in zip(seen, dict.fromkeys(kinds), strict=True):
        assert reckoned.kept == pytest.approx(found.kept, rel=0.02)
        assert reckoned.kept + reckoned.working == pytest.approx(found.kept + found.working, rel=0.1)


_UNCOUNTED = ("afmoe",)
"""Of this mixture there is no formula."""
_COUNTED = [
    *PUBLISHED,
    *(each for each in PUBLISHED_OF_EXPERTS if each[0] not in _UNCOUNTED),
    # Scout, but for its number of layers
    ("llama4_text", {"num_hidden_layers": 4}),
]


@pytest.mark.parametrize(("kind", "options"), _COUNTED)
def test_blocks_of_published_sizes_take_what_the_formula_says(kind: str, options: dict[str, Any]) -> None:
    # Given a model as it is on the hub, of a type with a formula
    model = made_of(kind, options)
    shape = shape_of(model.huggingface.config.to_dict())
    assert shape is not None

    # When a block of each kind is looked at
    seen = track_blocks(model, torch.bfloat16, lambda name: True, TOKENS)

    # Then each takes what the formula says, that of experts up to 15% less
    kinds = [block_memory(kind, job().spec, 2, [], tokens=TOKENS) for kind in shape.distinct]
    expected = Counter(kinds[number] for number in shape.order or [0] * shape.layers)
    assert [*seen.values()] == [*expected.values()]
    most = 1.15 if shape.experts else 1.02
    for found, reckoned in zip(seen, expected, strict=True):
        assert reckoned.kept == pytest.approx(found.kept, rel=0.02)
        assert 0.98 < (reckoned.kept + reckoned.working) / (found.kept + found.working) < most


@pytest.mark.parametrize("how", ["none", "full"])
@pytest.mark.parametrize("kind", ["olmo2", "olmo3", "exaone4", "glm4", "gemma2"])
def test_norms_behind_frozen_layers_are_what_most_is_held_at(kind: str, how: str) -> None:
    reckoned, seen = both(kind, lora={"rank": 32}, training={"activationCheckpointing": how})

    assert reckoned.kept + reckoned.working == pytest.approx(seen.kept + seen.working, rel=0.05)


@pytest.mark.parametrize("how", ["none", "selective", "full"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_what_a_block_keeps_is_what_the_formula_says(kind: str, how: str) -> None:
    reckoned, seen = both(kind, training={"activationCheckpointing": how})

    assert reckoned.kept == pytest.approx(seen.kept, rel=0.02)
    assert reckoned.kept + reckoned.working == pytest.approx(seen.kept + seen.working, rel=0.1)


@pytest.mark.parametrize("how", ["none", "selective", "full"])
@pytest.mark.parametrize(("kind", "degree"), [("llama", 2), ("phi3", 4), ("qwen3", 8)])
def test_where_tokens_are_shared_too(kind: str, degree: int, how: str) -> None:
    reckoned, seen = both(
        kind,
        training={"activationCheckpointing": how},
        strategy={"fsdp": {"sequenceParallelDegree": degree}},
        compute={"gpusPerNode": 8},
    )

    assert reckoned.kept == pytest.approx(seen.kept, rel=0.02)
    assert reckoned.kept + reckoned.working == pytest.approx(seen.kept + seen.working, rel=0.1)


@pytest.mark.parametrize("kind", ["llama", "qwen3", *OF_EXPERTS])
def test_in_fp32_too(kind: str) -> None:
    reckoned, seen = both(kind, torch.float32)

    assert reckoned.kept == pytest.approx(seen.kept, rel=0.02)
    assert reckoned.working == pytest.approx(seen.working, rel=0.02)


ADAPTED = [
    ["all-linear"],
    ["q_proj", "v_proj"],
    ["o_proj"],
    ["gate_proj"],
    ["q_proj", "down_proj"],
]


@pytest.mark.parametrize("dropout", [0, 0.1])
@pytest.mark.parametrize("names", ADAPTED, ids=" ".join)
@pytest.mark.parametrize("kind", ["llama", "olmo2", "gemma3_text"])
def test_beside_a_frozen_base(kind: str, names: list[str], dropout: float) -> None:
    reckoned, seen = both(kind, lora={"rank": 32, "targetModules": names, "dropout": dropout})

    assert reckoned.kept == pytest.approx(seen.kept, rel=0.02)


@pytest.mark.parametrize("names", [["q_proj", "v_proj"], ["o_proj"], ["gate_proj"]], ids=" ".join)
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_layers_without_adapters_keep_nothing_of_what_they_read(kind: str, names: list[str]) -> None:
    reckoned, seen = both(kind, lora={"rank": 32, "targetModules": names})

    assert reckoned.kept + reckoned.working == pytest.approx(seen.kept + seen.working, rel=0.02)


@pytest.mark.parametrize("names", [["all-linear"], ["o_proj"]], ids=" ".join)
@pytest.mark.parametrize("kind", OF_EXPERTS)
def test_beside_frozen_experts(kind: str, names: list[str]) -> None:
    reckoned, seen = both(kind, lora={"rank": 8, "targetModules": names})

    assert reckoned.kept == pytest.approx(seen.kept, rel=0.02)


# Ranks of experts: with 64 and more the products of second factors are kept, 12 is filled up to 16
EXPERT_ADAPTERS = [
    *((["all-linear", "experts"], rank, how) for rank in (8, 12) for how in ("none", "selective", "full")),
    *((["experts.down_proj"], rank, how) for rank, how in ((8, "none"), (12, "full"), (128, "selective"))),
    *((["experts.gate_up_proj"], rank, how) for rank, how in ((12, "none"), (8, "full"), (64, "selective"))),
]


@pytest.mark.parametrize(("names", "rank", "how"), EXPERT_ADAPTERS, ids=str)
@pytest.mark.parametrize("kind", OF_EXPERTS)
def test_beside_experts_with_adapters(kind: str, names: list[str], rank: int, how: str) -> None:
    lora = {"rank": 16, "expertRank": rank, "targetModules": names}
    reckoned, seen = both(kind, lora=lora, training={"activationCheckpointing": how})

    assert reckoned.kept == pytest.approx(seen.kept, rel=0.02)
    assert reckoned.kept + reckoned.working == pytest.approx(seen.kept + seen.working, rel=0.1)


@pytest.mark.parametrize("rank", [16, 64, 128, 512])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "phi3", "qwen3_moe"])
def test_selective_checkpointing_keeps_products_of_adapters_that_are_worth_it(kind: str, rank: int) -> None:
    # From rank 32, 128, 352 on these are the products of second factors with 256, 1024 and 2816 outputs
    reckoned, seen = both(kind, lora={"rank": rank}, training={"activationCheckpointing": "selective"})

    assert reckoned.kept == pytest.approx(seen.kept, rel=0.02)


@pytest.mark.parametrize("names", [["all-linear"], ["o_proj"], ["down_proj"]], ids=" ".join)
@pytest.mark.parametrize(("kind", "how"), [("llama", "none"), ("qwen3", "selective"), ("phi3", "full")])
def test_magnitudes_keep_what_they_are_multiplied_with(kind: str, how: str, names: list[str]) -> None:
    lora = {"rank": 32, "targetModules": names, "useDora": True}
    reckoned, seen = both(kind, lora=lora, training={"activationCheckpointing": how})

    assert reckoned.kept == pytest.approx(seen.kept, rel=0.02)
    assert reckoned.kept + reckoned.working == pytest.approx(seen.kept + seen.working, rel=0.1)


@pytest.mark.parametrize("how", ["none", "selective", "full"])
@pytest.mark.parametrize("names", [["all-linear"], ["gate_up_proj"], ["qkv_proj"]], ids=" ".join)
def test_adapters_of_gate_and_up_in_one_layer_are_reckoned(names: list[str], how: str) -> None:
    lora = {"rank": 32, "targetModules": names}
    reckoned, seen = both("phi3", lora=lora, training={"activationCheckpointing": how})

    assert reckoned.kept + reckoned.working == pytest.approx(seen.kept + seen.working, rel=0.1)


def test_dropout_keeps_a_byte_for_each_number_as_on_a_gpu() -> None:
    # Given adapters on layers that do not keep what they read themselves
    _, seen = both("llama", lora={"rank": 8, "targetModules": ["o_proj"], "dropout": 0.1})
    _, without = both("llama", lora={"rank": 8, "targetModules": ["o_proj"]})

    # Then of each number a copy and a byte are there besides
    assert seen.kept - without.kept == pytest.approx(3 * SIZES["hidden_size"])


def test_the_model_that_is_looked_at_stays_as_it_is() -> None:
    model = model_of("llama")
    huggingface: Any = model.huggingface
    before = {name: (tensor.device, tensor.dtype) for name, tensor in model.named_parameters()}

    track_blocks(model, torch.bfloat16, lambda name: True, 16)

    assert {name: (tensor.device, tensor.dtype) for name, tensor in model.named_parameters()} == before
    assert huggingface.config._attn_implementation == IMPLEMENTATION


def test_an_architecture_without_a_formula_is_seen_all_the_same() -> None:
    arcee = one_kind(model_of("arcee"), torch.bfloat16, lambda name: True, TOKENS)

    assert shape_of({**SIZES, "model_type": "arcee"}) is None
    # Its MLP has no gate: of four numbers for each inner one it keeps two
    llama = one_kind(model_of("llama"), torch.bfloat16, lambda name: True, TOKENS)
    assert arcee.kept == pytest.approx(llama.kept - 2 * 2 * SIZES["intermediate_size"], rel=0.02)


@pytest.mark.parametrize("kind", sorted({*accepted()} - {*FAMILIES, *OTHERS, "arcee"}))
def test_blocks_of_every_accepted_type_are_seen(kind: str) -> None:

    register()
    config = small_config(kind)
    with torch.device("meta"):
        made = _class_for(config, config)(config, attn_implementation=IMPLEMENTATION, **kernel_options(config))
    keep_documents_apart(made)

    seen = track_blocks(CausalLM(made), torch.bfloat16, lambda name: True, 64)

    assert seen.total() == config.num_hidden_layers
    assert all(block.kept > 0 and block.working > 0 for block in seen)


@pytest.mark.parametrize(
    ("kind", "module", "name", "value"),
    [
        ("lfm2", convolution, "CONVOLUTION_COPIES", 10**6),
        ("qwen3_5_text", gated_delta, "working_bytes", lambda *_: 10**9),
        ("bamba", state_space, "working_bytes", lambda *_: 10**9),
    ],
)
def test_what_operators_hold_besides_is_counted_in_their_layers_alone(
    monkeypatch: pytest.MonkeyPatch, kind: str, module: Any, name: str, value: Any
) -> None:
    from transformers import AutoModelForCausalLM

    register()
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(small_config(kind), attn_implementation=IMPLEMENTATION)
    keep_documents_apart(made)
    monkeypatch.setattr(module, name, value)

    seen = track_blocks(CausalLM(made), torch.bfloat16, lambda name: True, 64)

    # Some of what the layer kept is free by then.
    assert sorted(block.working >= 0.9 * 10**9 / 64 for block in seen) == [False, True]


# Which blocks have experts in place of one MLP, as configs say it
UNEQUAL: dict[str, tuple[str, dict[str, Any], list[bool]]] = {
    "glm4_moe": ("glm4_moe", {"first_k_dense_replace": 1, "n_routed_experts": 32}, [False, True, True, True]),
    "every second": ("qwen3_moe", {"decoder_sparse_step": 2}, [False, True, False, True]),
    "all but some": ("qwen3_moe", {"mlp_only_layers": [2]}, [True, True, False, True]),
    "beside one for all": (
        "qwen2_moe",
        {"mlp_only_layers": [0, 1], "shared_expert_intermediate_size": 512},
        [False, False, True, True],
    ),
}


@pytest.mark.parametrize("how", ["none", "selective", "full"])
@pytest.mark.parametrize("case", UNEQUAL)
def test_blocks_that_differ_are_each_counted_as_they_are(case: str, how: str) -> None:
    kind, options, expected = UNEQUAL[case]

    def seen_of(options: dict[str, Any]) -> Counter[BlockMemory]:
        return track_blocks(
            model_of(kind, **{**EXPERTS, **options, "num_hidden_layers": 4}),
            torch.bfloat16,
            lambda name: True,
            TOKENS,
            lambda copied: checkpoint_activations(copied, how),
        )

    dense, experts = (
        next(
            iter(seen_of({**options, "mlp_only_layers": layers, "decoder_sparse_step": 1, "first_k_dense_replace": k}))
        )
        for layers, k in (([0, 1, 2, 3], 4), ([], 0))
    )
    assert dense != experts
    assert seen_of(options) == {dense: expected.count(False), experts: expected.count(True)}


def test_blocks_with_adapters_differ_from_those_without_before_and_behind_them() -> None:
    asked = job(lora={"rank": 8, "targetModules": ["layers.2.mlp.down_proj"]}).spec
    model, plain = model_of("llama", num_hidden_layers=4), model_of("llama")
    huggingface: Any = model.huggingface
    assert asked.lora
    add_adapters(huggingface, asked.lora)

    seen = track_blocks(model, torch.bfloat16, is_adapter, TOKENS)

    # No gradient comes to those before; it goes through those behind, which have none themselves
    (without,) = track_blocks(plain, torch.bfloat16, is_adapter, TOKENS)
    assert (seen[NOTHING], seen[without]) == (2, 1)
    assert (seen.total(), len(seen)) == (4, 3)
    with_embedding = track_blocks(model, torch.bfloat16, lambda name: is_adapter(name) or "embed" in name, TOKENS)
    assert (with_embedding[NOTHING], with_embedding[without]) == (0, 3)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("gemma2", {"layer_types": ["sliding_attention", "full_attention"]}),
        ("gemma3_text", {"layer_types": ["sliding_attention", "full_attention"]}),
        ("cohere2", {"layer_types": ["sliding_attention", "full_attention"]}),
        ("smollm3", {"no_rope_layers": [1, 0]}),
    ],
)
def test_windows_and_positions_change_nothing_of_what_a_block_keeps(
    monkeypatch: pytest.MonkeyPatch, kind: str, options: dict[str, Any]
) -> None:
    # Each block is looked at by itself
    monkeypatch.setattr(tracking, "_kind", id)
    seen = track_blocks(model_of(kind, **options), torch.bfloat16, lambda name: True, TOKENS)

    kept = [block.kept for block in seen.elements()]
    assert len(kept) == 2
    assert kept[0] == pytest.approx(kept[1], rel=0.01)
    working = [block.working for block in seen.elements()]
    assert working[0] == pytest.approx(working[1], rel=0.01)


@pytest.mark.parametrize("how", ["none", "selective", "full"])
def test_scores_that_are_computed_in_blocks_are_seen_while_they_are_held(
    monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    def track(kind: str) -> Any:
        return one_kind(
            model_of(kind),
            torch.bfloat16,
            lambda name: True,
            TOKENS,
            lambda copied: checkpoint_activations(copied, how),
        )

    # Given Gemma 2, which caps its scores, and Gemma 3, whose attention is a kernel, with norms more
    capped, kernel = track("gemma2"), track("gemma3_text")
    assert capped.kept <= kernel.kept

    # When scores take more than everything else, then that is what is held besides
    monkeypatch.setattr(tracking, "working_bytes", lambda *tensors: 10**6 * TOKENS)
    seen = track("gemma2")
    assert seen.kept == capped.kept
    assert 10**6 - seen.kept <= seen.working <= 10**6 + capped.working


def test_keys_and_values_for_other_layers_are_kept_and_wide_heads_go_by_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given layers of three kinds, twice: the last of those with keys and values of their own have them for the others
    kinds = ["sliding_attention", "full_attention"]
    model = model_of(
        "gemma4_text",
        head_dim=64,
        global_head_dim=512,
        num_hidden_layers=6,
        layer_types=kinds * 3,
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=64,
    )
    monkeypatch.setattr(tracking, "working_bytes", lambda *tensors: 10**6 * TOKENS)

    # When all is computed again
    def full(copied: CausalLM) -> None:
        checkpoint_activations(copied, "full")

    seen = track_blocks(model, torch.bfloat16, lambda name: True, TOKENS, full)

    # Then an input is kept of every layer, and keys and values, of 4 heads, of one of each kind
    inputs = 2 * SIZES["hidden_size"]
    keys_and_values = {windowed: 2 * 2 * 4 * size for windowed, size in ((True, 64), (False, 512))}
    for windowed, more in keys_and_values.items():
        kept = sorted(block.kept for block in seen.elements() if (block.working < 10**6) == windowed)
        assert kept == pytest.approx([inputs, inputs, inputs + more], abs=32)
