"""The same store three times: a folder, moto, versitygw; a fourth time where ``SFT_TEST_S3_ENDPOINT`` names a server.

The keys for that one are those of the environment.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from sft_trainer.checkpoint.local import LocalStore
from sft_trainer.checkpoint.s3 import S3Store
from sft_trainer.checkpoint.store import Store
from tests.cluster.object_store import ObjectStore
from tests.integration.checkpoint.s3_servers import BUCKET, S3Server, moto_server, named_server, of_object_store

NAMED = os.environ.get("SFT_TEST_S3_ENDPOINT", "")
S3_SERVERS = ["moto", "versitygw", *(["named"] if NAMED else [])]


@pytest.fixture(scope="session")
def moto_s3() -> Iterator[S3Server]:
    with moto_server() as server:
        yield server


@pytest.fixture(scope="session")
def versitygw_s3(versitygw: ObjectStore) -> S3Server:
    return of_object_store(versitygw)


@pytest.fixture(scope="session")
def named_s3() -> S3Server:
    return named_server(NAMED)


@pytest.fixture(params=S3_SERVERS)
def s3_server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """moto without checksum headers, versitygw with them; this process has the right credentials."""
    server: S3Server = request.getfixturevalue(f"{request.param}_s3")
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    return server


@pytest.fixture
def s3_store(s3_server: S3Server) -> S3Store:
    return S3Store(BUCKET, f"run-{uuid.uuid4().hex}", s3_server.settings, retry_seconds=30)


@pytest.fixture(params=["local", *S3_SERVERS])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    if request.param == "local":
        (tmp_path / "store").mkdir()
        return LocalStore(tmp_path / "store")
    server: S3Server = request.getfixturevalue(f"{request.param}_s3")
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    return S3Store(BUCKET, f"run-{uuid.uuid4().hex}", server.settings, retry_seconds=30)
