"""Copies of this rank's tensors in host memory, so that training can go on while they are uploaded."""

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

logger = logging.getLogger(__name__)

_ALIGNMENT = 64
_CUDA_HOST_REGISTER_PORTABLE = 1
_MARGIN = 1.1
"""Of what is needed: the uploads take some as well."""


class Cuda:
    """The calls of CUDA that staging makes."""

    _stream: torch.cuda.Stream | None = None
    """Of all copies: torch has 32, which it gives out in turn, and another one for each save would some day be that on
    which gradients of replicas or NCCL's calls go, and have the steps wait for a copy."""

    def lock(self, block: torch.Tensor) -> int:
        """Page-lock ``block``; CUDA's error code, 0 when it is locked."""
        return int(torch.cuda.cudart().cudaHostRegister(block.data_ptr(), block.nbytes, _CUDA_HOST_REGISTER_PORTABLE))

    def unlock(self, block: torch.Tensor) -> None:
        """Give up what ``lock`` locked."""
        torch.cuda.cudart().cudaHostUnregister(block.data_ptr())

    def forget_error(self, device: torch.device) -> None:
        """Take CUDA's last error, which the next kernel would be blamed for.

        torch has no binding of cudaGetLastError, but calls it after it has launched a kernel: one that does nothing of
        use raises the error instead.
        """
        with contextlib.suppress(RuntimeError):
            torch.empty(1, device=device).fill_(0)

    def now(self, device: torch.device) -> torch.cuda.Event:
        """After all that ``device`` was told to compute so far."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        return event

    @contextlib.contextmanager
    def beside(self, device: torch.device, after: torch.cuda.Event) -> Iterator[None]:
        """Copies that begin ``after`` and go on beside what ``device`` computes since; they are complete at the end."""
        self._stream = self._stream or torch.cuda.Stream(device)
        with torch.cuda.device(device), torch.cuda.stream(self._stream):
            after.wait()
            yield
            torch.cuda.current_stream(device).synchronize()


class HostStaging:
    """One block of host memory, allocated at the first save and used again by the following ones.

    Not for two saves at once: the caller lets one finish before it stages the next.
    """

    def __init__(self, device: torch.device, cuda: Cuda | None = None) -> None:
        self._device = device
        self._cuda = (cuda or Cuda()) if device.type == "cuda" else None
        self._block = torch.empty(0, dtype=torch.uint8)
        self._locked = False

    def missing(self, tensors: Sequence[torch.Tensor]) -> int:
        """Bytes of host memory that copies would take besides what it holds already."""
        return max(0, sum(_sizes(tensors)) - self._block.nbytes)

    def copier(self, tensors: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
        """What returns contiguous copies of ``tensors`` in host memory, once it is called, by any thread.

        Of what they are now, or will be when the device has done what it was told so far; the caller changes nothing
        of them before the copies are complete.
        """
        cuda, device = self._cuda, self._device
        if cuda is None:
            return lambda: self._copy(tensors)
        now = cuda.now(device)

        def copy() -> list[torch.Tensor]:
            with cuda.beside(device, now):
                return self._copy(tensors)

        return copy

    def _copy(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        sizes = _sizes(tensors)
        if sum(sizes) > self._block.nbytes:
            self._release()
            self._allocate(sum(sizes))
        copies = []
        start = 0
        for tensor, size in zip(tensors, sizes, strict=True):
            target = self._block[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            copies.append(target.copy_(tensor, non_blocking=True))
            start += size
        return copies

    def _allocate(self, size: int) -> None:
        """``size`` bytes, page-locked for CUDA's copies.

        torch's own pinned allocator rounds up to a power of two, up to twice what is needed here.
        """
        self._block = torch.empty(size, dtype=torch.uint8)
        if self._cuda is None:
            return
        code = self._cuda.lock(self._block)
        self._locked = code == 0
        if code != 0:
            self._cuda.forget_error(self._device)
            logger.warning("Host memory for checkpoints could not be page-locked (CUDA error %d): slower", code)

    def _release(self) -> None:
        """Free the block, before a larger one is made."""
        if self._cuda is not None and self._locked:
            self._cuda.unlock(self._block)
        self._locked = False
        self._block = torch.empty(0, dtype=torch.uint8)


def _sizes(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors]


@dataclass(frozen=True)
class Room:
    """What a rank needs of its node's memory, in bytes, and what it sees free; None where that cannot be known."""

    node: str
    needed: int
    available: int | None
    refused: str = ""
    """Why copies could not be made, if that was tried in vain: they would not be the next time."""

    @classmethod
    def here(cls, needed: int, available: int | None, refused: str = "") -> "Room":
        return cls(os.uname().nodename, needed, available, refused)


def no_room(ranks: Sequence[Room]) -> str:
    """A sentence when the ranks of any node need more than it has, or had no copies; empty when all fit."""
    if not (why := _why_not(ranks)):
        return ""
    return (
        "checkpoints are saved while training waits: for a save in the background the state is copied to host memory, "
        f"which {why}; raise compute.resources.limits.memory, or set checkpoint.async: false"
    )


def _why_not(ranks: Sequence[Room]) -> str:
    for rank in ranks:
        if rank.refused:
            return f"failed on {rank.node}: {rank.refused}"
    for node in dict.fromkeys(rank.node for rank in ranks):
        here = [rank for rank in ranks if rank.node == node]
        needed = sum(rank.needed for rank in here)
        available = min((rank.available for rank in here if rank.available is not None), default=None)
        if needed and available is not None and needed * _MARGIN > available:
            return f"takes {needed / 2**30:.1f} GiB on {node}, and {available / 2**30:.1f} GiB are free"
    return ""
