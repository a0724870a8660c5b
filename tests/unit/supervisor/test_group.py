"""The table of members: every way in which a group starts, ends, and starts again."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from sft_api.failures import FailureClass
from sft_api.progress import MOST_LAST_INCIDENTS, Phase, TrainingProgress
from sft_trainer.supervisor import group as judge
from sft_trainer.supervisor.group import HELD_SECONDS, TELL_COMPLETE_SECONDS, TELL_FAILED_SECONDS, TELL_STOPPED_SECONDS
from sft_trainer.supervisor.protocol import Ended, OrderKind, Outcome
from tests.unit.supervisor.worlds import GRACE, World, steps


def test_one_pod_needs_nobody() -> None:
    world = World(1)
    world.obey()
    assert world.kind is OrderKind.RUN


def test_nothing_starts_while_a_pod_is_missing() -> None:
    world = World(3)
    world.obey(0, 2)

    assert world.kind is OrderKind.IDLE
    assert world.group.waiting_for == [1]


def test_nothing_starts_while_a_pod_still_has_workers_of_an_earlier_index_0() -> None:
    world = World(2)
    world.obey(0)
    order = world.say(1, running=7, received="before.3")
    world.say(1, received=order.id)
    assert world.kind is OrderKind.IDLE
    world.say(1, running=None)

    assert world.kind is OrderKind.RUN
    assert world.group.highest_generation == 7


def test_nothing_starts_with_a_pod_that_is_being_stopped() -> None:
    world = World(2)
    world.obey(0)
    order = world.say(1, stopping=True)
    world.say(1, received=order.id)

    assert world.kind is OrderKind.IDLE


def test_complete_only_when_all_are(running: World) -> None:
    running.ends(0)
    running.ends(2)
    assert running.kind is OrderKind.RUN
    running.ends(1)

    assert running.kind is OrderKind.EXIT
    assert running.group.order.end is not None
    assert running.group.order.end.failure is None


def test_a_failure_anywhere_makes_all_idle_and_then_start_again(running: World) -> None:
    order = running.ends(1, FailureClass.OUT_OF_MEMORY)
    assert order.kind is OrderKind.IDLE
    assert "OutOfMemory on 1" in order.reason
    # Nothing new before the last of the old workers is gone.
    running.obey(0, 1)
    assert running.kind is OrderKind.IDLE
    running.obey()

    assert running.kind is OrderKind.RUN
    assert [report.running for report in running.reports.values()] == [20_002] * 3
    assert running.incidents == [(FailureClass.OUT_OF_MEMORY, False)]


def test_the_cause_counts_even_when_it_is_told_last(running: World) -> None:
    running.ends(0, FailureClass.PEER_LOST)
    running.ends(1, FailureClass.PEER_LOST)
    running.ends(2, FailureClass.STORAGE_UNAVAILABLE, after=0.5)
    running.obey()

    assert running.incidents == [(FailureClass.STORAGE_UNAVAILABLE, False)]


def test_who_was_superseded_leaves_instead_of_superseding_the_other(running: World) -> None:
    # Given a pod that the cluster has replaced, as it could not reach it: the newcomer claimed the next attempt
    running.ends(1, FailureClass.PEER_LOST)
    running.ends(0, FailureClass.PEER_LOST, superseded=True, after=0.5)
    running.obey()

    # Then it does not claim the one after, and nothing has gone wrong
    end = running.group.order.end
    assert end is not None
    assert (end.failure, end.message, end.rank) == (FailureClass.PEER_LOST, "PeerLost on 0", 0)
    assert running.incidents == []


def test_a_failure_that_no_retry_mends_ends_the_run(running: World) -> None:
    running.ends(1, FailureClass.DATA_ERROR)
    running.obey()

    end = running.group.order.end
    assert end is not None
    assert (end.failure, end.message, end.rank) == (FailureClass.DATA_ERROR, "DataError on 1", 1)


def test_how_often_a_run_may_fail_is_not_decided_here(running: World) -> None:
    for number in range(1, 30):
        running.ends(1, FailureClass.HANG)
        running.obey()
        running.judge()
        running.passes(60.0)
        running.obey()
        assert running.kind is OrderKind.RUN
        assert len(running.incidents) == number


def test_a_start_of_which_rank_0_has_told_nothing_ended_while_it_started(running: World) -> None:
    # Given a run that has crashed at step 100, and a start after it that ends before the first word of rank 0
    steps(running, 100)
    for failure in (FailureClass.WORKER_CRASHED, FailureClass.DEVICE_UNAVAILABLE):
        running.ends(1, failure)
        running.obey()

    # Then it is told how far the run had got, and that this start did not train
    told = [(incident.phase, incident.step) for incident in running.group.ledger.incidents]
    assert told == [(Phase.TRAINING, 100), (Phase.STARTING, 100)]


def test_index_0_tells_with_its_last_words_what_went_wrong(running: World) -> None:
    for _ in range(MOST_LAST_INCIDENTS + 1):
        running.ends(1, FailureClass.HANG)
        running.obey()
        running.judge()
        running.passes(60.0)
        running.obey()
    for node in range(3):
        running.ends(node)

    end = running.group.order.end
    assert end is not None
    # The order of all stays short: one pod tells it.
    assert end.incidents == []
    last = running.group.last_words(end)
    assert (last.message, last.spent) == (end.message, end.spent)
    assert [incident.id for incident in last.incidents] == [f"one-{number}" for number in range(2, 22)]


def fails_twice(world: World) -> None:
    for _ in range(2):
        world.ends(1, FailureClass.UNKNOWN)
        world.obey()


def test_a_pause_before_the_second_restart(running: World) -> None:
    fails_twice(running)
    running.judge()
    running.obey()
    assert running.kind is OrderKind.IDLE
    running.passes(1.0)
    running.obey()
    assert running.kind is OrderKind.RUN


def test_a_failure_that_repeats_is_judged_before_the_next_start(running: World) -> None:
    fails_twice(running)
    running.passes(HELD_SECONDS / 2)
    running.obey()
    assert running.kind is OrderKind.IDLE
    running.judge()
    running.obey()

    assert running.kind is OrderKind.RUN


def test_a_judge_that_is_away_is_not_waited_for_for_ever(running: World) -> None:
    fails_twice(running)
    running.passes(HELD_SECONDS - 1.0)
    running.obey()
    assert running.kind is OrderKind.IDLE
    running.passes(1.0)
    running.obey()

    assert running.kind is OrderKind.RUN


def test_with_a_judge_at_hand_the_first_failure_is_judged_too() -> None:
    world = World(1, judged_first=True)
    world.obey()
    world.ends(0, FailureClass.UNKNOWN)
    world.obey()
    assert world.kind is OrderKind.IDLE
    world.judge()
    world.obey()

    assert world.kind is OrderKind.RUN


def test_a_lost_pod_needs_no_verdict() -> None:
    world = World(2, judged_first=True)
    world.obey()
    world.replace(1)
    world.obey()

    assert world.incidents == [(FailureClass.PEER_LOST, True)]
    assert world.kind is OrderKind.RUN


def work(action: Callable[[], object]) -> int:
    """Lines that are executed in the judge's module."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        if frame.f_code.co_filename != judge.__file__:
            return None
        count += event == "line"
        return trace

    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(None)
    return count


@pytest.mark.parametrize("situation", ["gathering", "running", "leaving", "ending"])
def test_a_report_costs_the_same_in_a_large_group(situation: str) -> None:
    def cost(size: int) -> int:
        world = World(size)
        most = size - 2
        if situation == "gathering":
            world.obey(*range(most))
        else:
            world.obey()
        if situation == "leaving":
            for node in range(most):
                world.ends(node, FailureClass.INTERRUPTED)
        if situation == "ending":
            world.ends(0, FailureClass.HANG)
            world.obey(*range(most))
        world.now += 1.0
        return work(lambda: world.say(most))

    small, large = cost(8), cost(512)
    assert small > 5
    assert large <= small + 3


def test_sigterm_of_one_pod_waits_for_all_to_leave(running: World) -> None:
    running.say(1, stopping=True)
    running.ends(1, FailureClass.INTERRUPTED)
    running.say(1, leaving=True)
    running.ends(2, FailureClass.INTERRUPTED)
    # Rank 0 is still committing what all have saved.
    running.passes(GRACE - 5, 1)
    assert running.kind is OrderKind.RUN
    running.ends(0, FailureClass.INTERRUPTED)
    running.obey(0, 2)
    assert running.kind is OrderKind.IDLE
    assert running.incidents == [(FailureClass.INTERRUPTED, True)]
    running.replace(1)
    running.obey()

    assert running.kind is OrderKind.RUN


def test_the_wait_for_the_others_is_bounded_by_the_grace_time(running: World) -> None:
    running.say(1, stopping=True)
    running.ends(1, FailureClass.INTERRUPTED)
    running.passes(GRACE + 1)

    assert running.kind is OrderKind.IDLE


def test_workers_that_leave_unasked_are_a_failure(running: World) -> None:
    for node in range(3):
        running.ends(node, FailureClass.INTERRUPTED)
    running.obey()

    assert running.incidents == [(FailureClass.INTERRUPTED, False)]


def test_workers_that_leave_as_a_pod_was_asked_that_could_not_say_so_are_none(running: World) -> None:
    # Given an index 0 that did not hear the pod that was asked to stop, from its SIGTERM to its end
    running.ends(0, FailureClass.INTERRUPTED)
    running.ends(2, FailureClass.INTERRUPTED)
    running.replace(1)
    running.obey()

    # Then it was that pod's, is free, and no verdict is waited for
    assert running.incidents == [(FailureClass.INTERRUPTED, True)]
    assert running.kind is OrderKind.RUN


def test_asked_to_stop_with_nothing_to_save_all_end_at_once(running: World) -> None:
    running.group.nothing_to_save()
    running.say(0)
    assert running.kind is OrderKind.RUN
    running.say(1, stopping=True)
    running.group.nothing_to_save()
    order = running.say(0)
    assert order.kind is OrderKind.IDLE
    assert not order.dump_stacks
    running.obey()

    assert running.incidents == [(FailureClass.INTERRUPTED, True)]


def test_a_hang_prints_stacks_and_counts(running: World) -> None:
    running.group.training = TrainingProgress(step=12)
    running.group.hang("no new step for 200 s")
    order = running.say(0)
    assert order.kind is OrderKind.IDLE
    assert order.dump_stacks
    # What the others say while they are killed is not the cause.
    running.ends(2, FailureClass.PEER_LOST, after=-60)
    running.obey()

    assert running.incidents == [(FailureClass.HANG, False)]
    assert running.group.ledger.incidents[0].step == 12
    assert running.kind is OrderKind.RUN
    assert not running.group.order.dump_stacks


def test_a_hang_says_where_it_is_kept_what_all_were_doing(running: World) -> None:
    running.group.hang("no new step for 200 s", traces="step-00000012-a00001", place="s3://b/run/hangs/step-00000012")
    order = running.say(0)
    assert order.traces == "step-00000012-a00001"
    running.obey()

    assert running.group.ledger.incidents[0].message == (
        "no new step for 200 s; the stacks of all ranks are in the pods' logs and in s3://b/run/hangs/step-00000012"
    )
    assert running.group.order.traces == ""


@pytest.mark.parametrize(
    ("ends", "host"),
    [
        ({1: FailureClass.WORKER_CRASHED}, "host-1"),
        ({1: FailureClass.WORKER_CRASHED, 0: FailureClass.PEER_LOST}, "host-1"),
        ({1: FailureClass.WORKER_CRASHED, 2: FailureClass.WORKER_CRASHED}, ""),
        ({1: FailureClass.WORKER_CRASHED, 2: FailureClass.UNKNOWN}, ""),
        ({1: FailureClass.PEER_LOST}, ""),
    ],
    ids=["alone", "echo", "two", "two-kinds", "echo-alone"],
)
def test_an_incident_names_the_node_on_which_alone_it_began(
    running: World, ends: dict[int, FailureClass], host: str
) -> None:
    for node, failure in ends.items():
        running.ends(node, failure)
    running.obey()

    assert [incident.host for incident in running.group.ledger.incidents] == [host]


@pytest.mark.parametrize(("pod", "host"), [(1, "host-1"), (None, "")])
def test_a_hang_names_the_node_of_the_pod_that_stands_still(running: World, pod: int | None, host: str) -> None:
    running.group.hang("no new step for 200 s", pod)
    running.obey()

    assert [incident.host for incident in running.group.ledger.incidents] == [host]


def test_a_pod_lost_after_it_was_complete_does_not_end_the_others(running: World) -> None:
    running.ends(1)
    running.replace(1)
    # The newcomer must not join a generation it has no peers in.
    order = running.say(1)
    assert order.kind is OrderKind.IDLE
    running.say(1, received=order.id)
    running.passes(20)
    assert running.kind is OrderKind.RUN
    running.ends(0)
    running.ends(2)

    assert running.kind is OrderKind.EXIT
    assert running.say(1).kind is OrderKind.EXIT


def test_a_newcomer_takes_part_once_the_others_have_failed(running: World) -> None:
    running.ends(1)
    running.replace(1)
    running.obey(1)
    running.ends(0, FailureClass.HANG)
    running.obey()

    assert running.kind is OrderKind.RUN
    assert running.reports[1].running == 20_002


def test_index_0_leaves_after_all_were_told(running: World) -> None:
    for node in range(3):
        running.ends(node)
    exit_order = running.group.order.id
    running.say(1, received=exit_order, leaving=True)
    assert not running.group.everyone_told(running.now)
    # Stopped before it was told: its replacement must be.
    running.say(2, leaving=True)
    running.passes(300, 1, 2)
    assert not running.group.everyone_told(running.now)
    running.replace(2)
    running.say(2, received=exit_order, leaving=True)

    assert running.group.everyone_told(running.now)


@pytest.mark.parametrize(
    ("failure", "patience"), [(None, TELL_COMPLETE_SECONDS), (FailureClass.CONFIG_ERROR, TELL_FAILED_SECONDS)]
)
def test_index_0_does_not_wait_for_ever(running: World, failure: FailureClass | None, patience: float) -> None:
    for node in range(3):
        running.ends(node, failure)
    running.obey(0, 1, 2)
    assert running.kind is OrderKind.EXIT
    assert not running.group.everyone_told(running.now + patience)
    assert running.group.everyone_told(running.now + patience + 1)


def test_index_0_that_is_asked_to_stop_does_not_wait_for_a_lost_pod(running: World) -> None:
    for node in range(3):
        running.ends(node)
    running.say(1, received=running.group.order.id, leaving=True)
    assert not running.group.everyone_told(running.now, stopping=True)
    assert running.group.everyone_told(running.now + TELL_STOPPED_SECONDS + 1, stopping=True)
    assert not running.group.everyone_told(running.now + TELL_STOPPED_SECONDS + 1)


def test_a_pod_of_another_version_is_no_member_and_takes_the_place_of_the_one_before(running: World) -> None:
    stranger = World.report(1, "another").model_copy(update={"version": "b"})
    # Whoever cannot show that it belongs here replaces nobody.
    running.group.refuse(stranger, running.now, replaces=False)
    running.obey()
    assert running.kind is OrderKind.RUN
    assert running.group.misfits(running.now) == {}

    running.group.refuse(stranger, running.now, replaces=True)
    running.obey(0, 2)
    assert running.incidents == [(FailureClass.PEER_LOST, True)]
    assert (running.group.misfits(running.now), running.group.waiting_for) == ({1: "b"}, [1])
    # It is forgotten when it has gone, or when one comes that fits.
    running.passes(9.0, 1)
    assert running.group.misfits(running.now) == {1: "b"}
    running.passes(2.0, 1)
    assert running.group.misfits(running.now) == {}
    running.group.refuse(stranger, running.now, replaces=True)
    running.replace(1, "fits")
    running.obey()
    assert (running.kind, running.group.misfits(running.now)) == (OrderKind.RUN, {})


def test_reports_of_an_old_generation_change_nothing(running: World) -> None:
    old = Ended(generation=19_999, outcome=Outcome.COMPLETE)
    for node in range(3):
        running.say(node, ended=old)

    assert running.kind is OrderKind.RUN
