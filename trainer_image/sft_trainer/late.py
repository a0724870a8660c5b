"""Figures that the device still computes, read by the host when it has something else for the device to do.

On a GPU all work is only put in a queue; whoever reads a number waits until the queue has come to it, and the device
then waits for what the host does next. So a step's figures are read after the next step was put in.
"""

import time
from dataclasses import dataclass

import torch

from .data.batches import Step


def steps_behind(device: torch.device) -> int:
    """How many launched steps the host does not know the figures of: a CPU has computed what it was given."""
    return 1 if device.type == "cuda" else 0


class Moment:
    """When the device comes to here."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        self._time = time.perf_counter()
        if self._event is not None:
            self._event.record()

    @property
    def passed(self) -> bool:
        """Whether the device has come to here."""
        return self._event is None or self._event.query()

    def wait(self) -> None:
        """Until the device is here."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_until(self, later: "Moment") -> float:
        """What lies between the two; both have passed."""
        if self._event is None or later._event is None:
            return later._time - self._time
        milliseconds: float = self._event.elapsed_time(later._event)
        return milliseconds / 1000


class LateFigures:
    """Numbers of a tensor on the device as they are now; the host waits for them only when it reads them."""

    def __init__(self, figures: torch.Tensor) -> None:
        if figures.is_cuda:
            self._host = torch.empty(figures.shape, dtype=figures.dtype, pin_memory=True)
            self._host.copy_(figures, non_blocking=True)
        else:
            self._host = figures.clone()
        self.ready = Moment(figures.device)

    def read(self) -> list[float]:
        """The numbers, which the device is waited for."""
        self.ready.wait()
        numbers: list[float] = self._host.tolist()
        return numbers


@dataclass(frozen=True)
class Launched:
    """A step that the device computes, or has computed."""

    number: int
    """Of the step, counted from 1."""
    step: Step
    rate: float
    figures: LateFigures
    began: Moment
    given: Moment
    """When the host had what the device computes: it stood still since ``began``, which comes after the step before."""
    waited: float
    """Seconds since then in which the device waited for the copy of a save."""
