"""The demo: make real inputs, train examples/demo.yaml with `sft run`, and ask the model before and after.

    python examples/demo.py [--seed N]

Asks QUESTIONS held-out questions (module_questions.py says what is held out) of the model before training and of the
exported one, and counts the answers that are right to the letter. Prints what it found as key=value, the last of them
`correct_before`, `correct_after` and `seconds`; exits non-zero when the model did not learn the task, or when the
export's loss is not the reported one.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from asking import answers, held_out_loss
from make_inputs import make_inputs
from pace import expected_seconds, in_words

MANIFEST = Path(__file__).with_name("demo.yaml")
FOLDER = Path(__file__).resolve().parents[1] / "build" / "demo"
"""Of this checkout: another one, or another user of the machine, has its own. Made anew by every demo."""
QUESTIONS = 20
WANTED_CORRECT = 16
WANTED_DROP = 0.3


def read_questions(rows: Path) -> tuple[list[str], list[str]]:
    """The first QUESTIONS questions of a file of rows, and their answers."""
    conversations = [json.loads(line)["messages"] for line in rows.read_text().splitlines()[:QUESTIONS]]
    return [turns[0]["content"] for turns in conversations], [turns[1]["content"] for turns in conversations]


def write_manifest(folder: Path) -> Path:
    """MANIFEST with `folder` where it says /demo; written there."""
    manifest = folder / MANIFEST.name
    manifest.write_text(MANIFEST.read_text().replace("file:///demo/", f"file://{folder}/"))
    return manifest


def show(questions: list[str], wanted: list[str], before: list[str], after: list[str]) -> None:
    """A question as it was answered before and after, and every one that is still answered wrongly."""
    print(f"\nQuestion:         {questions[0]}\nBefore training:  {before[0][:60]!r}\nAfter training:   {after[0]!r}")
    for question, right, given in zip(questions, wanted, after, strict=True):
        if given != right:
            print(f"Still wrong:      {question} {given!r} instead of {right!r}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="of the choice of functions and of the first weights")
    options = parser.parse_args()
    # make demo says when it began to set everything up.
    began = float(os.environ.get("SFT_DEMO_BEGAN") or time.time())

    print("Making a small model, and questions about Python's standard library ...", flush=True)
    imports_began = time.time()
    import torch
    from transformers.utils.logging import disable_progress_bar

    import_seconds = time.time() - imports_began
    disable_progress_bar()
    # As many as a process of the run has; more of them only get in each other's way where other things run.
    torch.set_num_threads(1)
    shutil.rmtree(FOLDER, ignore_errors=True)
    made = make_inputs(FOLDER, size="demo", seed=options.seed)
    manifest = write_manifest(FOLDER)
    expected = expected_seconds(manifest, import_seconds)
    print(f"Measured on this machine: {in_words(expected)} from here to the trained and examined model.", flush=True)

    questions, wanted = read_questions(made.eval)
    before = answers(made.model, questions)
    prepared = time.time()
    run = subprocess.run(
        [sys.executable, "-m", "sft_cli.main", "run", str(manifest), "--output", "json"],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    trained = time.time()
    if run.returncode != 0:
        return run.returncode
    status: dict[str, Any] = json.loads(run.stdout)
    export = Path(status["export"]["uri"].removeprefix("file://"))
    after = answers(export, questions)
    first, last = status["progress"]["firstEvalLoss"], status["progress"]["evalLoss"]
    drop = 1 - last / first
    difference = abs(held_out_loss(export, made.eval) - last)
    correct_before, correct_after = (
        sum(given == right for given, right in zip(given_answers, wanted, strict=True))
        for given_answers in (before, after)
    )
    show(questions, wanted, before, after)
    print(f"\nThe model: {export}\nThe curve: {status['progress']['curve'].removeprefix('file://')}")
    print(f"eval_loss_before={first:.4f}")
    print(f"eval_loss_after={last:.4f}")
    print(f"export_loss_difference={difference:.2e}")
    print(f"eval_loss_drop={drop:.3f}")
    print(f"setup_seconds={prepared - began:.1f}")
    print(f"training_seconds={trained - prepared:.1f}")
    print(f"correct_before={correct_before}")
    print(f"correct_after={correct_after}")
    print(f"seconds={time.time() - began:.1f}")
    learned = correct_after >= WANTED_CORRECT > correct_before and drop >= WANTED_DROP
    return 0 if learned and difference <= 1e-4 else 1


if __name__ == "__main__":
    sys.exit(main())
