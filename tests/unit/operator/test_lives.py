"""What holds in every life of a job, whatever happens to it: played in a small cluster, by fixed seeds."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sft_api.v1alpha1 import RestartsStatus, SFTJobStatus
from sft_operator.decisions.changes import is_finished
from sft_operator.decisions.status import read_status
from tests.unit.operator.lives import Counts, Life
from tests.unit.operator.make import Object
from tests.unit.operator.played.cluster import Violation
from tests.unit.operator.test_reconciler import KEY

HAPPENINGS = 14
SHOWN_LINES = 40
TOLD_SECONDS = 1.5
"""In which the operator has heard of everything."""
# By names of what may happen in a life, how often.
USUAL = {"suspend": 25, "resume": 25, "evict": 12, "crash": 12, "edit": 4, "suspend_and_wait": 3}
ENDS = {"delete_job": 6, "make_again": 4, "fail": 4, "retry": 8}
QUEUE = {
    "preempt": 15,
    "open_queue": 15,
    "give_up": 8,
    "stop": 4,
    "let_go_on": 12,
    "change_queue": 4,
    "delete_job": 3,
}
NODES = {
    "lose_node": 6,
    "find_node": 8,
    "fill": 8,
    "clear": 14,
    "lose_image": 4,
    "find_image": 8,
    "use_quota": 4,
    "free_quota": 8,
    "skew_node": 4,
    "set_clock": 2,
}
HANDS = {
    "delete_in_foreground": 3,
    "leave_behind": 3,
    "delete_child": 6,
    "delete_pod": 6,
    "resize_job": 4,
    "write_status": 6,
    "delete_job_and_suspend": 3,
}
KINDS = {
    "interrupted": {"evict": 12, "crash": 12, "edit": 4},
    "suspended": USUAL,
    "deleted": {**USUAL, "delete_job": 8, "delete_job_and_suspend": 8, "make_again": 4},
    "its operator away or in trouble": {**USUAL, "restart_operator": 10, "refuse_status": 8},
    "failed and tried again": {**USUAL, "fail": 10, "retry": 20},
    "in an API server's trouble": {**USUAL, **ENDS, "trouble": 20, "kill_operator": 20},
    "by several operators": {**USUAL, **ENDS, "freeze_operator": 15, "run_twice": 15, "kill_operator": 5},
    "in a queue": {**USUAL, **QUEUE},
    "in a queue, and in trouble": {**USUAL, **QUEUE, **ENDS, "trouble": 10, "kill_operator": 10, "freeze_operator": 5},
    "beside others on its nodes": {**USUAL, **NODES},
    "under hands": {**USUAL, **HANDS},
    "all of it": {
        **USUAL,
        **ENDS,
        **NODES,
        **HANDS,
        "restart_operator": 6,
        "refuse_status": 4,
        "trouble": 8,
        "kill_operator": 6,
        "freeze_operator": 3,
    },
    "all of it, in a queue": {
        **USUAL,
        **ENDS,
        **NODES,
        **HANDS,
        **QUEUE,
        "restart_operator": 6,
        "trouble": 8,
        "kill_operator": 6,
        "freeze_operator": 3,
    },
}
QUEUED = frozenset(kind for kind in KINDS if "queue" in kind)
Check = Callable[[Life, SFTJobStatus, SFTJobStatus], object]
"""Of a life and two statuses in a row; whatever it returns is what is wrong. Its docstring says what holds."""


def final_states_stay(life: Life, before: SFTJobStatus, after: SFTJobStatus) -> object:
    """What is complete, or has failed, stays so until somebody asks for another try."""
    taken_back = is_finished(before) and after.state != before.state and after.retried == before.retried
    return taken_back and f"{before.state} became {after.state}"


def counts_only_grow(life: Life, before: SFTJobStatus, after: SFTJobStatus) -> object:
    """What was counted stays counted; of failures until somebody asks for another try."""
    was, now = before.restarts, after.restarts
    if was is None:
        return None
    if now is None:
        return "no restarts are told any more"
    falls = now.disruptions < was.disruptions or now.lost_steps < was.lost_steps
    return (falls or (now.failures < was.failures and after.retried == before.retried)) and f"{was} became {now}"


def nothing_is_counted_twice(life: Life, before: SFTJobStatus, after: SFTJobStatus) -> object:
    """No more failures are counted than there were, and no more lost pods than somebody took."""
    told, happened = after.restarts, life.counts
    if told is None:
        return None
    # Times are whole seconds: pods that a suspension took which lasted for less may be counted as lost.
    taken = happened.evictions + 2 * (happened.suspensions + happened.deleted_jobs + happened.others)
    many = told.failures > happened.crashes or told.disruptions > taken
    return many and f"{told} of {happened}"


def used_time_only_grows(life: Life, before: SFTJobStatus, after: SFTJobStatus) -> object:
    """GPU time that was used stays used."""
    was, now = before.goodput, after.goodput
    return was and now and now.gpu_seconds < was.gpu_seconds and f"{was.gpu_seconds} s became {now.gpu_seconds} s"


def progress_only_grows(life: Life, before: SFTJobStatus, after: SFTJobStatus) -> object:
    """Within an attempt the step only grows, and attempts do."""
    if not (before.progress and after.progress) or after.retried != before.retried:
        return None
    was, now = (before.attempt or 0, before.progress.step), (after.attempt or 0, after.progress.step)
    return now < was and f"attempt and step {was} became {now}"


def only_what_somebody_has_to_mend_is_stalled(life: Life, before: SFTJobStatus, after: SFTJobStatus) -> object:
    """Only a job that has failed, over which the operator fails, or that somebody hinders needs somebody; and what
    needs somebody is not on its way."""
    holding = {item.type: item.reason for item in after.conditions if item.status == "True"}
    needed = after.state == "Failed" or holding.get("Stalled") in {"OperatorError", *life.hindered}
    wrong = "Stalled" in holding and ("Reconciling" in holding or not needed)
    return wrong and f"{holding} hold of a job that is {after.state}: {after.message}"


def what_is_suspended_holds_no_gpu(life: Life, before: SFTJobStatus, after: SFTJobStatus) -> object:
    """A run that had begun is suspended once those of its pods have ended that were asked to."""
    asked_before = life.story.seconds - TOLD_SECONDS
    saving = [pod.name for pod in life.nodes.pods if pod.living and pod.asked is not None and pod.asked < asked_before]
    return before.job_ref and after.state == "Suspended" and saving and f"{saving} save still"


def what_is_written_is_what_was_meant(life: Life, before: SFTJobStatus, after: SFTJobStatus) -> object:
    """A patch makes of the status that stood there the one that a look came to."""
    if any(item.reason == "OperatorError" for item in after.conditions):
        return None  # what could not be written stands there in part
    shown = life.operator.picture.memory(KEY).shown
    if shown is None or shown.document != life.status:
        return None  # it was written, and nobody was told so
    return not shown.is_whole and "it is another one"


def words_and_conditions_agree(life: Life, before: SFTJobStatus, after: SFTJobStatus) -> object:
    """Of states that have a condition just that one holds, and it began when it did."""
    named = {"Running", "Suspended", "Complete", "Failed"}
    told = [item for item in after.conditions if item.type in named and item.status == "True"]
    since = {item.type: (item.status, item.last_transition_time) for item in before.conditions}
    moved = [
        item.type for item in after.conditions if _moved(since.get(item.type), item.status, item.last_transition_time)
    ]
    wrong = [item.type for item in told] != [state for state in (after.state,) if state in named]
    return (wrong or moved) and f"{[item.type for item in told]} hold of what is {after.state}, {moved} moved"


def _moved(before: tuple[str, str] | None, status: str, since: str) -> bool:
    return before is not None and (before[0] == status) != (before[1] == since) and before[0] == status


def all_time_is_accounted_for(life: Life, before: SFTJobStatus, after: SFTJobStatus) -> object:
    """What became of the time of the GPUs adds up to all of it."""
    if (told := after.goodput) is None:
        return None
    lost = sum(told.lost_gpu_seconds.model_dump().values()) if told.lost_gpu_seconds else 0
    parts = told.productive_gpu_seconds + told.unsaved_gpu_seconds + lost
    return abs(parts - told.gpu_seconds) > 2 and f"{parts} of {told.gpu_seconds} s are: {told}"


CHECKS: tuple[Check, ...] = (
    final_states_stay,
    counts_only_grow,
    nothing_is_counted_twice,
    used_time_only_grows,
    progress_only_grows,
    only_what_somebody_has_to_mend_is_stalled,
    what_is_suspended_holds_no_gpu,
    what_is_written_is_what_was_meant,
    words_and_conditions_agree,
    all_time_is_accounted_for,
)


def check_status(life: Life, was: Object, now: Object) -> None:
    """Tell what was written in the log of the life, and look at it."""
    before, after = read_status({"status": was}), read_status({"status": now})
    counted = after.restarts and f" ({after.restarts.failures} failures, {after.restarts.disruptions} disruptions)"
    life.story.tell(f"status {before.state} > {after.state}: {(after.message or '')[:110]}{counted or ''}")
    for check in CHECKS:
        if wrong := check(life, before, after):
            raise Violation(f"{' '.join((check.__doc__ or '').split())} But {wrong}.")


def check_end(life: Life) -> None:
    """A job that is left alone ends in the way that it should, stays so, and is quiet from then on."""
    status, counts = read_status({"status": life.status}), life.counts
    if status.state != "Complete" and not (status.state == "Failed" and counts.fatal_failures):
        raise Violation(f"A job that is left alone gets complete. But it is {status.state}: {status.message}.")
    told, happened = status.restarts or RestartsStatus(), (counts.evictions, counts.crashes)
    if counts == Counts(*happened) and (told.disruptions, told.failures) != happened:
        raise Violation(f"Of a run that is only interrupted everything is counted. But {told} of {counts} is.")
    # Nor does what happens afterwards begin it again.
    for happens in (life.suspend, life.delete_job, life.resume):
        happens()
        life.pass_time(3)
    looks, writes = life.operator.looks, life.api.writes
    life.pass_time(30)
    if life.api.writes > writes or life.operator.looks > looks + 5:
        more = f"{life.api.writes - writes} writes in {life.operator.looks - looks} looks followed"
        raise Violation(f"What has ended is left alone. But {more}.")
    for reason, most in (("Complete", 1), ("Suspended", counts.suspensions + 1)):
        if life.api.events[reason] > most:
            raise Violation(f"What happens once is told once. But {reason} was told {life.api.events[reason]} times.")


def make_life(kind: str, seed: int) -> Life:
    queued, sidecars = kind in QUEUED, kind == "beside others on its nodes" and seed % 3 == 0
    return Life(
        seed,
        KINDS[kind],
        on_status=check_status,
        is_queued=queued and seed % 4 > 0,
        has_default_queue=queued,
        has_sidecars=sidecars,
    )


def play_to_the_end(life: Life) -> None:
    """Let things happen to ``life``, and check how it ends; what went wrong is told with what happened before."""
    try:
        life.play(HAPPENINGS)
        check_end(life)
    except Exception as error:
        log = "\n".join(life.story.lines[-SHOWN_LINES:])
        raise AssertionError(f"{error}\n\n{log}") from (None if isinstance(error, Violation) else error)
    finally:
        life.close()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_happens_to_a_job_what_is_told_of_it_holds(kind: str, seed: int) -> None:
    play_to_the_end(make_life(kind, seed))
