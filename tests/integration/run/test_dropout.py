"""Dropout and noise are drawn by a bin's place in the run: neither other processes nor a resume change the losses."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.parity.runs import fork_workers, manifest, resolve, step_records

STEPS = 6
SAVED = 3


@pytest.fixture(scope="module")
def inputs(tiny_inputs: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny inputs, with a model that drops a quarter of what attention sees."""
    folder = tmp_path_factory.mktemp("dropout")
    shutil.copytree(tiny_inputs.model, folder / "model")
    (folder / "data").mkdir()
    shutil.copy(tiny_inputs.train, folder / "data" / "train.jsonl")
    config = folder / "model" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "attention_dropout": 0.25}))
    return folder


def losses(inputs: Path, work: Path, *, processes: int, store: Path | None = None, seed: int = 42) -> dict[int, float]:
    store = store or work / "store"
    job = manifest(
        inputs,
        store,
        processes=processes,
        training={
            "steps": STEPS,
            "seed": seed,
            "neftuneNoiseAlpha": 20,
            "globalBatchTokens": 2048,
            "maxTokensPerMicroBatch": 512,
            "optimizer": {"learningRate": 1e-3},
        },
        data={"train": [{"uri": f"file://{inputs}/data/train.jsonl", "split": "train[:60]"}]},
        checkpoint={"uri": f"file://{store}", "everySteps": SAVED},
        export={"atEnd": False},
    )
    fork_workers(resolve(job), work, module="sft_trainer")
    return {step: record["loss"] for step, record in step_records(store).items()}


def test_losses_with_dropout_and_noise_are_the_same_on_any_number_of_processes(inputs: Path, tmp_path: Path) -> None:
    # Given a run on one process
    alone = losses(inputs, tmp_path / "one", processes=1)
    assert sorted(alone) == [*range(1, STEPS + 1)]

    # When it is done by two
    shared = losses(inputs, tmp_path / "two", processes=2)

    # Then the losses differ by rounding only
    assert shared == pytest.approx(alone, rel=2e-5)

    # And when one of its checkpoints is gone on from by two
    store = tmp_path / "resumed" / "store"
    shutil.copytree(tmp_path / "one" / "store", store)
    (last,) = (store / "checkpoints").glob(f"step-{STEPS:08d}-*")
    shutil.rmtree(last)
    (store / "done.json").unlink()
    shutil.rmtree(store / "metrics")
    resumed = losses(inputs, tmp_path / "resumed", processes=2, store=store)
    assert sorted(resumed) == [*range(SAVED + 1, STEPS + 1)]
    assert resumed == pytest.approx({step: alone[step] for step in resumed}, rel=2e-5)
