"""A replica lets go of the Lease before others may take it, however slow the API server is, and says why."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, cast

import pytest
from pydantic import ValidationError

from sft_operator.cluster.client import ApiError, Cluster
from sft_operator.cluster.leadership import Leadership, LeadershipLost
from sft_operator.config import LeaderElectionSettings
from tests.unit.operator.test_workqueue import in_no_time


class Silent:
    """An API server that takes requests and never answers."""

    async def get(self, kind: str, namespace: str | None, name: str) -> None:
        await asyncio.Event().wait()


def test_a_lease_that_is_lost_because_nobody_answers_says_so() -> None:
    settings = LeaderElectionSettings(enabled=True, lease_seconds=0.3, renew_seconds=0.01)
    leadership = Leadership(cast(Cluster, Silent()), settings, "me")

    with pytest.raises(LeadershipLost, match="Lease sft-operator could not be renewed: no answer in time"):
        asyncio.run(leadership.keep())


SETTINGS = LeaderElectionSettings(enabled=True, lease_seconds=15, renew_seconds=4)


class Slow:
    """An API server whose writes arrive at once and are answered after ``delays``; then it is silent."""

    def __init__(self, *delays: float) -> None:
        self._delays: Iterator[float] = iter(delays)
        self.lease: dict[str, Any] = {"metadata": {"resourceVersion": "1"}, "spec": {"holderIdentity": ""}}
        self.written: list[float] = []
        """When each write arrived."""

    async def get(self, kind: str, namespace: str | None, name: str) -> dict[str, Any]:
        return self.lease

    async def update(self, kind: str, namespace: str | None, name: str, lease: dict[str, Any]) -> None:
        delay = next(self._delays, None)
        if delay is None:
            await asyncio.Event().wait()
        self.lease = lease
        self.written.append(asyncio.get_running_loop().time())
        await asyncio.sleep(delay or 0.0)


@pytest.mark.parametrize("delays", [(8.0,), (0.0, 5.5)], ids=["that got it", "that renewed it"])
def test_a_lease_lasts_from_the_request_on_and_not_from_its_answer(delays: tuple[float, ...]) -> None:
    api = Slow(*delays)

    async def scenario() -> None:
        leadership = Leadership(cast(Cluster, api), SETTINGS, "me")
        await leadership.acquire()
        with pytest.raises(LeadershipLost):
            await leadership.keep()
        # The others wait for 15 s from then on.
        assert asyncio.get_running_loop().time() - api.written[-1] <= 12.1

    in_no_time(scenario())


def test_a_lease_is_renewed_from_request_to_request_also_of_a_slow_api_server() -> None:
    api = Slow(*[4.5] * 50)

    async def scenario() -> None:
        leadership = Leadership(cast(Cluster, api), SETTINGS, "me")
        await leadership.acquire()
        with pytest.raises(LeadershipLost):
            await leadership.keep()

    in_no_time(scenario())
    assert len(api.written) == 50


def test_an_api_server_that_refuses_at_once_is_asked_at_a_pace() -> None:
    class Away(Slow):
        asked = 0

        async def get(self, kind: str, namespace: str | None, name: str) -> dict[str, Any]:
            self.asked += bool(self.written)
            assert self.asked < 50, "it is asked without a pause"
            if self.written:
                raise ApiError(503, "ServiceUnavailable", "the API server restarts")
            return await super().get(kind, namespace, name)

    api = Away(0.0)

    async def scenario() -> None:
        leadership = Leadership(cast(Cluster, api), SETTINGS, "me")
        await leadership.acquire()
        with pytest.raises(LeadershipLost, match="the API server restarts"):
            await leadership.keep()
        assert 10 <= asyncio.get_running_loop().time() - api.written[-1] <= 10.1

    in_no_time(scenario())
    assert api.asked > 3, "an outage of some seconds costs no leadership"


def test_a_lease_that_would_not_be_renewed_in_time_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"renewSeconds: 10\.0 is too long for leaseSeconds: 15\.0"):
        LeaderElectionSettings(enabled=True, lease_seconds=15, renew_seconds=10)


def test_a_lease_whose_answer_came_when_it_may_have_been_taken_is_not_held_yet() -> None:
    api = Slow(20.0, 0.0)

    async def scenario() -> None:
        await Leadership(cast(Cluster, api), SETTINGS, "me").acquire()
        assert asyncio.get_running_loop().time() - api.written[-1] == 0

    in_no_time(scenario())
    assert len(api.written) == 2


@pytest.mark.parametrize("lease", [{}, {"spec": None}], ids=["absent", "null"])
def test_a_lease_that_someone_made_without_a_spec_is_nobodys(lease: dict[str, Any]) -> None:
    api = Slow(0.0, 0.0)
    api.lease = {"metadata": {"resourceVersion": "1"}, **lease}

    async def scenario() -> None:
        leadership = Leadership(cast(Cluster, api), SETTINGS, "me")
        await leadership.release()
        await leadership.acquire()
        assert api.lease["spec"]["holderIdentity"] == "me"
        await leadership.release()
        assert api.lease["spec"]["holderIdentity"] == ""

    in_no_time(scenario())
