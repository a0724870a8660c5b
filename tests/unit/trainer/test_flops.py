"""Model FLOPs: what a token is computed with, not what the model holds."""

from typing import Any

import pytest
import torch

from sft_trainer.flops import active_parameters, training_flops

SMALL: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "vocab_size": 64,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def model(kind: str, **options: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SMALL, **options}))


@pytest.mark.parametrize(
    ("kind", "options", "idle_expert"),
    [
        ("mixtral", {"num_local_experts": 8}, 3 * 32 * 48),
        # With biases
        ("gpt_oss", {"num_local_experts": 8}, 3 * 32 * 48 + 2 * 48 + 32),
        ("qwen3_moe", {"num_experts": 8, "moe_intermediate_size": 16}, 3 * 32 * 16),
        # With a shared expert, which every token is sent to.
        ("qwen2_moe", {"num_experts": 8, "moe_intermediate_size": 16}, 3 * 32 * 16),
    ],
)
def test_of_the_routed_experts_those_count_that_a_token_is_sent_to(
    kind: str, options: dict[str, Any], idle_expert: int
) -> None:
    made = model(kind, **options, num_experts_per_tok=2)
    held = sum(parameter.numel() for parameter in made.parameters())
    assert active_parameters(made, made.config) == held - 2 * 6 * idle_expert


def test_all_parameters_of_a_dense_model_count() -> None:
    made = model("qwen3")
    held = sum(parameter.numel() for parameter in made.parameters())
    assert active_parameters(made, made.config) == held


def test_more_experts_that_no_token_is_sent_to_take_no_more_work() -> None:
    few, many = (model("mixtral", num_local_experts=count, num_experts_per_tok=2) for count in (2, 8))
    routers = 2 * 32 * 6
    work = [
        training_flops(made.config, active_parameters(made, made.config) - extra, 64 * 32, [10, 20])
        for made, extra in ((few, 0), (many, routers))
    ]
    assert work[0] == work[1]
