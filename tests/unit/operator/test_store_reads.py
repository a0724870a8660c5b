"""How much of the platform's store is read, and kept."""

from __future__ import annotations

import asyncio
import io
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import pytest

from sft_api.checkpoints import CheckpointId
from sft_api.numbers import Numbers
from sft_api.ports import free_port
from sft_api.progress import TrainingProgress
from sft_api.v1alpha1 import CheckpointsStatus
from sft_operator.cluster.store import CONCURRENCY, CheckpointStore, _manifest, _progress
from sft_operator.cluster.store_reading import (
    MAX_MANIFEST_BYTES,
    MAX_RECORD_BYTES,
    Reading,
    StoreError,
    StoreFile,
    connect,
)
from sft_operator.cluster.store_removal import PlaceRemover, _Place
from sft_operator.config import StoreSettings
from sft_operator.decisions.result import RemovePlace
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


class Listing:
    """A store that lists folders of these names."""

    def __init__(self, *names: str) -> None:
        self._page = {"CommonPrefixes": [{"Prefix": f"team/run/checkpoints/{name}/"} for name in names]}

    def get_paginator(self, _: str) -> Listing:
        return self

    def paginate(self, **_: Any) -> list[Any]:
        return [self._page]


def test_a_folder_that_is_not_written_as_a_trainer_does_is_no_checkpoint() -> None:
    """Who removes folders until there are none would look for its files elsewhere, again and again."""
    strange = ("step-000000000010-a00001", "step-00000010-a000001", "step-0000001\u0660-a00001", "step-00000010-a1")
    listing = Listing("step-00000010-a00001", *strange, "step-1234567890-a00001")

    folders = Reading(listing, "s3://platform/team/run", lambda: 0.0, seconds=1).folders()

    assert folders == [CheckpointId(1, 10), CheckpointId(1, 1234567890)]


def test_of_what_a_complete_run_reported_no_more_is_kept_than_a_status_shows() -> None:
    """Each job keeps it, and such a job takes neither pods nor quota."""
    told = TrainingProgress(
        attempt=1, step=10, warnings=["a" * 5000] * 1000, eval_losses={str(number): 0.5 for number in range(1000)}
    )

    kept = _progress(told.model_dump_json(by_alias=True).encode())

    assert kept is not None
    assert (kept.step, len(kept.warnings), kept.eval_losses) == (10, 20, {})
    assert {len(warning) for warning in kept.warnings} == {1000}


def test_what_a_newer_trainer_has_reported_besides_is_left_out() -> None:
    kept = _progress(b'{"step": 10, "export": {"uri": "s3://b/export", "step": 10, "invented": 1}}')

    assert kept is not None
    assert kept.step == 10


class Written:
    """A store in which every object is ``raw``."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw

    def get_object(self, **_: Any) -> dict[str, Any]:
        return {"Body": io.BytesIO(self._raw)}


def test_credentials_that_nobody_hands_out_yet_are_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node's metadata may be away when the operator looks for the first time: it would go without for ever."""
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "/nowhere")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    uri = "s3://platform/team/run"
    settings = StoreSettings.model_validate(
        {"uri": uri, "verify": True, "s3": {"endpoint": f"http://127.0.0.1:{free_port()}", "region": "here"}}
    )
    store, remover = CheckpointStore(settings), PlaceRemover(settings)

    async def look(why: str) -> None:
        with pytest.raises(StoreError, match=why):
            await store.read(uri)
        with pytest.raises(StoreError, match=why):
            await remover.turn(RemovePlace("uid", uri, "run", "team", Numbers({}), 0), at_once)

    async def at_once() -> None:
        pass

    asyncio.run(look("Unable to locate credentials"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    asyncio.run(look("Could not connect"))


def of_values(most_bytes: int) -> bytes:
    """A document of as many values as there is room for, which are many times its size in memory."""
    return b'{"formatVersion":3,"run":[' + b",".join([b"{}"] * (most_bytes // 3 - 20)) + b"]}"


def test_a_manifest_is_not_read_that_takes_many_times_its_size() -> None:
    """Whoever writes one in a namespace of his own would have the operator killed again and again, for everybody."""
    raw, one = of_values(MAX_MANIFEST_BYTES), CheckpointId(1, 10)
    reading = Reading(Written(raw), "s3://platform/team/run", lambda: 0.0, seconds=1)
    now = datetime.now(UTC)

    tracemalloc.start()
    found = _manifest(reading, one, {"manifest.json": StoreFile(len(raw), now)})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert isinstance(found, str)
    assert "values" in found
    assert peak < 4 * MAX_MANIFEST_BYTES


def test_nor_is_a_record() -> None:
    reading = Reading(Written(of_values(MAX_RECORD_BYTES)), "s3://platform/team/run", lambda: 0.0, seconds=1)

    with pytest.raises(StoreError, match=r"run\.json has more than 20000 values"):
        reading.document("run.json")


class Strangers:
    """A store in which there is no end of files that are not the run's."""

    def __init__(self) -> None:
        self.pages = 0

    def get_paginator(self, _: str) -> Strangers:
        return self

    def paginate(self, **_: Any) -> list[Any]:
        return [{}]

    def list_objects_v2(self, *, Prefix: str, **_: Any) -> dict[str, Any]:
        if not Prefix.endswith("/tokenized/"):
            return {}
        self.pages += 1
        return {"Contents": [{"Key": f"{Prefix}{self.pages:08d}-{number}.jsonl"} for number in range(1000)]}


@pytest.mark.parametrize("stopped", [False, True])
def test_who_removes_a_place_does_not_look_for_ever_through_what_is_nobodys_there(stopped: bool) -> None:
    """Two such places kept the operator from removing any other, and namespaces from going."""
    strangers, stop = Strangers(), threading.Event()
    wanted = RemovePlace("u", "s3://platform/team/run", "run", "team", Numbers({}), 0)

    def clock() -> float:
        if stopped and strangers.pages:
            stop.set()
        assert strangers.pages < 1000
        return float(strangers.pages)

    place = _Place(strangers, wanted, clock, lambda: datetime.now(UTC), stop)

    with pytest.raises(StoreError, match="no longer" if stopped else "could not be read within 60 s"):
        list(place._keys())


def test_keys_are_signed_with_without_the_line_ends_of_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, key in (("ACCESS_KEY_ID", "key\n"), ("SECRET_ACCESS_KEY", "secret\r\n"), ("SESSION_TOKEN", " token\n")):
        monkeypatch.setenv(f"AWS_{name}", key)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    credentials = connect(StoreSettings(uri="s3://platform/sft"))._request_signer._credentials
    assert credentials.get_frozen_credentials()[:3] == ("key", "secret", "token")
