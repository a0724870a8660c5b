"""The queue: one run a key at a time, coalesced, delayed, backing off; one key's trouble never stops another."""

from __future__ import annotations

import asyncio
import itertools
import selectors
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from sft_operator.workqueue import RetryLater, WorkQueue

Work = Callable[[str], Awaitable[float | None]]


class _Hurried(selectors.DefaultSelector):
    """Instead of waiting it says that the time is over; its clock shows what would have been waited for."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(0)
        if not found:
            assert timeout is not None, "everything waits for something that will not come"
            self.now += timeout
        return found


def in_no_time(scenario: Coroutine[Any, Any, None]) -> None:
    """Run it on a clock on which only pauses take time, whatever else the machine does."""

    def new_loop() -> asyncio.AbstractEventLoop:
        selector = _Hurried()
        loop = asyncio.SelectorEventLoop(selector)
        loop.time = lambda: selector.now  # type: ignore[method-assign]
        return loop

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(scenario)


async def run(queue: WorkQueue[str], seconds: float) -> None:
    task = asyncio.create_task(queue.run())
    await asyncio.sleep(seconds)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def make(work: Work, concurrency: int = 4, errors: list[Exception] | None = None) -> WorkQueue[str]:
    seen = errors if errors is not None else []
    return WorkQueue(work, concurrency=concurrency, on_error=lambda key, error: seen.append(error), jitter=lambda: 0.5)


def test_many_additions_are_one_run() -> None:
    runs: list[str] = []

    async def work(key: str) -> None:
        runs.append(key)

    async def scenario() -> None:
        queue = make(work)
        for _ in range(100):
            queue.add("a")
        queue.add("b")
        assert len(queue) == 2
        await run(queue, 0.05)
        assert len(queue) == 0

    in_no_time(scenario())
    assert sorted(runs) == ["a", "b"]


def test_a_key_added_while_it_runs_runs_again_afterwards_and_never_beside_itself() -> None:
    running: set[str] = set()
    runs = 0

    async def work(key: str) -> None:
        nonlocal runs
        assert key not in running
        running.add(key)
        runs += 1
        if runs == 1:
            queue.add(key)
            queue.add(key)
        await asyncio.sleep(0.02)
        running.discard(key)

    async def scenario() -> None:
        nonlocal queue
        queue = make(work)
        queue.add("a")
        await run(queue, 0.15)

    queue: WorkQueue[str]
    in_no_time(scenario())
    assert runs == 2


def test_no_more_keys_at_a_time_than_allowed() -> None:
    most = now = 0

    async def work(key: str) -> None:
        nonlocal most, now
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.01)
        now -= 1

    async def scenario() -> None:
        queue = make(work, concurrency=3)
        for number in range(12):
            queue.add(str(number))
        await run(queue, 0.2)

    in_no_time(scenario())
    assert most == 3


def test_the_work_says_when_to_look_again_and_an_event_comes_first() -> None:
    times: list[float] = []

    async def work(key: str) -> float | None:
        times.append(asyncio.get_running_loop().time())
        return {1: 0.05, 2: 60.0}.get(len(times))

    async def scenario() -> None:
        queue = make(work)
        queue.add("a")
        asyncio.get_running_loop().call_later(0.15, queue.add, "a")
        await run(queue, 0.3)

    in_no_time(scenario())
    assert len(times) == 3
    assert times == pytest.approx([0.0, 0.05 * 1.05, 0.15])


def test_errors_back_off_and_do_not_stop_others() -> None:
    runs: dict[str, list[float]] = {"bad": [], "good": []}
    errors: list[Exception] = []

    async def work(key: str) -> None:
        runs[key].append(asyncio.get_running_loop().time())
        if key == "bad":
            raise ValueError("broken")

    async def scenario() -> None:
        queue = make(work, errors=errors)
        queue.add("bad")
        queue.add("good")
        await run(queue, 1.8)

    in_no_time(scenario())
    assert len(runs["good"]) == 1
    assert runs["bad"] == pytest.approx([0.0, 0.5, 1.5])
    assert [str(error) for error in errors] == ["broken"] * 3


def test_the_server_may_ask_for_a_longer_pause() -> None:
    runs = 0

    async def work(key: str) -> None:
        nonlocal runs
        runs += 1
        raise RetryLater(30.0, "429")

    async def scenario() -> None:
        queue = make(work)
        queue.add("a")
        await run(queue, 29.0)

    in_no_time(scenario())
    assert runs == 1


def test_nothing_runs_before_it_is_due() -> None:
    times: list[float] = []

    async def work(key: str) -> float | None:
        times.append(asyncio.get_running_loop().time())
        return 0.1 if len(times) < 3 else None

    async def scenario() -> None:
        queue = WorkQueue(work, concurrency=1, jitter=lambda: 0.0)
        queue.add("a")
        await run(queue, 0.5)

    in_no_time(scenario())
    assert [later - sooner >= 0.1 for sooner, later in itertools.pairwise(times)] == [True, True]


def test_a_key_over_which_the_work_failed_waits_whatever_it_is_added_for() -> None:
    runs: list[str] = []

    async def work(key: str) -> None:
        runs.append(key)
        if key == "bad":
            raise OverflowError("date value out of range")
        if key == "away":
            raise RetryLater(60.0, "the API server cannot answer")

    async def scenario() -> None:
        queue = make(work)
        task = asyncio.create_task(queue.run())
        for _ in range(40):
            for key in ("bad", "away", "good"):
                queue.add(key)
            await asyncio.sleep(0.005)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    in_no_time(scenario())
    assert runs.count("bad") == 1, "half a second lies between two tries"
    assert runs.count("away") == 40, "news may mean that the server answers again"
    assert runs.count("good") == 40


def test_work_that_hangs_for_one_group_leaves_workers_to_the_others() -> None:
    begun: list[tuple[str, float]] = []

    async def work(key: str) -> None:
        begun.append((key, asyncio.get_running_loop().time()))
        await asyncio.sleep(0.0 if key.startswith("quick") else 100.0)

    async def scenario() -> None:
        queue = WorkQueue(work, concurrency=8, group=lambda key: key.partition("/")[0])
        for number in range(30):
            queue.add(f"hangs/{number}")
            queue.add(f"hangs too/{number}")
        for number in range(30):
            queue.add(f"quick/{number}", 10.0)
        await run(queue, 3000.0)

    in_no_time(scenario())
    at_first = [key.partition("/")[0] for key, time in begun if time < 10.0]
    assert 0 < at_first.count("hangs too") <= at_first.count("hangs") <= 5
    assert len(at_first) < 8
    quick = [time for key, time in begun if key.startswith("quick")]
    assert len(quick) == 30
    assert max(quick) < 11.0  # due at 10
    assert len(begun) == 90  # all of them had their turn


def test_one_group_alone_gets_most_workers_and_every_key_its_turn() -> None:
    running, most, done = 0, 0, 0

    async def work(key: int) -> None:
        nonlocal running, most, done
        running += 1
        most = max(most, running)
        await asyncio.sleep(1.0)
        running -= 1
        done += 1

    async def scenario() -> None:
        queue = WorkQueue(work, concurrency=16, group=lambda _: "the only one")
        for key in range(200):
            queue.add(key)
        task = asyncio.create_task(queue.run())
        await asyncio.sleep(200.0 / 11 + 1.0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    in_no_time(scenario())
    assert (most, done) == (11, 200)


def test_keys_that_are_looked_at_again_and_again_while_they_wait_for_long_take_no_more_memory() -> None:
    """As jobs that have ended and go after a week: each is looked at once an hour, and after each listing."""
    runs: Counter[str] = Counter()

    async def work(key: str) -> float:
        runs[key] += 1
        return 3600.0 if key.startswith("ended") else 30.0

    async def scenario() -> None:
        queue = make(work)
        task = asyncio.create_task(queue.run())
        queue.add("trains")
        queue.add("trains too", 10.0)
        for _ in range(25):
            for number in range(200):
                queue.add(f"ended-{number}")
            await asyncio.sleep(120)
        assert len(queue._heap) <= 2 * 200 + 1010
        # None is lost for that.
        await asyncio.sleep(2 * 3600)
        assert {runs[f"ended-{number}"] for number in range(200)} == {26}
        task.cancel()

    in_no_time(scenario())
