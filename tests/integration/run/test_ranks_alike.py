"""Two nodes that hold different things do not train; a hub that is away does not stop a run that has all it needs."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sft_api.ports import free_port
from tests.integration.run.hub import Hub, serve_hub
from tests.integration.run.runs import Place
from tests.parity.runs import manifest, resolve
from tests.waiting import PATIENCE_SECONDS
from tests.worker_processes import is_worker

FIRST = "1" * 40


@pytest.fixture(scope="module")
def repositories(tiny_inputs: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("hub")
    shutil.copytree(tiny_inputs.model, folder / "model")
    (folder / "chats" / "data").mkdir(parents=True)
    shutil.copy(tiny_inputs.train, folder / "chats" / "data" / "train.jsonl")
    return {"org/tiny": folder / "model", "datasets/org/chats": folder / "chats"}


def nodes(folder: Path, inputs: Any, *hubs: Hub) -> list[dict[str, Any]]:
    """One process on each of as many nodes as ``hubs``, each with a cache of its own; how each of them ended."""
    world = len(hubs)
    job = manifest(
        inputs,
        folder / "store",
        processes=1,
        model={"uri": "hf://org/tiny"},
        data={"train": [{"uri": "hf://org/chats", "split": "train[:40]"}], "maxLength": 256, "workers": 1},
        training={"steps": 1, "globalBatchTokens": 1024, "maxTokensPerMicroBatch": 512},
        compute={"gpusPerNode": 0, "nodes": world},
        export={"atEnd": False},
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(resolve(job).model_dump_json(exclude_none=True))
    port = str(free_port())
    started = []
    for rank, hub in enumerate(hubs):
        here = folder / f"node-{rank}"
        (here / "run" / "errors").mkdir(parents=True)
        environment = {
            **os.environ,
            **hub.environment(),
            "SFT_CONFIG": str(folder / "config.json"),
            "SFT_RUN_DIR": str(here / "run"),
            "SFT_CACHE_DIR": str(here / "cache"),
            "HF_HOME": str(here / "huggingface"),
            "RANK": str(rank),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": "1",
        }
        with (here / "log").open("w") as log:
            started.append(subprocess.Popen([sys.executable, "-m", "sft_trainer"], env=environment, stderr=log))
    ends = []
    try:
        for rank, process in enumerate(started):
            code = process.wait(timeout=2 * PATIENCE_SECONDS)
            report = folder / f"node-{rank}" / "run" / "errors" / f"rank-{rank}.json"
            ends.append({"code": code, **(json.loads(report.read_text()) if report.exists() else {})})
    finally:
        for process in started:
            process.kill()
            process.wait()
    return ends


def test_nodes_with_different_files_do_not_train(
    repositories: dict[str, Path], tiny_inputs: Any, tmp_path: Path
) -> None:
    # Given a model that is another one where the second node fetches it, under the same commit: a moved branch is
    # pinned by whoever is first, if the other one comes late
    other = tmp_path / "other"
    shutil.copytree(repositories["org/tiny"], other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "initializer_range": 0.5}))
    elsewhere = {**repositories, "org/tiny": other}
    with serve_hub(repositories, commit=FIRST) as first, serve_hub(elsewhere, commit=FIRST, port=0) as second:
        ends = nodes(tmp_path, tiny_inputs, first, second)

    # Then both end with one sentence that names them and what they hold, before any step
    assert [end["code"] for end in ends] == [38, 38], ends
    assert ends[0]["failure"] == ends[1]["failure"] == "RanksDiffer"
    assert ends[0]["message"] == ends[1]["message"]
    for words in (
        f"model.uri is hf://org/tiny with revision {FIRST}, files ",
        f" on rank 0, but hf://org/tiny with revision {FIRST}, files ",
        "on rank 1. Pin model.uri",
    ):
        assert words in ends[0]["message"]
    assert not (tmp_path / "store" / "attempts").exists()


def test_nodes_that_hold_the_same_train(repositories: dict[str, Path], tiny_inputs: Any, tmp_path: Path) -> None:
    with serve_hub(repositories, commit=FIRST) as hub:
        ends = nodes(tmp_path, tiny_inputs, hub, hub)
    assert [end["code"] for end in ends] == [0, 0], ends


def test_a_hub_that_goes_away_does_not_stop_a_run_that_is_restarted(
    repositories: dict[str, Path], place: Place
) -> None:
    # Given a run that has saved, from repositories of the hub that no other one has fetched
    names = {"org/tiny": "org/went-away", "datasets/org/chats": "datasets/org/chats-went-away"}
    job = place.job(
        model={"uri": "hf://org/went-away"},
        data={"train": [{"uri": "hf://org/chats-went-away", "split": "train[:60]"}]},
        training={"steps": 40, "globalBatchTokens": 512},
        checkpoint={"everySteps": 5},
    )
    with serve_hub({names[name]: folder for name, folder in repositories.items()}):
        process = place.start_standing(job, 12)

    # When the hub is gone, and then a worker
    (worker,) = workers(place)
    os.kill(worker, signal.SIGKILL)
    ended = place.finish(process)

    # Then the run goes on to its end with what it has
    assert ended.code == 0, ended.said
    assert ended.status["restarts"]["failures"] == 1
    assert ended.latest == 40
    log = "".join(file.read_text() for file in (place.store() / "logs").iterdir())
    for repository in ("org/went-away", "org/chats-went-away"):
        assert re.search(rf"hf://{repository}@(\w+) is commit \1\b", log), "the commit that it began with"


def workers(place: Place) -> list[int]:
    """Pids of the training processes."""
    return list(filter(is_worker, place.processes()))
