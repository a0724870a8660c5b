"""From an exception to a failure class and a sentence for the user."""

import os
import re

from sft_api.failures import FailureClass

from .brought import as_named
from .errors import DISK_DENIED, DISK_FULL, TrainingError

_NCCL_SAYS = "Last error: "
"""Before the reason, in an error of NCCL's: what stands before that is the same for all of its kind."""
_LOCKED = re.compile(r"(\bibv_|NET/OFI).*cannot allocate memory", re.IGNORECASE)
"""Of InfiniBand's and libfabric's calls: what they register is locked, and a process may lock 8 MiB where nobody has
said more."""
_PEER_WORDS = ("connection closed by peer", "connection reset by peer", "broken pipe", "socket timeout")


def classify(error: BaseException, *, step: int) -> tuple[FailureClass, str]:
    """Class and message of what ended a worker after ``step`` steps."""
    text = as_named(" ".join(writable(str(error)).split()))
    if isinstance(error, TrainingError):
        return error.failure, text
    if type(error).__name__ == "OutOfMemoryError" or "out of memory" in text.lower():
        return FailureClass.OUT_OF_MEMORY, (
            f"GPU memory ran out at step {step + 1}: lower training.maxTokensPerMicroBatch and data.maxLength (or "
            f"training.microBatchSize without packing), or set training.activationCheckpointing: full ({text[:300]})"
        )
    if isinstance(error, MemoryError):
        return FailureClass.OUT_OF_MEMORY, f"host memory ran out at step {step + 1}: raise compute.resources memory"
    if isinstance(error, OSError) and error.errno in DISK_FULL:
        return FailureClass.STORAGE_FULL, f"the disk is full ({error}): free space, or raise compute.cacheSize"
    if isinstance(error, OSError) and error.errno in DISK_DENIED:
        return FailureClass.ACCESS_DENIED, (
            f"user {os.getuid()} may not use a file ({error}): change its owner or mode, or set SFT_CACHE_DIR (HF_HOME "
            "for the hub) to a folder that can be written"
        )
    if isinstance(error, RuntimeError) and "nccl error" in text.lower():
        said = text.partition(_NCCL_SAYS)[2] or text
        if "creating shared memory segment" in said:
            return FailureClass.UNKNOWN, (
                f"there is no room in /dev/shm, through which NCCL sends at step {step + 1}: raise "
                "compute.sharedMemorySize and, as that is at most half of it, compute.resources.limits.memory "
                f"({said[:300]})"
            )
        if _LOCKED.search(said):
            return FailureClass.UNKNOWN, (
                f"NCCL may not lock the memory that it sends by RDMA at step {step + 1}: have the container runtime of "
                "the node give pods no limit of that (LimitMEMLOCK=infinity in the service of containerd or CRI-O), or "
                f"set NCCL_IB_DISABLE=1 in compute.env to send by TCP ({said[:300]})"
            )
        if "ncclUnhandledCudaError" in text:
            # A GPU, or the driver, of this process: what peers do fails as another kind.
            return FailureClass.UNKNOWN, f"CUDA error under NCCL at step {step + 1} ({said[:300]})"
        if "ncclInvalidUsage" in text or "ncclInvalidArgument" in text:
            return FailureClass.UNKNOWN, f"NCCL cannot be used as it is here, at step {step + 1} ({said[:300]})"
        return FailureClass.PEER_LOST, f"another process of the group went away at step {step + 1} ({said[:300]})"
    if isinstance(error, (RuntimeError, OSError)) and any(word in text.lower() for word in _PEER_WORDS):
        return FailureClass.PEER_LOST, f"another process of the group went away at step {step + 1} ({text[:300]})"
    return FailureClass.UNKNOWN, f"{type(error).__name__} at step {step + 1}: {text[:1000]}"


def writable(text: str) -> str:
    """``text`` as UTF-8 can say it: what names of files have that are not UTF-8 is written as Python escapes it."""
    return text.encode(errors="backslashreplace").decode()
