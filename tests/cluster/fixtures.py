"""pytest fixtures over the test cluster. They never skip: what cannot start fails with its reason."""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import access, images, lifecycle
from tests.cluster.binaries import TIER_PROGRAMS, ensure
from tests.cluster.object_store import ObjectStore, object_store
from tests.cluster.state import default_folder

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
    yield from _own_cluster(tmp_path_factory, "api")


@pytest.fixture(scope="session")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[access.Cluster]:
    """`api_server` with controller-manager and scheduler: Jobs make pods, which no kubelet runs."""
    yield from _own_cluster(tmp_path_factory, "control")


@pytest.fixture(scope="session")
def cluster() -> Iterator[access.Cluster]:
    """A complete node, shared with other sessions on this machine; the last one stops what tests started.

    SFT_KEEP_CLUSTER=1 leaves it up. A cluster that `python -m tests.cluster up` started stays up anyway.
    """
    existing = access.from_environment()
    if existing:
        yield existing
        return
    keep = os.environ.get("SFT_KEEP_CLUSTER") == "1"
    with lifecycle.borrowed(default_folder(), "node", keep=keep) as started:
        yield started


@pytest.fixture
def namespace(cluster: access.Cluster) -> Iterator[str]:
    """A new namespace under the restricted pod security standard; it goes with the test."""
    name = f"test-{secrets.token_hex(4)}"
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}})
    yield name
    cluster.kubectl("delete", "namespace", name, "--wait=false")


@pytest.fixture(scope="session")
def operator_image(cluster: access.Cluster) -> str:
    """The operator's image, built from the working tree and known to the node."""
    return images.load(images.build_operator())


@pytest.fixture(scope="session")
def trainer_image(cluster: access.Cluster) -> str:
    """The trainer's image, built from the working tree and known to the node."""
    return images.load(images.build_trainer())


@pytest.fixture(scope="session")
def megatron_image(cluster: access.Cluster) -> str:
    """The trainer's image with Megatron-Core, built from the working tree and known to the node."""
    return images.load(images.build_megatron())


@pytest.fixture(scope="session")
def versitygw(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    """An S3 server over a temporary folder, for this machine and for pods of `cluster`."""
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
