"""What a status shows of training: figures, checkpoints, last words; none of them moves backwards."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sft_api.checkpoints import CheckpointId
from sft_api.failures import FailureClass
from sft_api.progress import BEFORE_TRAINING, Phase, TrainingProgress
from sft_api.report import checkpoints_status
from sft_api.times import timestamp
from sft_api.v1alpha1 import CheckpointsStatus, ExportStatus, HubStatus, SFTJobStatus
from sft_operator.decisions.status import retried_status, write_status
from sft_operator.picture.observed import Stored, Unanswered
from tests.unit.operator.make import (
    at,
    committed_at,
    disruption,
    incident,
    make_child,
    make_pod,
    make_terms,
    report,
    running,
    stamp,
    training,
    words,
)
from tests.unit.operator.statuses import TRAINED, checkpoint, checkpoints, held, status_of


def test_figures_never_move_backwards() -> None:
    first = status_of(running(report=report(training(50, loss=1.0))))
    late = status_of(running(report=report(training(49, loss=9.0))), first)
    older_attempt = status_of(
        running(report=report(training(70, attempt=1, resumed_from_step=60))),
        status_of(running(report=report(training(60, attempt=2))), first),
    )

    assert late.progress
    assert (late.progress.step, late.progress.loss) == (50, 1.0)
    assert older_attempt.progress
    assert (older_attempt.attempt, older_attempt.progress.step) == (2, 60)


@pytest.mark.parametrize("phase", sorted(BEFORE_TRAINING))
def test_figures_of_an_attempt_show_once_it_trains(phase: Phase) -> None:
    first = status_of(running(report=report(training(50))))
    loading = status_of(running(report=report(training(0, attempt=2, phase=phase))), first)
    going_on = status_of(running(report=report(training(41, attempt=2, resumed_from_step=40))), loading)

    assert loading.progress
    assert (loading.attempt, loading.progress.step, loading.progress.phase) == (1, 50, phase)
    assert going_on.progress
    assert (going_on.attempt, going_on.progress.step) == (2, 41)


EARLY = "after step 60: it got no better"


@pytest.mark.parametrize("told", ["report", "last words", "both"])
def test_a_run_that_was_stopped_early_is_complete_and_says_why(told: str) -> None:
    figures = {"stopped_early": EARLY, "eval_loss": 1.5, "eval_accuracy": 0.4}
    copy = HubStatus(url="https://hub/org/mine", revision="main", commit="abc")
    export = ExportStatus(uri="s3://b/model", step=40, hub=copy)
    complete = training(60, phase=Phase.COMPLETE, export=export, **figures)
    last = words(None, 60, total_steps=100, export_uri=export.uri, export_step=40, export_hub=copy, **figures)
    pod = make_pod(0, phase="Succeeded", exit_code=0, words=last)
    before = status_of(running(report=report(training(59) if told == "last words" else complete)))

    pods = (make_pod(0),) if told == "report" else (pod,)
    status = status_of(running(job=make_child(conditions={"Complete": ("", "")}), pods=pods), before)

    assert status.state == "Complete"
    assert status.progress
    assert (status.progress.summary, status.progress.percent) == ("60/100", 60)
    assert (status.progress.stopped_early, status.progress.eval_accuracy, status.export) == (EARLY, 0.4, export)
    assert status.message == f"the run was stopped early, {EARLY}"
    assert {item.reason for item in status.conditions if item.type == "Complete"} == {"StoppedEarly"}


@pytest.mark.parametrize("step", [40, 60])
def test_last_words_without_room_for_the_copy_on_the_hub_take_nothing_back_of_that_export(step: int) -> None:
    copy = HubStatus(url=f"https://{'hub.' * 60}/org/mine", revision="main", commit="abc")
    export = ExportStatus(uri="s3://b/model", step=40, hub=copy)
    before = status_of(running(report=report(training(60, phase=Phase.COMPLETE, export=export))))
    last = words(None, 60, total_steps=100, export_uri=export.uri, export_step=step)
    pod = make_pod(0, phase="Succeeded", exit_code=0, words=last)

    status = status_of(running(job=make_child(conditions={"Complete": ("", "")}), pods=(pod,)), before)

    assert status.export == ExportStatus(uri=export.uri, step=step, hub=copy if step == 40 else None)


NOT_YET = "not uploaded to org/mine yet, it is tried again: it is away"


@pytest.mark.parametrize("end", ["not uploaded to org/mine: tried for 1h", "uploaded to org/mine only after 5s: away"])
@pytest.mark.parametrize("told", ["report", "last words", "both"])
def test_what_became_of_an_upload_is_told_once_however_late(told: str, end: str) -> None:
    cut = end[:30]
    reported = [NOT_YET] if told == "last words" else [end]
    before = status_of(running(report=report(training(60, warnings=[NOT_YET]))))
    before = status_of(running(report=report(training(60, phase=Phase.COMPLETE, warnings=reported))), before)
    last = words(None, 60, warning=end if told == "last words" else cut if told == "both" else "")
    pod = make_pod(0, phase="Succeeded", exit_code=0, words=last)

    status = status_of(running(job=make_child(conditions={"Complete": ("", "")}), pods=(pod,)), before)

    assert (status.state, status.warnings) == ("Complete", [end])


@pytest.mark.parametrize("told", ["report", "last words"])
def test_a_dummy_run_is_complete_with_what_it_measured(told: str) -> None:
    complete = training(5, phase=Phase.COMPLETE, total_steps=5, dummy_run="0.5 s a step")
    pod = make_pod(0, phase="Succeeded", exit_code=0, words=words(None, 5, total_steps=5, dummy_run="0.5 s a step"))
    before = status_of(running(report=report(complete))) if told == "report" else None
    ended = {"job": make_child(conditions={"Complete": ("", "")}), "pods": (make_pod(0) if before else pod,)}

    status = status_of(running(**ended), before, training={"dummyRun": {}})

    assert (status.state, status.message) == ("Complete", "training.dummyRun: 0.5 s a step")
    assert {item.reason for item in status.conditions if item.type == "Complete"} == {"DummyRunComplete"}


def test_steps_lost_with_index_0_are_counted_by_the_operator() -> None:
    """Its new supervisor knows of no incident: the old one could not tell any more."""
    first = status_of(running(report=report(training(50, update_time=at(-60)))))
    lost = status_of(
        running(pods=(make_pod(1), make_pod(0, phase="Failed", exit_code=137, conditions=disruption()))), first
    )
    told = training(43, attempt=2, resumed_from_step=40, update_time=at(34), median_step_seconds=2.0)
    recovered = status_of(running(report=report(told, received=35)), lost, seconds=35)
    later = status_of(running(report=report(told.model_copy(update={"step": 45}), received=40)), recovered, seconds=40)

    assert recovered.restarts
    assert recovered.restarts.lost_steps == 10
    assert recovered.restarts.recovery_seconds == 31
    assert later.restarts
    assert later.restarts.lost_steps == 10


@pytest.mark.parametrize("ahead", [-3600, 3600])
def test_what_the_loss_of_index_0_cost_is_counted_also_by_a_node_whose_clock_differs(ahead: float) -> None:
    first = status_of(running(report=report(training(50, update_time=at(-60)))))
    lost = status_of(running(pods=(make_pod(0, phase="Failed", exit_code=137, conditions=disruption()),)), first)

    told = training(41, attempt=2, resumed_from_step=40, update_time=at(30 + ahead))
    recovered = status_of(running(report=report(told, received=32)), lost, seconds=32)

    assert recovered.restarts
    assert (recovered.restarts.recovery_seconds, recovered.restarts.total_recovery_seconds) == (33, 33)


DAY = 86_400.0


@pytest.mark.parametrize("between", ["suspended", "retried", "unseen"])
def test_a_loss_that_was_recovered_long_ago_counts_no_more(between: str) -> None:
    # Given an index 0 that was evicted, from which the run recovered
    first = status_of(running(report=report(training(50, update_time=at(-60)))))
    gone = make_pod(0, phase="Failed", exit_code=137, conditions=disruption())
    lost = status_of(running(pods=(make_pod(1), gone)), first)
    told = training(41, attempt=2, resumed_from_step=40, update_time=at(30))
    before = status_of(running(report=report(told, received=31)), lost, seconds=31)
    assert before.restarts
    assert (lost.restarts and lost.restarts.recovery_seconds, before.restarts.recovery_seconds) == (None, 31)

    # When another attempt begins two days later: after a pause, a retry, or what happened while no operator lived
    job = make_child(started=-600 if between == "unseen" else 2 * DAY - 10)
    if between == "retried":
        before = retried_status(make_terms(), before, "again", at(2 * DAY - 20))
    late = training(61, attempt=3, resumed_from_step=60, update_time=at(2 * DAY))
    after = status_of(running(job=job, report=report(late, received=2 * DAY)), before, seconds=2 * DAY)

    assert after.restarts
    assert after.restarts.total_recovery_seconds == 31


def test_a_run_that_rested_while_somebody_emptied_its_place_shows_its_own_figures_to_its_end() -> None:
    # Given a run that was suspended in its third attempt, whose pods are known with their last words
    known = training(50, attempt=3, loss=2.0, checkpoints=checkpoints(40, 3))
    before = status_of(running(job=make_child(started=-60), report=report(known)))
    gone = [
        make_pod(index, uid=f"gone-{index}", created=-50, deletion=10, phase="Failed", exit_code=10, words=rested)
        for index, rested in enumerate([words(FailureClass.INTERRUPTED, 50, attempt=3)] * 2)
    ]
    job = make_child(started=90)

    # When it goes on, finds nothing, trains from the model, and ends
    def seen(seconds: float, told: TrainingProgress, before: SFTJobStatus) -> SFTJobStatus:
        pods = (make_pod(0, created=90), make_pod(1, created=90))
        here = running(job=job, pods=pods, gone_pods=tuple(gone), report=report(told, received=seconds))
        return status_of(here, before, seconds=seconds)

    loads = seen(100, training(0, phase=Phase.LOADING, update_time=at(100)), before)
    trains = seen(110, training(7, loss=5.0, update_time=at(110)), loads)
    again = seen(120, training(8, loss=4.0, update_time=at(120)), trains)
    last = words(None, 100, total_steps=100, export_uri="s3://b/model", export_step=100)
    ended = make_pod(0, created=90, phase="Succeeded", exit_code=0, words=last, finished=200)
    done = make_child(started=90, conditions={"Complete": ("", "")})
    complete = status_of(running(job=done, pods=(ended,), gone_pods=tuple(gone)), again, seconds=200)

    # Then its own figures are told, and nothing of what was removed
    assert loads.progress
    assert (loads.attempt, loads.progress.step) == (3, 50)
    assert [(each.attempt, each.progress and each.progress.step) for each in (trains, again)] == [(1, 7), (1, 8)]
    assert trains.checkpoints
    assert trains.checkpoints.latest is None
    assert complete.progress
    assert (complete.state, complete.attempt, complete.progress.summary) == ("Complete", 1, "100/100")
    assert complete.export == ExportStatus(uri="s3://b/model", step=100)


def test_checkpoints_that_somebody_removed_are_not_taken_for_those_of_a_new_attempt_of_that_number() -> None:
    # Given a run whose third attempt had saved nothing yet: its newest checkpoint is one of the first
    known = training(50, attempt=3, resumed_from_step=40, checkpoints=checkpoints(40, 1))
    before = status_of(running(job=make_child(started=-60), report=report(known)))

    # When it begins from the model in an emptied place, as its first attempt
    new = running(job=make_child(started=90), pods=(make_pod(0, created=90), make_pod(1, created=90)))
    trains = status_of(replace(new, report=report(training(7), received=100)), before, seconds=100)
    saved = replace(new, report=report(training(12, checkpoints=checkpoints(10, 1)), received=110))

    # Then what it saves is shown
    assert trains.checkpoints is None or trains.checkpoints.latest is None
    again = status_of(saved, trains, seconds=110).checkpoints
    assert again
    assert again.latest
    assert again.latest.step == 10


def test_a_run_that_is_retried_in_a_place_that_somebody_has_emptied_shows_its_own_figures() -> None:
    # Given a run that has failed in its third attempt, was retried, and finds nothing: attempts are counted anew
    known = training(50, attempt=3, loss=2.0, checkpoints=checkpoints(40, 3))
    failed = status_of(running(report=report(known)))
    again = retried_status(make_terms(), failed, "again", at(60))
    loading = report(training(0, phase=Phase.LOADING, update_time=at(90)), received=90)

    # When its first attempt loads, and trains
    starts = status_of(running(report=loading), again, seconds=90)
    told = training(7, loss=5.0, update_time=at(100))
    trains = status_of(running(report=report(told, received=100)), starts, seconds=100)
    told = training(9, checkpoints=checkpoints(8), update_time=at(110))
    saved = status_of(running(report=report(told, received=110)), trains, seconds=110)

    # Then what was known stands there until it trains, and no longer
    assert starts.progress
    assert trains.progress
    assert (starts.progress.step, starts.progress.phase, starts.checkpoints) == (50, "Loading", checkpoints(40, 3))
    assert (trains.attempt, trains.progress.step, trains.progress.loss) == (1, 7, 5.0)
    assert (trains.checkpoints and trains.checkpoints.latest, trains.steps_at_risk) == (None, 7)
    assert (saved.checkpoints, saved.steps_at_risk) == (checkpoints(8), 1)


def test_so_does_one_of_which_only_the_last_words_are_heard() -> None:
    failed = status_of(running(report=report(training(50, attempt=3, checkpoints=checkpoints(40, 3)))))
    again = retried_status(make_terms(), failed, "again", at(60))

    end = words(None, 30, checkpoints_uri="s3://b/checkpoints", checkpoints=committed_at(30))
    done = tuple(make_pod(index, phase="Succeeded", exit_code=0, words=end, finished=90) for index in (0, 1))
    complete = status_of(running(job=make_child(conditions={"Complete": ("", "")}), pods=done), again, seconds=92)

    assert complete.progress
    assert (complete.attempt, complete.progress.step) == (1, 30)
    assert complete.checkpoints
    assert [(item.attempt, item.step) for item in complete.checkpoints.kept] == [(1, 30)]


@pytest.mark.parametrize("polled", [True, False])
def test_a_wait_of_which_the_new_index_0_tells_a_part_is_counted_once(polled: bool) -> None:
    # Given an index 0 that is lost a minute ago, and a start that fails after it
    first = status_of(running(report=report(training(50, update_time=at(-70)))))
    gone = make_pod(0, phase="Failed", exit_code=137, conditions=disruption(), finished=-60)
    lost = status_of(running(pods=(make_pod(1), gone)), first)
    failed = incident(7, FailureClass.DEVICE_UNAVAILABLE, attempt=0, seconds=-40)
    new = {"pods": (gone, make_pod(0, uid="new"), make_pod(1))}
    waiting = training(0, attempt=0, phase=Phase.STARTING)
    if polled:
        lost = status_of(running(report=report(waiting, failed, pod_uid="new"), **new), lost)

    # When the next one makes a step
    told = training(41, attempt=2, resumed_from_step=40, update_time=at(0))
    mended = failed.model_copy(update={"recovered_time": at(0)})
    recovered = status_of(running(report=report(told, mended, pod_uid="new"), **new), lost)

    # Then no second of that minute counts twice
    assert recovered.restarts
    assert recovered.restarts.lost_steps == 10
    assert recovered.restarts.total_recovery_seconds == (40 if polled else 60)


def test_a_wait_that_began_with_what_a_lost_index_0_had_told_is_counted_once() -> None:
    # Given a crash, after which index 0 is lost before the run has recovered
    crash = incident(1, FailureClass.WORKER_CRASHED, attempt=1, step=50, seconds=-60)
    first = status_of(running(report=report(training(50, attempt=1, update_time=at(-61)), crash)))
    second = status_of(running(report=report(training(40, attempt=2, update_time=at(-50)), crash)), first)
    gone = make_pod(0, phase="Failed", exit_code=137, conditions=disruption(), finished=-40)
    lost = status_of(running(pods=(make_pod(1), gone)), second)

    # When the next one, which knows of it by the claim, makes a step
    told = training(41, attempt=3, resumed_from_step=40, update_time=at(0))
    mended = crash.model_copy(update={"recovered_time": at(0), "lost_steps": 10})
    pods = (gone, make_pod(0, uid="new"), make_pod(1))
    recovered = status_of(running(report=report(told, mended, pod_uid="new"), pods=pods), lost)

    assert recovered.restarts
    assert (recovered.restarts.lost_steps, recovered.restarts.total_recovery_seconds) == (10, 60)


def test_steps_at_risk_are_those_since_the_last_checkpoint() -> None:
    status = status_of(running(report=report(training(57, checkpoints=checkpoints(40)))))

    assert status.steps_at_risk == 17
    assert status.checkpoints
    assert status.checkpoints.latest == checkpoint(40)


def test_what_another_run_has_saved_is_not_at_risk_before_the_first_own_checkpoint() -> None:
    begins = status_of(running(report=report(training(40, resumed_from_step=40))))
    trains = status_of(running(report=report(training(47, resumed_from_step=40))), begins)
    lost = status_of(running(), trains, seconds=30)
    again = report(training(0, attempt=2, phase=Phase.LOADING, update_time=at(60)), received=60)
    loads = status_of(running(report=again), lost, seconds=60)
    told = training(42, attempt=2, resumed_from_step=40, update_time=at(90))
    goes_on = status_of(running(report=report(told, received=90)), loads, seconds=90)

    assert [each.steps_at_risk for each in (begins, trains, lost, loads, goes_on)] == [0, 7, 7, 7, 2]


def test_checkpoints_stay_known_while_a_new_attempt_has_none_to_tell() -> None:
    first = status_of(running(report=report(training(57, checkpoints=checkpoints(40)))))
    second = status_of(running(report=report(training(41, attempt=2, resumed_from_step=40))), first)

    assert second.checkpoints
    assert second.checkpoints.latest == checkpoint(40)
    assert second.steps_at_risk == 1


@pytest.mark.parametrize(("unread", "best"), [(CheckpointId(1, 140), 100), (CheckpointId(1, 90), 250), (None, 250)])
def test_the_best_may_be_older_than_what_the_operator_reads_itself(unread: CheckpointId | None, best: int) -> None:
    # Given a trainer that told of its best, and a store of which the newest ten were read when it had ended
    found = [checkpoint(step).model_copy(update={"eval_loss": 2.0}) for step in range(250, 150, -10)]
    first = checkpoint(100).model_copy(update={"eval_loss": 1.0})
    told = CheckpointsStatus(latest=found[0], best=first, kept=[*found[:9], first])
    trains = status_of(running(report=report(training(250, checkpoints=told))))

    # When the status is that of its end
    stored = Stored(checkpoints_status(found), unread=unread)
    ended = status_of(replace(running(pods=()), stored=stored), trains)

    # Then that one is the best still, unless the store says that it is gone
    assert ended.checkpoints
    assert ended.checkpoints.best
    assert ended.checkpoints.best.step == best
    assert ended.checkpoints.kept == found


def test_the_picture_of_the_losses_stays_known_and_last_words_may_be_the_first_to_name_it() -> None:
    drawn = status_of(running(report=report(training(57, curve_uri="s3://b/curve.svg"))))
    again = status_of(running(report=report(training(58, attempt=2, resumed_from_step=57))), drawn)
    assert again.progress
    assert again.progress.curve == "s3://b/curve.svg"

    end = words(None, 100, curve_uri="s3://b/curve.svg")
    pods = tuple(make_pod(index, phase="Succeeded", exit_code=0, words=end, finished=10) for index in (0, 1))
    done = running(job=make_child(conditions={"Complete": ("", "")}), pods=pods)
    short = status_of(done, status_of(running(report=report(training(80)))), seconds=12)
    assert short.progress
    assert short.progress.curve == "s3://b/curve.svg"


def test_how_fast_a_run_is_of_which_nothing_is_heard_is_not_shown() -> None:
    """A policy keeps the operator off its pods, say: the last report stays, and may be hours old."""
    told = report(training(5, tokens_per_second=400.0, tokens_per_second_per_gpu=200.0, model_flops_utilization=0.4))
    trains = status_of(running(report=told))
    unheard = running(report=told, unanswered=Unanswered("pod-0", at(10)))
    status = status_of(unheard, trains, seconds=7200)

    assert trains.progress is not None
    assert trains.progress.tokens_per_second == 400.0
    assert (status.state, held(status)["Running"]) == ("Running", "NoProgressReport")
    assert status.progress is not None
    assert status.progress.tokens_per_second is status.progress.tokens_per_second_per_gpu is None
    assert status.progress.model_flops_utilization is None
    assert (status.progress.step, status.progress.phase) == (5, "Training")
    # Heard of again, it is told again
    again = status_of(running(report=report(training(9, tokens_per_second=300.0), received=7201)), status, seconds=7202)
    assert again.progress is not None
    assert again.progress.tokens_per_second == 300.0


def test_a_finished_run_is_told_by_its_last_words() -> None:
    end = words(None, 100, checkpoints_uri="s3://b/checkpoints", checkpoints=committed_at(100, 60), loss=0.5)
    pods = tuple(make_pod(index, phase="Succeeded", exit_code=0, words=end, finished=10) for index in (0, 1))
    before = status_of(running(report=report(training(80, loss=0.9, checkpoints=checkpoints(80)))))

    done = running(job=make_child(conditions={"Complete": ("", "")}), pods=pods)
    status = status_of(done, before, seconds=12)

    assert status.progress
    assert (status.progress.summary, status.progress.percent, status.progress.loss) == ("100/100", 100, 0.5)
    assert status.progress.phase == "Complete"
    assert status.checkpoints
    assert status.checkpoints.latest
    assert status.checkpoints.latest.step == 100
    assert status.checkpoints.latest.uri == "s3://b/checkpoints/step-00000100-a00001"
    assert [item.step for item in status.checkpoints.kept] == [100, 60], "80 was pruned since it was reported"
    assert status.steps_at_risk == 0
    assert status.export == ExportStatus(uri="s3://bucket/runs/export", step=100)


def test_last_words_about_older_checkpoints_change_nothing() -> None:
    end = words(None, 100, checkpoints_uri="s3://b/checkpoints", checkpoints=committed_at(60))
    pods = tuple(make_pod(index, phase="Succeeded", exit_code=0, words=end, finished=10) for index in (0, 1))
    before = status_of(running(report=report(training(80, checkpoints=checkpoints(80)))))

    status = status_of(running(job=make_child(conditions={"Complete": ("", "")}), pods=pods), before, seconds=12)

    assert status.checkpoints == checkpoints(80)


@pytest.mark.parametrize(
    ("attempt", "finished"),
    [(1, -30), (1, 30), (2, -30)],
    ids=["that was heard", "on a node whose clock is ahead", "that was never heard"],
)
def test_last_words_of_a_pod_do_not_hide_what_its_replacement_reports(attempt: int, finished: float) -> None:
    end = words(FailureClass.INTERRUPTED, 50, attempt=attempt)
    old = make_pod(0, phase="Failed", exit_code=30, words=end, finished=finished)
    new = make_pod(0, uid="new")
    told = report(training(0, attempt=0, phase=Phase.LOADING), pod_uid="new")
    before = status_of(running(report=report(training(50, update_time=at(-40)))))

    status = status_of(running(pods=(old, new, make_pod(1)), report=told), before)

    assert status.progress
    assert (status.attempt, status.progress.step) == (attempt, 50)
    assert (status.progress.phase, status.progress.update_time) == ("Loading", stamp(0))


@pytest.mark.parametrize("step", [50, 100], ids=["no step later", "complete"])
def test_last_words_of_a_newer_attempt_are_news_whatever_the_clock_of_its_node_says(step: int) -> None:
    # Given a run that trained on a node whose clock is half a minute ahead of the one on which it went on
    before = status_of(running(report=report(training(50, loss=2.0, update_time=at(25)))))

    # When the next attempt ends before anybody has asked it, with the same step or a later one
    failure = None if step == 100 else FailureClass.INTERRUPTED
    end = words(failure, step, attempt=2, loss=1.0)
    pod = make_pod(0, uid="next", phase="Failed" if failure else "Succeeded", exit_code=30 if failure else 0, words=end)
    status = status_of(running(pods=(pod, make_pod(1))), before, seconds=2)

    assert status.progress
    assert (status.attempt, status.progress.step, status.progress.loss) == (2, step, 1.0)


def test_the_first_step_is_timed_once() -> None:
    none_yet = status_of(running(report=report(training(0))))
    first = status_of(running(report=report(training(1, update_time=at(5)))), none_yet)
    second = status_of(running(report=report(training(2, update_time=at(9)))), first)

    assert none_yet.first_step_time is None
    assert first.first_step_time == second.first_step_time == timestamp(at(5))


FAST = training(50, tokens_per_second=900.0, remaining_seconds=60.0)


def test_an_old_report_is_not_taken_in_again_once_its_pod_has_ended() -> None:
    # Given a run that reported, was suspended, and left its last words
    told = report(FAST)
    trains = status_of(running(report=told), TRAINED)
    end = words(FailureClass.INTERRUPTED, 50)
    pods = tuple(make_pod(index, phase="Failed", exit_code=30, words=end, deletion=-5) for index in (0, 1))
    stopped = running(job=make_child(suspend=True), pods=pods, report=told)

    # When it is looked at again and again, with its pods and without them
    suspended = status_of(stopped, trains, suspend=True)
    later = status_of(running(job=make_child(suspend=True), pods=(), report=told), suspended, suspend=True, seconds=300)

    # Then it stays at rest
    for status in (suspended, later):
        assert status.state == "Suspended"
        assert status.progress
        assert (status.progress.step, status.progress.phase, status.progress.remaining) == (50, "Waiting", "")
        assert status.progress.tokens_per_second is None


def test_without_index_0_nothing_is_told_of_training() -> None:
    trains = status_of(running(report=report(FAST)), TRAINED)
    lost = status_of(running(report=report(FAST), pods=(make_pod(1),)), trains, seconds=9)

    assert trains.progress
    assert (trains.progress.tokens_per_second, trains.progress.remaining) == (900.0, "1m0s")
    assert lost.state == "Recovering"
    assert lost.progress
    assert (lost.progress.step, lost.progress.phase, lost.progress.remaining) == (50, "Waiting", "")
    assert lost.progress.tokens_per_second is None
    assert "tokensPerSecond" not in write_status(lost)["progress"]


def test_the_last_report_of_a_pod_that_saves_and_ends_still_counts() -> None:
    saving = report(training(52, phase=Phase.SAVING))
    status = status_of(running(pods=(make_pod(0, deletion=-5), make_pod(1)), report=saving), TRAINED, suspend=True)

    assert status.state == "Suspending"
    assert status.progress
    assert (status.progress.step, status.progress.phase) == (52, "Saving")
