"""The sharded model with its own attention and loss against transformers' eager model, by architecture."""

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from sft_api.sequence_parallel import IN_ORDER
from sft_trainer.data.tokenized import TokenizedSource
from sft_trainer.errors import ModelError
from sft_trainer.models.attention import (
    IMPLEMENTATION,
    Boundaries,
    boundary_arguments,
    document_attention,
    register,
)
from sft_trainer.models.causal_lm import build_on_meta, draws_random_numbers
from sft_trainer.models.documents_told import keep_documents_apart
from sft_trainer.models.experts import kernel_options
from sft_trainer.models.probe import _output, small_model
from sft_trainer.models.weights import load_weights
from sft_trainer.preparation import check_vocabulary
from sft_trainer.strategies import build as build_strategy
from sft_trainer.topology import Topology
from sft_trainer.trainable import trainable_of
from tests.architectures import accepted, small_config
from tests.parity.runs import manifest, resolve
from tests.tensors import gathered
from tests.unit.trainer.published_configs import PUBLISHED, PUBLISHED_OF_EXPERTS
from tests.whole_models import WHOLE_OF, save_whole

pytestmark = pytest.mark.usefixtures("process_group")

LENGTHS = (5, 9, 14)


def save_model(kind: str, path: Path, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    config = small_config(kind, **options)
    for name in vars(config):
        if name not in options and ("dropout" in name or name.endswith("pdrop")):
            setattr(config, name, 0.0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    # Norm weights of one would hide a mix-up of them.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
        # What is no weight corrects the choices of routers, or scales a layer: as 0, or 1, it would change nothing.
        corrections = [parameter for parameter in model.parameters() if not parameter.requires_grad]
        for value in [*corrections, *stored_buffers(model).values()]:
            value.add_(torch.randn_like(value) * 0.2)
    model.save_pretrained(path)
    return model


def save_mixture(kind: str, path: Path, **options: Any) -> Any:
    """A small model of type ``kind``, or the whole one of which it is the text part."""
    return save_whole(WHOLE_OF[kind], path, **options) if kind in WHOLE_OF else save_model(kind, path, **options)


def stored_buffers(model: Any) -> dict[str, torch.Tensor]:
    stored = model.state_dict()
    return {name: buffer for name, buffer in model.named_buffers() if name in stored}


def build(path: Path, **training: Any) -> Any:
    job = manifest(path, path.with_name("store"), model={"uri": f"file://{path}"}, training=training)
    alone = Topology(rank=0, local_rank=0, world_size=1)
    config = resolve(job)
    strategy = build_strategy(config, build_on_meta(path), trainable_of(config), alone, torch.device("cpu"))
    load_weights(strategy.boxes("trained"), strategy.model.names, path)
    return strategy


YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
    "original_max_position_embeddings": 8,
}
# As the smallest are: the last layers use keys and values of those before them, and have wider MLPs.
GEMMA_4_REUSING = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 4,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "final_logit_softcapping": 0.5,
    "enable_moe_block": False,
}
# As the largest: the last layer has fewer heads of keys, which are its values too.
GEMMA_4_EXPERTS = {
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "hidden_size_per_layer_input": 0,
}
OTHERWISE: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}),
    ("llama", {"tie_word_embeddings": True, "attention_bias": True}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    ("qwen3", {"tie_word_embeddings": True}),
    ("mistral", {"sliding_window": 6}),
    ("granite", {"logits_scaling": 6.0}),
    ("hyperclovax", {"logits_scaling": 0.3}),
    ("gemma3_text", {"final_logit_softcapping": 0.5}),
    ("cohere2", {"logit_scale": 0.25}),
    ("gemma2", {"attn_logit_softcapping": 0.2, "final_logit_softcapping": 0.5, "sliding_window": 4}),
    ("granite_swa", {"sliding_window": 4}),
    ("gpt_oss", {"swiglu_limit": 0.05, "swiglu_alpha": 1.2, "layer_types": ["full_attention", "sliding_attention"]}),
    ("deepseek_v2", {"q_lora_rank": None, "topk_method": "group_limited_greedy", "routed_scaling_factor": 3.0}),
    ("deepseek_v3", {"q_lora_rank": None, "norm_topk_prob": False, "rope_interleave": False, "rope_parameters": YARN}),
    ("cohere2_moe", {"num_shared_experts": 2, "expert_selection_fn": "sigmoid", "first_k_dense_replace": 1}),
    ("hunyuan_v1_moe", {"moe_topk": [2, 1]}),
    ("stablelm", {"use_parallel_residual": True, "qk_layernorm": True, "use_qkv_bias": True}),
    ("nemotron", {"attention_bias": True, "mlp_bias": True}),
    ("phi", {"qk_layernorm": True}),
    ("minicpm3", {"dim_model_base": 12}),
    ("afmoe", {"mup_enabled": True, "route_scale": 2.0}),
    ("mellum", {"norm_topk_prob": False, "mlp_layer_types": ["dense", "sparse"]}),
    ("gemma4_text", GEMMA_4_REUSING),
    ("gemma4_text", GEMMA_4_EXPERTS),
]


@pytest.mark.parametrize(
    ("kind", "options", "activation_checkpointing"),
    [
        *((kind, {}, "none") for kind in accepted()),
        *((kind, options, how) for kind, options in OTHERWISE for how in ("none", "full")),
        *(
            (kind, {}, "full")
            for kind in ("qwen3_moe", "gpt_oss", "ernie4_5_moe", "mixtral", "qwen2", "gemma", "olmo2")
        ),
        *((kind, {}, "full") for kind in ("smollm3", "phi3", "granite")),
    ],
)
def test_loss_and_gradients_equal_the_eager_model(
    tmp_path: Path, kind: str, options: dict[str, Any], activation_checkpointing: str
) -> None:
    # Given a model of the family, and three documents in one micro-batch
    reference = save_model(kind, tmp_path, **options)
    strategy = build(tmp_path, activationCheckpointing=activation_checkpointing)
    ids = torch.randint(3, 128, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))
    documents = ids.split(LENGTHS)
    starts = [0, LENGTHS[0], LENGTHS[0] + LENGTHS[1]]
    targets = torch.cat(
        [torch.arange(start, start + length - 1) for start, length in zip(starts, LENGTHS, strict=True)]
    )

    # When both compute the loss, one packed, the other document by document
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    model = strategy.model
    loss, _ = model(ids, positions, Boundaries.of(LENGTHS), targets, ids[targets + 1], 1.0)
    loss.backward()
    norm = strategy.grad_norm()
    expected = sum(
        cross_entropy(reference(input_ids=d[None]).logits[0, :-1], d[1:], reduction="sum") for d in documents
    )
    expected.backward()  # type: ignore[union-attr]

    # Then nothing but rounding differs
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    gradients = {name: gathered(p.grad) for name, p in model.huggingface.named_parameters()}
    wanted = {name: p.grad for name, p in reference.named_parameters() if p.requires_grad}
    assert gradients.keys() == wanted.keys()
    whole = torch.nn.utils.get_total_norm(wanted.values())
    # Where scores are not divided by the root of a head's size transformers' own two ways differ by up to 1e-5.
    rounding = 2e-5 if kind.startswith("gemma4") else 2e-6
    for name, gradient in wanted.items():
        # Some are sums that nearly cancel, as that of a key's bias does: what rounding leaves is not of their size.
        assert (gradients[name] - gradient).norm() <= rounding * gradient.norm() + 1e-8 * whole, name
    torch.testing.assert_close(norm, whole, rtol=rounding / 2, atol=0)


# In all layers, in the second alone as two kinds of configs have it, and where no layer may read it.
SLIDING: list[dict[str, Any]] = [
    {"sliding_window": 4},
    {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 1},
    {"sliding_window": 4, "use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]},
]


# The config of OLMoE has no such field. Where one has it, transformers gives it to kernels and leaves it out of masks.
@pytest.mark.parametrize("kind", [kind for kind in accepted() if kind != "olmoe"])
def test_windows_are_those_of_the_eager_model(kind: str) -> None:
    from transformers import AutoModelForCausalLM

    register()
    ids, positions = torch.arange(3, 17)[None], torch.arange(14)[None]
    tried = 0
    for options in SLIDING:
        if kind in IN_ORDER and "layer_types" in options:
            continue  # these have no layers with windows
        try:
            config = small_config(kind, **options)
        except Exception:  # a type may have rules about them
            continue
        torch.manual_seed(1)
        eager: Any = AutoModelForCausalLM.from_config(
            copy.deepcopy(config), attn_implementation="eager", dtype=torch.float32
        ).eval()
        ours: Any = AutoModelForCausalLM.from_config(
            config, attn_implementation=IMPLEMENTATION, dtype=torch.float32, **kernel_options(config)
        ).eval()
        keep_documents_apart(ours)
        ours.load_state_dict(eager.state_dict())
        with torch.no_grad():
            expected = eager.base_model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
            found = ours.base_model(
                input_ids=ids, position_ids=positions, use_cache=False, **boundary_arguments(Boundaries.of([14]))
            ).last_hidden_state
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5, msg=f"{kind} {options}")
        tried += 1
    assert tried


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("bert", {"is_decoder": True}, "not supported"),
        ("moshi", {}, "several parts .audio_encoder_config, depth_decoder_config"),
        ("phimoe", {}, "experts"),
        ("llama", {"num_hidden_layers": 0}, "without any layer .num_hidden_layers 0."),
    ],
)
def test_what_would_train_another_model_is_refused(
    tmp_path: Path, kind: str, options: dict[str, Any], words: str
) -> None:
    save_model(kind, tmp_path, **options)
    with pytest.raises(ModelError, match=words):
        build(tmp_path)


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("jamba", {}, "layers of type linear_attention"),
        ("mamba", {}, "layers of type linear_attention"),
        ("recurrent_gemma", {}, "layers of type linear_attention"),
        ("minimax", {}, "layers of type linear_attention"),
        ("xglm", {}, "do not keep the documents of a micro-batch apart"),
        ("gpt_neox_japanese", {}, "do not keep the documents of a micro-batch apart"),
        ("gemma3n_text", {}, "apart cannot be found out .*: choose another|not supported"),
    ],
)
def test_layers_that_mix_documents_are_refused_from_the_config_alone(
    tmp_path: Path, kind: str, options: dict[str, Any], words: str
) -> None:
    save_config(kind, tmp_path, **options)
    with pytest.raises(ModelError, match=words):
        build_on_meta(tmp_path)


@pytest.mark.parametrize(
    "kind",
    [
        *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma3_text", "olmo", "olmo2", "olmo3", "phi3", "granite"),
        *("gemma2", "granite_swa"),
        *("smollm3", "gpt_neox", "starcoder2", "cohere2", "exaone4", "ernie4_5", "seed_oss"),
        *("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "lfm2", "lfm3", "bamba", "falcon_h1"),
        *("granitemoehybrid", "nemotron_h"),
        *("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "gpt_oss"),
        *("deepseek_v3", "glm4_moe_lite", "minimax_m2", "ernie4_5_moe", "solar_open", "exaone_moe", "afmoe", "hy_v3"),
        *("mellum", "granitemoe_swa", "cohere2_moe"),
    ],
)
def test_plain_attention_of_any_size_is_accepted(tmp_path: Path, kind: str) -> None:
    save_config(kind, tmp_path)
    build_on_meta(tmp_path)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((kind, {}) for kind in ("phimoe", "jetmoe", "longcat_flash")),
    ],
)
def test_other_models_of_experts_are_refused_in_words(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    save_config(kind, tmp_path, **options)
    with pytest.raises(
        ModelError, match=f"a model of type '{kind}' sends tokens to experts in a way .* choose a dense"
    ):
        build_on_meta(tmp_path)


@pytest.mark.parametrize(
    ("kind", "options"),
    [*PUBLISHED, *PUBLISHED_OF_EXPERTS],
    ids=[kind for kind, _ in [*PUBLISHED, *PUBLISHED_OF_EXPERTS]],
)
def test_models_as_they_are_published_are_accepted(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    save_config(kind, tmp_path, **options)
    build_on_meta(tmp_path)


@pytest.mark.parametrize("leak", ["to later documents", "to earlier tokens"])
def test_a_layer_that_mixes_tokens_by_itself_is_found_by_its_numbers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, leak: str
) -> None:
    # Given llama with a block that no rule knows
    from transformers.models.llama.modeling_llama import LlamaMLP

    plain = LlamaMLP.forward

    def mixing(self: Any, x: torch.Tensor) -> torch.Tensor:
        others = x.cumsum(1) if leak == "to later documents" else x.flip(1).cumsum(1).flip(1)
        result: torch.Tensor = plain(self, x) + 0.01 * others
        return result

    monkeypatch.setattr(LlamaMLP, "forward", mixing)
    save_config("llama", tmp_path)
    before = torch.get_rng_state()

    # When the model is built, then it is refused, and no random number was drawn
    with pytest.raises(ModelError, match="do not keep the documents of a micro-batch apart"):
        build_on_meta(tmp_path)
    assert torch.equal(torch.get_rng_state(), before)


def save_config(kind: str, path: Path, **options: Any) -> None:
    from transformers import AutoConfig

    AutoConfig.for_model(kind, **options).save_pretrained(path)


def test_missing_boundaries_and_masks_are_refused() -> None:
    q = torch.zeros(1, 2, 3, 4)
    module = torch.nn.Identity()
    with pytest.raises(ModelError, match="does not pass document boundaries"):
        document_attention(module, q, q, q, None)
    with pytest.raises(ModelError, match="not a plain causal attention"):
        document_attention(module, q, q, q, torch.ones(1), document_ends=torch.tensor([0, 3]))
    with pytest.raises(ModelError, match="position_bias"):
        document_attention(module, q, q, q, None, document_ends=torch.tensor([0, 3]), position_bias=torch.ones(1))


@pytest.mark.parametrize(
    ("kind", "quantised", "method"),
    [
        (
            "bitnet",
            {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "online"},
            "bitnet",
        ),
        ("llama", {"quant_method": "fp8", "weight_block_size": [32, 32]}, "fp8"),
        ("llama", {"quant_method": "mxfp4"}, "mxfp4"),
        ("llama", {"quant_method": "compressed-tensors"}, "compressed-tensors"),
        ("gpt_oss", {"quant_method": ["mxfp4"]}, r"\['mxfp4'\]"),
        ("llama", {"load_in_4bit": True}, "None"),
    ],
)
def test_a_config_of_quantised_weights_is_refused(
    tmp_path: Path, kind: str, quantised: dict[str, Any], method: str
) -> None:
    save_config(kind, tmp_path, quantization_config=quantised)
    with pytest.raises(ModelError, match=f"quant_method '?{method}'?.* not quantised, or remove the field"):
        build_on_meta(tmp_path)


def test_a_config_without_quantisation_may_say_so(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {}}))
    build_on_meta(tmp_path)


def test_layers_that_processes_would_leave_out_each_by_itself_are_refused(tmp_path: Path) -> None:
    save_config("biogpt", tmp_path, layerdrop=0.1)
    with pytest.raises(ModelError, match=r"layerdrop 0\.1 in its config.* set layerdrop to 0"):
        build_on_meta(tmp_path)


@pytest.mark.parametrize(
    ("kind", "options", "draws"),
    [
        ("llama", {}, False),
        ("llama", {"attention_dropout": 0.1}, True),
        # Of a head for classes, which is not there.
        ("gpt_neox", {"classifier_dropout": 0.1}, False),
        ("gpt_neox", {"hidden_dropout": 0.1}, True),
        ("biogpt", {}, True),
        ("mixtral", {"router_jitter_noise": 0.1}, True),
    ],
)
def test_random_numbers_are_known_where_a_forward_pass_draws_them(
    tmp_path: Path, kind: str, options: dict[str, Any], draws: bool
) -> None:
    save_config(kind, tmp_path, **options)
    model = build_on_meta(tmp_path)
    assert draws_random_numbers(model) == draws

    # And so does a small one of them
    small = small_model(model.huggingface).train()
    before = torch.get_rng_state()
    _output(small)
    assert torch.equal(torch.get_rng_state(), before) != draws


def test_a_head_that_computes_more_than_a_product_is_refused(tmp_path: Path) -> None:
    # Its logits have a scale for each token, which no loss of ours knows
    save_config("dory", tmp_path)
    with pytest.raises(ModelError, match="'dory' is not supported: no plain decoder with a linear head"):
        build_on_meta(tmp_path)


def tokenized(*tokens: int) -> TokenizedSource:
    """A source whose examples have these."""
    source = TokenizedSource.__new__(TokenizedSource)
    source._batches = [SimpleNamespace(input_ids=np.array(tokens, np.int32))]  # type: ignore[list-item]
    return source


def test_tokens_without_an_input_of_each_block_are_refused(tmp_path: Path) -> None:
    # Given a model of type Gemma 4 whose second table of embeddings has fewer rows than the first
    save_config("gemma4_text", tmp_path, vocab_size=128, vocab_size_per_layer_input=100)
    model = build_on_meta(tmp_path)
    tokenizer: Any = SimpleNamespace(get_vocab=lambda: {"last": 127})

    check_vocabulary(tokenizer, (), [tokenized(99)], model)
    with pytest.raises(ModelError, match=r"gives token 100, but the model has embeddings for 100 tokens only"):
        check_vocabulary(tokenizer, (), [tokenized(99), tokenized(3, 100)], model)
    # Nor does it help to name one that the first table has a row for
    with pytest.raises(ModelError, match=r"gives token 127, but the model has embeddings for 100 tokens only"):
        check_vocabulary(tokenizer, ["last"], [tokenized(127)], model)


def test_tokens_that_files_have_no_rows_for_are_refused_beside_new_ones(tmp_path: Path) -> None:
    # Given a model of 128 tokens, and a tokenizer of 140 before the run adds two, and names one that it has
    save_config("llama", tmp_path, vocab_size=128)
    model = build_on_meta(tmp_path, None, range(140, 142))
    named = {"<a>": 129, "<b>": 140, "<c>": 141}
    tokenizer: Any = SimpleNamespace(get_vocab=lambda: {"other": 130} | named)

    # Then rows may have the named ones, and of the others those that the model knows
    check_vocabulary(tokenizer, named, [tokenized(127, 141), tokenized(129, 140)], model)
    with pytest.raises(ModelError, match=r"gives token 130, but the model has embeddings for 128 tokens only"):
        check_vocabulary(tokenizer, named, [tokenized(127, 130, 141)], model)


def test_tokens_that_the_tokenizer_alone_has_get_rows_where_they_are_named(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    # All are there: behind the last of them new ones would begin
    model = build_on_meta(tmp_path, None, range(131, 131))
    assert model.huggingface.get_input_embeddings().num_embeddings == 192
    assert not build_on_meta(tmp_path, None, range(128, 128)).tables


def test_a_token_with_any_number_takes_no_memory(tmp_path: Path) -> None:
    save_config("llama", tmp_path, vocab_size=128)
    for new in (range(2**31, 2**31 + 1), range(2**31 + 1, 2**31 + 1)):
        with pytest.raises(ModelError, match=r"numbers up to 2147483648, and the model rows for 128: so many are not"):
            build_on_meta(tmp_path, None, new)


def test_a_folder_without_a_model_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        build(tmp_path)
    save_model("llama", tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "weights.bin")
    with pytest.raises(ModelError, match=r"has no model\.safetensors"):
        build(tmp_path)


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace('"intermediate_size": 64', '"intermediate_size": 48'))
    with pytest.raises(ModelError, match=r"has shape \(64, 32\) in the file, but \(48, 32\) in the config"):
        build(tmp_path)
