"""Runs on a model of images and texts: its text part is trained, and what they export is the whole model."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.exports import content
from tests.integration.run.runs import Place
from tests.integration.run.test_export import sft_export
from tests.integration.run.test_good_runs import evaluation_of
from tests.whole_models import save_whole


@pytest.fixture
def model(place: Place, request: pytest.FixtureRequest) -> Path:
    """Small, with the tokenizer of the tiny model, whose chat template is where older models of images have it."""
    folder, kind = place.folder / "model", getattr(request, "param", "gemma3")
    vocabulary = json.loads((place.inputs.model / "config.json").read_text())["vocab_size"]
    of_each_block = {"vocab_size_per_layer_input": vocabulary} if kind == "gemma4" else {}
    save_whole(kind, folder, vocab_size=vocabulary, **of_each_block)
    for file in place.inputs.model.iterdir():
        if "token" in file.name:
            shutil.copy(file, folder)
    from transformers import AutoTokenizer

    template = AutoTokenizer.from_pretrained(place.inputs.model).chat_template
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    (folder / "preprocessor_config.json").write_text("{}")
    return folder


def sections(place: Place, model: Path) -> dict[str, Any]:
    return {
        "model": {"uri": f"file://{model}"},
        "data": {
            "train": [{"uri": f"file://{place.inputs.train}", "split": "train[:60]"}],
            "eval": [{"uri": f"file://{place.inputs.eval}", "name": "held-out"}],
        },
        "export": {"atEnd": True},
    }


# The second with layers that use keys and values of others.
@pytest.mark.parametrize("model", ["gemma3", "gemma4"], indirect=True)
def test_the_text_part_is_trained_and_the_whole_model_exported(place: Place, model: Path) -> None:
    # Given a run of two processes
    ended = place.run(place.job(**sections(place, model)), "--processes", "2")
    assert ended.code == 0, ended.said
    log = "".join(file.read_text() for file in (place.store() / "logs").iterdir())
    kind = json.loads((model / "config.json").read_text())["model_type"]
    prefix = {"gemma3": "language_model.", "gemma4": "model.language_model."}[kind]
    before = load_file(model / "model.safetensors")
    kept = {name for name in before if not name.startswith(prefix)}
    assert (
        f"of a model of type {kind} the text part ({kind}_text) is trained; {len(kept)} tensors stay as they are" in log
    )

    # Then plain transformers finds in the whole model the loss that the run has measured
    export = place.store() / "export"
    rows = [json.loads(line) for line in place.inputs.eval.read_text().splitlines()]
    loss, _ = evaluation_of(export, rows, 256)
    assert loss == pytest.approx(ended.status["progress"]["evalLoss"], rel=1e-5)
    after = load_file(export / "model.safetensors")
    assert before.keys() == after.keys()
    changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert changed == {name for name in before if name not in kept and not name.endswith("layer_scalar")}
    assert {"preprocessor_config.json", "chat_template.jinja"} <= {file.name for file in export.iterdir()}

    # And so it is when it is exported later
    at_end = content(export)
    shutil.rmtree(export)
    later = sft_export(place)
    assert later.returncode == 0, later.stderr
    assert content(export) == at_end


def test_adapters_beside_the_text_part_are_those_of_the_whole_model(place: Place, model: Path) -> None:
    lora = {"rank": 4, "alpha": 8, "targetModules": ["q_proj", "down_proj"]}
    ended = place.run(place.job(lora=lora, **sections(place, model)))
    assert ended.code == 0, ended.said

    # transformers loads the model that they are beside, and has peft put them there
    rows = [json.loads(line) for line in place.inputs.eval.read_text().splitlines()]
    loss, _ = evaluation_of(place.store() / "export", rows, 256)
    assert loss == pytest.approx(ended.status["progress"]["evalLoss"], rel=1e-5)
