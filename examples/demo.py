"""The demo: make real inputs, train examples/demo.yaml with `sft run`, compare the model before and after.

    python examples/demo.py

Prints `eval_loss_drop` (share of the held-out loss that training removed) and the seconds it took, and exits non-zero
when the model did not learn or the export's loss is not the reported one.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from make_inputs import make_inputs

MANIFEST = Path(__file__).with_name("demo.yaml")
INPUTS = Path("/tmp/sft-demo")
QUESTION = "What does `os.path.join` do?"
WANTED_DROP = 0.3


def answer(model_path: Path, question: str) -> str:
    """What the model in ``model_path`` says, greedily."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = AutoModelForCausalLM.from_pretrained(model_path)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        output = model.generate(**prompt, max_new_tokens=60, do_sample=False, repetition_penalty=1.3)
    return tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True).strip()


def held_out_loss(model_path: Path, rows: Path) -> float:
    """Mean loss per assistant token, computed by plain transformers: an independent check of the reported one."""
    import torch
    from torch.nn.functional import cross_entropy
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = AutoModelForCausalLM.from_pretrained(model_path)
    total, count = 0.0, 0
    for line in rows.read_text().splitlines():
        encoded = tokenizer.apply_chat_template(
            json.loads(line)["messages"], return_dict=True, return_assistant_tokens_mask=True
        )
        ids, mask = torch.tensor(encoded["input_ids"]), torch.tensor(encoded["assistant_masks"])
        if len(ids) > 512:
            continue
        labels = torch.where(mask == 1, ids, -100)[1:]
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0, :-1]
        total += cross_entropy(logits, labels, reduction="sum").item()
        count += int((labels != -100).sum())
    return total / count


def evaluation_losses(store: Path) -> dict[int, float]:
    """Held-out loss by step, from the step records in the checkpoint store."""
    records = [
        json.loads(line) for file in sorted(store.glob("metrics/*.jsonl")) for line in file.read_text().splitlines()
    ]
    return {record["step"]: record["evalLoss"] for record in records if "evalLoss" in record}


def main() -> int:
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    # make demo says when it began to set everything up.
    began = float(os.environ.get("SFT_DEMO_BEGAN") or time.time())
    print("Making inputs from Python's standard library ...", flush=True)
    make_inputs(INPUTS, size="demo")
    before = answer(INPUTS / "model", QUESTION)
    prepared = time.time()
    run = subprocess.run(
        [sys.executable, "-m", "sft_cli.main", "run", str(MANIFEST), "--fresh", "--output", "json"],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    trained = time.time()
    if run.returncode != 0:
        return run.returncode
    status: dict[str, Any] = json.loads(run.stdout)
    export = Path(status["export"]["uri"].removeprefix("file://"))
    losses = evaluation_losses(INPUTS / "run")
    first, last = losses[min(losses)], losses[max(losses)]
    drop = 1 - last / first
    independent = held_out_loss(export, INPUTS / "data" / "eval.jsonl")
    difference = abs(independent - status["progress"]["evalLoss"])
    print(f"\nQuestion: {QUESTION}\n\nBefore training:\n  {before}\n\nAfter training:\n  {answer(export, QUESTION)}\n")
    print(f"The model: {export}")
    print(f"eval_loss_before={first:.4f}")
    print(f"eval_loss_after={last:.4f}")
    print(f"export_loss_difference={difference:.2e}")
    print(f"eval_loss_drop={drop:.3f}")
    print(f"setup_seconds={prepared - began:.1f}")
    print(f"training_seconds={trained - prepared:.1f}")
    return 0 if drop >= WANTED_DROP and difference <= 1e-4 else 1


if __name__ == "__main__":
    sys.exit(main())
