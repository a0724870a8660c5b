"""`sft data` and `sft run` with the real trainer, a real (tiny) model and real data, on the CPU."""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from safetensors import safe_open

from sft_cli.main import cli

SFT = str(Path(sys.executable).with_name("sft"))


@pytest.fixture
def job(tiny_inputs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The manifest of a run in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SFT_CACHE_DIR", str(tmp_path / "cache"))
    document = {
        "apiVersion": "sftjob.dev/v1alpha1",
        "kind": "SFTJob",
        "metadata": {"name": "tiny"},
        "spec": {
            "model": {"uri": f"file://{tiny_inputs.model}"},
            "data": {
                "train": [{"uri": f"file://{tiny_inputs.train}", "split": "train[:40]"}],
                "eval": [{"uri": f"file://{tiny_inputs.eval}", "name": "held-out"}],
                "maxLength": 256,
                "workers": 1,
            },
            "training": {"steps": 3, "globalBatchTokens": 512, "optimizer": {"learningRate": 1e-3}},
            "compute": {"gpusPerNode": 0},
        },
    }
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def data(job: Path, *options: str) -> Result:
    return CliRunner().invoke(cli, ["data", str(job), *options])


@pytest.mark.parametrize(
    ("number", "code", "told"),
    [(errno.EROFS, 13, "set SFT_CACHE_DIR"), (errno.ENOSPC, 15, "free space")],
)
def test_a_cache_that_cannot_be_written_is_said(
    job: Path, number: int, code: int, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number), "x")

    monkeypatch.setattr("sft_trainer.data.tokenize._write_examples", refuse)

    shown = data(job, "--all")

    assert shown.exit_code == code
    assert told in shown.stderr
    assert "unexpectedly" not in shown.stderr


def test_what_is_left_out_of_a_folder_is_told(tiny_inputs: Any, job: Path, tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    shutil.copy(tiny_inputs.train, tmp_path / "rows" / "train.jsonl")
    (tmp_path / "rows" / "train-2.jsonl.xz").write_bytes(b"")
    document = yaml.safe_load(job.read_text())
    document["spec"]["data"]["train"] = [{"uri": f"file://{tmp_path}/rows"}]
    job.write_text(yaml.safe_dump(document))

    shown = data(job, "--rows", "1")

    assert shown.exit_code == 0, shown.stderr
    assert "Warning: data source file://" in shown.stderr
    assert "1 file (train-2.jsonl.xz) left out" in shown.stderr


def test_what_becomes_of_all_rows_and_the_steps_that_they_make(
    tiny_inputs: Any, job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SFT_CACHE_DIR", str(tmp_path / "cache"))

    shown = data(job, "--all")

    assert shown.exit_code == 0, shown.stderr
    rows, epoch, run = shown.stdout.splitlines()
    found = re.fullmatch(
        rf"file://{tiny_inputs.train}: 40 rows, 1 dropped as longer than data.maxLength 256; 39 examples "
        r"of \d+ to \d+ tokens \(median \d+\), ([\d,]+) tokens in all, [\d,]+ trained; \d+ earlier answers "
        r"are context only \(data.trainOn: lastAssistantMessage\)",
        rows,
    )
    assert found, rows
    tokens = int(found[1].replace(",", ""))
    bins = re.search(
        r"An epoch is 39 examples of ([\d,]+) tokens in (\d+) micro-batches of 256 tokens \((.*)% full", epoch
    )
    assert bins, epoch
    assert int(bins[1].replace(",", "")) == tokens
    assert float(bins[3]) == pytest.approx(100 * tokens / (256 * int(bins[2])), abs=0.06)
    steps = -(-int(bins[2]) // 2)
    assert epoch.endswith(f", {steps} steps of 512 tokens")
    assert run == f"The run makes 3 steps: {3 / steps:.2f} epochs"

    # With epochs in place of steps, and of what an evaluation reads
    document = yaml.safe_load(job.read_text())
    del document["spec"]["training"]["steps"]
    document["spec"]["training"]["epochs"] = 2
    document["spec"]["data"] |= {"packing": "none", "maxLength": 8}
    document["spec"]["training"]["globalBatchTokens"] = None
    job.write_text(yaml.safe_dump(document))
    evaluation = data(job, "--all", "--eval")
    assert evaluation.exit_code != 0
    assert "is left: " in evaluation.stderr
    document["spec"]["data"]["maxLength"] = 256
    job.write_text(yaml.safe_dump(document))
    unpacked = data(job, "--all").stdout.splitlines()[1:]
    assert unpacked == [
        f"An epoch is 39 examples of {tokens:,} tokens in 39 micro-batches, 2 steps of 32 examples",
        "The run makes 3 steps in 2 epochs",
    ]
    assert "1 example in" not in data(job, "--all", "--eval").stdout
    assert data(job, "--all", "-o", "jsonl").exit_code == 2


def test_rows_as_the_model_sees_them(tiny_inputs: Any, job: Path) -> None:
    answer = json.loads(tiny_inputs.train.read_text().splitlines()[0])["messages"][-1]["content"]

    shown = data(job, "--rows", "2")

    assert shown.exit_code == 0, shown.stderr
    assert f"⟦{answer}<|im_end|>⟧" in shown.stdout
    assert shown.stdout.count("⟦") == 2
    assert "40 rows, format messages" in shown.stdout
    assert "2 rows shown: " in shown.stdout


def test_rows_that_are_held_out_are_shown_with_the_evaluation_sets(tiny_inputs: Any, job: Path) -> None:
    document = yaml.safe_load(job.read_text())
    document["spec"]["data"] |= {"eval": [], "heldOut": {"fraction": 0.05}}
    job.write_text(yaml.safe_dump(document))

    def shown(*options: str) -> list[str]:
        result = data(job, *options)
        assert result.exit_code == 0, result.stderr
        return result.stdout.splitlines()

    def rows(*options: str) -> list[str]:
        return [json.loads(line)["text"] for line in shown("-n", "40", "-o", "jsonl", *options)]

    source = f"file://{tiny_inputs.train}"
    assert shown()[0] == f"{source}: 38 rows of 40, format messages"
    assert shown("--eval")[0] == f"{source}, held out: 2 rows of 40, format messages"
    assert (len(rows()), len(rows("--eval")), len({*rows(), *rows("--eval")})) == (38, 2, 40)
    assert shown("--all")[0].startswith(f"{source}: 38 rows")
    assert shown("--all", "--eval")[0].startswith(f"{source}, held out: 2 rows")


def test_rows_of_what_the_command_line_sets(job: Path) -> None:
    shown = data(job, "--set", "data.train[0].split=train[:2]")

    assert shown.exit_code == 0, shown.stderr
    assert "2 rows, format messages" in shown.stdout


def test_rows_for_machines(job: Path) -> None:
    rows = [json.loads(line) for line in data(job, "--eval", "--rows", "2", "--output", "jsonl").stdout.splitlines()]

    assert len(rows) == 2
    assert all(set(row) == {"text", "input_ids", "loss_mask"} for row in rows)
    assert all(len(row["input_ids"]) == len(row["loss_mask"]) > sum(row["loss_mask"]) > 0 for row in rows)


def test_rows_for_machines_are_json_also_where_the_locale_lacks_their_characters(tiny_inputs: Any, job: Path) -> None:
    rows = job.with_name("rows.jsonl")
    turns = [{"role": "user", "content": "Ünd?"}, {"role": "assistant", "content": "\N{GRINNING FACE}"}]
    rows.write_text(json.dumps({"messages": turns}))
    job.write_text(job.read_text().replace(str(tiny_inputs.train), str(rows)))

    shown = CliRunner(charset="latin-1").invoke(cli, ["data", str(job), "--output", "jsonl"])

    assert shown.exit_code == 0, shown.stderr
    assert "\N{GRINNING FACE}" in json.loads(shown.stdout)["text"]


def test_rows_that_cannot_be_read_are_an_error_of_their_class(tiny_inputs: Any, job: Path) -> None:
    odd = job.with_name("odd.jsonl")
    odd.write_text('{"turns": []}\n')
    job.write_text(job.read_text().replace(str(tiny_inputs.train), str(odd)))

    shown = data(job)

    assert shown.exit_code == 11
    assert "turns match no known format" in shown.stderr


def test_each_class_of_failure_has_its_exit_code(tiny_inputs: Any, job: Path, tmp_path: Path) -> None:
    good = job.read_text()
    (tmp_path / "empty").mkdir()
    cases = {
        2: good,
        10: good.replace(str(tiny_inputs.train), "/nowhere/rows.jsonl"),
        11: good.replace("train[:40]", "test"),
        12: good.replace(str(tiny_inputs.model), str(tmp_path / "empty")),
    }

    for code, text in cases.items():
        job.write_text(text)
        shown = data(job, *(["--rows", "0"] if code == 2 else []))
        assert (shown.exit_code, shown.stdout) == (code, ""), shown.stderr
        assert "unexpectedly" not in shown.stderr


def test_a_real_run_trains_evaluates_and_exports(job: Path) -> None:
    done = subprocess.run([SFT, "run", str(job), "--output", "json"], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    status = json.loads(done.stdout)
    assert status["state"] == "Complete"
    assert status["progress"]["summary"] == "3/3"
    assert 0 < status["progress"]["evalLoss"] < 7
    assert status["checkpoints"]["latest"]["step"] == 3
    assert status["checkpoints"]["latest"]["verified"] is True
    assert status["plan"]["globalBatchTokens"] == 512
    assert status["progress"]["firstLoss"] > status["progress"]["loss"] > 0
    again = subprocess.run([SFT, "run", str(job)], capture_output=True, text=True, check=False)
    result, loss, model, *_, following = again.stdout.splitlines()
    assert result == "Complete    tiny: 3/3 steps, all of them done before; --fresh trains anew"
    first, last, held_out = (status["progress"][name] for name in ("firstLoss", "loss", "evalLoss"))
    right = f"{100 * status['progress']['evalAccuracy']:.1f}% of its tokens right"
    curve = f"{job.parent}/sft-runs/tiny/curve.svg"
    assert loss == f"Loss        {first:.4f} → {last:.4f}, evaluation {held_out:.4f}, {right}; drawn in {curve}"
    assert model == f"Model       {job.parent}/sft-runs/tiny/export"
    assert following.startswith("Next")
    with safe_open(Path(status["export"]["uri"].removeprefix("file://")) / "model.safetensors", "pt") as weights:
        assert any("embed_tokens" in name for name in weights.keys())  # noqa: SIM118 - not a dict
