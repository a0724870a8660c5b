"""This process's device, and how long it waits for the others."""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import pytest
import torch

from sft_api.ports import free_port
from sft_trainer import distributed
from sft_trainer.distributed import Ranks, collective_timeout, device_for, join_group, summed
from sft_trainer.errors import DeviceUnavailableError
from tests.integration.checkpoint import ranks as processes
from tests.waiting import PATIENCE_SECONDS


def ranks(local_rank: int = 0, local_world_size: int = 1) -> Ranks:
    return Ranks(local_rank, local_rank, local_world_size, local_world_size, "127.0.0.1", 0, "1")


def gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> list[torch.device]:
    """As if torch found ``count`` GPUs; the devices that were chosen."""
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    return chosen


def test_a_job_without_gpus_trains_on_the_cpu_wherever_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = gpus(monkeypatch, 8)
    assert device_for(ranks(), gpus_per_node=0) == torch.device("cpu")
    assert not chosen


def test_each_process_has_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = gpus(monkeypatch, 2)
    assert device_for(ranks(1, 2), gpus_per_node=2) == torch.device("cuda", 1)
    assert chosen == [torch.device("cuda", 1)]


@pytest.mark.parametrize("count", [0, 7])
def test_a_job_with_gpus_never_trains_on_the_cpu(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    gpus(monkeypatch, count)
    sentence = f"gpusPerNode is 8, but PyTorch finds {count} GPUs .* for 8 processes: .*driver .*device plugin .*image"
    with pytest.raises(DeviceUnavailableError, match=sentence):
        device_for(ranks(0, 8), gpus_per_node=8)


def test_sums_take_numbers_of_the_host_and_of_the_device_in_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda total: total.mul_(2))
    loss, norm = torch.tensor(0.1, dtype=torch.float64), torch.tensor(3.0)

    sums = summed([loss, 2.0**40 + 1, norm, 0.0, 1.0], torch.device("cpu"))

    assert sums.dtype == torch.float64
    assert sums.tolist() == [0.2, 2.0**41 + 2, 6.0, 0.0, 2.0]
    assert (loss.item(), norm.item()) == (0.1, 3.0), "what was given stays as it is"


def test_the_group_is_formed_once_all_have_met_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []

    @contextmanager
    def forming() -> Iterator[None]:
        happened.append("said")
        yield
        happened.append("over")

    class Store:
        def __init__(self, *_: object, master_listen_fd: int, **__: object) -> None:
            os.close(master_listen_fd)
            happened.append("all have met")

        def set_timeout(self, timeout: object) -> None: ...

    monkeypatch.setattr(torch.distributed, "TCPStore", Store)
    monkeypatch.setattr(torch.distributed, "PrefixStore", lambda *_: None)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *_, **__: happened.append("formed"))

    join_group(ranks(), torch.device("cpu"), forming)

    assert happened == ["all have met", "said", "formed", "over"]


def met(environment: dict[str, str]) -> str:
    """In a process of its own, which goes on to wait until its answer was taken."""
    os.environ.update(environment)
    join_group(Ranks.from_environment(), torch.device("cpu"))
    torch.distributed.barrier()
    return "met"


@pytest.mark.parametrize(("nodes", "reached"), [(1, False), (2, True)])
def test_who_is_not_on_this_machine_reaches_the_rendezvous_only_where_others_are_elsewhere(
    nodes: int, reached: bool
) -> None:
    port = free_port()
    environment = {
        "GLOO_SOCKET_IFNAME": "lo",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": str(2 // nodes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    both = [
        processes.start(met, {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank % (2 // nodes))})
        for rank in range(2)
    ]
    try:
        for _, connection in both:
            assert connection.poll(PATIENCE_SECONDS)
            assert connection.recv() == (True, "met")
        with socket.socket() as stranger:
            # An address of this machine, as that of its network, but not the one by which its processes meet.
            assert (stranger.connect_ex(("127.0.0.2", port)) == 0) == reached
    finally:
        end(both)


def end(started: list[tuple[BaseProcess, Connection]]) -> None:
    for process, connection in started:
        process.kill()
        process.join()
        connection.close()


def test_a_collective_waits_longer_than_a_step_may_take() -> None:
    # Given no deadline or a short one, a long one, and one that no clock of a socket can hold
    waits = [collective_timeout(seconds).total_seconds() for seconds in (None, 60, 7200, 31_536_000)]

    # Then who finds a hang comes first, and says what hangs
    assert waits == [1800, 1800, 7800, 86400]


def waited(environment: dict[str, str]) -> list[str]:
    """What the first process is told that waits for the other, which does nothing more."""
    os.environ.update(environment)
    distributed.COLLECTIVE_TIMEOUT = timedelta(seconds=1)
    join_group(Ranks.from_environment(), torch.device("cpu"), timeout=timedelta(seconds=1))
    if torch.distributed.get_rank():
        time.sleep(600)
    told = []
    store = torch.distributed.distributed_c10d._get_default_store()
    for wait in (lambda: store.get("what nobody sets"), torch.distributed.barrier):
        try:
            wait()
        except RuntimeError as error:
            told.append(str(error))
    return told


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_after_the_rendezvous_no_process_waits_for_a_day(address: str) -> None:
    # Given two that have met, of which one does nothing more
    environment = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": address,
        "MASTER_PORT": str(free_port()),
    }
    both = [processes.start(waited, {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(2)]
    _, first = both[0]
    try:
        # When the other waits for it in the store, and in a collective
        assert first.poll(180)
        fine, told = first.recv()
    finally:
        end(both)

    # Then it gives up both times
    assert fine, told
    assert len(told) == 2, told
