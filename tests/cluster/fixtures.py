"""pytest fixtures over the test cluster. They never skip: what cannot start fails with its reason."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster import access, lifecycle
from tests.cluster.object_store import ObjectStore, object_store


@pytest.fixture(scope="session")
def api_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[access.Cluster]:
    """A real API server (with etcd) of this test session alone, or the user's own cluster."""
    yield from _own_cluster(tmp_path_factory, "api")


@pytest.fixture(scope="session")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[access.Cluster]:
    """`api_server` with controller-manager and scheduler: Jobs make pods, which no kubelet runs."""
    yield from _own_cluster(tmp_path_factory, "control")


@pytest.fixture(scope="session")
def versitygw(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    """An S3 server over a temporary folder. Ask for `cluster` first when pods are to reach it."""
    with object_store(tmp_path_factory.mktemp("versitygw")) as store:
        yield store


def _own_cluster(factory: pytest.TempPathFactory, tier: str) -> Iterator[access.Cluster]:
    existing = access.from_environment()
    if existing:
        yield existing
        return
    folder = factory.mktemp(f"{tier}-cluster")
    try:
        yield lifecycle.up(folder, tier, die_with_parent=True)
    finally:
        lifecycle.down(folder)
