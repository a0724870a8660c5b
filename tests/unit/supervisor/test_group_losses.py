"""Pods that are not heard, or replaced: when they count as lost, and what that costs."""

from sft_api.failures import FailureClass
from sft_api.progress import Phase
from sft_api.restarts import count_incidents
from sft_api.v1alpha1 import RestartsStatus
from sft_trainer.supervisor.liveness import Pod
from sft_trainer.supervisor.protocol import OrderKind, PodActivity
from tests.unit.supervisor.worlds import World, steps


def test_a_replaced_pod_ends_the_generation_and_is_free(running: World) -> None:
    running.replace(2)
    assert running.kind is OrderKind.IDLE
    running.obey()

    assert running.kind is OrderKind.RUN
    assert running.incidents == [(FailureClass.PEER_LOST, True)]
    assert running.group.ledger.incidents[0].message == "pod 2 was replaced"
    assert count_incidents(RestartsStatus(), running.group.ledger.incidents) == RestartsStatus()


def test_the_replaced_pod_is_sent_away_and_changes_nothing(running: World) -> None:
    old = running.reports[2]
    running.replace(2)
    running.obey()
    running.group.hear(old, running.now)

    assert running.kind is OrderKind.RUN
    assert running.group.order_for(old).kind is OrderKind.EXIT
    assert running.group.order_for(running.reports[2]).kind is OrderKind.RUN


def test_a_pod_that_is_not_heard_is_not_lost_while_steps_are_made(running: World) -> None:
    # No rank makes a step without the others.
    for step in range(1, 10):
        steps(running, step)
        running.passes(9.0, 1)
    assert running.kind is OrderKind.RUN
    # The last step was nine seconds ago.
    running.passes(2.0, 1)
    assert running.kind is OrderKind.IDLE
    assert running.group.waiting_for == [1]


def test_reports_without_a_step_are_no_proof_of_life_of_others(running: World) -> None:
    for second in range(11):
        steps(running, 7, Phase.SAVING if second % 2 else Phase.TRAINING)
        running.passes(1.0, 1)
    assert running.kind is OrderKind.IDLE


def test_each_of_many_pods_is_lost_in_its_own_time() -> None:
    world = World(40)
    world.obey()
    lost: list[int] = []
    for node in range(1, 40, 13):
        world.passes(3.0, *lost)
        lost.append(node)
    world.passes(4.0, *lost)
    assert world.kind is OrderKind.RUN
    world.passes(1.0, *lost)
    assert world.kind is OrderKind.IDLE
    assert world.group.waiting_for == [1]
    world.passes(3.0, *lost)
    assert world.group.waiting_for == [1, 14]
    world.passes(3.0, *lost)
    assert world.group.waiting_for == [1, 14, 27]


def test_once_asked_to_stop_a_pod_that_is_not_heard_is_lost_sooner() -> None:
    world = World(2, lost_after=60.0)
    world.obey()
    steps(world, 5)
    world.say(0, stopping=True)
    world.passes(9.0, 1)
    assert world.kind is OrderKind.RUN
    world.passes(2.0, 1)
    assert world.kind is OrderKind.IDLE
    world.obey(0)

    assert world.group.ledger.incidents[0].message == "pod 1 was not heard for 10 s"


def test_but_what_is_being_saved_is_waited_for() -> None:
    world = World(2, lost_after=60.0)
    world.obey()
    steps(world, 5)
    world.say(0, stopping=True)
    steps(world, 5, Phase.SAVING)
    world.passes(59.0, 1)
    assert world.kind is OrderKind.RUN


def test_what_the_workers_of_the_generation_that_runs_do_is_known(running: World) -> None:
    said = PodActivity(rank=2, phase=Phase.TOKENIZING, detail="1/2 rows", silent_seconds=30.0)
    running.passes(100.0)
    running.say(2, activity=said)
    running.passes(5.0)
    assert list(running.group.at_work())[2] == Pod(2, said, 105.0)
    # What those of an earlier generation do is of no interest: they have to be started anew.
    running.say(2, running=19_999, activity=said)
    assert list(running.group.at_work())[2] == Pod(2, None, 0.0)
    # Nor is a pod whose part is over.
    running.say(2, running=running.reports[0].running)
    running.ends(2)
    assert [pod.number for pod in running.group.at_work()] == [0, 1]


def test_a_silent_pod_is_lost_after_ten_seconds(running: World) -> None:
    running.passes(9.0, 1)
    assert running.kind is OrderKind.RUN
    running.passes(2.0, 1)
    assert running.kind is OrderKind.IDLE
    running.obey(0, 2)

    assert running.incidents == [(FailureClass.PEER_LOST, True)]
    assert running.group.waiting_for == [1]


def test_a_pod_that_comes_back_after_a_break_takes_part_again(running: World) -> None:
    running.passes(11.0, 1)
    running.obey(0, 2)
    # It had not heard that its generation was over.
    assert running.say(1).kind is OrderKind.IDLE
    running.obey()

    assert running.kind is OrderKind.RUN
    assert running.reports[1].running == 20_002


def test_peers_that_notice_a_lost_pod_first_are_not_the_cause(running: World) -> None:
    running.ends(0, FailureClass.PEER_LOST)
    running.ends(2, FailureClass.PEER_LOST)
    running.obey(0, 2)
    assert running.incidents == []
    running.passes(11.0, 1)
    running.obey(0, 2)

    assert running.incidents == [(FailureClass.PEER_LOST, True)]
    assert running.group.ledger.incidents[0].message == "pod 1 was not heard for 10 s"


def test_peers_that_lose_each_other_while_all_pods_live_are_a_failure(running: World) -> None:
    running.ends(0, FailureClass.PEER_LOST)
    running.obey()

    assert running.incidents == [(FailureClass.PEER_LOST, False)]


def test_index_0_itself_is_never_silent(running: World) -> None:
    running.passes(30.0, 0)
    assert running.kind is OrderKind.RUN


def test_a_pod_that_dies_while_it_is_stopped_is_a_loss(running: World) -> None:
    running.say(1, stopping=True)
    running.say(1, running=None, leaving=True)
    running.obey(0, 2)

    assert running.incidents == [(FailureClass.PEER_LOST, True)]
    assert running.group.ledger.incidents[0].message == "pod 1 was stopped"
