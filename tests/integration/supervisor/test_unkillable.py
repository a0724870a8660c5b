"""Workers that survive SIGKILL, as what is stuck in the kernel does, keep no pod from its last words."""

import signal
import time

from sft_api.failures import FailureClass

from .pods import Group


def test_a_worker_that_cannot_be_killed_ends_its_pod_which_tells_all_it_knows(group: Group) -> None:
    # Given a run that failed before, and of which a worker now neither goes on nor can be killed
    group.launch, group.processes, group.steps = "unkillable", 2, 10_000
    group.faults = [
        {"rank": 1, "start": 1, "step": 1, "do": "exit 1"},
        {"rank": 0, "start": 2, "step": 2, "do": "hang"},
        {"rank": 1, "start": 2, "step": 2, "do": "exit 1"},
    ]
    pod = group.start(SURVIVES_SECONDS="1")

    assert pod.wait() == 33
    assert "a worker survived SIGKILL for 1 s: it is stuck in the kernel" in pod.termination.message
    # Nobody may have read the reports.
    assert (pod.termination.attempt, pod.termination.step) == (2, 2)
    assert [incident.failure for incident in pod.termination.incidents] == [FailureClass.WORKER_CRASHED]
    assert pod.termination.spent is not None


def test_a_pod_that_was_asked_to_stop_leaves_such_a_worker_before_the_grace_time_ends(group: Group) -> None:
    group.launch, group.steps = "unkillable", 10_000
    group.run_policy = {"terminationGracePeriodSeconds": 5}
    group.faults = [{"rank": 0, "start": 1, "step": 2, "do": "hang"}]
    pod = group.start(SURVIVES_SECONDS="60")
    pod.wait_for_step(2)
    begin = time.monotonic()
    pod.signal(signal.SIGTERM)

    assert pod.wait() == 30
    # After four and a half, on a quiet machine; in no case after the minute for which it is waited for otherwise.
    assert 4.4 < time.monotonic() - begin < 50
    assert pod.termination.failure is FailureClass.INTERRUPTED
    assert "asked to stop; a worker had not ended" in pod.termination.message
