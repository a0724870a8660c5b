"""A store that took what a run saved, and refuses when it is started again: waited for, told, and not for ever."""

from datetime import timedelta

import pytest

from sft_api.failures import FailureClass
from sft_api.progress import Phase, StorageOutage, TrainingProgress
from sft_trainer.supervisor.protocol import OrderKind
from tests.unit.supervisor.worlds import START, STORAGE_DEADLINE, World

DENIED = FailureClass.ACCESS_DENIED


def report(world: World, **fields: object) -> None:
    """Rank 0 reports that."""
    world.group.observe(TrainingProgress.model_validate(fields), world.now)


def trained(world: World) -> None:
    report(world, attempt=1, phase=Phase.TRAINING, step=30)


def refused(world: World, kind: FailureClass = DENIED) -> None:
    """The start that runs ends as it finds its store, before it has claimed an attempt."""
    report(world, phase=Phase.STARTING)
    world.ends(1, kind, outage=True)
    world.obey()


def crashed(world: World) -> None:
    world.ends(1, FailureClass.WORKER_CRASHED)
    world.obey()
    assert world.kind is OrderKind.RUN


def until_the_next_start(world: World) -> None:
    """Or until the run ends."""
    for _ in range(100):
        if world.kind is not OrderKind.IDLE:
            break
        world.passes(1.0)
        world.obey()


@pytest.mark.parametrize(
    "kind", [DENIED, FailureClass.STORAGE_NOT_FOUND, FailureClass.STORAGE_FULL, FailureClass.CONFIG_ERROR]
)
def test_at_the_first_start_it_is_an_error_as_it_always_was(running: World, kind: FailureClass) -> None:
    refused(running, kind)

    end = running.group.order.end
    assert end is not None
    assert end.failure is kind


def test_pods_that_are_told_of_a_claim_before_theirs_wait_from_their_first_start_on() -> None:
    world = World(2, claimed=True)
    world.obey()
    refused(world)

    assert world.kind is OrderKind.IDLE
    assert world.group.refusals.told is not None
    assert world.group.ledger.incidents == []
    until_the_next_start(world)
    assert world.kind is OrderKind.RUN


@pytest.mark.parametrize(
    "kind",
    [
        DENIED,
        FailureClass.STORAGE_NOT_FOUND,
        FailureClass.STORAGE_FULL,
        FailureClass.CONFIG_ERROR,
        FailureClass.STORAGE_UNAVAILABLE,
    ],
)
def test_once_an_attempt_was_claimed_it_is_waited_for_and_counts_as_nothing(running: World, kind: FailureClass) -> None:
    trained(running)
    crashed(running)
    refused(running, kind)

    assert running.kind is OrderKind.IDLE
    assert running.incidents == [(FailureClass.WORKER_CRASHED, False)]
    assert running.group.refusals.told == StorageOutage(
        since=START, ends=START + timedelta(seconds=STORAGE_DEADLINE), failure=kind, message=f"{kind} on 1"
    )
    # It is tried again, also when nobody reads of it.
    running.passes(4.0)
    assert running.kind is OrderKind.IDLE
    running.passes(2.0)
    running.obey()
    assert running.kind is OrderKind.RUN


def test_another_failure_of_the_same_class_is_none_of_the_store(running: World) -> None:
    trained(running)
    running.ends(1, DENIED)
    running.obey()

    end = running.group.order.end
    assert end is not None
    assert end.failure is DENIED


@pytest.mark.parametrize(("attempt", "kind"), [(1, OrderKind.EXIT), (2, OrderKind.IDLE)])
def test_the_first_claim_of_all_proves_nothing_of_its_own_start_and_a_later_one_that_there_was_one(
    running: World, attempt: int, kind: OrderKind
) -> None:
    # A key that may write and not list: as in a manifest, nothing was ever saved with it.
    report(running, attempt=attempt, phase=Phase.LOADING)
    running.ends(1, DENIED, outage=True, attempt=attempt)
    running.obey()

    assert running.kind is kind


@pytest.mark.parametrize(
    "past", [{"phase": Phase.LOADING}, {"attempt": 2, "phase": Phase.LOADING}, {"phase": Phase.EXPORTING}]
)
def test_what_refuses_only_later_in_a_start_has_the_same_deadline(running: World, past: dict[str, object]) -> None:
    # Objects that were archived, or a node that does not reach the store: the look and the claim are answered; or the
    # place of an export that a complete run lacks.
    trained(running)
    crashed(running)
    began = running.now
    while running.kind is OrderKind.RUN and running.now - began < 2 * STORAGE_DEADLINE:
        report(running, phase=Phase.STARTING)
        report(running, **past)
        running.ends(1, DENIED, outage=True)
        running.obey()
        until_the_next_start(running)

    end = running.group.order.end
    assert end is not None
    assert end.failure is FailureClass.STORAGE_DEADLINE_EXCEEDED
    assert running.now - began == pytest.approx(STORAGE_DEADLINE, abs=5)


@pytest.mark.parametrize(("phase", "lasts"), [(Phase.STARTING, True), (Phase.LOADING, False)])
def test_a_start_that_fails_for_another_reason_ends_it_where_the_store_had_answered(
    running: World, phase: Phase, lasts: bool
) -> None:
    trained(running)
    crashed(running)
    refused(running)
    running.passes(6)
    running.obey()
    report(running, phase=phase)
    running.ends(1, FailureClass.WORKER_CRASHED)
    running.obey()

    assert (running.group.refusals.told is not None) is lasts


def test_a_new_index_0_learns_from_its_members_that_the_run_has_begun() -> None:
    world = World(2)
    world.obey(0)
    world.say(1, claimed=True)
    world.obey()
    refused(world)

    assert world.kind is OrderKind.IDLE
    assert world.group.refusals.told is not None


def test_it_is_tried_again_and_again_and_ends_the_run_at_the_deadline_with_where_it_stood(running: World) -> None:
    trained(running)
    crashed(running)
    began, starts = running.now, []
    while running.kind is OrderKind.RUN:
        starts.append(running.now - began)
        refused(running)
        until_the_next_start(running)

    end = running.group.order.end
    assert end is not None
    assert end.failure is FailureClass.STORAGE_DEADLINE_EXCEEDED
    assert end.message == (
        "nothing could be saved for 10m0s, since 2026-01-01T00:00:00Z, and runPolicy.storageDeadlineSeconds is 600; "
        "the last answer was: AccessDenied on 1"
    )
    assert (end.attempt, end.step) == (1, 30)
    # Each pause as long as it has lasted so far, from 5 to 60 seconds, and a last look at the deadline.
    assert starts == [0, 5, 10, 20, 40, 80, *range(140, 600, 60), 600]
    assert running.incidents == [(FailureClass.WORKER_CRASHED, False)]
    assert running.group.spent.storage_outage == pytest.approx(600)


def test_it_lasts_since_it_began_in_the_attempt_that_trained_on(running: World) -> None:
    since = START - timedelta(seconds=10)
    told = StorageOutage(since=since, ends=since + timedelta(seconds=600), failure=DENIED, message="the key is gone")
    report(running, attempt=1, phase=Phase.TRAINING, step=30, storage_outage=told)
    running.passes(590)
    crashed(running)
    refused(running)

    assert running.kind is OrderKind.IDLE
    assert running.group.refusals.told is not None
    assert running.group.refusals.told.since == since
    running.passes(11)
    running.obey()
    refused(running)
    assert running.kind is OrderKind.EXIT


def test_another_one_has_its_own_deadline_also_where_nobody_saw_the_first_one_end(running: World) -> None:
    # Given a start that trains, and is refused a save, while the supervisor does not look: it stood still, or steps are
    # shorter than its looks are apart
    trained(running)
    crashed(running)
    refused(running)
    running.passes(300)
    running.obey()
    since = START + timedelta(seconds=running.now)
    ends = since + timedelta(seconds=STORAGE_DEADLINE)
    told = StorageOutage(since=since, ends=ends, failure=DENIED, message="the key is gone")
    report(running, attempt=2, phase=Phase.TRAINING, step=40, storage_outage=told)

    # When it has to start again after the first one's deadline
    running.passes(400)
    running.judge()
    crashed(running)
    refused(running)

    # Then the run waits for as long as it says
    assert running.kind is OrderKind.IDLE
    assert running.group.refusals.told is not None
    assert running.group.refusals.told.ends == ends
    running.passes(200)
    running.obey()
    refused(running)
    assert running.kind is OrderKind.EXIT


def test_it_is_over_once_a_start_trains_on(running: World) -> None:
    trained(running)
    crashed(running)
    refused(running)
    running.passes(6)
    running.obey()
    for phase in (Phase.STARTING, Phase.TOKENIZING, Phase.WAITING, Phase.LOADING):
        report(running, attempt=2, phase=phase)
        assert running.group.refusals.told is not None
    report(running, attempt=2, phase=Phase.TRAINING)
    assert running.group.refusals.told is None

    # What comes later is another one.
    running.passes(700)
    refused(running)
    assert running.kind is OrderKind.IDLE


def test_a_pod_that_is_lost_meanwhile_is_waited_for_and_ends_nothing(running: World) -> None:
    trained(running)
    crashed(running)
    refused(running)
    running.say(2, leaving=True)
    running.passes(2 * STORAGE_DEADLINE)
    assert running.kind is OrderKind.IDLE

    assert running.group.spent.storage_outage == 0
    # Nobody has looked since: it is looked at once more.
    running.replace(2)
    running.obey()
    assert running.kind is OrderKind.RUN
    refused(running)
    assert running.kind is OrderKind.EXIT


@pytest.mark.parametrize("spoke", [False, True], ids=["silent", "spoke"])
def test_while_it_is_waited_for_the_run_stands_where_it_stood(running: World, spoke: bool) -> None:
    trained(running)
    crashed(running)
    if spoke:
        report(running, phase=Phase.STARTING)
    running.ends(1, DENIED, outage=True)
    running.obey()

    seen = running.group.refusals.seen_in(running.group.training)
    assert (seen.attempt, seen.step) == (1, 30)
    assert seen.storage_outage == running.group.refusals.told is not None


def test_a_group_of_one_pod_speaks_of_no_pods() -> None:
    world = World(1, judged_first=True)
    world.obey()
    crashed = world.reports[0].running
    assert crashed is not None
    world.ends(0, FailureClass.WORKER_CRASHED)
    assert world.kind is OrderKind.IDLE
    world.obey()
    assert world.group.idle_for(world.now) == "for the verdict on the last failure"
    world.group.ledger.was_read()
    world.passes(1)
    assert "pods" not in world.group.idle_for(world.now)
    world.say(0, leaving=True)
    assert world.group.idle_for(world.now) == "for the end that was asked for"


def test_of_several_pods_it_says_which_are_not_there() -> None:
    world = World(3)
    world.say(0)
    world.say(2)
    assert world.group.idle_for(world.now) == "2/3 pods, waiting for 1"
    world.obey()
    trained(world)
    world.ends(1, FailureClass.WORKER_CRASHED)
    assert world.group.idle_for(world.now) == "for the end of the workers"
