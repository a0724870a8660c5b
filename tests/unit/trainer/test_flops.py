"""Model FLOPs: what a token is computed with, not what the model holds."""

from collections import Counter
from typing import Any

import pytest
import torch

from sft_api.sequence_parallel import IN_ORDER
from sft_api.v1alpha1 import LoraSpec
from sft_trainer.data.dealing import dealt
from sft_trainer.flops import ModelFlops, active_parameters, peak_flops, training_flops
from sft_trainer.models.causal_lm import CausalLM
from sft_trainer.models.experts import kernel_options
from sft_trainer.models.lora import add_adapters, is_adapter
from sft_trainer.models.windows import Chunks, held, windows
from tests.architectures import accepted, small_config

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
        # Says it once for each layer
        ("hunyuan_v1_moe", {"num_experts": 8, "intermediate_size": 16, "head_dim": 8}, 3 * 32 * 16),
        # With a shared expert, which every token is sent to.
        ("qwen2_moe", {"num_experts": 8, "moe_intermediate_size": 16}, 3 * 32 * 16),
    ],
)
def test_of_the_routed_experts_those_count_that_a_token_is_sent_to(
    kind: str, options: dict[str, Any], idle_expert: int
) -> None:
    chosen = [2, 2] if kind == "hunyuan_v1_moe" else 2
    made = model(kind, **options, num_experts_per_tok=chosen)
    held = sum(parameter.numel() for parameter in made.parameters())
    assert active_parameters(made, made.config) == held - 2 * 6 * idle_expert


def test_of_the_adapters_of_experts_too() -> None:
    made = model("gpt_oss", num_local_experts=8, num_experts_per_tok=2)
    before = active_parameters(made, made.config)
    add_adapters(made, LoraSpec(rank=4, expert_rank=3, target_modules=["experts"]))
    # Of each of two layers A and B of gate and up together, and of down
    one = 3 * (32 + 2 * 48) + 3 * (48 + 32)
    assert sum(p.numel() for name, p in made.named_parameters() if is_adapter(name)) == 2 * 8 * one
    assert active_parameters(made, made.config) == before + 2 * 2 * one
    assert active_parameters(made, made.config, is_adapter) == 2 * 2 * one


def test_all_parameters_of_a_dense_model_count() -> None:
    made = model("qwen3")
    held = sum(parameter.numel() for parameter in made.parameters())
    assert active_parameters(made, made.config) == held


def test_more_experts_that_no_token_is_sent_to_take_no_more_work() -> None:
    few, many = (model("mixtral", num_local_experts=count, num_experts_per_tok=2) for count in (2, 8))
    routers = 2 * 32 * 6
    work = [
        training_flops(made.config, {None: 6}, active_parameters(made, made.config) - extra, 64 * 32, [10, 20])
        for made, extra in ((few, 0), (many, routers))
    ]
    assert work[0] == work[1]


# As a config has it, in some layers, and where no layer reads it.
SLIDING: list[dict[str, Any]] = [
    {},
    {"sliding_window": 4},
    {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 1},
    {"sliding_window": 4, "layer_types": ["full_attention", "sliding_attention"]},
]


@pytest.mark.parametrize("kind", accepted())
def test_windows_and_work_are_those_that_attention_is_asked_for(kind: str) -> None:
    import transformers

    asked: dict[int, int | None] = {}
    numbers_of_heads: list[int] = []

    def noted(module: Any, query: torch.Tensor, *given: Any, sliding_window: int | None = None, **_: Any) -> Any:
        asked[id(module)] = held(module) if sliding_window is None else sliding_window
        value = given[1]
        numbers_of_heads.append(query.shape[1] * (query.shape[3] + value.shape[3]))
        return query.new_empty((1, query.shape[2], query.shape[1], value.shape[3])), None

    transformers.AttentionInterface.register("noted", noted)
    tried = 0
    for options in SLIDING:
        if kind in IN_ORDER and "layer_types" in options:
            continue  # these have no layers with windows
        try:
            config = small_config(kind, **options)
        except Exception:  # a type may have rules about them
            continue
        asked.clear()
        numbers_of_heads.clear()
        with torch.device("meta"), torch.no_grad():
            made: Any = transformers.AutoModelForCausalLM.from_config(
                config, attn_implementation="noted", **kernel_options(config)
            )
            numbers = torch.zeros((1, 1), dtype=torch.long)
            made.base_model(input_ids=numbers, position_ids=numbers, use_cache=False)

        # Where attention is linear no window is asked for.
        assert [window for window in windows(made) if window != 0] == [*asked.values()], options
        # Of a document of one token, whatever the windows
        attending = Counter(asked.values())
        assert training_flops(config, attending, 0, 0, [1]) == 3 * sum(numbers_of_heads)
        tried += 1
    assert tried >= (2 if kind in IN_ORDER else 3)


def cost(layers: dict[int | Chunks | None, int], lengths: list[int]) -> float:
    """Of attention alone, of one head of 1/6."""
    made = model("qwen3", head_dim=1, num_attention_heads=1, num_key_value_heads=1)
    return training_flops(made.config, layers, 0, 0, lengths) / 6


@pytest.mark.parametrize(("length", "window"), [(1, 1), (5, 1), (5, 4), (5, 5), (5, 9), (300, 17)])
def test_in_a_window_those_pairs_count_that_are_attended(length: int, window: int) -> None:
    attended = sum(1 for token in range(length) for seen in range(token + 1) if token - seen < window)
    # Of a token and itself half, as length^2 / 2 has it of causal attention.
    assert cost({window: 1}, [length]) == 2 * attended - min(length, window)
    assert cost({None: 1}, [length]) == length**2


def test_layers_count_by_their_windows_and_documents_by_themselves() -> None:
    assert cost({None: 2, 4: 3}, [3, 10]) == 2 * (9 + 100) + 3 * (9 + 100 - 36)
    assert cost({Chunks(4): 3}, [3, 10]) == 3 * (9 + 16 + 16 + 4)


def test_a_long_document_of_gemma_3_costs_what_its_layers_see() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    from sft_api.known_models import known_configs

    known = {**known_configs()["google/gemma-3-1b-pt"], "sliding_window": 512}
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(AutoConfig.for_model(known.pop("model_type"), **known))
    assert Counter(windows(made)) == {512: 22, None: 4}

    flops = ModelFlops(CausalLM(made), lambda name: True, torch.device("cpu")).training([[32768]])
    parameters = sum(parameter.numel() for parameter in made.parameters())
    full, near = 4 * 32768**2, 22 * (32768**2 - (32768 - 512) ** 2)
    assert flops == pytest.approx(6 * parameters * 32768 + 6 * 4 * 256 * (full + near), rel=1e-12)
    # Were all layers to see all of it
    assert (6 * parameters * 32768 + 6 * 4 * 256 * 26 * 32768**2) / flops == pytest.approx(1.62, abs=0.01)


@pytest.mark.parametrize(
    ("kind", "windowed", "states"),
    [
        # 4 heads of 16 x 8, read, changed and read
        ("qwen3_5_text", {0: 1, None: 1}, 6 * 4 * 16 * 8),
        ("lfm2", {0: 1, None: 1}, 0),
        # 4 heads of 16 x 16, changed and read
        ("bamba", {0: 1, None: 1}, 4 * 4 * 16 * 16),
        ("granitemoehybrid", {0: 1, None: 1}, 4 * 4 * 16 * 16),
        # In both of its layers, beside attention
        ("falcon_h1", {None: 2}, 2 * 4 * 4 * 16 * 16),
        # Of four layers two are neither
        ("nemotron_h", {0: 3, None: 1}, 4 * 4 * 8 * 16),
    ],
)
def test_what_a_token_does_with_states_counts(kind: str, windowed: dict[int | None, int], states: int) -> None:
    from transformers import AutoModelForCausalLM

    config = small_config(kind)
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(config, **kernel_options(config))
    assert Counter(windows(made)) == windowed

    whole, head = (
        ModelFlops(CausalLM(made), trains, torch.device("cpu")).training([[50]])
        for trains in (lambda name: True, lambda name: name.startswith("lm_head"))
    )

    parameters = active_parameters(made, config)
    embedding = 0 if config.tie_word_embeddings else 128 * 32
    attention = 6 * windowed[None] * 4 * 8 * 50 * 50
    assert whole == 6 * (parameters - embedding) * 50 + 3 * states * 50 + attention
    if embedding:
        # Forwards alone, but of the head the gradient of its weight too
        assert head == 2 * (parameters - embedding + 128 * 32) * 50 + states * 50 + attention / 3


def test_bins_without_windows_are_dealt_out_as_they_always_were() -> None:
    heads = {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128}
    made = model("llama", num_hidden_layers=80, hidden_size=64, **heads)
    drawn = torch.Generator().manual_seed(0)
    bins = [torch.randint(1, 40_000, (9,), generator=drawn).tolist() for _ in range(64)]
    new = [training_flops(made.config, Counter(windows(made)), 7 * 10**10, 10**9, lengths) for lengths in bins]

    old = [
        6.0 * (7 * 10**10 - 10**9) * sum(lengths) + 6.0 * 80 * 64 * 128 * sum(length * length for length in lengths)
        for lengths in bins
    ]
    assert new == old
    assert dealt(new, 8) == dealt(old, 8)
    # Nor does a window that holds all of a document change its cost, to the last bit
    assert [training_flops(made.config, {None: 13, 40_000: 67}, 7 * 10**10, 10**9, each) for each in bins] == old


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA L40", 181e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA L400", None),
        # A slice of a board has a part of its peak
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
    ],
)
def test_a_device_is_known_by_whole_words_of_its_name(
    monkeypatch: pytest.MonkeyPatch, name: str, expected: float | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)

    assert peak_flops(torch.device("cuda")) == expected
