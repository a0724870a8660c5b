"""The PodGroup of a job's pods: what it says, where there is none, and that it lasts as long as pods name it."""

from __future__ import annotations

import pytest

from sft_operator.cluster.client import ApiError
from tests.unit.operator.make import Object, job_manifest
from tests.unit.operator.test_reconciler import SETTINGS, World
from tests.unit.operator.test_refused_children import pass_time, refused_world

NOT_SERVED = ApiError(404, "NotFound", "the server could not find the requested resource")


def begun(**spec: object) -> World:
    world = World()
    world.api.keep("SFTJob", job_manifest(**spec))
    world.look()
    return world


def named(world: World) -> str | None:
    """The PodGroup that the Job's pods name."""
    pod = world.api.objects["Job", "tulu"]["spec"]["template"]["spec"]
    name: str | None = pod.get("schedulingGroup", {}).get("podGroupName")
    return name


def group(world: World) -> Object:
    name = named(world)
    assert name
    found: Object = world.api.objects["PodGroup", name]
    return found


def test_pods_of_a_group_are_placed_and_preempted_together() -> None:
    world = begun(compute={"nodes": 3, "gpusPerNode": 8, "priorityClassName": "research"})

    found = group(world)

    assert found["apiVersion"] == "scheduling.k8s.io/v1beta1"
    assert found["spec"] == {
        "schedulingPolicy": {"gang": {"minCount": 3}},
        "disruptionMode": {"all": {}},
        "priorityClassName": "research",
    }
    (owner,) = found["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"]) == ("SFTJob", job_manifest()["metadata"]["uid"])
    kinds = [kind for verb, kind, _ in world.api.calls if verb == "create"]
    assert kinds.index("PodGroup") < kinds.index("Job")


def test_another_size_priority_or_owner_has_another_group() -> None:
    """What pods name does not go, and hardly anything can be changed in it."""
    owners = [begun() for _ in range(2)]
    other = World()
    manifest = job_manifest()
    other.api.keep("SFTJob", {**manifest, "metadata": {**manifest["metadata"], "uid": "another"}})
    other.look()
    sizes = [begun(compute={"nodes": nodes, "gpusPerNode": 8}) for nodes in (3, 4)]
    urgent = begun(compute={"nodes": 3, "gpusPerNode": 8, "priorityClassName": "urgent"})

    assert named(owners[0]) == named(owners[1])
    assert len({named(world) for world in (owners[0], other, *sizes, urgent)}) == 5


def test_one_pod_needs_no_group() -> None:
    world = begun(compute={"nodes": 1, "gpusPerNode": 8})

    assert named(world) is None
    assert world.api.done("create", "PodGroup") == 0


def test_groups_can_be_left_to_another_scheduler() -> None:
    world = World(SETTINGS.model_copy(update={"gang_scheduling": False}))
    world.api.keep("SFTJob", job_manifest())
    world.look()

    assert named(world) is None
    assert world.api.done("create", "PodGroup") == 0


@pytest.mark.parametrize(
    "refusal",
    [NOT_SERVED, ApiError(403, "Forbidden", "podgroups is forbidden"), ApiError(422, "Invalid", "no such policy")],
    ids=["not-served", "forbidden", "invalid"],
)
def test_where_there_are_no_groups_pods_are_placed_one_by_one(refusal: ApiError) -> None:
    world = refused_world(PodGroup=refusal)

    world.look()

    assert named(world) is None
    assert world.condition("Stalled")["status"] == "False"
    world.clock += 60.0
    world.look()
    assert world.api.done("create", "PodGroup") == 1
    assert world.api.done("get", "PodGroup") == 0


def test_a_server_that_cannot_take_the_group_now_is_asked_again() -> None:
    """Pods that do not name it would never be placed together."""
    world = refused_world(PodGroup=ApiError(503, "", "the server is currently unable to handle the request"))
    world.look()
    assert ("Job", "tulu") not in world.api.objects

    world.api.refuses = lambda verb, kind: None
    pass_time(world, 3)

    assert group(world)


def test_a_group_that_is_gone_is_made_again() -> None:
    world = begun(compute={"nodes": 3, "gpusPerNode": 8, "priorityClassName": "research"})
    before = group(world)["spec"]
    del world.api.objects["PodGroup", named(world) or ""]

    world.clock += 60.0
    world.look()

    assert group(world)["spec"] == before


def test_rights_that_are_taken_away_are_no_fault_of_the_job() -> None:
    world = begun()
    world.api.refuses = lambda verb, kind: ApiError(403, "Forbidden", "no") if kind == "PodGroup" else None

    world.clock += 60.0
    world.look(2)

    assert world.api.done("get", "PodGroup") >= 1
    assert world.condition("Stalled")["status"] == "False"
