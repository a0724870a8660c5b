"""What ``sft run`` says of the reports that it follows."""

from __future__ import annotations

from typing import Any, cast

from sft_api.progress import Phase, Progress, TrainingProgress
from sft_api.slow_gpus import slow_gpu
from sft_cli.interruptions import Interruptions
from sft_cli.run import Follower
from sft_cli.supervisor import Supervisor
from tests.unit.operator.test_slow_gpus import SLOW


class Reports:
    """A supervisor that ends after so many reports."""

    def __init__(self, *reports: Progress) -> None:
        self._reports = [*reports]

    def wait(self, seconds: float) -> int | None:
        return None if self._reports else 0

    def progress(self) -> Progress:
        return self._reports.pop(0)

    def last_report(self, last: Progress) -> Progress:
        return last

    def has_seen(self, incident: Any) -> bool:
        return True


class Said:
    """A display that keeps the lines that stay."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def show(self, progress: Progress) -> None: ...

    def say(self, message: str, **style: Any) -> None:
        self.lines.append(message)

    def close(self) -> None: ...


def test_a_slow_gpu_is_said_once_and_again_when_it_comes_back() -> None:
    slow = TrainingProgress(phase=Phase.TRAINING, step=5, slow_gpus=[SLOW])
    slower = slow.model_copy(update={"slow_gpus": [SLOW.model_copy(update={"products_speed": 0.5})]})
    later = SLOW.model_copy(update={"since": "2026-01-01T15:00:00Z"})
    reports = [slow, slower, TrainingProgress(phase=Phase.TRAINING), slow.model_copy(update={"slow_gpus": [later]})]
    said = Said()
    supervisor = cast(Supervisor, Reports(*(Progress(training=each) for each in reports)))

    class Never:
        count = 0

    Follower(supervisor, said, None, max_restarts=3).follow(cast(Interruptions, Never()))

    assert said.lines == [f"Warning: {slow_gpu(SLOW)}", f"Warning: {slow_gpu(later)}"]
