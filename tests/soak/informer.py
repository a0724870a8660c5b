"""The operator's picture under hostile watches, for as long as wanted.

    python -m tests.soak.informer [MINUTES] [SEED]

Jobs and pods are created, changed and deleted at random on a real API server; informers reach it through a proxy that
cuts watches, makes them silent, answers 410 as a status and inside of the stream, duplicates, swaps and delays lines,
and refuses lists. Three pictures are kept: by watches alone; with a listing every few seconds beside them; the same
by pages. Now and then the load pauses, and each must come to equal a fresh listing, and stay so. Prints what was
done, and:

checks       comparisons with a fresh listing
differences  objects that were not the same in both when patience ended, or came back after they were told to be deleted
"""

from __future__ import annotations

import asyncio
import logging
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random, SystemRandom

import aiohttp

from sft_operator.cluster.client import Cluster
from sft_operator.picture.picture import Key
from tests.cluster import lifecycle
from tests.integration.kubernetes_api import kubernetes_api
from tests.soak.followed import Followed, Object, a_job, a_pod, different, truth
from tests.soak.hostile_proxy import HostileProxy, Request, Trouble, hostile_proxy

JOBS = 6
MOST_PODS = 80
PATIENCE_SECONDS = 90.0
"""For what takes some seconds on a quiet machine."""
STILL_SECONDS = 0.5
_ENDS = ("cut", "ended", "silent", "gone", "failed")


@dataclass
class Result:
    """What a soak has seen."""

    checks: int = 0
    differences: list[str] = field(default_factory=list)
    done: Counter[str] = field(default_factory=Counter)
    """How often what happened."""


class Load:
    """Creates, changes and deletes Jobs and pods at random."""

    def __init__(self, cluster: Cluster, keys: list[Key], random: Random, done: Counter[str]) -> None:
        self._cluster = cluster
        self._keys = keys
        self._random = random
        self._done = done
        self._jobs: dict[Key, str] = {}
        self._disowned: set[Key] = set()
        self._pods: dict[str, tuple[Key, str]] = {}
        self._number = 0

    async def act(self) -> None:
        """One change."""
        key = self._random.choice(self._keys)
        acts: list[tuple[Callable[[Key], Awaitable[None]], float]] = [
            (self._make_pod, 4.0 if len(self._pods) < MOST_PODS else 0.0),
            (self._change_pod, 5.0),
            (self._delete_pod, 3.0),
            (self._delete_job if key in self._jobs else self._make_job, 1.0),
            (self._change_job, 1.0),
            (self._change_owner, 1.0),
        ]
        [(act, _)] = self._random.choices(acts, [weight for _, weight in acts])
        await act(key)
        self._done[act.__name__.strip("_")] += 1

    async def _make_job(self, key: Key) -> None:
        made = await self._cluster.create("Job", key.namespace, a_job(key), whole=True)
        self._jobs[key] = made["metadata"]["uid"]
        self._disowned.discard(key)

    async def _change_job(self, key: Key) -> None:
        if key in self._jobs:
            await self._cluster.patch("Job", key.namespace, key.name, self._note())

    async def _change_owner(self, key: Key) -> None:
        """Somebody takes the owner of a Job away, or gives it back."""
        if key in self._jobs:
            owners = a_job(key)["metadata"]["ownerReferences"] if key in self._disowned else None
            await self._cluster.patch("Job", key.namespace, key.name, {"metadata": {"ownerReferences": owners}})
            self._disowned ^= {key}

    async def _delete_job(self, key: Key) -> None:
        await self._cluster.delete("Job", key.namespace, key.name, uid=self._jobs.pop(key))

    async def _make_pod(self, key: Key) -> None:
        self._number += 1
        name = f"{key.name}-{self._number}"
        pod = a_pod(key, name, self._jobs.get(key, "gone"))
        made = await self._cluster.create("Pod", key.namespace, pod, whole=True)
        self._pods[name] = (key, made["metadata"]["uid"])

    async def _change_pod(self, _: Key) -> None:
        if self._pods:
            name = self._random.choice(list(self._pods))
            phase = {"status": {"phase": self._random.choice(["Pending", "Running"])}}
            await self._cluster.patch("Pod", self._pods[name][0].namespace, name, self._note())
            await self._cluster.patch("Pod", self._pods[name][0].namespace, name, phase, subresource="status")

    async def _delete_pod(self, _: Key) -> None:
        if self._pods:
            name = self._random.choice(list(self._pods))
            key, uid = self._pods.pop(name)
            if self._random.random() < 0.7:  # the last change and the deletion may be told in any order
                await self._cluster.patch("Pod", key.namespace, name, self._note())
            await self._cluster.delete("Pod", key.namespace, name, uid=uid, grace_seconds=0)

    def _note(self) -> Object:
        return {"metadata": {"annotations": {"note": str(self._random.random())}}}


def troubles_at_random(random: Random, *, pages_only: bool) -> Callable[[Request], Trouble]:
    """What befalls each request."""

    def of(request: Request) -> Trouble:
        lot = random.random()
        if lot < 0.15:
            refusals = [
                Trouble(reset=True),
                Trouble(status=410),
                Trouble(status=429, retry_after="0.5"),
                Trouble(status=503),
            ]
            return random.choice(refusals)
        breaks = lot < (0.4 if request.streamed_list else 0.85)
        return Trouble(
            pages_only=pages_only,
            lines=random.choice([0, 1, 3, 10, 30, 60]) if breaks else None,
            end=random.choice(_ENDS),
            duplicated=0.1,
            swapped=0.15,
            delayed=0.1,
            garbage=0.02,
            random=random,
        )

    return of


async def soak(server: str, seconds: float, seed: int) -> Result:
    """Follow a namespace of its own on the API server at the open URL ``server``."""
    random, result = Random(seed), Result()
    namespace = f"soak-{uuid.uuid4().hex[:8]}"
    keys = [Key(namespace, f"job-{number}") for number in range(JOBS)]
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        direct = Cluster(server, session)
        await direct.create("Namespace", "", {"metadata": {"name": namespace}})
        followed, proxies = {}, []
        for name, pages_only, lists in (("watched", False, False), ("listed", False, True), ("paged", True, True)):
            troubles = troubles_at_random(random, pages_only=pages_only)
            proxies.append(await stack.enter_async_context(hostile_proxy(server, session, troubles)))
            seen = followed[name] = Followed(Cluster(proxies[-1].url, session), namespace, keys)
            await stack.enter_async_context(seen.watching())
            if lists:
                await stack.enter_async_context(_listing_again(seen, random, result.done))
        load = Load(direct, keys, random, result.done)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for _ in range(random.randint(1, 150)):
                await load.act()
                await asyncio.sleep(random.choice([0.0, 0.0, 0.02, 0.1]))
            await _check(followed, lambda: truth(direct, namespace, keys), result)
    _count(proxies, result.done)
    return result


@asynccontextmanager
async def _listing_again(followed: Followed, random: Random, done: Counter[str]) -> AsyncIterator[None]:
    async def again() -> None:
        while True:
            await asyncio.sleep(random.uniform(0.5, 5.0))
            for listed in await followed.list():
                done["listings"] += 1
                done["missed"] += listed.news

    task = asyncio.create_task(again())
    try:
        yield
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _check(
    followed: dict[str, Followed], fresh: Callable[[], Awaitable[dict[tuple[str, str], object]]], result: Result
) -> None:
    """Each picture comes to equal a fresh listing, and stays so for a moment."""
    expected = await fresh()
    for name, seen in followed.items():
        deadline = time.monotonic() + PATIENCE_SECONDS
        equal_since: float | None = None
        while equal_since is None or time.monotonic() - equal_since < STILL_SECONDS:
            wrong = different(seen.held(), expected)
            if wrong and time.monotonic() > deadline:
                result.differences += [f"{name}: {kind} {uid}" for kind, uid in wrong]
                break
            equal_since = None if wrong else equal_since or time.monotonic()
            await asyncio.sleep(0.05)
        result.differences += [f"{name}: {uid} came back" for uid in sorted(seen.returned)]
        seen.returned.clear()
        result.checks += 1
        for key in seen.picture.all_keys():
            seen.picture.entry(key).gone_pods.clear()  # as the reconciler does


def _count(proxies: list[HostileProxy], done: Counter[str]) -> None:
    for proxy in proxies:
        for request, trouble in zip(proxy.requests, proxy.befallen, strict=True):
            what = "streamed_lists" if request.streamed_list else "watches" if request.watch else "pages"
            done[what] += 1
            if trouble.reset or trouble.status:
                done[f"refused_{trouble.status or 'reset'}"] += 1
            elif request.watch and trouble.lines is not None:
                done[f"ends_{trouble.end}"] += 1


def main() -> int:
    minutes = float(sys.argv[1]) if len(sys.argv) > 1 else 60.0
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else SystemRandom().randrange(2**32)
    logging.getLogger("sft_operator").setLevel(logging.ERROR)
    print(f"minutes={minutes} seed={seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="sft-soak-") as folder:
        try:
            cluster = lifecycle.up(Path(folder), "api", die_with_parent=True)
            with kubernetes_api(cluster) as api:
                result = asyncio.run(soak(api.url, 60 * minutes, seed))
        finally:
            lifecycle.down(Path(folder))
    for what, times in sorted(result.done.items()):
        print(f"{what}={times}")
    for difference in result.differences:
        print(difference)
    print(f"checks={result.checks}")
    print(f"differences={len(result.differences)}")
    return 1 if result.differences or not result.checks else 0


if __name__ == "__main__":
    sys.exit(main())
