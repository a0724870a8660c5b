"""A group begins anew off a node: three requests, between which anything may happen."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from sft_operator.cluster.client import ApiError
from tests.unit.operator.make import Object, job_manifest, pod_manifest, stamp
from tests.unit.operator.test_reconciler import World, merged

AFFINITY = {
    "nodeAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": {
            "nodeSelectorTerms": [
                {"matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": ["node-a"]}]}
            ]
        }
    }
}


def world_with_suspect() -> World:
    """A run that trains on node-a, on which it failed twice."""
    world = World()
    world.api.keep("SFTJob", job_manifest())
    world.look()
    job = world.api.objects["Job", "tulu"]
    world.api.keep("Job", {**job, "status": {"startTime": stamp(0)}})
    for index in (0, 1):
        world.api.keep("Pod", pod(index))
    world.look()
    against = {"node": "node-a", "failures": 2, "lastReason": "WorkerCrashed", "lastTime": stamp(0)}
    suspect(world, against)
    return world


def pod(index: int, **fields: Any) -> Object:
    """On node-a, with nobody to ask for a report."""
    return merged(pod_manifest(index, job_uid="Job-uid", **fields), {"status": {"podIP": None}})


def suspect(world: World, against: Object) -> None:
    job = world.api.objects["SFTJob", "tulu"]
    restarts = {**job["status"].get("restarts", {}), "nodes": [against]}
    world.api.keep("SFTJob", {**job, "status": {**job["status"], "restarts": restarts}})


def pods_end(world: World) -> None:
    for kind, name in list(world.api.objects):
        if kind == "Pod":
            world.picture.remove("Pod", world.api.objects.pop((kind, name)))
    if job(world)["spec"]["suspend"]:
        condition_of_rest(world, "True")


def condition_of_rest(world: World, status: str) -> None:
    """What the Job's controller says of whether it is suspended."""
    said = {"type": "Suspended", "status": status, "lastTransitionTime": stamp(0)}
    world.api.keep("Job", merged(job(world), {"status": {"conditions": [said]}}))


def job(world: World) -> Object:
    found: Object = world.api.objects["Job", "tulu"]
    return found


def affinity(world: World) -> Any:
    return job(world)["spec"]["template"]["spec"].get("affinity")


def pass_time(world: World, seconds: int) -> None:
    for _ in range(seconds):
        world.clock += 1.0
        world.now += timedelta(seconds=1)
        world.look()


def failing(number: int, error: ApiError) -> Callable[[str, str], Exception | None]:
    """The patch of the Job with this number fails."""
    done = 0

    def answer(verb: str, kind: str) -> Exception | None:
        nonlocal done
        if (verb, kind) != ("patch", "Job"):
            return None
        done += 1
        return error if done == number else None

    return answer


def test_it_rests_and_begins_anew_elsewhere() -> None:
    world = world_with_suspect()
    world.look()
    assert job(world)["spec"]["suspend"] is True
    assert affinity(world) is None
    pods_end(world)
    world.look()

    assert job(world)["spec"]["suspend"] is False
    assert affinity(world) == AFFINITY
    assert "startTime" not in job(world)["status"]
    assert world.status["avoidedNodes"] == ["node-a"]
    assert world.status["restarts"].get("disruptions", 0) == 0


def test_its_template_waits_for_the_controller_to_see_that_it_rests() -> None:
    """Kubernetes 1.37 lets nobody change it before. A run for which that was refused stayed on its node for a day."""
    world = world_with_suspect()
    world.look()
    pods_end(world)
    condition_of_rest(world, "False")
    pass_time(world, 3)
    assert job(world)["spec"]["suspend"] is True
    assert affinity(world) is None

    condition_of_rest(world, "True")
    world.look()
    assert job(world)["spec"]["suspend"] is False
    assert affinity(world) == AFFINITY


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("code", [409, 500])
def test_an_operator_that_ends_between_two_requests_leaves_what_the_next_one_ends(number: int, code: int) -> None:
    before = world_with_suspect()
    before.api.refuses = failing(number, ApiError(code, "", "no"))
    before.look()
    pods = [item for item in before.api.objects if item[0] == "Pod"]
    if number > 1:
        pods_end(before)
        before.look()
    before.api.refuses = lambda verb, kind: None
    # Another operator, that knows nothing but what stands in objects.
    world = World(api=before.api)
    world.now = before.now
    world.look()
    if number == 1:
        assert pods
        pods_end(world)
    pass_time(world, 3)

    assert job(world)["spec"]["suspend"] is False
    assert affinity(world) == AFFINITY


@pytest.mark.parametrize("number", [2, 3])
@pytest.mark.parametrize("code", [403, 422])
def test_where_that_is_forbidden_the_run_goes_on_where_it_was(number: int, code: int) -> None:
    world = world_with_suspect()
    world.api.refuses = failing(number, ApiError(code, "Forbidden", "jobs/status may not be patched"))
    world.look()
    pods_end(world)
    pass_time(world, 2)
    for index in (0, 1):
        world.api.keep("Pod", pod(index, uid=f"new-{index}"))
    pass_time(world, 5)

    assert job(world)["spec"]["suspend"] is False
    assert affinity(world) is None
    said = json.loads(job(world)["metadata"]["annotations"]["sftjob.dev/avoided-nodes"])
    assert said["nodes"] == {}
    assert said["lifted"]


def test_what_the_user_suspends_meanwhile_stays_so_and_begins_anew_elsewhere_later() -> None:
    world = world_with_suspect()
    world.look()
    wish(world, True)
    pods_end(world)
    pass_time(world, 3)
    assert job(world)["spec"]["suspend"] is True
    assert world.status["state"] == "Suspended"

    wish(world, False)
    pass_time(world, 3)
    assert job(world)["spec"]["suspend"] is False
    assert affinity(world) == AFFINITY


@pytest.mark.parametrize("refused", [False, True])
def test_what_an_administrator_suspends_after_it_has_begun_anew_stays_so(refused: bool) -> None:
    world = world_with_suspect()
    if refused:
        world.api.refuses = failing(3, ApiError(403, "Forbidden", "no"))
    world.look()
    pods_end(world)
    pass_time(world, 2)
    assert job(world)["spec"]["suspend"] is False

    world.api.keep("Job", merged(job(world), {"spec": {"suspend": True}}))
    pass_time(world, 3)

    assert job(world)["spec"]["suspend"] is True
    assert "not this operator has suspended the Job" in world.status["message"]


def wish(world: World, suspend: bool) -> None:
    manifest = world.api.objects["SFTJob", "tulu"]
    generation = manifest["metadata"]["generation"] + 1
    changed = merged(manifest, {"metadata": {"generation": generation}, "spec": {"suspend": suspend}})
    world.api.keep("SFTJob", changed)


def test_what_gets_a_queue_meanwhile_is_kueues_with_its_own_template() -> None:
    world = world_with_suspect()
    world.look()
    manifest = world.api.objects["SFTJob", "tulu"]
    labels = {"kueue.x-k8s.io/queue-name": "gpus"}
    world.api.keep("SFTJob", merged(manifest, {"metadata": {"labels": labels}}))
    pods_end(world)
    pass_time(world, 3)

    assert job(world)["spec"]["suspend"] is True
    assert affinity(world) is None
    assert "sftjob.dev/released" not in job(world)["metadata"]["annotations"]


def test_a_job_that_was_made_anew_meanwhile_is_left_alone() -> None:
    world = world_with_suspect()
    world.look()
    pods_end(world)
    # Nobody has heard of it when the operator looks.
    world.watched = ("SFTJob", "Pod")
    other = merged(job(world), {"metadata": {"uid": "another", "annotations": {"sftjob.dev/released": None}}})
    world.api.keep("Job", other)
    world.api.calls.clear()
    world.look()

    assert world.api.done("patch", "Job") == 0
    assert affinity(world) is None
