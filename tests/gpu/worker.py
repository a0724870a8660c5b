"""The trainer's worker as the supervisor starts it, which also writes down the most memory it held on its GPU.

Started with the environment of a worker, and SFT_PEAK_MEMORY: the file that gets ``allocated reserved``, in bytes,
twice a second, so that it is there however the worker ends; and SFT_LOADED_SECONDS: the file that gets how long what
follows from the weights took when they were loaded, which is compiling.
"""

import os
import sys
import threading
import time
from pathlib import Path


def _watch(path: Path) -> None:
    import torch

    while True:
        time.sleep(0.5)
        if torch.cuda.is_initialized():
            temporary = path.with_suffix(".new")
            temporary.write_text(f"{torch.cuda.max_memory_allocated()} {torch.cuda.max_memory_reserved()}")
            temporary.replace(path)


def _time_compiling(path: Path) -> None:
    from sft_trainer.strategies.fsdp import FsdpStrategy

    loaded = FsdpStrategy.loaded

    def timed(strategy: FsdpStrategy) -> None:
        began = time.monotonic()
        loaded(strategy)
        path.write_text(str(time.monotonic() - began))

    FsdpStrategy.loaded = timed  # type: ignore[method-assign]


def main() -> int:
    """Run the worker; its exit code."""
    from sft_trainer.__main__ import main as run

    _time_compiling(Path(os.environ["SFT_LOADED_SECONDS"]))
    threading.Thread(target=_watch, args=[Path(os.environ["SFT_PEAK_MEMORY"])], daemon=True).start()
    return run()


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)
