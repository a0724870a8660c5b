"""A group of pods for each test, and the promise that it leaves no process behind."""

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from .pods import Group


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    group = Group(tmp_path, port)
    yield group
    group.close()
    end = time.monotonic() + 2
    while (left := group.processes_left()) and time.monotonic() < end:
        time.sleep(0.02)
    assert left == []
