"""Informers and the operator's picture, in this process, and what the picture should be."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import aiohttp

from sft_operator.cluster.client import ApiError, Cluster
from sft_operator.cluster.informer import Informer, Listed, Pace
from sft_operator.names import WATCH_SELECTOR, child_labels
from sft_operator.picture.listing import Listing
from sft_operator.picture.picture import Key, Picture
from tests.unit.operator.make import job_manifest, take_listing

Object = dict[str, Any]
KINDS = ("Job", "Pod")
HASTY = Pace(server=10, inactivity=2.0, listing=2.0, steady=0.5, first_pause=0.02, longest_pause=0.3)
"""Everything as in an operator, in seconds instead of minutes."""
_PASSING = (ApiError, aiohttp.ClientError, TimeoutError)


def sft_job(key: Key) -> Object:
    """An SFTJob that no test changes, large enough for any number of pods."""
    manifest = job_manifest(uid=f"uid-{key.name}", compute={"nodes": 4096, "gpusPerNode": 0})
    manifest["metadata"] |= {"namespace": key.namespace, "name": key.name}
    return manifest


def a_job(key: Key) -> Object:
    """Of the SFTJob ``key``."""
    owner = {"apiVersion": "sftjob.dev/v1alpha1", "kind": "SFTJob", "name": key.name, "uid": f"uid-{key.name}"}
    template = {"spec": {"restartPolicy": "Never", "containers": [{"name": "trainer", "image": "x"}]}}
    return {
        "metadata": _metadata(key, key.name, owner),
        "spec": {"suspend": True, "template": template},
    }


def a_pod(key: Key, name: str, job_uid: str) -> Object:
    """Of the Job ``key``."""
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": key.name, "uid": job_uid}
    return {
        "metadata": _metadata(key, name, owner),
        "spec": {"containers": [{"name": "trainer", "image": "x"}]},
    }


def _metadata(key: Key, name: str, owner: Object) -> Object:
    owners = [{**owner, "controller": True}]
    return {"name": name, "namespace": key.namespace, "labels": child_labels(key.name), "ownerReferences": owners}


class Followed:
    """The picture that informers of Jobs and pods make of a namespace; its SFTJobs are known."""

    def __init__(self, cluster: Cluster, namespace: str, keys: list[Key], pace: Pace = HASTY) -> None:
        self.picture = Picture()
        self.heard: list[tuple[str, str | None]] = []
        """Kind and type of what the watches told."""
        self.returned: set[str] = set()
        """Uids of what was told to be deleted, and came back into the picture."""
        self._deleted: set[str] = set()
        self.on_event: Callable[[], object] = lambda: None
        for key in keys:
            self.picture.store("SFTJob", sft_job(key))
        self.informers = {
            kind: Informer(
                cluster,
                kind,
                namespace,
                WATCH_SELECTOR,
                begin=partial(Listing, self.picture, kind),
                seen=self._seen,
                pace=pace,
            )
            for kind in KINDS
        }

    def _seen(self, kind: str, event: str | None, manifest: Object) -> None:
        self.heard.append((kind, event))
        uid = manifest["metadata"].get("uid", "")
        if event == "DELETED":
            self.picture.remove(kind, manifest)
            self._deleted.add(uid)
        elif event != "BOOKMARK":
            key = self.picture.store(kind, manifest)
            if key and uid in self._deleted and self.picture.held_version(kind, key, uid):
                self.returned.add(uid)
        self.on_event()

    async def list(self) -> list[Listed]:
        """Until it has succeeded, owners first."""
        while True:
            with suppress(*_PASSING):
                return [await self.informers[kind].list() for kind in KINDS]
            await asyncio.sleep(0.1)

    @asynccontextmanager
    async def watching(self, *, list_first: bool = True) -> AsyncIterator[None]:
        """Lists, and watches meanwhile; fails when a watch ends."""
        if list_first:
            await self.list()
        watches = [asyncio.create_task(informer.watch(lambda _: None)) for informer in self.informers.values()]
        try:
            yield
            assert not any(watch.done() for watch in watches)
        finally:
            for watch in watches:
                watch.cancel()
            await asyncio.gather(*watches, return_exceptions=True)

    def held(self) -> dict[tuple[str, str], object]:
        """What is known, by kind and uid, with versions."""
        return picture_of(self.picture)


def picture_of(picture: Picture) -> dict[tuple[str, str], object]:
    """Jobs and pods in ``picture``, by kind and uid."""
    found: dict[tuple[str, str], object] = {}
    for key in picture.all_keys():
        entry = picture.entry(key)
        found |= {("Pod", uid): seen for uid, seen in entry.pods.items()}
        if entry.job:
            found["Job", entry.job.value.uid] = entry.job
    return found


async def truth(cluster: Cluster, namespace: str, keys: list[Key]) -> dict[tuple[str, str], object]:
    """The picture that a fresh listing makes, asked of the API server itself."""
    picture = Picture()
    for key in keys:
        picture.store("SFTJob", sft_job(key))
    for kind in KINDS:
        items, version = await cluster.list(kind, namespace, labels=WATCH_SELECTOR)
        take_listing(picture, kind, items, version)
    return picture_of(picture)


def different(one: dict[tuple[str, str], object], other: dict[tuple[str, str], object]) -> list[tuple[str, str]]:
    """Kind and uid of what is not the same in both."""
    return sorted(what for what in one.keys() | other.keys() if one.get(what) != other.get(what))
