"""Images of tests: who builds them, and when."""

from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.cluster import fixtures


class Session:
    def __init__(self, items: list[Any]) -> None:
        self.items = items


def item(folder: str, *names: str) -> Any:
    return SimpleNamespace(path=Path(folder, "test_one.py"), fixturenames=names)


def test_the_first_test_of_a_folder_has_all_built_that_its_tests_need(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []

    def fails() -> None:
        built.append("disk")
        raise OSError("it is full")

    every = [("disk", fails), ("node", lambda: built.append("node")), ("hub", lambda: built.append("hub"))]
    monkeypatch.setattr(fixtures, "_IMAGES", every)
    items = [item("one"), item("one", "node", "disk"), item("other", "hub")]
    session = Session(items)
    for each in items:
        each.session = session

    def run(number: int) -> list[str]:
        """What was built before the time of a test began: nothing is after it."""
        running: Generator[None, Any, Any] = fixtures.pytest_runtest_protocol(items[number])
        next(running)
        there = [*built]
        with pytest.raises(StopIteration, match="its result"):
            running.send("its result")
        assert built == there
        return there

    assert run(0) == ["disk", "node"]
    assert run(1) == ["disk", "node"]
    assert run(2) == ["disk", "node", "hub"]


def test_it_takes_no_time_of_the_test(pytestconfig: pytest.Config) -> None:
    hook: Any = pytestconfig.hook.pytest_runtest_protocol
    begun = [each.plugin_name for each in reversed(hook.get_hookimpls())]
    assert begun.index(fixtures.__name__) < begun.index("timeout")
