"""`make demo`, as it is run after its setup; and what it says about a model and about the time is so."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.fixtures_inputs import EXAMPLES  # isort: split

import pace
from asking import answers, held_out_loss
from pace import expected_seconds, in_words

CLI_PAGE = EXAMPLES.parent / "docs" / "reference" / "cli.md"
FIGURES = [
    "eval_loss_before",
    "eval_loss_after",
    "export_loss_difference",
    "eval_loss_drop",
    "setup_seconds",
    "training_seconds",
    "correct_before",
    "correct_after",
    "seconds",
]


@pytest.mark.timeout(1800)
def test_the_demo_learns_its_task_and_says_so(tmp_path: Path) -> None:
    # Given the examples of another checkout, where an earlier demo has left something
    shutil.copytree(EXAMPLES, tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    folder = tmp_path / "build" / "demo"
    left = folder / "run" / "checkpoints" / "step-00000001"
    left.mkdir(parents=True)

    # With as many threads as a user's shell gives it, unlike other tests.
    shell = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "examples/demo.py"], cwd=tmp_path, env=shell, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stdout + done.stderr[-5000:]
    lines = done.stdout.splitlines()
    assert lines[1].startswith("Measured on this machine: about "), "before anything that takes long"
    last = dict(line.split("=") for line in lines[-len(FIGURES) :])
    assert list(last) == FIGURES
    assert int(last["correct_before"]) == 0
    assert int(last["correct_after"]) >= 16
    assert float(last["export_loss_difference"]) <= 1e-4
    assert float(last["eval_loss_before"]) > 6, "of the model before training: near the logarithm of 2,048 tokens"
    assert float(last["eval_loss_drop"]) > 0.5
    assert f"The model: {folder}/run/export" in lines
    assert f"The curve: {folder}/run/curve.svg" in lines
    assert (folder / "run" / "curve.svg").exists()
    assert not left.exists()

    # And plain transformers load its model as docs/reference/cli.md says
    (code,) = re.findall(r"^```python\n(.*?)^```$", CLI_PAGE.read_text(), re.MULTILINE | re.DOTALL)
    said = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert said.stdout.startswith("It is in `"), said.stderr


def test_the_time_is_that_of_the_steps_as_they_were_measured(
    tiny_inputs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = yaml.safe_load((EXAMPLES / "demo.yaml").read_text())
    manifest["spec"]["model"]["uri"] = f"file://{tiny_inputs.model}"
    manifest["spec"]["data"]["train"][0]["uri"] = f"file://{tiny_inputs.train}"
    manifest["spec"]["training"] |= {"epochs": 2, "globalBatchTokens": 1024}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(manifest))

    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(tiny_inputs.model)
    rows = [json.loads(line)["messages"] for line in tiny_inputs.train.read_text().splitlines()]
    tokens = sum(len(tokenizer.apply_chat_template(row, return_dict=True)["input_ids"]) for row in rows)
    # In a process of its own, as in the demo: it forks, which nobody may who has had torch compute gradients.
    code = "import sys, pathlib, pace; print(pace.expected_seconds(pathlib.Path(sys.argv[1]), import_seconds=0.0))"
    command = [sys.executable, "-c", code, str(tmp_path / "job.yaml")]
    measured = subprocess.run(command, cwd=EXAMPLES, capture_output=True, text=True, check=True)
    assert float(measured.stdout) > 0

    monkeypatch.setattr(pace, "_step_seconds", lambda model, tokens, processes: 5.0)
    seconds = expected_seconds(tmp_path / "job.yaml", import_seconds=7.0)
    assert seconds == pytest.approx(pace.STARTS * 7.0 + 2 * tokens / 1024 * 5.0)


@pytest.mark.parametrize(
    ("seconds", "said"), [(3, "about 10 s"), (44, "about 40 s"), (58, "about 1 min 0 s"), (187, "about 3 min 10 s")]
)
def test_a_time_is_said_to_ten_seconds(seconds: float, said: str) -> None:
    assert in_words(seconds) == said


def test_answers_and_loss_are_those_of_the_model(tiny_inputs: Any, tmp_path: Path) -> None:
    """Given a model that says one token whatever it is asked, its answers are that token, and its loss is known."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(tiny_inputs.model)
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_inputs.model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)

    # With all logits alike, the first token of the vocabulary is taken, which ends the answer.
    assert answers(tmp_path, ["Which module has `join`?", "And `copy`?"]) == ["", ""]
    loss = held_out_loss(tmp_path, tiny_inputs.eval)
    assert loss == pytest.approx(torch.log(torch.tensor(float(len(tokenizer)))).item(), rel=1e-5)
