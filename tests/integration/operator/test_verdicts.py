"""A real supervisor and a real operator: who restarts, who judges, and how many attempts that makes."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from sft_api.ports import free_port
from tests.integration.operator.scene import Scene, StartOperator
from tests.integration.supervisor.pods import Group


def dies(*at_steps: int) -> list[dict[str, Any]]:
    """A worker that dies at the first of these steps in its first start, at the second in its second, and so on."""
    return [{"rank": 0, "start": start, "step": step, "do": "exit 1"} for start, step in enumerate(at_steps, start=1)]


@pytest.mark.parametrize(
    ("faults", "max_restarts", "sentence", "further"),
    [
        (dies(1), 0, "1 failure, and spec.runPolicy.maxRestarts is 0", 1),
        (dies(*[1] * 20), 2, "3 failures, and spec.runPolicy.maxRestarts is 2", 0),
        (dies(*range(3, 60, 3)), 3, " failures, and spec.runPolicy.maxRestarts is 3", 1),
    ],
    ids=["none allowed", "no progress", "progress"],
)
def test_a_run_that_fails_too_often_is_not_tried_much_further(
    own_scene: Scene,
    start_operator: StartOperator,
    tmp_path: Path,
    faults: list[dict[str, Any]],
    max_restarts: int,
    sentence: str,
    further: int,
) -> None:
    # Given a pod with a real supervisor, which the operator asks, and a worker that dies again and again
    group = Group(tmp_path, free_port(), steps=100_000, faults=faults)
    own = start_operator(namespace=own_scene.namespace, progressUrl=f"http://127.0.0.1:{group.port}/v1/progress")
    own_scene.submit("run", runPolicy={"maxRestarts": max_restarts})
    uid = own_scene.until(lambda: own_scene.get("sftjobs", "run"))["metadata"]["uid"]
    group.write_files()
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace("uid-1", uid))
    try:
        pod = group.start()

        # When the operator follows it
        own_scene.start("run")
        status = own_scene.until_state("run", "Failed")

        # Then it ends the run, and no attempt was begun that the verdict has to end; but for one that had got further
        own_scene.until(lambda: own_scene.get("jobs", "run") is None)
        pod.signal(signal.SIGTERM)
        assert pod.wait() == 30
        attempts = len(group.starts(0))
        allowed = min(max_restarts, 3) + 1
        assert allowed <= attempts <= allowed + further
        assert own_scene.condition("run", "Failed")["reason"] == "RestartsExhausted"
        assert sentence in status["message"]
        assert "the last was WorkerCrashed: worker of rank 0 exited with code 1" in status["message"]
        assert allowed <= status["restarts"]["failures"] <= attempts
    finally:
        group.close()
        own.stop()
