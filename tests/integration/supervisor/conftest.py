"""A group of pods for each test, and the promise that it leaves no process behind."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sft_api.ports import free_port

from .pods import Group


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    group = Group(tmp_path, free_port())
    yield group
    group.close()
    end = time.monotonic() + 2
    while (left := group.processes_left()) and time.monotonic() < end:
        time.sleep(0.02)
    assert left == []
