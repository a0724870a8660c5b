"""A run that is complete before its job begins: the operator finds it out where it can, and makes nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sft_api.numbers import Numbers
from sft_api.place import Done, complete_progress
from sft_api.progress import Phase
from sft_api.v1alpha1 import ExportStatus, HubSpec
from sft_operator.config import StoreSettings
from sft_operator.decisions.look import look
from sft_operator.decisions.questions import complete_was_read
from sft_operator.decisions.result import ReadComplete, Result
from sft_operator.picture.memory import Memory
from sft_operator.picture.observed import CompleteRun
from tests.unit.operator.make import Object, job_manifest, make_child, make_job, running, training
from tests.unit.operator.test_look import ASKED, SETTINGS, kinds, seen, state

PLACE = "s3://platform/sft/team/tulu"
STORE = StoreSettings(uri="s3://platform/sft", verify=True)
COMPLETE = CompleteRun(
    PLACE,
    training(100, phase=Phase.COMPLETE, attempt=3, resumed_from_step=100).model_copy(
        update={"export": ExportStatus(uri=f"{PLACE}/export", step=100)}
    ),
)


def manifest(**spec: object) -> Object:
    return job_manifest(**{"checkpoint": {"uri": PLACE}, **spec})


def decided(
    spec: Object,
    *,
    memory: Memory | None = None,
    clock: float = 1000.0,
    store: StoreSettings | None = STORE,
    **fields: object,
) -> Result:
    snapshot = seen(manifest=spec, clock=clock, **ASKED, **fields)  # type: ignore[arg-type]
    if memory is not None:
        snapshot = replace(snapshot, memory=memory)
    return look(snapshot, SETTINGS.model_copy(update={"store": store}))


def questions(result: Result) -> list[ReadComplete]:
    return [question for question in result.questions if isinstance(question, ReadComplete)]


def test_nothing_is_made_before_the_store_has_said_whether_the_run_is_complete() -> None:
    first = decided(manifest())

    numbers = Numbers.of(make_job(checkpoint={"uri": PLACE}).spec)
    assert questions(first) == [ReadComplete("sft-uid", PLACE, f"{PLACE}/export", "tulu", numbers)]
    assert (first.actions, first.status, first.again) == ((), None, 2.0)

    # Of a run with adapters these are asked for, or the model with them
    (adapters,) = questions(decided(manifest(lora={})))
    (merged,) = questions(decided(manifest(lora={}, export={"mergeAdapter": True})))
    assert (adapters.form, merged.form) == ("adapter", "model")
    hub = {"repository": "org/mine"}
    (copied,) = questions(decided(manifest(export={"hub": hub})))
    assert copied.hub == HubSpec(repository="org/mine")
    kept = {"uri": PLACE, "keep": {"best": 1}}
    data = {"train": [{"uri": "hf://org/rows"}], "eval": [{"uri": "hf://org/rows", "name": "held-out"}]}
    (best,) = questions(decided(manifest(data=data, checkpoint=kept, export={"checkpoint": "best"})))
    assert (first and questions(first)[0].choice, best.choice) == ("last", "best")

    # When it does not answer at once, that the job is being prepared is said meanwhile
    later = decided(manifest(), memory=first.memory, clock=1003)
    assert (questions(later), later.actions, state(later)) == (questions(first), (), "Preparing")


def test_a_complete_run_is_complete_without_a_job() -> None:
    memory = complete_was_read(decided(manifest()).memory, COMPLETE)

    result = decided(manifest(), memory=memory)

    assert (result.actions, questions(result)) == ((), [])
    status = result.status
    assert status is not None
    assert (status.state, status.attempt, status.job_ref) == ("Complete", 3, "")
    assert status.progress is not None
    assert (status.progress.step, status.progress.percent, status.progress.phase) == (100, 100, "Complete")
    assert status.export == ExportStatus(uri=f"{PLACE}/export", step=100)
    assert status.completion_time is not None
    sentence = f"the run in {PLACE} is complete since step 100: nothing is left to train"
    assert [(item.type, item.reason, item.note) for item in result.news] == [("Normal", "Complete", sentence)]
    holds = {item.type: item.reason for item in status.conditions if item.status == "True"}
    assert holds == {"Accepted": "Valid", "Complete": "TrainingComplete"}

    # Also for an operator that begins after that was written
    again = decided(manifest(), status=result.document)
    assert (again.actions, questions(again), state(again)) == ((), [], "Complete")


def test_a_complete_run_that_was_stopped_early_says_so_again() -> None:
    done = Done(step=60, attempt=3, stopped_early="after step 60: it got no better")
    found = CompleteRun(PLACE, complete_progress(PLACE, done, None, None, None))

    status = decided(manifest(), memory=complete_was_read(decided(manifest()).memory, found)).status

    assert status is not None
    assert status.progress is not None
    assert (status.state, status.progress.summary, status.progress.total_steps) == ("Complete", "60", None)
    assert status.message.endswith(
        "nothing is left to train; the run was stopped early, after step 60: it got no better"
    )
    assert {item.reason for item in status.conditions if item.type == "Complete"} == {"StoppedEarly"}


def test_a_dummy_run_is_not_complete_because_the_run_of_its_manifest_is() -> None:
    (asked,) = questions(decided(manifest(training={"dummyRun": {}})))
    assert (asked.uri, asked.export_uri) == (f"{PLACE}/dummy-run", None)


@pytest.mark.parametrize("answered", [True, False], ids=["not complete", "no answer"])
def test_a_run_that_is_not_complete_or_of_which_nobody_knows_gets_its_job(answered: bool) -> None:
    first = decided(manifest())

    memory = complete_was_read(first.memory, None) if answered else first.memory
    then = decided(manifest(), memory=memory, clock=1000 if answered else 1010)

    assert (kinds(then), questions(then)) == (["CreateChildren"], [])


@pytest.mark.parametrize(
    ("spec", "store"),
    [
        ({}, None),
        ({}, STORE.model_copy(update={"verify": False})),
        ({"checkpoint": {"uri": "s3://platform/sft/other/tulu"}}, STORE),
        ({"checkpoint": {"uri": "pvc://claim/tulu"}}, STORE),
        ({"checkpoint": {"uri": PLACE, "s3": {"credentialsSecretRef": "own"}}}, STORE),
        ({"export": {"uri": "s3://elsewhere/model"}}, STORE),
        ({"checkpoint": {"uri": PLACE, "resume": {"policy": "never"}}}, STORE),
    ],
    ids=["no store", "unread", "another folder", "claim", "other credentials", "export elsewhere", "never"],
)
def test_what_the_operator_cannot_read_or_judge_is_left_to_the_job(spec: Object, store: StoreSettings | None) -> None:
    result = decided(manifest(**spec), store=store)

    assert questions(result) == []
    if spec.get("checkpoint", {}).get("uri") != "s3://platform/sft/other/tulu":  # which is refused
        assert kinds(result) == ["CreateChildren"]


def test_a_job_that_has_begun_is_not_asked_about() -> None:
    """Only index 0 knows what has become of it since."""
    result = decided(manifest(), status={"state": "Recovering", "attempt": 1})

    assert (kinds(result), questions(result)) == (["CreateChildren"], [])


def test_a_suspended_job_is_asked_about_when_it_is_resumed() -> None:
    assert questions(decided(manifest(suspend=True))) == []


def test_what_was_found_before_a_job_was_made_says_nothing_of_it() -> None:
    memory = complete_was_read(Memory("sft-uid"), COMPLETE)

    result = decided(manifest(), memory=memory, observed=running(job=make_child()))

    assert result.memory.complete_run is None
    assert state(result) != "Complete" if result.status else True


def test_a_complete_run_is_not_refused_for_the_memory_it_would_take() -> None:
    spec = manifest(model={"uri": "hf://meta-llama/Llama-3.1-8B"}, compute={"gpusPerNode": 1, "gpuMemory": "80Gi"})
    first = decided(spec)

    assert len(questions(first)) == 1
    assert (first.actions, first.status) == ((), None)
    found = decided(spec, memory=complete_was_read(first.memory, COMPLETE))
    assert (state(found), found.actions) == ("Complete", ())
    not_there = decided(spec, memory=complete_was_read(first.memory, None))
    assert state(not_there) == "Failed"


def test_a_complete_run_waits_for_no_profile_of_pods() -> None:
    spec = manifest(compute={"gpusPerNode": 1, "podProfile": "gone"})
    first = decided(spec)

    assert len(questions(first)) == 1
    assert (first.actions, first.status) == ((), None)
    found = decided(spec, memory=complete_was_read(first.memory, COMPLETE))
    assert (state(found), found.actions) == ("Complete", ())
    not_there = decided(spec, memory=complete_was_read(first.memory, None))
    assert not_there.actions == ()
    assert not_there.status is not None
    assert {item.reason for item in not_there.status.conditions if item.type == "Accepted"} == {"NotConfigured"}
