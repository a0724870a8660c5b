"""A member's connection to index 0."""

import asyncio
from collections.abc import Callable

from pydantic import ValidationError

from .clock import AwakeClock
from .http import Client, MalformedError
from .identity import mismatch, same_token
from .output import Output
from .protocol import EXCHANGE_SECONDS, REFUSED_SECONDS, RETRY_SECONDS, Order, Report
from .settings import Settings

_FAILURES = (OSError, TimeoutError, MalformedError, ValidationError, asyncio.LimitOverrunError)


class Link:
    """Reports to index 0 for ever, and takes its orders."""

    def __init__(self, settings: Settings, *, output: Output, clock: AwakeClock) -> None:
        self._settings = settings
        self._client = Client(settings.coordinator, settings.port)
        self._name = f"{settings.coordinator}:{settings.port}"
        self._pause = RETRY_SECONDS
        self._output = output
        self._clock = clock
        self._answered = clock.now()
        self._stepped = 0.0
        self._report: Report | None = None
        self._changed = asyncio.Event()
        self._complaint = ""

    @property
    def address(self) -> str:
        """Address of the index 0 that answered last: a name may still lead to the pod before it."""
        return self._client.peer

    @property
    def lost(self) -> bool:
        """Whether index 0 has not answered for too long, and the workers have made no step either."""
        return self._clock.now() - max(self._answered, self._stepped) > self._settings.lost_after

    @property
    def silent_seconds(self) -> float:
        """Since index 0 answered last."""
        return self._clock.now() - self._answered

    def saw_step(self) -> None:
        """The workers have made a step, which none does without rank 0."""
        self._stepped = self._clock.now()

    def offer(self, report: Report) -> None:
        """Send ``report`` from now on, at once when it is new; what workers do goes with the next exchange."""
        before, self._report = self._report, report
        if before is None or before.model_copy(update={"activity": report.activity}) != report:
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
                        await asyncio.wait({changed}, timeout=self._pause)
                    else:
                        receive(order)
            finally:
                exchange.cancel()
                changed.cancel()
                # A cancelled exchange has closed its connection when the next one begins.
                await asyncio.wait({exchange, changed})

    async def say_goodbye(self, report: Report, seconds: float) -> None:
        """Send the last report; gives up after so many ``seconds``."""
        self._report = report
        try:
            async with asyncio.timeout(seconds):
                while await self._exchange() is None:
                    await asyncio.sleep(RETRY_SECONDS)
        except TimeoutError:
            return

    async def _exchange(self) -> Order | None:
        body = self._report.model_dump_json(by_alias=True).encode() if self._report else b""
        try:
            response = await self._client.post("/v1/group", body, EXCHANGE_SECONDS)
            if response.status != 200:
                self._refuse(f"refused: {response.body[:2000].decode(errors='replace').strip()}")
                return None
            order = Order.model_validate_json(response.body)
            if not order.token:
                self._refuse(mismatch({0: ""}, self._settings.version, of=self._settings.node))
                return None
            if not same_token(self._settings.token, order.token):
                self._refuse("it answers for another run")
                return None
        except EOFError:
            self._pause = RETRY_SECONDS
            self._complain("it closed the connection")
            return None
        except _FAILURES as problem:
            self._pause = RETRY_SECONDS
            self._complain(str(problem) or type(problem).__name__)
            return None
        self._answered = self._clock.now()
        self._complaint = ""
        return order

    def _refuse(self, why: str) -> None:
        # The name may lead to another pod by now: a connection that is kept never does.
        self._client.close()
        self._pause = REFUSED_SECONDS
        self._complain(why)

    def _complain(self, what: str) -> None:
        if what != self._complaint:
            self._complaint = what
            self._output.say(f"waiting for index 0 at {self._name}: {what}")
