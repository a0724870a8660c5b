import pytest
from transformers import AutoConfig

from sft_trainer.names.canonical import HubTensor, Names, Part


def names_of(kind: str) -> Names:
    return Names.of(AutoConfig.for_model(kind))


def test_a_plain_parameter_is_called_as_on_the_hub() -> None:
    name = "model.layers.0.mlp.gate_proj.weight"
    assert names_of("llama").parts(name, (8, 4)) == [Part(name, (8, 4), (0, 0))]
    assert names_of("llama").hub(name, (8, 4)) == [HubTensor(name, None)]
    assert names_of("llama").parts("scale", ()) == [Part("scale", (), ())]


def test_experts_are_stacked_and_their_projections_are_apart() -> None:
    names, layer = names_of("qwen3_moe"), "model.layers.3.mlp"
    gate, up = names.parts(f"{layer}.experts.gate_up_proj", (2, 6, 5))
    assert gate == Part(f"{layer}.experts.gate_proj.weight", (2, 3, 5), (0, 0, 0))
    assert up == Part(f"{layer}.experts.up_proj.weight", (2, 3, 5), (0, 3, 0))
    assert names.hub(up.name, up.shape) == [
        HubTensor(f"{layer}.experts.0.up_proj.weight", 0),
        HubTensor(f"{layer}.experts.1.up_proj.weight", 1),
    ]
    assert names.parts(f"{layer}.gate.weight", (2, 5)) == [Part(f"{layer}.gate.weight", (2, 5), (0, 0))]


def test_a_single_expert_has_a_number_too() -> None:
    assert names_of("qwen3_moe").hub("mlp.experts.down_proj.weight", (1, 5, 3)) == [
        HubTensor("mlp.experts.0.down_proj.weight", 0)
    ]


def test_modules_that_the_hub_calls_otherwise() -> None:
    names = names_of("mixtral")
    (router,) = names.parts("model.layers.0.mlp.gate.weight", (2, 5))
    assert router.name == "model.layers.0.block_sparse_moe.gate.weight"
    gate, up = names.parts("model.layers.0.mlp.experts.gate_up_proj", (2, 6, 5))
    assert (gate.name, up.name) == (
        "model.layers.0.block_sparse_moe.experts.w1.weight",
        "model.layers.0.block_sparse_moe.experts.w3.weight",
    )


def test_a_parameter_of_which_the_hub_has_several_is_divided_by_what_the_config_says() -> None:
    sizes = {"linear_num_key_heads": 2, "linear_num_value_heads": 2}
    config = AutoConfig.for_model(
        "olmo_hybrid", num_hidden_layers=2, linear_key_head_dim=3, linear_value_head_dim=5, **sizes
    )
    names, layer = Names.of(config), "model.layers.0.linear_attn"
    queries, keys, values = names.parts(f"{layer}.conv1d.weight", (22, 1, 4))
    assert queries == Part(f"{layer}.q_conv1d.weight", (6, 1, 4), (0, 0, 0))
    assert keys == Part(f"{layer}.k_conv1d.weight", (6, 1, 4), (6, 0, 0))
    assert values == Part(f"{layer}.v_conv1d.weight", (10, 1, 4), (12, 0, 0))
    with pytest.raises(ValueError, match=r"has 21 rows, for .*'\.v_conv1d.weight': 10"):
        names.parts(f"{layer}.conv1d.weight", (21, 1, 4))


def test_a_fused_parameter_that_cannot_be_divided_is_refused() -> None:
    with pytest.raises(ValueError, match="has 7 rows, for the 2 projections"):
        names_of("qwen3_moe").parts("mlp.experts.gate_up_proj", (2, 7, 5))
