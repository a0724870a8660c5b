"""A worker that runs the real trainer, lets no launch of a step wait for its device, and counts bins at once.

    python -m tests.gpu.watched FILE STOP

Started with the environment of a worker. FILE gets a JSON line for every step: its number, how many bins went through
the model at once, and whether it was watched. The run is asked to stop while step STOP is launched, if there is one.
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sft_api.trainer_config import TrainerConfig
from sft_trainer import loss, trainer
from sft_trainer.distributed import Ranks
from sft_trainer.errors import StopRequested
from sft_trainer.late import Launched
from sft_trainer.models import documents
from sft_trainer.strategies.fsdp import FsdpStrategy
from tests.bins import RoomFor

_UNWATCHED = 2
"""Steps of a process that may wait: in the second one it learns, once, how much memory a bin takes."""
_READS = frozenset({"_local_scalar_dense", "nonzero", "masked_select", "equal"})
"""Operators by which the host learns of values: for what a GPU computes it would wait."""


_READ_ON_A_CPU_ALONE = frozenset({documents._lengths.__code__, loss._LinearCrossEntropy.backward.__code__})
"""What reads the ends of documents for the attention of a CPU, and by what else the loss is scaled, as it says."""


def _reads_on_a_cpu_alone() -> bool:
    """Whether this is called for one of those."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in _READ_ON_A_CPU_ALONE:
            return True
        frame = frame.f_back
    return False


class _NothingIsRead(TorchDispatchMode):
    """In the place of CUDA's own check on a CPU, which never waits."""

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        if function.overloadpacket.__name__ in _READS and not _reads_on_a_cpu_alone():
            raise RuntimeError(f"the host reads a value of the device: {function}")
        return function(*arguments, **(options or {}))


@contextmanager
def nothing_is_waited_for(device: torch.device) -> Iterator[None]:
    """Raise where the host waits for ``device``; on a CPU only where it would read a value."""
    if device.type != "cuda":
        read = torch.Tensor.tolist

        def tolist(tensor: torch.Tensor) -> Any:
            if _reads_on_a_cpu_alone():
                return read(tensor)
            raise RuntimeError(f"the host reads values of the device: {tuple(tensor.shape)}")

        # On a CPU it is no operator.
        with _NothingIsRead(), patch.object(torch.Tensor, "tolist", tolist):
            yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def main() -> None:
    file, stop = Path(sys.argv[1]), int(sys.argv[2])
    config = TrainerConfig.model_validate_json(Path(os.environ["SFT_CONFIG"]).read_text())
    lines: list[str] = []
    launch, build = trainer.Trainer._launch, trainer.build

    def watched_launch(run: trainer.Trainer) -> Launched:
        watched, at_once = len(lines) >= _UNWATCHED, run.strategy._at_once  # type: ignore[attr-defined]
        with nothing_is_waited_for(run.device) if watched else nullcontext():
            launched = launch(run)
        lines.append(json.dumps({"step": launched.number, "at_once": at_once, "watched": watched}))
        if launched.number == stop:
            run._stop_file.touch()
        return launched

    def build_with_room(*arguments: Any) -> Any:
        """On a CPU, where memory is not looked at, with that of a device that has room for four bins."""
        tokens = config.plan.max_tokens_per_micro_batch or 0
        room = RoomFor(4, tokens, seen=tokens)
        return build(*arguments) if arguments[-1].type == "cuda" else FsdpStrategy(*arguments, room)

    with (
        patch.object(trainer.Trainer, "_launch", watched_launch),
        patch.object(trainer, "build", build_with_room),
        suppress(StopRequested),
    ):
        trainer.Trainer(config, Ranks.from_environment(), Path(os.environ["SFT_RUN_DIR"])).run()
    file.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
