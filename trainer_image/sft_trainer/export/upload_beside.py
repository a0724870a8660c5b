"""The upload of an export as a process of its own: ``python -m sft_trainer.export.upload_beside PARENT``.

The library that uploads waits without limits for a server that is silent, and only the end of its process ends that.
The run's configuration comes on standard input. What it says on standard output is one JSON object a line: ``bytes``
read so far, as they are sent, the ``work`` that it is at, what it has ``done``, or the ``error`` that ends it, and
whether that may end without the user's doing (``outage``), will not (``final``), or is of a disk that is ``full``.
"""

import json
import logging
import os
import sys
import threading
from pathlib import Path
from typing import Any

from sft_api.trainer_config import TrainerConfig
from sft_trainer.errors import ConfigError, StorageFullError, TrainingError
from sft_trainer.outage import is_outage
from sft_trainer.supervisor.parent import die_with

from .uploading import export_target, upload

_EVERY_SECONDS = 1.0
_COUNTS = 2**16
"""Bytes that are more than this process reads to say how many they are."""


def main() -> int:
    """Upload the export of the run on standard input; the exit code."""
    die_with(int(sys.argv[1]))
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s upload: %(message)s")
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    config = TrainerConfig.model_validate_json(sys.stdin.read())
    assert config.spec.export.hub is not None  # noqa: S101 - from the process that trains
    threading.Thread(target=_tell_bytes, daemon=True).start()
    try:
        copy = upload(config.spec.export.hub, export_target(config), lambda words: _say(work=words))
    except TrainingError as error:
        final = isinstance(error, ConfigError) and not is_outage(error)
        _say(error=str(error), outage=is_outage(error), final=final, full=isinstance(error, StorageFullError))
        return 1
    except Exception as error:
        _say(error=f"{type(error).__name__}: {error}")
        return 1
    _say(done=copy.model_dump())
    return 0


def _tell_bytes() -> None:
    """Say how much was read, as long as it gets more: all that is sent is read before, a little at a time."""
    said = 0
    while True:
        threading.Event().wait(_EVERY_SECONDS)
        if (read := _bytes_read()) - said > _COUNTS:
            said = read
            _say(bytes=said)


def _bytes_read() -> int:
    """By this process, from files and pipes, since it began."""
    (line,) = (line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("rchar:"))
    return int(line.partition(":")[2])


def _say(**words: Any) -> None:
    print(json.dumps(words), flush=True)


if __name__ == "__main__":
    sys.exit(main())
