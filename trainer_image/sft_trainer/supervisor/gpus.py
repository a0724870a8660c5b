"""What NVIDIA's management library tells of the GPUs of this pod. No CUDA is started, and no process of it waits.

Where there is no such library, no driver or no figure, that figure is None: GPUs, drivers and partitions tell
differently much.
"""

import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

_MOST_EVENTS = 64
"""Taken in at a time."""

# Bits of nvmlClocksEventReasons, by what people call them. That power is capped is usual of a GPU that works.
_BITS = {
    "heat": 0x20 | 0x40,
    "power": 0x04,
    "power_brake": 0x80,
    "hardware": 0x08,
}
SLOWED_BY = tuple(_BITS)
"""What lowers a GPU's clocks: heat, its power limit, the power brake (a signal of the server), other hardware."""


@dataclass(frozen=True)
class GpuFigures:
    """Of one GPU; bytes, watts, degrees Celsius, hertz."""

    index: int
    """Among those of this pod."""
    utilization: float | None = None
    """Share of the last second or less in which a kernel ran."""
    memory_used: int | None = None
    memory_total: int | None = None
    temperature: float | None = None
    power: float | None = None
    sm_clock: float | None = None
    slowed_by: frozenset[str] | None = None
    """Of ``SLOWED_BY``."""
    ecc_errors: int | None = None
    """Uncorrected ones since the driver was loaded."""
    xid: int = 0
    """The last error that the driver has reported; 0 without one."""


class Gpus:
    """The GPUs of this pod, once the library is there."""

    def __init__(self, count: int, environment: Mapping[str, str] = os.environ) -> None:
        """The first ``count`` of those that CUDA would see. Never raises: there may be none."""
        self._handles: list[Any] = []
        self._xids: dict[str, int] = {}
        self._uuids: list[str] = []
        self._events: Any = None
        try:
            self._nvml: Any = importlib.import_module("pynvml")
            self._nvml.nvmlInit()
            handles = [self._nvml.nvmlDeviceGetHandleByIndex(i) for i in range(self._nvml.nvmlDeviceGetCount())]
            found = [(handle, _text(self._nvml.nvmlDeviceGetUUID(handle))) for handle in handles]
        except Exception:  # not installed, no driver, no rights
            return
        chosen = visible([uuid for _, uuid in found], environment.get("CUDA_VISIBLE_DEVICES"))[:count]
        self._handles = [found[place][0] for place in chosen]
        self._uuids = [found[place][1] for place in chosen]
        self._listen()

    def read(self) -> list[GpuFigures]:
        """Figures of now; empty without GPUs."""
        self._hear()
        return [self._figures(index, handle) for index, handle in enumerate(self._handles)]

    def _figures(self, index: int, handle: Any) -> GpuFigures:
        nvml = self._nvml
        memory = _known(nvml.nvmlDeviceGetMemoryInfo, handle)
        reasons = _known(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
        busy = _known(nvml.nvmlDeviceGetUtilizationRates, handle)
        milliwatts = _known(nvml.nvmlDeviceGetPowerUsage, handle)
        megahertz = _known(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM)
        uncorrected = (nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
        return GpuFigures(
            index=index,
            utilization=None if busy is None else busy.gpu / 100,
            memory_used=None if memory is None else int(memory.used),
            memory_total=None if memory is None else int(memory.total),
            temperature=_known(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
            power=None if milliwatts is None else milliwatts / 1000,
            sm_clock=None if megahertz is None else 1e6 * megahertz,
            slowed_by=None if reasons is None else frozenset(name for name, bits in _BITS.items() if reasons & bits),
            ecc_errors=_known(nvml.nvmlDeviceGetTotalEccErrors, handle, *uncorrected),
            xid=self._xids.get(self._uuids[index], 0),
        )

    def _listen(self) -> None:
        nvml = self._nvml
        self._events = _known(nvml.nvmlEventSetCreate)
        if self._events is None:
            return
        register = partial(_known, nvml.nvmlDeviceRegisterEvents)
        for handle in self._handles:
            # Not of every kind of GPU, and not in every container.
            register(handle, nvml.nvmlEventTypeXidCriticalError, self._events)

    def _hear(self) -> None:
        """Take in the errors that were reported since the last time, without waiting for one."""
        for _ in range(_MOST_EVENTS if self._events is not None else 0):
            event = _known(self._nvml.nvmlEventSetWait_v2, self._events, 0)
            uuid = None if event is None else _known(self._nvml.nvmlDeviceGetUUID, event.device)
            if event is None or uuid is None:
                return
            self._xids[_text(uuid)] = int(event.eventData)


def visible(uuids: list[str], chosen: str | None) -> list[int]:
    """Places of the GPUs that CUDA sees of those with ``uuids``; ``chosen`` is CUDA_VISIBLE_DEVICES."""
    if chosen is None:
        return list(range(len(uuids)))
    found: list[int] = []
    for word in filter(None, (word.strip() for word in chosen.split(","))):
        if word.isdigit():
            places = [int(word)] if int(word) < len(uuids) else []
        else:
            places = [place for place, uuid in enumerate(uuids) if uuid.startswith(word)]
        if not places:
            return found  # CUDA too looks no further
        found.append(places[0])
    return found


def _known(read: Callable[..., Any], *arguments: Any) -> Any:
    """What ``read`` answers; None where it does not."""
    try:
        return read(*arguments)
    except Exception:  # NVML has an error class for every reason not to tell
        return None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
