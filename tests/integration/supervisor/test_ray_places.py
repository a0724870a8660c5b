"""The driver of the launcher ``ray`` over a raylet of its own: what it says when Ray gives no places."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from sft_api.failures import FailureClass
from sft_api.ports import free_port
from sft_api.progress import WorkerError
from sft_trainer.on_ray import places
from sft_trainer.supervisor.protocol import RayHead
from sft_trainer.supervisor.ray_command import (
    DRIVER,
    lasting_environment,
    ray_environment,
    raylet_command,
    token_file,
)
from tests.unit.supervisor.test_environment import SETTINGS
from tests.waiting import PATIENCE_SECONDS

SECONDS = 5 * PATIENCE_SECONDS
"""Ray's processes import for long, one after the other."""


@pytest.fixture
def raylet(tmp_path: Path) -> Iterator[dict[str, str]]:
    """One with room for one rank; the environment of its driver."""
    with tempfile.TemporaryDirectory(prefix="sft-ray-", dir="/tmp") as folder:
        home, files = Path(folder), Path(folder) / "g1"
        files.mkdir()
        settings = replace(SETTINGS, nodes=1, node=0, processes=1, launcher="ray", run_dir=tmp_path)
        head = RayHead(port=free_port(), token=secrets.token_hex(32))
        token_file(files).write_text(head.token)
        environment = ray_environment(settings, lasting_environment(settings, os.environ, home=home), head, files=files)
        (tmp_path / places.FOLDER).mkdir()
        command = raylet_command(settings, head, head_address="127.0.0.1", files=files, cpus=1, memory=None)
        process = psutil.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        try:
            yield environment
        finally:
            for each in [*process.children(recursive=True), process]:
                with suppress(psutil.NoSuchProcess):
                    each.send_signal(signal.SIGKILL)
            process.wait()


def test_places_that_do_not_come_are_waited_for_no_longer_than_is_said(raylet: dict[str, str], tmp_path: Path) -> None:
    # Given a raylet with room for one rank, when two are to be placed
    asked = {places.PROCESSES_VARIABLE: "2", places.PLACE_SECONDS_VARIABLE: "2"}
    ended = subprocess.run(
        [sys.executable, "-m", DRIVER], env=raylet | asked, timeout=SECONDS, check=False, capture_output=True
    )

    # Then the driver ends, and says what was asked for and what there is
    assert ended.returncode == 1, ended.stderr
    report = WorkerError.model_validate_json((tmp_path / places.FOLDER / places.DRIVER_ERROR).read_bytes())
    assert report.failure is FailureClass.UNKNOWN
    assert "Ray: no places were found for 2 ranks of {'sft_rank': 1.0} each (free: {'sft_rank': " in report.message
    assert "within 2 s: a raylet has gone, or tasks of a callback hold what ranks need" in report.message
