"""pytest fixtures over the test cluster. They never skip: what cannot start fails with its reason."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster import access, lifecycle


@pytest.fixture(scope="session")
def api_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[access.Cluster]:
    """A real API server (with etcd) of this test session alone, or the user's own cluster."""
    existing = access.from_environment()
    if existing:
        yield existing
        return
    folder = tmp_path_factory.mktemp("api-server")
    try:
        yield lifecycle.up(folder, "api", die_with_parent=True)
    finally:
        lifecycle.down(folder)
