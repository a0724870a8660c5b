"""What a pod is ended for before anything is started in it."""

import asyncio
import gc
import importlib.metadata
import importlib.util
import json
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from sft_api import ray
from sft_api.megatron import MISSING
from sft_api.progress import TerminationMessage
from sft_trainer import launch
from tests.parity.runs import manifest, resolve


def test_an_image_without_megatron_ends_a_job_that_needs_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = resolve(manifest(tmp_path, tmp_path / "store", strategy={"megatron": {}}))
    (tmp_path / "config.json").write_text(asked.model_dump_json(exclude_none=True))
    monkeypatch.setenv("SFT_TERMINATION_LOG", str(tmp_path / "end.json"))
    monkeypatch.setattr(launch, "is_installed", lambda: False)

    code = launch.main(["--config", str(tmp_path / "config.json"), "--run-dir", str(tmp_path / "run")])

    end = json.loads((tmp_path / "end.json").read_text())
    assert (code, end["failure"], end["message"]) == (10, "ConfigError", MISSING)


def test_an_image_older_than_the_configuration_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A run that a newer operator began, and that is begun again after images were rolled back, keeps it."""
    document = resolve(manifest(tmp_path, tmp_path / "store")).model_dump(mode="json", exclude_none=True, by_alias=True)
    document["plan"]["laterField"] = document["spec"]["data"]["train"][0]["anotherField"] = True
    (tmp_path / "config.json").write_text(json.dumps(document))
    monkeypatch.setenv("SFT_TERMINATION_LOG", str(tmp_path / "end.json"))

    code = launch.main(["--config", str(tmp_path / "config.json"), "--run-dir", str(tmp_path / "run")])

    end = json.loads((tmp_path / "end.json").read_text())
    assert (code, end["failure"]) == (10, "ConfigError")
    assert "this image does not know (spec.data.train.0.anotherField, plan.laterField): let it" in end["message"]
    assert "with deletionPolicy: Delete its checkpoints go too" in end["message"]
    assert "pydantic" not in end["message"]


@pytest.mark.parametrize(
    ("version", "missing", "said"),
    [
        ("2.60.0", "ray", "Ray is not installed"),
        ("2.60.0", "pandas", "Ray is installed without what ray.train needs (pandas)"),
        ("2.51.1", "", "Ray 2.51.1 is installed, which is older than 2.60"),
    ],
)
def test_an_image_whose_ray_cannot_be_used_ends_a_job_that_asks_for_it(
    version: str, missing: str, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With one that knows no token everybody who reaches its ports would run code."""
    find_spec = importlib.util.find_spec
    asked = resolve(manifest(tmp_path, tmp_path / "store", compute={"launcher": "ray", "gpusPerNode": 0}))
    (tmp_path / "config.json").write_text(asked.model_dump_json(exclude_none=True))
    monkeypatch.setenv("SFT_TERMINATION_LOG", str(tmp_path / "end.json"))
    monkeypatch.setattr(importlib.metadata, "version", lambda _: version)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else find_spec(name))
    monkeypatch.setattr(launch, "Node", None)  # nothing is started

    code = launch.main(["--config", str(tmp_path / "config.json"), "--run-dir", str(tmp_path / "run")])

    end = json.loads((tmp_path / "end.json").read_text())
    assert (code, end["failure"]) == (10, "ConfigError")
    assert f"in this image {said}: take" in end["message"]


def test_what_is_installed_for_these_tests_can_be_used() -> None:
    assert ray.what_is_missing() == ""


def test_no_thread_collects_the_loop_of_a_supervisor_that_has_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It would take the handlers of signals away, which only the main thread may: a traceback in the pod's log."""

    class Ended:
        def __init__(self, *_: Any) -> None: ...

        async def run(self, _: Any) -> TerminationMessage:
            asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, print)
            return TerminationMessage()

    asked = resolve(manifest(tmp_path, tmp_path / "store"))
    (tmp_path / "config.json").write_text(asked.model_dump_json(exclude_none=True))
    monkeypatch.setattr(launch, "Node", Ended)
    monkeypatch.setattr(launch, "_kept", kept := [])
    told: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)
    gc.disable()
    try:
        assert launch.main(["--config", str(tmp_path / "config.json"), "--run-dir", str(tmp_path / "run")]) == 0
        thread = threading.Thread(target=gc.collect)
        thread.start()
        thread.join()
    finally:
        gc.enable()
    assert told == []
    for loop in kept:
        loop.close()


def test_what_imports_megatron_is_imported_once_where_it_is_asked_for(tmp_path: Path) -> None:
    plain, asked = (
        resolve(manifest(tmp_path, tmp_path / "store", **sections)) for sections in ({}, {"strategy": {"megatron": {}}})
    )

    assert launch.MEGATRON not in launch._worker_imports(plain)
    assert launch._worker_imports(asked) == (*launch._worker_imports(plain), launch.MEGATRON)


@pytest.mark.parametrize(("degrees", "splits"), [({}, False), ({"tensorParallelDegree": 2}, True)])
def test_where_matrices_are_split_workers_are_told(tmp_path: Path, degrees: dict[str, int], splits: bool) -> None:
    asked = resolve(manifest(tmp_path, tmp_path / "store", processes=2, strategy={"megatron": degrees}))

    settings = launch._settings(launch._parse(["--config", str(tmp_path / "config.json")]), asked, tmp_path)

    assert settings.splits_matrices is splits


def test_workers_may_have_as_many_connections_as_the_machine_allows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of 512 processes the first one has more than 1,024, which is what container runtimes begin with."""
    found: list[int] = []

    class Started:
        def __init__(self, *_: Any) -> None: ...

        async def run(self, _: Any) -> TerminationMessage:
            asked = "import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
            found.append(int(subprocess.check_output([sys.executable, "-c", asked])))
            return TerminationMessage()

    configuration = resolve(manifest(tmp_path, tmp_path / "store"))
    (tmp_path / "config.json").write_text(configuration.model_dump_json(exclude_none=True))
    monkeypatch.setattr(launch, "Node", Started)
    monkeypatch.setattr(launch, "_kept", kept := [])
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, before[1]))
    try:
        launch.main(["--config", str(tmp_path / "config.json"), "--run-dir", str(tmp_path / "run")])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert found == [65_536 if before[1] == resource.RLIM_INFINITY else min(before[1], 65_536)]
    for loop in kept:
        loop.close()
