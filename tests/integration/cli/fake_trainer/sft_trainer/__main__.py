"""A worker that counts instead of training, and fails as FAKE_WORKER (JSON) says.

``crashAt``: the first attempt dies at that step; ``dieAtStep``: every attempt exits with 1 when it has made that step;
``dieAfterSteps``: when it has made so many; ``failure``, ``message``: every attempt ends with that error;
``startsAfter``: a file without which there is no first word; ``seconds``: of a step; ``warnings``; ``ignoreStop``: does
not heed the request to stop.
"""

import json
import os
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from sft_api.checkpoints import CheckpointId
from sft_api.failures import FailureClass, exit_code
from sft_api.progress import Phase, TrainingProgress, WorkerError
from sft_api.rundir import ERRORS_FOLDER, PROGRESS_FILE, STOP_FILE, write_atomically
from sft_api.times import timestamp
from sft_api.trainer_config import TrainerConfig
from sft_api.v1alpha1.status import CheckpointsStatus, CheckpointStatus, ExportStatus

signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
SCRIPT = json.loads(os.environ.get("FAKE_WORKER", "{}"))
CONFIG = TrainerConfig.model_validate_json(Path(os.environ["SFT_CONFIG"]).read_text())
RUN_DIR = Path(os.environ["SFT_RUN_DIR"])
RANK = int(os.environ["RANK"])
STORE = Path(CONFIG.checkpoint_uri.removeprefix("file://"))


def write(progress: TrainingProgress) -> TrainingProgress:
    if RANK == 0:
        write_atomically(RUN_DIR / PROGRESS_FILE, progress)
    return progress


def save(progress: TrainingProgress) -> TrainingProgress:
    (STORE / f"step-{RANK}").write_text(str(progress.step))
    latest = CheckpointStatus(
        step=progress.step,
        attempt=progress.attempt,
        uri=f"{CONFIG.checkpoint_uri}/checkpoints/{CheckpointId(progress.attempt, progress.step).folder}",
        time=timestamp(datetime.now(UTC)),
        size_bytes=1,
        verified=True,
    )
    return write(progress.model_copy(update={"checkpoints": CheckpointsStatus(latest=latest)}))


def main() -> int:
    while "startsAfter" in SCRIPT and not Path(SCRIPT["startsAfter"]).exists():
        time.sleep(0.01)
    STORE.mkdir(parents=True, exist_ok=True)
    print("worker says hello", os.environ.get("GIVEN"), file=sys.stderr, flush=True)
    attempts = STORE / f"attempts-{RANK}"
    with attempts.open("a") as file:
        file.write("x")
    attempt = len(attempts.read_text())
    saved = STORE / f"step-{RANK}"
    start = int(saved.read_text()) if saved.exists() else None
    steps = CONFIG.spec.training.steps or 4
    progress = TrainingProgress(
        attempt=attempt,
        phase=Phase.TRAINING,
        step=start or 0,
        resumed_from_step=start,
        total_steps=steps,
        warnings=SCRIPT.get("warnings", []),
    )
    if "orphan" in SCRIPT:
        orphan = subprocess.Popen(["sleep", "600"], start_new_session=True)
        Path(SCRIPT["orphan"]).write_text(str(orphan.pid))
    for step in range((start or 0) + 1, steps + 1):
        time.sleep(SCRIPT.get("seconds", 0.02))
        progress = write(
            progress.model_copy(
                update={"step": step, "loss": 4.0 / step, "first_loss": 4.0, "remaining_seconds": 3725.0}
            )
        )
        if attempt == 1 and step == SCRIPT.get("crashAt"):
            print("worker is about to die", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if step == SCRIPT.get("dieAtStep") or step - (start or 0) == SCRIPT.get("dieAfterSteps"):
            print("about to exit with 1", file=sys.stderr, flush=True)
            os._exit(1)
        if failure := SCRIPT.get("failure"):
            error = WorkerError(
                failure=FailureClass(failure), message=SCRIPT["message"], rank=RANK, step=step, attempt=attempt
            )
            print("traceback of the worker", file=sys.stderr, flush=True)
            write_atomically(RUN_DIR / ERRORS_FOLDER / f"rank-{RANK}.json", error)
            return int(exit_code(error.failure))
        if (RUN_DIR / STOP_FILE).exists() and not SCRIPT.get("ignoreStop"):
            save(progress)
            return int(exit_code(FailureClass.INTERRUPTED))
        if step % 2 == 0:
            progress = save(progress)
    export = ExportStatus(uri=CONFIG.export_uri or "", step=steps)
    write(progress.model_copy(update={"phase": Phase.COMPLETE, "export": export}))
    return 0


os._exit(main())
