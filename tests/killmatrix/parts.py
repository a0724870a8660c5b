"""What can befall an upload in parts, which shards of a real size are: by one process, its manager and its store."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import torch

from sft_api.checkpoints import RunState
from sft_trainer.boxes import Box
from sft_trainer.checkpoint.inspecting import damage, folders_of
from sft_trainer.checkpoint.local import LocalStore
from sft_trainer.checkpoint.manager import CheckpointManager
from sft_trainer.checkpoint.s3 import S3Store
from sft_trainer.checkpoint.store import S3Settings
from sft_trainer.errors import TrainingError
from sft_trainer.topology import ALONE
from tests.cluster.object_store import ObjectStore
from tests.fault_proxy import Answer, CutRequest, FalseSuccess, Fault, FaultProxy, LostReply, Says
from tests.unit.checkpoint.boxed import whole

_PART = r"\.bin\?.*partNumber=\d+"
_BEGIN = r"\.bin\?uploads"
_COMPLETE = r"\.bin\?uploadId="
_NUMBERS = 5_000_000
"""Of four bytes: three parts."""
_RETRY_SECONDS = 10.0

Make = Callable[[random.Random], Fault]


def _error(status: int, code: str) -> Answer:
    return Answer.error(status, code)


def _nothing_stored() -> Answer:
    text = "<CompleteMultipartUploadResult><Key>x</Key><ETag>&quot;0-3&quot;</ETag></CompleteMultipartUploadResult>"
    return Answer(200, "OK", (("Content-Type", "application/xml"),), text.encode())


PARTS: dict[str, Make] = {
    "parts-503-begin": lambda dice: Says("POST", _BEGIN, _error(503, "SlowDown"), count=2),
    "parts-lost-begin": lambda dice: LostReply("POST", _BEGIN),
    "parts-500": lambda dice: Says("PUT", _PART, _error(500, "InternalError"), count=3),
    "parts-403": lambda dice: Says("PUT", _PART, _error(403, "AccessDenied")),
    "parts-cut": lambda dice: CutRequest("PUT", _PART, dice.randrange(1, 2_000_000)),
    "parts-lost": lambda dice: LostReply("PUT", _PART, count=2),
    "parts-false-200": lambda dice: FalseSuccess("PUT", _PART),
    "parts-503-complete": lambda dice: Says("POST", _COMPLETE, _error(503, "SlowDown"), count=2),
    "parts-lost-complete": lambda dice: LostReply("POST", _COMPLETE),
    "parts-false-200-document": lambda dice: Says("POST", _COMPLETE, _error(200, "InternalError")),
    "parts-false-200-complete": lambda dice: Says("POST", _COMPLETE, _nothing_stored()),
}


def breaches_of(
    name: str, server: ObjectStore, proxy: FaultProxy, bucket: str, dice: random.Random
) -> tuple[list[str], float]:
    """What did not hold of a save in parts that meets the fault, and of the next one; the seconds that it took."""
    keys = {"AWS_ACCESS_KEY_ID": server.access_key, "AWS_SECRET_ACCESS_KEY": server.secret_key}
    settings = S3Settings(endpoint=proxy.endpoint, region=server.region, force_path_style=True)
    began = time.monotonic()
    with patch.dict(os.environ, {**keys, "AWS_EC2_METADATA_DISABLED": "true"}):
        manager = CheckpointManager(
            S3Store(bucket, name, settings, retry_seconds=_RETRY_SECONDS), ALONE, timeout=timedelta(minutes=1)
        )
        manager.claim_attempt("parts")
        saved = [_saved(manager, 1)]
        fault = proxy.add(PARTS[name](dice))
        saved.append(_saved(manager, 2))
        proxy.clear()
        saved.append(_saved(manager, 3))
    breaches = [] if fault.met.is_set() else ["nothing has met the fault"]
    breaches += _wrong(server.folder / bucket / name, saved)
    return breaches, time.monotonic() - began


def _boxes(step: int) -> list[Box]:
    return whole({"model.weight": torch.full((_NUMBERS,), float(step))}, "weight")


def _saved(manager: CheckpointManager, step: int) -> bool:
    """Whether the manager says that it saved."""
    try:
        manager.save(step, _boxes(step), RunState(cursor=step), asynchronous=False)
    except TrainingError:
        return False
    return True


def _wrong(folder: Path, saved: list[bool]) -> list[str]:
    """What is said to be saved is there, whole; what is not is no checkpoint; and after the fault all is as before."""
    found = {each.id.step: each for each in folders_of(LocalStore(folder)) if not each.is_unfinished}
    wrong = [f"step {step} is not saved" for step in (1, 3) if not saved[step - 1]]
    for step in (2, 3):
        if (step in found) != saved[step - 1]:
            wrong.append(
                f"the save of step {step} said {saved[step - 1]}, and its checkpoint is there: {step in found}"
            )
    for step, each in found.items():
        wrong += [f"step {step}: {problem}" for problem in damage(LocalStore(folder), each)[:2]]
    return wrong
