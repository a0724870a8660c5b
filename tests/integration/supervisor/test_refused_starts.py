"""A store that refuses when a run is started again that it took something of before: waited for, and told."""

import signal

import pytest

from sft_api.failures import FailureClass
from sft_api.progress import Phase
from sft_api.trainer_config import BEGUN_FILE

from .pods import Group, Pod, wait_for


@pytest.fixture
def endless(group: Group) -> Group:
    group.steps = 10_000
    return group


def refuse(group: Group, failure: str = "AccessDenied,13") -> None:
    """From now on the store lets no start in."""
    (group.folder / "refused").write_text(failure)


def let_in(group: Group) -> None:
    (group.folder / "refused").unlink()
    group.shorten(1)


def wait_for_outage(pod: Pod) -> None:
    wait_for(lambda: pod.progress.training.storage_outage is not None, pod)


def test_a_crash_while_the_key_is_revoked_is_waited_out(endless: Group) -> None:
    pod = endless.start()
    step = pod.wait_for_step(3).training.step

    refuse(endless)
    endless.kill_worker(0)
    wait_for_outage(pod)
    wait_for(lambda: pod.progress.training.phase is Phase.WAITING, pod)
    progress = pod.progress

    outage = progress.training.storage_outage
    assert outage is not None
    assert (outage.failure, outage.message) == (FailureClass.ACCESS_DENIED, "the store says AccessDenied")
    assert (outage.ends - outage.since).total_seconds() == 3600
    assert progress.training.phase_detail == "for the store"
    assert (progress.training.attempt, progress.training.step >= step) == (1, True)
    assert progress.training.checkpoints.latest is not None
    # The kill alone is an incident.
    assert [incident.failure for incident in progress.incidents] == [FailureClass.WORKER_CRASHED]
    assert "nothing can be saved since " in pod.log
    let_in(endless)
    assert pod.wait() == 0


def test_at_the_first_start_the_same_answer_ends_the_run_with_its_code(endless: Group) -> None:
    refuse(endless, "StorageFull,15")
    pod = endless.start()

    assert pod.wait() == 15
    assert pod.termination.message == "the store says StorageFull"


def test_a_store_that_never_lets_the_run_in_again_ends_it_at_its_deadline(endless: Group) -> None:
    endless.run_policy = {"storageDeadlineSeconds": 1}
    pod = endless.start()
    step = pod.wait_for_step(3).training.step

    refuse(endless, "StorageNotFound,14")
    endless.kill_worker(0)

    assert pod.wait() == 19
    end = pod.termination
    assert end.failure is FailureClass.STORAGE_DEADLINE_EXCEEDED
    assert end.message.startswith("nothing could be saved for ")
    assert "runPolicy.storageDeadlineSeconds is 1; the last answer was: the store says StorageNotFound" in end.message
    assert (end.attempt, end.step >= step, len(end.checkpoints)) == (1, True, 1)


def test_an_index_0_that_was_replaced_meanwhile_learns_from_its_members_that_it_is_an_outage(endless: Group) -> None:
    endless.nodes = 2
    first, second = endless.start_all()
    first.wait_for_step(3)

    refuse(endless)
    first.signal(signal.SIGKILL)
    first.wait()
    again = endless.start(0)
    wait_for_outage(again)
    assert second.process.poll() is None

    let_in(endless)
    assert [again.wait(), second.wait()] == [0, 0]


def test_pods_that_are_all_new_know_of_those_before_them_what_the_operator_tells_them(endless: Group) -> None:
    first = endless.start()
    first.wait_for_step(3)
    refuse(endless)
    first.signal(signal.SIGKILL)
    first.wait()
    assert endless.start().wait() == 13

    (endless.folder / BEGUN_FILE).write_text("another-uid")
    assert endless.start().wait() == 13

    (endless.folder / BEGUN_FILE).write_text("uid-1")
    told = endless.start()
    wait_for_outage(told)
    let_in(endless)
    assert told.wait() == 0
