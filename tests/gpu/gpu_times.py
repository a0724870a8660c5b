"""The check of what processes time of their GPUs, to find one that is slow."""

import time

import torch

from sft_api.rundir import GpuTimes
from sft_trainer.gpu_times import EVERY_SECONDS, GpuWork, Size
from sft_trainer.late import Moment
from sft_trainer.supervisor.slow_gpus import SLOWER

from .figures import Figure
from .kernels import require
from .watched import nothing_is_waited_for

_WARM_UP_SECONDS = 1.0


def gpu_times(device: torch.device) -> dict[str, Figure]:
    """What each process times of its GPU (``status.slowGpus``) is alike each time, waits for nothing, and is short."""
    if device.type == "cpu":
        size, repeats = Size(numbers=2**20, rows=128, inner=256, products=4, passes=4), 3
    else:
        size, repeats = Size(), 20
    work = GpuWork(device, size)
    drawn = torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)
    looks: list[dict[str, float]] = []
    took: list[float] = []
    # In a run it comes after a step: a GPU that has rested raises its clocks first.
    warm = time.monotonic() + (_WARM_UP_SECONDS if device.type == "cuda" else 0.0)
    while len(took) < 1 + repeats or time.monotonic() < warm:
        began = Moment(device)
        with nothing_is_waited_for(device):
            marks = work.begin()
        ended = Moment(device)
        ended.wait()
        if marks is None or not marks.done:
            raise AssertionError("there was no room for it, or it is not done when the device is")
        looks.append(marks.seconds())
        took.append(began.seconds_until(ended))
    told = GpuTimes.model_validate({"look": 1, **work.device(), **looks[0]})
    after = torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)
    if not torch.equal(drawn, after):
        raise AssertionError("it has drawn a random number of the run")
    # The first one makes kernels and handles ready.
    figures: dict[str, Figure] = {"gpu_times_seconds": max(took[-repeats:]), "gpu_times_first_seconds": took[0]}
    for kind in looks[0]:
        seconds = sorted(look[kind] for look in looks[-repeats:])
        figures[f"gpu_times_{kind}_seconds"] = seconds[0]
        figures[f"gpu_times_{kind}_spread"] = seconds[-1] / seconds[0] - 1
    if device.type == "cpu":
        return figures
    if not told.uuid.startswith(("GPU-", "MIG-")) or told.uuid.count("-") < 5:
        raise AssertionError(f"{told.uuid!r} is no UUID of a GPU")
    require("the share of time that looks take", max(took[-repeats:]) / EVERY_SECONDS, 1e-4)
    for kind in looks[0]:
        # Else a GPU would be called slow that is as it always is.
        require(f"gpu_times_{kind}_spread", float(figures[f"gpu_times_{kind}_spread"]), SLOWER - 1)
    return figures
