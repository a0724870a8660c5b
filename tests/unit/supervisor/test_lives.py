"""What holds in every life of a run, whatever happens to it: played with the real supervisors, by fixed seeds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sft_api.failures import FailureClass
from sft_api.goodput import SPENT
from sft_api.progress import Progress
from tests.unit.supervisor.lives import Life
from tests.unit.supervisor.played import START, Violation

HAPPENINGS = 10
SHOWN_LINES = 60
REMEMBERED_SECONDS = 150
"""A disruption is told within so long: a pod that was cut off is lost a minute after that."""
# By names of what may happen in a life, how often, and which seeds: they find faults that were there or were planted.
KINDS = {
    "asked to stop": ({"evict": 10, "suspend": 4}, (1, 3)),
    "workers fail": ({"crash": 20, "hang": 5, "stop_reading": 2}, (0, 1)),
    "workers hang that are asked to stop": ({"hang": 8, "suspend": 6, "evict": 6}, (3, 4)),
    "pods are lost": ({"evict": 10, "kill": 8, "crash": 4, "suspend": 4}, (0, 1)),
    "pods are cut off": ({"cut_off": 10, "replace_cut_off": 4, "evict": 6, "crash": 3}, (3, 5)),
    "supervisors stand still": ({"freeze": 10, "crash": 10}, (9, 10)),
    "each attempt fails": ({"curse": 10, "stop_reading": 3, "crash": 5, "evict": 3}, (1,)),
}
Check = Callable[[Life, Progress, Progress], object]
"""Of a life and what one index 0 told, twice in a row; it returns what is wrong. Its docstring says what holds."""


def progress_only_grows(life: Life, before: Progress, after: Progress) -> object:
    """Attempts only grow, and within one the step and the newest checkpoint do."""
    was, now = (
        (told.generation, told.training.attempt, told.training.step, told.training.checkpoints.latest)
        for told in (before, after)
    )
    falls = now[0] < was[0] or (now[1] and now[1] < was[1]) or (now[1] == was[1] and now[2] < was[2])
    older = was[3] and now[3] and now[3].step < was[3].step
    return (falls or older) and f"{was} became {now}"


def spent_seconds_only_grow(life: Life, before: Progress, after: Progress) -> object:
    """What a run has spent stays spent."""
    fallen = [name for name in SPENT if getattr(after.spent, name) < getattr(before.spent, name) - 1e-6]
    return fallen and f"{fallen} of {before.spent} became less: {after.spent}"


def each_incident_is_told_once(life: Life, before: Progress, after: Progress) -> object:
    """Each end of a generation is one incident."""
    ids = [incident.id for incident in after.incidents]
    return len(ids) != len(set(ids)) and f"they are {ids}"


def incidents_are_what_was_done(life: Life, before: Progress, after: Progress) -> object:
    """What is told as a disruption or a failure is what somebody did."""
    known = {incident.id for incident in before.incidents}
    for incident in after.incidents:
        told = (incident.time - START).total_seconds()
        done = [deed.failure for deed in life.story.deeds if deed.failure or deed.seconds > told - REMEMBERED_SECONDS]
        if incident.id not in known and (None if incident.disruption else incident.failure) not in done:
            return f"nobody did {incident}"
    return None


def no_more_is_counted_than_was_done(life: Life, before: Progress, after: Progress) -> object:
    """Who counts restarts counts no more failures, echoes and lost steps than there were."""
    told, failures = life.restarts, sum(deed.failure is not None for deed in life.story.deeds)
    many = told.failures > failures or told.lost_steps > life.run.lost_steps or (told.echoes and told.echoes.times > 1)
    return many and f"{told} is, of {failures} failures and {life.run.lost_steps} lost steps"


CHECKS: tuple[Check, ...] = (
    progress_only_grows,
    spent_seconds_only_grow,
    each_incident_is_told_once,
    incidents_are_what_was_done,
    no_more_is_counted_than_was_done,
)


def check_progress(life: Life, before: Progress, after: Progress) -> None:
    for check in CHECKS:
        if wrong := check(life, before, after):
            raise Violation(f"{' '.join((check.__doc__ or '').split())} But {wrong}.")


def check_end(life: Life) -> None:
    """A run that is left alone ends in the way that it should."""
    failures = [deed.failure for deed in life.story.deeds if deed.failure is not None]
    repeats = any(failures.count(failure) > 2 for failure in failures)
    exhausted = repeats and life.over == FailureClass.RESTARTS_EXHAUSTED
    if not (life.over == "Complete" and life.run.done) and not exhausted:
        raise Violation(f"A run that is left alone gets complete. But the end is {life.over or 'not there'}.")
    if all(deed.only_asks for deed in life.story.deeds) and life.run.lost_steps:
        raise Violation(f"A run that is only asked to stop loses no step. But {life.run.lost_steps} are lost.")


@pytest.mark.parametrize(("kind", "seed"), [(kind, seed) for kind, (_, seeds) in KINDS.items() for seed in seeds])
def test_whatever_happens_to_a_run_what_is_told_of_it_holds(kind: str, seed: int, tmp_path: Path) -> None:
    life = Life(seed, tmp_path, KINDS[kind][0], on_progress=check_progress)
    try:
        life.play(HAPPENINGS)
        check_end(life)
    except Exception as error:
        log = "\n".join(life.story.lines[-SHOWN_LINES:])
        raise AssertionError(f"life {seed} of {kind!r}: {error}\n\n{log}") from (
            None if isinstance(error, Violation) else error
        )
