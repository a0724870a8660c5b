"""A model whose config is another in a run: that of transformers with the same config, packed, and in its export."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from sft_api.v1alpha1.model_config import ConfigOverrides
from sft_trainer.checkpoint.local import LocalStore
from sft_trainer.errors import ConfigError
from sft_trainer.export.companions import companions, model_card
from sft_trainer.models.attention import Boundaries, boundary_arguments
from sft_trainer.models.causal_lm import build_on_meta
from sft_trainer.models.overrides import config_of, in_words
from tests.exports import save
from tests.parity.mask_tokenizers import chat_tokenizer
from tests.parity.runs import manifest as job
from tests.parity.runs import resolve
from tests.unit.checkpoint.boxed import whole
from tests.unit.trainer.test_models import save_config, save_model

LENGTHS = (70, 9, 33)
"""Longer and shorter than what the model was trained with."""
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


def overrides(**given: Any) -> ConfigOverrides:
    return ConfigOverrides.model_validate(given)


def with_config(folder: Path, config: bytes) -> Any:
    """The model of ``folder`` as transformers has it with another config.json."""
    from transformers import AutoModelForCausalLM

    copied = shutil.copytree(folder, folder.parent / "copies" / str(len(config)), dirs_exist_ok=True)
    (copied / "config.json").write_bytes(config)
    return AutoModelForCausalLM.from_pretrained(copied, attn_implementation="eager")


@pytest.mark.parametrize(
    "given",
    [
        {"rope_parameters": YARN, "max_position_embeddings": 128},
        {"rope_parameters": {**YARN, "attention_factor": 1.3, "beta_fast": 16.0, "truncate": False}},
        {"rope_parameters": LLAMA3},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e4}},
        {"sliding_window": 7},
    ],
)
@pytest.mark.parametrize("kind", ["mistral", "starcoder2"])
def test_packed_documents_are_computed_as_transformers_computes_each_by_that_config(
    tmp_path: Path, kind: str, given: dict[str, Any]
) -> None:
    # Given a model, and the same with the values written into its config.json
    from transformers import AutoModelForCausalLM

    save_model(kind, tmp_path / "model", max_position_embeddings=32, sliding_window=20)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="eager")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    written = {**config, **given}
    if "rope_parameters" in given:
        written["rope_parameters"] = {"rope_theta": config["rope_parameters"]["rope_theta"], **given["rope_parameters"]}
    reference = with_config(tmp_path / "model", json.dumps(written).encode())

    # When the trainer builds it with overrides, and exports its config
    built: Any = build_on_meta(tmp_path / "model", overrides(**given))
    ours = type(built.huggingface).from_pretrained(
        tmp_path / "model", config=built.huggingface.config, attn_implementation="sft_documents"
    )
    files = companions(built, tmp_path / "model", chat_tokenizer("chatml"), "")
    exported = with_config(tmp_path / "model", files["config.json"])

    # Then documents in one micro-batch have the logits that transformers gives each of them by that config
    ids = torch.randint(3, 128, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        packed = ours(
            input_ids=ids[None],
            position_ids=torch.cat([torch.arange(length) for length in LENGTHS])[None],
            use_cache=False,
            **boundary_arguments(Boundaries.of(LENGTHS)),
        ).logits[0]
        alone, of_export, of_plain = (
            torch.cat([model(input_ids=one[None]).logits[0] for one in ids.split(LENGTHS)])
            for model in (reference, exported, plain)
        )
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-5)
    assert torch.equal(of_export, alone)
    assert (of_plain - alone).abs().max() > 2e-4


@pytest.mark.parametrize(
    ("kind", "given", "words"),
    [
        ("llama", {"sliding_window": 5}, "sliding_window is 5, but .* has no such field: leave it out"),
        ("qwen2", {"sliding_window": 5}, "sliding_window is 5, but .* has that switched off in its config.json: leave"),
        (
            "llama",
            {"resid_pdrop": 0.1},
            r"resid_pdrop is 0.1, but .* no such field \(its dropouts: attention_dropout\)",
        ),
        ("olmo2", {"hidden_dropout": 0.1}, r"no such field \(its dropouts: attention_dropout\): leave it out"),
        ("gemma3_text", {"rope_parameters": YARN}, "has other rotary positions for each kind of layer"),
        ("gemma4_text", {"rope_parameters": YARN}, "has other rotary positions for each kind of layer"),
        ("biogpt", {"max_position_embeddings": 4096}, "has no rotary positions"),
        ("llama", {"rope_parameters": {**YARN, "original_max_position_embeddings": 65}}, "is 65, .* has 64 positions"),
        ("llama", {"rope_parameters": {**YARN, "beta_slow": 5e-324}}, r"'beta_slow': 5e-324.* frequencies cannot be "),
        ("phi3", {"rope_parameters": YARN}, "which a model of type 'phi3' cannot have"),
    ],
)
def test_what_the_model_has_no_place_for_is_refused(
    tmp_path: Path, kind: str, given: dict[str, Any], words: str
) -> None:
    save_config(kind, tmp_path, max_position_embeddings=64)
    with pytest.raises(ConfigError, match=f"model.configOverrides.*{words}"):
        config_of(tmp_path, overrides(**given))


@pytest.mark.parametrize(
    ("kind", "own", "lost"),
    [
        ("hunyuan_v1_dense", {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0}, "alpha"),
        ("youtu", {**YARN, "mscale": None, "mscale_all_dim": 1.0}, "mscale_all_dim"),
        ("ministral3", {**YARN, "llama_4_scaling_beta": 0.1, "mscale": 1.0}, "llama_4_scaling_beta, mscale"),
    ],
)
def test_scaling_that_would_take_away_what_else_the_model_scales_by_is_refused(
    tmp_path: Path, kind: str, own: dict[str, Any], lost: str
) -> None:
    save_config(kind, tmp_path, max_position_embeddings=64, rope_parameters={"rope_theta": 1e4, **own})
    with pytest.raises(ConfigError, match=f"rope_parameters is .*'{kind}' has {lost} of its own there, .*leave it out"):
        config_of(tmp_path, overrides(rope_parameters=YARN))


def test_a_dropout_that_no_layer_reads_is_refused(tmp_path: Path) -> None:
    # Given a type whose config has a field that its layers do not look at, beside one that they do
    save_config("phi3", tmp_path, num_hidden_layers=2, pad_token_id=0)

    # When each is overridden, then only that which drops something is accepted; 0 says what is so
    build_on_meta(tmp_path, overrides(resid_pdrop=0.1, attention_dropout=0.1, embd_pdrop=0))
    with pytest.raises(ConfigError, match=r"embd_pdrop is 0.1, but .*'phi3' has the field, and computes nothing"):
        build_on_meta(tmp_path, overrides(resid_pdrop=0.1, embd_pdrop=0.1))


def test_positions_that_follow_from_the_longest_one_are_left_alone(tmp_path: Path) -> None:
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    save_config("llama", tmp_path, rope_parameters=dynamic, max_position_embeddings=64)
    with pytest.raises(
        ConfigError, match=r"max_position_embeddings is 128, but .* scales its positions by that length"
    ):
        config_of(tmp_path, overrides(max_position_embeddings=128))


def test_a_model_that_is_scaled_by_yarn_has_no_positions_beyond_that(tmp_path: Path) -> None:
    save_config("gpt_oss", tmp_path)
    for given in (
        {"max_position_embeddings": 131072},
        {"max_position_embeddings": 200_000, "rope_parameters": {**YARN, "factor": 8000.0}},
    ):
        assert config_of(tmp_path, overrides(**given)).max_position_embeddings == given["max_position_embeddings"]
    with pytest.raises(ConfigError, match=r"embeddings is 131073, but .* scales its positions to 131072 by yarn"):
        config_of(tmp_path, overrides(max_position_embeddings=131073))


def test_without_overrides_the_config_is_the_published_one(tmp_path: Path) -> None:
    save_config("llama", tmp_path)
    assert config_of(tmp_path, ConfigOverrides()).to_dict() == config_of(tmp_path, None).to_dict()
    assert in_words(ConfigOverrides()) == in_words(None) == ""


def test_the_card_of_adapters_says_how_their_base_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given adapters beside a base with another config
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    given = {"rope_parameters": {**YARN, "factor": 16.0}, "attention_dropout": 0.1}
    save_model("llama", tmp_path / "model", max_position_embeddings=32)
    untouched = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    get_peft_model(untouched, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path / "adapters")
    trained = {"model": {"uri": f"file://{tmp_path}/model", "configOverrides": given}}
    manifest = save(whole({"a": torch.zeros(2)}), LocalStore(tmp_path / "store"), metrics={"loss": 1.0})
    model = build_on_meta(tmp_path / "model")
    cards = [
        model_card(resolve(job(tmp_path, tmp_path / "store", **trained, **form)), manifest, model)
        for form in ({"lora": {"rank": 4}}, {"lora": {"rank": 4}, "export": {"mergeAdapter": True}})
    ]

    # When what it says is pasted, in their folder
    monkeypatch.chdir(tmp_path / "adapters")
    names: dict[str, Any] = {}
    exec(cards[0].split("```python\n")[1].split("```")[0], names)

    # Then the base has the config of the run; of a whole model it need not be said, whose config.json has it
    loaded, asked = names["model"].config, config_of(tmp_path / "model", overrides(**given))
    assert (loaded.rope_parameters, loaded.attention_dropout) == (asked.rope_parameters, 0.1)
    assert names["model"].peft_config["default"].r == 2
    assert "| `attention_dropout` | `0.1` |" in cards[1]
    assert "```python" not in cards[1]
