"""How often the lookout asks the API server about a job that does not move."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any, cast

import pytest

from sft_api.progress import Progress
from sft_api.v1alpha1 import SFTJobStatus
from sft_operator.cluster.client import ApiError, Cluster
from sft_operator.cluster.lookout import Lookout
from sft_operator.cluster.progress_client import ProgressClient, UnreadableReport
from sft_operator.decisions.spec import run_terms
from sft_operator.metrics import OperatorMetrics
from sft_operator.picture.cache import Cache, Key
from tests.unit.operator.make import NOW, child_manifest, job_manifest, make_job, pod_manifest, take_listing
from tests.unit.operator.test_reconciler import KEY, SETTINGS


class Events:
    """Counts when the events of the job are listed."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.error: Exception | None = None
        self.now = 0.0

    async def scan(self, kind: str, *_: Any, **__: Any) -> int:
        assert kind == "CoreEvent"
        self.times.append(self.now)
        if self.error:
            raise self.error
        return 1

    async def get(self, *_: Any) -> dict[str, Any]:
        return {}


def looks(monkeypatch: pytest.MonkeyPatch, pods: Callable[[int], int], seconds: int, events: Events) -> list[float]:
    """Look every second at a job of two pods, of which ``pods(second)`` are there; when events were listed."""
    cache, version = Cache(), 100
    cache.store("SFTJob", job_manifest())
    cache.store("Job", child_manifest())
    lookout = Lookout(
        cast(Cluster, events),
        cache,
        cast(ProgressClient, None),
        None,
        SETTINGS,
        OperatorMetrics(cache.manifests, lambda: 0),
        look_again=lambda key: None,
        now=lambda: cast(datetime, NOW + timedelta(seconds=events.now)),
    )
    monkeypatch.setattr("sft_operator.cluster.lookout.loop_time", lambda: events.now)

    async def scenario() -> None:
        nonlocal version
        for second in range(seconds):
            version += 1
            events.now = float(second)
            present = [pod_manifest(i, phase="Pending", version=str(version), node=None) for i in range(pods(second))]
            take_listing(cache, "Pod", present, version)
            await lookout.look(KEY, run_terms(make_job()), SFTJobStatus(), None)

    asyncio.run(scenario())
    return events.times


def test_what_does_not_move_is_read_ever_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    assert looks(monkeypatch, lambda second: 1, 100, Events()) == [2, 6, 14, 30, 60, 90]


def test_pods_that_come_and_go_do_not_have_events_read_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is refused by its node, or evicted, as soon as it was made."""
    times = looks(monkeypatch, lambda second: 2 if second % 4 == 3 else 1, 300, Events())

    assert times[0] == 2
    assert len(times) < 15
    assert all(later - earlier >= 28 for earlier, later in itertools.pairwise(times[5:]))


def test_after_a_quiet_time_they_are_read_at_once_again(monkeypatch: pytest.MonkeyPatch) -> None:
    times = looks(monkeypatch, lambda second: 2 if 70 <= second < 200 else 1, 210, Events())

    assert times == [2, 6, 14, 30, 60, 202, 206]


@pytest.mark.parametrize(
    "error", [ApiError(429, "TooManyRequests", "slow down"), ApiError(403, "", "no"), TimeoutError()]
)
def test_events_that_cannot_be_read_hold_up_nothing_and_are_asked_for_ever_more_rarely(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    events = Events()
    events.error = error

    assert looks(monkeypatch, lambda second: 1, 40, events) == [2, 6, 14, 30]


class Pods:
    """What the supervisors answer, one after the other."""

    def __init__(self, *answers: Exception | Progress) -> None:
        self.answers = list(answers)

    async def read(self, **_: Any) -> Progress:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            UnreadableReport("training.step: not a number"),
            "the report of pod tulu-0-aaaaa cannot be read: training.step",
        ),
        (
            OverflowError("date value out of range"),
            "the progress cannot be read: OverflowError: date value out of range",
        ),
    ],
)
def test_a_report_that_cannot_be_read_is_said_on_the_job_until_one_can(
    monkeypatch: pytest.MonkeyPatch, error: Exception, said: str
) -> None:
    cache = Cache()
    again: list[Key] = []
    for kind, manifest in (("SFTJob", job_manifest()), ("Job", child_manifest()), ("Pod", pod_manifest(0))):
        cache.store(kind, manifest)
    lookout = Lookout(
        cast(Cluster, Events()),
        cache,
        cast(ProgressClient, Pods(error, Progress())),
        None,
        SETTINGS,
        OperatorMetrics(cache.manifests, lambda: 0),
        look_again=again.append,
        now=lambda: NOW,
    )

    async def scenario() -> None:
        await lookout.look(KEY, run_terms(make_job()), SFTJobStatus(), None)
        while not cache.observed(KEY).unreadable:
            await asyncio.sleep(0)
        assert cache.observed(KEY).unreadable[0].startswith(said)
        assert again == [KEY]

        monkeypatch.setattr("sft_operator.cluster.lookout.loop_time", lambda: asyncio.get_running_loop().time() + 3600)
        await lookout.look(KEY, run_terms(make_job()), SFTJobStatus(), None)
        while cache.observed(KEY).unreadable:
            await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(scenario(), 30))
