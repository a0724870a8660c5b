"""The operator's own port, and its requests, at addresses of both kinds; what is served there."""

import asyncio
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import uvloop
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from sft_api.ports import free_port
from sft_operator import server
from sft_operator.cluster.requests import Requests
from sft_operator.metrics import OperatorMetrics


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_probes_reach_it_at_an_address_of_either_kind(run: object, host: str) -> None:
    async def token() -> None:
        return None

    async def probed() -> int:
        port = free_port()
        runner = await server.serve(port, CollectorRegistry(), sick=lambda: None, not_ready=lambda: None)
        requests = Requests(f"http://{host}:{port}", None, token)
        try:
            answer = await requests.send("GET", "/healthz", content_type="", accept="*/*", body=None)
            return answer.status
        finally:
            requests.close()
            await runner.cleanup()

    assert run(probed()) == 200  # type: ignore[operator]


class Asked(Collector):
    """One family, of which it is known how often it was asked for."""

    def __init__(self, asked: Callable[[], None] = lambda: None) -> None:
        self.times = 0
        self._asked = asked

    def collect(self) -> Iterator[GaugeMetricFamily]:
        self.times += 1
        self._asked()
        yield GaugeMetricFamily("step", "Steps.", 1.0)


def registry(collector: Collector) -> CollectorRegistry:
    made = CollectorRegistry()
    made.register(collector)
    return made


class Status(dict[str, Any]):
    """One of which it is known how often any was looked into."""

    reads = 0

    def get(self, *name: Any) -> Any:
        Status.reads += 1
        return super().get(*name)


def test_a_page_of_many_series_holds_up_nobody() -> None:
    jobs = [{"metadata": {"namespace": "team", "name": f"job-{number}"}, "status": Status()} for number in range(1000)]
    series = OperatorMetrics(lambda: jobs, lambda: 0).registry

    async def asked() -> tuple[bytes, list[int]]:
        page, reads = asyncio.create_task(server.MetricsPage(series).text()), [Status.reads]
        while not page.done():
            await asyncio.sleep(0)
            reads.append(Status.reads)
        return page.result(), reads

    text, reads = asyncio.run(asked())

    assert max(now - before for before, now in pairwise(reads)) < len(jobs)
    # The lines that say what a metric is come once, and all others are one of a kind.
    assert text.splitlines() == [*dict.fromkeys(generate_latest(series).splitlines())]


def test_whoever_asks_without_end_does_not_take_all_of_the_time() -> None:
    now = [100.0]

    def takes_two_seconds() -> None:
        now[0] += 2.0

    asked_for = Asked()
    page = server.MetricsPage(registry(asked_for), clock=lambda: now[0])
    asked_for.times, asked_for._asked = 0, takes_two_seconds

    async def ask(*times: float) -> int:
        for time in times:
            now[0] = time
            await asyncio.gather(*(page.text() for _ in range(50)))
        return asked_for.times

    # Fifty at once get one page, made in two seconds, and so do all within the eight seconds after that.
    assert asyncio.run(ask(100.0, 103.0, 109.9)) == 1
    assert asyncio.run(ask(110.0)) == 2


def test_a_page_that_could_not_be_made_is_made_when_it_is_asked_for_again() -> None:
    def fails() -> None:
        raise ValueError("no such figure")

    asked_for = Asked()
    page = server.MetricsPage(registry(asked_for))
    asked_for._asked = fails

    async def ask() -> bytes:
        with pytest.raises(ValueError, match="no such figure"):
            await page.text()
        asked_for._asked = lambda: None
        return await page.text()

    assert b"step" in asyncio.run(ask())
