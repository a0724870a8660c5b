"""Why a replica lets go of the Lease is said, also when nobody answered."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from sft_operator.cluster.client import Cluster
from sft_operator.cluster.leadership import Leadership, LeadershipLost
from sft_operator.config import LeaderElectionSettings


class Silent:
    """An API server that takes requests and never answers."""

    async def get(self, kind: str, namespace: str | None, name: str) -> None:
        await asyncio.Event().wait()


def test_a_lease_that_is_lost_because_nobody_answers_says_so() -> None:
    settings = LeaderElectionSettings(enabled=True, lease_seconds=0.3, renew_seconds=0.01)
    leadership = Leadership(cast(Cluster, Silent()), settings, "me")

    with pytest.raises(LeadershipLost, match="Lease sft-operator could not be renewed: no answer in time"):
        asyncio.run(leadership.keep())
