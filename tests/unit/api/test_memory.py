"""Memory of a run by formula: states, parts, what the table and the config of a model say."""

import re
from pathlib import Path
from typing import Any

import pytest

from sft_api.block_memory import NOTHING, BlockMemory, block_memory
from sft_api.families import FAMILIES
from sft_api.known_models import known_configs, known_shape
from sft_api.layers import adapted_of
from sft_api.memory import (
    MemoryEstimate,
    Sizes,
    estimate,
    estimate_of,
    estimate_states,
    offloaded_bytes,
    sizes_of,
    staging_bytes,
)
from sft_api.model_config import shape_of, uncounted
from sft_api.model_shape import ModelShape
from sft_api.plan import make_plan
from tests.unit.cli.jobs import job

_VISION_OF_GEMMA = 416_866_032
"""Parameters of SigLIP So400m with 4,096 patches, by its published sizes."""
_VISION_OF_LLAMA_4 = 871_932_416
"""With its projector, as transformers counts them."""
_VISION_OF_GEMMA_4, _BESIDE_GEMMA_4 = 569_550_384, 167_364_608 + 304_824_608
"""As transformers counts them, of the small ones without limits of layers; projectors are left out one by one."""
PUBLISHED = {
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "Qwen/Qwen3-235B-A22B": 235_093_634_560,
    "mistralai/Mixtral-8x7B-v0.1": 46_702_792_704,
    "allenai/OLMoE-1B-7B-0924": 6_919_161_856,
    "openai/gpt-oss-20b": 20_914_757_184,
    "openai/gpt-oss-120b": 116_829_156_672,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-70B": 70_553_706_496,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "HuggingFaceTB/SmolLM2-135M": 134_515_008,
    "HuggingFaceTB/SmolLM2-360M": 361_821_120,
    "HuggingFaceTB/SmolLM2-1.7B": 1_711_376_384,
    "HuggingFaceTB/SmolLM3-3B": 3_075_098_624,
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": 1_777_088_000,
    "Qwen/Qwen2.5-3B": 3_085_938_688,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen2.5-14B": 14_770_033_664,
    "Qwen/Qwen2.5-32B": 32_763_876_352,
    "Qwen/Qwen2.5-72B": 72_706_203_648,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-1.7B": 1_720_574_976,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "mistralai/Mistral-7B-v0.1": 7_241_732_096,
    "mistralai/Mistral-7B-v0.3": 7_248_023_552,
    "mistralai/Mistral-Nemo-Base-2407": 12_247_782_400,
    "mistralai/Mistral-Small-24B-Base-2501": 23_572_403_200,
    "microsoft/Phi-3-mini-4k-instruct": 3_821_079_552,
    "microsoft/Phi-4-mini-instruct": 3_836_021_760,
    "microsoft/phi-4": 14_659_507_200,
    "allenai/OLMo-2-1124-7B": 7_298_617_344,
    "allenai/OLMo-2-1124-13B": 13_716_198_400,
    "google/gemma-2-2b": 2_614_341_888,
    "google/gemma-2-9b": 9_241_705_984,
    "google/gemma-2-27b": 27_227_128_320,
    "google/gemma-3-1b-pt": 999_885_952,
    **{
        f"google/gemma-3-{name}-pt": published - _VISION_OF_GEMMA - width * 1152 - 1152
        for name, published, width in (
            ("4b", 4_300_079_472, 2560),
            ("12b", 12_187_325_040, 3840),
            ("27b", 27_432_406_640, 5376),
        )
    },
    "Qwen/Qwen3.5-0.8B": 752_393_024,
    "Qwen/Qwen3.5-2B": 1_881_825_088,
    "Qwen/Qwen3.5-4B": 4_659_865_088 - 333_514_240 - 120_599_552,
    "Qwen/Qwen3.5-9B": 9_653_104_368 - 456_010_480 - 243_290_624,
    "Qwen/Qwen3.5-27B": 27_356_728_560 - 460_730_096,
    "Qwen/Qwen3.5-35B-A3B": 35_951_822_704 - 446_571_248 - 844_640_768,
    "Qwen/Qwen3.5-122B-A10B": 125_086_497_008 - 451_290_864 - 2_523_679_232,
    "Qwen/Qwen3.5-397B-A17B": 403_397_928_944 - 456_010_480 - 6_595_568_128,
    "Qwen/Qwen3-Next-80B-A3B-Instruct": 81_324_862_720 - 1_650_471_424,
    # With a layer for one more token, that has an embedding and a head of its own, and corrections of routers
    "zai-org/GLM-4.5-Air": 110_468_824_832 - 3_616_573_440 - 46 * 128,
    "zai-org/GLM-4.7-Flash": 31_221_488_576 - 1_278_094_592 - 47 * 64,
    "zai-org/GLM-4.7": 358_337_791_296 - 5_539_962_112 - 90 * 160,
    "deepseek-ai/DeepSeek-V3": 671_026_419_200 - 58 * 256,
    # Without the scales of each product in FP8, two of experts and of eight other layers
    "mistralai/Mistral-Small-4-119B-2603": 119_401_317_952 - 428_472_320 - 36 * 2 * (2 * 128 + 8),
    "meta-llama/Llama-4-Scout-17B-16E": 108_641_793_536 - _VISION_OF_LLAMA_4,
    "meta-llama/Llama-4-Maverick-17B-128E": 401_583_781_376 - _VISION_OF_LLAMA_4,
    # And without the number of each layer, and keys and values that no layer reads: of 20, and of 18, four and three of
    # them with heads of 512
    "google/gemma-4-E2B": 5_123_178_051 - _BESIDE_GEMMA_4 - 1536 * (768 + 1536) - 35 - 16 * 786_688 - 4 * 1_573_376,
    "google/gemma-4-E4B": 7_996_156_490 - _BESIDE_GEMMA_4 - 2560 * (768 + 1536) - 42 - 15 * 2_621_696 - 3 * 5_243_392,
    "google/gemma-4-12B": 11_959_730_224 - 49_922_304 - 640 * 3840 - 48,
    "google/gemma-4-26B-A4B": 25_805_936_206 - _VISION_OF_GEMMA_4 - 1152 * 2816 - 30,
    "google/gemma-4-31B": 31_273_088_876 - _VISION_OF_GEMMA_4 - 1152 * 5376 - 60,
    "ByteDance-Seed/Seed-OSS-36B-Instruct": 36_151_104_512,
    "LiquidAI/LFM2-350M": 354_483_968,
    "LiquidAI/LFM2-700M": 742_489_344,
    "LiquidAI/LFM2-1.2B": 1_170_340_608,
    "LiquidAI/LFM2-2.6B": 2_569_272_320,
    "LiquidAI/LFM2-8B-A1B": 8_339_929_856,
    "ibm-granite/granite-4.0-h-micro": 3_191_396_096,
    "ibm-granite/granite-4.0-h-tiny": 6_939_037_248,
    "ibm-granite/granite-4.0-h-small": 32_207_337_984,
    "nvidia/NVIDIA-Nemotron-Nano-9B-v2": 8_888_227_328,
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": 31_577_940_288 - 23 * 128,
}
"""Parameters as the hub counts them in the models' files, tied ones once, and those for images and of heads for further
tokens left out; of gpt-oss as its authors do (20.91B and 116.83B, arXiv 2508.10925), whose files have two values in a
byte."""
EIGHT_BILLION = "hf://meta-llama/Llama-3.1-8B"


LONG = {"train": [{"uri": "hf://a/b"}], "maxLength": 65536}
"""So many tokens that most is held while blocks are computed backwards."""


def shape(uri: str = EIGHT_BILLION) -> ModelShape:
    found = known_shape(uri)
    assert found is not None
    return found


def estimated(model: str = EIGHT_BILLION, gpus: int = 8, **spec: Any) -> MemoryEstimate:
    """Of layers that are not compiled."""
    training = {"compile": False, **spec.pop("training", {})}
    asked = job(**{"model": {"uri": model}, "compute": {"gpusPerNode": gpus}, "training": training, **spec}).spec
    return estimate(shape(model), asked, make_plan(asked))


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_figures_of_a_known_model_add_up_to_its_published_parameters(name: str) -> None:
    assert shape(f"hf://{name}").parameters == PUBLISHED[name]


@pytest.mark.parametrize(
    ("name", "published", "vision"),
    [
        ("Qwen/Qwen2.5-VL-3B-Instruct", 3_754_622_976, 668_684_288),
        ("Qwen/Qwen2.5-VL-7B-Instruct", 8_292_166_656, 676_550_144),
        ("Qwen/Qwen2.5-VL-32B-Instruct", 33_452_718_336, 688_841_984),
        ("Qwen/Qwen3-VL-2B-Instruct", 2_127_532_032, 406_957_056),
        ("Qwen/Qwen3-VL-4B-Thinking", 4_437_815_808, 415_347_712),
        ("Qwen/Qwen3-VL-8B-Instruct", 8_767_123_696, 576_388_336),
        ("Qwen/Qwen3-VL-32B-Instruct", 33_357_390_064, 595_266_800),
    ],
)
def test_of_whole_models_what_is_left_is_the_text_part(name: str, published: int, vision: int) -> None:
    assert shape(f"hf://{name}").parameters == published - vision
    assert shape(f"hf://{name}").is_part


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Qwen/Qwen3-30B-A3B", 3.3),
        ("Qwen/Qwen3-235B-A22B", 22),
        ("mistralai/Mixtral-8x7B-v0.1", 12.9),
        ("allenai/OLMoE-1B-7B-0924", 1.3),
        ("Qwen/Qwen3-8B", 8.19),
    ],
)
def test_the_active_parameters_are_the_published_ones(name: str, billions: float) -> None:
    assert shape(f"hf://{name}").active_parameters / 1e9 == pytest.approx(billions, rel=0.02)


@pytest.mark.parametrize(("name", "billions"), [("openai/gpt-oss-20b", 3.61), ("openai/gpt-oss-120b", 5.13)])
def test_those_of_gpt_oss_are_published_without_the_embedding(name: str, billions: float) -> None:
    found = shape(f"hf://{name}")
    assert (found.active_parameters - found.head_parameters) / 1e9 == pytest.approx(billions, abs=0.005)


def test_every_row_of_the_table_is_held_against_a_published_number() -> None:
    shapes = {shape(f"hf://{name}") for name in PUBLISHED}

    assert {shape(f"hf://{name}") for name in known_configs()} == shapes
    assert len(shapes) == len(PUBLISHED)


def test_the_docs_name_all_types_with_a_formula() -> None:
    text = (Path(__file__).parents[3] / "docs" / "memory.md").read_text(encoding="utf-8")
    named = text.split("is one of\n", 1)[1].split("Blocks may differ", 1)[0]

    assert {*re.findall(r"\b[a-z]+\d?(?:_?[a-z0-9]+)*\b", named)} >= {*FAMILIES}


def test_a_model_is_known_by_its_name_whatever_the_revision_and_only_on_the_hub() -> None:
    assert known_shape("hf://qwen/Qwen3-8B@main") == shape("hf://Qwen/Qwen3-8B")
    assert known_shape("hf://someone/Qwen3-8B") is None
    assert known_shape("s3://Qwen/Qwen3-8B") is None


def test_a_config_that_says_little_is_read_with_the_defaults_of_its_family() -> None:
    config = {
        "model_type": "qwen2",
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "intermediate_size": 4864,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    }

    assert shape_of(config) == shape("hf://Qwen/Qwen2.5-0.5B")
    biased = {**config, "model_type": "llama", "attention_bias": True}
    llama, with_bias = shape_of({**config, "model_type": "llama"}), shape_of(biased)
    assert llama is not None
    assert with_bias is not None
    # Queries, keys, values and the output
    assert with_bias.block_parameters - llama.block_parameters == 896 + 2 * 128 + 896


@pytest.mark.parametrize(
    ("size", "published", "of_images"),
    [
        ("2B", 2_127_532_032, 406_957_056),
        ("4B", 4_437_815_808, 415_347_712),
        ("8B", 8_767_123_696, 576_388_336),
        ("32B", 33_357_390_064, 595_266_800),
    ],
)
def test_of_qwen3_vl_all_is_counted_that_is_not_for_images(size: str, published: int, of_images: int) -> None:
    for kind in ("Instruct", "Thinking"):
        found = shape(f"hf://Qwen/Qwen3-VL-{size}-{kind}")
        assert (found.parameters, found.is_part) == (published - of_images, True)


def test_of_a_model_of_images_and_texts_the_text_part_is_counted() -> None:
    # As Gemma 3 4B is published: what its class has anyway is not said
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    gemma = {"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 1152}}

    assert shape_of(gemma) == shape("hf://google/gemma-3-4b-it")
    assert uncounted(gemma) == ""
    assert (
        uncounted({**gemma, "text_config": {**text, "hidden_size": 0}})
        == "whose config.json has no size in hidden_size"
    )
    # The whole says whether embedding and head are one
    small = known_configs()["mistralai/Mistral-Small-3.1-24B-Instruct-2503"]
    mistral = {"model_type": "mistral3", "text_config": {**small, "tie_word_embeddings": True}}
    assert shape_of({**mistral, "tie_word_embeddings": False}) == shape_of(small)
    # What older files say of the text part among the fields of the whole
    small_text = {**known_configs()["Qwen/Qwen2.5-3B"], "model_type": "qwen2_5_vl_text"}
    nested = shape_of({"model_type": "qwen2_5_vl", "text_config": small_text})
    assert shape_of({**small_text, "model_type": "qwen2_5_vl", "vision_config": {}}) == nested
    assert nested is not None
    assert nested.is_part
    assert nested == shape("hf://Qwen/Qwen2.5-3B")
    other = {"model_type": "other", "text_config": {"model_type": "other_text"}}
    assert uncounted(other) == "of whose type 'other_text' there is no formula"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"model_type": "mamba"}, "of whose type 'mamba' there is no formula"),
        ({"model_type": None}, "whose config.json names no model_type"),
        ({"hidden_size": None}, "whose config.json lacks hidden_size"),
        ({"hidden_size": "896"}, "whose config.json has no size in hidden_size"),
        ({"num_hidden_layers": 0}, "whose config.json has no size in num_hidden_layers"),
        ({"mlp_bias": 1}, "whose MLPs have biases (mlp_bias), as those of no formula"),
        (
            {"num_hidden_layers": 10**9},
            "whose config.json has num_hidden_layers: 1000000000, and no formula counts more than 1024",
        ),
    ],
)
def test_what_no_formula_counts_has_no_shape(change: dict[str, Any], why: str) -> None:
    known = dict(known_configs()["Qwen/Qwen2.5-0.5B"])
    assert shape_of(known) is not None

    assert uncounted(known) == ""
    assert uncounted({**known, **change}) == why
    assert shape_of({**known, **change}) is None
    assert shape_of({}) is None
    assert "mamba" not in FAMILIES


@pytest.mark.parametrize(
    ("change", "sparse"),
    [
        ({}, 48),
        ({"mlp_only_layers": [], "decoder_sparse_step": 1}, 48),
        ({"mlp_only_layers": [0, 3]}, 46),
        ({"decoder_sparse_step": 2}, 24),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, 23),
        ({"decoder_sparse_step": 100}, 0),
    ],
)
def test_of_a_mixture_some_blocks_may_have_one_mlp(change: dict[str, Any], sparse: int) -> None:
    known = dict(known_configs()["Qwen/Qwen3-30B-A3B"])
    usual, found = shape_of(known), shape_of({**known, **change})
    assert usual is not None
    assert found is not None

    # By hand: attention, two norms and those of queries and keys, and three matrices, or as many for each expert
    attention = 2048 * (4096 + 2 * 512) + 4096 * 2048 + 2 * 2048 + 2 * 128
    dense, experts = 3 * 2048 * 6144, 128 * 3 * 2048 * 768 + 128 * 2048
    assert sum(block.experts > 0 for block in found.blocks) == sparse
    assert found.parameters == 48 * attention + sparse * experts + (48 - sparse) * dense + usual.root_parameters
    idle = sparse * 120 * 3 * 2048 * 768
    assert found.active_parameters == found.parameters - idle


@pytest.mark.parametrize(
    ("model", "change", "why"),
    [
        ("qwen3_moe", {"num_experts": None}, "lacks num_experts"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step: 0"),
        ("qwen3_moe", {"mlp_only_layers": 3}, "mlp_only_layers: 3"),
        ("qwen3_moe", {"mlp_only_layers": [7] * 1025}, "mlp_only_layers: [7, 7,"),
        ("qwen3_moe", {"num_hidden_layers": 2**31 - 1}, "num_hidden_layers: 2147483647"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq: 2"),
        ("deepseek_v3", {"mlp_layer_types": ["dense"]}, "mlp_layer_types: ['dense']"),
        ("deepseek_v3", {"first_k_dense_replace": None}, "first_k_dense_replace: None"),
        ("deepseek_v3", {"n_shared_experts": None}, "lacks n_shared_experts"),
        ("deepseek_v3", {"kv_lora_rank": None}, "lacks kv_lora_rank"),
        ("deepseek_v3", {"attention_bias": True}, "latent attention has biases (attention_bias)"),
        ("qwen3_next", {"layer_types": ["mamba"] * 4}, "layer_types: ['mamba', 'mamba', 'mamba', 'mamba']"),
        ("qwen3_next", {"linear_key_head_dim": 0}, "no size in linear_key_head_dim"),
        (
            "qwen3_next",
            {"linear_num_value_heads": 1},
            "with 1 heads of values (linear_num_value_heads)",
        ),
        ("ernie4_5_moe", {"moe_layer_interval": 0}, "moe_layer_interval: 0"),
        ("ernie4_5_moe", {"use_bias": True}, "MLPs have biases (use_bias)"),
        ("nemotron_h", {"hybrid_override_pattern": "MX*-"}, "hybrid_override_pattern: MX*-"),
        ("nemotron_h", {"hybrid_override_pattern": "M*-"}, "hybrid_override_pattern: M*-"),
        ("nemotron_h", {"moe_latent_size": 8}, "moe_latent_size: 8"),
        ("granitemoehybrid", {"layer_types": [["mamba"]] * 4}, "layer_types: [['mamba'], ['mamba']"),
        ("bamba", {"attn_layer_indices": 2}, "attn_layer_indices: 2"),
        ("bamba", {"mamba_n_heads": 3, "mamba_n_groups": 2}, "3 heads of Mamba 2"),
        ("falcon_h1", {"mamba_rms_norm": True}, "mamba_rms_norm: True"),
        ("lfm2", {"conv_bias": True}, "layers have biases (conv_bias)"),
        (
            "lfm2",
            {"block_auto_adjust_ff_dim": True, "block_multiple_of": 256, "block_ffn_dim_multiplier": "1"},
            "block_ffn_dim_multiplier: 1",
        ),
        ("gemma4_text", {"enable_moe_block": True, "num_experts": None}, "lacks num_experts"),
        ("hunyuan_v1_moe", {"num_experts_per_tok": None, "moe_topk": [2, 2, 2, 1]}, "moe_topk: [2, 2, 2, 1]"),
        ("llama4_text", {"no_rope_layers": [1, 0]}, "no_rope_layers: [1, 0]"),
        ("llama4_text", {"no_rope_layer_interval": 0}, "no_rope_layer_interval: 0"),
        ("stablelm", {"qk_layernorm": True}, "qk_layernorm: True"),
        ("stablelm", {"use_parallel_residual": True}, "use_parallel_residual: True"),
        ("llama4_text", {"moe_layers": 2}, "moe_layers: 2"),
        ("llama4_text", {"interleave_moe_layer_step": 0}, "interleave_moe_layer_step: 0"),
        ("gemma4_text", {"num_kv_shared_layers": 4}, "num_kv_shared_layers: 4"),
    ],
)
def test_what_says_its_blocks_in_no_known_way_has_no_shape(model: str, change: dict[str, Any], why: str) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 128}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "intermediate_size": 96}
    shared = {"n_shared_experts": 1, "moe_num_shared_experts": 1, "shared_expert_intermediate_size": 32}
    latent = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    delta = dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "linear_conv_kernel_dim"), 2)
    delta |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
    states = dict.fromkeys(("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_num_heads", "mamba_head_dim"), 4)
    states |= {"n_groups": 2, "ssm_state_size": 4, "hybrid_override_pattern": "ME*-", "shared_intermediate_size": 32}
    shared |= {"moe_shared_expert_intermediate_size": 32, "intermediate_size_mlp": 64}
    config = {"model_type": model, **sizes, **experts, **shared, **latent, **delta, **states}
    assert shape_of(config) is not None

    assert shape_of({**config, **change}) is None
    assert why in uncounted({**config, **change})


def test_of_blocks_that_differ_each_kind_is_counted() -> None:
    asked = job(compute={"nodes": 1, "gpusPerNode": 8}).spec
    plan, sizes = make_plan(asked), sizes_of(shape(), asked)
    tokens = plan.max_tokens_per_micro_batch or asked.data.max_length
    small, large = BlockMemory(kept=10_000, working=500_000), BlockMemory(kept=400_000, working=20_000)

    taken = estimate_of(sizes, {small: 3, large: 29}, asked, plan)

    assert taken.activations == tokens * (3 * 10_000 + 29 * 400_000 + 500_000)


def test_states_take_16_bytes_a_parameter_shared_out() -> None:
    memory = estimated()

    parameters = 8_030_261_248
    assert memory.parameters == memory.gradients == 4 * parameters / 8
    assert memory.optimizer == 8 * parameters / 8
    assert estimated(gpus=1).parameters == 4 * parameters
    asked = job(compute={"nodes": 2, "gpusPerNode": 8}, strategy={"fsdp": {"shardDegree": 4}}).spec
    assert estimate(shape(), asked, make_plan(asked)).parameters == parameters


def test_adapters_take_their_own_states_beside_a_frozen_base() -> None:
    memory = estimated(lora={"rank": 16})

    # By hand: seven layers with 16 x (inputs + outputs) each, in 32 blocks
    pairs = ((4096, 4096), (4096, 1024), (4096, 1024), (4096, 4096), (4096, 14336), (4096, 14336), (14336, 4096))
    adapters = 32 * 16 * sum(a + b for a, b in pairs)
    # Those of the whole model: they are summed once a step
    assert memory.gradients == 4 * adapters
    assert memory.optimizer == 8 * adapters / 8
    assert memory.parameters == 4 * adapters / 8 + 2 * 8_030_261_248 / 8
    asked = job(lora={"rank": 16, "targetModules": ["q_proj", "up_proj"], "excludeModules": ["up_proj"]}).spec
    assert sizes_of(shape(), asked).trained == 32 * 16 * (4096 + 4096)
    in_fp32 = estimated(lora={"rank": 16, "basePrecision": "fp32"})
    assert in_fp32.parameters == 4 * adapters / 8 + 4 * 8_030_261_248 / 8


def test_of_a_base_in_4_bits_linear_layers_take_9_bytes_for_16_weights() -> None:
    half, packed, kept, compiled = (
        estimated(lora={"rank": 16, "basePrecision": base}, data=LONG, training={"compile": compiles})
        for compiles in (False, True)
        for base in ("bf16", "nf4")
    )
    asked = job(model={"uri": EIGHT_BILLION}, lora={"rank": 16, "basePrecision": "nf4"}).spec
    sizes = sizes_of(shape(), asked)

    # By hand: seven matrices in each of 32 blocks
    largest = 14336 * 4096
    assert sizes.packed_block == 2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * largest
    assert (sizes.packed, sizes.packed_matrix) == (32 * sizes.packed_block, largest)
    assert half.parameters - packed.parameters == (2 - 9 / 16) * sizes.packed / 8
    # One is there as a whole, and its values are looked up a part at a time
    assert packed.activations is not None
    assert half.activations is not None
    assert packed.activations - half.activations == 2 * largest + 6 * 2**24
    assert (compiled.activations or 0) - (kept.activations or 0) == 2 * largest


def test_4_bits_are_what_is_gathered_of_them() -> None:
    def gathered(base: str, gpus: int = 8, **fsdp: Any) -> int:
        lora = {"rank": 16, "basePrecision": base}
        found = estimated(gpus=gpus, lora=lora, strategy={"fsdp": fsdp}, data=LONG).gathered
        assert found is not None
        return found

    packed = 2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 14336 * 4096
    each = (2 - 9 / 16) * packed
    # Two blocks at a time, or all
    assert gathered("bf16", reshardAfterForward=True) - gathered("nf4", reshardAfterForward=True) == 2 * each
    assert gathered("bf16", reshardAfterForward=False) - gathered("nf4", reshardAfterForward=False) == 32 * each
    # One process multiplies with what it holds, but for what it brings from the host
    assert gathered("nf4", 1) == gathered("bf16", 1) < packed / 16
    assert gathered("nf4", 1, cpuOffload=True) > 4 * 128_256 * 4096


def test_what_is_trained_of_a_base_in_4_bits_is_not_packed() -> None:
    lora, block = {"rank": 16, "basePrecision": "nf4"}, {"trainableModules": ["layers.31"]}
    whole = sizes_of(shape(), job(model={"uri": EIGHT_BILLION}, lora=lora).spec)
    some = sizes_of(shape(), job(model={"uri": EIGHT_BILLION}, lora=lora, training=block).spec)

    assert whole.packed - some.packed == whole.packed_block
    # The largest block is then the one of which nothing is packed, and which has no adapters
    assert (some.block, some.packed_block) == (shape().block_parameters, 0)
    assert some.packed_matrix == whole.packed_matrix


def test_adapters_of_some_layers_are_counted_where_they_are() -> None:
    everywhere = job(lora={"rank": 16, "targetModules": ["mlp.up_proj"]}).spec
    by_name = [f"model.layers.{layer}.mlp.up_proj" for layer in range(32)]
    each = 16 * (4096 + 14336)

    for names in (by_name, [name.removeprefix("model.") for name in by_name]):
        one_by_one = job(lora={"rank": 16, "targetModules": names}).spec
        assert sizes_of(shape(), one_by_one) == sizes_of(shape(), everywhere)
        plan = make_plan(everywhere)
        assert estimate(shape(), one_by_one, plan) == estimate(shape(), everywhere, plan)
    some = sizes_of(shape(), job(lora={"rank": 16, "targetModules": by_name[:3]}).spec)
    assert (some.trained, some.trained_block) == (3 * each, each)
    excluded = job(lora={"rank": 16, "targetModules": ["up_proj"], "excludeModules": by_name[:3]}).spec
    assert sizes_of(shape(), excluded).trained == 29 * each
    kept = [estimate(shape(), spec, make_plan(spec)).activations or 0 for spec in (everywhere, excluded)]
    assert kept[1] < kept[0]


def test_adapters_of_experts_are_of_each_of_them_and_of_their_rank() -> None:
    model = "hf://Qwen/Qwen3-30B-A3B"
    mixture = known_shape(model)
    assert mixture is not None

    def trained(**lora: Any) -> Sizes:
        return sizes_of(mixture, job(model={"uri": model}, lora={"rank": 16, **lora}).spec)

    # By hand: 128 experts of width 768 in each of 48 blocks of width 2048; gate and up share an A
    gate_up, down = 128 * (2048 + 2 * 768), 128 * (768 + 2048)
    assert trained(targetModules=["experts"]).trained_block == 16 * (gate_up + down)
    assert trained(targetModules=["experts.down_proj"], expertRank=3).trained == 48 * 3 * down
    linear = trained()
    both = trained(targetModules=["all-linear", "experts"], expertRank=4)
    assert both.trained == linear.trained + 48 * 4 * (gate_up + down)
    assert both.parameters - linear.parameters == both.trained - linear.trained
    assert both.block - linear.block == both.trained_block - linear.trained_block == 4 * (gate_up + down)
    # By what names mean: not those of layers beside them, nor of blocks that are left out, or trained
    assert trained(targetModules=["q_proj", "layers.3.mlp.experts"]).trained == (
        16 * (48 * (2048 + 4096) + gate_up + down)
    )
    excluded = trained(targetModules=["experts"], excludeModules=["experts.gate_up_proj", "layers.0.mlp.experts"])
    assert excluded.trained == 47 * 16 * down
    whole = job(
        model={"uri": model}, lora={"targetModules": ["experts"]}, training={"trainableModules": ["layers.1"]}
    ).spec
    assert [len(names) for names in adapted_of(mixture, whole)] == [2, 0, *[2] * 46]
    # Of gpt-oss, whose weights are inputs by outputs, all the same
    gpt_oss = known_shape("hf://openai/gpt-oss-20b")
    assert gpt_oss is not None
    asked = job(lora={"rank": 4, "targetModules": ["experts.gate_up_proj"]}).spec
    assert sizes_of(gpt_oss, asked).trained == 24 * 32 * 4 * (2880 + 2 * 2880)


def test_copies_of_adapters_whose_rank_is_filled_up_are_there_once() -> None:
    model = "hf://Qwen/Qwen3-30B-A3B"
    mixture = known_shape(model)
    assert mixture is not None

    def kept(rank: int, tokens: int) -> float:
        lora = {"targetModules": ["experts.down_proj"], "expertRank": rank}
        asked = job(model={"uri": model}, lora=lora).spec
        return tokens * block_memory(mixture, asked, 2, ["mlp.experts.down_proj"], tokens=tokens).kept

    # 8 numbers for each of so many inputs and outputs of 128 experts
    for tokens in (64, 4096):
        assert kept(5, tokens) - kept(8, tokens) == 2 * 8 * 128 * (768 + 2048)


def some(*modules: str, model: str = EIGHT_BILLION) -> tuple[Sizes, MemoryEstimate]:
    """Of a run that trains these modules alone."""
    training = {"compile": False, "trainableModules": [*modules]}
    asked = job(model={"uri": model}, compute={"gpusPerNode": 1}, training=training).spec
    return sizes_of(shape(model), asked), estimate(shape(model), asked, make_plan(asked))


def test_a_norm_of_one_layer_is_counted_where_it_is() -> None:
    sizes, memory = some("layers.31.input_layernorm")
    assert (sizes.trained, sizes.trained_block) == (4096, 4096)
    # No layer before it keeps anything
    everywhere = some("input_layernorm")[1]
    assert memory.activations is not None
    assert everywhere.activations is not None
    assert memory.activations < everywhere.activations / 8

    assert some("input_layernorm")[0].trained == 32 * 4096
    assert some("post_attention_layernorm", "layers.0.input_layernorm")[0].trained == 33 * 4096


def test_the_other_name_of_tied_weights_adds_nothing() -> None:
    tied = "hf://Qwen/Qwen3-0.6B"
    assert some("embed_tokens", "lm_head", model=tied) == some("embed_tokens", model=tied)


def test_a_head_that_is_not_trained_has_no_gradient() -> None:
    # Given what is trained outside of the blocks, which are not computed backwards
    norm, head = some("model.norm")[1], some("lm_head")[1]

    assert head.logits is not None
    assert norm.logits is not None
    assert head.logits - norm.logits > 4 * 128_256 * 4096


@pytest.mark.parametrize("model", [EIGHT_BILLION, "hf://Qwen/Qwen3-30B-A3B"])
def test_blocks_that_keep_nothing_change_nothing_of_what_those_behind_them_do(model: str) -> None:
    """Of experts too, whose last block is forgotten before all gradients are there."""
    asked = job(model={"uri": model}, lora={"rank": 16}, compute={"gpusPerNode": 8}).spec
    sizes, plan, block = sizes_of(shape(model), asked), make_plan(asked), BlockMemory(kept=90_000, working=2_000_000)

    assert estimate_of(sizes, {NOTHING: 20, block: 4}, asked, plan) == estimate_of(sizes, {block: 4}, asked, plan)


def test_activations_follow_the_tokens_and_checkpointing() -> None:
    short, long = (estimated(data={"train": [{"uri": "hf://a/b"}], "maxLength": n}) for n in (8192, 16384))
    full = estimated(
        data={"train": [{"uri": "hf://a/b"}], "maxLength": 16384}, training={"activationCheckpointing": "full"}
    )

    activations = [memory.activations or 0 for memory in (short, long, full)]
    assert activations[1] == pytest.approx(2 * activations[0], rel=0.02)
    assert 0 < activations[2] < activations[1] / 10
    # Logits are held in chunks, of one size
    assert 0 < (long.logits or 0) < 1.1 * (short.logits or 0)


def test_selective_checkpointing_keeps_products_and_attention() -> None:
    data = {"train": [{"uri": "hf://a/b"}], "maxLength": 16384}
    none, selective, full = (
        estimated(data=data, training={"activationCheckpointing": how}).activations or 0
        for how in ("none", "selective", "full")
    )

    # By hand, for each token: the input of a block, seven products and the output of attention, in bf16
    products = 4096 + 2 * 1024 + 4096 + 2 * 14336 + 4096
    kept = 32 * 16384 * (2 * (4096 + products + 4096) + 4 * 32)
    assert kept < selective < 1.1 * kept
    assert full < selective < 0.6 * none


def test_moments_and_sums_of_gradients_may_be_half_as_large() -> None:
    usual, half = estimated(), estimated(training={"optimizer": {"stateDtype": "bf16"}})
    assert half.optimizer == usual.optimizer / 2 == half.gradients
    asked = job(training={"optimizer": {"stateDtype": "bf16"}}, compute={"gpusPerNode": 8}).spec
    assert staging_bytes(1_000_000, 0, asked) == 8_000_000
    # A batch so short that most is held while gradients are shared out
    data = {"train": [{"uri": "hf://a/b"}], "maxLength": 8}
    wide, narrow = (estimated(data=data, strategy={"fsdp": {"reduceDtype": dtype}}) for dtype in ("fp32", "bf16"))
    assert narrow.total < wide.total


def test_moments_in_8_bits_take_an_eighth_and_what_blocks_share() -> None:
    eighth = estimated(training={"optimizer": {"stateDtype": "int8"}})
    # By hand: norms of Llama 3.1 8B, two of each layer and the last one, stay in fp32
    norms = 65 * 4096
    expected = 2 * (65 / 64 * (8_030_261_248 - norms) + 4 * norms) / 8
    assert eighth.optimizer == pytest.approx(expected, rel=1e-9)
    asked = job(training={"optimizer": {"stateDtype": "int8"}}, compute={"gpusPerNode": 8}).spec
    assert staging_bytes(1_000_000, 640_000, asked) == 4_000_000 + 2 * (650_000 + 4 * 360_000)
    in_host = job(training={"optimizer": {"stateDtype": "int8"}}, strategy={"fsdp": {"cpuOffload": True}}).spec
    assert offloaded_bytes(1_000_000, 640_000, 0, in_host) == 8_000_000 + 2 * (650_000 + 4 * 360_000)


def test_muon_has_one_moment_of_each_matrix_of_a_block() -> None:
    full = estimated(training={"optimizer": {"type": "muon"}})
    # By hand: embedding and head of Llama 3.1 8B, and its norms, have two
    others = 2 * 128256 * 4096 + 65 * 4096
    assert full.optimizer == 4 * (8_030_261_248 + others) / 8
    half = estimated(training={"optimizer": {"type": "muon", "stateDtype": "bf16"}})
    assert half.optimizer == full.optimizer / 2
    asked = job(training={"optimizer": {"type": "muon"}}, compute={"gpusPerNode": 8}).spec
    assert staging_bytes(1_000_000, 640_000, asked) == 4_000_000 + 4 * 640_000 + 8 * 360_000


def test_all_weights_of_a_70b_fit_one_node_of_80_gib_in_bf16_with_moments_in_8_bits() -> None:
    training = {"parameterDtype": "bf16", "activationCheckpointing": "full", "optimizer": {"stateDtype": "int8"}}
    memory = estimated("hf://meta-llama/Llama-3.1-70B", training=training)
    assert memory.total < 0.9 * 80 * 2**30


def test_weights_in_bf16_and_their_gradients_are_half_as_large() -> None:
    in_bf16 = {"training": {"parameterDtype": "bf16"}}
    usual, half = estimated(), estimated(**in_bf16)
    assert (2 * half.parameters, 2 * half.gradients, half.optimizer) == (
        usual.parameters,
        usual.gradients,
        usual.optimizer,
    )
    # One process computes with what it holds
    assert estimated(gpus=1, **in_bf16).gathered == 0
    # Sums over replicas stay fp32 until the last micro-batch of a step
    replicas = {"strategy": {"fsdp": {"shardDegree": 4}}}
    assert estimated(**in_bf16, **replicas).gradients == estimated(**replicas).gradients
    # And those of the whole model, but for one process, which has nobody to sum them with
    once = {"strategy": {"fsdp": {"reduceGradients": "oncePerStep"}}, "training": {"globalBatchSize": 64}}
    once_in_bf16 = {**once, "training": {**once["training"], **in_bf16["training"]}}
    assert estimated(**once_in_bf16).gradients == estimated(**once).gradients
    assert estimated(gpus=1, **once_in_bf16).gradients == estimated(gpus=1, **in_bf16).gradients
    asked = job(**in_bf16, compute={"gpusPerNode": 8}).spec
    assert staging_bytes(1_000_000, 0, asked) == 10_000_000
    offloaded = job(**in_bf16, compute={"gpusPerNode": 1}, strategy={"fsdp": {"cpuOffload": True}}).spec
    assert offloaded_bytes(1_000_000, 0, 0, offloaded) == 12_000_000


def test_one_process_that_holds_what_it_computes_with_gathers_nothing() -> None:
    exact = {"training": {"precision": "fp32"}}
    assert estimated(gpus=2, **exact).gathered
    assert estimated(gpus=1, **exact).gathered == 0
    # But a cast, sums in another precision, or weights that come from the host are copies.
    for copied in (
        {},
        {**exact, "lora": {"rank": 8, "basePrecision": "bf16"}},
        {**exact, "strategy": {"fsdp": {"reduceDtype": "bf16"}}},
        {**exact, "strategy": {"fsdp": {"cpuOffload": True}}},
    ):
        assert estimated(gpus=1, **copied).gathered


def test_one_process_that_keeps_copies_of_its_own_adds_gradients_up_where_they_stay() -> None:
    # Given layers that stay gathered, and a batch so short that most is held where gradients are
    def gathered(gpus: int) -> int:
        data, strategy = {"train": [{"uri": "hf://a/b"}], "maxLength": 8}, {"fsdp": {"reshardAfterForward": False}}
        found = estimated(gpus=gpus, data=data, strategy=strategy).gathered
        assert found is not None
        return found

    # Then one of several holds a block's in fp32 besides, which it sums with the others, and a single one none
    assert gathered(2) - gathered(1) >= 4 * estimated_block()


def estimated_block() -> int:
    return sizes_of(shape(), job(model={"uri": EIGHT_BILLION}).spec).block


def test_what_is_offloaded_is_the_hosts() -> None:
    strategy = {"fsdp": {"cpuOffload": True}}
    usual, memory = estimated(), estimated(strategy=strategy)
    assert (memory.parameters, memory.gradients, memory.optimizer) == (0, 0, 0)
    assert memory.activations == usual.activations
    assert memory.total < usual.total - 15 * 8_030_261_248 / 8
    # 16 bytes a parameter, a whole copy in each shard group
    eight = job(compute={"nodes": 2, "gpusPerNode": 8}, strategy=strategy).spec
    assert offloaded_bytes(1_000_000, 0, 0, eight) == 8_000_000
    hybrid = job(compute={"nodes": 2, "gpusPerNode": 8}, strategy={"fsdp": {"cpuOffload": True, "shardDegree": 8}}).spec
    assert offloaded_bytes(1_000_000, 0, 0, hybrid) == 16_000_000
    # Adapters beside a base in bf16
    assert (
        offloaded_bytes(1000, 0, 1_000_000, job(strategy=strategy, lora={}, compute={"gpusPerNode": 1}).spec)
        == 16_000 + 2_000_000
    )
    in_4_bits = job(strategy=strategy, lora={"basePrecision": "nf4"}, compute={"gpusPerNode": 1}).spec
    assert offloaded_bytes(1000, 0, 1_000_000, in_4_bits, packed=640_000) == 16_000 + 720_000 + 360_000
    assert offloaded_bytes(1_000_000, 0, 0, job().spec) == 0


def test_more_than_one_process_keeps_buffers_for_its_groups() -> None:
    alone, together = estimated(gpus=1).reserve, estimated(gpus=8).reserve
    asked = job(compute={"nodes": 2, "gpusPerNode": 8}, strategy={"fsdp": {"shardDegree": 8}}).spec
    hybrid = estimate(shape(), asked, make_plan(asked)).reserve

    # All together sum up a step; a mesh of replicas and shards has a group for each of its dimensions besides
    assert 2 * (together - alone) == hybrid - together > 0


def test_of_a_number_of_parameters_only_the_states_follow() -> None:
    asked = job(compute={"gpusPerNode": 8}).spec

    memory = estimate_states(8_000_000_000, asked, make_plan(asked))

    assert (memory.gathered, memory.activations, memory.logits, memory.known) == (None, None, None, False)
    assert memory.allocated == 16 * 1_000_000_000


def test_a_save_is_staged_by_all_nodes_together() -> None:
    asked = job(compute={"nodes": 2, "gpusPerNode": 8}).spec

    assert staging_bytes(1_000_000, 0, asked) == 6_000_000
    assert staging_bytes(1_000_000, 0, job(checkpoint={"async": False}).spec) == 0
