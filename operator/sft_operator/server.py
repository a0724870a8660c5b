"""The operator's own HTTP server: /metrics, /healthz, /readyz."""

import asyncio
import time
from collections.abc import Callable, Iterator

from aiohttp import web
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

_REST = 4.0


class MetricsPage:
    """The text of all series of ``registry``, made in pieces: whatever else the operator does has its turn between two.

    Who asks while it is made gets that one, and no other is made before four times as long as it took: whoever asks
    without end, and anybody who reaches the port may, has pages made in a fifth of the operator's time at most. To send
    one that is made costs what an answer of its size costs.
    """

    def __init__(self, registry: CollectorRegistry, clock: Callable[[], float] = time.monotonic) -> None:
        self._registry = registry
        self._clock = clock
        self._made: asyncio.Task[bytes] | None = None
        self._rests_until = 0.0

    async def text(self) -> bytes:
        """All series, in the text format of Prometheus."""
        if self._made is None or (self._made.done() and self._clock() >= self._rests_until):
            self._made = asyncio.create_task(self._make(), name="metrics")
        # Others wait for it, too.
        return await asyncio.shield(self._made)

    async def _make(self) -> bytes:
        pieces, took, began = [], 0.0, self._clock()
        for piece in _pieces(self._registry):
            pieces.append(piece)
            took += self._clock() - began
            await asyncio.sleep(0)
            began = self._clock()
        self._rests_until = self._clock() + _REST * took
        return b"".join(pieces)


class _Only(Collector):
    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterator[Metric]:
        yield self._family


def _pieces(registry: CollectorRegistry) -> Iterator[bytes]:
    """What ``generate_latest`` makes of ``registry``, whose collectors may give a long family in pieces."""
    before = None
    for family in registry.collect():
        piece = generate_latest(_Only(family))
        # What goes on has not again the two lines that say what it is.
        yield piece if family.name != before else piece.split(b"\n", 2)[2]
        before = family.name


async def serve(
    port: int, registry: CollectorRegistry, *, sick: Callable[[], str | None], not_ready: Callable[[], str | None]
) -> web.AppRunner:
    """Start serving on ``port`` of all addresses; the caller cleans the runner up.

    ``sick`` and ``not_ready`` say what is wrong, or None.
    """
    page = MetricsPage(registry)

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=await page.text(), headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})

    def probe(problem: Callable[[], str | None]) -> Callable[[web.Request], object]:
        async def answer(_: web.Request) -> web.Response:
            text = problem()
            return web.Response(text=text or "ok", status=503 if text else 200)

        return answer

    application = web.Application()
    application.router.add_get("/metrics", metrics)
    application.router.add_get("/healthz", probe(sick))  # type: ignore[arg-type]
    application.router.add_get("/readyz", probe(not_ready))  # type: ignore[arg-type]
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, None, port).start()
    return runner
