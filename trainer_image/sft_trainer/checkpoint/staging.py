"""Copies of this rank's tensors in host memory, so that training can go on while they are uploaded."""

import logging
from collections.abc import Sequence
from typing import Any

import torch

logger = logging.getLogger(__name__)

_ALIGNMENT = 64
_CUDA_HOST_REGISTER_PORTABLE = 1


class HostStaging:
    """One block of host memory, allocated at the first save and used again by the following ones.

    Not for two saves at once: the caller lets one finish before it stages the next.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._block = torch.empty(0, dtype=torch.uint8)

    def copy(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Contiguous copies of ``tensors`` in host memory, complete when this returns."""
        sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors]
        cuda = self._device.type == "cuda"
        if sum(sizes) > self._block.nbytes:
            _release(self._block)
            self._block = torch.empty(0, dtype=torch.uint8)  # frees the old block before the new one is made
            self._block = _host_memory(sum(sizes), locked=cuda)
        copies = []
        start = 0
        for tensor, size in zip(tensors, sizes, strict=True):
            target = self._block[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            copies.append(target.copy_(tensor, non_blocking=True))
            start += size
        if cuda:
            torch.cuda.synchronize(self._device)
        return copies


def _host_memory(size: int, locked: bool) -> torch.Tensor:
    """``size`` bytes of host memory, page-locked for CUDA's copies.

    torch's own pinned allocator rounds up to a power of two, up to twice what is needed here.
    """
    block = torch.empty(size, dtype=torch.uint8)
    if locked:
        code = int(_cuda().cudaHostRegister(block.data_ptr(), size, _CUDA_HOST_REGISTER_PORTABLE))
        if code != 0:
            logger.warning("Host memory for checkpoints could not be page-locked (CUDA error %d): slower", code)
    return block


def _release(block: torch.Tensor) -> None:
    if block.nbytes and block.is_pinned():
        _cuda().cudaHostUnregister(block.data_ptr())


def _cuda() -> Any:
    return torch.cuda.cudart()
