"""What differs between processes is named, with its values and who has them."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import sft_trainer
from sft_trainer import alike
from sft_trainer.alike import difference, fingerprint
from sft_trainer.models import digest
from sft_trainer.preparation import prepare
from sft_trainer.prepared import Prepared
from sft_trainer.reporting import Reporter
from tests.parity.runs import manifest, resolve

SAME = {"model.uri": "hf://o/m with revision a", "PyTorch": "2.15.0"}


def test_every_value_and_every_rank_is_named() -> None:
    other = {**SAME, "model.uri": "hf://o/m with revision b"}
    said = difference([SAME] * 8 + [other] * 2 + [SAME] + [{**SAME, "PyTorch": "2.11.0"}])
    assert (
        "model.uri is hf://o/m with revision a on ranks 0-7, 10-11, but hf://o/m with revision b on ranks 8-9;" in said
    )
    assert "PyTorch is 2.15.0 on ranks 0-10, but 2.11.0 on rank 11." in said
    assert "Pin model.uri" in said


def test_a_value_that_one_has_not_is_said() -> None:
    assert "data.eval[x] is tokens on rank 0, but nothing on rank 1." in difference([{"data.eval[x]": "tokens"}, {}])


def test_what_differs_everywhere_stays_a_sentence() -> None:
    hundreds = [{str(name): str(rank % 2) for name in range(300)} for rank in range(4096)]
    assert len(difference(hundreds)) < 1500


@pytest.fixture(scope="module")
def place(tiny_inputs: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alike")
    shutil.copytree(tiny_inputs.model, folder / "model")
    (folder / "data").mkdir()
    shutil.copy(tiny_inputs.train, folder / "data" / "train.jsonl")
    return folder


def prepared(place: Path, monkeypatch: pytest.MonkeyPatch, **sections: Any) -> tuple[Any, Prepared]:
    monkeypatch.setenv("SFT_CACHE_DIR", str(place / "cache"))
    data = {"train": [{"uri": f"file://{place}/data/train.jsonl", "split": "train[:20]"}], "maxLength": 256}
    config = resolve(manifest(place, place / "store", **{"data": data, **sections}))
    return config, prepare(config, Reporter(place, writes=False), torch.device("cpu"))


def test_whatever_decides_the_numbers_is_in_it(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given the fingerprint of a run
    config, ready = prepared(place, monkeypatch)
    before = fingerprint(config, ready)
    assert fingerprint(*prepared(place, monkeypatch)) == before

    def changed(config: Any, ready: Prepared) -> set[str]:
        now = fingerprint(config, ready)
        return {name for name in {*now, *before} if now.get(name) != before.get(name)}

    # Other settings
    other, _ = prepared(place, monkeypatch, training={"steps": 5, "optimizer": {"learningRate": 1e-3}})
    assert "the configuration's spec.training.steps" in changed(other, ready)

    # One number of the weights, in the middle of a file of the same length
    weights = place / "model" / "model.safetensors"
    original = weights.read_bytes()
    middle = len(original) // 2
    monkeypatch.setattr(digest, "_SAMPLE_BYTES", len(original))
    config, ready = prepared(place, monkeypatch)
    before = fingerprint(config, ready)
    weights.write_bytes(original[:middle] + bytes([original[middle] ^ 1]) + original[middle + 1 :])
    assert changed(*prepared(place, monkeypatch)) == {"model.uri"}
    weights.write_bytes(original)

    # A template, and rows
    ready.tokenizer.chat_template += " "
    assert changed(config, ready) == {"the tokenizer and its chat template"}
    rows = place / "data" / "train.jsonl"
    rows.write_text(rows.read_text().replace('"content": "', '"content": "Well, '))
    assert "data.train[0]" in changed(*prepared(place, monkeypatch))


def test_adapters_that_the_run_begins_with_are_in_it(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = {
        f"base_model.model.model.layers.0.self_attn.q_proj.lora_{factor}.weight": torch.zeros(shape)
        for factor, shape in (("A", (2, 32)), ("B", (32, 2)))
    }
    folder = place / "adapters"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2}))
    lora = {"rank": 2, "targetModules": ["layers.0.self_attn.q_proj"], "adapterUri": f"file://{folder}"}
    found = []
    for number in (0.0, 1.0):
        save_file({name: value + number for name, value in weights.items()}, folder / "adapter_model.safetensors")
        found.append(fingerprint(*prepared(place, monkeypatch, lora=lora)))
    assert {name for name in found[0] if found[0][name] != found[1][name]} == {"lora.adapterUri"}
    assert re.fullmatch(rf"file://{folder} with files [0-9a-f]{{16}}", found[0]["lora.adapterUri"])


def test_rows_that_are_held_out_are_looked_at(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def seen(fraction: float) -> str:
        train = [{"uri": f"file://{place}/data/train.jsonl", "split": "train[:20]"}]
        data = {"train": train, "maxLength": 256, "heldOut": {"fraction": fraction}}
        return fingerprint(*prepared(place, monkeypatch, data=data))["data.heldOut"]

    assert re.fullmatch("rows with tokens [0-9a-f]{16}", seen(0.1))
    assert seen(0.1) != seen(0.5)


def test_megatron_is_looked_at_where_it_trains(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "megatron-core" not in fingerprint(*prepared(place, monkeypatch))
    assert fingerprint(*prepared(place, monkeypatch, strategy={"megatron": {}}))["megatron-core"]


def test_code_of_another_version_differs(place: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config, ready = prepared(place, monkeypatch)
    before = fingerprint(config, ready)
    copy = tmp_path / "sft_trainer"
    shutil.copytree(Path(alike.__file__).parent, copy)
    (copy / "loss.py").write_text((copy / "loss.py").read_text() + "\n# one line more\n")
    monkeypatch.setattr(sft_trainer, "__file__", str(copy / "__init__.py"))
    now = fingerprint(config, ready)
    assert {name for name in now if now[name] != before[name]} == {"the trainer's code"}
    assert re.fullmatch("[0-9a-f]{12}", now["the trainer's code"])
