"""What all starts by one supervisor took: none is forgotten when the next one begins, and none counted twice."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from sft_api.failures import FailureClass
from sft_api.progress import Phase, TrainingProgress
from sft_api.v1alpha1 import SpentSeconds
from tests.unit.supervisor.worlds import START, World


def told(world: World, **spent: Any) -> None:
    """Rank 0 reports what its attempt has spent."""
    told_at = START + timedelta(seconds=world.now)
    progress = TrainingProgress(phase=Phase.TRAINING, step=5, spent=SpentSeconds(**spent), update_time=told_at)
    world.group.observe(progress, world.now)


def test_starts_add_up() -> None:
    world = World(1)
    world.obey()
    world.now = 10.0
    told(world, starting=4.0)  # the six seconds before it could say anything were imports
    assert world.group.spent.starting == 10.0
    world.now = 20.0
    told(world, starting=1.0)  # of the worker itself; before it somebody else had looked at the place
    assert world.group.spent.starting == 20.0
    world.now = 31.0
    told(world, starting=5.0, steps=6.0, curve_began=0.0, curve_now=6.0)
    assert (world.group.spent.starting, world.group.spent.steps) == (25.0, 6.0)
    world.now = 50.0
    told(world, starting=5.0, steps=20.0, curve_began=0.0, curve_saved=15.0, curve_now=20.0)
    before = SpentSeconds(starting=25.0, steps=20.0, curve_began=0.0, curve_saved=15.0, curve_now=20.0)
    assert world.group.spent == before

    # It crashes: between the starts nothing is added, and the next one's first word is not the last one's
    world.now = 60.0
    world.ends(0, FailureClass.WORKER_CRASHED)
    world.judge()
    world.obey()
    assert world.group.starts == 2
    assert world.group.spent == before
    world.now = 65.0
    told(world, starting=3.0, steps=2.0, curve_began=15.0, curve_saved=15.0, curve_now=17.0)
    assert world.group.spent == SpentSeconds(
        starting=28.0, steps=22.0, curve_began=0.0, curve_saved=15.0, curve_now=17.0
    )

    # What is left behind at the end says the same
    end = world.ends(0).end
    assert end is not None
    assert end.failure is None
    assert end.spent == world.group.spent


def test_a_supervisor_that_stood_still_takes_nothing_back() -> None:
    # Given six seconds of imports, and then a supervisor that stands still for twenty, which its clock leaves out
    world = World(1)
    world.obey()
    world.now = 10.0
    told(world, starting=4.0)
    before = world.group.spent.starting
    world.now = 12.0
    told(world, starting=26.0)

    assert before == 10.0
    assert world.group.spent.starting == 32.0


def test_a_hang_lasts_from_the_last_word_until_it_is_noticed() -> None:
    world = World(1)
    world.obey()
    told(world, steps=1.0, curve_began=0.0, curve_now=1.0)
    world.now = 200.0
    world.group.hang("no new step for 200 s")
    assert world.group.spent.hanging == 200.0
    world.obey()
    world.ends(0, FailureClass.INTERRUPTED)
    world.judge()
    world.obey()
    assert world.group.starts == 2
    assert world.group.spent.hanging == 200.0


def test_a_start_that_never_says_anything_hangs_from_its_beginning() -> None:
    # Given a group that has crashed, and begins again only after ten minutes: a pod was replaced
    world = World(1)
    world.obey()
    told(world, steps=1.0, curve_began=0.0, curve_now=1.0)
    world.ends(0, FailureClass.WORKER_CRASHED)
    world.now = 600.0
    world.judge()
    world.obey()
    assert world.group.starts == 2

    world.now = 2400.0
    world.group.hang("said nothing for 1800 s")

    assert world.group.spent.hanging == 1800.0
