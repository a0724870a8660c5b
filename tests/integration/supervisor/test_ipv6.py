"""Pods of a cluster that has IPv6: one whose index 0 is at ::1, and which the operator asks there."""

import asyncio

from sft_api.progress import Progress
from sft_operator.cluster.progress_client import ProgressClient

from .pods import Group, Pod, wait_for


def asked(pod: Pod, address: str) -> Progress:
    """What the operator hears of ``pod``."""

    async def ask() -> Progress:
        port = pod.url.rpartition(":")[2]
        client = ProgressClient(f"http://{{address}}:{port}/v1/progress", concurrency=1)
        try:
            return await client.read(address=address, namespace="team", name="fake", job_uid="uid-1", pod_uid="")
        finally:
            await client.close()

    return asyncio.run(ask())


def test_pods_meet_at_an_address_of_ipv6_and_the_operator_reads_there(group: Group) -> None:
    # Given a group of two, one of which reaches index 0 by IPv6
    group.nodes = 2
    group.faults = [{"rank": 0, "start": 1, "step": 5, "do": "linger"}]
    first = group.start(0, address="::1")
    second = group.start(1, SFT_COORDINATOR="::1")

    # When it trains
    wait_for(lambda: first.progress.training.step >= 4, first)

    # Then the operator hears of it, and workers were sent to the address that answered
    assert asked(first, "::1").training.step >= 4
    assert group.starts(1)[0]["MASTER_ADDR"] == "::1"
    (group.folder / "linger").touch()
    assert [first.wait(), second.wait()] == [0, 0]
