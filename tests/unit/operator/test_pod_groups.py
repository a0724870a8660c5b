"""The PodGroup of a job's pods: what it says, where there is none, and that it lasts as long as pods name it."""

from __future__ import annotations

import pytest

from sft_operator.cluster.client import ApiError
from tests.unit.operator.make import Object, job_manifest, pod_manifest
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


CLAIM = "0/2 nodes are available: 1 Insufficient cpu, 1 node(s) didn't find available persistent volumes to bind."


def keep_pods(world: World, *priorities: int, words: str = "", placed: int = 0) -> None:
    """Pods of a job, of class "of-a-webhook", of which the first ones are ``placed`` and the last one is told
    ``words``."""
    for index, priority in enumerate(priorities):
        last = index == len(priorities) - 1
        told = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": words if last else ""}
        pod = pod_manifest(
            index,
            job_uid="Job-uid",
            phase="Pending",
            ready=False,
            node="node-a" if index < placed else None,
            conditions=[told] if index >= placed else None,
        )
        pod["spec"] |= {"priority": priority, "priorityClassName": "of-a-webhook"}
        world.api.keep("Pod", pod)


def admitted(world: World, priority: int = 0) -> Object:
    """The PodGroup, as the API server of a real cluster completes it."""
    found = group(world)
    found["metadata"]["finalizers"] = ["example.com/other", "scheduling.k8s.io/podgroup-protection"]
    found["spec"]["priority"] = priority
    return found


def changed_groups(world: World) -> list[str]:
    return [verb for verb, kind, _ in world.api.calls if kind == "PodGroup" and verb != "get"]


def look_later(world: World) -> None:
    world.api.calls.clear()
    world.clock += 60.0
    world.look()


def test_a_group_has_the_priority_that_a_webhook_gives_its_pods() -> None:
    """The scheduler places none of another priority than its group's."""
    world = begun(compute={"nodes": 2, "gpusPerNode": 8})
    admitted(world)
    keep_pods(world, 50, 50)

    look_later(world)

    # Else the finalizer would keep it for as long as there are pods that name it.
    assert changed_groups(world) == ["patch", "delete", "create"]
    assert group(world)["spec"]["priorityClassName"] == "of-a-webhook"
    admitted(world, 50)
    look_later(world)
    assert changed_groups(world) == []


@pytest.mark.parametrize(
    ("priorities", "placed"),
    [((0, 50), 0), ((0, 50), 1), ((50, 50), 2)],
    ids=["they differ", "one runs", "none waits"],
)
def test_another_group_is_not_made_where_it_would_not_help(priorities: tuple[int, int], placed: int) -> None:
    world = begun(compute={"nodes": 2, "gpusPerNode": 8})
    admitted(world)
    keep_pods(world, *priorities, placed=placed)

    look_later(world)

    assert changed_groups(world) == []


def test_a_group_that_is_made_again_has_the_priority_of_the_pods_that_run() -> None:
    """Else the next one that is lost would have to wait until all of them have gone."""
    world = begun(compute={"nodes": 2, "gpusPerNode": 8})
    del world.api.objects["PodGroup", named(world) or ""]
    keep_pods(world, 50, 50, placed=2)

    look_later(world)

    assert group(world)["spec"]["priorityClassName"] == "of-a-webhook"


def test_a_size_that_somebody_has_changed_is_put_right() -> None:
    """Anybody who may edit the namespace can, and a group of more pods than there are waits for ever."""
    world = begun(compute={"nodes": 2, "gpusPerNode": 8})
    admitted(world)["spec"]["schedulingPolicy"]["gang"]["minCount"] = 5

    look_later(world)

    assert group(world)["spec"]["schedulingPolicy"] == {"gang": {"minCount": 2}}


def test_pods_come_one_by_one_while_their_claim_is_to_be_bound_where_the_first_goes() -> None:
    """Where that is decided for a pod, the scheduler finds no place on another node for the next one."""
    world = begun(compute={"nodes": 2, "gpusPerNode": 8})
    admitted(world)
    keep_pods(world, 0, 0, words=CLAIM)

    look_later(world)
    assert group(world)["spec"]["schedulingPolicy"] == {"gang": {"minCount": 1}}

    admitted(world)
    keep_pods(world, 0, 0, placed=2)
    look_later(world)
    assert group(world)["spec"]["schedulingPolicy"] == {"gang": {"minCount": 2}}


def test_who_may_not_change_groups_leaves_them() -> None:
    world = begun(compute={"nodes": 2, "gpusPerNode": 8})
    admitted(world)
    keep_pods(world, 50, 50)
    world.api.refuses = lambda verb, kind: (
        ApiError(403, "Forbidden", "no") if (verb, kind) == ("patch", "PodGroup") else None
    )

    look_later(world)

    assert changed_groups(world) == ["patch"]
    assert world.condition("Stalled")["status"] == "False"


@pytest.mark.parametrize(("words", "made_again"), [(CLAIM, 1), ("0/2 nodes are available: 2 Insufficient cpu.", 0)])
def test_pods_that_may_wait_for_another_group_are_looked_after_sooner_than_others_in_line(
    words: str, made_again: int
) -> None:
    world = begun(compute={"nodes": 2, "gpusPerNode": 8})
    admitted(world)
    keep_pods(world, 0, 0, words="0/2 nodes are available: 1 Insufficient cpu.")
    look_later(world)
    assert world.status["state"] == "Queued"
    while not world.api.done("get", "PodGroup"):
        world.clock += 5.0
        world.look()
    world.api.calls.clear()
    keep_pods(world, 0, 0, words=words)

    for _ in range(8):
        world.clock += 5.0
        world.look()

    assert world.api.done("create", "PodGroup") == made_again
