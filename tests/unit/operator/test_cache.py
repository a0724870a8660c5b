"""The operator's picture of the cluster: ordered by version, repaired by listings, sorted by owner."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from sft_operator.picture import cache as cache_module
from sft_operator.picture.cache import Cache, Key
from sft_operator.picture.observed import Observed, Pod
from tests.unit.operator.make import child_manifest, job_manifest, pod_manifest, report, take_listing

KEY = Key("team", "tulu")


def versioned(manifest: dict[str, Any], version: int) -> dict[str, Any]:
    return {**manifest, "metadata": {**manifest["metadata"], "resourceVersion": str(version)}}


def full_cache() -> Cache:
    cache = Cache()
    cache.store("SFTJob", job_manifest())
    cache.store("Job", child_manifest())
    cache.store("Pod", pod_manifest(1))
    cache.store("Pod", pod_manifest(0))
    return cache


def test_children_are_found_by_their_owners() -> None:
    observed = full_cache().observed(KEY)

    assert observed.job
    assert observed.job.uid == "job-uid"
    assert [pod.index for pod in observed.pods] == [0, 1]


def test_strangers_with_our_labels_are_not_ours() -> None:
    cache = full_cache()
    pods = cache.observed(KEY).pods
    pod = pod_manifest(0, uid="stranger")
    pod["metadata"]["ownerReferences"] = [{"kind": "Job", "uid": "another", "controller": True}]
    cache.store("Pod", pod)
    cache.store("Job", versioned(child_manifest(owner="another-sftjob"), 99))

    assert cache.observed(KEY) == Observed(earlier_pods=pods)


def test_older_versions_change_nothing_back() -> None:
    cache = full_cache()

    assert cache.store("SFTJob", versioned(job_manifest(suspend=True), 9)) == KEY
    assert cache.store("SFTJob", versioned(job_manifest(), 8)) is None
    assert cache.store("SFTJob", versioned(job_manifest(suspend=True), 9)) is None
    manifest = cache.manifest(KEY)
    assert manifest
    assert manifest["spec"]["suspend"] is True


def test_a_pod_that_was_deleted_is_remembered_until_it_was_taken_into_the_status() -> None:
    cache = full_cache()
    last_seen = pod_manifest(1, phase="Failed", exit_code=30)

    assert cache.remove("Pod", versioned(last_seen, 20)) == KEY

    observed = cache.observed(KEY)
    assert [pod.index for pod in observed.pods] == [0]
    assert observed.gone_pods[0].terminated
    assert observed.gone_pods[0].terminated.exit_code == 30


def test_a_listing_finds_what_a_watch_has_lost() -> None:
    cache = full_cache()
    newer = versioned(pod_manifest(0, phase="Failed", exit_code=30), 30)

    changed = take_listing(cache, "Pod", [newer], version=40)

    assert changed == {KEY}
    observed = cache.observed(KEY)
    assert [pod.phase for pod in observed.pods] == ["Failed"]
    assert [pod.index for pod in observed.gone_pods] == [1]


def test_a_listing_that_is_older_than_an_event_changes_nothing_back() -> None:
    cache = full_cache()
    cache.store("Pod", versioned(pod_manifest(2), 50))
    cache.remove("Pod", versioned(pod_manifest(1), 51))

    changed = take_listing(cache, "Pod", [versioned(pod_manifest(0), 9), versioned(pod_manifest(1), 9)], version=45)

    assert changed == set()
    assert [pod.index for pod in cache.observed(KEY).pods] == [0, 2]


def test_an_sftjob_of_the_same_name_starts_afresh() -> None:
    cache = full_cache()
    cache.remember(KEY, replace(cache.memory(KEY), report=report()))

    pods = cache.observed(KEY).pods

    cache.store("SFTJob", versioned(job_manifest(uid="another"), 60))

    assert cache.observed(KEY) == Observed(earlier_pods=pods)


def test_nothing_is_left_of_what_is_gone() -> None:
    cache = full_cache()
    for kind, manifest in (
        ("Pod", pod_manifest(0)),
        ("Pod", pod_manifest(1)),
        ("Job", child_manifest()),
        ("SFTJob", job_manifest()),
    ):
        cache.remove(kind, versioned(manifest, 70))

    assert cache.all_keys() == []
    assert list(cache.manifests()) == []


def test_what_merely_wears_our_labels_is_not_held() -> None:
    cache = Cache()
    cache.store("SFTJob", job_manifest())
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
        assert cache.store("Pod", manifest) is None
        assert cache.store("Job", manifest) is None
    assert cache.store("Pod", {"metadata": plain}) is None
    assert (cache.entry(KEY).pods, cache.entry(KEY).job) == ({}, None)


def test_the_label_of_a_pod_of_ours_does_not_matter() -> None:
    cache = full_cache()
    pod = versioned(pod_manifest(0, ready=False), 30)
    pod["metadata"]["labels"] = {"sftjob.dev/job": "another"}

    assert cache.store("Pod", pod) == KEY
    assert [pod.ready for pod in cache.observed(KEY).pods] == [False, True]


def test_only_so_many_pods_are_held_for_one_job_and_what_is_beyond_is_said() -> None:
    cache = Cache()
    cache.store("SFTJob", job_manifest())
    cache.store("Job", child_manifest())
    pods = [versioned(pod_manifest(0, uid=f"uid-{number}"), 100 + number) for number in range(2000)]

    assert take_listing(cache, "Pod", pods, version=3000) == {KEY}
    observed = cache.observed(KEY)
    assert len(observed.pods) == 1004  # two a node, and a thousand
    assert observed.unreadable == (
        "more than 1004 pods belong to Job tulu, and no more are looked at: delete those that have ended",
    )
    # One that is held already is still followed
    assert cache.store("Pod", versioned(pod_manifest(0, uid="uid-3", ready=False), 4000)) == KEY

    assert take_listing(cache, "Pod", pods[:3], version=5000) == {KEY}
    assert len(cache.observed(KEY).pods) == 3
    assert cache.observed(KEY).unreadable == ()


def test_an_object_that_cannot_be_read_is_said_on_its_job_and_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = full_cache()
    read = Pod.from_manifest

    def read_or_fail(manifest: dict[str, Any]) -> Pod:
        if manifest["metadata"]["uid"] == "bad":
            raise OverflowError("date value out of range")
        return read(manifest)

    monkeypatch.setitem(cast(dict[str, Any], cache_module._READ), "Pod", read_or_fail)
    bad, good = versioned(pod_manifest(0, uid="bad"), 90), versioned(pod_manifest(1, uid="good"), 91)

    assert take_listing(cache, "Pod", [bad, good], version=95) == {KEY}
    observed = cache.observed(KEY)
    assert [pod.uid for pod in observed.pods] == ["good"]
    assert observed.unreadable == ("Pod tulu-0-bad cannot be read: OverflowError: date value out of range",)
    assert take_listing(cache, "Pod", [good], version=96) == {KEY}
    assert cache.observed(KEY).unreadable == ()


def test_a_copy_of_a_job_does_not_take_the_place_of_ours() -> None:
    cache = full_cache()
    copy = versioned(child_manifest(), 80)
    copy["metadata"] |= {"name": "tulu-copy", "uid": "copy-uid"}

    assert cache.store("Job", copy) is None
    job = cache.observed(KEY).job
    assert job
    assert job.name == "tulu"


def test_a_namespace_of_the_same_name_is_not_taken_for_one_that_is_going() -> None:
    cache = full_cache()
    cache.remember(KEY, replace(cache.memory(KEY), namespace_terminating=True))

    cache.store("SFTJob", versioned(job_manifest(uid="another"), 60))

    assert cache.observed(KEY).namespace_terminating is False


def test_a_change_that_decides_nothing_wakes_nobody_and_is_still_known() -> None:
    cache = full_cache()
    for kind, manifest in (("Pod", pod_manifest(0)), ("Job", child_manifest())):
        touched = versioned(manifest, 90)
        touched["metadata"]["managedFields"] = [{"manager": "kubelet"}]

        assert cache.store(kind, touched) is None
        assert cache.held_version(kind, KEY, manifest["metadata"]["uid"]) == 90
        assert cache.store(kind, versioned(manifest, 89)) is None

    assert cache.store("Pod", versioned(pod_manifest(0, ready=False), 91)) == KEY
    assert cache.store("Job", versioned(child_manifest(suspend=True), 91)) == KEY


def test_pods_of_an_earlier_job_that_have_not_ended_are_known_apart() -> None:
    cache = Cache()
    cache.store("SFTJob", job_manifest())
    cache.store("Job", child_manifest())
    ended = pod_manifest(2, uid="ended", phase="Failed", exit_code=1)
    for pod in (pod_manifest(0), pod_manifest(1, uid="left", deletion=-5), ended):
        if pod["metadata"]["uid"] != "pod-0":
            pod["metadata"]["ownerReferences"][0]["uid"] = "earlier-job"
        cache.store("Pod", pod)

    observed = cache.observed(KEY)

    assert [pod.uid for pod in observed.pods] == ["pod-0"]
    assert [pod.uid for pod in observed.earlier_pods] == ["left"]
    assert cache.remove("Pod", pod_manifest(1, uid="left", version="20")) == KEY
    assert cache.observed(KEY).earlier_pods == ()


def test_a_change_that_is_told_after_the_deletion_brings_nothing_back() -> None:
    cache = full_cache()
    cache.remove("Pod", versioned(pod_manifest(1), 51))

    assert cache.store("Pod", versioned(pod_manifest(1, ready=False), 50)) is None
    # Nor after listings: of another kind, and of the same, which says no more than that it is gone
    take_listing(cache, "Job", [versioned(child_manifest(), 7)], version=60)
    take_listing(cache, "Pod", [pod_manifest(0)], version=61)
    assert cache.store("Pod", versioned(pod_manifest(1, ready=False), 50)) is None

    assert [pod.index for pod in cache.observed(KEY).pods] == [0]


def test_what_a_listing_did_not_show_is_not_brought_back_by_what_was_told_before() -> None:
    cache = full_cache()
    assert take_listing(cache, "Pod", [pod_manifest(0)], version=40) == {KEY}

    assert cache.store("Pod", versioned(pod_manifest(1, ready=False), 39)) is None
    assert cache.remove("Pod", versioned(pod_manifest(1), 40)) == KEY

    observed = cache.observed(KEY)
    assert [pod.index for pod in observed.pods] == [0]
    assert [pod.index for pod in observed.gone_pods] == [1]


def test_what_is_remembered_of_deletions_goes() -> None:
    cache = full_cache()
    cache.remove("Pod", versioned(pod_manifest(1), 51))

    for version in (60, 70, 80):
        take_listing(cache, "Pod", [], version)

    assert cache._deleted["Pod"] == {}


def test_deletions_are_remembered_while_the_watch_may_tell_of_the_time_before() -> None:
    cache = full_cache()
    cache.remove("Pod", versioned(pod_manifest(1), 51))

    for version in (60, 70, 80):
        cache.listing("Pod").end(version, told_from=50)
    assert cache.store("Pod", versioned(pod_manifest(1), 50)) is None

    cache.listing("Pod").end(90, told_from=51)
    assert cache._deleted["Pod"].get("pod-1") is None
