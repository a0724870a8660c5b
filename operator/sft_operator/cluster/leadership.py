"""Which of several replicas works: the one that holds a Lease and keeps renewing it."""

import asyncio
import logging
import random
from datetime import UTC, datetime

from ..config import LeaderElectionSettings
from ..picture.observed import Manifest
from ..picture.untrusted import part
from .client import REQUEST_ERRORS, ApiError, Cluster

logger = logging.getLogger(__name__)


class LeadershipLost(Exception):
    """The Lease could not be renewed in time: another replica may be at work."""


class Leadership:
    """Holds the Lease. Times of others are never compared with our clock: only whether the Lease still changes."""

    def __init__(self, cluster: Cluster, settings: LeaderElectionSettings, identity: str) -> None:
        """``identity`` names this replica, and must be new in every process."""
        self._cluster = cluster
        self._settings = settings
        self._identity = identity
        self._seen = ""
        self._seen_at = 0.0
        self._sent = 0.0
        """When the request was sent that got or renewed the Lease last. Its answer may have come much later, and others
        count from its arrival how long the Lease lasts."""

    async def acquire(self) -> None:
        """Wait until the Lease is ours."""
        clock = asyncio.get_running_loop().time
        while True:
            sent = clock()
            try:
                if await self._try(renew_only=False):
                    self._sent = sent
                    if clock() >= self._ends:
                        continue  # another replica may have taken it before the answer came
                    logger.info("this replica works: it holds Lease %s", self._settings.name)
                    return
            except REQUEST_ERRORS as error:
                logger.warning("Lease %s: %s", self._settings.name, _words(error))
            await asyncio.sleep(self._settings.renew_seconds * random.uniform(0.8, 1.2))  # noqa: S311

    async def keep(self) -> None:
        """Renew for ever what ``acquire`` got; raises ``LeadershipLost`` while it is still ours for a third of its
        time."""
        clock = asyncio.get_running_loop().time
        due = self._sent + self._settings.renew_seconds
        while True:
            await asyncio.sleep(max(0.0, due - clock()))
            sent = clock()
            try:
                async with asyncio.timeout(max(0.1, self._ends - sent)):
                    if not await self._try(renew_only=True):
                        raise LeadershipLost(f"another replica holds Lease {self._settings.name}")
                self._sent = sent
                # From request to request: of a slow API server no answer would come in time after a pause as well.
                due = sent + self._settings.renew_seconds
            except REQUEST_ERRORS as error:
                if clock() >= self._ends:
                    lost = f"Lease {self._settings.name} could not be renewed: {_words(error)}"
                    raise LeadershipLost(lost) from error
                logger.warning("Lease %s: %s", self._settings.name, _words(error))
                # From answer to request: who refuses at once would be asked without a pause.
                due = min(clock() + self._settings.renew_seconds / 4, self._ends)

    @property
    def _ends(self) -> float:
        """When we no longer take it for ours."""
        return self._sent + self._settings.lease_seconds * 2 / 3

    async def release(self) -> None:
        """Let another replica take over at once."""
        try:
            async with asyncio.timeout(self._settings.renew_seconds):
                lease = await self._cluster.get("Lease", self._settings.namespace, self._settings.name)
                if part(lease, "spec").get("holderIdentity") == self._identity:
                    await self._put(lease, holder="")
        except REQUEST_ERRORS as error:
            logger.warning("Lease %s was not released: %s", self._settings.name, _words(error))

    async def _try(self, *, renew_only: bool) -> bool:
        try:
            lease = await self._cluster.get("Lease", self._settings.namespace, self._settings.name)
        except ApiError as error:
            if error.code != 404:
                raise
            return await self._create()
        holder = part(lease, "spec").get("holderIdentity") or ""
        if holder not in ("", self._identity) and (renew_only or not self._expired(lease)):
            return False
        try:
            await self._put(lease, holder=self._identity)
        except ApiError as error:
            if error.code == 409:  # someone else was faster
                return False
            raise
        return True

    def _expired(self, lease: Manifest) -> bool:
        now = asyncio.get_running_loop().time()
        version = lease["metadata"]["resourceVersion"]
        if version != self._seen:
            self._seen, self._seen_at = version, now
        seconds = part(lease, "spec").get("leaseDurationSeconds") or self._settings.lease_seconds
        return bool(now - self._seen_at > seconds)

    async def _create(self) -> bool:
        manifest = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": self._settings.name, "namespace": self._settings.namespace},
            "spec": self._spec(self._identity, transitions=0),
        }
        try:
            await self._cluster.create("Lease", self._settings.namespace, manifest)
        except ApiError as error:
            if error.code == 409:
                return False
            raise
        return True

    async def _put(self, lease: Manifest, *, holder: str) -> None:
        before = part(lease, "spec")
        renewed = bool(holder) and before.get("holderIdentity") == holder
        transitions = (before.get("leaseTransitions") or 0) + (bool(holder) and not renewed)
        manifest = {**lease, "spec": self._spec(holder, transitions)}
        if renewed:
            manifest["spec"]["acquireTime"] = before.get("acquireTime")
        await self._cluster.update("Lease", self._settings.namespace, self._settings.name, manifest)

    def _spec(self, holder: str, transitions: int) -> Manifest:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        return {
            "holderIdentity": holder,
            "leaseDurationSeconds": round(self._settings.lease_seconds),
            "acquireTime": now,
            "renewTime": now,
            "leaseTransitions": transitions,
        }


def _words(error: Exception) -> str:
    return str(error) or "no answer in time"
