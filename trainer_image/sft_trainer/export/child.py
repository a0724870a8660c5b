"""What the processes of an export and of its upload have in common, seen from within; ``process`` hears them.

The run's configuration comes on standard input. What one says on standard output is one JSON object a line; the last is
the ``error`` that ends it, if any does, and whether that may end without the user's doing (``outage``), will not
(``final``), or is of a store or disk that is ``full``.
"""

import json
import logging
import sys
from collections.abc import Callable
from typing import Any

from sft_api.trainer_config import TrainerConfig
from sft_trainer.errors import ConfigError, StorageFullError, TrainingError
from sft_trainer.outage import is_outage
from sft_trainer.supervisor.parent import die_with


def run(work: Callable[[TrainerConfig], None], name: str, parent: int) -> int:
    """Do ``work``, by which ``name`` its log has it, for as long as the process ``parent`` lives; the exit code."""
    die_with(parent)
    logging.basicConfig(level=logging.WARNING, format=f"%(asctime)s %(levelname)s {name}: %(message)s")
    config = TrainerConfig.model_validate_json(sys.stdin.read())
    try:
        work(config)
    except TrainingError as error:
        away, full = is_outage(error), isinstance(error, StorageFullError)
        say(error=str(error), outage=away, final=isinstance(error, ConfigError) and not away, full=full)
        return 1
    except Exception as error:
        say(error=f"{type(error).__name__}: {error}")
        return 1
    return 0


def say(**words: Any) -> None:
    """Tell the process that trains."""
    print(json.dumps(words), flush=True)
