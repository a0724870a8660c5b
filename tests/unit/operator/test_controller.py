"""The operator as a process: how it begins, and how it ends before it has begun."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
import urllib.request
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest

from sft_api.ports import free_port
from sft_api.v1alpha1 import KIND
from sft_operator.cluster.leadership import LeadershipLost
from sft_operator.config import LeaderElectionSettings, Settings
from sft_operator.controller import Operator
from sft_operator.picture.cache import Key
from tests.unit.operator.make import Object, job_manifest


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
            await asyncio.sleep(60)
        return [], 1

    async def scan(self, *_: Any, **__: Any) -> int:
        return (await self.list())[1]


def start(api: SlowApi) -> asyncio.Task[None]:
    election = LeaderElectionSettings(enabled=True, lease_seconds=0.6, renew_seconds=0.05)
    operator = Operator(
        Settings(http_port=0, leader_election=election), "http://nowhere", cast(aiohttp.ClientSession, None)
    )
    operator._cluster = cast(Any, api)
    return asyncio.create_task(operator.run())


def test_the_lease_is_renewed_while_everything_is_listed_for_the_first_time() -> None:
    async def scenario() -> None:
        api = SlowApi()
        task = start(api)
        await asyncio.sleep(0.5)
        assert api.listings == 2
        assert api.renewals > 3

        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert api.holder == "", "it lets go at once"

    asyncio.run(scenario())


def test_a_lease_that_is_lost_meanwhile_ends_the_listing() -> None:
    async def scenario() -> None:
        api = SlowApi()
        task = start(api)
        await asyncio.sleep(0.3)
        api.holder = "another"
        with pytest.raises(LeadershipLost):
            await asyncio.wait_for(task, 5)
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
        operator._cluster = cast(Any, EmptyApi())
        operator._seen(KIND, "ADDED", job_manifest())
        looked_at: list[Key] = []
        operator._queue.add = lambda key, delay_seconds=0.0: looked_at.append(key)  # type: ignore[method-assign]

        await operator._list_all()

        assert looked_at == [Key("team", "tulu")]
        await operator._progress.close()

    asyncio.run(scenario())


class EmptyApi:
    """Nothing is left."""

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
