"""What is told to people and to Prometheus: events, metrics, errors of the spec, settings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client import generate_latest
from pydantic import ValidationError

from sft_api.deletion import DELETES
from sft_api.failures import FailureClass
from sft_api.goodput import CAUSES
from sft_api.report import checkpoints_status
from sft_api.v1alpha1 import CheckpointStatus, Condition, ExportStatus, HubStatus, RestartsStatus, SFTJobStatus
from sft_api.v1alpha1.status import State
from sft_operator.config import Settings, load_settings
from sft_operator.decisions.deletion import with_warnings
from sft_operator.decisions.news import build_event, news
from sft_operator.decisions.spec import InvalidSpec, read_spec
from sft_operator.decisions.status import compute_status, refused_status, retried_status, write_status
from sft_operator.metrics import OperatorMetrics
from tests.unit.operator.make import (
    NOW,
    incident,
    job_manifest,
    make_child,
    make_job,
    make_pod,
    make_terms,
    report,
    running,
    stamp,
    training,
)
from tests.unit.operator.statuses import TRAINED


@pytest.mark.parametrize("state", ["Queued", "Starting", "Recovering", "Suspended"])
def test_that_training_goes_on_is_news(state: State) -> None:
    before = SFTJobStatus(state=state, first_step_time=stamp(-300))
    after = compute_status(make_job(), before, running(report=report(training(5))), NOW)

    assert news(before, after) == [("Normal", "Running", "training goes on")]
    assert news(after, after) == []


@pytest.mark.parametrize(("state", "kind"), [("Suspended", "Normal"), ("Complete", "Normal"), ("Failed", "Warning")])
def test_a_change_to_a_state_that_lasts_is_news(state: State, kind: str) -> None:
    stalled = [Condition(type="Stalled", status="True", reason="x", message="x", last_transition_time=stamp(0))]
    after = SFTJobStatus(state=state, conditions=stalled if state == "Failed" else [])

    assert [item[:2] for item in news(SFTJobStatus(state="Running"), after)] == [(kind, state)]


def test_what_every_job_passes_is_none() -> None:
    starting = compute_status(make_job(), SFTJobStatus(), running(pods=()), NOW)
    trains = compute_status(make_job(), starting, running(report=report(training(5))), NOW)

    assert (starting.state, trains.state) == ("Starting", "Running")
    assert news(SFTJobStatus(), starting) + news(starting, trains) == []


def test_trouble_is_a_warning_once() -> None:
    pods = (make_pod(0, phase="Pending", waiting=("ErrImagePull", "no such image")), make_pod(1))
    fresh = SFTJobStatus(state="Starting")
    first = compute_status(make_job(), fresh, running(pods=pods), NOW)
    second = compute_status(make_job(), first, running(pods=pods), NOW)

    assert [(item.type, item.reason) for item in news(fresh, first)] == [("Warning", "ImagePull")]
    assert news(first, second) == []


def test_trouble_that_comes_with_a_change_of_state_is_a_warning_by_its_own_name() -> None:
    """As an alert looks for it: by the reason."""
    pods = (make_pod(0, phase="Pending", waiting=("ErrImagePull", "no such image")), make_pod(1))
    away = compute_status(make_job(), TRAINED, running(pods=pods), NOW)

    assert [item.reason for item in news(TRAINED, away)] == ["Recovering", "ImagePull"]
    failed = compute_status(make_job(), TRAINED, running(job=make_child(conditions={"Failed": ("x", "")})), NOW)
    assert [item.reason for item in news(TRAINED, failed)] == ["Failed"]


def test_a_copy_on_the_hub_is_an_event_once() -> None:
    def seen(before: SFTJobStatus, commit: str) -> SFTJobStatus:
        copy = HubStatus(url="https://hub/org/mine", revision="main", commit=commit) if commit else None
        told = report(training(50, export=ExportStatus(uri="s3://b/export", step=50, hub=copy)))
        return compute_status(make_job(), before, running(report=told), NOW)

    exported = seen(SFTJobStatus(), "")
    copied = seen(exported, "abc")

    assert [item.reason for item in news(SFTJobStatus(), exported)] == []
    assert news(exported, copied) == [
        ("Normal", "Uploaded", "the model is in https://hub/org/mine, branch main, commit abc")
    ]
    assert news(copied, seen(copied, "abc")) == []


def test_an_export_on_the_way_is_an_event_once_and_stays_told() -> None:
    def seen(before: SFTJobStatus, *steps: int, attempt: int = 1) -> SFTJobStatus:
        exports = [ExportStatus(uri=f"s3://b/export/step-{step:08d}", step=step) for step in steps]
        told = report(training(50, attempt=attempt, exports=exports))
        return compute_status(make_job(), before, running(report=told), NOW)

    before = seen(SFTJobStatus())
    first, second = seen(before, 10), seen(before, 20, 10)

    assert news(before, first) == [("Normal", "Exported", "the model of step 10 is in s3://b/export/step-00000010")]
    assert [item.note for item in news(first, second)] == ["the model of step 20 is in s3://b/export/step-00000020"]
    # A new attempt has not looked yet, and of many the newest stay
    assert seen(second, attempt=2).exports == second.exports
    many = seen(second, *range(120, 20, -10), attempt=2)
    assert [each.step for each in many.exports] == [*range(120, 20, -10)]


def test_a_warning_of_the_trainer_is_an_event_once() -> None:
    skipped = "checkpoint step-00000060-a00001 is not used: its manifest is gone"
    before = compute_status(make_job(), SFTJobStatus(), running(report=report(training(5))), NOW)
    first = compute_status(make_job(), before, running(report=report(training(6, warnings=[skipped]))), NOW)
    second = compute_status(make_job(), first, running(report=report(training(7, warnings=[skipped]))), NOW)

    assert news(before, first) == [("Warning", "TrainerWarning", skipped)]
    assert news(first, second) == []


def told(
    before: SFTJobStatus, *warnings: str, attempt: int = 1, policy: tuple[str, ...] = ()
) -> tuple[SFTJobStatus, list[str]]:
    """The status after a report with these warnings, and those of which an event tells."""
    said = report(training(7, attempt=attempt, warnings=[*warnings]))
    after = with_warnings(compute_status(make_job(), before, running(report=said), NOW), [*policy])
    return after, [item.note for item in news(before, after) if item.reason == "TrainerWarning"]


WORDS = "abcdefghijklmnopqrstuvwxyz"


def test_the_newest_warnings_stay_and_what_they_displace_is_no_news_in_any_later_look() -> None:
    # Given a run that has told of more than a status holds, each as an event
    status = told(SFTJobStatus())[0]
    for count in range(1, 27):
        status, new = told(status, *WORDS[:count])
        assert new == [WORDS[count - 1]]
    assert status.warnings == [*WORDS[6:]]

    # When the same is told again, by a trainer that begins anew, and with what the policy says beside it
    for attempt in (1, 2):
        for _ in range(2):
            status, new = told(status, *WORDS, attempt=attempt)
            assert (new, status.warnings) == ([], [*WORDS[6:]])
    deletes = f"{DELETES} all"
    for expected in ([deletes], [], []):
        status, new = told(status, *WORDS, policy=(deletes,))
        assert (new, status.warnings) == (expected, [*WORDS[7:], deletes])
    # Then what is new comes last, and what is told no longer stays as long as there is room
    status, new = told(status, "A", "B", attempt=3, policy=(deletes,))
    assert (new, status.warnings) == (["A", "B"], [*WORDS[9:], "A", "B", deletes])


def test_of_what_only_counts_the_last_word_stays_and_each_is_an_event() -> None:
    status = told(SFTJobStatus(), "the data is short")[0]
    for hour in range(10, 40):
        sentence = f"for {hour}m7s, from 2026-01-01T{hour % 24}:00:00Z, nothing could be saved: the store is away"
        status, new = told(status, "the data is short", sentence)
        assert new == [sentence]
        assert status.warnings == ["the data is short", sentence]
    # Several that one report tells all stay
    skipped = [f"checkpoint step-{step:08d}-a00001 is not used: its manifest is gone" for step in (30, 60)]
    assert told(status, *skipped)[0].warnings == ["the data is short", sentence, *skipped]


def test_restarts_and_disruptions_are_news() -> None:
    before = SFTJobStatus(state="Running", restarts=RestartsStatus())
    lost = {"disruptions": 1, "last_reason": "Evicted", "last_message": "a pod that was lost in the same moment"}
    failed = SFTJobStatus(state="Running", restarts=RestartsStatus(failures=1, last_failure="Hang: m", **lost))
    evicted = SFTJobStatus(state="Running", restarts=RestartsStatus(disruptions=1, last_reason="Evicted"))

    assert [(item.type, item.reason, item.note) for item in news(before, failed)] == [
        ("Warning", "Restarting", "Hang: m")
    ]
    assert [(item.type, item.reason) for item in news(before, evicted)] == [("Normal", "Disrupted")]


def test_the_failure_that_ends_a_run_is_no_restart() -> None:
    hang = report(training(5), incident(1, FailureClass.HANG, step=5, seconds=-5))

    def told(most: int) -> list[str]:
        job = make_job(runPolicy={"maxRestarts": most})
        return [item.reason for item in news(TRAINED, compute_status(job, TRAINED, running(report=hang), NOW))]

    assert told(1) == ["Restarting"]
    assert told(0) == ["Failed"]


def test_a_job_that_begins_with_what_an_earlier_start_saved_says_so_once() -> None:
    # Given a job of which nothing is known, and its trainer's first reports
    saved = CheckpointStatus(
        step=20, attempt=3, uri="s3://b/run/checkpoints/x", time=stamp(-900), size_bytes=1, verified=True
    )
    fresh = compute_status(make_job(), SFTJobStatus(), running(report=report(training(0, attempt=4))), NOW)
    kept = checkpoints_status([saved])
    resumed = training(20, attempt=4, resumed_from_step=20, checkpoints=kept)
    begun = compute_status(make_job(), fresh, running(report=report(resumed)), NOW)

    # Then it is told when it is known, and not again, nor of a job that saves for the first time
    assert ("Normal", "Continues", "continues from step 20, which attempt 3 saved in s3://b/run/checkpoints/x") in news(
        fresh, begun
    )
    assert "Continues" not in [item.reason for item in news(begun, begun)]
    own = checkpoints_status([saved.model_copy(update={"attempt": 4})])
    first = compute_status(make_job(), fresh, running(report=report(training(20, attempt=4, checkpoints=own))), NOW)
    assert "Continues" not in [item.reason for item in news(fresh, first)]


def test_an_event_points_at_the_sftjob_and_stays_within_limits() -> None:
    (item,) = news(SFTJobStatus(), SFTJobStatus(state="Recovering", message="x" * 4000))
    event = build_event(job_manifest(), item, instance="pod-1", unique="abc", now=NOW)

    assert event["regarding"]["kind"] == "SFTJob"
    assert event["regarding"]["uid"] == "sft-uid"
    assert event["type"] == "Normal"
    assert len(event["note"]) == 1000
    # Words in other alphabets as well: the API server counts bytes.
    foreign = item._replace(note="x" + "\u00fc" * 4000)
    assert build_event(job_manifest(), foreign, instance="pod-1", unique="abc", now=NOW)["note"] == "x" + "\u00fc" * 499
    assert event["metadata"] == {"name": "tulu.abc", "namespace": "team"}
    assert event["eventTime"] == "2026-01-01T12:00:00.000000Z"


def test_metrics_of_a_job_come_and_go_with_it() -> None:
    manifest = job_manifest()
    manifest["status"] = {
        "state": "Running",
        "progress": {"step": 7, "loss": 1.5},
        "restarts": {"failures": 2},
        "checkpoints": {"latest": {"time": "2026-01-01T00:00:00Z"}},
    }
    jobs = [manifest]
    metrics = OperatorMetrics(lambda: jobs, lambda: 3)
    metrics.answered("patch", "SFTJob", 409)

    text = generate_latest(metrics.registry).decode()

    assert 'sft_job_state{name="tulu",namespace="team",state="Running"} 1.0' in text
    assert 'sft_job_step{name="tulu",namespace="team"} 7.0' in text
    assert 'sft_job_loss{name="tulu",namespace="team"} 1.5' in text
    assert 'sft_job_restarts{kind="failures",name="tulu",namespace="team"} 2.0' in text
    assert 'sft_job_checkpoint_timestamp_seconds{name="tulu",namespace="team"} 1.7672256e+09' in text
    assert 'sft_operator_api_calls_total{code="409",kind="SFTJob",verb="patch"} 1.0' in text
    assert "sft_operator_queue_depth 3.0" in text
    jobs.clear()
    assert "tulu" not in generate_latest(metrics.registry).decode()


def test_what_only_grows_is_told_from_zero_on() -> None:
    """Prometheus's ``increase`` leaves out the first value of a series, and the first report of a job tells of all the
    minutes that it took to start: what a namespace has used would be less by that for each of its jobs."""
    known = {**job_manifest(), "status": {"goodput": {"gpuSeconds": 480.0}}}
    new = job_manifest() | {"metadata": {"namespace": "team", "name": "new"}}
    metrics = OperatorMetrics(lambda: [known, new], lambda: 0)

    text = generate_latest(metrics.registry).decode()

    counters = re.findall(r"^# TYPE (sft_job_\w+) counter$", text, re.MULTILINE)
    assert "sft_job_gpu_seconds_total" in counters
    for counter in counters:
        assert re.search(rf'^{counter}{{.*name="new".*}} 0\.0$', text, re.MULTILINE), counter
    causes = re.findall(r'lost_gpu_seconds_total{cause="(\w+)",name="new"', text)
    assert causes == list(CAUSES)
    assert 'sft_job_gpu_seconds_total{name="tulu",namespace="team"} 480.0' in text


def test_no_series_says_when_another_began() -> None:
    """Of the format in which Prometheus could use it, it is asked for none."""
    metrics = OperatorMetrics(list, lambda: 0)
    metrics.answered("get", "Pod", 200)

    assert "_created" not in generate_latest(metrics.registry).decode()


def test_that_somebody_has_to_act_is_a_metric_while_it_is_so() -> None:
    manifest = job_manifest()
    metrics = OperatorMetrics(lambda: [manifest], lambda: 0)
    pods = (make_pod(0, phase="Pending", waiting=("ErrImagePull", "no such image")), make_pod(1))
    waits = compute_status(make_job(), SFTJobStatus(state="Starting"), running(pods=pods), NOW)

    def told(status: SFTJobStatus) -> list[str]:
        manifest["status"] = write_status(status)
        return re.findall(r"sft_job_stalled\{.*", generate_latest(metrics.registry).decode())

    assert told(waits) == ['sft_job_stalled{name="tulu",namespace="team",reason="ImagePull"} 1.0']
    assert told(compute_status(make_job(), waits, running(report=report(training(5))), NOW)) == []


def test_when_a_job_failed_is_a_metric_until_it_begins_again() -> None:
    manifest = job_manifest()
    metrics = OperatorMetrics(lambda: [manifest], lambda: 0)
    failed = compute_status(make_job(), TRAINED, running(job=make_child(conditions={"Failed": ("x", "")})), NOW)
    refused = refused_status(1, TRAINED, "InvalidSpec", "no such field", NOW)
    again = retried_status(make_terms(), failed, "word", NOW)

    def told(status: SFTJobStatus) -> list[str]:
        manifest["status"] = write_status(status)
        return re.findall(r"sft_job_failed_timestamp_seconds\{.*", generate_latest(metrics.registry).decode())

    for status in (failed, refused):
        (line,) = told(status)
        name, value = line.split()
        assert name == 'sft_job_failed_timestamp_seconds{name="tulu",namespace="team"}'
        assert float(value) == NOW.timestamp()
    assert told(again) == told(TRAINED) == []


def test_what_an_alert_looks_for_is_counted_from_zero_on() -> None:
    """Prometheus's ``increase`` leaves out the first value of a series: an error that brings its own would be none."""
    text = generate_latest(OperatorMetrics(lambda: (), lambda: 0).registry).decode()

    assert re.findall(r'sft_operator_reconciles_total\{result="(\w+)"\} 0.0', text) == ["done", "retry", "error"]
    assert re.findall(r'sft_operator_progress_reads_total\{result="(\w+)"\} 0.0', text) == ["read", "failed"]


def test_errors_of_the_spec_name_the_field() -> None:
    manifest = job_manifest(training={"steps": 0}, invented=1)

    with pytest.raises(InvalidSpec) as caught:
        read_spec(manifest)

    assert "spec.training.steps" in str(caught.value)
    assert "spec.invented" in str(caught.value)


def test_metadata_of_newer_api_servers_and_a_strange_status_do_not_matter() -> None:
    manifest = job_manifest()
    manifest["metadata"]["somethingNew"] = {"a": 1}
    manifest["status"] = {"state": "Invented"}

    assert read_spec(manifest).metadata.name == "tulu"


def test_settings_are_read_and_misspelt_ones_refused(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text("pollSeconds: 3\nstore: {uri: 's3://b/p', s3: {forcePathStyle: true}}\n")
    bad.write_text("pollSecond: 3\n")

    settings = load_settings(good)

    assert settings.poll_seconds == 3
    assert settings.store
    assert settings.store.s3.force_path_style is True
    assert load_settings(None) == Settings()
    longest_poll = 25
    assert longest_poll < Settings().status_seconds <= 32
    assert longest_poll >= 1000 / Settings().polls_per_second, "1,000 jobs can be asked in that time"
    with pytest.raises(ValidationError, match="pollSecond"):
        load_settings(bad)
