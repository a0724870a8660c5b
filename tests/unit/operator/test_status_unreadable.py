"""The status of a run whose spec cannot be run, or is no longer understood."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sft_api.v1alpha1 import ProgressStatus, SFTJobStatus
from sft_operator.decisions.spec import Terms, lenient_terms
from sft_operator.decisions.status import follow, read_status, refused_status
from tests.unit.operator.make import NOW, at, job_manifest, make_child, report, running, training
from tests.unit.operator.statuses import DONE, NO_IMAGE, TRAINED, condition, held, status_of


def test_a_spec_that_cannot_be_run_is_refused_and_not_final() -> None:
    status = refused_status(3, SFTJobStatus(), "InvalidSpec", "spec.data.train[0].uri: bad", NOW)
    accepted = status_of(running(report=report(training(5))), status)

    assert status.state == "Failed"
    assert held(status) == {"Failed": "InvalidSpec", "Stalled": "InvalidSpec"}
    assert next(c for c in status.conditions if c.type == "Accepted").status == "False"
    assert status.completion_time is None
    assert accepted.state == "Running"
    assert held(accepted).keys() == {"Accepted", "Running"}


def test_a_run_that_cannot_be_made_again_shows_no_speed_and_no_pods() -> None:
    """Its Job was deleted in the middle of training: what it says then stays until somebody acts."""
    told = training(5, tokens_per_second=400.0, tokens_per_second_per_gpu=200.0, model_flops_utilization=0.4)
    trains = status_of(running(report=report(told)))
    status = refused_status(3, trains, "InvalidSpec", "spec.data.train[0].uri: bad", NOW)

    assert trains.progress is not None
    assert trains.progress.tokens_per_second == 400.0
    assert status.progress is not None
    assert status.progress.tokens_per_second is status.progress.tokens_per_second_per_gpu is None
    assert status.progress.model_flops_utilization is None
    assert (status.progress.step, status.progress.phase, status.pods_ready) == (5, "Failed", "")


def unreadable(**spec: Any) -> Terms:
    """Terms of a spec that the operator cannot read as a whole."""
    return lenient_terms(job_manifest(invented=1, **spec), make_child(), "spec.invented: no such field")


def test_a_run_whose_spec_is_no_longer_understood_is_followed_to_its_end() -> None:
    before = status_of(running(report=report(training(5))))

    trains = follow(unreadable(), before, running(report=report(training(9))), at(9))
    done = running(job=make_child(conditions={"Complete": ("", "")}), pods=(DONE, DONE))
    complete = follow(unreadable(), trains, done, at(20))
    failed = follow(unreadable(), trains, running(job=make_child(conditions={"Failed": ("Odd", "so it is")})), at(20))

    assert trains.state == "Running"
    assert trains.progress
    assert trains.progress.step == 9
    assert held(trains) == {"Running": "Training", "Stalled": "InvalidSpec"}
    assert "spec.invented: no such field" in trains.message
    assert "spec.invented: no such field" in condition(trains, "Accepted").message
    assert held(complete).keys() == {"Complete"}
    assert complete.completion_time
    assert condition(complete, "Accepted").reason == "InvalidSpec"
    assert held(failed) == {"Failed": "Odd", "Stalled": "Odd"}


def test_another_trouble_of_such_a_run_is_told_first() -> None:
    status = follow(unreadable(), TRAINED, running(pods=NO_IMAGE), NOW)

    assert held(status)["Stalled"] == "ImagePull"
    assert status.message.index("ImagePullBackOff") < status.message.index("spec.invented")


@pytest.mark.parametrize(
    ("spec", "suspend", "deadline", "restarts"),
    [
        ({"suspend": True, "runPolicy": {"activeDeadlineSeconds": 90, "maxRestarts": 3}}, True, 90, 3),
        ({"runPolicy": {}}, False, None, 10),
        # What cannot be read of the few leaves the Job as it is.
        ({"suspend": "yes", "runPolicy": {"activeDeadlineSeconds": "1h", "maxRestarts": -1}}, False, 600, 10),
        ({"runPolicy": {"activeDeadlineSeconds": 10**30, "maxRestarts": True}}, False, 600, 10),
        ({"runPolicy": ["strange"]}, False, None, 10),
    ],
)
def test_a_few_fields_of_such_a_spec_still_count(
    spec: dict[str, Any], suspend: bool, deadline: int | None, restarts: int
) -> None:
    child = replace(make_child(), nodes=7, active_deadline_seconds=600)

    terms = lenient_terms(job_manifest(**spec), child, "words")

    assert (terms.uid, terms.generation, terms.nodes) == ("sft-uid", 1, 7)
    assert (terms.suspend, terms.active_deadline_seconds, terms.max_restarts) == (suspend, deadline, restarts)


def test_a_status_written_by_a_newer_version_is_read_as_far_as_it_is_understood() -> None:
    status = read_status({"status": {"state": "Running", "attempt": 2, "invented": {"a": 1}, "progress": {"new": 1}}})

    assert (status.state, status.attempt, status.progress) == ("Running", 2, ProgressStatus())
    assert read_status({}) == SFTJobStatus()
