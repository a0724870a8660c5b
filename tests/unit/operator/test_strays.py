"""Before a Job is made, pods of its name are listed where there may be some of an earlier Job, and only there."""

from __future__ import annotations

import pytest

from sft_operator.picture import strays
from sft_operator.picture.picture import Key, Picture
from sft_operator.picture.strays import Strays
from tests.unit.operator.make import Object, child_manifest, job_manifest, pod_manifest, take_listing
from tests.unit.operator.test_reconciler import KEY, World


def versioned(manifest: Object, version: int) -> Object:
    return {**manifest, "metadata": {**manifest["metadata"], "resourceVersion": str(version)}}


def test_a_name_counts_until_a_listing_that_began_after_it_was_noted_has_ended() -> None:
    names: Strays[str] = Strays()
    names.note("a")
    names.listed()  # it may have begun before
    assert "a" in names
    assert "b" not in names

    names.listed()
    assert "a" not in names


def test_every_name_counts_when_there_were_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strays, "MOST", 2)
    names: Strays[int] = Strays()
    for number in range(3):
        names.note(number)

    assert 99 in names
    names.listed()
    assert 99 in names
    names.listed()
    assert 99 not in names


@pytest.mark.parametrize("what", ["a pod of nobody", "an SFTJob that goes", "a Job that goes", "another of its name"])
def test_what_may_have_left_pods_behind_is_noted(what: str) -> None:
    picture = Picture()
    assert not picture.may_have_strays(KEY)
    if what == "a pod of nobody":
        picture.store("Pod", pod_manifest(0))
    else:
        picture.store("SFTJob", job_manifest())
        picture.store("Job", child_manifest())
    if what == "an SFTJob that goes":
        picture.remove("SFTJob", versioned(job_manifest(), 50))
    elif what == "a Job that goes":
        take_listing(picture, "Job", [], 50)
    elif what == "another of its name":
        picture.store("SFTJob", versioned(job_manifest(uid="another"), 50))

    assert picture.may_have_strays(KEY)
    assert not picture.may_have_strays(Key("team", "other"))
    take_listing(picture, "Pod", [], 60)
    take_listing(picture, "Pod", [], 70)
    assert not picture.may_have_strays(KEY)


def test_a_new_job_waits_for_pods_that_no_watch_has_told_of_yet() -> None:
    # Given a run whose pods the watch, which lags, has not told of
    world = World()
    world.api.keep("SFTJob", job_manifest())
    world.look()
    assert world.api.done("create", "Job") == 1
    assert world.api.done("list", "Pod") == 0

    # When it is deleted, and another of its name made
    for kind in ("Job", "SFTJob"):
        world.picture.remove(kind, world.api.objects.pop((kind, "tulu")))
    world.api.keep("Pod", pod_manifest(0))
    world.watched = ("SFTJob", "Job")
    world.api.keep("SFTJob", job_manifest(uid="another"))
    world.look()

    # Then the pods are found, and waited for
    assert world.api.done("create", "Job") == 1
    assert "an earlier Job" in world.status["message"]
