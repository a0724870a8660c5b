"""What a worker ended with, as a failure class and a sentence."""

import errno
import os

import pytest
import torch

from sft_api.failures import FailureClass
from sft_trainer.checkpoint.errors import NoUsableCheckpointError
from sft_trainer.classify import classify
from sft_trainer.errors import DataError


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
        (KeyError("lm_head"), FailureClass.UNKNOWN, "KeyError at step 5: 'lm_head'"),
    ],
)
def test_classes_and_sentences(error: BaseException, failure: FailureClass, words: str) -> None:
    found, sentence = classify(error, step=4)
    assert found is failure
    assert words in sentence
