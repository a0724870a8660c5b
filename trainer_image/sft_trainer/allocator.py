"""glibc's allocator, which tensors on the CPU are made by."""

import ctypes
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h
_KEPT_BYTES = 2**30
_MAPPED_BYTES = 32 * 2**20
"""What the second threshold grows to by itself, as long as none is set."""


def keep_freed_memory() -> None:
    """Have what the tensors of one step give back serve those of the next one.

    By itself glibc gives the end of its heap back to the system as soon as 64 MiB of it are free, and each step faults
    its memory in again: 2% of the time of a step (docs/benchmarks.md). Does nothing where the environment says how
    glibc is to allocate, or where another libc is.
    """
    told = [name for name in os.environ if name.startswith("MALLOC_") or name == "GLIBC_TUNABLES"]
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if not told and mallopt is not None:
        # Setting one would keep the other from growing.
        mallopt(_MMAP_THRESHOLD, _MAPPED_BYTES)
        mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
