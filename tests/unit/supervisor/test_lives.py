"""What holds in every life of a run, whatever happens to it: played with the real supervisors, by fixed seeds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sft_api.failures import FailureClass
from sft_api.goodput import SPENT
from sft_api.progress import Phase, Progress
from tests.unit.supervisor.lives import Life
from tests.unit.supervisor.played import START, Deed, Violation
from tests.unit.supervisor.stores import REFUSALS

HAPPENINGS = 10
SHOWN_LINES = 60
REMEMBERED_SECONDS = 150
"""A disruption is told within so long: a pod that was cut off is lost a minute after that."""
OUTAGE_SECONDS = 300
"""An outage is over within so long of its end, and its deadline kept, if nothing else happens: pauses, and a start."""
# By names of what may happen in a life, how often, and which seeds: they find faults that were there or were planted.
KINDS = {
    "asked to stop": ({"evict": 10, "suspend": 4}, (1, 3)),
    "workers fail": ({"crash": 20, "hang": 5, "stop_reading": 2}, (0, 1)),
    "workers hang that are asked to stop": ({"hang": 8, "suspend": 6, "evict": 6}, (3, 4)),
    "pods are lost": ({"evict": 10, "kill": 8, "crash": 4, "suspend": 4}, (0, 1)),
    "pods are cut off": ({"cut_off": 10, "replace_cut_off": 4, "evict": 6, "crash": 3}, (3, 5)),
    "supervisors stand still": ({"freeze": 10, "crash": 10}, (9, 10)),
    "the store refuses": ({"store_fails": 10, "store_fails_at": 20, "crash": 10, "evict": 4, "suspend": 4}, (7, 9)),
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
    waited = FailureClass.STORAGE_DEADLINE_EXCEEDED  # of which the end of the run is asked
    for incident in after.incidents:
        told = (incident.time - START).total_seconds()
        done = [deed.failure for deed in life.story.deeds if deed.failure or deed.seconds > told - REMEMBERED_SECONDS]
        if incident.id in known or incident.failure is waited:
            continue
        if (None if incident.disruption else incident.failure) not in done:
            return f"nobody did {incident}"
    return None


def no_more_is_counted_than_was_done(life: Life, before: Progress, after: Progress) -> object:
    """Who counts restarts counts no more failures, echoes and lost steps than there were."""
    told, failures = life.restarts, sum(deed.failure is not None for deed in life.story.deeds)
    many = told.failures > failures or told.lost_steps > life.run.lost_steps or (told.echoes and told.echoes.times > 1)
    return many and f"{told} is, of {failures} failures and {life.run.lost_steps} lost steps"


def no_more_is_spent_than_has_passed(life: Life, before: Progress, after: Progress) -> object:
    """What a run has spent are seconds that have passed."""
    spent = sum(getattr(after.spent, name) for name in SPENT)
    return spent > life.story.seconds + 1 and f"{after.spent} was spent after {life.story.seconds:.0f} s"


def who_waits_for_the_store_says_since_when(life: Life, before: Progress, after: Progress) -> object:
    """A run tells of an outage while it waits for its store, and not once it trains and its workers know of none."""
    told, group = after.training, life.group
    waits = told.phase_detail.endswith("for the store") or group._waited_until is not None
    trains = told.phase is Phase.TRAINING and group.training.storage_outage is None
    wrong = trains if told.storage_outage else waits
    return wrong and f"it tells of {told.storage_outage} in {told.phase} ({told.phase_detail})"


def outages_end(life: Life, before: Progress, after: Progress) -> object:
    """An outage is told of a store that has refused, until it takes again, or the deadline is over."""
    if (told := after.training.storage_outage) is None or life.over:
        return None
    now, store = life.story.seconds, life.run.store
    since, ends = ((time - START).total_seconds() for time in (told.since, told.ends))
    if not store.refused or since > now + 1 or abs(ends - since - store.deadline) > 1:
        return f"{told} is told, of {store.refused} refusals, with a deadline of {store.deadline} s"
    quiet = now - max(deed.seconds for deed in [Deed(since), *life.story.deeds])
    late = min(quiet, now - ends) > OUTAGE_SECONDS
    well = min(quiet, now - store.well_since) > OUTAGE_SECONDS
    return (late or well) and f"{told} is told still, of a store that is well since {store.well_since:.0f} s"


CHECKS: tuple[Check, ...] = (
    progress_only_grows,
    spent_seconds_only_grow,
    each_incident_is_told_once,
    incidents_are_what_was_done,
    no_more_is_counted_than_was_done,
    no_more_is_spent_than_has_passed,
    who_waits_for_the_store_says_since_when,
    outages_end,
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
    store = life.run.store
    never_taken = life.over in REFUSALS and store.refused and not life.run.trained
    too_long = life.over == FailureClass.STORAGE_DEADLINE_EXCEEDED
    if too_long and life.over_after_refused_seconds < store.deadline - 2:
        seconds = life.over_after_refused_seconds
        raise Violation(f"A store is waited for, for {store.deadline} s. But it was for {seconds:.0f} s.")
    if not (life.over == "Complete" and life.run.done) and not (exhausted or never_taken or too_long):
        raise Violation(f"A run that is left alone gets complete. But the end is {life.over or 'not there'}.")
    if not store.well_since and all(deed.only_asks for deed in life.story.deeds) and life.run.lost_steps:
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
