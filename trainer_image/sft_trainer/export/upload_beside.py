"""The upload of an export as a process of its own: ``python -m sft_trainer.export.upload_beside PARENT``.

The library that uploads waits without limits for a server that is silent, and only the end of its process ends that.
It says (``child``) how many ``bytes`` it has read so far, as they are sent, the ``work`` that it is at, and what it has
``done``.
"""

import os
import sys
import threading
import time
from pathlib import Path

from sft_api.trainer_config import TrainerConfig

from .child import run, say
from .uploading import export_target, upload

_EVERY_SECONDS = 1.0
_COUNTS = 2**16
"""Bytes that are more than this process reads to say how many they are."""


def _upload(config: TrainerConfig) -> None:
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    assert config.spec.export.hub is not None  # noqa: S101 - from the process that trains
    threading.Thread(target=_tell_bytes, daemon=True).start()
    copy = upload(config.spec.export.hub, export_target(config), lambda words: say(work=words))
    say(done=copy.model_dump())


def _tell_bytes() -> None:
    """Say how much was read, as long as it gets more: all that is sent is read before, a little at a time."""
    said = 0
    while True:
        time.sleep(_EVERY_SECONDS)
        if (read := _bytes_read()) - said > _COUNTS:
            said = read
            say(bytes=said)


def _bytes_read() -> int:
    """By this process, from files and pipes, since it began."""
    (line,) = (line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("rchar:"))
    return int(line.partition(":")[2])


if __name__ == "__main__":
    sys.exit(run(_upload, "upload", int(sys.argv[1])))
