"""One kind of object, listed and then watched, by our own client: nothing is held of an object but what is kept of it.

A list comes as a stream of events where the server has that (on by default from Kubernetes 1.34 on), else in pages.
Nothing that comes over the wire ends a watch for good, and nothing makes it spin.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import NamedTuple

import aiohttp

from ..decisions.pauses import doubled
from ..picture.listing import Listing
from ..picture.observed import Manifest
from ..picture.picture import Key, version_of
from ..workqueue import loop_time
from .client import UNREACHABLE, ApiError, Cluster
from .watch_body import Event

logger = logging.getLogger(__name__)

Seen = Callable[[str, str | None, Manifest], None]
"""Called with kind, type of event (None when listed, ADDED, MODIFIED, DELETED, BOOKMARK) and the object."""

_TRIES_OF_A_LISTING = 3
_LIST_AGAIN_AFTER_FAILURES = 3
_NO_STREAMED_LISTS = (400, 422)
"""The server does not know streamed lists, or they are switched off."""
_RESTORED = "the etcd of the API server was restored, and all is read anew"


class HistoryLost(Exception):
    """The API server, or an object in it, is at an earlier version than it was: its etcd was restored.

    What it tells is then older than what is held, and nothing in a picture gives way to what is older: who follows it
    has to begin anew, with an empty one.
    """


@dataclass(frozen=True)
class Pace:
    """How long an informer waits for what, in seconds."""

    server: int = 300
    """After which the server ends a watch, so that many operators do not stay with one of several servers."""
    inactivity: float = 75.0
    """Without a byte: bookmarks come about once a minute."""
    listing: float = 30.0
    """Without a byte of a list."""
    steady: float = 5.0
    """A watch that lasted that long was none that failed at once."""
    first_pause: float = 0.5
    longest_pause: float = 30.0


class Listed(NamedTuple):
    """What a complete listing brought."""

    version: int
    """At which it was made."""
    changed: set[Key]
    """The keys for which it brought something new."""
    news: int
    """Objects that no watch had told of, or not in that version."""
    newest: int
    """The highest version among those."""


class Informer:
    """``list`` once, then ``watch`` for ever; ``list`` as often as wanted meanwhile, to see what the watch is worth."""

    def __init__(
        self,
        cluster: Cluster,
        kind: str,
        namespace: str | None,
        labels: str,
        *,
        begin: Callable[[], Listing],
        seen: Seen,
        breath: float = 0.0,
        pace: Pace | None = None,
    ) -> None:
        """``begin`` begins to take in a listing; ``seen`` takes what a watch tells, ``breath`` seconds late at most."""
        self._cluster = cluster
        self._kind = kind
        self._namespace = namespace
        self._labels = labels
        self._begin = begin
        self._seen = seen
        self._breath = breath
        self._pace = pace or Pace()
        self._streams = True
        self._version: int | None = None
        """Up to which a watch of ours has told of everything. Only lists and bookmarks say so: should lines ever come
        out of order, the last event before a break would not."""
        self._listed = 0
        """Version of the newest list."""
        self._untold: set[Key] = set()
        """Keys for which lists that broke off have brought something new: it is no news to the list after that."""

    async def list(self) -> Listed:
        """Take in all that is; the watch begins there when it has no better place.

        Raises ``REQUEST_ERRORS``, ``HistoryLost``.
        """
        before = self._listed  # another list may be under way
        listing, version = await self._take_all()
        found = f"{self._kind}s are listed at version {version}, and "
        if 0 < version < before:
            raise HistoryLost(f"{found}were at {before}: {_RESTORED}")
        # Restored with a raised version, as etcd can for the sake of such followers as this, it is at a later one.
        if listing.is_of_the_past(version):
            raise HistoryLost(f"{found}one of them as it was before a change that it had by then: {_RESTORED}")
        self._listed = max(version, self._listed)
        changed = self._untold | listing.end(version, self._version)
        self._untold = set()
        listed = Listed(version, changed, listing.news, listing.newest)
        if self._version is None:
            self._version = version
            self._seen(self._kind, "BOOKMARK", {"metadata": {"resourceVersion": str(version)}})
        return listed

    async def _take_all(self) -> tuple[Listing, int]:
        if self._streams:
            try:
                return await self._take(self._take_stream)
            except ApiError as error:
                if error.passing:
                    raise
                self._streams = error.code not in _NO_STREAMED_LISTS
            except UNREACHABLE as error:
                # Proxies may hold back what is no whole answer.
                logger.warning("the list of %ss: %s; now by pages", self._kind, str(error) or repr(error))
        for tries_left in reversed(range(_TRIES_OF_A_LISTING)):
            try:
                return await self._take(self._take_pages)
            except ApiError as error:
                if error.code != 410 or not tries_left:  # it expired between two pages
                    raise
        raise AssertionError("the last try has raised or returned")

    async def _take(self, how: Callable[[Listing], Awaitable[int]]) -> tuple[Listing, int]:
        listing = self._begin()
        try:
            return listing, await how(listing)
        except BaseException:
            self._untold |= listing.changed
            raise

    async def _take_pages(self, listing: Listing) -> int:
        return await self._cluster.scan(self._kind, self._namespace, listing.take, labels=self._labels)

    async def _take_stream(self, listing: Listing) -> int:
        """All objects as the events with which a watch begins; the version at which that was all of them."""
        query = {"sendInitialEvents": "true", "resourceVersionMatch": "NotOlderThan", "timeoutSeconds": "300"}
        timeout = aiohttp.ClientTimeout(total=300, sock_connect=5, sock_read=self._pace.listing)
        version = None

        def take(event: Event) -> bool:
            nonlocal version
            if event.ends_list:
                version = version_of(event.object)
            elif event.type == "DELETED":
                self._seen(self._kind, event.type, event.object)
            elif event.type != "BOOKMARK":
                listing.take(event.object)
            return version is not None

        await self._cluster.watch(self._kind, self._namespace, take, labels=self._labels, query=query, timeout=timeout)
        if version is None:
            raise aiohttp.ClientPayloadError("the stream ended before the list did")
        return version

    async def watch(self, changed: Callable[[set[Key]], None]) -> None:
        """Tell of every change, for ever; begins where ``list`` ended.

        ``changed`` is called with the keys for which something was found that fell into a gap of the watch. Raises
        ``HistoryLost``.
        """
        failures = 0
        while True:
            began, asked = loop_time(), 0.0
            try:
                if self._version is None:
                    changed((await self.list()).changed)
                await self._follow()
            except ApiError as error:
                logger.warning("the watch of %ss: %s", self._kind, error)
                asked = error.retry_after or 0.0
                if not error.passing:
                    self._version = None
            except HistoryLost:
                raise
            except Exception as error:  # whatever comes over the wire: a watch goes on
                bug = not isinstance(error, aiohttp.ClientError | OSError)
                logger.warning("the watch of %ss: %s", self._kind, str(error) or repr(error), exc_info=bug)
            failures = 0 if loop_time() - began >= self._pace.steady else failures + 1
            if failures >= _LIST_AGAIN_AFTER_FAILURES:
                self._version = None  # it may be one that this server has never had
            pause = doubled(self._pace.first_pause, max(0, failures - 1), longest=self._pace.longest_pause)
            await asyncio.sleep(max(pause, asked) * random.uniform(1.0, 1.5))  # noqa: S311

    async def _follow(self) -> None:
        """One watch, until it ends."""
        query = {"timeoutSeconds": str(self._pace.server), "resourceVersion": str(self._version)}
        total = self._pace.server + self._pace.listing  # bytes without a line break are no life
        timeout = aiohttp.ClientTimeout(total=total, sock_connect=5, sock_read=self._pace.inactivity)

        def take(event: Event) -> bool:
            if event.type == "BOOKMARK":
                self._version = max(self._version or 0, version_of(event.object))
            self._seen(self._kind, event.type, event.object)
            return False

        await self._cluster.watch(
            self._kind,
            self._namespace,
            take,
            labels=self._labels,
            query=query,
            timeout=timeout,
            breath=self._breath,
        )
