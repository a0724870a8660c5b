"""Jobs and pods are followed on a real API server, through a proxy that does to lists and watches what it is told."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import aiohttp
import pytest

from sft_operator.cluster.client import Cluster
from sft_operator.cluster.informer import Pace
from sft_operator.config import Settings
from sft_operator.controller import Operator
from sft_operator.picture.picture import Key
from tests.cluster import access
from tests.integration.kubernetes_api import kubernetes_api
from tests.integration.operator.scene import install_crd
from tests.soak.followed import HASTY, Followed, a_job, a_pod, different, truth
from tests.soak.hostile_proxy import NO_TROUBLE, HostileProxy, Request, Trouble, Troubles, hostile_proxy
from tests.soak.informer import soak

PATIENCE_SECONDS = 90.0
PATIENT = Pace(server=60, first_pause=0.02, longest_pause=0.3)
"""An inactivity limit that no test waits for."""
SOAK_SECONDS = 25.0


@dataclass
class Stage:
    """A namespace of a real API server, with one SFTJob and its Job; a proxy to it."""

    direct: Cluster
    proxy: HostileProxy
    session: aiohttp.ClientSession
    key: Key
    job_uid: str = ""

    def followed(self, pace: Pace = PATIENT) -> Followed:
        return Followed(Cluster(self.proxy.url, self.session), self.key.namespace, [self.key], pace)

    async def make_pod(self, name: str) -> str:
        pod = a_pod(self.key, name, self.job_uid)
        made = await self.direct.create("Pod", self.key.namespace, pod, whole=True)
        return str(made["metadata"]["uid"])

    async def delete_pod(self, name: str, uid: str) -> None:
        await self.direct.delete("Pod", self.key.namespace, name, uid=uid, grace_seconds=0)

    async def until_right(self, followed: Followed) -> None:
        """The picture comes to equal a fresh listing."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        expected = await truth(self.direct, self.key.namespace, [self.key])
        while wrong := different(followed.held(), expected):
            assert time.monotonic() < deadline, wrong
            await asyncio.sleep(0.02)

    async def until(self, what: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not what():
            assert time.monotonic() < deadline, self.proxy.requests
            await asyncio.sleep(0.02)

    def asked(self, resource: str = "pods") -> list[str]:
        """What was asked for: a streamed list, a page, or a watch."""
        return [
            "stream" if one.streamed_list else "watch" if one.watch else "page"
            for one in self.proxy.requests
            if one.resource == resource
        ]


def play(api_server: access.Cluster, scenario: Callable[[Stage], Awaitable[None]]) -> None:
    async def staged(url: str) -> None:
        async with aiohttp.ClientSession() as session, hostile_proxy(url, session) as proxy:
            stage = Stage(Cluster(url, session), proxy, session, Key(f"inf-{uuid.uuid4().hex[:8]}", "tulu"))
            await stage.direct.create("Namespace", "", {"metadata": {"name": stage.key.namespace}})
            made = await stage.direct.create("Job", stage.key.namespace, a_job(stage.key), whole=True)
            stage.job_uid = made["metadata"]["uid"]
            await scenario(stage)

    with kubernetes_api(api_server) as api:
        asyncio.run(staged(api.url))


def once(trouble: Trouble, of: Callable[[Request], bool]) -> Troubles:
    """``trouble`` for the first request of that kind; none for others."""
    left = [trouble]
    return lambda request: left.pop() if left and of(request) else NO_TROUBLE


def a_watch_of_pods(request: Request) -> bool:
    return request.resource == "pods" and request.watch and not request.streamed_list


@pytest.mark.parametrize("pages_only", [False, True])
def test_everything_is_listed_as_a_stream_or_by_pages_and_then_watched(
    api_server: access.Cluster, pages_only: bool
) -> None:
    async def scenario(stage: Stage) -> None:
        # Given pods, also of somebody else
        uids = [await stage.make_pod(f"pod-{number}") for number in range(5)]
        stranger = a_pod(stage.key, "stranger", stage.job_uid)
        stranger["metadata"]["labels"] = {}
        await stage.direct.create("Pod", stage.key.namespace, stranger)
        stage.proxy.troubles = lambda request: Trouble(pages_only=pages_only)

        # When they are listed and watched
        followed = stage.followed()
        async with followed.watching():
            assert {uid for kind, uid in followed.held() if kind == "Pod"} == set(uids)
            await stage.delete_pod("pod-0", uids[0])
            await stage.make_pod("another")
            await stage.until_right(followed)

        # Then each in one way, and of strangers nothing was sent
        assert stage.asked() == (["stream", "page", "watch"] if pages_only else ["stream", "watch"])
        selectors = {request.query["labelSelector"] for request in stage.proxy.requests}
        assert selectors == {"app.kubernetes.io/managed-by=sft-operator"}
        assert ("Pod", "DELETED") in followed.heard

    play(api_server, scenario)


@pytest.mark.parametrize("gone", [Trouble(status=410), Trouble(lines=0, end="gone")], ids=["status", "inside"])
def test_what_fell_into_a_gap_is_found_by_the_next_list(api_server: access.Cluster, gone: Trouble) -> None:
    async def scenario(stage: Stage) -> None:
        # Given a list, after which a pod goes and another comes
        lost, kept = await stage.make_pod("lost"), await stage.make_pod("kept")
        followed = stage.followed()
        stage.proxy.troubles = once(gone, a_watch_of_pods)
        await followed.list()
        await stage.delete_pod("lost", lost)
        await stage.make_pod("new")

        # When the watch that begins there is told that this is too long ago
        async with followed.watching(list_first=False):
            await stage.until(lambda: stage.asked().count("watch") >= 2)
            await stage.until_right(followed)

        # Then everything was listed again, and what went is known to have gone
        assert ("Pod", kept) in followed.held()
        assert set(followed.picture.entry(stage.key).gone_pods) == {lost}
        assert ("Pod", "DELETED") not in followed.heard

    play(api_server, scenario)


def test_a_silent_watch_is_left_and_goes_on_where_it_was(api_server: access.Cluster) -> None:
    async def scenario(stage: Stage) -> None:
        lost = await stage.make_pod("lost")
        stage.proxy.troubles = once(Trouble(lines=0, end="silent"), a_watch_of_pods)
        followed = stage.followed(HASTY)

        async with followed.watching():
            await stage.until(lambda: "watch" in stage.asked())
            await stage.delete_pod("lost", lost)
            await stage.make_pod("new")
            await stage.until_right(followed)

        assert stage.asked().count("stream") == 1, "nothing had to be listed again"
        assert ("Pod", "DELETED") in followed.heard

    play(api_server, scenario)


@pytest.mark.parametrize("end", ["cut", "ended", "failed"])
def test_a_watch_that_breaks_off_loses_nothing(api_server: access.Cluster, end: str) -> None:
    async def scenario(stage: Stage) -> None:
        lost = await stage.make_pod("lost")
        stage.proxy.troubles = once(Trouble(lines=1, end=end), a_watch_of_pods)
        followed = stage.followed()

        async with followed.watching():
            await stage.until(lambda: "watch" in stage.asked())
            await stage.make_pod("new")
            await stage.delete_pod("lost", lost)
            await stage.make_pod("newer")
            await stage.until_right(followed)

        assert stage.asked().count("stream") == 1, "nothing had to be listed again"

    play(api_server, scenario)


def test_a_watch_that_tells_everything_again_brings_nothing_back(api_server: access.Cluster) -> None:
    async def scenario(stage: Stage) -> None:
        lost = await stage.make_pod("lost")
        followed = stage.followed()
        async with followed.watching():
            await stage.until(lambda: "watch" in stage.asked())
            await stage.delete_pod("lost", lost)
            await stage.until_right(followed)

        # When a watch begins long before
        stage.proxy.troubles = once(Trouble(too_old=True), a_watch_of_pods)
        ghosts: list[object] = []
        followed.on_event = lambda: ghosts.extend({("Pod", lost)} & followed.held().keys())
        async with followed.watching(list_first=False):
            told = len(followed.heard)
            await stage.make_pod("new")
            await stage.until_right(followed)

        assert len(followed.heard) > told + 1
        assert ghosts == []

    play(api_server, scenario)


def test_jobs_are_all_there_before_pods_are_listed(api_server: access.Cluster) -> None:
    install_crd(api_server)

    async def scenario(stage: Stage) -> None:
        await stage.make_pod("pod-0")
        operator = Operator(Settings(namespace=stage.key.namespace), stage.proxy.url, stage.session)
        job_known: list[bool] = []

        def troubles(request: Request) -> Trouble:
            if request.resource == "pods":
                job_known.append(operator._picture.entry(stage.key).job is not None)
            breaks = request.resource == "jobs" and stage.asked("jobs").count("stream") == 1
            return Trouble(lines=0) if breaks and request.streamed_list else NO_TROUBLE

        stage.proxy.troubles = troubles
        await operator._list_until_done()
        await operator._progress.close()

        assert stage.asked("jobs") == ["stream", "page"], "the first list of Jobs broke off"
        assert job_known == [True]
        assert len(operator._picture.entry(stage.key).pods) == 1

    play(api_server, scenario)


def test_the_picture_is_right_whatever_befalls_the_watches(api_server: access.Cluster) -> None:
    with kubernetes_api(api_server) as api:
        result = asyncio.run(soak(api.url, SOAK_SECONDS, seed=int(time.time())))

    print(f"checks={result.checks} differences={len(result.differences)} {dict(result.done)}")
    assert result.checks >= 3
    assert result.differences == []
