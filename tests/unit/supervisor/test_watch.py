"""When a group hangs, and when it is only slow."""

from datetime import UTC, datetime, timedelta

from sft_api.progress import Phase, TrainingProgress
from sft_trainer.supervisor.watch import ProgressWatch

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def report(
    phase: Phase, step: int = 5, *, detail: str = "", seconds: float = 0, median: float | None = 1.0
) -> TrainingProgress:
    return TrainingProgress(
        phase=phase,
        step=step,
        phase_detail=detail,
        update_time=NOW + timedelta(seconds=seconds),
        median_step_seconds=median,
    )


def test_no_new_step_for_longer_than_the_deadline() -> None:
    watch = ProgressWatch(60)
    assert watch.observe(report(Phase.TRAINING), 0) is None
    assert watch.observe(report(Phase.TRAINING), 60) is None
    hang = watch.observe(report(Phase.TRAINING), 61)

    assert hang == "no new step for 61 s after step 5 (the deadline is 60 s)"


def test_a_new_step_starts_the_time_again() -> None:
    watch = ProgressWatch(60)
    watch.observe(report(Phase.TRAINING, 5), 0)
    watch.observe(report(Phase.TRAINING, 6), 50)

    assert watch.observe(report(Phase.TRAINING, 6), 100) is None
    assert watch.observe(report(Phase.TRAINING, 6), 111) is not None


def test_while_training_reports_without_a_step_do_not_count() -> None:
    watch = ProgressWatch(60)
    for second in range(61):
        assert watch.observe(report(Phase.TRAINING, detail=str(second), seconds=second), second) is None

    assert watch.observe(report(Phase.TRAINING, seconds=61), 61) is not None


def test_the_deadline_by_itself_is_twenty_median_steps_and_at_least_three_minutes() -> None:
    for median, deadline in ((1.0, 180), (60.0, 1200), (None, 1800)):
        watch = ProgressWatch(None)
        watch.observe(report(Phase.TRAINING, median=median), 0)
        assert watch.observe(report(Phase.TRAINING, median=median), deadline) is None
        assert watch.observe(report(Phase.TRAINING, median=median), deadline + 1) is not None


def test_other_phases_have_longer_and_any_report_counts() -> None:
    watch = ProgressWatch(60)
    watch.observe(report(Phase.SAVING), 0)
    assert watch.observe(report(Phase.SAVING, seconds=1), 1700) is None
    assert watch.observe(report(Phase.SAVING, seconds=1), 1700 + 1800) is None

    assert watch.observe(report(Phase.SAVING, seconds=1), 1700 + 1801) == (
        "nothing new for 1801 s in phase Saving (the limit is 1800 s)"
    )


def test_a_deadline_that_is_longer_holds_in_a_slow_phase_too() -> None:
    watch = ProgressWatch(4000)
    watch.observe(report(Phase.TOKENIZING), 0)
    assert watch.observe(report(Phase.TOKENIZING), 4000) is None
    assert watch.observe(report(Phase.TOKENIZING), 4001) is not None


def test_a_start_that_hangs_ends_when_the_api_says() -> None:
    # 1,800 s to the first step, whatever phase it hangs in.
    for first in (None, report(Phase.LOADING, 0, median=None), report(Phase.WAITING, 0, median=None)):
        watch = ProgressWatch(None)
        watch.observe(first, 0)
        assert watch.observe(first, 1800) is None
        assert watch.observe(first, 1801) is not None


def test_what_any_worker_says_is_a_sign_of_life_while_rank_0_waits_for_it() -> None:
    watch, waiting = ProgressWatch(None), report(Phase.WAITING, 0, median=None)
    for now in range(0, 20_000, 1000):
        assert watch.observe(waiting, now, sign_of_life=now - 10) is None
    # Then it falls silent as well.
    assert watch.observe(waiting, 20_700, sign_of_life=18_990) is None
    assert watch.observe(waiting, 20_800, sign_of_life=18_990) == (
        "nothing new for 1810 s in phase Waiting (the limit is 1800 s)"
    )


def test_while_training_only_a_step_is_a_sign_of_life() -> None:
    watch = ProgressWatch(60)
    watch.observe(report(Phase.TRAINING), 0)
    assert watch.observe(report(Phase.TRAINING), 61, sign_of_life=61) is not None


def test_back_in_training_the_time_starts_again() -> None:
    watch = ProgressWatch(60)
    watch.observe(report(Phase.TRAINING), 0)
    watch.observe(report(Phase.SAVING), 55)
    watch.observe(report(Phase.TRAINING), 500)

    assert watch.observe(report(Phase.TRAINING), 559) is None


def test_workers_that_never_report() -> None:
    watch = ProgressWatch(60)
    watch.observe(None, 0)
    assert watch.observe(None, 1800) is None
    assert watch.observe(None, 1801) == "the workers reported nothing for 1801 s after their start"


def test_a_reset_forgets() -> None:
    watch = ProgressWatch(60)
    watch.observe(report(Phase.TRAINING), 0)
    watch.reset()
    assert watch.observe(report(Phase.TRAINING), 1000) is None
