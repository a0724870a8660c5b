"""A Job of ours that no watch and no listing shows: it has lost the label that they select by."""

from __future__ import annotations

from sft_operator.names import MANAGED_BY_LABEL as MANAGED_BY
from tests.unit.operator.make import job_manifest
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
