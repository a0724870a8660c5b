"""How much of the platform's store is read at the same time."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from sft_api.v1alpha1 import CheckpointsStatus
from sft_operator.cluster.store import CONCURRENCY, CheckpointStore
from sft_operator.config import StoreSettings
from sft_operator.picture.observed import Stored


def test_a_reading_that_nobody_waits_for_any_more_counts_until_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread goes on: pods that come and go have a reading begun and dropped each time."""
    running, most, begun, go_on = 0, 0, threading.Semaphore(0), threading.Event()
    lock = threading.Lock()

    def read(self: CheckpointStore, uri: str) -> Stored:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        begun.release()
        go_on.wait(30)
        with lock:
            running -= 1
        return Stored(CheckpointsStatus())

    async def scenario() -> None:
        store = CheckpointStore(StoreSettings(uri="s3://platform/sft", verify=True))
        dropped = [asyncio.create_task(store.read(f"s3://platform/sft/{number}")) for number in range(CONCURRENCY)]
        for _ in dropped:
            await asyncio.to_thread(begun.acquire)
        for task in dropped:
            task.cancel()
        await asyncio.wait(dropped)

        # When others are asked for
        later = [asyncio.create_task(store.read(f"s3://platform/sft/later/{number}")) for number in range(CONCURRENCY)]
        assert not await asyncio.to_thread(begun.acquire, timeout=0.2)
        go_on.set()
        await asyncio.gather(*later)

    # With more threads than the store may use
    monkeypatch.setattr(CheckpointStore, "_read", read)
    with asyncio.Runner() as runner:
        runner.get_loop().set_default_executor(ThreadPoolExecutor(4 * CONCURRENCY))
        runner.run(scenario())

    assert most == CONCURRENCY
