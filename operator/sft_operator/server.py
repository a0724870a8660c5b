"""The operator's own HTTP server: /metrics, /healthz, /readyz."""

from collections.abc import Callable

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4


async def serve(
    port: int, registry: CollectorRegistry, *, sick: Callable[[], str | None], not_ready: Callable[[], str | None]
) -> web.AppRunner:
    """Start serving on ``port`` of all addresses; the caller cleans the runner up.

    ``sick`` and ``not_ready`` say what is wrong, or None.
    """

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})

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
