"""A queue of keys to look at: each key once at a time, coalesced, with delays and back-off. Knows nothing else."""

import asyncio
import heapq
import itertools
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

from .decisions.pauses import doubled

KeyType = TypeVar("KeyType", bound=Hashable)

FIRST_BACKOFF_SECONDS = 0.5
LAST_BACKOFF_SECONDS = 120.0
_MOST_OUTDATED = 1000
"""Entries of the heap that count no more, beyond as many as there are keys: waits may last an hour, and a key that is
looked at each minute meanwhile leaves one each time."""


class RetryLater(Exception):
    """Raised by the work to be run again after ``seconds`` at least; the back-off may make it longer."""

    def __init__(self, seconds: float, why: str) -> None:
        super().__init__(why)
        self.seconds = seconds


class WorkQueue(Generic[KeyType]):
    """``work`` runs for every key that is added; it returns the seconds after which to run again, or None."""

    def __init__(
        self,
        work: Callable[[KeyType], Awaitable[float | None]],
        *,
        concurrency: int,
        on_error: Callable[[KeyType, Exception], None] = lambda key, error: None,
        jitter: Callable[[], float] = random.random,
        group: Callable[[KeyType], Hashable] | None = None,
    ) -> None:
        """Of ``concurrency`` workers no ``group`` of keys gets more than twice as many as it leaves to others."""
        self._work = work
        self._concurrency = concurrency
        self._on_error = on_error
        self._jitter = jitter
        self._group = group or (lambda key: key)
        self._busy: Counter[Hashable] = Counter()
        """Workers, by group."""
        self._parked: dict[Hashable, list[tuple[float, int, KeyType]]] = {}
        """Heaps of keys that were due while their group had its share."""
        self._due: dict[KeyType, float] = {}
        self._heap: list[tuple[float, int, KeyType]] = []
        self._sequence = itertools.count()
        self._running: set[KeyType] = set()
        self._failures: dict[KeyType, int] = {}
        self._held: dict[KeyType, float] = {}
        """Before when not to look at a key whose last look failed in a way that no wait mends."""
        self._wakeup = asyncio.Event()

    def __len__(self) -> int:
        """Keys that are due now and wait for a worker."""
        now = loop_time()
        return sum(1 for due in self._due.values() if due <= now)

    def add(self, key: KeyType, delay_seconds: float = 0.0) -> None:
        """Look at ``key`` after the delay, or when it is due already, if that is sooner.

        A key that failed otherwise than by ``RetryLater`` waits for the end of its back-off, whatever it is added for.
        """
        due = max(loop_time() + delay_seconds, self._held.get(key, 0.0))
        if due < self._due.get(key, float("inf")):
            self._due[key] = due
            if key not in self._running:
                self._push(key, due)

    def _push(self, key: KeyType, due: float) -> None:
        heapq.heappush(self._heap, (due, next(self._sequence), key))
        if len(self._heap) > 2 * len(self._due) + _MOST_OUTDATED:
            self._heap = [entry for entry in self._heap if self._due.get(entry[2]) == entry[0]]
            heapq.heapify(self._heap)
        self._wakeup.set()

    async def run(self) -> None:
        """Work until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            free = asyncio.Semaphore(self._concurrency)
            while True:
                await free.acquire()
                key = await self._next()
                self._running.add(key)
                self._busy[self._group(key)] += 1
                task = tasks.create_task(self._run_one(key), name=f"work on {key}")
                task.add_done_callback(lambda _: free.release())

    async def _next(self) -> KeyType:
        while True:
            self._wakeup.clear()
            wait: float | None = None
            while self._heap:
                due, sequence, key = self._heap[0]
                if self._due.get(key) != due or key in self._running:
                    heapq.heappop(self._heap)  # planned anew, forgotten, or put back when the run ends
                    continue
                wait = due - loop_time()
                if wait <= 0:
                    heapq.heappop(self._heap)
                    # One is free, so that who has none gets it.
                    if self._busy[self._group(key)] >= 2 * (self._concurrency - len(self._running)):
                        heapq.heappush(self._parked.setdefault(self._group(key), []), (due, sequence, key))
                        continue
                    del self._due[key]
                    return key
                break
            # Set by the clock as well: a timeout is an exception for every key.
            alarm = asyncio.get_running_loop().call_later(wait, self._wakeup.set) if wait is not None else None
            try:
                await self._wakeup.wait()
            finally:
                if alarm is not None:
                    alarm.cancel()

    async def _run_one(self, key: KeyType) -> None:
        delay: float | None
        try:
            delay = await self._work(key)
            self._failures.pop(key, None)
            self._held.pop(key, None)
            if delay is not None:
                delay *= 1.0 + 0.1 * self._jitter()  # never sooner: nothing would be due yet
        except Exception as error:  # one key's trouble never stops the others
            self._on_error(key, error)
            delay = self._backoff(key, error)
            self._held.pop(key, None)
            if not isinstance(error, RetryLater):
                self._held[key] = loop_time() + delay
                self._due.pop(key, None)
        finally:
            self._running.discard(key)
            self._released(key)
        planned = self._due.get(key)  # while it ran, and so in no heap
        if delay is not None:
            self.add(key, delay)
        if planned is not None and self._due[key] == planned:
            self._push(key, planned)

    def _released(self, key: KeyType) -> None:
        """A worker is free again: of each group that waits for one the first key may try."""
        group = self._group(key)
        self._busy[group] -= 1
        if not self._busy[group]:
            del self._busy[group]
        for waiting, heap in list(self._parked.items()):
            while heap:
                first = heapq.heappop(heap)
                if self._due.get(first[2]) == first[0]:  # not planned anew meanwhile
                    heapq.heappush(self._heap, first)
                    self._wakeup.set()
                    break
            if not heap:
                del self._parked[waiting]

    def _backoff(self, key: KeyType, error: Exception) -> float:
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        pause = doubled(FIRST_BACKOFF_SECONDS, failures - 1, longest=LAST_BACKOFF_SECONDS)
        asked = error.seconds if isinstance(error, RetryLater) else 0.0
        return max(pause, asked) * (0.75 + 0.5 * self._jitter())


def loop_time() -> float:
    """Seconds of the event loop's clock, which is never set."""
    return asyncio.get_running_loop().time()
