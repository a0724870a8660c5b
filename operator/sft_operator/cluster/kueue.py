"""Kueue: asks what it says of a Job, after it was told to stop it or to let it go on. Decides nothing itself."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from ..decisions.queue import workload_patch
from ..picture.observed import deletion_time
from ..picture.owners import owner_uid
from ..picture.untrusted import part, text
from ..picture.workload import Queueing, Workload
from .client import ApiError, Cluster

logger = logging.getLogger(__name__)

JOB_UID_LABEL = "kueue.x-k8s.io/job-uid"
"""On every Workload: uid of the Job it stands for."""

VERSIONS = ("v1beta2", "v1beta1")
"""Of Kueue's API, the best first: where both are served, v1beta1 is old and may be refused."""

_MOST = 50
"""Workloads looked at for one job, which has one."""


@dataclass
class Kueue:
    """What Kueue says of Jobs, over the API server."""

    cluster: Cluster
    now: Callable[[], datetime]

    async def ask(self, namespace: str, job_uid: str, *, stop: bool, queue: str | None) -> Queueing:
        """What Kueue says of the Job, which is in ``queue``, after it was told the user's wish.

        Raises ``aiohttp.ClientError`` when the API server itself is away, ``ApiError`` when it lets nobody in.
        """
        version = VERSIONS[0]
        try:
            for version in VERSIONS:
                workloads = await self._workloads(namespace, job_uid, version)
                if workloads is not None:
                    break
            else:
                return self._answer(served=False)
            told = [await self._tell(namespace, workload, stop=stop, queue=queue) for workload in workloads]
        except ApiError as error:
            if error.code == 401:
                raise
            logger.info("%s: Kueue (%s) about Job %s: %s", namespace, version, job_uid, error)
            return self._answer(problem=error.message or str(error))
        except TimeoutError:
            return self._answer(problem="the API server has no answer from Kueue in time")
        return self._answer(workload=told[-1] if told else None)

    def _answer(self, *, workload: Workload | None = None, served: bool = True, problem: str = "") -> Queueing:
        now = self.now()
        return Queueing(now, now, workload, served, problem)

    async def _workloads(self, namespace: str, job_uid: str, version: str) -> list[Workload] | None:
        """The Workloads of a Job, oldest first, without those that are going; None: this version is not served."""
        try:
            found, _ = await self.cluster.list(
                f"Workload/{version}", namespace, labels=f"{JOB_UID_LABEL}={job_uid}", at_most=_MOST
            )
        except ApiError as error:
            if error.code == 404:
                return None
            raise
        found.sort(key=lambda item: text(part(item, "metadata").get("creationTimestamp")))
        return [
            Workload.from_manifest(item, version)
            for item in found
            # A label is anybody's.
            if owner_uid(item, "Job") == job_uid and deletion_time(part(item, "metadata")) is None
        ]

    async def _tell(self, namespace: str, workload: Workload, *, stop: bool, queue: str | None) -> Workload:
        patch = workload_patch(workload, stop=stop, queue=queue)
        if patch is None:
            return workload
        kind = f"Workload/{workload.version}"
        try:
            answer = await self.cluster.patch(kind, namespace, workload.name, patch)
        except ApiError as error:
            if error.code != 404:  # it is gone, and another look finds the next one
                raise
            return workload
        return Workload.from_manifest(answer, workload.version)
