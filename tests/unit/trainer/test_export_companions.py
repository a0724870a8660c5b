"""Beside the weights: generation that stops where training taught it to, and a card that says what is known."""

import copy
import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sft_trainer.checkpoint.local import LocalStore
from sft_trainer.data.tokenizer import load_tokenizer
from sft_trainer.export.companions import companions, model_card
from sft_trainer.models.causal_lm import build_on_meta
from tests.exports import CARD, export, exported, save
from tests.parity.mask_tokenizers import chat_tokenizer
from tests.parity.runs import manifest as job
from tests.parity.runs import resolve
from tests.unit.checkpoint.boxed import whole
from tests.unit.trainer.test_models import save_model

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.mark.parametrize(("eos", "added"), [(0, True), ([0], True), (None, True), ("end", False), (["end", 0], False)])
def test_generation_keeps_its_settings_and_stops_at_the_end_of_a_turn(
    source: Path, caplog: pytest.LogCaptureFixture, eos: Any, added: bool
) -> None:
    # Given settings of the model's own, some of which do not know the token that ends a turn
    end = chat_tokenizer("chatml").convert_tokens_to_ids("<|im_end|>")
    stops = json.loads(json.dumps(eos).replace('"end"', str(end)))
    # temperature without do_sample is what transformers refuses to write
    own = {"temperature": 0.6, "top_p": 0.95, "do_sample": False, "eos_token_id": stops}
    (source / "generation_config.json").write_text(json.dumps(own))

    with caplog.at_level(logging.INFO, "sft_trainer"):
        written = generation_config(source)

    before = stops if isinstance(stops, list) else [] if stops is None else [stops]
    assert written == ({**own, "eos_token_id": [*before, end]} if added else own)
    assert ("added <|im_end|>, which ends a turn, to eos_token_id" in caplog.text) == added


@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_without_settings_of_its_own_a_model_has_those_of_its_config(source: Path, text: str | None) -> None:
    (source / "generation_config.json").unlink()
    if text is not None:
        (source / "generation_config.json").write_text(text)
    end = chat_tokenizer("chatml").convert_tokens_to_ids("<|im_end|>")
    assert generation_config(source)["eos_token_id"] == [2, end]


def generation_config(source: Path) -> Any:
    files = companions(build_on_meta(source), source, chat_tokenizer("chatml"), CARD)
    assert list(files)[-1] == "config.json"
    return json.loads(files["generation_config.json"])


def test_a_tokenizer_with_several_chat_templates_has_all_of_them_in_the_export(
    tmp_path: Path, source: Path, steps: Any
) -> None:
    # As Hermes and Command R have them, which transformers writes into a folder beside the default one
    tokenizer = copy.deepcopy(chat_tokenizer("chatml"))  # that one is every test's
    templates = {"default": tokenizer.chat_template, "tool_use": "{# tools #}" + tokenizer.chat_template}
    tokenizer.chat_template = templates
    store, (_, manifest) = steps

    export(replace(exported(store, manifest, source), tokenizer=tokenizer), LocalStore(tmp_path / "out"))

    assert load_tokenizer(tmp_path / "out").chat_template == templates


def test_the_model_can_be_built_from_its_export(tmp_path: Path, source: Path, steps: Any) -> None:
    store, (_, manifest) = steps
    export(exported(store, manifest, source), LocalStore(tmp_path / "out"))
    assert build_on_meta(tmp_path / "out").stored_dtype == torch.bfloat16


def test_an_export_names_no_code_that_it_does_not_have(tmp_path: Path, source: Path) -> None:
    def written() -> list[Any]:
        files = companions(build_on_meta(source), source, load_tokenizer(tmp_path), CARD)
        return [json.loads(files[name]) for name in names]

    # Given a model as Phi-3 is published: of classes of transformers, and with these beside it
    names = ["config.json", "tokenizer_config.json"]
    chat_tokenizer("chatml").save_pretrained(tmp_path)
    without = written()
    code = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model", "AutoTokenizer": ["own.Slow", "own.Fast"]}
    for file in (source / names[0], tmp_path / names[1]):
        file.write_text(json.dumps({**json.loads(file.read_bytes()), "auto_map": code}))

    # Then its export is what it is without
    assert written() == without


@pytest.mark.parametrize(("kind", "named"), [("exaone", "ExaoneForCausalLM"), ("llama", "LlamaForCausalLM")])
def test_a_type_without_a_class_of_its_own_keeps_that_which_servers_know(tmp_path: Path, kind: str, named: str) -> None:
    save_model(kind, tmp_path)
    chat_tokenizer("chatml").save_pretrained(tmp_path)
    config = {**json.loads((tmp_path / "config.json").read_bytes()), "architectures": ["ExaoneForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))

    files = companions(build_on_meta(tmp_path), tmp_path, load_tokenizer(tmp_path), CARD)

    assert json.loads(files["config.json"])["architectures"] == [named]


def test_the_card_says_what_the_checkpoint_says(tmp_path: Path, source: Path) -> None:
    config = resolve(job(Path("/inputs"), Path("/store"), data={"heldOut": {"fraction": 0.05}}))
    metrics = {"loss": 1.2499999031, "evalLoss": None}
    manifest = save(whole({"a": torch.zeros(2)}), LocalStore(tmp_path), metrics=metrics, tokens_seen=512)
    card = model_card(config, manifest, build_on_meta(source))
    assert "# parity\n" in card
    assert "of `file:///inputs/model` on\n\n- `file:///inputs/data/train.jsonl`\n" in card
    rows = [line for line in card.splitlines() if line.startswith("| ") and "|---" not in line]
    assert rows[1:] == [
        "| steps | 6 |",
        "| tokens | 512 |",
        "| training loss | 1.25 |",
        "| peak learning rate | 0.001 |",
        "| held out of training | 0.05 of the rows |",
    ]
    other = resolve(job(Path("/inputs"), Path("/store"), training={"loss": "dft", "neftuneNoiseAlpha": 5}))
    card = model_card(other, manifest, build_on_meta(source))
    assert "| trained with | cross-entropy times probability (dynamic fine-tuning), as the training loss is |" in card
    assert "| noise on embeddings | NEFTune, alpha 5 |" in card
    smoothed = resolve(job(Path("/inputs"), Path("/store"), training={"labelSmoothing": 0.1}))
    assert "| label smoothing | 0.1 |" in model_card(smoothed, manifest, build_on_meta(source))
    muon = resolve(job(Path("/inputs"), Path("/store"), training={"optimizer": {"type": "muon"}}))
    card = model_card(muon, manifest, build_on_meta(source))
    assert "| optimizer | Muon for matrices of layers, AdamW for all else |" in card
    held = resolve(job(Path("/inputs"), Path("/store"), training={"precision": "bf16", "parameterDtype": "bf16"}))
    card = model_card(held, manifest, build_on_meta(source))
    assert "| weights in training | bf16, rounded stochastically |" in card
    begun = resolve(job(Path("/inputs"), Path("/store"), lora={"adapterUri": "hf://org/adapters"}))
    assert "| adapters began as those of | `hf://org/adapters` |" in model_card(begun, manifest, build_on_meta(source))
    rows = [{"uri": uri} for uri in ("hf://org/rows@v1", "hf://org/rows", "s3://b/rows")]
    sections = {"model": {"uri": "hf://org/base@main"}, "data": {"train": rows}}
    known = resolve(job(Path("/inputs"), Path("/store"), **sections))
    lines = model_card(known, manifest, build_on_meta(source)).splitlines()
    assert lines[1:5] == ["library_name: transformers", "base_model: org/base", "datasets:", "- org/rows"]
    assert lines[5].startswith("pipeline_tag: ")
