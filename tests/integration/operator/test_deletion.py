"""Deleting an SFTJob with ``deletionPolicy: Delete``, on a real control plane and a real S3 server."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from sft_api.numbers import Numbers
from sft_api.place import RUN_KEY
from sft_operator.decisions.spec import read_spec
from sft_operator.names import PLACE_FINALIZER
from tests.cluster.object_store import ObjectStore
from tests.integration.operator.finished import finished_run, keys_below, put_files
from tests.integration.operator.scene import (
    COLLECTED_SECONDS,
    PATIENCE_SECONDS,
    Object,
    OperatorProcess,
    Scene,
    StartOperator,
)
from tests.integration.operator.test_store import URI, place_of, settings
from tests.integration.operator.test_store_removal import EXPORT
from tests.integration.run.slow_network import gate


@pytest.fixture
def removing(versitygw: ObjectStore, start_operator: StartOperator, own_scene: Scene) -> OperatorProcess:
    """An operator that may remove places."""
    store = {**settings(versitygw), "remove": True}
    return start_operator(namespace=own_scene.namespace, environment=versitygw.environment(), store=store)


def begin(scene: Scene, s3: Any, name: str) -> tuple[str, list[Object]]:
    """A job with Delete that runs, and has saved; its place and its pods."""
    job = scene.submit(name, checkpoint={}, deletionPolicy="Delete")
    pods = scene.start(name)
    assert finalizers(scene, name) == [PLACE_FINALIZER]
    uri = f"{URI}/{place_of(job)}"
    numbers, uid = Numbers.of(read_spec(job).spec), job["metadata"]["uid"]
    put_files(s3, uri, finished_run(name, numbers, namespace=scene.namespace, uid=uid))
    return uri, pods


def finalizers(scene: Scene, name: str) -> list[str]:
    job = scene.get("sftjobs", name)
    assert job is not None
    found: list[str] = job["metadata"].get("finalizers") or []
    return found


def until_gone(scene: Scene, name: str, seconds: float = PATIENCE_SECONDS) -> None:
    scene.until(lambda: scene.get("sftjobs", name) is None, seconds)


def end_all(scene: Scene, pods: list[Object]) -> None:
    """Play the kubelet: the containers of pods that are being deleted have ended."""
    for pod in pods:
        scene.until(lambda name=pod["metadata"]["name"]: is_going(scene, name))
        if scene.get("pods", pod["metadata"]["name"]):
            scene.end_pod(pod, 143)


def is_going(scene: Scene, pod: str) -> bool:
    found = scene.get("pods", pod)
    return found is None or bool(found["metadata"].get("deletionTimestamp"))


def reasons(scene: Scene, name: str) -> list[str]:
    query = f"?fieldSelector=involvedObject.name={name},involvedObject.kind=SFTJob"
    return [event["reason"] for event in scene.list("events", query)]


@pytest.mark.usefixtures("removing")
def test_the_place_goes_once_all_pods_have_ended_and_the_export_stays(s3: Any, own_scene: Scene) -> None:
    uri, pods = begin(own_scene, s3, "gone")
    before = keys_below(s3, uri)

    own_scene.delete("sftjobs", "gone")
    own_scene.until(lambda: own_scene.get("jobs", "gone") is None)
    assert keys_below(s3, uri) == before, "its pods still save"
    assert own_scene.get("sftjobs", "gone") is not None
    end_all(own_scene, pods)

    until_gone(own_scene, "gone")
    assert keys_below(s3, uri) == EXPORT
    assert "PlaceRemoved" in own_scene.until(lambda: [one for one in reasons(own_scene, "gone") if "Place" in one])


def test_an_operator_that_is_killed_leaves_it_to_the_next_one(
    versitygw: ObjectStore, s3: Any, start_operator: StartOperator, own_scene: Scene
) -> None:
    # Given an operator that has begun to remove, and waits for a store that lets nothing be deleted
    held = gate(versitygw.endpoint, holds=lambda line: line.startswith((b"POST", b"DELETE")))
    with held as way:
        store: dict[str, Any] = {**settings(versitygw), "remove": True}
        slow = {**store, "s3": {**store["s3"], "endpoint": way.endpoint}}
        environment = versitygw.environment()
        first = start_operator(namespace=own_scene.namespace, environment=environment, store=slow)
        uri, pods = begin(own_scene, s3, "killed")
        own_scene.delete("sftjobs", "killed")
        end_all(own_scene, pods)
        own_scene.until(way.held.is_set)
        assert RUN_KEY in keys_below(s3, uri)

        # When it is killed, and another one begins
        first.stop(signal.SIGKILL)
        start_operator(namespace=own_scene.namespace, environment=environment, store=store)

        # Then that one finishes it
        until_gone(own_scene, "killed")
        assert keys_below(s3, uri) == EXPORT


def test_a_policy_that_is_taken_back_lets_the_object_go_at_once(
    versitygw: ObjectStore, s3: Any, start_operator: StartOperator, own_scene: Scene
) -> None:
    with gate(versitygw.endpoint, holds=lambda line: line.startswith((b"POST", b"DELETE"))) as way:
        store: dict[str, Any] = {**settings(versitygw), "remove": True}
        slow = {**store, "s3": {**store["s3"], "endpoint": way.endpoint}}
        start_operator(namespace=own_scene.namespace, environment=versitygw.environment(), store=slow)
        uri, pods = begin(own_scene, s3, "kept")
        own_scene.delete("sftjobs", "kept")
        end_all(own_scene, pods)
        own_scene.until(way.held.is_set)

        own_scene.patch("sftjobs", "kept", {"spec": {"deletionPolicy": "Keep"}})

        until_gone(own_scene, "kept")
        assert RUN_KEY in keys_below(s3, uri)


@pytest.mark.usefixtures("removing")
def test_a_place_that_another_start_has_claimed_stays_and_that_is_told(s3: Any, own_scene: Scene) -> None:
    uri, pods = begin(own_scene, s3, "claimed")
    other = finished_run("claimed", Numbers({}), uid="another")["attempts/00001.json"]
    put_files(s3, uri, {"attempts/00002.json": other.replace(b'"attempt":1', b'"attempt":2')})
    before = keys_below(s3, uri)

    own_scene.delete("sftjobs", "claimed")
    end_all(own_scene, pods)

    until_gone(own_scene, "claimed")
    assert keys_below(s3, uri) == before
    assert "PlaceKept" in own_scene.until(lambda: [one for one in reasons(own_scene, "claimed") if "Place" in one])


@pytest.mark.usefixtures("removing")
def test_a_job_that_is_left_behind_keeps_its_place(s3: Any, own_scene: Scene) -> None:
    uri, _ = begin(own_scene, s3, "orphaned")
    before = keys_below(s3, uri)

    answer = own_scene.request("DELETE", own_scene.path("sftjobs", "orphaned"), {"propagationPolicy": "Orphan"})

    assert answer.accepted
    until_gone(own_scene, "orphaned", COLLECTED_SECONDS)
    assert own_scene.get("jobs", "orphaned") is not None
    assert keys_below(s3, uri) == before


def test_so_does_one_that_was_left_behind_while_no_operator_lived(
    s3: Any, own_scene: Scene, versitygw: ObjectStore, start_operator: StartOperator, removing: OperatorProcess
) -> None:
    uri, _ = begin(own_scene, s3, "unseen")
    before = keys_below(s3, uri)
    assert removing.stop() == 0

    # Given that the garbage collector has let its children go before anybody looks
    assert own_scene.request("DELETE", own_scene.path("sftjobs", "unseen"), {"propagationPolicy": "Orphan"}).accepted
    own_scene.until(lambda: finalizers(own_scene, "unseen") == [PLACE_FINALIZER], COLLECTED_SECONDS)
    store = {**settings(versitygw), "remove": True}
    start_operator(namespace=own_scene.namespace, environment=versitygw.environment(), store=store)

    # Then the object goes, though pods live on, and what they write to stays
    until_gone(own_scene, "unseen")
    assert own_scene.get("jobs", "unseen") is not None
    assert keys_below(s3, uri) == before
    assert own_scene.until(lambda: "PlaceKept" in reasons(own_scene, "unseen"))


def test_without_the_right_to_remove_a_job_that_asks_for_it_is_refused(
    versitygw: ObjectStore, start_operator: StartOperator, own_scene: Scene
) -> None:
    start_operator(namespace=own_scene.namespace, environment=versitygw.environment(), store=settings(versitygw))

    own_scene.submit("refused", checkpoint={}, deletionPolicy="Delete")

    status = own_scene.until_state("refused", "Failed")
    assert "ask the administrator to set store.remove" in status["message"]
    assert own_scene.condition("refused", "Stalled")["reason"] == "PlaceNotRemovable"
    assert own_scene.get("jobs", "refused") is None
    assert finalizers(own_scene, "refused") == []

    # Once it is kept it begins
    own_scene.patch("sftjobs", "refused", {"spec": {"deletionPolicy": "Keep"}})
    own_scene.until_pods("refused", 2)
