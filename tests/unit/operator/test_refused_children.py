"""Children that the API server refuses, or that are others': what one lacks neither hides nor hinders the rest."""

from __future__ import annotations

import pytest

from sft_operator.cluster.client import ApiError
from tests.unit.operator.make import job_manifest
from tests.unit.operator.test_reconciler import World


def refused_world(**errors: ApiError) -> World:
    """A job, and an API server that answers with these errors when children of these kinds are to be created."""
    world = World()
    world.api.keep("SFTJob", job_manifest())
    world.api.refuses = lambda verb, kind: errors.get(kind) if verb == "create" else None
    return world


def test_a_child_that_is_refused_for_good_is_told_while_another_may_still_pass() -> None:
    world = refused_world(
        ConfigMap=ApiError(500, "InternalError", "try later"),
        NetworkPolicy=ApiError(403, "Forbidden", "exceeded quota: none of these"),
    )

    world.look()

    assert "the API server refused the NetworkPolicy: exceeded quota" in world.status["message"]
    assert world.api.done("create", "Job") == 0


@pytest.mark.parametrize("kind", ["NetworkPolicy", "Job"])
@pytest.mark.parametrize("code", [401, 409, 410, 429])
def test_a_webhook_that_says_no_is_quoted_whatever_code_it_says_it_with(kind: str, code: int) -> None:
    words = 'admission webhook "no.example.org" denied the request: not on Sundays'
    world = refused_world(**{kind: ApiError(code, "", words)})

    world.look()

    stalled = world.condition("Stalled")
    assert (stalled["status"], stalled["reason"]) == ("True", "Refused")
    assert f"the API server refused the {kind}: {words}" in world.status["message"]


def test_a_child_that_is_anothers_keeps_nobody_from_making_the_others_again() -> None:
    # Given a Job whose Service was replaced by somebody's, and which has lost its other children
    world = World()
    world.api.keep("SFTJob", job_manifest())
    world.look()
    world.api.keep("Service", {"metadata": {"name": "tulu"}, "spec": {}})
    lost = [("NetworkPolicy", "tulu"), ("ConfigMap", "tulu-config")]
    for child in lost:
        del world.api.objects[child]

    # When its children are looked at
    world.clock += 60.0
    world.look()

    # Then those are there again, and the Service is named
    assert all(child in world.api.objects for child in lost)
    assert world.condition("Stalled")["reason"] == "NameTaken"
    assert "a Service tulu exists that does not belong to this SFTJob" in world.status["message"]
