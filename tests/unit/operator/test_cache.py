"""The operator's picture of the cluster: ordered by version, repaired by listings, sorted by owner."""

from __future__ import annotations

from typing import Any

from sft_operator.cache import Cache, Key
from sft_operator.observed import Observed, Report
from tests.unit.operator.make import child_manifest, job_manifest, pod_manifest, report

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


def test_children_are_found_by_label_and_owner() -> None:
    observed = full_cache().observed(KEY)

    assert observed.job
    assert observed.job.uid == "job-uid"
    assert [pod.index for pod in observed.pods] == [0, 1]


def test_strangers_with_our_labels_are_not_ours() -> None:
    cache = full_cache()
    pod = pod_manifest(0, uid="stranger")
    pod["metadata"]["ownerReferences"] = [{"kind": "Job", "uid": "another", "controller": True}]
    cache.store("Pod", pod)
    cache.store("Job", versioned(child_manifest(owner="another-sftjob"), 99))

    assert cache.observed(KEY) == Observed()


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

    changed = cache.replace("Pod", [newer], version=40)

    assert changed == {KEY}
    observed = cache.observed(KEY)
    assert [pod.phase for pod in observed.pods] == ["Failed"]
    assert [pod.index for pod in observed.gone_pods] == [1]


def test_a_listing_that_is_older_than_an_event_changes_nothing_back() -> None:
    cache = full_cache()
    cache.store("Pod", versioned(pod_manifest(2), 50))
    cache.remove("Pod", versioned(pod_manifest(1), 51))

    changed = cache.replace("Pod", [versioned(pod_manifest(0), 9), versioned(pod_manifest(1), 9)], version=45)

    assert changed == set()
    assert [pod.index for pod in cache.observed(KEY).pods] == [0, 2]


def test_an_sftjob_of_the_same_name_starts_afresh() -> None:
    cache = full_cache()
    cache.entry(KEY).report = Report(report().progress, report().received, "pod-0")

    cache.store("SFTJob", versioned(job_manifest(uid="another"), 60))

    assert cache.observed(KEY) == Observed()


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


def test_odd_objects_do_no_harm() -> None:
    cache = Cache()

    assert cache.store("Pod", {"metadata": {"name": "x", "namespace": "y", "uid": "u"}}) is None
    odd = {"metadata": {"labels": {"sftjob.dev/job": "tulu"}, "namespace": "team", "uid": "u", "resourceVersion": "1"}}
    assert cache.store("Pod", odd) == KEY
    assert cache.observed(KEY) == Observed()


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
    cache.entry(KEY).namespace_terminating = True

    cache.store("SFTJob", versioned(job_manifest(uid="another"), 60))

    assert cache.observed(KEY).namespace_terminating is False


def test_a_change_that_decides_nothing_wakes_nobody_and_is_still_known() -> None:
    cache = full_cache()
    for kind, manifest in (("Pod", pod_manifest(0)), ("Job", child_manifest())):
        touched = versioned(manifest, 90)
        touched["metadata"]["managedFields"] = [{"manager": "kubelet"}]

        assert cache.store(kind, touched) is None
        assert 90 in cache.versions(kind).values()
        assert cache.store(kind, versioned(manifest, 89)) is None

    assert cache.store("Pod", versioned(pod_manifest(0, ready=False), 91)) == KEY
    assert cache.store("Job", versioned(child_manifest(suspend=True), 91)) == KEY
