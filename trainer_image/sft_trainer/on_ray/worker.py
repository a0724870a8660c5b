"""What a worker of Ray Train does: it holds a place for the process of one rank, for as long as that lives.

The process itself is the pod supervisor's child, forked from what has imported torch already: it is the same under
every launcher.
"""

import os
import time
from pathlib import Path

from sft_api.rundir import write_atomically

from .places import Place, ended_file, local_rank, place_file

_POLL_SECONDS = 0.1


def hold_place() -> None:
    """Say which local rank may start in this pod, and return when its process has ended."""
    import ray
    import ray.train

    gpus = [str(gpu) for gpu in ray.get_runtime_context().get_accelerator_ids().get("GPU", [])]
    counted = ray.train.get_context().get_local_rank()
    mine = local_rank(gpus, os.environ.get("CUDA_VISIBLE_DEVICES"), counted)
    run_dir = Path(os.environ["SFT_RUN_DIR"])
    write_atomically(place_file(run_dir, mine), Place(pid=os.getpid()))
    ended = ended_file(run_dir, mine)
    while not ended.exists():
        time.sleep(_POLL_SECONDS)
