"""The node of these tests, and what they run on it. It is stopped behind the last of them: idle it takes a tenth of a
processor, and other tests come behind these in the same process."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator

import pytest

from tests.cluster import access, images, lifecycle
from tests.cluster.state import default_folder


@pytest.fixture(scope="package")
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


@pytest.fixture(scope="package")
def operator_image(cluster: access.Cluster) -> str:
    """The operator's image, built from the working tree and known to the node."""
    return images.load(images.build_operator())


@pytest.fixture(scope="package")
def trainer_image(cluster: access.Cluster) -> str:
    """The trainer's image, built from the working tree and known to the node."""
    return images.load(images.build_trainer())


@pytest.fixture(scope="package")
def megatron_image(cluster: access.Cluster) -> str:
    """The trainer's image with Megatron-Core, built from the working tree and known to the node."""
    return images.load(images.build_megatron())
