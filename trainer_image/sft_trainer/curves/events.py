"""Figures as a file that TensorBoard reads."""

import time
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

from .history import Scalar


def event_file(scalars: Iterable[Scalar], *, purge_step: int | None) -> bytes:
    """The content of an event file. A TensorBoard that is open forgets what it knew from ``purge_step`` on."""
    # Only those who write pay for it.
    from tensorboardX import SummaryWriter

    with TemporaryDirectory(prefix="sft-tensorboard-") as folder:
        with SummaryWriter(folder, purge_step=purge_step) as writer:
            for scalar in scalars:
                writer.add_scalar(scalar.tag, scalar.value, scalar.step, walltime=scalar.time or time.time())
        (file,) = Path(folder).iterdir()
        return file.read_bytes()
