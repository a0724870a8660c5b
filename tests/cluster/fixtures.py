"""pytest fixtures over the test cluster. They never skip: what cannot start fails with its reason."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import access, images, lifecycle
from tests.cluster.binaries import TIER_PROGRAMS, ensure
from tests.cluster.object_store import ObjectStore, object_store

_PREPARATIONS: list[tuple[str, Callable[[], object]]] = [  # fixture, and what takes minutes the first time
    ("api_server", lambda: ensure(TIER_PROGRAMS["api"])),
    ("control_plane", lambda: ensure(TIER_PROGRAMS["control"])),
    ("versitygw", lambda: ensure(["versitygw"])),
    ("cluster", lambda: ensure(TIER_PROGRAMS["node"])),
    ("cluster", images.build_base),
    ("operator_image", images.build_operator),
    ("trainer_image", images.build_trainer),
    ("megatron_image", images.build_megatron),
]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Build what a test needs before its time begins: its limit is for the test."""
    _prepare(item.session, item.path.parent)
    return (yield)


@functools.cache
def _prepare(session: pytest.Session, folder: Path) -> None:
    """Build what the tests in ``folder`` need, once the first of them is to run: in the process that runs them."""
    tests = (item for item in session.items if item.path.parent == folder)
    wanted = {name for item in tests for name in getattr(item, "fixturenames", ())}
    for fixture, prepare in _PREPARATIONS:
        if fixture in wanted:
            with contextlib.suppress(Exception):  # the fixture meets the same failure, and reports it
                prepare()


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
