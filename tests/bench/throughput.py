"""Tokens a second of the trainer beside TRL's, in turn, on one thread of this machine.

    python -m tests.bench.throughput PYTHON_WITH_TRL [REPEATS]

Both train a model of about 6 M parameters in fp32 on conversations with AdamW, at most 512 tokens an example, without
gradient checkpointing; padding is not counted. Warm-up steps are left out. Prints medians as key=value.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.fixtures_inputs import make_inputs
from tests.parity.runs import manifest, resolve, run_workers, step_records

STEPS = 12
WARM_UP_STEPS = 3
TOKENS_PER_STEP = 4096


def ours(inputs: Path, work: Path, packing: str) -> dict[str, float]:
    """One run of our trainer, started as the supervisor starts it."""
    training: dict[str, Any] = {"steps": STEPS}
    if packing == "ffd":
        training |= {"globalBatchTokens": TOKENS_PER_STEP, "maxTokensPerMicroBatch": 2048}
    else:
        training |= {"globalBatchSize": 48, "microBatchSize": 8}
    job = manifest(
        inputs,
        work / "store",
        training=training,
        data={"packing": packing, "trainOn": "allAssistantMessages"},
        export={"atEnd": False},
    )
    (peak,) = run_workers(resolve(job), work, module="sft_trainer")
    records = list(step_records(work / "store").values())[WARM_UP_STEPS:]
    return {
        "tokensPerSecond": sum(record["tokens"] for record in records) / sum(record["seconds"] for record in records),
        "peakMemoryBytes": peak,
    }


def theirs(python: str, inputs: Path, mode: str) -> dict[str, float]:
    """One run of TRL."""
    script = Path(__file__).with_name("trl_run.py")
    done = subprocess.run(
        [python, str(script), str(inputs / "model"), str(inputs / "data" / "train.jsonl"), mode, str(STEPS), "4096"],
        capture_output=True,
        text=True,
        env={"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PATH": "/usr/bin:/bin"},
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(done.stderr[-3000:])
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def main() -> None:
    python, repeats = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 3
    with tempfile.TemporaryDirectory(prefix="sft-bench-") as scratch:
        work = Path(scratch)
        make_inputs(work / "inputs", size="small")
        for packing, mode in (("ffd", "packing"), ("none", "padding")):
            figures: dict[str, list[dict[str, float]]] = {"ours": [], "trl": []}
            for repeat in range(repeats):
                # A B, B A, A B: the machine's drift falls on both alike.
                order = ("ours", "trl") if repeat % 2 == 0 else ("trl", "ours")
                for who in order:
                    if who == "ours":
                        figures[who].append(ours(work / "inputs", work / f"{packing}-{repeat}", packing))
                    else:
                        figures[who].append(theirs(python, work / "inputs", mode))
            name = "packed" if packing == "ffd" else "unpacked"
            for who, runs in figures.items():
                rate = statistics.median(run["tokensPerSecond"] for run in runs)
                memory = max(run["peakMemoryBytes"] for run in runs)
                print(f"{name}_{who}_tokens_per_second={rate:.0f}")
                print(f"{name}_{who}_peak_memory_mib={memory / 2**20:.0f}")
            ratios = [
                a["tokensPerSecond"] / b["tokensPerSecond"]
                for a, b in zip(figures["ours"], figures["trl"], strict=True)
            ]
            print(f"{name}_ratio_to_trl={statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
