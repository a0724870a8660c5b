"""Children that were deleted, altered or replaced while their Job lives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from sft_api.progress import Progress
from tests.integration.operator.scene import COLLECTED_SECONDS, Object, Scene, StartOperator, Supervisors, training

CHILDREN = [
    ("configmaps", "run-config"),
    ("configmaps", "run-begun"),
    ("services", "run"),
    ("networkpolicies", "run"),
]
SOON = {"resyncSeconds": 1}


@pytest.fixture
def healed(supervisors: Supervisors, start_operator: StartOperator, own_scene: Scene) -> Iterator[Scene]:
    """A namespace with the job run, which trains, and an operator of its own."""
    own = start_operator(namespace=own_scene.namespace, **SOON)
    own_scene.submit("run")
    own_scene.start("run")
    supervisors.report(own_scene.namespace, "run", Progress(training=training(3)))
    own_scene.until_state("run", "Running")
    # Made once that was told.
    own_scene.until(lambda: own_scene.get("configmaps", "run-begun"))
    yield own_scene
    if own.process.poll() is None:
        own.stop()


def content(child: Object | None) -> dict[str, Any]:
    """What a child says, without what the API server keeps about it."""
    assert child
    metadata = {name: child["metadata"].get(name) for name in ("labels", "annotations", "ownerReferences")}
    spec = {name: value for name, value in child.get("spec", {}).items() if not name.startswith("clusterIP")}
    return {**metadata, "spec": spec, "data": child.get("data"), "immutable": child.get("immutable")}


def until_again(scene: Scene, resource: str, name: str, before: Object) -> Object:
    """Wait for the child to be made again; what it is now."""

    def again() -> Object | None:
        found = scene.get(resource, name)
        return found if found and found["metadata"]["uid"] != before["metadata"]["uid"] else None

    made: Object = scene.until(again)
    return made


@pytest.mark.parametrize(("resource", "name"), CHILDREN)
def test_what_was_deleted_is_made_again(healed: Scene, resource: str, name: str) -> None:
    before = healed.get(resource, name)
    assert before

    healed.delete(resource, name)

    assert content(until_again(healed, resource, name, before)) == content(before)
    assert healed.status("run")["state"] == "Running"


@pytest.mark.parametrize(
    ("resource", "change"),
    [
        ("services", {"spec": {"selector": {"app": "mine"}}}),
        ("services", {"spec": {"publishNotReadyAddresses": False}}),
        ("networkpolicies", {"spec": {"ingress": None}}),
        ("networkpolicies", {"spec": {"podSelector": {"matchLabels": {"app": "mine"}}}}),
    ],
)
def test_what_was_altered_is_made_again(healed: Scene, resource: str, change: Object) -> None:
    before = healed.get(resource, "run")
    assert before

    healed.patch(resource, "run", change)

    assert content(until_again(healed, resource, "run", before)) == content(before)


def test_what_nobody_altered_stays(healed: Scene) -> None:
    before = [healed.get(*child) for child in CHILDREN]
    looks = len(healed.supervisors.reads)

    healed.until(lambda: len(healed.supervisors.reads) > looks + 12)

    assert [healed.get(*child) for child in CHILDREN] == before


def test_the_configuration_of_a_run_is_that_of_the_operator_that_began_it(
    start_operator: StartOperator, own_scene: Scene
) -> None:
    first = start_operator(namespace=own_scene.namespace, store={"uri": "s3://old/place"})
    own_scene.submit("run", checkpoint={})
    own_scene.start("run")
    before = own_scene.until(lambda: own_scene.get("configmaps", "run-config"))
    first.stop()

    own_scene.delete("configmaps", "run-config")
    other = {"uri": "s3://new/place", "s3": {"region": "elsewhere"}}
    start_operator(namespace=own_scene.namespace, store=other, **SOON)

    after = until_again(own_scene, "configmaps", "run-config", before)
    assert content(after) == content(before)
    assert "s3://old/place" in after["data"]["config.json"]


def test_a_configuration_cannot_be_edited_and_one_that_was_replaced_is_put_right(healed: Scene) -> None:
    before = healed.get("configmaps", "run-config")
    assert before
    edit = healed.request(
        "PATCH",
        healed.path("configmaps", "run-config"),
        {"data": {"config.json": "{}"}},
        "application/merge-patch+json",
    )
    assert edit.code == 422

    # When it is deleted, and one with our owner reference is created in its place
    ours = {name: before["metadata"][name] for name in ("name", "labels", "ownerReferences")}
    healed.delete("configmaps", "run-config")
    mine = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": ours, "data": {"config.json": "{}"}}
    healed.request("POST", healed.path("configmaps"), mine)

    healed.until(lambda: (found := healed.get("configmaps", "run-config")) and content(found) == content(before))


def test_what_belongs_to_someone_else_is_named_and_left_alone(healed: Scene) -> None:
    strange = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "run"},
        "spec": {"clusterIP": "None", "selector": {"app": "theirs"}},
    }

    def taken() -> bool:
        healed.request("DELETE", healed.path("services", "run"), {})
        return healed.request("POST", healed.path("services"), strange).accepted

    healed.until(taken)

    healed.until(lambda: healed.condition("run", "Stalled")["reason"] == "NameTaken")
    assert "a Service run exists that does not belong to this SFTJob" in healed.status("run")["message"]
    assert healed.status("run")["state"] == "Running"
    assert content(healed.get("services", "run"))["spec"]["selector"] == {"app": "theirs"}

    healed.delete("services", "run")
    healed.until(lambda: healed.condition("run", "Stalled")["status"] == "False")
    assert content(healed.get("services", "run"))["ownerReferences"]


def test_a_configuration_of_which_no_copy_is_left_is_said_to_be_lost(healed: Scene) -> None:
    healed.patch("jobs", "run", {"metadata": {"annotations": {"sftjob.dev/config": "broken"}}})
    healed.delete("configmaps", "run-config")

    healed.until(lambda: healed.condition("run", "Stalled")["reason"] == "ConfigLost")
    assert "delete the Job run, and both are made from the spec" in healed.status("run")["message"]

    healed.delete("jobs", "run")
    for pod in healed.pods("run"):
        healed.end_pod(pod, 30)
    healed.until(lambda: healed.get("configmaps", "run-config"))
    healed.until(lambda: healed.condition("run", "Stalled")["status"] == "False")


def test_a_job_that_has_lost_its_owner_reference_gets_it_back(healed: Scene) -> None:
    before = healed.get("jobs", "run")
    since = healed.condition("run", "Running")["lastTransitionTime"]
    assert before

    healed.patch("jobs", "run", {"metadata": {"ownerReferences": None}})

    # Then it is the same Job, owned again, and nothing else was said of it
    healed.until(lambda: content(healed.get("jobs", "run")) == content(before))
    reads = len(healed.supervisors.reads)
    healed.until(lambda: len(healed.supervisors.reads) > reads + 3)
    assert healed.condition("run", "Running")["lastTransitionTime"] == since
    # And goes with its SFTJob
    healed.delete("sftjobs", "run")
    healed.until(lambda: (job := healed.get("jobs", "run")) is None or "deletionTimestamp" in job["metadata"])


def test_a_job_whose_sftjob_leaves_it_behind_is_left_behind(healed: Scene) -> None:
    answer = healed.request("DELETE", healed.path("sftjobs", "run"), {"propagationPolicy": "Orphan"})
    assert answer.accepted, answer.body
    healed.until(lambda: healed.get("sftjobs", "run") is None, COLLECTED_SECONDS)

    left = healed.get("jobs", "run")
    assert left
    assert "ownerReferences" not in left["metadata"]
    assert len(healed.pods("run")) == 2
