"""The run that ``tests/bench/pairs.py`` has two trees do: a model of about 6 M parameters in fp32, on one thread."""

from pathlib import Path
from typing import Any

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
