"""Runs that succeed, through the whole product: over S3, from the hub, and interrupted."""

import hashlib
import json
import math
import shutil
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.cluster.object_store import ObjectStore
from tests.integration.run.conftest import LONG
from tests.integration.run.hub import serve_hub
from tests.integration.run.runs import Place, step_numbers
from tests.integration.run.stores import credentials, s3_spec, upload

BUCKET = "good-runs"


def evaluation_of(folder: Path, rows: list[dict[str, Any]], max_length: int) -> tuple[float, float]:
    """Mean loss and accuracy of the model in ``folder`` per token of the last answers, their end-of-turn included.

    Plain transformers, one row at a time; longer rows are left out.
    """
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    total, right, count = 0.0, 0, 0
    for row in rows:
        prompt = tokenizer.apply_chat_template(row["messages"][:-1], tokenize=False, add_generation_prompt=True)
        answer = row["messages"][-1]["content"] + tokenizer.eos_token
        encoded = tokenizer(f"{prompt}{answer}\n", return_offsets_mapping=True, add_special_tokens=False)
        assert tokenizer.apply_chat_template(row["messages"], tokenize=False) == f"{prompt}{answer}\n"
        if len(encoded["input_ids"]) > max_length:
            continue
        end = len(prompt) + len(answer)
        trained = [index for index, (start, stop) in enumerate(encoded["offset_mapping"]) if len(prompt) < stop <= end]
        ids = torch.tensor([encoded["input_ids"]])
        with torch.no_grad():
            logits = model(ids).logits[0]
        targets, said = ids[0, trained], logits[torch.tensor(trained) - 1]
        loss = torch.nn.functional.cross_entropy(said, targets, reduction="sum")
        right += int((said.argmax(dim=-1) == targets).sum())
        total, count = total + loss.item(), count + len(trained)
    return total / count, right / count


def test_model_data_and_checkpoints_in_a_bucket(place: Place, versitygw: ObjectStore) -> None:
    # Given everything in a bucket
    inputs = place.inputs
    versitygw.client().create_bucket(Bucket=BUCKET)
    upload(versitygw, BUCKET, "models/tiny", *inputs.model.iterdir())
    upload(versitygw, BUCKET, "data", inputs.train, inputs.eval)
    job = place.job(
        model={"uri": f"s3://{BUCKET}/models/tiny"},
        data={
            "train": [{"uri": f"s3://{BUCKET}/data/train.jsonl", "split": "train[:60]"}],
            "eval": [{"uri": f"s3://{BUCKET}/data/eval.jsonl", "name": "held-out"}],
        },
        training={"steps": 6, "globalBatchTokens": 512, "optimizer": {"learningRate": 3e-3}},
        checkpoint={"uri": f"s3://{BUCKET}/runs/one", "s3": s3_spec(versitygw), "everySteps": 2, "async": False},
        export={"atEnd": True},
    )

    # When it is trained
    ended = place.run(job, **credentials(versitygw))

    # Then checkpoints and export are there, and the exported model has the loss that was reported
    assert ended.code == 0, ended.said
    status = ended.status
    assert status["state"] == "Complete"
    assert [entry["step"] for entry in status["checkpoints"]["kept"]] == [6, 4]
    assert status["checkpoints"]["latest"]["uri"] == f"s3://{BUCKET}/runs/one/checkpoints/step-00000006-a00001"
    assert status["export"] == {"uri": f"s3://{BUCKET}/runs/one/export", "step": 6}
    run = versitygw.folder / BUCKET / "runs" / "one"
    assert sorted(step_numbers(run)) == [1, 2, 3, 4, 5, 6]
    assert json.loads((run / "status.json").read_text())["phase"] == "Complete"
    assert status["progress"]["curve"] == f"s3://{BUCKET}/runs/one/curve.svg"
    assert (run / "curve.svg").read_bytes().startswith(b"<?xml")
    assert len(list((run / "tensorboard").glob("events.out.tfevents.a00001-step-*"))) == 3
    assert not (place.folder / "sft-runs" / "tiny" / "checkpoints").exists()
    rows = [json.loads(line) for line in inputs.eval.read_text().splitlines()]
    exported, accuracy = evaluation_of(run / "export", rows, max_length=256)
    assert status["progress"]["evalLoss"] == pytest.approx(exported, abs=1e-4)
    assert status["progress"]["evalAccuracy"] == pytest.approx(accuracy, abs=1e-3)
    assert 0 < accuracy < 1
    assert exported < evaluation_of(inputs.model, rows, max_length=256)[0] - 0.05


def test_a_bf16_model_and_two_sources_partly_from_the_hub(place: Place, tmp_path: Path) -> None:
    # Given a bf16 model and a data set on the hub, and a file of another format
    inputs = place.inputs
    model = tmp_path / "hub" / "model"
    shutil.copytree(inputs.model, model)
    AutoModelForCausalLM.from_pretrained(inputs.model, dtype=torch.bfloat16).save_pretrained(model)
    chats = tmp_path / "hub" / "chats" / "data"
    chats.mkdir(parents=True)
    shutil.copy(inputs.train, chats / "train.jsonl")
    job = place.job(
        model={"uri": "hf://org/tiny-in-bf16@v1"},
        data={
            "train": [
                {"uri": "hf://org/chats", "split": "train[:60]", "weight": 3},
                {"uri": f"file://{inputs.alpaca}", "split": "train[:20]", "weight": 1},
            ]
        },
        export={"atEnd": True},
    )

    # When it is trained
    with serve_hub({"org/tiny-in-bf16": model, "datasets/org/chats": chats.parent}) as hub:
        ended = place.run(job)

    # Then the master weights were fp32, and the export is those weights in bf16
    assert ended.code == 0, ended.said
    assert {"model.safetensors", "tokenizer.json", "train.jsonl"} <= set(hub.downloads)
    exported = load_file(place.store() / "export" / "model.safetensors")
    start = load_file(model / "model.safetensors")
    assert exported.keys() == start.keys()
    masters = master_weights(place.store() / "checkpoints" / "step-00000003-a00001")
    for name, tensor in exported.items():
        assert tensor.dtype == torch.bfloat16
        master = masters[name]
        assert torch.equal(tensor, master.to(torch.bfloat16)), name
        assert not torch.equal(master, start[name].float()), name
    loaded = AutoModelForCausalLM.from_pretrained(place.store() / "export")
    assert loaded.dtype == torch.bfloat16
    assert torch.equal(loaded.get_input_embeddings().weight, exported["model.embed_tokens.weight"])


def test_a_model_without_a_chat_template_learns_texts(place: Place, tmp_path: Path) -> None:
    # Given a model that knows no turns, and rows that have none
    inputs = place.inputs
    model = tmp_path / "model"
    shutil.copytree(inputs.model, model)
    (model / "chat_template.jinja").unlink()
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert tokenizer.chat_template is None
    texts = [row["output"] for row in map(json.loads, inputs.alpaca.read_text().splitlines())]
    pairs = [{"question": f"{text[:9]}", "answer": text[9:]} for text in texts[:30]]
    tokens = [{"input_ids": tokenizer(text)["input_ids"], "labels": tokenizer(text)["input_ids"]} for text in texts]
    held_out = [{"text": text} for text in texts[:8]]
    for name, rows in (("pairs", pairs), ("tokens", tokens), ("texts", held_out)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = place.job(
        model={"uri": f"file://{model}"},
        data={
            "train": [
                {
                    "uri": f"file://{tmp_path}/pairs.jsonl",
                    "format": "promptCompletion",
                    "columns": {"prompt": "question", "completion": "answer"},
                },
                {"uri": f"file://{tmp_path}/tokens.jsonl"},
            ],
            "eval": [{"uri": f"file://{tmp_path}/texts.jsonl", "name": "texts"}],
        },
        training={"steps": 6, "globalBatchTokens": 512, "optimizer": {"learningRate": 3e-3}},
        export={"atEnd": True},
    )

    # When it is trained
    ended = place.run(job)

    # Then the exported model has the loss that was reported, as transformers computes it of the texts with their ends
    assert ended.code == 0, ended.said
    exported = AutoModelForCausalLM.from_pretrained(place.store() / "export")
    assert AutoTokenizer.from_pretrained(place.store() / "export").chat_template is None
    total, count = 0.0, 0
    for row in held_out:
        ids = torch.tensor([[*tokenizer(row["text"])["input_ids"], tokenizer.eos_token_id]])
        with torch.no_grad():
            total += exported(ids, labels=ids).loss.item() * (ids.shape[1] - 1)
        count += ids.shape[1] - 1
    assert ended.status["progress"]["evalLoss"] == pytest.approx(total / count, abs=1e-4)


def master_weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The fp32 parameters in a checkpoint of one process, read as its page says, with numpy alone."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    raw = (checkpoint / manifest["index"]["name"]).read_bytes()
    assert hashlib.sha256(raw).hexdigest() == manifest["index"]["sha256"]
    magic, table_bytes, _, files, pieces, _ = struct.unpack_from("<8s5Q", raw)
    assert (magic, files) == (b"sftindex", 1)
    columns = zlib.decompress(raw[48 : len(raw) - 32 * pieces])
    table = json.loads(columns[:table_bytes])
    numbers = np.frombuffer(columns, "<i4", count=pieces, offset=table_bytes + 8 * files)
    content, start = (checkpoint / manifest["files"][0]["name"]).read_bytes(), 0
    tensors = {}
    for number in numbers:
        name, kind, dtype, shape = table[number]
        assert dtype == "float32"
        values = np.frombuffer(content, np.float32, count=math.prod(shape), offset=start)
        start += values.nbytes
        if kind == "weight":
            tensors[name] = torch.from_numpy(values.copy()).reshape(shape)
    assert start == len(content)
    return tensors


def test_ctrl_c_before_the_first_step(place: Place) -> None:
    process = place.start_standing(place.job(**LONG), 0)

    ended = place.interrupt(process)

    assert ended.code == 30, ended.said
    assert (ended.status["state"], ended.latest) == ("Suspended", None)
    assert (
        "Checkpoint  none was written in this run\nNext        the same command goes on from the newest" in ended.said
    )


def test_ctrl_c_saves_and_the_same_command_goes_on(place: Place, undisturbed: Place) -> None:
    process = place.start_standing(place.job(**LONG), 1)

    interrupted = place.interrupt(process)
    step = interrupted.latest
    after = place.run(place.job(**LONG))

    assert interrupted.code == 30, interrupted.said
    assert interrupted.status["state"] == "Suspended"
    assert interrupted.status["stepsAtRisk"] == 0
    assert step is not None
    assert 1 <= step < LONG["training"]["steps"]
    assert f"Stopped     tiny: after step {step}/" in interrupted.said
    assert f"the same command goes on from step {step}:\n  sft run tiny.yaml" in interrupted.said
    assert after.code == 0, after.said
    assert (after.status["attempt"], after.latest) == (2, LONG["training"]["steps"])
    assert sorted(path.name for path in (place.store() / "metrics").iterdir())[0] == f"step-{step:08d}-a00001.jsonl"
    assert step_numbers(place.store()) == step_numbers(undisturbed.store())
    # One curve for both attempts, which both of them name.
    curve = place.store() / "curve.svg"
    assert f"; drawn in {curve}\n" in interrupted.said
    assert f"; drawn in {curve}\n" in after.said
    assert after.status["progress"]["curve"] == f"file://{curve}"
    assert curve.stat().st_size > 1000
    steps = [
        event.step for event in EventAccumulator(str(place.store() / "tensorboard")).Reload().Scalars("train/loss")
    ]
    assert steps == list(range(1, LONG["training"]["steps"] + 1))


def test_ctrl_c_within_an_evaluation_saves_and_the_evaluation_is_made_up_for(place: Place) -> None:
    # Given a run that stands still with an evaluation of many batches before it
    data = {"eval": [{"uri": f"file://{place.inputs.train}", "name": "many", "split": "train[:300]"}]}
    training = {"steps": 4, "maxTokensPerMicroBatch": 256, "evaluation": {"everySteps": 2}}
    job = place.job(data=data, training=training, checkpoint={"keep": {"best": 1}})

    process = place.start_standing(job, 2)

    # When it is asked to stop, and goes on
    interrupted = place.interrupt(process)

    # Then it leaves the evaluation, and the same command begins with it
    assert interrupted.code == 30, interrupted.said
    assert (interrupted.latest, interrupted.status["checkpoints"]["latest"].get("evalLoss")) == (2, None)
    after = place.run(job)
    assert after.code == 0, after.said
    kept = {entry["step"]: entry for entry in after.status["checkpoints"]["kept"]}
    assert all(kept[step]["evalLoss"] > 0 for step in (2, 4))
    records = step_numbers(place.store())
    assert sorted(records) == [1, 2, 3, 4]
    assert all(records[step]["evalLoss"] > 0 for step in (2, 4))
