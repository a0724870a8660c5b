"""Which process of pytest has which tests, with processes that only say what they were given."""

import fcntl
import itertools
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sft_api.generate import ROOT
from tests.conftest import _MOSTLY_WAIT, _TOGETHER, _alone_in_a_new_checkout, pytest_xdist_make_scheduler

WAITING = [f"tests/integration/{file}::test_{n}" for file in ("operator/a.py", "operator/b.py") for n in range(4)]
OTHERS = [f"tests/unit/test_{file:02}.py::test_{n}" for file in range(12) for n in range(4)]


class Process:
    def __init__(self) -> None:
        self.todo: list[int] = []
        self.done: list[int] = []
        self.shutting_down = False
        self.gateway = SimpleNamespace(id="one of them")

    def send_runtest_some(self, indices: list[int]) -> None:
        assert not self.shutting_down
        self.todo += indices

    def shutdown(self) -> None:
        self.shutting_down = True


def ran(count: int, tests: list[str], *, slow: int | None = None) -> list[list[str]]:
    """What each of ``count`` processes ran, one of each after the other; ``slow`` ends none before all others have."""
    options: dict[str, Any] = {"tx": ["popen"] * count, "rsyncdir": []}
    option = SimpleNamespace(loadscopereorder=False)
    scheduler = pytest_xdist_make_scheduler(SimpleNamespace(getvalue=options.get, option=option), None)  # type: ignore[arg-type]
    processes = [Process() for _ in range(count)]
    for process in processes:
        scheduler.add_node(process)
    for process in processes:
        scheduler.add_node_collection(process, tests)
    scheduler.schedule()
    while True:
        able = [process for number, process in enumerate(processes) if process.todo and number != slow]
        able = able or [process for process in processes if process.todo]
        if not able:
            break
        for process in able:
            process.done.append(process.todo.pop(0))
            scheduler.mark_test_complete(process, process.done[-1])
    assert not scheduler.workqueue
    assert all(process.shutting_down for process in processes)
    return [[tests[index] for index in process.done] for process in processes]


def test_of_three_the_last_has_what_waits_and_helps_after_that() -> None:
    first, second, last = ran(3, OTHERS[:8] + WAITING + OTHERS[8:])

    assert last[: len(WAITING)] == WAITING
    assert set(WAITING).isdisjoint(first + second)
    assert sorted(first + second + last[len(WAITING) :]) == OTHERS
    assert last[len(WAITING) :]
    # A file is one process's
    files = [{name.partition("::")[0] for name in process} for process in (first, second, last)]
    assert sum(map(len, files)) == len(set().union(*files))


def test_of_four_two_share_what_waits() -> None:
    node = [f"tests/e2e/test_{file}.py::test_{n}" for file in "ab" for n in range(4)]

    *computing, first, second = ran(4, node + OTHERS[:8] + WAITING + OTHERS[8:])

    # What shares a node, or an operator, is one process's
    assert (first[: len(node)], second[: len(WAITING)]) == (node, WAITING)
    assert {*node, *WAITING}.isdisjoint(itertools.chain(*computing))
    assert sorted(itertools.chain(*computing, first[len(node) :], second[len(WAITING) :])) == OTHERS


def test_two_have_everything_in_its_order() -> None:
    first, second = ran(2, OTHERS[:8] + WAITING + OTHERS[8:])

    assert sorted(first + second) == sorted(OTHERS + WAITING)
    assert [name for name in first + second if name in WAITING] == WAITING, "in one of them, in a row"


def test_where_nothing_waits_three_have_all() -> None:
    processes = ran(3, OTHERS)

    assert sorted(itertools.chain(*processes)) == OTHERS
    assert all(processes)


@pytest.mark.parametrize("slow", [0, 2])
def test_whoever_is_slow_everything_is_run_and_what_waits_is_no_reason_to_stand_still(slow: int) -> None:
    more = [f"tests/integration/supervisor/test_{file}.py::test_{n}" for file in range(4) for n in range(4)]

    processes = ran(3, WAITING + more + OTHERS, slow=slow)

    assert sorted(itertools.chain(*processes)) == sorted(WAITING + more + OTHERS)
    assert WAITING[0] in processes[2]
    # Who is not slow helps once it has nothing of its own to do
    helped = [name for process in processes[:2] for name in process if name in WAITING + more]
    assert bool(helped) == (slow == 2)
    assert bool(set(processes[2]) & set(OTHERS)) == (slow == 0)


@pytest.mark.parametrize("place", sorted({*_TOGETHER, *_MOSTLY_WAIT}))
def test_what_is_dealt_by_its_place_is_there(place: str) -> None:
    assert (ROOT / place).exists()


def test_where_nothing_is_compiled_yet_one_process_does_so_and_then_none_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    (tmp_path / "unit").mkdir()
    lock = tmp_path / "conftest.py"
    lock.touch()

    with lock.open() as other:
        with _alone_in_a_new_checkout(tmp_path):
            with pytest.raises(BlockingIOError):
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            (tmp_path / "unit" / "__pycache__").mkdir()
        with _alone_in_a_new_checkout(tmp_path):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
