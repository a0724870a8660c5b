"""The operator's own port, and its requests, at addresses of both kinds; what is served there."""

import asyncio
from collections.abc import Callable, Iterator

import pytest
import uvloop
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
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


class Crowd(Collector):
    """Two families of many series each, of which it is known how often they were asked for."""

    def __init__(self, asked: Callable[[], None] = lambda: None) -> None:
        self.times = 0
        self._asked = asked

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        self.times += 1
        self._asked()
        for family in (
            GaugeMetricFamily("step", "Steps.", labels=("name",)),
            CounterMetricFamily("lost", "Seconds.", labels=("name",)),
        ):
            for number in range(3000):
                family.add_metric((f'job "{number}"',), number)
            yield family


def registry(*collectors: Collector) -> CollectorRegistry:
    made = CollectorRegistry()
    for collector in collectors:
        made.register(collector)
    return made


def test_a_page_of_many_series_holds_up_nobody() -> None:
    series = registry(Crowd(), OperatorMetrics(list, lambda: 0).registry)

    async def asked() -> tuple[bytes, int]:
        page, turns = asyncio.create_task(server.MetricsPage(series).text()), 0
        while not page.done():
            turns += 1
            await asyncio.sleep(0)
        return page.result(), turns

    text, turns = asyncio.run(asked())

    assert text == generate_latest(series)
    assert turns > 20


def test_whoever_asks_without_end_does_not_take_all_of_the_time() -> None:
    now = [100.0]

    def takes_two_seconds() -> None:
        now[0] += 2.0

    crowd = Crowd()
    page = server.MetricsPage(registry(crowd), clock=lambda: now[0])
    crowd.times, crowd._asked = 0, takes_two_seconds

    async def ask(*times: float) -> int:
        for time in times:
            now[0] = time
            await asyncio.gather(*(page.text() for _ in range(50)))
        return crowd.times

    # Fifty at once get one page, made in two seconds, and so do all within the eight seconds after that.
    assert asyncio.run(ask(100.0, 103.0, 109.9)) == 1
    assert asyncio.run(ask(110.0)) == 2


def test_a_page_that_could_not_be_made_is_made_when_it_is_asked_for_again() -> None:
    def fails() -> None:
        raise ValueError("no such figure")

    crowd = Crowd()
    page = server.MetricsPage(registry(crowd))
    crowd._asked = fails

    async def ask() -> bytes:
        with pytest.raises(ValueError, match="no such figure"):
            await page.text()
        crowd._asked = lambda: None
        return await page.text()

    assert b"lost_total" in asyncio.run(ask())
