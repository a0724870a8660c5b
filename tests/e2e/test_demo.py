"""`make demo`, as it is run after its setup: the small model answers held-out questions rightly."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.fixtures_inputs import EXAMPLES

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
    # Given the examples, with a folder of their own instead of the one that all on this machine share
    (tmp_path / "examples").mkdir()
    for file in EXAMPLES.iterdir():
        if file.is_file():
            (tmp_path / "examples" / file.name).write_text(
                file.read_text().replace("/tmp/sft-demo", f"{tmp_path}/sft-demo")
            )

    done = subprocess.run(
        [sys.executable, "examples/demo.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stdout + done.stderr[-5000:]
    lines = done.stdout.splitlines()
    assert lines[1].startswith("Measured on this machine: about "), "before anything that takes long"
    last = dict(line.split("=") for line in lines[-len(FIGURES) :])
    assert list(last) == FIGURES
    assert int(last["correct_before"]) == 0
    assert int(last["correct_after"]) >= 16
    assert float(last["export_loss_difference"]) <= 1e-4
    assert float(last["eval_loss_drop"]) > 0.5
    assert f"The curve: {tmp_path}/sft-demo/run/curve.svg" in lines
    assert (tmp_path / "sft-demo" / "run" / "curve.svg").exists()
