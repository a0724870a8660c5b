"""Reads progress reports from training pods. They run code of tenants: nothing they answer can do harm.

Only pods that a Job of ours made are dialled, by IP, on one port; the answer is bounded in time and size, and
redirects are not followed.
"""

import asyncio
import hashlib
import ssl
import time
from collections import OrderedDict
from dataclasses import dataclass
from urllib.parse import urlsplit, urlunsplit

import aiohttp
from pydantic import ValidationError

from sft_api.fitting import fit_status
from sft_api.progress import MOST_WARNINGS, PROGRESS_PORT, Progress, TrainingProgress
from sft_api.times import parse_time, timestamp
from sft_api.v1alpha1 import CheckpointStatus, SlowGpuStatus

from ..picture import untrusted
from ..picture.observed import with_clean_ids
from .requests import Requests, TooLongError

MAX_BYTES = 256 * 1024
_MOST_HEAD_BYTES = 16 * 1024
_SHOWN_ERRORS, _SHOWN_CHARACTERS = 3, 500
_WARNING_CHARACTERS = 1000
"""As a status shows them."""
_SECONDS = 4.0
_CONNECT_SECONDS = 2.0
_SLOW_SECONDS = 1.0
"""A pod whose last answer took longer, or did not come, is a slow one."""
_MOST_SLOW_PODS = 10_000
"""Known at a time, so that those that have gone are forgotten."""
KEPT_PODS = 500
"""Connections that stay open: to the pods that were asked last. Where more are asked in turn, none would be used
again."""


class UnusableReport(Exception):
    """The pod did not answer with a progress report; the message says what it did."""


class UnreadableReport(UnusableReport):
    """It answered with something else; asking again will not help."""


@dataclass(frozen=True)
class _Heard:
    """The last report of a pod."""

    digest: bytes
    progress: Progress
    requests: Requests
    """The connection to it."""


class ProgressClient:
    """Reads reports, so many at a time. Pods that took long at the last time wait for one another, for nobody else."""

    def __init__(self, url: str, *, concurrency: int) -> None:
        """``url``: see ``Settings.progress_url``."""
        self._url = url
        self._limit = asyncio.Semaphore(concurrency)
        self._limit_of_slow = asyncio.Semaphore(max(1, concurrency // 2))
        self._slow: OrderedDict[tuple[str, str], None] = OrderedDict()
        """Pods as below: a node that is away, or a tenant whose pods answer just before they had to."""
        self._heard: OrderedDict[tuple[str, str], _Heard] = OrderedDict()
        """By URL and uid of the pod, ``KEPT_PODS`` at most: the longest unasked comes first."""

    async def close(self) -> None:
        """Close the connections."""
        while self._heard:
            self._heard.popitem()[1].requests.close()

    async def read(self, *, address: str, namespace: str, name: str, job_uid: str, pod_uid: str) -> Progress:
        """The report of the pod ``pod_uid`` of the SFTJob ``job_uid`` at the IP ``address``.

        The same one as before when the pod says the very same. Raises ``UnusableReport``, also when somebody else
        answers there.
        """
        host = f"[{address}]" if ":" in address else address
        url = self._url.format(address=host, port=PROGRESS_PORT, namespace=namespace, name=name)
        before = self._heard.pop((url, pod_uid), None)
        requests = before.requests if before else _requests(url)
        try:
            async with self._limit_of_slow if (url, pod_uid) in self._slow else self._limit:
                began = time.monotonic()
                try:
                    body = await _asked(url, requests)
                finally:
                    self._took((url, pod_uid), time.monotonic() - began)
            digest = hashlib.blake2b(body, digest_size=16).digest()
            progress = before.progress if before and before.digest == digest else parse_report(body)
            # Another pod may have its address by now: a connection that was kept says nothing of who answers.
            if progress.job_uid != job_uid or progress.pod_uid not in ("", pod_uid):
                who = f"SFTJob {progress.job_uid[:64]!r}, pod {progress.pod_uid[:64]!r}"
                raise UnusableReport(f"{url} answered for {who}")
        except BaseException:
            requests.close()
            raise
        if before is None:
            # Of many that are asked in turn none is among the last: a connection is kept from the second time on.
            requests.close()
        if (other := self._heard.pop((url, pod_uid), None)) is not None:
            other.requests.close()
        self._heard[url, pod_uid] = _Heard(digest, progress, requests)
        if len(self._heard) > KEPT_PODS:
            self._heard.popitem(last=False)[1].requests.close()
        return progress

    def _took(self, pod: tuple[str, str], seconds: float) -> None:
        self._slow.pop(pod, None)
        if seconds > _SLOW_SECONDS:
            self._slow[pod] = None
            if len(self._slow) > _MOST_SLOW_PODS:
                self._slow.popitem(last=False)


async def _asked(url: str, requests: Requests) -> bytes:
    parts = urlsplit(url)
    path = urlunsplit(("", "", parts.path or "/", parts.query, ""))
    try:
        async with asyncio.timeout(_SECONDS):
            answer = await requests.send("GET", path, content_type="", accept="application/json", body=None)
    except TooLongError as error:
        raise UnreadableReport(f"the report is larger than {MAX_BYTES} bytes") from error
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise UnusableReport(f"{url}: {type(error).__name__}: {error}") from error
    if answer.status != 200:
        raise UnusableReport(f"{url} answered {answer.status}")
    if len(answer.body) > MAX_BYTES:
        raise UnreadableReport(f"the report is larger than {MAX_BYTES} bytes")
    return answer.body


def _requests(url: str) -> Requests:
    """Of one pod. The session for the API server must not be used: its token must never travel to a pod. Nor any of
    aiohttp: it reads answers that only come before the answer for as long as there are any."""
    parts = urlsplit(url)
    return Requests(
        urlunsplit((parts.scheme, parts.netloc, "", "", "")),
        ssl.create_default_context() if parts.scheme == "https" else None,
        _no_token,
        timeout=_SECONDS,
        connect_timeout=_CONNECT_SECONDS,
        most=1,
        longest=MAX_BYTES + _MOST_HEAD_BYTES,
    )


async def _no_token() -> None:
    return None


def parse_report(body: bytes) -> Progress:
    """The report in ``body``; raises ``UnreadableReport``."""
    try:
        progress = Progress.model_validate(untrusted.loads(body), extra="ignore")
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
    detail = training.phase_detail[:_WARNING_CHARACTERS]
    shown = {"phase_detail": detail, "warnings": warnings, "eval_losses": {}, "eval_accuracies": {}}
    slow = _as_written(training.slow_gpus)
    return training.model_copy(update={"checkpoints": clean, "slow_gpus": slow, **shown})


def _as_written(slow: list[SlowGpuStatus]) -> list[SlowGpuStatus]:
    """``slow`` as it is read again from a status: else what a tenant makes up would be news at each look."""
    fitted = fit_status({"slowGpus": [each.model_dump(by_alias=True) for each in slow]}) if slow else {}
    return [SlowGpuStatus.model_validate(each) for each in fitted.get("slowGpus", [])]


def _checkpoint(status: CheckpointStatus | None) -> CheckpointStatus | None:
    """``status``, unless its time is none: the API server would refuse the whole status for it."""
    time = parse_time(status.time) if status else None
    return status.model_copy(update={"time": timestamp(time)}) if status and time else None
