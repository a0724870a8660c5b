"""pytest fixtures over the test cluster. They never skip: what cannot start fails with its reason."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import access, images, lifecycle
from tests.cluster.binaries import TIER_PROGRAMS, ensure
from tests.cluster.object_store import ObjectStore, object_store

# By the fixture that needs them; they take minutes the first time.
_PROGRAMS: dict[str, Iterable[str]] = {
    "api_server": TIER_PROGRAMS["api"],
    "control_plane": TIER_PROGRAMS["control"],
    "versitygw": ["versitygw"],
    "cluster": TIER_PROGRAMS["node"],
}
_IMAGES: list[tuple[str, Callable[[], object]]] = [
    ("cluster", images.build_base),
    ("operator_image", images.build_operator),
    ("trainer_image", images.build_trainer),
    ("megatron_image", images.build_megatron),
]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Build the programs that the collected tests need before the first one starts: its time limit is for the test.

    Some tests call programs by themselves that others have fixtures for.
    """
    if session.config.option.collectonly:
        return
    wanted = _fixtures_of(session.items)
    for fixture, names in _PROGRAMS.items():
        if fixture in wanted:
            _prepare(functools.partial(ensure, names))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Build the images that a test needs before its time begins."""
    _build_images(item.session, item.path.parent)
    return (yield)


@functools.cache
def _build_images(session: pytest.Session, folder: Path) -> None:
    """Those of the tests in ``folder``, once the first of them is to run: in the process that runs them."""
    wanted = _fixtures_of(item for item in session.items if item.path.parent == folder)
    for fixture, build in _IMAGES:
        if fixture in wanted:
            _prepare(build)


def _fixtures_of(items: Iterable[pytest.Item]) -> set[str]:
    return {name for item in items for name in getattr(item, "fixturenames", ())}


def _prepare(build: Callable[[], object]) -> None:
    with contextlib.suppress(Exception):  # the fixture meets the same failure, and reports it
        build()


@pytest.fixture(scope="session")
def api_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[access.Cluster]:
    """A real API server (with etcd) of this test session alone, or the user's own cluster."""
    yield from own_cluster(tmp_path_factory, "api")


@pytest.fixture(scope="session")
def versitygw(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    """An S3 server over a temporary folder, for this machine and for pods of `cluster`."""
    with object_store(tmp_path_factory.mktemp("versitygw")) as store:
        yield store


def own_cluster(factory: pytest.TempPathFactory, tier: str) -> Iterator[access.Cluster]:
    """A cluster of the tests that share it, for as long as they last, or the user's own."""
    existing = access.from_environment()
    if existing:
        yield existing
        return
    folder = factory.mktemp(f"{tier}-cluster")
    try:
        yield lifecycle.up(folder, tier, die_with_parent=True)
    finally:
        lifecycle.down(folder)
