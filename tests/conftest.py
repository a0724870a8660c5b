"""Fixtures shared by all tests; heavy ones live beside what they start."""

import atexit
import fcntl
import gc
import os
import signal
import sys
from collections.abc import Collection, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

# Inherited by every process that a test starts. The models are too small for two threads to gain anything, and threads
# that wait for one another on a busy machine make a step take seconds.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# What of a processor code may be compiled for is what the processor says. Inductor would compile and load a program for
# each such thing, wherever nothing was compiled yet: each such test has a folder of its own.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

# Begun in the background by a shell without job control this process ignores Ctrl-C, and so would all that tests start,
# which some of them press it in.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = ["tests.cluster.fixtures", "tests.fixtures_inputs"]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Modules of all tests, and what they import, make millions of objects and no garbage: none is looked at again."""
    gc.disable()
    try:
        with _alone_in_a_new_checkout():
            return (yield)
    finally:
        gc.freeze()
        gc.enable()
        # At its end Python frees them as ever: what is written in C++ warns of what it finds alive.
        atexit.register(gc.unfreeze)


@contextmanager
def _alone_in_a_new_checkout(tests: Path = Path(__file__).parent) -> Iterator[None]:
    """Of processes that collect at once the first one compiles all modules, and the others wait for what it writes."""
    with (tests / "conftest.py").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (tests / "unit" / "__pycache__").exists() or sys.dont_write_bytecode:
            fcntl.flock(lock, fcntl.LOCK_UN)
        yield


_TOGETHER = ("tests/e2e/", "tests/integration/operator/")
"""Folders whose tests share a node, or a control plane and an operator: they run one after the other."""
_MOSTLY_WAIT = (
    "tests/e2e/",
    "tests/integration/checkpoint/test_store_failures.py",
    "tests/integration/operator/",
    "tests/integration/run/test_outages.py",
    "tests/integration/supervisor/",
)
"""What mostly leaves a processor to others, and is patient where they take all of it."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``-n`` one process has all tests of a file, or of such a folder, for the sake of what they share.

    Of three the last one has the tests that mostly wait, of four or more the last two, while all others compute beside
    them. Who has no more of its own kind takes of the other: tests of runs wait too, and processes that compute leave a
    part of processors idle.
    """
    from xdist.scheduler import LoadFileScheduling

    class ByPlace(LoadFileScheduling):
        _wait: Collection[Any] = ()

        def schedule(self) -> None:
            if self.collection is None and len(self.nodes) > 2:
                self._wait = self.nodes[-1 if len(self.nodes) == 3 else -2 :]
            super().schedule()

        def _split_scope(self, nodeid: str) -> str:
            folders = (folder for folder in _TOGETHER if nodeid.startswith(folder))
            return next(folders, super()._split_scope(nodeid))

        def _own(self, node: Any) -> str | None:
            """The next of what is for this process rather than for the others."""
            waits = node in self._wait
            return next((scope for scope in self.workqueue if scope.startswith(_MOSTLY_WAIT) == waits), None)

        def _assign_work_unit(self, node: Any) -> None:
            if (own := self._own(node)) is not None:
                self.workqueue.move_to_end(own, last=False)
            super()._assign_work_unit(node)

    return ByPlace(config, log)


@pytest.fixture(scope="module")
def process_group() -> Iterator[None]:
    """Of this process alone, as a strategy wants one."""
    # Not at the top: most tests need no torch.
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
