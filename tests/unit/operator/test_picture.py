"""The operator's picture of the cluster: ordered by version, repaired by listings, sorted by owner."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from sft_operator.picture import picture as picture_module
from sft_operator.picture.listing import Listing
from sft_operator.picture.observed import Observed, Pod
from sft_operator.picture.picture import Key, Picture
from tests.unit.operator.make import child_manifest, job_manifest, pod_manifest, report, take_listing

KEY = Key("team", "tulu")


def versioned(manifest: dict[str, Any], version: int) -> dict[str, Any]:
    return {**manifest, "metadata": {**manifest["metadata"], "resourceVersion": str(version)}}


def full_picture() -> Picture:
    picture = Picture()
    picture.store("SFTJob", job_manifest())
    picture.store("Job", child_manifest())
    picture.store("Pod", pod_manifest(1))
    picture.store("Pod", pod_manifest(0))
    return picture


def test_children_are_found_by_their_owners() -> None:
    observed = full_picture().observed(KEY)

    assert observed.job
    assert observed.job.uid == "job-uid"
    assert [pod.index for pod in observed.pods] == [0, 1]


def test_strangers_with_our_labels_are_not_ours() -> None:
    picture = full_picture()
    pods = picture.observed(KEY).pods
    pod = pod_manifest(0, uid="stranger")
    pod["metadata"]["ownerReferences"] = [{"kind": "Job", "uid": "another", "controller": True}]
    picture.store("Pod", pod)
    picture.store("Job", versioned(child_manifest(owner="another-sftjob"), 99))

    assert picture.observed(KEY) == Observed(earlier_pods=pods)


def without_owner(version: int) -> dict[str, Any]:
    manifest = versioned(child_manifest(), version)
    return {**manifest, "metadata": {**manifest["metadata"], "ownerReferences": []}}


@pytest.mark.parametrize("held", [True, False], ids=["held", "not held"])
@pytest.mark.parametrize("last", ["MODIFIED", "DELETED"])
def test_a_job_that_has_lost_its_owner_does_not_come_back_by_a_word_of_before(last: str, held: bool) -> None:
    """Lines of two watches, of which one began again, may come in another order than they were written in."""
    picture = full_picture()
    if not held:
        picture.store("Job", without_owner(20))

    found = picture.store("Job", without_owner(30)) if last == "MODIFIED" else picture.remove("Job", without_owner(30))

    assert found == (KEY if held else None)
    assert picture.store("Job", versioned(child_manifest(), 25)) is None
    assert picture.observed(KEY).job is None
    # Given back to it, it is ours again.
    picture.store("Job", versioned(child_manifest(), 31))
    assert picture.observed(KEY).job is not None


def test_older_versions_change_nothing_back() -> None:
    picture = full_picture()

    assert picture.store("SFTJob", versioned(job_manifest(suspend=True), 9)) == KEY
    assert picture.store("SFTJob", versioned(job_manifest(), 8)) is None
    assert picture.store("SFTJob", versioned(job_manifest(suspend=True), 9)) is None
    manifest = picture.manifest(KEY)
    assert manifest
    assert manifest["spec"]["suspend"] is True


def test_a_pod_that_was_deleted_is_remembered_until_it_was_taken_into_the_status() -> None:
    picture = full_picture()
    last_seen = pod_manifest(1, phase="Failed", exit_code=30)

    assert picture.remove("Pod", versioned(last_seen, 20)) == KEY

    observed = picture.observed(KEY)
    assert [pod.index for pod in observed.pods] == [0]
    assert observed.gone_pods[0].terminated
    assert observed.gone_pods[0].terminated.exit_code == 30


def test_of_gone_pods_that_name_another_job_nothing_is_held() -> None:
    """Anybody can make and delete any number of pods that name a Job which never was: no look is ever told of them."""
    picture = full_picture()

    for number in range(10):
        picture.store("Pod", pod_manifest(0, uid=f"uid-{number}", job_uid=f"nobody-{number}"))
        picture.remove("Pod", versioned(pod_manifest(0, uid=f"uid-{number}", job_uid=f"nobody-{number}"), 30))

    assert picture.entry(KEY).gone_pods == {}


def test_gone_pods_of_a_job_that_is_not_there_are_held_within_limits_until_there_is_another() -> None:
    picture = full_picture()
    picture.remove("Job", versioned(child_manifest(), 20))
    picture.remove("Pod", versioned(pod_manifest(0), 21))
    for number in range(2000):
        picture.store("Pod", pod_manifest(0, uid=f"uid-{number}", job_uid=f"nobody-{number}"))
        picture.remove("Pod", versioned(pod_manifest(0, uid=f"uid-{number}", job_uid=f"nobody-{number}"), 30))

    assert len(picture.entry(KEY).gone_pods) == 1004  # as many as are held of one job that live

    # One that had lost our label for a moment has lost nothing else.
    picture.store("Job", versioned(child_manifest(), 40))
    assert [pod.index for pod in picture.observed(KEY).gone_pods] == [0]
    assert len(picture.entry(KEY).gone_pods) == 1


def test_of_annotations_of_an_sftjob_nothing_is_held() -> None:
    """Nothing is decided by them, and each job may have 256 KiB of them."""
    picture, manifest = Picture(), job_manifest()
    manifest["metadata"]["annotations"] = {"example.org/notes": "x" * 200_000}
    picture.store("SFTJob", manifest)

    held = picture.manifest(KEY)
    assert held
    assert "annotations" not in held["metadata"]


def test_a_listing_finds_what_a_watch_has_lost() -> None:
    picture = full_picture()
    newer = versioned(pod_manifest(0, phase="Failed", exit_code=30), 30)

    changed = take_listing(picture, "Pod", [newer], version=40)

    assert changed == {KEY}
    observed = picture.observed(KEY)
    assert [pod.phase for pod in observed.pods] == ["Failed"]
    assert [pod.index for pod in observed.gone_pods] == [1]


def test_a_listing_that_is_older_than_an_event_changes_nothing_back() -> None:
    picture = full_picture()
    picture.store("Pod", versioned(pod_manifest(2), 50))
    picture.remove("Pod", versioned(pod_manifest(1), 51))

    changed = take_listing(picture, "Pod", [versioned(pod_manifest(0), 9), versioned(pod_manifest(1), 9)], version=45)

    assert changed == set()
    assert [pod.index for pod in picture.observed(KEY).pods] == [0, 2]


def test_an_sftjob_of_the_same_name_starts_afresh() -> None:
    picture = full_picture()
    picture.remember(KEY, replace(picture.memory(KEY), report=report()))

    pods = picture.observed(KEY).pods

    picture.store("SFTJob", versioned(job_manifest(uid="another"), 60))

    assert picture.observed(KEY) == Observed(earlier_pods=pods)


def test_nothing_is_left_of_what_is_gone() -> None:
    picture = full_picture()
    for kind, manifest in (
        ("Pod", pod_manifest(0)),
        ("Pod", pod_manifest(1)),
        ("Job", child_manifest()),
        ("SFTJob", job_manifest()),
    ):
        picture.remove(kind, versioned(manifest, 70))

    assert picture.all_keys() == []
    assert list(picture.manifests()) == []


def test_what_merely_wears_our_labels_is_not_held() -> None:
    picture = Picture()
    picture.store("SFTJob", job_manifest())
    labels = {"sftjob.dev/job": "tulu", "app.kubernetes.io/managed-by": "sft-operator"}
    plain = {"name": "tulu", "namespace": "team", "uid": "u", "resourceVersion": "1", "labels": labels}
    references = [
        [{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "tulu", "uid": "r", "controller": True}],
        [{"apiVersion": "example.org/v1", "kind": "Job", "name": "tulu", "uid": "r", "controller": True}],
        [{"apiVersion": "batch/v1", "kind": "Job", "name": "tulu", "uid": "r", "controller": False}],
        [{"apiVersion": "batch/v1", "kind": "Job", "name": "another", "uid": "r", "controller": True}],
        [],
    ]

    for reference in references:
        manifest = {"metadata": {**plain, "ownerReferences": reference}}
        assert picture.store("Pod", manifest) is None
        assert picture.store("Job", manifest) is None
    assert picture.store("Pod", {"metadata": plain}) is None
    assert (picture.entry(KEY).pods, picture.entry(KEY).job) == ({}, None)


def test_pods_that_a_job_has_left_behind_are_known_until_they_end() -> None:
    picture = full_picture()
    picture.remove("Job", versioned(child_manifest(), 40))
    left = {
        "sftjob.dev/job": "tulu",
        "batch.kubernetes.io/job-name": "tulu",
        "batch.kubernetes.io/controller-uid": "job-uid",
    }

    def orphan(index: int, version: int) -> dict[str, Any]:
        pod = versioned(pod_manifest(index), version)
        return {**pod, "metadata": {**pod["metadata"], "ownerReferences": [], "labels": left}}

    for index in (0, 1):
        picture.store("Pod", orphan(index, 41 + index))
    assert [pod.index for pod in picture.observed(KEY).earlier_pods] == [0, 1]

    # A complete list shows them still, also to an operator that has never seen their Job.
    take_listing(picture, "Pod", [orphan(0, 41), orphan(1, 42)], version=50)
    assert [pod.index for pod in picture.observed(KEY).earlier_pods] == [0, 1]
    fresh = Picture()
    fresh.store("SFTJob", job_manifest())
    take_listing(fresh, "Pod", [orphan(0, 41), orphan(1, 42)], version=50)
    assert [pod.index for pod in fresh.observed(KEY).earlier_pods] == [0, 1]

    assert picture.remove("Pod", orphan(0, 60)) == KEY
    assert [pod.index for pod in picture.observed(KEY).earlier_pods] == [1]


def test_the_label_of_a_pod_of_ours_does_not_matter() -> None:
    picture = full_picture()
    pod = versioned(pod_manifest(0, ready=False), 30)
    pod["metadata"]["labels"] = {"sftjob.dev/job": "another"}

    assert picture.store("Pod", pod) == KEY
    assert [pod.ready for pod in picture.observed(KEY).pods] == [False, True]


def test_only_so_many_pods_are_held_for_one_job_and_what_is_beyond_is_said() -> None:
    picture = Picture()
    picture.store("SFTJob", job_manifest())
    picture.store("Job", child_manifest())
    pods = [versioned(pod_manifest(0, uid=f"uid-{number}"), 100 + number) for number in range(2000)]

    assert take_listing(picture, "Pod", pods, version=3000) == {KEY}
    observed = picture.observed(KEY)
    assert len(observed.pods) == 1004  # two a node, and a thousand
    assert observed.unreadable == (
        "more than 1004 pods belong to Job tulu, and no more are looked at: delete those that have ended",
    )
    # One that is held already is still followed
    assert picture.store("Pod", versioned(pod_manifest(0, uid="uid-3", ready=False), 4000)) == KEY

    assert take_listing(picture, "Pod", pods[:3], version=5000) == {KEY}
    assert len(picture.observed(KEY).pods) == 3
    assert picture.observed(KEY).unreadable == ()


def test_an_object_that_cannot_be_read_is_said_on_its_job_and_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    picture = full_picture()
    read = Pod.from_manifest

    def read_or_fail(manifest: dict[str, Any]) -> Pod:
        if manifest["metadata"]["uid"] == "bad":
            raise OverflowError("date value out of range")
        return read(manifest)

    monkeypatch.setitem(cast(dict[str, Any], picture_module._READ), "Pod", read_or_fail)
    bad, good = versioned(pod_manifest(0, uid="bad"), 90), versioned(pod_manifest(1, uid="good"), 91)

    assert take_listing(picture, "Pod", [bad, good], version=95) == {KEY}
    observed = picture.observed(KEY)
    assert [pod.uid for pod in observed.pods] == ["good"]
    assert observed.unreadable == ("Pod tulu-0-bad cannot be read: OverflowError: date value out of range",)
    assert take_listing(picture, "Pod", [good], version=96) == {KEY}
    assert picture.observed(KEY).unreadable == ()


def test_a_copy_of_a_job_does_not_take_the_place_of_ours() -> None:
    picture = full_picture()
    copy = versioned(child_manifest(), 80)
    copy["metadata"] |= {"name": "tulu-copy", "uid": "copy-uid"}

    assert picture.store("Job", copy) is None
    job = picture.observed(KEY).job
    assert job
    assert job.name == "tulu"


def test_a_namespace_of_the_same_name_is_not_taken_for_one_that_is_going() -> None:
    picture = full_picture()
    picture.remember(KEY, replace(picture.memory(KEY), namespace_terminating=True))

    picture.store("SFTJob", versioned(job_manifest(uid="another"), 60))

    assert picture.observed(KEY).namespace_terminating is False


def test_a_change_that_decides_nothing_wakes_nobody_and_is_still_known() -> None:
    picture = full_picture()
    for kind, manifest in (("Pod", pod_manifest(0)), ("Job", child_manifest())):
        touched = versioned(manifest, 90)
        touched["metadata"]["managedFields"] = [{"manager": "kubelet"}]

        assert picture.store(kind, touched) is None
        assert picture.held_version(kind, KEY, manifest["metadata"]["uid"]) == 90
        assert picture.store(kind, versioned(manifest, 89)) is None

    assert picture.store("Pod", versioned(pod_manifest(0, ready=False), 91)) == KEY
    assert picture.store("Job", versioned(child_manifest(suspend=True), 91)) == KEY


def test_pods_of_an_earlier_job_that_have_not_ended_are_known_apart() -> None:
    picture = Picture()
    picture.store("SFTJob", job_manifest())
    picture.store("Job", child_manifest())
    ended = pod_manifest(2, uid="ended", phase="Failed", exit_code=1)
    for pod in (pod_manifest(0), pod_manifest(1, uid="left", deletion=-5), ended):
        if pod["metadata"]["uid"] != "pod-0":
            pod["metadata"]["ownerReferences"][0]["uid"] = "earlier-job"
        picture.store("Pod", pod)

    observed = picture.observed(KEY)

    assert [pod.uid for pod in observed.pods] == ["pod-0"]
    assert [pod.uid for pod in observed.earlier_pods] == ["left"]
    assert picture.remove("Pod", pod_manifest(1, uid="left", version="20")) == KEY
    assert picture.observed(KEY).earlier_pods == ()


def test_a_change_that_is_told_after_the_deletion_brings_nothing_back() -> None:
    picture = full_picture()
    picture.remove("Pod", versioned(pod_manifest(1), 51))

    assert picture.store("Pod", versioned(pod_manifest(1, ready=False), 50)) is None
    # Nor after listings: of another kind, and of the same, which says no more than that it is gone
    take_listing(picture, "Job", [versioned(child_manifest(), 7)], version=60)
    take_listing(picture, "Pod", [pod_manifest(0)], version=61)
    assert picture.store("Pod", versioned(pod_manifest(1, ready=False), 50)) is None

    assert [pod.index for pod in picture.observed(KEY).pods] == [0]


def test_nor_does_one_that_was_asked_for_before_it_when_a_write_finds_it_gone() -> None:
    picture = full_picture()
    picture.remove("SFTJob", versioned(job_manifest(), 51))
    picture.remove("SFTJob", versioned(job_manifest(), 40))

    assert picture.store("SFTJob", versioned(job_manifest(), 50)) is None
    assert picture.manifest(KEY) is None


def test_what_a_listing_did_not_show_is_not_brought_back_by_what_was_told_before() -> None:
    picture = full_picture()
    assert take_listing(picture, "Pod", [pod_manifest(0)], version=40) == {KEY}

    assert picture.store("Pod", versioned(pod_manifest(1, ready=False), 39)) is None
    assert picture.remove("Pod", versioned(pod_manifest(1), 40)) == KEY

    observed = picture.observed(KEY)
    assert [pod.index for pod in observed.pods] == [0]
    assert [pod.index for pod in observed.gone_pods] == [1]


def test_what_is_remembered_of_deletions_goes() -> None:
    picture = full_picture()
    picture.remove("Pod", versioned(pod_manifest(1), 51))

    for version in (60, 70, 80):
        take_listing(picture, "Pod", [], version)

    assert picture._deleted["Pod"] == {}


def test_deletions_are_remembered_while_the_watch_may_tell_of_the_time_before() -> None:
    picture = full_picture()
    picture.remove("Pod", versioned(pod_manifest(1), 51))

    for version in (60, 70, 80):
        Listing(picture, "Pod").end(version, told_from=50)
    assert picture.store("Pod", versioned(pod_manifest(1), 50)) is None

    Listing(picture, "Pod").end(90, told_from=51)
    assert picture._deleted["Pod"].get("pod-1") is None
