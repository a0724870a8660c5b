"""What a worker ended with, as a failure class and a sentence."""

import errno
import os
from datetime import UTC, datetime

import pytest
import torch

from sft_api.failures import FailureClass
from sft_trainer.checkpoint.errors import NoUsableCheckpointError
from sft_trainer.classify import classify
from sft_trainer.errors import DataError
from sft_trainer.supervisor.causes import is_consequence
from sft_trainer.supervisor.protocol import Failure


def of_nccl(kind: str, said: str, reason: str) -> RuntimeError:
    """An error as torch words it: what is the same for all of its kind, and then the reason."""
    return RuntimeError(
        f"NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:77, {kind} (run with NCCL_DEBUG=INFO for "
        f"details), NCCL version 2.27.5\n{said}\nLast error:\n{reason}"
    )


_SYSTEM = (
    "unhandled system error",
    "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error. ",
)


_CUDA = ("unhandled cuda error", "ncclUnhandledCudaError: Call to CUDA function failed.")
_USAGE = ("invalid usage", "ncclInvalidUsage: This usually reflects invalid usage")


@pytest.mark.parametrize(
    ("error", "failure", "words"),
    [
        (DataError("row 7\n is  odd"), FailureClass.DATA_ERROR, "row 7 is odd"),
        (NoUsableCheckpointError("none"), FailureClass.CONFIG_ERROR, "none"),
        (torch.OutOfMemoryError("CUDA out of memory"), FailureClass.OUT_OF_MEMORY, "GPU memory ran out at step 5"),
        (MemoryError(), FailureClass.OUT_OF_MEMORY, "host memory ran out at step 5"),
        (OSError(errno.ENOSPC, "No space left"), FailureClass.STORAGE_FULL, "compute.cacheSize"),
        (OSError(errno.EDQUOT, "Quota"), FailureClass.STORAGE_FULL, "compute.cacheSize"),
        (PermissionError(errno.EACCES, "Denied", "/cache/x"), FailureClass.ACCESS_DENIED, "/cache/x"),
        (OSError(errno.EROFS, "Read-only", "/cache"), FailureClass.ACCESS_DENIED, f"user {os.getuid()} may not"),
        (RuntimeError("Connection closed by peer [127.0.0.1]"), FailureClass.PEER_LOST, "went away at step 5"),
        (
            of_nccl(*_SYSTEM, "socketPollConnect: connect returned Connection refused"),
            FailureClass.PEER_LOST,
            "another process of the group went away at step 5 (socketPollConnect: connect returned",
        ),
        (
            of_nccl(*_SYSTEM, "Error while creating shared memory segment /dev/shm/nccl-a (size 9), error: No space"),
            FailureClass.UNKNOWN,
            "raise compute.sharedMemorySize",
        ),
        (
            of_nccl(*_SYSTEM, "Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory"),
            FailureClass.UNKNOWN,
            "NCCL may not lock the memory that it sends by RDMA at step 5: have the container runtime of the node",
        ),
        (
            of_nccl(
                *_SYSTEM,
                "NET/OFI Unable to register memory (type = 2) for device 0. RC: -12, Error: Cannot allocate memory",
            ),
            FailureClass.UNKNOWN,
            "LimitMEMLOCK=infinity",
        ),
        (
            of_nccl(*_CUDA, "Cuda failure 214 'uncorrectable ECC error encountered'"),
            FailureClass.UNKNOWN,
            "CUDA error under NCCL at step 5 (Cuda failure 214 'uncorrectable ECC error encountered')",
        ),
        (of_nccl(*_CUDA, "Cuda failure 2 'out of memory'"), FailureClass.OUT_OF_MEMORY, "GPU memory ran out at step 5"),
        (
            of_nccl(*_SYSTEM, "Call to ibv_modify_qp failed with error Connection timed out"),
            FailureClass.PEER_LOST,
            "(Call to ibv_modify_qp failed with error Connection timed out)",
        ),
        (
            of_nccl(*_USAGE, "Duplicate GPU detected"),
            FailureClass.UNKNOWN,
            "(Duplicate GPU detected)",
        ),
        (KeyError("lm_head"), FailureClass.UNKNOWN, "KeyError at step 5: 'lm_head'"),
    ],
)
def test_classes_and_sentences(error: BaseException, failure: FailureClass, words: str) -> None:
    found, sentence = classify(error, step=4)
    assert found is failure
    assert words in sentence


@pytest.mark.parametrize(
    ("error", "own"),
    [
        (of_nccl(*_CUDA, "Cuda failure 999 'unknown error'"), True),
        (of_nccl(*_USAGE, "Duplicate GPU detected"), True),
        (of_nccl(*_SYSTEM, "Error while creating shared memory segment /dev/shm/nccl-a (size 9), error: No"), True),
        (of_nccl(*_SYSTEM, "Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory"), True),
        (of_nccl(*_SYSTEM, "socketPollConnect: connect returned Connection refused"), False),
    ],
)
def test_what_nccl_met_in_the_process_itself_is_a_cause(error: BaseException, own: bool) -> None:
    """It is told before what its peers, which lose it, end with, whoever was the first to say so."""
    found, sentence = classify(error, step=4)
    told = Failure(failure=found, message=sentence, time=datetime(2026, 7, 31, 12, tzinfo=UTC), rank=1)

    assert is_consequence(told) is not own
