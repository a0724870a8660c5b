"""Where the runs of these tests take place."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.forks import Forks
from tests.integration.run.runs import Place, environment_of_runs

LONG: dict[str, Any] = {"training": {"steps": 60, "globalBatchTokens": 512}, "checkpoint": {"everySteps": 20}}
"""Sections of a job that is disturbed in the middle."""


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the runs of this session have fetched and tokenised."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def forks(cache: Path) -> Iterator[Forks]:
    """Starts the commands of this session."""
    forks = Forks(environment_of_runs(cache))
    yield forks
    forks.close()


@pytest.fixture(scope="session")
def make_place(
    tmp_path_factory: pytest.TempPathFactory, tiny_inputs: Any, cache: Path, forks: Forks
) -> Callable[[str], Place]:
    """Makes folders to run jobs in."""
    return lambda name: Place(tmp_path_factory.mktemp(name), tiny_inputs, cache, forks.popen)


@pytest.fixture
def place(tmp_path: Path, tiny_inputs: Any, cache: Path, forks: Forks) -> Iterator[Place]:
    """A folder for one test."""
    made = Place(tmp_path / "place", tiny_inputs, cache, forks.popen)
    yield made
    assert not made.kill(), "of a test that failed: it would take the time of all others"


@pytest.fixture(scope="session")
def undisturbed(make_place: Callable[[str], Place]) -> Place:
    """A complete run of ``LONG`` that nothing happened to."""
    place = make_place("undisturbed")
    ended = place.run(place.job(**LONG))
    assert ended.code == 0, ended.said
    return place
