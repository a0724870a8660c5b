"""What the ends of a launcher's processes mean for the workers."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from sft_trainer.supervisor.cgroup import Cgroup
from sft_trainer.supervisor.output import Output
from sft_trainer.supervisor.starts import Starts
from sft_trainer.supervisor.workers import Workers

from .test_environment import SETTINGS


@pytest.mark.parametrize(
    ("forming", "stopping", "over"), [(False, False, False), (False, True, True), (True, True, False)]
)
def test_workers_that_save_as_asked_outlive_their_launcher(
    forming: bool, stopping: bool, over: bool, tmp_path: Path
) -> None:
    """SIGTERM to all processes of a machine or a batch job ends Ray's at once."""
    told: dict[str, Any] = {}
    settings = dataclasses.replace(SETTINGS, run_dir=tmp_path)
    output = Output()
    starts = Starts(settings, output, Cgroup())
    starts._launcher.look = lambda _, **given: told.update(given)  # type: ignore[method-assign]
    workers = Workers(1, tmp_path, output, expected=settings.processes)

    starts.note({}, workers, memory_ran_out=False, forming=forming, stopping=stopping)

    assert told["over"] is over
