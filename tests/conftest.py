"""Fixtures shared by all tests; heavy ones live beside what they start."""

import os
from collections.abc import Iterator
from typing import Any

import pytest

# Inherited by every process that a test starts. The models are too small for two threads to gain anything, and threads
# that wait for one another on a busy machine make a step take seconds.
os.environ.setdefault("OMP_NUM_THREADS", "1")

pytest_plugins = ["tests.cluster.fixtures", "tests.fixtures_inputs"]


_TOGETHER = ("tests/e2e/", "tests/integration/operator/")
"""Folders whose tests share a node, or a control plane and an operator: they run one after the other."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``-n`` one process has all tests of a file, or of such a folder, for the sake of what they share."""
    from xdist.scheduler import LoadFileScheduling

    class ByPlace(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            folders = (folder for folder in _TOGETHER if nodeid.startswith(folder))
            return next(folders, super()._split_scope(nodeid))

    return ByPlace(config, log)


@pytest.fixture(scope="module")
def process_group() -> Iterator[None]:
    """Of this process alone, as a strategy wants one."""
    # Not at the top: most tests need no torch.
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
