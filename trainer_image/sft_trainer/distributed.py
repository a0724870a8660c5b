"""This process and its group: ranks, device, and the few collectives the loop needs."""

import os
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from .allocator import keep_freed_memory
from .errors import DeviceUnavailableError

T = TypeVar("T")

_LOOPBACK = "127.0.0.1"
_RENDEZVOUS_TIMEOUT = timedelta(hours=24)
"""The first process of a machine tokenises before it joins; the others wait for it here, not in a collective."""
COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""For everything once all have met: forming groups and their collectives."""
_BEHIND_THE_DEADLINE = timedelta(minutes=10)
_LONGEST_TIMEOUT = timedelta(hours=24)


def collective_timeout(progress_deadline_seconds: int | None) -> timedelta:
    """How long a process waits for the others in a collective; at most a day.

    Longer than they may take for a step: who finds a hang says what hangs, and a process that ends by itself does not.
    """
    deadline = timedelta(seconds=progress_deadline_seconds or 0)
    return max(COLLECTIVE_TIMEOUT, min(deadline + _BEHIND_THE_DEADLINE, _LONGEST_TIMEOUT))


@dataclass(frozen=True)
class Ranks:
    """Who this process is, as the supervisor says in the environment."""

    rank: int
    local_rank: int
    local_world_size: int
    """Processes of this node."""
    world_size: int
    address: str
    port: int
    generation: str

    @classmethod
    def from_environment(cls) -> "Ranks":
        return cls(
            rank=int(os.environ["RANK"]),
            local_rank=int(os.environ["LOCAL_RANK"]),
            local_world_size=int(os.environ["LOCAL_WORLD_SIZE"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            address=os.environ["MASTER_ADDR"],
            port=int(os.environ["MASTER_PORT"]),
            generation=os.environ.get("SFT_GENERATION", "0"),
        )


def device_for(ranks: Ranks, gpus_per_node: int) -> torch.device:
    """The device of this process, made ready: its own GPU when the job has GPUs, the CPU when it has none.

    Raises ``DeviceUnavailableError`` when the job has GPUs and not every process of this node finds one.
    """
    if not gpus_per_node:
        keep_freed_memory()
        return torch.device("cpu")
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if visible < ranks.local_world_size:
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        raise DeviceUnavailableError(
            f"compute.gpusPerNode is {gpus_per_node}, but PyTorch finds {visible} GPUs on {os.uname().nodename} for "
            f"{ranks.local_world_size} processes: check the node's driver (nvidia-smi), that the device plugin gives "
            "the pod its GPUs, that NVIDIA's container runtime is the default or named by compute.runtimeClassName, "
            f"and the image (PyTorch {torch.__version__}, {built}); compute.gpusPerNode: 0 trains on the CPU"
        )
    device = torch.device("cuda", ranks.local_rank)
    torch.cuda.set_device(device)
    return device


def join_group(
    ranks: Ranks,
    device: torch.device,
    forming: Callable[[], AbstractContextManager[None]] = nullcontext,
    timeout: timedelta = COLLECTIVE_TIMEOUT,
) -> None:
    """Wait for all processes of this generation and, within ``forming()``, form the default process group.

    ``timeout`` is that of its collectives.
    """
    store = dist.TCPStore(  # type: ignore[attr-defined]
        ranks.address,
        ranks.port,
        ranks.world_size,
        is_master=ranks.rank == 0,
        timeout=_RENDEZVOUS_TIMEOUT,
        wait_for_workers=True,
        master_listen_fd=_listener(ranks),
    )
    # The default group is given this store and takes its time-out as it is: whoever forms a group or waits for a peer
    # in it would wait for a day.
    store.set_timeout(COLLECTIVE_TIMEOUT)
    # A stale process of an earlier generation that finds the port again meets another prefix.
    with forming():
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=dist.PrefixStore(f"generation-{ranks.generation}", store),  # type: ignore[attr-defined]
            rank=ranks.rank,
            world_size=ranks.world_size,
            timeout=timeout,
            device_id=device if device.type == "cuda" else None,
        )


def _listener(ranks: Ranks) -> int | None:
    """The socket at which rank 0 awaits the others; None for torch's own, at all addresses of this machine.

    It asks nobody who he is, and what stands there says where processes meet, which take pickled objects of each other:
    where all of them are on this machine nobody else shall reach it.
    """
    if ranks.rank != 0 or ranks.world_size != ranks.local_world_size or ranks.address != _LOOPBACK:
        return None
    return socket.create_server((_LOOPBACK, ranks.port), backlog=ranks.world_size).detach()


def gathered(value: T) -> list[T]:
    """``value`` of every process, by rank; a collective call, with what pickle can hold of processes of one group."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def exchanged(rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Row ``i`` of ``rows``, (processes of ``group``, numbers), goes to process ``i``; the rows that came, in order."""
    rows = rows.contiguous()  # the shape alone is looked at, not how it lies in memory
    arrived = torch.empty_like(rows)
    dist.all_to_all_single(arrived, rows, group=group)
    return arrived


def add_to_all(total: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Make ``total`` the sum of those of all processes of ``group``."""
    dist.all_reduce(total, group=group)


def summed(values: list[torch.Tensor | float], device: torch.device) -> torch.Tensor:
    """Sums of scalars over all processes, (values,) in double precision on the device; one collective.

    The host waits for nothing: what it knows goes to the device in one copy from pinned memory.
    """
    known = [0.0 if isinstance(value, torch.Tensor) else value for value in values]
    here = torch.tensor(known, dtype=torch.float64, pin_memory=device.type == "cuda")
    total = here.to(device, non_blocking=True)
    for place, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            total[place] = value
    dist.all_reduce(total)
    return total


def sum_over_ranks(values: list[torch.Tensor | float], device: torch.device) -> list[float]:
    """``summed``, read by the host, which waits for them."""
    sums: list[float] = summed(values, device).tolist()
    return sums
