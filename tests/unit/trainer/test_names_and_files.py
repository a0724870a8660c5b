"""Names against what transformers itself writes and reads: the same tensors, both ways, to the last bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sft_trainer.boxes import Box, Rectangle
from sft_trainer.errors import ModelError
from sft_trainer.models.causal_lm import CausalLM
from sft_trainer.models.tensors import whole_boxes
from sft_trainer.models.weights import load_weights, weights_layout
from tests.unit.trainer.test_models import stored_buffers

EXPERTS = {"num_experts": 3, "num_local_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 6}
ROUTED = {"n_routed_experts": 3, "n_shared_experts": 1, "first_k_dense_replace": 1}
LATENT = {
    "q_lora_rank": 4,
    "kv_lora_rank": 4,
    "qk_rope_head_dim": 2,
    "qk_nope_head_dim": 2,
    "v_head_dim": 4,
    "head_dim": 2,
}
GATED_DELTA_NETS = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 6,
    "shared_expert_intermediate_size": 6,
}
GEMMA_4 = {
    "head_dim": 4,
    "global_head_dim": 8,
    "hidden_size_per_layer_input": 4,
    "vocab_size_per_layer_input": 32,
    "enable_moe_block": True,
    "top_k_experts": 2,
}
CONVOLUTIONS = {"layer_types": ["conv", "full_attention"]}
MAMBA_2 = {"mamba_n_heads": 2, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 4, "mamba_expand": 2}
KINDS = [
    ("qwen3", {"tie_word_embeddings": True}),
    ("phi3", {}),
    ("gpt_neox", {}),
    ("exaone", {}),
    ("qwen3_moe", EXPERTS),
    ("qwen2_moe", EXPERTS),
    ("mixtral", EXPERTS),
    ("olmoe", EXPERTS),
    ("gpt_oss", EXPERTS),
    ("flex_olmo", EXPERTS),
    ("granitemoe", EXPERTS),
    ("granitemoeshared", {**EXPERTS, "shared_intermediate_size": 6}),
    *((kind, {**EXPERTS, **ROUTED}) for kind in ("glm4_moe", "dots1", "solar_open", "exaone_moe")),
    *((kind, {**EXPERTS, **ROUTED, **LATENT}) for kind in ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")),
    *((kind, EXPERTS) for kind in ("mellum", "minimax_m2", "granitemoe_swa", "cohere2_moe")),
    ("hunyuan_v1_moe", {**EXPERTS, "head_dim": 4}),
    ("afmoe", {**EXPERTS, "num_dense_layers": 1}),
    ("hy_v3", {**EXPERTS, "mlp_layer_types": ["dense", "sparse"]}),
    ("ernie4_5_moe", {"moe_num_experts": 3, "moe_k": 2, "moe_intermediate_size": 6}),
    ("gemma4_text", {**EXPERTS, **GEMMA_4}),
    ("qwen3_5_text", GATED_DELTA_NETS),
    ("qwen3_5_moe_text", {**EXPERTS, **GATED_DELTA_NETS}),
    ("qwen3_next", {**EXPERTS, **GATED_DELTA_NETS}),
    ("lfm2", CONVOLUTIONS),
    ("lfm2_moe", {**EXPERTS, **CONVOLUTIONS, "num_dense_layers": 1}),
    ("lfm3", {**CONVOLUTIONS, "head_dim": 4}),
    ("bamba", {**MAMBA_2, "attn_layer_indices": [1]}),
    ("falcon_h1", {**MAMBA_2, "mamba_d_ssm": 16}),
    (
        "granitemoehybrid",
        {**MAMBA_2, **EXPERTS, "shared_intermediate_size": 6, "layer_types": ["linear_attention", "full_attention"]},
    ),
    (
        "nemotron_h",
        {
            **EXPERTS,
            "n_routed_experts": 3,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
            "mamba_num_heads": 2,
            "mamba_head_dim": 4,
            "n_groups": 2,
            "ssm_state_size": 4,
            "moe_shared_expert_intermediate_size": 6,
        },
    ),
]


def save(kind: str, path: Path, **options: Any) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    config = AutoConfig.for_model(
        kind,
        vocab_size=32,
        hidden_size=8,
        intermediate_size=10,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        pad_token_id=0,
        **options,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for value in stored_buffers(model).values():
        value.normal_()
    model.save_pretrained(path)


def empty(path: Path) -> CausalLM:
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=torch.float32)
    with torch.no_grad():
        for value in [*model.parameters(), *stored_buffers(model).values()]:
            value.fill_(torch.nan)
    return CausalLM(model)


@pytest.mark.parametrize(("kind", "options"), KINDS, ids=[kind for kind, _ in KINDS])
def test_what_is_loaded_is_what_transformers_loads(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM

    # Given a model that transformers wrote
    save(kind, tmp_path, **options)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)

    # When it is read through our names
    model = empty(tmp_path)
    boxes = whole_boxes(model)
    load_weights(boxes, model.names, tmp_path)

    # Then all parameters, and corrections of routers, are those that transformers reads
    ours, theirs = ({**dict(each.named_parameters()), **stored_buffers(each)} for each in (model.huggingface, expected))
    assert ours.keys() == theirs.keys()
    for name, parameter in theirs.items():
        assert torch.equal(ours[name], parameter), name

    # And back: the hub tensors of our canonical ones are those of the file, no fewer and no more
    files = load_file(tmp_path / "model.safetensors")
    written = {
        tensor.name: box.read() if tensor.index is None else box.read()[tensor.index]
        for box in boxes
        for tensor in model.names.hub(box.name, box.shape)
    }
    assert written.keys() == files.keys()
    for name, value in written.items():
        assert torch.equal(value, files[name]), name


OLMO_HYBRID = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 6,
}


def test_filters_that_files_have_apart_are_read_however_many_rows_each_has(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    # Given 8 filters of queries, 8 of keys and 12 of values, which transformers saves as 10, 10 and 8
    save("olmo_hybrid", tmp_path, **OLMO_HYBRID)
    expected = dict(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).named_parameters())
    saved = load_file(tmp_path / "model.safetensors")
    filters = [f"model.layers.0.linear_attn.{name}_conv1d.weight" for name in "qkv"]
    assert [len(saved[name]) for name in filters] == [10, 10, 8]

    # When it is read, and written by our names, and read again
    for published in (False, True):
        model = empty(tmp_path)
        boxes = whole_boxes(model)
        load_weights(boxes, model.names, tmp_path)

        # Then all is what transformers reads of either
        for name, parameter in model.huggingface.named_parameters():
            assert torch.equal(parameter, expected[name]), (published, name)
        written = {
            tensor.name: box.read().contiguous() for box in boxes for tensor in model.names.hub(box.name, box.shape)
        }
        save_file(written, tmp_path / "model.safetensors", {"format": "pt"})
        again = dict(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).named_parameters())
        assert all(torch.equal(again[name], each) for name, each in expected.items())

    # And it is written as such models are published
    assert [len(written[name]) for name in filters] == [8, 8, 12]
    norms = sorted(name.removeprefix("model.layers.") for name in written if "norm" in name and ".layers." in name)
    assert norms == [
        *("0.attention_layer_norm.weight", "0.feedforward_layer_norm.weight", "0.linear_attn.o_norm.weight"),
        *("1.post_attention_layernorm.weight", "1.post_feedforward_layernorm.weight"),
        *("1.self_attn.k_norm.weight", "1.self_attn.q_norm.weight"),
    ]


def test_filters_of_which_rows_lack_are_refused(tmp_path: Path) -> None:
    save("olmo_hybrid", tmp_path, **OLMO_HYBRID)
    files = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.linear_attn.v_conv1d.weight"
    save_file({**files, name: files[name][:7].contiguous()}, tmp_path / "model.safetensors")
    model = empty(tmp_path)
    with pytest.raises(ModelError, match=r"'model.layers.0.linear_attn.q_conv1d.weight' has shape \(10, 1, 4\) in the"):
        load_weights(whole_boxes(model), model.names, tmp_path)


@pytest.mark.parametrize("rows", [(0, 9), (3, 5), (8, 12), (11, 12)])
def test_a_process_reads_its_part_of_filters_that_others_rows_lie_among(tmp_path: Path, rows: tuple[int, int]) -> None:
    save("olmo_hybrid", tmp_path, **OLMO_HYBRID)
    model = empty(tmp_path)
    whole = next(box for box in whole_boxes(model) if box.name.endswith(".v_conv1d.weight"))
    load_weights([whole], model.names, tmp_path)
    mine = part(whole, rows, (0, 1), (1, 4))
    load_weights([mine], model.names, tmp_path)
    assert torch.equal(mine.read(), whole.read()[rows[0] : rows[1], :, 1:4])


def part(box: Box, *ranges: tuple[int, int]) -> Box:
    """The box of a process that holds less of the same tensor."""
    place = type(box.place)(tuple(a for a, _ in ranges), tuple(b - a for a, b in ranges))
    return Box(box.name, box.kind, box.shape, place, torch.full(place.sizes, torch.nan))


def test_only_what_a_box_overlaps_is_read(tmp_path: Path) -> None:
    # Given a process that has a rectangle of the second expert of three, and files without the others
    save("qwen3_moe", tmp_path, **EXPERTS)
    model = empty(tmp_path)
    (up,) = (box for box in whole_boxes(model) if box.name.endswith("0.mlp.experts.up_proj.weight"))
    mine = part(up, (1, 2), (2, 5), (1, 8))
    names = [tensor.name for tensor in model.names.hub(up.name, up.shape)]
    files = load_file(tmp_path / "model.safetensors")
    save_file({names[1]: files[names[1]]}, tmp_path / "model.safetensors")

    # Then it needs no other file, and has that part
    load_weights([mine], model.names, tmp_path)
    assert torch.equal(mine.read(), files[names[1]][2:5, 1:8][None])
    with pytest.raises(ModelError, match=rf"lacks 1 of the 2 tensors of the model, the first is '{names[0]}'"):
        weights_layout([part(up, (0, 2), (0, 1), (0, 1))], model.names, tmp_path)


def test_the_layout_is_told_by_canonical_names(tmp_path: Path) -> None:
    save("qwen3_moe", tmp_path, **EXPERTS)
    model = empty(tmp_path)
    layout = weights_layout(whole_boxes(model), model.names, tmp_path)
    assert "model.layers.0.mlp.experts.gate_proj.weight [3, 6, 8] F32" in layout
    files = load_file(tmp_path / "model.safetensors")
    files["model.norm.weight"] = files["model.norm.weight"].bfloat16()
    save_file(files, tmp_path / "model.safetensors")
    assert "model.norm.weight [8] BF16" in weights_layout(whole_boxes(model), model.names, tmp_path)


def test_a_scalar_is_read_and_checked(tmp_path: Path) -> None:
    save("qwen3", tmp_path)
    names = empty(tmp_path).names
    scalar = Box("scale", "weight", (), Rectangle((), ()), torch.tensor(0.0))
    save_file({"scale": torch.tensor(2.5)}, tmp_path / "model.safetensors")
    load_weights([scalar], names, tmp_path)
    assert scalar.read() == 2.5
    save_file({"scale": torch.tensor(torch.nan)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="'scale' of the model holds NaN or infinities"):
        load_weights([scalar], names, tmp_path)
