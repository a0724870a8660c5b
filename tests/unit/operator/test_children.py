"""What is created, changed and deleted."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from sft_api.v1alpha1 import SFTJobStatus
from sft_operator.config import PodSettings, Settings
from sft_operator.decisions.changes import plan_changes, time_to_live
from sft_operator.decisions.situation import last_words_missing
from sft_operator.picture.observed import ChildJob, Observed
from tests.unit.operator.make import at, job_manifest, make_child, make_job, make_pod, running, stamp

SETTINGS = Settings(pods=PodSettings(image="trainer:1"))
RUNNING = SFTJobStatus(state="Running")
FAILED = SFTJobStatus(state="Failed", completion_time=stamp(0))


def test_missing_children_are_created_the_job_last() -> None:
    changes = plan_changes(make_job(), SFTJobStatus(), Observed(), SETTINGS)

    assert [child["kind"] for child in changes.create] == ["ConfigMap", "Service", "NetworkPolicy", "PodGroup", "Job"]


def test_nothing_is_created_while_pods_of_an_earlier_job_of_that_name_have_not_ended() -> None:
    observed = Observed(earlier_pods=(make_pod(0, deletion=-5),))

    assert plan_changes(make_job(), SFTJobStatus(), observed, SETTINGS).create == []
    with pytest.raises(ValueError, match=r"spec\.compute\.image is missing"):
        plan_changes(make_job(), SFTJobStatus(), observed, Settings())


def test_the_network_policy_can_be_left_to_the_administrator() -> None:
    settings = SETTINGS.model_copy(
        update={"network_policy": SETTINGS.network_policy.model_copy(update={"enabled": False})}
    )
    changes = plan_changes(make_job(), SFTJobStatus(), Observed(), settings)

    assert [child["kind"] for child in changes.create] == ["ConfigMap", "Service", "PodGroup", "Job"]


@pytest.mark.parametrize(
    ("spec", "child", "patch"),
    [
        ({}, {}, None),
        # What others have suspended is left to them.
        ({}, {"suspend": True}, None),
        ({"suspend": True}, {"suspend": True}, None),
        ({"runPolicy": {"activeDeadlineSeconds": 9}}, {}, {"activeDeadlineSeconds": 9}),
        # Nobody else decides how many pods a run has: with fewer they would wait for each other for ever.
        ({}, {"pods": (2, 2)}, None),
        ({}, {"pods": (2, 0)}, {"completions": 2, "parallelism": 2}),
        ({}, {"pods": (1, 1)}, {"completions": 2, "parallelism": 2}),
        ({"compute": {"nodes": 3}}, {"pods": (4, 4)}, {"completions": 3, "parallelism": 3}),
        # Nothing is changed in a Job that has ended.
        ({"suspend": True}, {"conditions": {"Complete": ("", "")}}, None),
        ({"suspend": True}, {"conditions": {"FailureTarget": ("", "")}}, None),
    ],
)
def test_an_existing_job_is_only_limited_besides_what_its_queue_asks_for(
    spec: dict[str, Any], child: dict[str, Any], patch: dict[str, Any] | None
) -> None:
    observed = running(job=make_child(**child))
    changes = plan_changes(make_job(**spec), RUNNING, observed, SETTINGS)

    assert changes.create == []
    assert changes.delete_job is False
    assert changes.patch_job == (None if patch is None else {"spec": patch})


def test_a_job_is_suspended_and_limited_in_one_change() -> None:
    job = make_job(suspend=True, runPolicy={"activeDeadlineSeconds": 9})

    patch = plan_changes(job, RUNNING, running(), SETTINGS).patch_job

    assert patch is not None
    assert patch["spec"] == {"suspend": True, "activeDeadlineSeconds": 9}
    assert patch["metadata"]["annotations"] == {"sftjob.dev/suspended": "true"}


def test_what_was_submitted_suspended_gets_nothing_but_a_check() -> None:
    assert plan_changes(make_job(suspend=True), SFTJobStatus(), Observed(), SETTINGS).create == []
    with pytest.raises(ValueError, match="image"):
        plan_changes(make_job(suspend=True), SFTJobStatus(), Observed(), Settings())


def test_a_failed_run_loses_its_job_when_that_still_works() -> None:
    assert plan_changes(make_job(), FAILED, running(), SETTINGS).delete_job is True
    ended = running(job=make_child(conditions={"FailureTarget": ("", "")}))
    assert plan_changes(make_job(), FAILED, ended, SETTINGS).delete_job is False
    assert plan_changes(make_job(), FAILED, Observed(), SETTINGS).create == []


def test_a_spec_that_was_refused_may_still_run() -> None:
    refused = SFTJobStatus(state="Failed")

    assert len(plan_changes(make_job(), refused, Observed(), SETTINGS).create) == 5


def test_a_namespace_that_is_going_gets_its_pods_back() -> None:
    going = running(namespace_terminating=True)

    assert plan_changes(make_job(), RUNNING, going, SETTINGS).delete_job is True
    assert plan_changes(make_job(), RUNNING, Observed(namespace_terminating=True), SETTINGS).create == []


@pytest.mark.parametrize(
    ("seconds", "status", "expected"),
    [
        (None, FAILED, None),
        (60, RUNNING, None),
        (60, FAILED, timedelta(seconds=40)),
        (20, FAILED, timedelta(0)),
        (0, FAILED, timedelta(seconds=-20)),
    ],
)
def test_finished_jobs_live_for_as_long_as_asked(
    seconds: int | None, status: SFTJobStatus, expected: timedelta | None
) -> None:
    policy = {} if seconds is None else {"ttlSecondsAfterFinished": seconds}

    assert time_to_live(job_manifest(runPolicy=policy), status, at(20)) == expected


@pytest.mark.parametrize(
    ("child", "pods", "seconds", "expected"),
    [
        ({}, (make_pod(0),), 1, False),
        # The Job is complete, its pods seem to run: their end is on another watch, and on its way.
        ({"conditions": {"Complete": ("", "")}}, (make_pod(0),), 1, True),
        ({"conditions": {"Complete": ("", "")}}, (make_pod(0),), 30, False),
        (
            {"pods": (1, 1), "conditions": {"Complete": ("", "")}},
            (make_pod(0, phase="Succeeded", exit_code=0),),
            1,
            False,
        ),
        # A pod of which nothing was seen yet.
        ({"conditions": {"Complete": ("", "")}}, (), 1, True),
        ({"conditions": {"Complete": ("", "")}}, (), 30, False),
        (
            {"pods": (2, 2), "conditions": {"Complete": ("", "")}},
            (make_pod(0, phase="Succeeded", exit_code=0),),
            1,
            True,
        ),
        ({"conditions": {"Failed": ("PodFailurePolicy", "")}}, (make_pod(0),), 1, True),
        ({"conditions": {"Failed": ("PodFailurePolicy", "")}}, (make_pod(0, phase="Failed", exit_code=10),), 1, False),
        # Pods that are asked to stop save for as long as they are given: half a minute.
        ({"conditions": {"Failed": ("DeadlineExceeded", "")}}, (make_pod(0),), 1, True),
        ({"conditions": {"Failed": ("DeadlineExceeded", "")}}, (), 1, False),
        ({"conditions": {"FailureTarget": ("DeadlineExceeded", "")}}, (make_pod(0, deletion=0),), 39, True),
        ({"conditions": {"FailureTarget": ("DeadlineExceeded", "")}}, (make_pod(0, deletion=0),), 41, False),
    ],
)
def test_the_end_of_a_job_waits_for_the_ends_of_its_pods(
    child: dict[str, Any], pods: tuple[Any, ...], seconds: float, expected: bool
) -> None:
    observed = running(job=make_child(**child), pods=pods)

    assert last_words_missing(observed, at(seconds)) is expected


def test_the_end_of_a_job_of_which_no_time_is_known_waits_for_nothing() -> None:
    complete = {"type": "Complete", "status": "True"}

    def ended(**status: Any) -> Observed:
        return Observed(job=ChildJob.from_manifest({"status": {"conditions": [complete], **status}}))

    assert not last_words_missing(ended(), at(1))
    # Its own time does as well
    assert last_words_missing(ended(completionTime=stamp(0)), at(1))
    assert not last_words_missing(ended(completionTime=stamp(0)), at(30))
