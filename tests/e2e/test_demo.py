"""`make demo`, as it is run after its setup: the small model answers held-out questions rightly."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fixtures_inputs import EXAMPLES

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
