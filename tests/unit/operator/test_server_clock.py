"""The operator tells the time by the API server's clock, whatever the clock of its own machine says."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
from aiohttp import web

from sft_api.times import LATEST
from sft_operator.cluster.client import Cluster
from sft_operator.cluster.server_clock import ServerClock
from tests.unit.operator.test_cluster import against

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def header(seconds: float) -> str:
    return format_datetime(NOON + timedelta(seconds=int(seconds)), usegmt=True)


def test_it_follows_what_the_answers_say() -> None:
    ticks = 500.0
    clock = ServerClock(lambda: ticks)
    clock.heard(header(0))

    ticks += 90.5
    assert clock.now() == NOON + timedelta(seconds=90.5)


def test_the_part_of_a_second_that_answers_do_not_tell_moves_nothing() -> None:
    ticks = 500.0
    clock = ServerClock(lambda: ticks)
    clock.heard(header(0))
    times = []
    for _ in range(100):
        ticks += 0.37
        clock.heard(header(ticks - 500.0))
        times.append(clock.now())

    assert times == sorted(times)
    assert times[-1] == NOON + timedelta(seconds=ticks - 500.0)


def test_a_clock_of_the_server_that_is_set_is_followed() -> None:
    clock = ServerClock(lambda: 500.0)
    clock.heard(header(0))
    clock.heard(header(3600))
    assert clock.now() == NOON + timedelta(hours=1)


@pytest.mark.parametrize("date", ["", "now", "Thu, 99 Jan 1970 00:00:00 GMT", "0", "\x00"])
def test_what_is_no_date_says_nothing(date: str) -> None:
    clock = ServerClock(lambda: 500.0)
    clock.heard(header(0))
    clock.heard(date)
    assert clock.now() == NOON


def test_before_any_date_it_tells_the_time_of_this_machine() -> None:
    clock = ServerClock()
    clock.heard("")
    assert abs(clock.now() - datetime.now(UTC)) < timedelta(seconds=5)


def test_a_date_that_no_calendar_has_does_no_harm() -> None:
    clock = ServerClock(lambda: 500.0)
    clock.heard("Fri, 31 Dec 9999 23:59:59 -1400")
    assert clock.now() <= LATEST


def test_every_answer_of_the_api_server_tells_the_time() -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"items": [], "metadata": {}}, headers={"Date": header(0)})

    async def scenario(cluster: Cluster) -> None:
        assert abs(cluster.now() - datetime.now(UTC)) < timedelta(minutes=1), "until then by the clock of the machine"
        await cluster.list("Pod", "team")
        assert timedelta() <= cluster.now() - NOON < timedelta(minutes=5)

    against(answer, scenario)
