"""Reads progress reports from training pods. They run code of tenants: nothing they answer can do harm.

Only pods that a Job of ours made are dialled, by IP, on one port; the answer is bounded in time and size, and
redirects are not followed.
"""

import asyncio
from datetime import UTC, datetime
from typing import Any

import aiohttp

from sft_api.progress import PROGRESS_PORT, Incident, Progress
from sft_api.report import timestamp
from sft_api.v1alpha1 import CheckpointStatus

from . import untrusted
from .observed import parse_time

MAX_BYTES = 256 * 1024
TIMEOUT = aiohttp.ClientTimeout(total=4, sock_connect=2)


class UnusableReport(Exception):
    """The pod did not answer with a progress report; the message says what it did."""


class ProgressClient:
    """Reads reports, so many at a time."""

    def __init__(self, url: str, *, concurrency: int) -> None:
        """``url``: see ``Settings.progress_url``."""
        self._url = url
        self._limit = asyncio.Semaphore(concurrency)
        # A session of its own: the API server's token must never travel to a pod.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True), cookie_jar=aiohttp.DummyCookieJar()
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()

    async def read(self, *, address: str, namespace: str, name: str) -> Progress:
        """The report of the pod at the IP ``address``; raises ``UnusableReport``."""
        host = f"[{address}]" if ":" in address else address
        url = self._url.format(address=host, port=PROGRESS_PORT, namespace=namespace, name=name)
        async with self._limit:
            try:
                async with self._session.get(url, timeout=TIMEOUT, allow_redirects=False) as response:
                    if response.status != 200:
                        raise UnusableReport(f"{url} answered {response.status}")
                    body = await _bounded(response)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                raise UnusableReport(f"{url}: {type(error).__name__}: {error}") from error
        return parse_report(body)


async def _bounded(response: aiohttp.ClientResponse) -> bytes:
    body = b""
    async for chunk in response.content.iter_chunked(64 * 1024):
        body += chunk
        if len(body) > MAX_BYTES:
            raise UnusableReport(f"the report is larger than {MAX_BYTES} bytes")
    return body


def parse_report(body: bytes) -> Progress:
    """The report in ``body``, its times with a time zone; raises ``UnusableReport``."""
    try:
        progress = Progress.model_validate(untrusted.loads(body))
    except ValueError as error:
        raise UnusableReport(f"no progress report: {str(error)[:500]}") from error
    training = progress.training
    checkpoints = training.checkpoints
    clean = checkpoints.model_copy(
        update={
            "latest": _checkpoint(checkpoints.latest),
            "best": _checkpoint(checkpoints.best),
            "kept": [kept for item in checkpoints.kept if (kept := _checkpoint(item))],
        }
    )
    update: dict[str, Any] = {"checkpoints": clean, "update_time": _aware(training.update_time)}
    return progress.model_copy(
        update={
            "training": training.model_copy(update=update),
            "incidents": [_incident(incident) for incident in progress.incidents],
        }
    )


def _aware(time: datetime) -> datetime:
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def _checkpoint(status: CheckpointStatus | None) -> CheckpointStatus | None:
    """``status``, unless its time is none: the API server would refuse the whole status for it."""
    time = parse_time(status.time) if status else None
    return status.model_copy(update={"time": timestamp(time)}) if status and time else None


def _incident(incident: Incident) -> Incident:
    recovered = incident.recovered_time
    return incident.model_copy(
        update={
            "id": incident.id[:100],
            "time": _aware(incident.time),
            "recovered_time": _aware(recovered) if recovered else None,
        }
    )
