"""An operator that takes over says nothing that its predecessor knew better."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from sft_api.progress import Phase, Progress
from tests.integration.operator.scene import Scene, StartOperator, Supervisors, training


@contextmanager
def said(scene: Scene) -> Iterator[list[tuple[str, str, str]]]:
    """Everything that is written from now on: name, state and message of the job, in order."""
    seen: list[tuple[str, str, str]] = []
    version = scene.request("GET", scene.path("sftjobs")).body["metadata"]["resourceVersion"]
    url = f"{scene.api.url}{scene.path('sftjobs')}?watch=1&resourceVersion={version}"
    stream = urllib.request.urlopen(url, timeout=300)

    def read() -> None:
        with suppress(OSError, ValueError, AttributeError):
            for line in stream:
                job = json.loads(line)["object"]
                status: dict[str, Any] = job.get("status", {})
                seen.append((job["metadata"]["name"], status.get("state", ""), status.get("message", "")))

    threading.Thread(target=read, daemon=True).start()
    yield seen


def test_nothing_false_is_said_after_a_change_of_leader(
    supervisors: Supervisors, start_operator: StartOperator, own_scene: Scene
) -> None:
    # Given a job that trains, one that prepares its data, and one that no quota has room for
    first = start_operator(namespace=own_scene.namespace)
    own_scene.submit("trains")
    own_scene.start("trains")
    own_scene.submit("tokenizes")
    own_scene.start("tokenizes")
    supervisors.report(own_scene.namespace, "trains", Progress(training=training(5)))
    tokenizing = training(0, phase=Phase.TOKENIZING, phase_detail="3 of 9 files")
    supervisors.report(own_scene.namespace, "tokenizes", Progress(training=tokenizing))
    own_scene.until_state("trains", "Running")
    own_scene.until(lambda: own_scene.condition("tokenizes", "Running").get("reason") == "Tokenizing")
    hard = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "small"}}
    own_scene.create("resourcequotas", {**hard, "spec": {"hard": {"pods": "4"}}})
    own_scene.until(lambda: (own_scene.get("resourcequotas", "small") or {}).get("status", {}).get("hard"))
    own_scene.submit("waits")
    own_scene.until(lambda: own_scene.condition("waits", "Running").get("reason") == "QuotaExceeded")

    # When another operator takes over
    first.stop()
    with said(own_scene) as seen:
        reads = len(supervisors.reads)
        start_operator(namespace=own_scene.namespace)
        own_scene.until(lambda: len(supervisors.reads) > reads + 6)
        supervisors.report(own_scene.namespace, "trains", Progress(training=training(6)))
        own_scene.until(lambda: ("trains", "Running", "") in seen)

    # Then nobody hears of it
    assert {(name, state) for name, state, _ in seen} <= {
        ("trains", "Running"),
        ("tokenizes", "Starting"),
        ("waits", "Queued"),
    }
    assert {message for name, _, message in seen if name == "trains"} == {""}
    assert {message for name, _, message in seen if name == "tokenizes"} <= {"3 of 9 files"}
    assert all("exceeded quota" in message for name, _, message in seen if name == "waits")
