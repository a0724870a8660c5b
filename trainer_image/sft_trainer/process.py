"""What the processes that a supervisor starts have in common: how they begin, and how they say why they ended."""

import faulthandler
import logging
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import NoReturn

from sft_api.failures import FailureClass, exit_code
from sft_api.progress import WorkerError
from sft_api.rundir import ERRORS_FOLDER, of_rank, write_atomically
from sft_api.trainer_config import CONFIG_PATH, TrainerConfig

from .checkpoint.errors import AttemptSupersededError
from .classify import classify, writable
from .errors import TrainingError


def begin() -> tuple[TrainerConfig, Path]:
    """Set up signals and logging; the configuration (``SFT_CONFIG``) and the run directory (``SFT_RUN_DIR``)."""
    faulthandler.enable()
    tell_stacks_when_asked()
    # Asked to stop, the supervisor raises a flag that the processes agree on; a signal here is not for us.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger("botocore").setLevel(logging.WARNING)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    run_dir = Path(os.environ["SFT_RUN_DIR"])
    return TrainerConfig.model_validate_json(Path(os.environ.get("SFT_CONFIG", CONFIG_PATH)).read_text()), run_dir


def tell_stacks_when_asked() -> None:
    """SIGUSR1 prints the stack of the thread that trains, SIGUSR2 those of the newest hundred threads.

    Of more faulthandler prints none, and the thread that trains is the oldest one.
    """
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    faulthandler.register(signal.SIGUSR2, all_threads=True)


def report_end(error: BaseException, run_dir: Path, *, rank: int, step: int = 0, attempt: int = 0) -> int:
    """Write why this process ends into the run directory; its exit code. For the ``except`` block of ``error``."""
    failure, message = classify(error, step=step)
    if failure != FailureClass.INTERRUPTED:
        traceback.print_exc()
    report = WorkerError(
        failure=failure,
        message=writable(message),
        rank=rank,
        step=step,
        attempt=attempt,
        outage=isinstance(error, TrainingError) and error.outage is True,
        superseded=isinstance(error, AttemptSupersededError),
        traceback=writable(traceback.format_exc())[-8000:],
    )
    try:
        write_atomically(of_rank(run_dir / ERRORS_FOLDER, rank), report)
    except OSError as problem:
        # On a full disk the exit code and the last line of this log have to say it all.
        print(f"the error report was not written ({problem})\n{message}", file=sys.stderr)
    return int(exit_code(failure))


def leave(code: int) -> NoReturn:
    """End this process without waiting for its threads: those of a broken process group or a library never end."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
