"""A member's connection to index 0."""

import asyncio
from collections.abc import Callable

from pydantic import ValidationError

from .clock import AwakeClock
from .http import Client, MalformedError
from .output import Output
from .protocol import EXCHANGE_SECONDS, GOODBYE_SECONDS, RETRY_SECONDS, Order, Report

_FAILURES = (OSError, TimeoutError, MalformedError, ValidationError, asyncio.LimitOverrunError)


class Link:
    """Reports to index 0 for ever, and takes its orders."""

    def __init__(self, host: str, port: int, *, lost_after: float, output: Output, clock: AwakeClock) -> None:
        self._lost_after = lost_after
        self._client = Client(host, port)
        self._name = f"{host}:{port}"
        self._output = output
        self._clock = clock
        self._answered = clock.now()
        self._report: Report | None = None
        self._changed = asyncio.Event()
        self._complaint = ""

    @property
    def address(self) -> str:
        """Address of the index 0 that answered last: a name may still lead to the pod before it."""
        return self._client.peer

    @property
    def lost(self) -> bool:
        """Whether index 0 has not answered for too long."""
        return self._clock.now() - self._answered > self._lost_after

    def offer(self, report: Report) -> None:
        """Send ``report`` from now on, at once when it is new."""
        if report != self._report:
            self._report = report
            self._changed.set()

    async def run(self, receive: Callable[[Order], None]) -> None:
        """Exchange reports for orders until cancelled."""
        await self._changed.wait()
        while True:
            self._changed.clear()
            exchange = asyncio.create_task(self._exchange())
            changed = asyncio.create_task(self._changed.wait())
            try:
                await asyncio.wait({exchange, changed}, return_when=asyncio.FIRST_COMPLETED)
                if exchange.done():
                    order = exchange.result()
                    if order is None:
                        await asyncio.wait({changed}, timeout=RETRY_SECONDS)
                    else:
                        receive(order)
            finally:
                exchange.cancel()
                changed.cancel()
                # A cancelled exchange has closed its connection when the next one begins.
                await asyncio.wait({exchange, changed})

    async def say_goodbye(self, report: Report) -> None:
        """Send the last report; gives up after some seconds."""
        self._report = report
        try:
            async with asyncio.timeout(GOODBYE_SECONDS):
                while await self._exchange() is None:
                    await asyncio.sleep(RETRY_SECONDS)
        except TimeoutError:
            return

    async def _exchange(self) -> Order | None:
        body = self._report.model_dump_json(by_alias=True).encode() if self._report else b""
        try:
            response = await self._client.post("/v1/group", body, EXCHANGE_SECONDS)
            if response.status != 200:
                self._complain(f"refused: {response.body[:300].decode(errors='replace').strip()}")
                return None
            order = Order.model_validate_json(response.body)
        except EOFError:
            self._complain("it closed the connection")
            return None
        except _FAILURES as problem:
            self._complain(str(problem) or type(problem).__name__)
            return None
        self._answered = self._clock.now()
        self._complaint = ""
        return order

    def _complain(self, what: str) -> None:
        if what != self._complaint:
            self._complaint = what
            self._output.say(f"waiting for index 0 at {self._name}: {what}")
