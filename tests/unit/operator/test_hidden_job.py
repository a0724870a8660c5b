"""A Job of ours that is not seen, or not as ours: it has lost the label that watches select by, or its owner."""

from __future__ import annotations

import pytest

from sft_operator.names import MANAGED_BY_LABEL as MANAGED_BY
from sft_operator.names import UID_LABEL
from tests.unit.operator.make import Object, job_manifest, pod_manifest, stamp
from tests.unit.operator.test_reconciler import KEY, World, merged


def hide_job(world: World) -> None:
    """Take away the label by which the Job of a world that waits for its queue is watched: it looks deleted."""
    job = world.api.keep("Job", merged(world.api.objects["Job", "tulu"], {"metadata": {"labels": {MANAGED_BY: None}}}))
    world.picture.remove("Job", job)
    world.api.calls.clear()


def test_a_job_that_has_lost_the_label_by_which_it_is_watched_gets_it_back() -> None:
    # Given a Job that exists, and is ours, and is not seen any more
    world = World()
    world.api.keep("SFTJob", job_manifest())
    world.look()
    hide_job(world)

    # When the operator looks, and finds it by its name
    world.look()

    # Then it is seen again, and nothing was made twice
    assert world.api.objects["Job", "tulu"]["metadata"]["labels"][MANAGED_BY] == "sft-operator"
    assert world.picture.observed(KEY).job is not None
    assert world.api.done("create", "Job") == 1


def test_a_cluster_that_takes_the_label_away_again_and_again_is_told_so_and_not_asked_all_the_time() -> None:
    world = World()
    world.api.keep("SFTJob", job_manifest())
    world.look()
    world.api.keeps_labels = False
    hide_job(world)

    world.look()

    assert world.api.done("create", "Job") == 1
    assert world.condition("Stalled")["reason"] == "Refused"
    assert "changes its label app.kubernetes.io/managed-by" in world.condition("Stalled")["message"]


def running_world() -> World:
    """A job whose pods run."""
    world = World()
    world.api.keep("SFTJob", job_manifest())
    world.look()
    for index in (0, 1):
        world.api.keep("Pod", pod_manifest(index, job_uid="Job-uid"))
    world.clock += 31.0  # that pods are ready is news that may wait
    world.look()
    assert world.status["podsReady"] == "2/2"
    world.api.calls.clear()
    return world


def change_job(world: World, **metadata: object) -> Object:
    """Somebody changes the metadata of the Job."""
    job = world.api.objects["Job", "tulu"]
    return world.api.keep("Job", merged(job, {"metadata": metadata}))


@pytest.mark.parametrize("another", [False, True], ids=["same operator", "another operator"])
def test_a_job_that_has_lost_its_owner_gets_it_back_and_its_run_is_followed_all_the_time(another: bool) -> None:
    # Given a run whose Job nobody owns any more
    world = running_world()
    before = world.status
    change_job(world, ownerReferences=[])

    # When the operator looks, or another one that has never seen it otherwise
    world = World(api=world.api) if another else world
    world.look()

    # Then it is owned again, and nothing else was ever said of it
    (owner,) = world.api.objects["Job", "tulu"]["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"], owner["controller"]) == ("SFTJob", "sft-uid", True)
    assert world.picture.observed(KEY).job is not None
    assert world.status == before
    assert (world.api.done("create", "Job"), world.api.done("patch", "SFTJob")) == (0, 0)


def test_a_job_that_has_lost_its_owner_before_it_had_pods_gets_it_back() -> None:
    world = World()
    world.api.keep("SFTJob", job_manifest())
    world.look()

    change_job(world, ownerReferences=[])
    world.look()

    assert world.api.objects["Job", "tulu"]["metadata"]["ownerReferences"]
    assert world.status["state"] == "Starting"


def test_a_job_whose_pods_run_gets_the_label_back_by_which_it_is_watched() -> None:
    world = running_world()
    hide_job(world)

    world.look()

    assert world.api.objects["Job", "tulu"]["metadata"]["labels"][MANAGED_BY] == "sft-operator"
    assert world.status["podsReady"] == "2/2"


@pytest.mark.parametrize(
    "metadata",
    [
        {"ownerReferences": [], "labels": {UID_LABEL: None}},
        {"ownerReferences": [], "labels": {UID_LABEL: "an earlier one"}},
        {"ownerReferences": [{"apiVersion": "v1", "kind": "Thing", "name": "x", "uid": "y", "controller": True}]},
    ],
    ids=["no label", "an earlier run", "another owner"],
)
def test_a_job_that_may_be_anothers_is_named_and_left_alone(metadata: Object) -> None:
    world = running_world()
    before = change_job(world, **metadata)

    world.look()

    assert world.api.objects["Job", "tulu"] == before
    assert world.condition("Stalled")["reason"] == "NameTaken"
    assert "a Job tulu exists that does not belong to this SFTJob" in world.status["message"]


def test_a_job_that_is_to_outlive_its_sftjob_is_not_taken_back() -> None:
    # Given an SFTJob that is deleted with --cascade=orphan, of which no watch has told yet
    world = running_world()
    world.watched = ("Job", "Pod")
    going = merged(job_manifest(), {"metadata": {"deletionTimestamp": stamp(0), "finalizers": ["orphan"]}})
    world.api.keep("SFTJob", going)
    change_job(world, ownerReferences=[])

    world.look()

    assert not world.api.objects["Job", "tulu"]["metadata"]["ownerReferences"]
    assert world.api.done("patch", "Job") == 0


def test_a_cluster_that_takes_the_owner_away_again_and_again_is_told_so_and_not_asked_all_the_time() -> None:
    world = running_world()
    world.api.keeps_owners = False
    change_job(world, ownerReferences=[])

    world.look(3)

    assert world.api.done("patch", "Job") == 1
    assert world.condition("Stalled")["reason"] == "Refused"
    assert "takes its owner reference away" in world.condition("Stalled")["message"]


def test_pods_that_nobody_has_asked_to_end_have_their_job_looked_for_now_and_then() -> None:
    world = running_world()
    world.watched = ("SFTJob", "Pod")
    world.picture.remove("Job", world.api.objects.pop(("Job", "tulu")))

    for _ in range(10):
        world.clock += 3.0
        world.look()

    assert world.api.done("get", "Job") <= 2
    assert "2 not yet asked to end" in world.status["message"]
    assert world.api.done("create", "Job") == 0
