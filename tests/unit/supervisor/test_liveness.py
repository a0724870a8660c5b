"""When a group hangs, and when it is only slow: one rule for all processes of all pods."""

from collections.abc import Iterable

import pytest

from sft_api.progress import Activity, Phase
from sft_trainer.supervisor.activity import Said, summarise
from sft_trainer.supervisor.liveness import PASSIVE, Hang, Pod, find_hang, gets_further


class Group:
    """Processes that say what they do, two in each pod, on a clock of their own."""

    def __init__(self, processes: int, *, deadline: int | None = None, median: float | None = 1.0) -> None:
        self.said = {rank: Said(rank, Activity(), 0.0, anything=False) for rank in range(processes)}
        self.deadline, self.median = deadline, median
        self.stepped = 0.0
        self.alone: int | None = None
        """The pod that alone stands still, as it was said last."""

    def say(self, now: float, phase: Phase, detail: str = "", *, step: int = 5, of: Iterable[int] = ()) -> None:
        """All, or those of the ranks ``of``, say that."""
        for rank in of or self.said:
            before, activity = self.said[rank], Activity(phase=phase, detail=detail, step=step)
            further = not before.anything or gets_further(before.activity, activity)
            self.said[rank] = Said(rank, activity, now if further else before.moved)

    def hang(self, now: float) -> str | None:
        numbers = sorted({rank // 2 for rank in self.said})
        pods = [
            Pod(number, summarise([said for rank, said in self.said.items() if rank // 2 == number], now), now)
            for number in numbers
        ]
        found = find_hang(
            pods,
            now,
            step=max(said.activity.step for said in self.said.values()),
            stepped=self.stepped,
            configured=self.deadline,
            median_step_seconds=self.median,
        )
        self.alone = found.pod if found else None
        return found.what if found else None


AT_WORK = [phase for phase in Phase if phase not in (*PASSIVE, Phase.TRAINING)]


# While all train


def test_no_new_step_for_longer_than_the_deadline() -> None:
    group = Group(4, deadline=60)
    group.say(0, Phase.TRAINING)
    assert group.hang(60) is None
    assert group.hang(61) == "no new step for 61 s after step 5 (the deadline is 60 s)"
    assert group.alone is None


def test_a_new_step_starts_the_time_again() -> None:
    group = Group(4, deadline=60)
    group.say(0, Phase.TRAINING, step=5)
    group.say(50, Phase.TRAINING, step=6)
    assert group.hang(110) is None
    assert group.hang(111) is not None


def test_a_step_that_rank_0_reports_is_a_step_of_all() -> None:
    # Words are told once a second, the steps of rank 0 each.
    group = Group(4, deadline=60)
    group.say(0, Phase.TRAINING)
    group.stepped = 59.0
    assert group.hang(119) is None
    assert group.hang(120) is not None


def test_while_training_words_without_a_step_do_not_count() -> None:
    group = Group(2, deadline=60)
    for second in range(61):
        group.say(second, Phase.TRAINING, str(second))
        assert group.hang(second) is None
    group.say(61, Phase.TRAINING, "61")
    assert group.hang(61) is not None


def test_the_deadline_by_itself_is_twenty_median_steps_and_at_least_three_minutes() -> None:
    for median, deadline in ((1.0, 180), (60.0, 1200), (None, 1800)):
        group = Group(2, median=median)
        group.say(0, Phase.TRAINING)
        assert group.hang(deadline) is None
        assert group.hang(deadline + 1) is not None


def test_the_process_that_did_not_end_the_last_step_is_named() -> None:
    group = Group(4, deadline=60)
    group.say(0, Phase.TRAINING, step=5)
    group.say(40, Phase.TRAINING, step=6, of=(0, 1, 2))
    assert group.hang(101) == (
        "no new step for 61 s after step 6 (the deadline is 60 s): rank 3 of pod 1 got no further than step 5"
    )
    assert group.alone == 1


def test_back_in_training_the_time_starts_again() -> None:
    group = Group(2, deadline=60)
    group.say(0, Phase.TRAINING)
    group.say(55, Phase.SAVING)
    group.say(500, Phase.TRAINING)
    assert group.hang(559) is None
    assert group.hang(561) is not None


# In every other phase


@pytest.mark.parametrize("phase", AT_WORK)
def test_other_phases_have_longer_and_any_word_counts(phase: Phase) -> None:
    group = Group(2, deadline=60)
    group.say(0, phase, "this")
    group.say(1700, phase, "this")
    assert group.hang(1700 + 1800) is None
    assert group.hang(1700 + 1801) == (
        f"nothing new for 1801 s in phase {phase} (the limit is 1800 s): rank 0 of pod 0 (this) is silent"
    )


def test_a_deadline_that_is_longer_holds_in_a_slow_phase_too() -> None:
    group = Group(2, deadline=4000)
    group.say(0, Phase.TOKENIZING)
    assert group.hang(4000) is None
    assert group.hang(4001) is not None


@pytest.mark.parametrize(
    ("phase", "details"),
    [
        (Phase.DOWNLOADING, "hf://org/model: {} GiB"),
        (Phase.LOADING, "reading the weights of hf://org/model: {} tensors"),
        (Phase.SAVING, "step 5: {} MiB"),
        (Phase.EVALUATING, "{}/24 batches"),
        (Phase.EXPORTING, "s3://bucket/export: {}/300 tensors"),
    ],
)
def test_what_takes_a_day_is_no_hang_while_it_moves_and_one_when_it_stands_still(phase: Phase, details: str) -> None:
    group = Group(4, deadline=60)
    for done in range(60):
        group.say(done * 1500, phase, details.format(done))
        assert group.hang(done * 1500 + 1499) is None
    # The last process gets no further; the others do, and do not hide it.
    for done in range(60, 62):
        group.say(done * 1500, phase, details.format(done), of=(0, 1, 2))
    said = details.format(59)
    assert group.hang(62 * 1500) == (
        f"nothing new for 4500 s in phase {phase} (the limit is 1800 s): rank 3 of pod 1 ({said}) is silent"
    )


@pytest.mark.parametrize("phase", [Phase.LOADING, None])
def test_a_start_that_hangs_ends_when_the_api_says(phase: Phase | None) -> None:
    # 1,800 s to the first step, whatever a process does meanwhile.
    group = Group(2, median=None)
    if phase is not None:
        group.say(0, phase, step=0)
    assert group.hang(1800) is None
    assert group.hang(1801) is not None


def test_workers_that_never_report() -> None:
    group = Group(4, deadline=60)
    assert group.hang(1800) is None
    group.say(1700, Phase.LOADING, of=(0, 1, 2))
    assert group.hang(1801) == "the workers reported nothing for 1801 s after their start: rank 3 of pod 1"


def test_a_pod_that_starts_no_workers_while_the_others_wait_for_it() -> None:
    waits = summarise([Said(0, Activity(phase=Phase.WAITING), 30.0)], 30.0)
    pods = [Pod(0, waits, 30.0), Pod(1, None, 0.0)]

    def hang(now: float) -> Hang | None:
        return find_hang(pods, now, step=0, stepped=0.0, configured=None, median_step_seconds=None)

    assert hang(1800) is None
    assert hang(1801) == Hang("pod 1 started no workers for 1801 s", 1)


# While some wait for others


def test_who_waits_is_left_out_while_those_it_waits_for_get_further() -> None:
    group = Group(4, median=None)
    group.say(0, Phase.WAITING, of=(0, 1, 3))
    for now in range(0, 20_000, 1000):
        group.say(now, Phase.TOKENIZING, f"{now} rows", of=(2,))
        assert group.hang(now + 999) is None
    # Then it falls silent as well.
    assert group.hang(19_000 + 1801) == (
        "nothing new for 1801 s in phase Tokenizing (the limit is 1800 s): rank 2 of pod 1 (19000 rows) is silent"
    )


def test_who_says_again_and_again_that_it_waits_hides_nobody() -> None:
    group = Group(4, deadline=60)
    group.say(0, Phase.SAVING, "step 5: 12 MiB", of=(3,))
    for second in range(1801):
        group.say(second, Phase.WAITING, "for the other processes", of=(0, 1, 2))
        assert group.hang(second) is None
    assert group.hang(1801) == (
        "nothing new for 1801 s in phase Saving (the limit is 1800 s): rank 3 of pod 1 (step 5: 12 MiB) is silent"
    )


def test_where_all_wait_for_one_another_the_last_one_is_named() -> None:
    group = Group(4, deadline=60)
    group.say(0, Phase.WAITING, "for the others")
    group.say(100, Phase.TOKENIZING, of=(2,))
    group.say(200, Phase.WAITING, "for the others", of=(2,))
    for second in range(200, 801):
        group.say(second, Phase.WAITING, "for the others")
        assert group.hang(second) is None
    assert group.hang(801) == (
        "nothing new for 601 s in phase Waiting (the limit is 600 s): all wait for one another, "
        "rank 2 of pod 1 (for the others) since last"
    )


@pytest.mark.parametrize(
    ("deadline", "median", "limit"),
    [(None, None, 600), (60, None, 600), (4000, None, 4000), (None, 1.0, 600), (None, 60.0, 1200)],
)
def test_what_all_do_together_at_once_has_a_limit_of_its_own(
    deadline: int | None, median: float | None, limit: int
) -> None:
    # Ten minutes, or the deadline where it is known and longer: no half hour for a group that does not form.
    group = Group(4, deadline=deadline, median=median)
    group.say(0, Phase.WAITING, "for the other processes, to form a group")
    assert group.hang(limit) is None
    assert (hang := group.hang(limit + 1)) is not None
    assert f"(the limit is {limit} s): all wait for one another, rank " in hang
    assert hang.endswith("(for the other processes, to form a group) since last")


def test_another_word_of_all_starts_their_time_again() -> None:
    group = Group(4, median=None)
    group.say(0, Phase.WAITING, "for the other processes")
    group.say(500, Phase.WAITING, "for the other processes, to form a group")
    assert group.hang(1100) is None
    assert group.hang(1101) is not None


def test_a_step_waits_for_those_that_still_save() -> None:
    # Given processes that train on, whose step waits for rank 0, which still sends what the others do not have to
    group = Group(4, deadline=60)
    group.say(0, Phase.TRAINING)
    for now in range(0, 20_000, 1000):
        group.say(now, Phase.SAVING, f"{now} MiB", of=(0,))
        assert group.hang(now + 999) is None
    # When it stands still, it is the one that hangs
    assert (hang := group.hang(21_000)) is not None
    assert "rank 0 of pod 0" in hang


def test_workers_that_have_ended_well_are_not_waited_for() -> None:
    group = Group(2, deadline=60)
    group.say(0, Phase.COMPLETE, of=(1,))
    group.say(4000, Phase.EXPORTING, of=(0,))
    assert group.hang(5000) is None
    assert find_hang([], 5000, step=0, stepped=0.0, configured=60, median_step_seconds=None) is None
