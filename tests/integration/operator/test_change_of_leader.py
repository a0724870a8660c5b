"""An operator that takes over says nothing that its predecessor knew better."""

from __future__ import annotations

import json
import signal
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from sft_api.progress import Phase, Progress
from tests.integration.kubernetes_api import KubernetesApi
from tests.integration.operator.scene import (
    OperatorProcess,
    Scene,
    StartOperator,
    Supervisors,
    new_scene,
    training,
)


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
    api: KubernetesApi, supervisors: Supervisors, start_operator: StartOperator, operator: OperatorProcess
) -> None:
    with new_scene(api, supervisors) as scene:
        operator.process.send_signal(signal.SIGSTOP)
        try:
            # Given a job that trains, one that prepares its data, and one that no quota has room for
            first = start_operator(namespace=scene.namespace)
            scene.submit("trains")
            scene.start("trains")
            scene.submit("tokenizes")
            scene.start("tokenizes")
            supervisors.report(scene.namespace, "trains", Progress(training=training(5)))
            tokenizing = training(0, phase=Phase.TOKENIZING, phase_detail="3 of 9 files")
            supervisors.report(scene.namespace, "tokenizes", Progress(training=tokenizing))
            scene.until_state("trains", "Running")
            scene.until(lambda: scene.condition("tokenizes", "Running").get("reason") == "Tokenizing")
            hard = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "small"}}
            scene.create("resourcequotas", {**hard, "spec": {"hard": {"pods": "4"}}})
            scene.until(lambda: (scene.get("resourcequotas", "small") or {}).get("status", {}).get("hard"))
            scene.submit("waits")
            scene.until(lambda: scene.condition("waits", "Running").get("reason") == "QuotaExceeded")

            # When another operator takes over
            first.stop()
            with said(scene) as seen:
                reads = len(supervisors.reads)
                start_operator(namespace=scene.namespace)
                scene.until(lambda: len(supervisors.reads) > reads + 6)
                supervisors.report(scene.namespace, "trains", Progress(training=training(6)))
                scene.until(lambda: ("trains", "Running", "") in seen)

            # Then nobody hears of it
            assert {(name, state) for name, state, _ in seen} <= {
                ("trains", "Running"),
                ("tokenizes", "Starting"),
                ("waits", "Queued"),
            }
            assert {message for name, _, message in seen if name == "trains"} == {""}
            assert {message for name, _, message in seen if name == "tokenizes"} <= {"3 of 9 files"}
            assert all("exceeded quota" in message for name, _, message in seen if name == "waits")
        finally:
            operator.process.send_signal(signal.SIGCONT)
