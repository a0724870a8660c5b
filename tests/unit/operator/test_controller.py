"""The operator as a process: how it begins, and how it ends before it has begun."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest

from sft_api.ports import free_port
from sft_api.v1alpha1 import KIND
from sft_operator.cluster.client import ApiError
from sft_operator.cluster.informer import HistoryLost
from sft_operator.cluster.leadership import LeadershipLost
from sft_operator.config import LeaderElectionSettings, Settings
from sft_operator.controller import Operator
from sft_operator.picture.picture import Key
from sft_operator.reconciler import StatusRefusedError
from tests.unit.operator.make import Object, child_manifest, job_manifest, pod_manifest


class SlowApi:
    """Its first listing takes long; the Lease is always ours, until it is taken."""

    def __init__(self) -> None:
        self.renewals = 0
        self.holder: str | None = None
        self.listings = 0

    async def get(self, kind: str, namespace: str, name: str) -> Object:
        return {"metadata": {"name": name, "resourceVersion": "1"}, "spec": {"holderIdentity": self.holder}}

    async def update(self, kind: str, namespace: str, name: str, manifest: Object) -> Object:
        self.holder = manifest["spec"]["holderIdentity"]
        self.renewals += 1
        return manifest

    async def list(self, *_: Any, **__: Any) -> tuple[list[Object], int]:
        self.listings += 1
        if self.listings > 1:  # the first one asks whether the kind is known
            await asyncio.sleep(3600)
        return [], 1

    async def scan(self, *_: Any, **__: Any) -> int:
        return (await self.list())[1]

    async def watch(self, *_: Any, **__: Any) -> None:
        raise ApiError(422, "Invalid", "sendInitialEvents is forbidden for watch unless WatchList is enabled")


def connect(operator: Operator, api: Any) -> None:
    """Have ``operator`` talk to ``api``."""
    operator._cluster = api
    for lister in operator._informers.values():
        lister._cluster = api


def start(api: SlowApi) -> asyncio.Task[None]:
    election = LeaderElectionSettings(enabled=True, lease_seconds=60, renew_seconds=0.05)
    operator = Operator(
        Settings(http_port=0, leader_election=election), "http://nowhere", cast(aiohttp.ClientSession, None)
    )
    connect(operator, api)
    return asyncio.create_task(operator.run())


async def until(what: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not what():
            await asyncio.sleep(0.01)


def test_the_lease_is_renewed_while_everything_is_listed_for_the_first_time() -> None:
    async def scenario() -> None:
        api = SlowApi()
        task = start(api)
        await until(lambda: api.listings == 2)
        renewals = api.renewals
        await until(lambda: api.renewals > renewals + 3)
        assert api.listings == 2, "the listing still takes its time"

        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert api.holder == "", "it lets go at once"

    asyncio.run(scenario())


def test_a_lease_that_is_lost_meanwhile_ends_the_listing() -> None:
    async def scenario() -> None:
        api = SlowApi()
        task = start(api)
        await until(lambda: api.listings == 2)
        api.holder = "another"
        with pytest.raises(LeadershipLost):
            await asyncio.wait_for(task, 60)
        assert api.holder == "another"

    asyncio.run(scenario())


def test_a_replica_that_waits_ends_cleanly_when_it_is_asked_to(tmp_path: Path) -> None:
    # Given an operator whose API server does not answer yet
    port = free_port()
    config = {
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}],
        "users": [{"name": "u", "user": {"token": "x"}}],
    }
    (tmp_path / "kubeconfig").write_text(json.dumps(config))
    process = subprocess.Popen(
        [sys.executable, "-m", "sft_operator", "--http-port", str(port)],
        env={"KUBECONFIG": str(tmp_path / "kubeconfig"), "PATH": "/usr/bin:/bin"},
        stderr=subprocess.PIPE,
    )
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=5).close()
                break
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.1)

        # When it is asked to end, then it does, as PID 1 would: by a handler of its own
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=120) == 0
    finally:
        process.kill()
        process.communicate()


def test_a_listing_has_what_is_gone_looked_at_as_well() -> None:
    """The deletion fell into a gap of the watch: what is remembered of the job must go."""

    async def scenario() -> None:
        operator = Operator(Settings(), "http://nowhere", cast(aiohttp.ClientSession, None))
        connect(operator, EmptyApi())
        operator._seen(KIND, "ADDED", job_manifest())
        looked_at: list[Key] = []
        operator._queue.add = lambda key, delay_seconds=0.0: looked_at.append(key)  # type: ignore[method-assign]

        await operator._list_all()

        assert looked_at == [Key("team", "tulu")]
        await operator._progress.close()

    asyncio.run(scenario())


def test_what_was_listed_is_looked_at_although_the_next_kind_cannot_be_listed() -> None:
    """Its watch may tell of it later, and nobody listens: it is known by then."""

    async def scenario() -> None:
        operator = Operator(Settings(), "http://nowhere", cast(aiohttp.ClientSession, None))
        connect(operator, ApiWithoutPods())
        looked_at: list[Key] = []
        operator._queue.add = lambda key, delay_seconds=0.0: looked_at.append(key)  # type: ignore[method-assign]

        assert not await operator._list_all()

        assert looked_at == [Key("team", "tulu")]
        await operator._progress.close()

    asyncio.run(scenario())


class ApiWithoutPods:
    """It lists one SFTJob and its Job, and no pods."""

    watch = SlowApi.watch

    async def scan(self, kind: str, _: str | None, take: Callable[[Object], None], **__: Any) -> int:
        if kind == "Pod":
            raise ApiError(503, "ServiceUnavailable", "overload")
        take(job_manifest() if kind == KIND else child_manifest())
        return 100


def test_a_status_that_the_api_server_refuses_is_logged_in_its_words_and_as_no_bug(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As for a spec that breaks a rule of a later CRD, by an API server that checks it with each change."""

    async def scenario() -> None:
        operator = Operator(Settings(), "http://nowhere", cast(aiohttp.ClientSession, None))
        operator._failed(Key("team", "tulu"), StatusRefusedError("the API server refuses its status: spec: a rule"))
        operator._failed(Key("team", "tulu"), ValueError("no such thing"))
        await operator._progress.close()

    asyncio.run(scenario())

    refused, bug = (record.message for record in caplog.records)
    assert refused == "team/tulu: the API server refuses its status: spec: a rule"
    assert bug == "team/tulu: a bug in the operator: ValueError('no such thing')"


class EmptyApi:
    """Nothing is left."""

    watch = SlowApi.watch

    async def scan(self, *_: Any, **__: Any) -> int:
        return 1000


def test_times_of_objects_are_compared_with_the_clock_that_wrote_them() -> None:
    """The clock of this machine may be a minute ahead of the API server's."""

    async def scenario() -> None:
        operator = Operator(Settings(), "http://nowhere", cast(aiohttp.ClientSession, None))
        behind = datetime.now(UTC) - timedelta(seconds=60)

        operator._cluster._clock.heard(format_datetime(behind, usegmt=True))

        for now in (operator._reconciler._now(), operator._reconciler._asking._now()):
            assert timedelta(seconds=40) < datetime.now(UTC) - now < timedelta(seconds=80)
        await operator._progress.close()

    asyncio.run(scenario())


class WatchedApi:
    """Two pods more at every listing, of which no watch ever tells."""

    def __init__(self) -> None:
        self.version = 100

    watch = SlowApi.watch

    async def scan(self, kind: str, _: str | None, take: Callable[[Object], None], **__: Any) -> int:
        for manifest in self._pods() if kind == "Pod" else [job_manifest() if kind == KIND else child_manifest()]:
            take(manifest)
        return self.version

    def _pods(self) -> list[Object]:
        self.version += 10
        versions = range(101, self.version)
        return [pod_manifest(0, uid=f"uid-{version}", version=str(version)) for version in versions if version % 5 == 0]


def missed(operator: Operator) -> float:
    value = operator._metrics.registry.get_sample_value("sft_operator_watch_missed_total")
    assert value is not None
    return value


def test_an_operator_whose_api_server_was_restored_ends_to_begin_anew() -> None:
    async def scenario() -> None:
        operator = Operator(Settings(), "http://nowhere", cast(aiohttp.ClientSession, None))
        api = WatchedApi()
        connect(operator, api)
        assert await operator._list_all()

        api.version = 50
        with pytest.raises(HistoryLost, match="SFTJobs are listed at version 50, and were at 100"):
            await operator._list_all()
        await operator._progress.close()

    asyncio.run(scenario())


def test_what_a_watch_does_not_tell_of_is_counted_and_makes_sick(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        operator = Operator(Settings(), "http://nowhere", cast(aiohttp.ClientSession, None))
        connect(operator, WatchedApi())
        clock = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: clock)
        operator._seen(KIND, None, job_manifest())  # that of SFTJobs is well

        # The first listing is where the watches begin: it proves nothing
        assert await operator._list_all()
        clock += 200
        assert (operator._sick(), missed(operator)) == (None, 0)

        # What the next one shows, the watch must tell of as well
        assert await operator._list_all()
        clock += 100
        assert (operator._sick(), missed(operator)) == (None, 2)
        clock += 30
        assert "the watch of Pods has not told of a change" in str(operator._sick())

        # A bookmark says that all of it has been told
        operator._seen("Pod", "BOOKMARK", {"metadata": {"resourceVersion": "500"}})
        assert operator._sick() is None
        await operator._progress.close()

    asyncio.run(scenario())
