"""Entry of a worker process: ``python -m sft_trainer``, started by the supervisor.

Reads ``SFT_CONFIG`` (path of the TrainerConfig JSON) and ``SFT_RUN_DIR``, and RANK, LOCAL_RANK, WORLD_SIZE,
MASTER_ADDR, MASTER_PORT and SFT_GENERATION. Exits with the code of the failure class; the error itself is in the run
directory. SIGUSR1 prints the stacks of all threads.
"""

import faulthandler
import logging
import os
import signal
import sys
import traceback
from pathlib import Path

from sft_api.failures import FailureClass, exit_code
from sft_api.progress import WorkerError
from sft_api.rundir import ERRORS_FOLDER, write_atomically
from sft_api.trainer_config import CONFIG_PATH, TrainerConfig


def main() -> int:
    """Run this process's part of the run; returns the exit code."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    # Asked to stop, the supervisor raises a flag that the processes agree on; a signal here is not for us.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger("botocore").setLevel(logging.WARNING)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

    run_dir = Path(os.environ["SFT_RUN_DIR"])
    config = TrainerConfig.model_validate_json(Path(os.environ.get("SFT_CONFIG", CONFIG_PATH)).read_text())

    from .classify import classify
    from .distributed import Ranks
    from .trainer import Trainer

    ranks = Ranks.from_environment()
    trainer = Trainer(config, ranks, run_dir)
    try:
        trainer.run()
    except BaseException as error:  # every end is classified and reported
        failure, message = classify(error, step=trainer.step)
        if failure != FailureClass.INTERRUPTED:
            traceback.print_exc()
        report = WorkerError(
            failure=failure,
            message=message,
            rank=ranks.rank,
            step=trainer.step,
            attempt=trainer.reporter.progress.attempt,
            traceback=traceback.format_exc()[-8000:],
        )
        try:
            write_atomically(run_dir / ERRORS_FOLDER / f"rank-{ranks.rank}.json", report)
        except OSError as problem:
            # On a full disk the exit code and the last line of this log have to say it all.
            print(f"the error report was not written ({problem})\n{message}", file=sys.stderr)
        return int(exit_code(failure))
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of a broken process group never end: leave without waiting for them.
    os._exit(code)
