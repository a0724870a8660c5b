"""Processor time of the operator's short requests over TLS, by aiohttp's session and by connections of our own.

    python -m tests.bench.requests [ROUNDS]

A process of its own answers every request at once with an object of about 1 KiB. Prints, for each round,
milliseconds of this process for one request: the session on asyncio's loop, the same on uvloop, our own connections on
uvloop.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import ssl
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import aiohttp
import uvloop

from sft_api.ports import free_port
from sft_operator.cluster.client import Cluster
from sft_operator.cluster.requests import Requests
from tests.certificates import self_signed

REQUESTS = 2000
AT_ONCE = 4
_WARM_UP = 200
_ENTRY = b'{"manager":"sft","operation":"Update","fieldsV1":{"f:a":{},"f:b":{}}}'
_OBJECT = b'{"kind":"Service","metadata":{"name":"a","managedFields":[' + b",".join([_ENTRY] * 12) + b"]}}"
_HEAD = f"HTTP/1.1 201 Created\r\nContent-Type: application/json\r\nContent-Length: {len(_OBJECT)}\r\n\r\n".encode()
_SERVICE = {
    "apiVersion": "v1",
    "kind": "Service",
    "metadata": {"name": "a", "labels": {f"label-{number}": "x" * 20 for number in range(10)}},
    "spec": {"ports": [{"name": "progress", "port": 8471}]},
}


class _Answering(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self._received = transport, b""

    def data_received(self, data: bytes) -> None:
        self._received += data
        while b"\r\n\r\n" in self._received:
            head, rest = self._received.split(b"\r\n\r\n", 1)
            lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")]
            length = int(lengths[0].partition(b":")[2])
            if len(rest) < length:
                return
            self._received = rest[length:]
            self._transport.write(_HEAD + _OBJECT)  # type: ignore[attr-defined]


async def _serve(port: int, folder: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    server = await asyncio.get_running_loop().create_server(_Answering, "127.0.0.1", port, ssl=context)
    await server.serve_forever()


def _server(port: int, folder: Path) -> None:
    uvloop.run(_serve(port, folder))


async def _milliseconds(port: int, folder: Path, *, own: bool) -> float:
    """Of this process, for one request."""
    context = ssl.create_default_context(cafile=str(folder / "tls.crt"))
    url = f"https://127.0.0.1:{port}"

    async def token() -> str:
        return "Bearer " + "x" * 900

    async def authorize(
        request: aiohttp.ClientRequest, handler: Callable[[aiohttp.ClientRequest], Any]
    ) -> aiohttp.ClientResponse:
        request.headers["Authorization"] = await token()
        answer: aiohttp.ClientResponse = await handler(request)
        return answer

    connector = aiohttp.TCPConnector(ssl=context, limit=100, keepalive_timeout=60)
    async with aiohttp.ClientSession(connector=connector, middlewares=(authorize,)) as session:
        requests = Requests(url, context, token) if own else None
        cluster = Cluster(url, session, requests=requests)

        async def create(count: int) -> None:
            for _ in range(count):
                await cluster.create("Service", "default", _SERVICE)

        await _answered(create)
        await create(_WARM_UP)
        began = time.process_time()
        await asyncio.gather(*(create(REQUESTS // AT_ONCE) for _ in range(AT_ONCE)))
        seconds = time.process_time() - began
        if requests is not None:
            requests.close()
    return 1e3 * seconds / REQUESTS


async def _answered(create: Callable[[int], Coroutine[Any, Any, None]]) -> None:
    """Wait until the server is there."""
    while True:
        try:
            return await create(1)
        except aiohttp.ClientConnectionError:
            await asyncio.sleep(0.1)


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    with tempfile.TemporaryDirectory(prefix="sft-bench-") as scratch:
        folder, port = Path(scratch), free_port()
        self_signed(folder)
        server = multiprocessing.Process(target=_server, args=(port, folder), daemon=True)
        server.start()
        try:
            for _ in range(rounds):
                print(f"session_asyncio_ms={asyncio.run(_milliseconds(port, folder, own=False)):.3f}")
                print(f"session_uvloop_ms={uvloop.run(_milliseconds(port, folder, own=False)):.3f}")
                print(f"own_uvloop_ms={uvloop.run(_milliseconds(port, folder, own=True)):.3f}", flush=True)
        finally:
            server.kill()


if __name__ == "__main__":
    main()
