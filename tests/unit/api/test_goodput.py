"""Where the time went: a table of what is reported, and what the account says of it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from sft_api.goodput import Devices, account, followed_by
from sft_api.v1alpha1 import GoodputStatus, SpentSeconds

START = datetime(2026, 1, 1, tzinfo=UTC)
FOUR = Devices("GPUs", 2, 2)


class Run:
    """A run on four GPUs, looked at now and then."""

    def __init__(self) -> None:
        self.goodput: GoodputStatus | None = None

    def look(
        self, seconds: float, pod: str = "a", *, curve: tuple[float, float, float] | None = None, **spent: float
    ) -> GoodputStatus:
        """After so many ``seconds``; ``curve`` are those of the curve at the begin, up to the last save, and now."""
        before = self.goodput
        if curve is not None:
            spent |= dict(zip(("curve_began", "curve_saved", "curve_now"), curve, strict=True))
        now = account(
            before,
            FOUR,
            gpu_seconds=FOUR.all * seconds,
            until=START + timedelta(seconds=seconds),
            spent=SpentSeconds(**spent) if spent else None,
            reporter=pod,
        )
        self.goodput = GoodputStatus.model_validate(now.model_dump(by_alias=True))
        check(before, now)
        return now


def check(before: GoodputStatus | None, now: GoodputStatus) -> None:
    """All parts add up, and none but what is unsaved has shrunk."""
    lost = now.lost_gpu_seconds.model_dump()
    parts = [now.productive_gpu_seconds, now.unsaved_gpu_seconds, *lost.values()]
    assert sum(parts) == pytest.approx(now.gpu_seconds, abs=0.05)
    if before is not None:
        assert now.gpu_seconds >= before.gpu_seconds
        assert now.productive_gpu_seconds >= before.productive_gpu_seconds
        for cause, seconds in before.lost_gpu_seconds.model_dump().items():
            assert lost[cause] >= seconds - 0.01, cause


def shown(goodput: GoodputStatus) -> dict[str, float]:
    """What is not nothing."""
    lost = goodput.lost_gpu_seconds.model_dump()
    parts: dict[str, Any] = {
        "productive": goodput.productive_gpu_seconds,
        "unsaved": goodput.unsaved_gpu_seconds,
        **lost,
    }
    return {name: round(seconds, 2) for name, seconds in parts.items() if seconds > 0.005}


def test_pods_that_say_nothing_wait() -> None:
    assert shown(Run().look(10)) == {"waiting": 40}


def test_a_run_without_disturbances() -> None:
    run = Run()
    run.look(10)
    assert shown(run.look(30, starting=15)) == {"starting": 60, "waiting": 60}
    during = run.look(50, starting=20, steps=15, curve=(0, 0, 15))
    assert shown(during) == {"starting": 80, "unsaved": 60, "waiting": 60}
    saved = run.look(60, starting=20, steps=20, saving=3, evaluating=1, curve=(0, 20, 20))
    assert shown(saved) == {"productive": 80, "starting": 80, "saving": 12, "evaluating": 4, "waiting": 64}
    end = run.look(65, starting=20, steps=20, saving=3, evaluating=1, exporting=5, curve=(0, 20, 20))
    assert (end.percent, end.lost_gpu_seconds.exporting, end.unsaved_gpu_seconds) == (30, 20, 0)


def test_steps_that_are_made_again_were_lost() -> None:
    run = Run()
    run.look(40, starting=10, steps=25, curve=(0, 20, 25))
    # The attempt is dead: what it did not save is at stake until the next one says where it goes on
    assert shown(run.look(50, starting=15, steps=25, curve=(0, 20, 25)))["unsaved"] == 20
    again = run.look(60, starting=20, steps=25, curve=(0, 20, 20))
    assert shown(again) == {"productive": 80, "repeatedSteps": 20, "starting": 80, "waiting": 60}
    end = run.look(90, starting=20, steps=55, curve=(0, 50, 50))
    assert shown(end) == {"productive": 200, "repeatedSteps": 20, "starting": 80, "waiting": 60}


def test_what_a_lost_pod_reported_is_kept() -> None:
    run = Run()
    run.look(40, "a", starting=10, steps=25, saving=1, curve=(0, 20, 25))
    run.look(50)  # nobody says anything
    later = run.look(70, "b", starting=12)
    assert shown(later) == {"productive": 80, "unsaved": 20, "starting": 88, "saving": 4, "waiting": 88}
    end = run.look(100, "b", starting=12, steps=30, curve=(20, 50, 50))
    assert shown(end) == {"productive": 200, "repeatedSteps": 20, "starting": 88, "saving": 4, "waiting": 88}
    third = run.look(120, "c", starting=5, steps=10, curve=(50, 60, 60))
    assert third.productive_gpu_seconds == 240


def test_after_a_damaged_checkpoint_doing_it_again_is_lost() -> None:
    run = Run()
    run.look(40, steps=30, curve=(0, 30, 30))
    # Back behind what was saved: from 10, and up to 30 nothing new is won
    back = run.look(55, steps=45, curve=(0, 30, 25))
    assert (back.productive_gpu_seconds, back.lost_gpu_seconds.repeated_steps) == (120, 60)
    beyond = run.look(75, steps=65, curve=(0, 45, 45))
    assert (beyond.productive_gpu_seconds, beyond.lost_gpu_seconds.repeated_steps) == (180, 80)


def test_what_another_job_did_in_the_same_place_is_not_counted() -> None:
    run = Run()
    assert run.look(30, steps=10, curve=(500, 510, 510)).productive_gpu_seconds == 40
    assert run.look(50, "b", steps=5, curve=(510, 515, 515)).productive_gpu_seconds == 60


def test_hangs_and_outages_have_names() -> None:
    run = Run()
    assert shown(run.look(300, steps=10, hanging=180, storage_outage=60, curve=(0, 10, 10))) == {
        "productive": 40,
        "hanging": 720,
        "storageOutage": 240,
        "waiting": 200,
    }


def test_an_older_report_changes_nothing() -> None:
    run = Run()
    newer = run.look(60, starting=20, steps=20, saving=3, curve=(0, 20, 20))
    older = run.look(60, starting=20, steps=15, saving=1, curve=(0, 10, 15))
    assert shown(older) == shown(newer)


def test_figures_that_pods_were_not_seen_for_are_believed() -> None:
    """The pod that made them came and went while no operator looked."""
    late = account(
        None, FOUR, gpu_seconds=4.0, until=START, spent=SpentSeconds(steps=10, curve_began=0, curve_saved=10)
    )
    assert (late.gpu_seconds, late.productive_gpu_seconds, late.lost_gpu_seconds.waiting) == (40, 40, 0)


def test_starts_follow_one_another() -> None:
    first = SpentSeconds(starting=3, steps=10, curve_began=5, curve_saved=12, curve_now=15)
    never_resumed = SpentSeconds(starting=2)
    third = SpentSeconds(starting=1, steps=4, saving=2, curve_began=12, curve_saved=16, curve_now=16)
    both = followed_by(followed_by(first, never_resumed), third)
    assert both == SpentSeconds(starting=6, steps=14, saving=2, curve_began=5, curve_saved=16, curve_now=16)
    assert followed_by(first, never_resumed).curve_now == 15
