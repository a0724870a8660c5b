"""Manifests, data and models that cannot work are refused before the first step, in a sentence that says what to do."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.fixtures_inputs import make_inputs_script
from tests.integration.run.disks import small_disk
from tests.integration.run.hub import Hub, serve_hub
from tests.integration.run.runs import Place, assert_refused


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with serve_hub({}, gated=frozenset({"datasets/org/gated"})) as server:
        yield server


def write_rows(place: Place, odd: str) -> str:
    """A data file of good rows with ``odd`` as the line in the middle; returns its URI."""
    good = place.inputs.train.read_text().splitlines()[:40]
    file = place.folder / "odd.jsonl"
    file.write_text("\n".join([*good[:17], odd, *good[17:]]) + "\n")
    return f"file://{file}"


def test_what_a_manifest_says_wrong_starts_nothing(place: Place) -> None:
    rows = {"uri": f"file://{place.inputs.eval}"}
    wrong = {
        'spec.data.eval[0].name: must be letters, digits, - _ ., got "held out"': place.job(
            data={"eval": [{**rows, "name": "held out"}]}
        ),
        "names of data.eval must differ": place.job(data={"eval": [{**rows, "name": "a"}, {**rows, "name": "a"}]}),
        "spec.model.uri: there is no /no/such/model on this machine: correct the path": place.job(
            model={"uri": "file:///no/such/model"}
        ),
    }
    for sentence, job in wrong.items():
        ended = place.run(job)
        assert (ended.code, ended.status) == (10, {})
        assert sentence in ended.said
    assert not (place.folder / "sft-runs").exists()


@pytest.mark.parametrize(
    ("odd", "sentence"),
    [
        (
            '{"messages": [{"role": "user"',
            r"odd\.jsonl line 18 is not valid JSON \(.*\): '\{\"messages\": .*; correct or remove the line",
        ),
        (
            '{"messages": "hello"}',
            r"odd\.jsonl line 18: column 'messages' must be a list of one turn or more, not 'hello'",
        ),
    ],
    ids=["broken", "wrong type"],
)
def test_a_row_that_cannot_be_read(place: Place, odd: str, sentence: str) -> None:
    ended = place.run(place.job(data={"train": [{"uri": write_rows(place, odd)}]}))

    assert_refused(ended, 11, "DataError", sentence)
    assert "Look at the rows with sft data" in ended.said


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (
            {"train": [{"messagesKey": "chats"}]},
            r"train\.jsonl: no column 'chats', which messagesKey names, found messages; correct messagesKey",
        ),
        (
            {"eval": [{"name": "held-out", "split": "validation[:10]"}]},
            r"eval\.jsonl: no split 'validation', found test; set split",
        ),
    ],
    ids=["column", "split"],
)
def test_data_without_the_column_or_split_that_is_asked_for(place: Place, data: Any, sentence: str) -> None:
    files = {"train": place.inputs.train, "eval": place.inputs.eval}
    data = {kind: [{"uri": f"file://{files[kind]}", **source} for source in sources] for kind, sources in data.items()}

    assert_refused(place.run(place.job(data=data)), 11, "DataError", sentence)


def test_a_chat_template_without_exact_masks(place: Place) -> None:
    template = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"

    ended = place.run(place.job(model={"chatTemplate": template}))

    assert_refused(ended, 12, "ModelError", "writes no end-of-turn token .* set a model.chatTemplate that writes one")
    assert "Tokenizing" not in ended.said


def test_a_tokenizer_of_another_model_with_two_processes(place: Place) -> None:
    rows = [json.loads(line) for line in place.inputs.train.read_text().splitlines()]
    make_inputs_script.train_tokenizer(rows, vocabulary=700).save_pretrained(place.folder / "tokenizer")

    job = place.job(
        model={"uri": f"file://{place.inputs.model}", "tokenizerUri": f"file://{place.folder}/tokenizer"},
        compute={"gpusPerNode": 0, "processesPerNode": 2},
    )
    ended = place.run(job)

    sentence = (
        r"the tokenizer gives token 69\d, but the model has embeddings for 512 tokens only: set model.tokenizerUri "
        r"to the tokenizer that belongs to the model, or, where it is that, name tokens that were added to it in "
        r"model.addedTokens, which then get some"
    )
    assert_refused(ended, 12, "ModelError", sentence)


def test_a_model_that_lacks_a_shard_is_refused_before_data_is_read(place: Place) -> None:
    model = shutil.copytree(place.inputs.model, place.folder / "model")
    tensors = load_file(model / "model.safetensors")
    save_file(tensors, model / "model-00001-of-00002.safetensors")
    places = {name: f"model-0000{1 + index % 2}-of-00002.safetensors" for index, name in enumerate(tensors)}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    (model / "model.safetensors").unlink()

    ended = place.run(place.job(model={"uri": f"file://{model}"}))

    sentence = r"the model is incomplete: .* lacks model-00002-of-00002\.safetensors, named in .*index\.json"
    assert_refused(ended, 12, "ModelError", sentence)
    assert "Tokenizing" not in ended.said
    assert "Check model.uri (of adapters lora.adapterUri) and that the folder or revision is complete" in ended.said


@pytest.mark.usefixtures("hub")
def test_a_model_that_is_not_on_the_hub(place: Place) -> None:
    ended = place.run(place.job(model={"uri": "hf://org/absent@v1"}))

    sentence = r"hf://org/absent@v1 is not on the hub, or this token may not see it: check the name, or set .*HF_TOKEN"
    assert_refused(ended, 12, "ModelError", sentence)


@pytest.mark.usefixtures("hub")
def test_a_data_set_behind_terms_that_were_not_accepted(place: Place) -> None:
    ended = place.run(place.job(data={"train": [{"uri": "hf://org/gated"}]}))

    assert_refused(ended, 13, "AccessDenied", "hf://org/gated .*accept its terms .*HF_TOKEN")
    assert "Check HF_TOKEN or the AWS_* variables of this shell" in ended.said


def test_a_full_cache_disk_says_what_to_enlarge(place: Place, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", kilobytes=16) as disk:
        ended = place.run(place.job(), SFT_CACHE_DIR=str(disk))
        left = [path for path in disk.rglob("*") if path.is_file() and path.stat().st_size]

    assert_refused(ended, 15, "StorageFull", r"the disk is full \(.*No space left on device.*compute\.cacheSize")
    assert left == []
