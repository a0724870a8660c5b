"""The operator's own port, and its requests, at addresses of both kinds."""

import asyncio

import pytest
import uvloop
from prometheus_client import CollectorRegistry

from sft_api.ports import free_port
from sft_operator import server
from sft_operator.cluster.requests import Requests


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
