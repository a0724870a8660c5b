"""Where the time of a step goes on a GPU: by the trainer's own trace of some of them (``monitoring.profile``)."""

import gzip
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from sft_api.trainer_config import TrainerConfig

from .figures import Figure, Figures, one_line, say
from .measured import OutOfTimeError, Scene, Seen, followed

_STEPS = 3
_BETWEEN = 10
"""Steps after those of the warm-up, before the first that is recorded."""
_KINDS = (
    ("collectives", "nccl"),
    ("attention", "flash|fmha|cudnn.*(sdpa|attn)|attention"),
    ("products", "gemm|nvjet|cutlass|xmma|cublas|splitk"),
    ("compiled", "^triton"),
    # Also those of many tensors at once, and casts.
    ("copies", "memcpy|memset|copyfunctor|copy_kernel|catarray"),
    ("optimizer", "multi_tensor|adam"),
)
"""Of kernels, by their names; all else is ``other``."""
_OF_A_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_MOST_KERNELS = 12


@dataclass(frozen=True)
class Kernel:
    """What a GPU did for a while, in microseconds."""

    name: str
    start: float
    lasted: float

    @property
    def kind(self) -> str:
        """The first of ``_KINDS`` that fits."""
        return next((kind for kind, names in _KINDS if re.search(names, self.name.lower())), "other")


def kernels_in(trace: Path) -> list[Kernel]:
    """All that the gzipped ``trace`` of PyTorch's profiler tells of a GPU; none of a run on a CPU."""
    with gzip.open(trace) as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    found = (event for event in events if event.get("ph") == "X" and event.get("cat") in _OF_A_GPU)
    return [Kernel(event["name"], event["ts"], event["dur"]) for event in found]


def shares(kernels: Iterable[Kernel]) -> dict[str, float]:
    """Of the time from the first of ``kernels`` to the end of the last: that of each kind, and in which there was none
    (``waiting``). Those that go on side by side count each."""
    inside = sorted(kernels, key=lambda kernel: kernel.start)
    began = end = inside[0].start
    busy, of = 0.0, dict.fromkeys([*(kind for kind, _ in _KINDS), "other"], 0.0)
    for kernel in inside:
        of[kernel.kind] += kernel.lasted
        busy += max(0.0, kernel.start + kernel.lasted - max(end, kernel.start))
        end = max(end, kernel.start + kernel.lasted)
    lasted = end - began
    return {"waiting": 1 - busy / lasted, **{kind: time / lasted for kind, time in of.items() if time}}


def record(scene: Scene, figures: Figures) -> None:
    """Train until some steps are recorded; the shares of their time are figures, the longest kernels are said."""
    shape, first = scene.shape.name, scene.effort.warm_up_steps + _BETWEEN
    config = _recording(scene.config("recorded"), first)
    store = scene.folder / "recorded" / "store"

    def is_written(seen: list[Seen]) -> bool:
        return bool(seen) and seen[-1].step >= scene.effort.warm_up_steps and any(store.rglob("profile/*.json.gz"))

    try:
        followed(scene, "recorded", config, is_written)
        kernels = kernels_in(next(store.rglob("profile/*.json.gz")))
    except OutOfTimeError as reason:
        figures.add({f"{shape}_recorded": "no_time_left"})
        say(f"{shape}: the run that is recorded was ended {reason}")
        return
    except Exception as error:
        figures.add({f"{shape}_recorded": "failed"})
        say(f"{shape}: the run that is recorded failed: {one_line(error)}")
        return
    if not kernels:
        figures.add({f"{shape}_recorded": "skipped=cpu"})
        return
    found: dict[str, Figure] = {f"{shape}_{kind}_share": share for kind, share in shares(kernels).items()}
    figures.add(found)
    by_name: dict[str, list[float]] = {}
    for kernel in kernels:
        by_name.setdefault(kernel.name, []).append(kernel.lasted)
    for name, times in sorted(by_name.items(), key=lambda each: -sum(each[1]))[:_MOST_KERNELS]:
        say(f"{shape}: {sum(times) / 1000:.2f} ms, {len(times)} times {mean(times):.0f} us: {name[:120]}")


def _recording(config: TrainerConfig, first: int) -> TrainerConfig:
    monitoring = config.spec.monitoring
    given = {**monitoring.model_dump(exclude_none=True), "profile": {"startStep": first, "steps": _STEPS}}
    spec = config.spec.model_copy(update={"monitoring": type(monitoring).model_validate(given)})
    return config.model_copy(update={"spec": spec})
