"""From the trainer's report to the status that people read."""

import json
import math
from datetime import UTC, datetime, timedelta, timezone

import pytest

from sft_api.progress import MOST_WARNINGS, Phase, TrainingProgress
from sft_api.report import duration, progress_status, with_told
from sft_api.times import timestamp


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, ""),
        (0, "0s"),
        (59.4, "59s"),
        (59.6, "1m0s"),
        (430, "7m10s"),
        (3600, "1h0m"),
        (11520, "3h12m"),
        (86399.7, "1d0h"),
        (187200, "2d4h"),
    ],
)
def test_durations_have_two_units(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


def test_times_are_in_utc_and_whole_seconds() -> None:
    berlin = timezone(timedelta(hours=2))

    assert timestamp(datetime(2026, 6, 1, 14, 30, 5, 900_000, berlin)) == "2026-06-01T12:30:05Z"


def test_a_report_becomes_the_columns_of_kubectl_get() -> None:
    status = progress_status(
        TrainingProgress(
            phase=Phase.TRAINING,
            step=1200,
            total_steps=3125,
            loss=1.20399999618,
            tokens_per_second=81234.4567,
            learning_rate=9.8e-06,
            remaining_seconds=11520,
            update_time=datetime(2026, 1, 1, tzinfo=UTC),
        )
    )

    assert (status.summary, status.percent, status.phase) == ("1200/3125", 38, "Training")
    assert (status.loss, status.tokens_per_second, status.learning_rate) == (1.204, 81234, 9.8e-06)
    assert (status.remaining, status.update_time) == ("3h12m", "2026-01-01T00:00:00Z")


@pytest.mark.parametrize(("step", "total", "summary"), [(0, None, ""), (5, None, "5"), (0, 10, "0/10")])
def test_the_summary_says_what_is_known(step: int, total: int | None, summary: str) -> None:
    status = progress_status(TrainingProgress(step=step, total_steps=total))

    assert status.summary == summary


def test_the_last_step_is_a_hundred_percent_and_none_before() -> None:
    percents = [progress_status(TrainingProgress(step=step, total_steps=3)).percent for step in range(4)]

    assert percents == [0, 33, 66, 100]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_json_cannot_say_is_absent(value: float) -> None:
    status = progress_status(TrainingProgress(loss=value, grad_norm=value))

    assert (status.loss, status.grad_norm) == (None, None)
    json.dumps(status.model_dump(), allow_nan=False)


def test_the_newest_warnings_stay_and_of_what_is_counted_the_newest_count() -> None:
    skipped = ["checkpoint a2-s40 is not used: damaged", "checkpoint a4-s90 is not used: damaged"]
    machines = ["pod 0: Xid 79 of GPU 3", "pod 4: Xid 13 of GPU 1"]
    outages = [f"for {seconds}s, from 2026-01-01T00:00:{seconds:02}Z, nothing could be saved: no" for seconds in (1, 2)]

    known = with_told(with_told([], [skipped[0], machines[0], outages[0]]), [skipped[1], outages[1], machines[1]])
    assert known == [skipped[0], machines[0], skipped[1], outages[1], machines[1]]
    assert with_told(known, [skipped[1], outages[1], machines[1]]) == known

    failed = [f"a checkpoint was not saved, the next one will be tried as planned: step {step}" for step in (10, 20)]
    assert with_told(failed[:1], failed[1:]) == failed[1:]

    lasts = [f"nothing can be exported since {when}, training goes on: no" for when in ("12:00", "14:00")]
    over = [f"for 5m0s, from {when}, nothing could be exported: no" for when in ("12:00", "14:00")]
    assert with_told(lasts[:1], over[:1]) == over[:1]
    assert with_told(over[:1], lasts[1:]) == lasts[1:]

    full = [f"warning {number}" for number in range(MOST_WARNINGS)]
    assert with_told(full, ["one more"]) == [*full[1:], "one more"]
