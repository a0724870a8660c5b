"""The exported folder: everything the model consists of, and generation that stops where training taught it to."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sft_trainer.checkpoint.local import LocalStore
from sft_trainer.export import export_model
from sft_trainer.models.causal_lm import build_on_meta
from tests.parity.mask_tokenizers import chat_tokenizer
from tests.unit.trainer.test_models import build, process_group, save_model  # noqa: F401 - a fixture


def export(source: Path, target: Path, model: Any = None, **options: Any) -> None:
    export_model(
        model or build(source).model,
        LocalStore(target),
        source=source,
        dtype=torch.bfloat16,
        tokenizer=chat_tokenizer("chatml"),
        card="",
        rank=0,
        **options,
    )


def test_buffers_are_exported_in_their_own_dtype(tmp_path: Path) -> None:
    # Given a model with buffers: two that belong to it, such as the correction of a router, and one that is computed
    save_model("llama", tmp_path / "model")
    model = build(tmp_path / "model").model
    correction = torch.tensor([0.1, 1 / 3])
    layer = model.huggingface.model.layers[1]
    layer.register_buffer("correction_bias", correction)
    layer.register_buffer("seen", torch.tensor([2**40]))
    layer.register_buffer("computed", torch.ones(1), persistent=False)

    # When it is exported
    export(tmp_path / "model", tmp_path / "out", model=model)

    # Then those that belong to it are there, unrounded
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(exported["model.layers.1.correction_bias"], correction)
    assert exported["model.layers.1.seen"].tolist() == [2**40]
    assert "model.layers.1.computed" not in exported
    assert exported["model.norm.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize(("eos", "added"), [(0, True), ([0], True), (None, True), ("end", False), (["end", 0], False)])
def test_generation_keeps_its_settings_and_stops_at_the_end_of_a_turn(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, eos: Any, added: bool
) -> None:
    # Given settings of the model's own, some of which do not know the token that ends a turn
    end = chat_tokenizer("chatml").convert_tokens_to_ids("<|im_end|>")
    stops = json.loads(json.dumps(eos).replace('"end"', str(end)))
    save_model("llama", tmp_path / "model")
    # temperature without do_sample is what transformers refuses to write
    own = {"temperature": 0.6, "top_p": 0.95, "do_sample": False, "eos_token_id": stops}
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(own))

    with caplog.at_level(logging.INFO, "sft_trainer"):
        export(tmp_path / "model", tmp_path / "out")

    written = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    before = stops if isinstance(stops, list) else [] if stops is None else [stops]
    assert written == ({**own, "eos_token_id": [*before, end]} if added else own)
    assert ("added <|im_end|>, which ends a turn, to eos_token_id" in caplog.text) == added


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_without_settings_of_its_own_a_model_has_those_of_its_config(tmp_path: Path, content: str | None) -> None:
    save_model("llama", tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").unlink()
    if content is not None:
        (tmp_path / "model" / "generation_config.json").write_text(content)
    export(tmp_path / "model", tmp_path / "out")
    written = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert written["eos_token_id"] == [2, chat_tokenizer("chatml").convert_tokens_to_ids("<|im_end|>")]


def test_remains_of_an_export_that_was_killed_are_dropped(tmp_path: Path) -> None:
    # Given an export that was killed in the middle of its weights, and files of others beside and below it
    save_model("llama", tmp_path / "model")
    store = LocalStore(tmp_path / "out")
    for key in ("model.safetensors", "model-00001-of-00002.safetensors", "mine.bin", "jobs/a/model.safetensors"):
        store.open_write(key).write(b"x")

    export(tmp_path / "model", tmp_path / "out")

    left = sorted(path.name.split("-", 2)[2] for path in (tmp_path / "out").rglob(".incomplete-*"))
    assert left == ["mine.bin", "model.safetensors"]
    assert (tmp_path / "out" / "jobs" / "a").is_dir()


def test_an_export_tells_its_tensors(tmp_path: Path) -> None:
    save_model("llama", tmp_path / "model")
    told: list[tuple[int, int]] = []
    export(tmp_path / "model", tmp_path / "out", on_tensor=lambda done, total: told.append((done, total)))
    count = len(load_file(tmp_path / "out" / "model.safetensors"))
    assert told == [(done, count) for done in range(1, count + 1)]


def test_the_model_can_be_built_from_its_export(tmp_path: Path) -> None:
    save_model("qwen3", tmp_path / "model", tie_word_embeddings=True)
    export(tmp_path / "model", tmp_path / "out")
    assert build_on_meta(tmp_path / "out").stored_dtype == torch.bfloat16
