"""Reads progress reports from training pods. They run code of tenants: nothing they answer can do harm.

Only pods that a Job of ours made are dialled, by IP, on one port; the answer is bounded in time and size, and
redirects are not followed.
"""

import asyncio
import hashlib
from collections import OrderedDict
from dataclasses import dataclass

import aiohttp
from pydantic import ValidationError

from sft_api.progress import MOST_WARNINGS, PROGRESS_PORT, Progress, TrainingProgress
from sft_api.times import parse_time, timestamp
from sft_api.v1alpha1 import CheckpointStatus

from ..picture import untrusted
from ..picture.observed import with_clean_ids

MAX_BYTES = 256 * 1024
_SHOWN_ERRORS, _SHOWN_CHARACTERS = 3, 500
_WARNING_CHARACTERS = 1000
"""As a status shows them."""
TIMEOUT = aiohttp.ClientTimeout(total=4, sock_connect=2)
KEPT_PODS = 500
"""Connections that stay open: to the pods that were asked last. Where more are asked in turn, none would be used
again."""
_KEEP_SECONDS = 27.0
"""A little more than the longest pause between two questions, less than the supervisor keeps one open."""


class UnusableReport(Exception):
    """The pod did not answer with a progress report; the message says what it did."""


class UnreadableReport(UnusableReport):
    """It answered with something else; asking again will not help."""


@dataclass(frozen=True)
class _Heard:
    """The last report of a pod."""

    digest: bytes
    progress: Progress


class ProgressClient:
    """Reads reports, so many at a time."""

    def __init__(self, url: str, *, concurrency: int) -> None:
        """``url``: see ``Settings.progress_url``."""
        self._url = url
        self._limit = asyncio.Semaphore(concurrency)
        self._heard: OrderedDict[tuple[str, str], _Heard] = OrderedDict()
        """By URL and uid of the pod, ``KEPT_PODS`` at most: the longest unasked comes first."""
        # Sessions of their own: the API server's token must never travel to a pod.
        self._keeping = _session(aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_SECONDS))
        self._closing = _session(aiohttp.TCPConnector(limit=0, force_close=True))

    async def close(self) -> None:
        """Close the connections."""
        await self._keeping.close()
        await self._closing.close()

    async def read(self, *, address: str, namespace: str, name: str, job_uid: str, pod_uid: str) -> Progress:
        """The report of the pod ``pod_uid`` of the SFTJob ``job_uid`` at the IP ``address``.

        The same one as before when the pod says the very same. Raises ``UnusableReport``, also when somebody else
        answers there.
        """
        host = f"[{address}]" if ":" in address else address
        url = self._url.format(address=host, port=PROGRESS_PORT, namespace=namespace, name=name)
        before = self._heard.pop((url, pod_uid), None)
        # Of many that are asked in turn none is among the last; whoever has said nothing of use is not kept either.
        session = self._keeping if before else self._closing
        async with self._limit:
            try:
                async with session.get(url, timeout=TIMEOUT, allow_redirects=False) as response:
                    if response.status != 200:
                        raise UnusableReport(f"{url} answered {response.status}")
                    body = await _bounded(response)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                raise UnusableReport(f"{url}: {type(error).__name__}: {error}") from error
        heard = _read(body, before)
        progress = heard.progress
        # Another pod may have its address by now: a connection that was kept says nothing of who answers.
        if progress.job_uid != job_uid or progress.pod_uid not in ("", pod_uid):
            raise UnusableReport(f"{url} answered for SFTJob {progress.job_uid[:64]!r}, pod {progress.pod_uid[:64]!r}")
        self._heard[url, pod_uid] = heard
        if len(self._heard) > KEPT_PODS:
            self._heard.popitem(last=False)
        return progress


def _session(connector: aiohttp.TCPConnector) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())


def _read(body: bytes, before: _Heard | None) -> _Heard:
    """The report in ``body``, parsed unless it is the very same as ``before``."""
    digest = hashlib.blake2b(body, digest_size=16).digest()
    return before if before and before.digest == digest else _Heard(digest, parse_report(body))


async def _bounded(response: aiohttp.ClientResponse) -> bytes:
    body = b""
    async for chunk in response.content.iter_chunked(64 * 1024):
        body += chunk
        if len(body) > MAX_BYTES:
            raise UnreadableReport(f"the report is larger than {MAX_BYTES} bytes")
    return body


def parse_report(body: bytes) -> Progress:
    """The report in ``body``; raises ``UnreadableReport``."""
    try:
        progress = Progress.model_validate(untrusted.loads(body))
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False, include_input=False)[:_SHOWN_ERRORS]
        wrong = (f"{'.'.join(map(str, part['loc']))}: {part['msg']}" for part in errors)
        raise UnreadableReport("; ".join(wrong)[:_SHOWN_CHARACTERS]) from error
    except ValueError as error:
        raise UnreadableReport(f"no JSON: {error}"[:_SHOWN_CHARACTERS]) from error
    return progress.model_copy(
        update={
            "training": as_a_status_shows(progress.training),
            "incidents": with_clean_ids(progress.incidents),
        }
    )


def as_a_status_shows(training: TrainingProgress) -> TrainingProgress:
    """``training`` with no more than a status can hold: the report of each job is kept for as long as it is there."""
    checkpoints = training.checkpoints
    clean = checkpoints.model_copy(
        update={
            "latest": _checkpoint(checkpoints.latest),
            "best": _checkpoint(checkpoints.best),
            "kept": [kept for item in checkpoints.kept if (kept := _checkpoint(item))],
        }
    )
    warnings = [warning[:_WARNING_CHARACTERS] for warning in training.warnings[-MOST_WARNINGS:]]
    shown = {"checkpoints": clean, "warnings": warnings, "eval_losses": {}, "eval_accuracies": {}}
    return training.model_copy(update=shown)


def _checkpoint(status: CheckpointStatus | None) -> CheckpointStatus | None:
    """``status``, unless its time is none: the API server would refuse the whole status for it."""
    time = parse_time(status.time) if status else None
    return status.model_copy(update={"time": timestamp(time)}) if status and time else None
