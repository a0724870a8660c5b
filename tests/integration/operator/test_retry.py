"""A job that has failed begins again when it is asked to, on a real API server."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sft_api.failures import FailureClass
from sft_api.progress import Progress
from tests.cluster.access import Cluster
from tests.cluster.binaries import binary
from tests.integration.operator.scene import Scene, checkpoint, last_words, saved_at, training


@pytest.fixture
def sft_retry(server: Cluster, scene: Scene) -> object:
    """``sft retry NAME`` with the rights of an administrator; exit code and all that it said."""

    def retry(name: str, *options: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "sft_cli.main", "retry", name, "--namespace", scene.namespace, *options]
        path = os.pathsep.join([str(Path(binary("kubectl")).parent), os.environ["PATH"]])
        environment = {**os.environ, "KUBECONFIG": str(server.kubeconfig), "PATH": path}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        return done.returncode, done.stdout + done.stderr

    return retry


def fail(
    scene: Scene, name: str, message: str, failure: FailureClass = FailureClass.DATA_ERROR, code: int = 11
) -> None:
    """The pods of the present Job run and end with an error that no restart mends."""
    pods = scene.start(name)
    scene.supervisors.report(scene.namespace, name, Progress(training=training(5, checkpoints=checkpoint(4))))
    scene.until(lambda: scene.status(name).get("attempt") == 1)
    scene.end_pod(pods[1], code, message=last_words(failure, 5, message=message))
    scene.end_pod(pods[0], 35, message=last_words(FailureClass.PEER_LOST, 5))


def test_a_failed_job_begins_again_once_for_each_time_that_it_is_asked(scene: Scene, sft_retry: object) -> None:
    assert callable(sft_retry)
    scene.submit("again")
    fail(scene, "again", "a row is broken")
    scene.until_state("again", "Failed")
    first = scene.get("jobs", "again")
    assert first is not None

    # When it is asked to begin again
    code, said = sft_retry("again")
    assert code == 0, said
    assert "again begins again, from its newest checkpoint: kubectl get sftjob again" in said

    # Then a new Job runs, and goes on where it was
    scene.until(lambda: (job := scene.get("jobs", "again")) and job["metadata"]["uid"] != first["metadata"]["uid"])
    status = scene.until(lambda: (s := scene.status("again")).get("state") == "Recovering" and s)
    assert "completionTime" not in status
    assert status["checkpoints"]["latest"]["step"] == 4
    assert scene.condition("again", "Failed")["status"] == "False"
    assert sft_retry("again") == (10, "again is Recovering: only a job that has failed can be retried\n")
    for pod in scene.start("again"):
        scene.end_pod(pod, 0, message=last_words(None, 10, **saved_at(10)))
    status = scene.until_state("again", "Complete")
    assert status["progress"]["summary"] == "10/10"
    events = {event["reason"] for event in scene.list("events") if event["involvedObject"]["kind"] == "SFTJob"}
    assert {"Failed", "Retried", "Complete"} <= events

    # And what is complete stays so
    code, said = sft_retry("again")
    assert (code, said) == (10, "again is Complete: only a job that has failed can be retried\n")
    assert "NotFound" in sft_retry("nobody")[1]


def test_the_trainer_is_told_to_take_over_only_when_that_was_asked(scene: Scene, sft_retry: object) -> None:
    assert callable(sft_retry)

    def told(uid: str = "") -> list[str]:
        """What the trainer of the next Job is told."""

        def another() -> object:
            job = scene.get("jobs", "taken")
            return job if job and job["metadata"]["uid"] != uid else None

        (container,) = scene.until(another)["spec"]["template"]["spec"]["containers"]
        return [entry["value"] for entry in container["env"] if entry["name"] == "SFT_TAKE_OVER"]

    # Given a job that failed because another one trains in its place
    scene.submit("taken")
    assert told() == []
    fail(scene, "taken", "is in use: other/taken trains there now", FailureClass.PLACE_IN_USE, 18)
    scene.until_state("taken", "Failed")
    first = scene.get("jobs", "taken")["metadata"]["uid"]  # type: ignore[index]

    # When it is to take over
    code, said = sft_retry("taken", "--take-over")
    assert code == 0, said
    (word,) = told(first)
    assert word == scene.status("taken")["retried"]

    # Then only that, and only for this reason
    second = scene.get("jobs", "taken")["metadata"]["uid"]  # type: ignore[index]
    fail(scene, "taken", "a row is broken")
    scene.until(lambda: scene.condition("taken", "Failed")["status"] == "True")
    code, said = sft_retry("taken", "--take-over")
    assert (code, said) == (
        10, "taken failed with DataError: nobody kept it from its place, leave out --take-over\n"
    )  # fmt: skip
    assert sft_retry("taken")[0] == 0
    assert told(second) == []


def test_a_word_that_stood_there_before_asks_for_nothing(scene: Scene) -> None:
    scene.submit("before")
    scene.patch("sftjobs", "before", {"metadata": {"annotations": {"sftjob.dev/retry": "1"}}})
    fail(scene, "before", "a row is broken")
    status = scene.until_state("before", "Failed")
    assert status["retried"] == "1"
    uid = scene.get("jobs", "before")["metadata"]["uid"]  # type: ignore[index]

    scene.patch("sftjobs", "before", {"metadata": {"annotations": {"sftjob.dev/retry": "2"}}})
    scene.until(lambda: (job := scene.get("jobs", "before")) and job["metadata"]["uid"] != uid)
    assert scene.until(lambda: (s := scene.status("before")).get("state") == "Recovering" and s)["retried"] == "2"
