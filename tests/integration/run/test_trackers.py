"""The trackers of callbacks/trackers.py with the libraries themselves, in an environment of their own."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import sft_trainer
from sft_api.generate import ROOT
from tests.cluster.binaries import build_lock, cache_folder

REQUIREMENTS = ROOT / "requirements" / "trackers.txt"

PROGRAM = """
import json, logging, sys
from sft_trainer.callbacks import Control, End, Log, Run
from sft_trainer.callbacks import trackers

logging.basicConfig(level=logging.INFO)
kind, arguments, first, last, outcome = json.loads(sys.argv[1])
tracker = getattr(trackers, kind)(**arguments)
spec = {"data": {"train": [{"uri": "hf://org/rows"}]}, "training": {"steps": 10}}
tracker.on_start(Run("tiny", "team", 1, first, 10, 1, True, "s3://bucket/run", None, spec), Control())
for step in range(first + 1, last + 1):
    tracker.on_log(Log(step, {"step": step, "loss": 10 / step, "gradNorm": float("nan"), "time": 1e9}), Control())
tracker.on_log(Log(last, {"evalLoss": 1.5, "evalLosses": {"held-out": 1.5}}), Control())
tracker.on_end(End(last, outcome, "", None))
assert not tracker._thread.is_alive() and not tracker._troubles
"""
KILLED = """
import logging, os, time
import psutil
from sft_trainer.callbacks import Control, End, Log, Run
from sft_trainer.callbacks.trackers import WeightsAndBiases

def until(true):
    while not true():
        time.sleep(0.05)

logging.basicConfig(level=logging.INFO)
tracker = WeightsAndBiases("demo")
tracker.on_start(Run("tiny", "team", 1, 0, 10, 1, True, "s3://bucket/run", None, {}), Control())
tracker.on_log(Log(1, {"loss": 1.0}), Control())
until(lambda: hasattr(tracker, "_run"))
for process in psutil.Process().children():
    process.kill()
    process.wait()
for step in range(2, 11):
    tracker.on_log(Log(step, {"loss": 1.0}), Control())
    time.sleep(0.05)
tracker.on_end(End(10, "complete", "", None))
assert tracker._troubles and not tracker._thread.is_alive()
os._exit(0)
"""
LOOK = """
import json, sys
from mlflow import MlflowClient

client = MlflowClient(sys.argv[1])
(experiment,) = [each for each in client.search_experiments() if each.name == "demo"]
found = [
    {
        "name": run.info.run_name,
        "status": run.info.status,
        "params": run.data.params,
        "metrics": run.data.metrics,
        "losses": [
            (each.step, each.value, each.timestamp) for each in client.get_metric_history(run.info.run_id, "loss")
        ],
    }
    for run in client.search_runs([experiment.experiment_id])
]
print(json.dumps(found))
"""
UPLOADED = """
import json, struct, sys
from pathlib import Path
from wandb.proto.wandb_internal_pb2 import Record

def records(data):
    # A log of LevelDB: blocks of 32 KiB, in which parts of records have a checksum, a length and a kind before them.
    at, parts = 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        size, kind = struct.unpack_from("<HB", data, at + 4)
        parts += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""

found = {"history": []}
for raw in records(Path(sys.argv[1]).read_bytes()):
    record = Record()
    record.ParseFromString(raw)
    if record.HasField("run"):
        found |= {"id": record.run.run_id, "project": record.run.project, "tags": list(record.run.tags)}
    if record.HasField("history"):
        items = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        found["history"].append({name: value for name, value in items.items() if not name.startswith("_")})
    if record.HasField("exit"):
        found["exit"] = record.exit.exit_code
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def python() -> str:
    """One that has the libraries, and what this one has behind them."""
    folder = cache_folder() / f"trackers-{hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()[:16]}"
    with build_lock():
        if not (folder / "whole").exists():
            uv = [sys.executable, "-m", "uv"]
            subprocess.run([*uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(folder)], check=True)
            sync = [*uv, "pip", "sync", "--quiet", f"--python={folder}/bin/python", "--require-hashes"]
            subprocess.run([*sync, str(REQUIREMENTS)], check=True)
            (folder / "whole").touch()
    return str(folder / "bin" / "python")


def run(
    python: str, folder: Path, program: str, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    # Behind its own, as some of ours are of other versions.
    ours = [str(Path(sft_trainer.__file__).parents[1]), *(path for path in sys.path if path.endswith("-packages"))]
    program = f"import sys; sys.path += {ours!r}\n{program}"
    done = subprocess.run(
        [python, "-c", program, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": "", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


def told(python: str, folder: Path, kind: str, arguments: dict[str, str], *steps: Any, **environment: str) -> str:
    return run(python, folder, PROGRAM, json.dumps([kind, arguments, *steps]), **environment).stderr


def test_mlflow_has_one_run_over_an_interruption(python: str, tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/mlruns"
    arguments = {"experiment": "demo", "tracking_uri": uri}
    for steps in ((0, 5, "stopped"), (3, 10, "complete")):
        told(python, tmp_path, "MLflow", arguments, *steps, MLFLOW_ALLOW_FILE_STORE="true")

    (found,) = json.loads(run(python, tmp_path, LOOK, uri, MLFLOW_ALLOW_FILE_STORE="true").stdout)

    assert (found["name"], found["status"]) == ("tiny", "FINISHED")
    assert found["params"]["data.train.0.uri"] == "hf://org/rows"
    assert found["params"]["checkpointUri"] == "s3://bucket/run"
    assert found["metrics"] == {"loss": 1.0, "evalLoss": 1.5, "evalLosses/held-out": 1.5}
    expected = [*range(1, 6), *range(4, 11)]
    assert sorted(map(tuple, found["losses"])) == sorted((step, 10 / step, 10**12) for step in expected)


def test_wandb_gets_each_step_under_the_same_run(python: str, tmp_path: Path) -> None:
    offline = {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path)}
    arguments = {"project": "demo", "tags": "a, b"}
    for steps in ((0, 5, "failed"), (3, 10, "complete")):
        told(python, tmp_path, "WeightsAndBiases", arguments, *steps, **offline)

    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"), key=lambda file: file.stat().st_mtime_ns)
    first, second = (json.loads(run(python, tmp_path, UPLOADED, str(file)).stdout) for file in files)

    assert first["id"] == second["id"]
    assert first["id"].startswith("tiny-")
    assert (first["project"], first["tags"], first["exit"], second["exit"]) == ("demo", ["a", "b"], 1, 0)
    assert first["history"] == [
        *({"loss": 10 / step, "step": step} for step in range(1, 6)),
        {"evalLoss": 1.5, "evalLosses/held-out": 1.5, "step": 5},
    ]
    assert [point["step"] for point in second["history"]] == [*range(4, 11), 10]


def test_wandb_goes_on_when_the_process_beside_the_trainer_was_killed(python: str, tmp_path: Path) -> None:
    # As where a pod's memory runs out
    run(python, tmp_path, KILLED, WANDB_MODE="offline", WANDB_DIR=str(tmp_path), WANDB_SILENT="true")

    before, after = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"), key=lambda file: file.stat().st_mtime_ns)
    assert before.name == after.name  # the run's id
    told = json.loads(run(python, tmp_path, UPLOADED, str(after)).stdout)
    # What was given to it without an answer may be lost
    assert ([point["step"] for point in told["history"]][-5:], told["exit"]) == ([6, 7, 8, 9, 10], 0)
