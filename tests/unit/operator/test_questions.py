"""When what is asked about a job, and what the answers change."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, cast

import pytest

from sft_api.numbers import Numbers
from sft_api.progress import Progress
from sft_api.v1alpha1 import SFTJobStatus
from sft_api.v1alpha1.status import State
from sft_operator.cluster.asking import Asking
from sft_operator.cluster.client import ApiError, Cluster
from sft_operator.cluster.progress_client import ProgressClient, UnreadableReport
from sft_operator.cluster.store_removal import PlaceRemover
from sft_operator.config import StoreSettings
from sft_operator.decisions.questions import (
    Asked,
    ask_kueue,
    ask_trainer,
    events_read,
    kueue_answered,
    read_events,
    trainer_answered,
)
from sft_operator.decisions.queue import not_stopped
from sft_operator.decisions.result import AskKueue, AskTrainer, Question, ReadEvents, ReadNamespace, RemovePlace
from sft_operator.decisions.spec import read_spec, run_terms
from sft_operator.metrics import OperatorMetrics
from sft_operator.names import PLACE_FINALIZER, QUEUE_LABEL, UID_LABEL
from sft_operator.picture.memory import Memory, PlaceRemoval, RemovalTurn
from sft_operator.picture.observed import Manifest, Observed, Warning
from sft_operator.picture.picture import Key, Picture
from sft_operator.picture.workload import Queueing
from tests.unit.operator.make import (
    NOW,
    at,
    child_manifest,
    job_manifest,
    make_child,
    make_pod,
    make_queueing,
    pod_manifest,
    running,
    workload_manifest,
)
from tests.unit.operator.test_reconciler import KEY, SETTINGS

WARNING = (Warning("Job/tulu", "FailedCreate", "no"),)


def reads(pods: Callable[[int], int], seconds: int) -> list[float]:
    """When events are read of a job of two pods, of which ``pods(second)`` are there, looked at every second."""
    memory, times = Memory("sft-uid"), []
    for second in range(seconds):
        present = tuple(make_pod(index, phase="Pending", node=None) for index in range(pods(second)))
        asked = read_events(
            memory,
            Observed(job=make_child(), pods=present),
            SFTJobStatus(),
            pods_wanted=2,
            now=at(second),
            clock=float(second),
        )
        memory = asked.memory
        if asked.question:
            times.append(float(second))
            memory = events_read(memory, WARNING)
    return times


def test_what_does_not_move_is_read_ever_more_rarely() -> None:
    assert reads(lambda second: 1, 100) == [2, 6, 14, 30, 60, 90]


def test_pods_that_come_and_go_do_not_have_events_read_all_the_time() -> None:
    """Each is refused by its node, or evicted, as soon as it was made."""
    times = reads(lambda second: 2 if second % 4 == 3 else 1, 300)

    assert times[0] == 2
    assert len(times) < 15
    assert all(later - earlier >= 28 for earlier, later in itertools.pairwise(times[5:]))


def test_after_a_quiet_time_they_are_read_at_once_again() -> None:
    times = reads(lambda second: 2 if 70 <= second < 200 else 1, 210)

    assert times == [2, 6, 14, 30, 60, 202, 206]


def test_events_that_are_being_read_are_not_asked_for_twice() -> None:
    waiting = Observed(job=make_child())
    first = read_events(Memory("u"), waiting, SFTJobStatus(), pods_wanted=2, now=NOW, clock=0)
    second = read_events(first.memory, waiting, SFTJobStatus(), pods_wanted=2, now=NOW, clock=2)
    third = read_events(second.memory, waiting, SFTJobStatus(), pods_wanted=2, now=NOW, clock=60)

    assert first.question is None
    assert second.question == third.question == ReadEvents("u", (make_child().uid,))
    assert (second.wait, third.wait) == (None, None), "the answer is what to wait for, however long it takes"


def test_what_another_operator_told_is_not_taken_back_before_its_events_were_read_but_not_for_ever() -> None:
    waiting, told = Observed(job=make_child()), SFTJobStatus(state="Starting")

    first = read_events(Memory("u"), waiting, told, pods_wanted=2, now=NOW, clock=100)
    assert first.question is not None
    assert first.holds_words
    assert first.wait == 10

    read = read_events(events_read(first.memory, WARNING), waiting, told, pods_wanted=2, now=NOW, clock=101)
    assert (read.holds_words, read.memory.warnings) == (False, WARNING)
    assert not read_events(first.memory, waiting, told, pods_wanted=2, now=NOW, clock=111).holds_words


def trainer(memory: Memory, *, clock: float, state: str = "Running", followed: int = 1, **fields: Any) -> AskTrainer:
    previous = SFTJobStatus.model_validate({"state": state})
    asked = ask_trainer(memory, running(**fields), previous, SETTINGS, clock=clock, followed=followed)
    assert isinstance(asked.question, AskTrainer)
    return asked.question


def test_the_trainer_is_asked_at_once_and_then_at_its_pace() -> None:
    first = trainer(Memory("u"), clock=100)
    answered = trainer_answered(Memory("u"), first, Progress(), NOW, clock=100)

    assert first.due == 100
    assert trainer(answered, clock=101).due == 100 + SETTINGS.poll_seconds
    assert trainer(answered, clock=101, state="Starting").due == 100 + SETTINGS.poll_seconds_starting
    assert trainer(answered, clock=101, followed=10_000).due == 125, "no report gets older than that"


def test_the_next_pod_is_asked_as_soon_as_it_has_started_however_many_jobs_there_are() -> None:
    """The run goes on: that is no figure, which may be half a minute old."""

    def look(memory: Memory, seen: Observed, *, clock: float) -> Asked:
        previous = SFTJobStatus.model_validate({"state": "Recovering"})
        return ask_trainer(memory, seen, previous, SETTINGS, clock=clock, followed=1000)

    # Given a trainer that was asked, and is asked again in 25 seconds
    answered = trainer_answered(Memory("u"), trainer(Memory("u"), clock=100), Progress(), NOW, clock=100)
    planned = look(answered, running(), clock=101)
    assert isinstance(planned.question, AskTrainer)
    assert planned.question.due == 125

    # When its pod is lost, and the next one has started
    lost = look(planned.memory, running(pods=()), clock=110)
    started = look(lost.memory, running(), clock=170)

    assert isinstance(started.question, AskTrainer)
    assert started.question.due <= 170


def test_what_is_planned_is_put_off_by_no_look_and_comes_sooner_when_people_look() -> None:
    planned = replace(Memory("u"), polled_at=150.0 - SETTINGS.poll_seconds, poll_due=150.0)

    assert trainer(planned, clock=149).due == 150
    assert trainer(planned, clock=170).due == 150, "it is being asked"
    assert trainer(planned, clock=141, state="Recovering").due <= 145


def test_what_was_planned_while_a_job_started_is_asked_at_the_pace_of_one_that_trains() -> None:
    answered = trainer_answered(Memory("u"), trainer(Memory("u"), clock=100), Progress(), NOW, clock=100)
    starting = SFTJobStatus.model_validate({"state": "Starting"})
    planned = ask_trainer(answered, running(), starting, SETTINGS, clock=100, followed=1).memory

    assert trainer(planned, clock=101).due == 100 + SETTINGS.poll_seconds


def test_a_pod_that_does_not_answer_is_known_since_it_was_first_asked_in_vain() -> None:
    question = trainer(Memory("u"), clock=0)
    once = trainer_answered(Memory("u"), question, None, at(5), clock=100)
    twice = trainer_answered(once, question, None, at(50), clock=100)
    other = trainer_answered(twice, replace(question, pod_uid="another"), None, at(60), clock=100)

    assert twice.unanswered is not None
    assert twice.unanswered.since == at(5)
    assert other.unanswered is not None
    assert other.unanswered.since == at(60)
    assert trainer_answered(other, question, Progress(), at(70), clock=100).unanswered is None


@pytest.mark.parametrize(("followed", "pauses"), [(1, [1, 2, 4, 4]), (1000, [25, 25, 25, 25])])
def test_a_pod_that_has_not_reported_yet_is_asked_again_soon_and_ever_more_rarely(
    followed: int, pauses: list[float]
) -> None:
    memory, clock, found = Memory("u"), 100.0, []

    def asked(state: State = "Starting") -> AskTrainer:
        question = ask_trainer(
            memory, running(), SFTJobStatus(state=state), SETTINGS, clock=clock, followed=followed
        ).question
        assert isinstance(question, AskTrainer)
        return question

    for _ in pauses:
        memory = trainer_answered(memory, asked(), None, at(clock), clock=clock)
        found.append(asked().due - clock)
        clock = asked().due
    assert found == pauses
    # One that trains, as an operator hears that has just begun, and one that has reported before.
    once = memory = trainer_answered(Memory("u"), asked("Running"), None, NOW, clock=clock)
    assert asked("Running").due - clock == pauses[0]
    memory = trainer_answered(
        trainer_answered(once, asked(), Progress(), NOW, clock=clock), asked(), None, NOW, clock=clock
    )
    assert asked().due - clock == max(SETTINGS.poll_seconds_starting, pauses[0])


@pytest.mark.parametrize("pods", [(), (make_pod(0, waiting=("ContainerCreating", ""), phase="Pending"),)])
def test_nobody_is_asked_while_there_is_nobody(pods: tuple[Any, ...]) -> None:
    asked = ask_trainer(Memory("u"), running(pods=pods), SFTJobStatus(), SETTINGS, clock=0, followed=1)

    assert asked.question is None


def test_of_a_job_that_runs_again_nothing_has_lasted_that_was_so_while_it_rested() -> None:
    """Somebody lets go on what the user has suspended: that its Workload was stopped long ago stops nothing late."""
    terms = run_terms(read_spec(job_manifest(labels={QUEUE_LABEL: "gpus"}, suspend=True)))
    stopped = make_queueing(workload=workload_manifest(active=False, marked=True)).workload
    memory, told = Memory("u"), SFTJobStatus(state="Suspended")

    for seconds, suspended in ((0, True), (300, True), (310, False)):
        child = make_child(suspend=suspended, queue="gpus")
        asked = ask_kueue(memory, terms, Observed(job=child), told, clock=seconds)
        assert isinstance(asked.question, AskKueue)
        said = Queueing(at(seconds), at(seconds), stopped)
        memory = kueue_answered(asked.memory, asked.question, said, child, clock=seconds)
        assert memory.queueing is not None
        assert memory.queueing.since == (NOW if suspended else at(310))

    assert not_stopped(Observed(job=make_child(queue="gpus"), queueing=memory.queueing)) is None


def test_what_another_operator_told_of_a_queue_is_not_taken_back_before_kueue_was_asked_but_not_for_ever() -> None:
    """An operator that begins has thousands of questions at once."""
    waits = make_child(suspend=True, queue="gpus")
    terms = run_terms(read_spec(job_manifest(labels={QUEUE_LABEL: "gpus"})))

    def asked(memory: Memory, told: SFTJobStatus, clock: float) -> Asked:
        return ask_kueue(memory, terms, Observed(job=waits), told, clock=clock)

    new, told = SFTJobStatus(), SFTJobStatus(state="Queued")
    first = asked(Memory("u"), told, 100)
    assert isinstance(first.question, AskKueue)

    # It is stopped, or goes on, as if Kueue had nothing to say, after half a second
    assert (first.holds_changes, first.wait) == (True, 0.5)
    later = asked(first.memory, told, 101)
    assert (later.holds_changes, later.holds_words, later.wait) == (False, True, 9)
    assert not asked(first.memory, told, 110).holds_words
    assert not asked(asked(Memory("u"), new, 100).memory, new, 101).holds_words

    # Later questions hold nothing up: what was answered before is as good
    answered = kueue_answered(first.memory, first.question, Queueing(NOW, NOW), waits, clock=101)
    second = asked(answered, told, 103)
    assert not asked(second.memory, told, 104).holds_words


class Api:
    """Answers with an error."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    async def scan(self, *_: Any, **__: Any) -> int:
        raise self.error


class Pods:
    """What the supervisors answer, one after the other."""

    def __init__(self, *answers: Exception | Progress) -> None:
        self.answers = list(answers)

    async def read(self, **_: Any) -> Progress:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            UnreadableReport("training.step: not a number"),
            "the report of pod tulu-0-aaaaa cannot be read: training.step",
        ),
        (
            OverflowError("date value out of range"),
            "the progress cannot be read: OverflowError: date value out of range",
        ),
    ],
)
def test_a_report_that_cannot_be_read_is_said_on_the_job_until_one_can(error: Exception, said: str) -> None:
    async def scenario() -> None:
        asking, picture, again = asking_about_one_job(pods=Pods(error, Progress()))
        asking.put(KEY, [QUESTION])
        await until(lambda: bool(again))
        assert picture.observed(KEY).unreadable[0].startswith(said)
        assert picture.memory(KEY).unanswered is not None

        asking.put(KEY, [replace(QUESTION, due=1.0)])
        await until(lambda: not picture.observed(KEY).unreadable)
        assert picture.memory(KEY).report is not None

    asyncio.run(asyncio.wait_for(scenario(), 30))


@pytest.mark.parametrize(
    "error", [ApiError(429, "TooManyRequests", "slow down"), ApiError(403, "", "no"), TimeoutError()]
)
def test_events_that_cannot_be_read_are_answered_all_the_same(error: Exception) -> None:
    async def scenario() -> None:
        asking, picture, again = asking_about_one_job(api=Api(error))
        picture.remember(KEY, replace(picture.memory(KEY), warnings=WARNING))
        asking.put(KEY, [ReadEvents("sft-uid", ("a",))])
        await until(lambda: bool(again))
        assert picture.memory(KEY).warnings == ()

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_a_question_goes_on_while_looks_have_it_and_is_dropped_when_they_do_not() -> None:
    async def scenario() -> None:
        pods = Pods(*[Progress()] * 9)
        asking, _, again = asking_about_one_job(pods=pods)
        later = asyncio.get_running_loop().time() + 3600

        for _ in range(3):
            asking.put(KEY, [QUESTION])  # asked once, however many looks there are before the answer
        await until(lambda: bool(again))
        asking.put(KEY, [replace(QUESTION, due=later)])
        asking.put(KEY, [])
        await asyncio.sleep(0)

        assert len(pods.answers) == 8
        assert asking.followed == 0

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_an_answer_about_an_earlier_job_of_the_name_is_not_taken_for_this_one() -> None:
    async def scenario() -> None:
        asking, picture, again = asking_about_one_job(pods=Pods(Progress()))
        picture.store("SFTJob", job_manifest(uid="another"))
        picture.remove("SFTJob", job_manifest())
        asking.put(KEY, [QUESTION])
        await until(lambda: bool(again))
        assert picture.memory(KEY).report is None

    asyncio.run(asyncio.wait_for(scenario(), 30))


@pytest.mark.parametrize(
    "question", [ReadEvents("sft-uid", ("a",)), ReadNamespace("sft-uid"), AskKueue("sft-uid", ("a",), "job-uid", False)]
)
def test_what_many_jobs_ask_of_the_api_server_leaves_connections_for_others(question: Question) -> None:
    """For the Lease above all, when an operator begins among jobs that wait."""

    class Slow:
        running = most = 0

        async def scan(self, *_: Any, **__: Any) -> Any:
            self.running += 1
            self.most = max(self.most, self.running)
            for _ in range(3):
                await asyncio.sleep(0)
            self.running -= 1
            return [], 1

        get = list = scan

    async def scenario() -> int:
        slow = Slow()
        asking, _, again = asking_about_one_job(api=slow)
        for number in range(300):
            asking.put(Key("team", f"waits-{number}"), [question])
        await until(lambda: len(again) == 300)
        return slow.most

    assert asyncio.run(asyncio.wait_for(scenario(), 30)) <= 20


def test_a_job_of_which_there_is_no_end_of_events_is_explained_by_some_and_keeps_nobody_from_reading_his(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Endless:
        async def scan(self, _: str, __: str, take: Callable[[Manifest], None], **___: Any) -> int:
            while True:
                take({"type": "Warning", "reason": "FailedMount", "involvedObject": {"kind": "Pod", "name": "mine"}})
                await asyncio.sleep(0)

    async def scenario() -> tuple[Warning, ...]:
        endless, picture, again = asking_about_one_job(api=Endless())
        endless.put(KEY, [ReadEvents("sft-uid", ("a",))])
        await until(lambda: bool(again))
        return picture.memory(KEY).warnings

    monkeypatch.setattr("sft_operator.cluster.asking._EVENTS_SECONDS", 0.01)

    warnings = asyncio.run(asyncio.wait_for(scenario(), 30))

    assert {(warning.subject, warning.reason) for warning in warnings} == {("Pod/mine", "FailedMount")}


QUESTION = AskTrainer("sft-uid", "tulu-0-aaaaa", "pod-0", "10.0.0.1", due=0.0)


class Jobs:
    """Answers with one Job."""

    def __init__(self, answer: dict[str, Any] | ApiError) -> None:
        self.answer = answer
        self.owner: dict[str, Any] | None = AS_ASKED

    async def get(self, kind: str, namespace: str, name: str) -> dict[str, Any]:
        assert (namespace, name) == ("team", "tulu")
        if kind == "SFTJob":
            if self.owner is None:
                raise ApiError(404, "NotFound", "gone")
            return self.owner
        if isinstance(self.answer, ApiError):
            raise self.answer
        return self.answer


def going(*finalizers: str, policy: str = "Delete", deleted: bool = True) -> dict[str, Any]:
    """An SFTJob whose place is to go with it."""
    made = job_manifest(deletionPolicy=policy)
    made["metadata"]["finalizers"] = [PLACE_FINALIZER, *finalizers]
    made["metadata"] |= {"deletionTimestamp": "2026-01-01T00:00:00Z"} if deleted else {}
    made["metadata"]["resourceVersion"] = "6"
    return made


AS_ASKED = going()
REMOVAL = RemovePlace("sft-uid", "s3://platform/sft/team/tulu", "tulu", "team", Numbers({}), 0)


class Remover:
    """Removes a place in one turn."""

    async def turn(self, wanted: RemovePlace, instead: Callable[[], Awaitable[RemovalTurn | None]]) -> RemovalTurn:
        return await instead() or RemovalTurn("gone")


@pytest.mark.parametrize(
    ("answer", "state"),
    [
        ({"metadata": {"labels": {UID_LABEL: "sft-uid"}}}, "kept"),
        ({"metadata": {"labels": {UID_LABEL: "another"}}}, "gone"),
        ({"metadata": {"labels": {UID_LABEL: "sft-uid"}, "deletionTimestamp": "2026-01-01T00:00:00Z"}}, "gone"),
        (child_manifest(), "gone"),
        (ApiError(404, "NotFound", "gone"), "gone"),
        (ApiError(500, "InternalError", "no answer"), None),
    ],
    ids=["left behind", "of another", "going", "still ours", "gone", "nobody knows"],
)
def test_the_place_of_a_job_that_was_left_behind_is_not_removed(
    answer: dict[str, Any] | ApiError, state: str | None
) -> None:
    """``--cascade=orphan``: it has lost the owner by which it would be seen, and saves on."""
    removal = removal_after(answer)

    assert (removal.last and removal.last.state) == state
    assert (removal.stuck_since is None) == (state is not None)


@pytest.mark.parametrize(
    "owner",
    [going(policy="Keep"), going("orphan"), going(deleted=False), None],
    ids=["kept after all", "its children stay after all", "not going", "gone"],
)
def test_nothing_is_removed_that_is_to_stay_though_no_watch_has_told_that_yet(owner: dict[str, Any] | None) -> None:
    """A watch may be silent for more than a minute before that is noticed."""
    removal = removal_after(ApiError(404, "NotFound", "gone"), owner=owner)

    assert (removal.last, removal.turns, removal.stuck_since) == (None, 1, None)


def test_what_is_heard_before_a_turn_is_looked_at_during_it() -> None:
    """When the watch tells it, nothing of it is new."""

    class Slow(Remover):
        async def turn(self, wanted: RemovePlace, instead: Callable[[], Awaitable[RemovalTurn | None]]) -> RemovalTurn:
            assert await instead() is None
            await asyncio.Event().wait()
            raise AssertionError

    async def scenario() -> None:
        asking, picture, again = asking_about_one_job(api=Jobs(ApiError(404, "NotFound", "gone")), remover=Slow())
        asking.put(KEY, [REMOVAL])
        await until(lambda: bool(again))
        assert (asking.followed, picture.store("SFTJob", AS_ASKED)) == (1, None)
        asking.put(KEY, [])

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_who_waits_for_others_places_to_be_removed_is_asked_when_its_turn_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of many jobs that go, the last ones wait for minutes."""
    ends = threading.Event()
    begun: list[RemovePlace] = []

    def turn(_: PlaceRemover, wanted: RemovePlace, stop: threading.Event) -> RemovalTurn:
        begun.append(wanted)
        ends.wait(30)
        return RemovalTurn("gone")

    monkeypatch.setattr(PlaceRemover, "_turn", turn)
    jobs, remover = Jobs(ApiError(404, "NotFound", "gone")), PlaceRemover(StoreSettings(uri="s3://platform/sft"))

    async def scenario() -> list[PlaceRemoval | None]:
        waiting = [asking_about_one_job(api=jobs, remover=remover)[:2] for _ in range(5)]
        for asking, picture in waiting:
            picture.remember(KEY, Memory("sft-uid"))
            asking.put(KEY, [REMOVAL])
        # Given that the places of two are removed
        await until(lambda: len(begun) == 2)
        # When the others are set to Keep
        jobs.owner = going(policy="Keep")
        ends.set()
        await until(lambda: all(picture.memory(KEY).removal for _, picture in waiting))
        return [picture.memory(KEY).removal for _, picture in waiting]

    states = [removal and removal.last for removal in asyncio.run(asyncio.wait_for(scenario(), 30))]

    assert states == [RemovalTurn("gone")] * 2 + [None] * 3


@pytest.mark.parametrize(
    ("answer", "state"),
    [
        ({"metadata": {"labels": {UID_LABEL: "sft-uid"}}}, "kept"),
        ({"metadata": {"labels": {UID_LABEL: "another"}}}, None),
        (ApiError(500, "InternalError", "no answer"), None),
    ],
    ids=["left behind", "of another", "nobody knows"],
)
def test_while_pods_live_on_it_is_only_looked_whether_it_was(
    answer: dict[str, Any] | ApiError, state: str | None
) -> None:
    removal = removal_after(answer, looks=True)

    assert (removal.last and removal.last.state) == state
    assert (removal.turns, removal.stuck_since) == (1, None), "the ten minutes of a store that is away do not begin"


def removal_after(
    answer: dict[str, Any] | ApiError, *, looks: bool = False, owner: dict[str, Any] | None = AS_ASKED
) -> PlaceRemoval:
    """How far the removal of a place has come after one question, where ``answer`` is the Job that the API server has,
    and ``owner`` its SFTJob."""

    async def scenario() -> PlaceRemoval:
        jobs = Jobs(answer)
        jobs.owner = owner
        asking, picture, _ = asking_about_one_job(api=jobs, remover=Remover())
        picture.remember(KEY, Memory("sft-uid"))
        asking.put(KEY, [replace(REMOVAL, looks=looks)])
        await until(lambda: picture.memory(KEY).removal is not None)
        removal = picture.memory(KEY).removal
        assert removal is not None
        return removal

    return asyncio.run(asyncio.wait_for(scenario(), 30))


def asking_about_one_job(
    *, pods: Any = None, api: Any = None, remover: Any = None
) -> tuple[Asking, Picture, list[Key]]:
    """What asks, the picture that it keeps, and the keys that are to be looked at again."""
    picture = Picture()
    again: list[Key] = []
    for kind, manifest in (("SFTJob", job_manifest()), ("Job", child_manifest()), ("Pod", pod_manifest(0))):
        picture.store(kind, manifest)
    metrics = OperatorMetrics(picture.manifests, lambda: 0)
    asking = Asking(
        cast(Cluster, api),
        picture,
        cast(ProgressClient, pods),
        None,
        cast(PlaceRemover, remover),
        metrics,
        look_again=again.append,
        now=lambda: NOW,
    )
    return asking, picture, again


async def until(done: Callable[[], bool]) -> None:
    while not done():
        await asyncio.sleep(0)
