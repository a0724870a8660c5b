"""What is seen of a pod's machine: its GPUs, its share of the host, and what of it is worth a warning."""

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sft_api.rundir import MEMORY_FOLDER, AllocatedMemory
from sft_trainer.events import Control
from sft_trainer.gpu_memory import TellsAllocatedMemory
from sft_trainer.supervisor.coordinator import machine_warnings
from sft_trainer.supervisor.gpus import SLOWED_BY, GpuFigures, Gpus, visible
from sft_trainer.supervisor.host import HostFigures, read_host
from sft_trainer.supervisor.metrics import render_machine
from sft_trainer.supervisor.monitor import LASTING, SAMPLE_SECONDS, STALE_SECONDS, Judge, Monitor, Sample
from sft_trainer.supervisor.output import Output
from sft_trainer.supervisor.protocol import Report
from tests.unit.supervisor.test_environment import SETTINGS
from tests.unit.supervisor.test_machine import control_group

GIB = 2**30
UUIDS = ["GPU-aaa", "GPU-bbb", "GPU-ccc"]


class NvmlError(Exception):
    pass


class Nvml:
    """NVIDIA's library of a machine with three GPUs, of which the last tells nothing but its memory."""

    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU, NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0, 1, 0
    nvmlEventTypeXidCriticalError = 8

    def __init__(self) -> None:
        self.reasons = 0x04 | 0x40
        self.events: list[Any] = []
        self.listens: list[int] = []

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return len(UUIDS)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return UUIDS[handle]

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(used=(handle + 1) * GIB, total=80 * GIB)

    def _of(self, handle: int, value: Any) -> Any:
        if handle == 2:
            raise NvmlError("Not Supported")
        return value

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        return self._of(handle, SimpleNamespace(gpu=97))

    def nvmlDeviceGetTemperature(self, handle: int, _: int) -> int:
        return int(self._of(handle, 71))

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        return int(self._of(handle, 612_500))

    def nvmlDeviceGetClockInfo(self, handle: int, _: int) -> int:
        return int(self._of(handle, 1755))

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> int:
        return int(self._of(handle, self.reasons))

    def nvmlDeviceGetTotalEccErrors(self, handle: int, *_: int) -> int:
        return int(self._of(handle, 0))

    def nvmlEventSetCreate(self) -> object:
        return object()

    def nvmlDeviceRegisterEvents(self, handle: int, *_: Any) -> None:
        self.listens.append(self._of(handle, handle))

    def nvmlEventSetWait_v2(self, _: object, milliseconds: int) -> Any:
        assert milliseconds == 0, "nobody waits for an error"
        if not self.events:
            raise NvmlError("Timeout")
        return self.events.pop(0)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    made = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", made)
    return made


def test_all_that_a_gpu_tells(nvml: Nvml) -> None:
    first, _, silent = Gpus(3, {}).read()

    assert first == GpuFigures(
        index=0,
        utilization=0.97,
        memory_used=GIB,
        memory_total=80 * GIB,
        temperature=71,
        power=612.5,
        sm_clock=1.755e9,
        slowed_by=frozenset({"power", "heat"}),
        ecc_errors=0,
    )
    assert silent == GpuFigures(index=2, memory_used=3 * GIB, memory_total=80 * GIB)


def test_errors_of_the_driver_are_heard_without_waiting(nvml: Nvml) -> None:
    gpus = Gpus(3, {})
    assert nvml.listens == [0, 1]
    assert [gpu.xid for gpu in gpus.read()] == [0, 0, 0]
    nvml.events = [SimpleNamespace(device=1, eventData=31), SimpleNamespace(device=1, eventData=79)]

    assert [gpu.xid for gpu in gpus.read()] == [0, 79, 0]
    assert [gpu.xid for gpu in gpus.read()] == [0, 79, 0]


@pytest.mark.parametrize("broken", ["", "nvmlInit", "nvmlDeviceGetCount"])
def test_without_driver_or_library_there_are_no_figures(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    made = Nvml()
    if broken:

        def fail() -> None:
            raise NvmlError("Driver Not Loaded")

        setattr(made, broken, fail)
    monkeypatch.setitem(sys.modules, "pynvml", made if broken else None)

    assert Gpus(8, {}).read() == []


@pytest.mark.parametrize(
    ("chosen", "places"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("2,0", [2, 0]),
        ("GPU-bbb", [1]),
        ("1, GPU-a", [1, 0]),
        ("1,7,0", [1]),
        ("MIG-x", []),
    ],
)
def test_the_gpus_are_those_that_cuda_sees(chosen: str | None, places: list[int]) -> None:
    assert visible(UUIDS, chosen) == places


def test_only_those_of_the_pod_are_told(nvml: Nvml) -> None:
    assert [gpu.memory_used for gpu in Gpus(1, {"CUDA_VISIBLE_DEVICES": "1,0"}).read()] == [2 * GIB]


NET = """Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier
    lo: 5000 1 0 0 0 0 0 0 5000 1 0 0 0 0 0 0
  eth0: 1200 1 0 0 0 0 0 0 340 1 0 0 0 0 0 0
  eth1:  300 1 0 0 0 0 0 0  60 1 0 0 0 0 0 0
"""


@pytest.mark.parametrize(
    ("membership", "files", "used", "limit", "times"),
    [
        (
            "0::/\n",
            {
                "memory.current": "5000\n",
                "memory.max": "8000\n",
                "memory.stat": "anon 1\nactive_file 500\ninactive_file 1000\n",
                "cpu.stat": "usage_usec 2500000\nthrottled_usec 500000\n",
            },
            3500,
            8000,
            (2.5, 0.5),
        ),
        ("0::/\n", {"memory.current": "5000\n", "memory.max": "max\n"}, 5000, 16384, (None, None)),
        (
            "4:memory:/pod\n1:cpu,cpuacct:/pod\n",
            {
                "memory/pod/memory.usage_in_bytes": "5000\n",
                "memory/pod/memory.limit_in_bytes": "9223372036854771712\n",
                "memory/pod/memory.stat": "active_file 7\ntotal_active_file 600\ntotal_inactive_file 2000\n",
                "cpuacct/pod/cpuacct.usage": "3000000000\n",
                "cpu/pod/cpu.stat": "nr_throttled 3\nthrottled_time 250000000\n",
            },
            2400,
            16384,
            (3.0, 0.25),
        ),
        ("", {}, None, 16384, (None, None)),
    ],
    ids=["v2", "v2 without a limit", "v1", "none"],
)
def test_the_share_of_the_host(
    tmp_path: Path,
    membership: str,
    files: dict[str, str],
    used: int | None,
    limit: int,
    times: tuple[float | None, float | None],
) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:   16 kB\nMemAvailable:  9 kB\nHugePages_Total: 0\n")
    group = control_group(tmp_path, membership, files)

    assert group.memory(tmp_path / "meminfo") == (used, limit)
    assert group.cpu_times() == times


def test_disk_and_network(tmp_path: Path) -> None:
    (tmp_path / "net").write_text(NET)
    group = control_group(tmp_path, "", {})
    found = read_host(group, tmp_path / "not" / "there" / "yet", tmp_path / "net")

    assert (found.received, found.sent) == (1500, 400)
    assert 0 <= (found.disk_free or -1) <= (found.disk_size or 0)
    nothing = read_host(group, tmp_path, tmp_path / "no-such-file")
    assert (nothing.received, nothing.sent) == (None, None)


def test_prometheus_is_told_what_is_known_and_of_each_gpu(nvml: Nvml) -> None:
    host = HostFigures(memory_used=4, memory_limit=8, cpu_seconds=2.5, received=7)
    memory = {8: AllocatedMemory(allocated=1, reserved=2, peak=3)}
    lines = render_machine(Sample(host, tuple(Gpus(3, {}).read()), memory)).decode().splitlines()

    for line in (
        "sft_trainer_host_memory_used_bytes 4.0",
        "sft_trainer_host_cpu_seconds_total 2.5",
        "sft_trainer_host_network_received_bytes_total 7.0",
        'sft_trainer_gpu_utilization{gpu="0"} 0.97',
        'sft_trainer_gpu_power_watts{gpu="1"} 612.5',
        'sft_trainer_gpu_slowed_down{gpu="0",reason="heat"} 1.0',
        'sft_trainer_gpu_slowed_down{gpu="0",reason="power_brake"} 0.0',
        'sft_trainer_gpu_allocated_bytes{rank="8"} 1.0',
        'sft_trainer_gpu_peak_allocated_bytes{rank="8"} 3.0',
    ):
        assert line in lines
    assert "disk" not in "".join(lines)
    of_the_silent = {line.partition("{")[0] for line in lines if 'gpu="2"' in line}
    assert of_the_silent == {f"sft_trainer_gpu_{name}" for name in ("memory_used_bytes", "memory_total_bytes", "xid")}
    # Bounded: of each GPU so many, whatever happens
    assert len([line for line in lines if 'gpu="0"' in line]) == 8 + len(SLOWED_BY)
    assert render_machine(None) == b""


def judged(judge: Judge, sample: Sample, times: int) -> tuple[str, ...]:
    warnings: tuple[str, ...] = ()
    for _ in range(times):
        warnings = judge.warnings(sample)
    return warnings


HOT = GpuFigures(index=3, temperature=92, slowed_by=frozenset({"heat", "hardware", "power"}))


def test_gpus_that_stay_slowed_down_are_warned_of_once() -> None:
    judge = Judge(node=2)
    hot = Sample(gpus=(GpuFigures(index=0, slowed_by=frozenset({"power"})), HOT))
    assert judged(judge, hot, LASTING - 1) == ()
    judge.warnings(Sample())
    assert judged(judge, hot, LASTING - 1) == ()

    told = judge.warnings(hot)
    assert told == ("pod 2: GPU 3 (92 °C) is slowed down because of heat: look at the node's cooling",)
    # Hotter, and more of them: the same trouble
    more = Sample(gpus=(replace(HOT, temperature=95), replace(HOT, index=4)))
    assert judged(judge, more, 3 * LASTING) == told


def test_a_pod_that_nearly_fills_its_memory_is_warned_of() -> None:
    full = Sample(HostFigures(memory_used=97 * GIB, memory_limit=100 * GIB))
    assert judged(Judge(0), Sample(HostFigures(memory_used=90 * GIB, memory_limit=100 * GIB)), 2 * LASTING) == ()

    (told,) = judged(Judge(0), full, LASTING)
    assert told.startswith("pod 0: 97.0 of the 100.0 GiB of its memory are used")
    assert "raise compute.resources.limits.memory" in told


def test_an_error_of_the_driver_is_told_at_once() -> None:
    (told,) = Judge(1).warnings(Sample(gpus=(GpuFigures(index=5, xid=79),)))
    assert told.startswith("pod 1: the driver reports error Xid 79 of GPU 5: ")


def test_the_report_of_a_run_holds_a_few_warnings_of_machines() -> None:
    def report(node: int) -> Report:
        return Report(job_uid="u", node=node, processes=1, instance="i", warnings=(f"pod {node}: hot",))

    assert machine_warnings(report(node) for node in range(3)) == ["pod 0: hot", "pod 1: hot", "pod 2: hot"]
    many = machine_warnings(report(node) for node in range(1000))
    assert len(many) == 11
    assert many[-1] == "more pods warn of their machines: see their logs"


def monitor_of(folder: Path, *, gpus: int = 0, clock: Callable[[], float] = time.monotonic) -> Monitor:
    """Of the second of several pods with two workers each."""
    settings = replace(SETTINGS, run_dir=folder, node=1, processes=2, gpus=gpus)
    return Monitor(settings, Output(), folder, clock=clock)


def test_what_is_old_is_told_no_more(tmp_path: Path) -> None:
    now = [0.0]
    monitor = monitor_of(tmp_path, clock=lambda: now[0])
    assert monitor.sample is None
    monitor.look()
    assert monitor.sample is not None
    now[0] = SAMPLE_SECONDS
    assert monitor.sample is not None
    now[0] = STALE_SECONDS + 1
    assert monitor.sample is None


def test_a_run_without_gpus_asks_no_driver(tmp_path: Path, nvml: Nvml) -> None:
    monitor = monitor_of(tmp_path)
    monitor.look()
    assert monitor.sample is not None
    assert monitor.sample.gpus == ()
    with_gpus = monitor_of(tmp_path, gpus=2)
    with_gpus.look()
    assert with_gpus.sample is not None
    assert len(with_gpus.sample.gpus) == 2


def test_workers_tell_what_they_hold_every_few_seconds(tmp_path: Path) -> None:
    now, counters = [100.0], {"allocated_bytes.all.current": 5, "allocated_bytes.all.peak": 9}
    tells = TellsAllocatedMemory(tmp_path, 3, read=lambda: counters, clock=lambda: now[0])
    monitor = monitor_of(tmp_path)
    step: Any = None

    tells.on_step(step, Control())
    counters["allocated_bytes.all.current"] = 6
    tells.on_step(step, Control())
    monitor.look()
    assert monitor.sample is not None
    assert monitor.sample.allocated == {3: AllocatedMemory(allocated=5, reserved=0, peak=9)}
    now[0] += 10
    tells.on_step(step, Control())
    (tmp_path / MEMORY_FOLDER / "rank-2.json").write_text("{")
    monitor.look()
    assert monitor.sample.allocated == {3: AllocatedMemory(allocated=6, reserved=0, peak=9)}
