"""A group of pods for each test, and the promise that it leaves no process behind."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from sft_api.ports import free_port
from tests.waiting import wait_until

from .pods import Group


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    group = Group(tmp_path, free_port())
    yield group
    group.close()
    wait_until(lambda: not group.processes_left())
