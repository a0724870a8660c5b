"""The same store three times: a folder, moto, versitygw."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from sft_trainer.checkpoint.local import LocalStore
from sft_trainer.checkpoint.s3 import S3Store
from sft_trainer.checkpoint.store import Store
from tests.integration.checkpoint.s3_servers import (
    BUCKET,
    CREDENTIALS,
    S3Server,
    moto_server,
    versitygw_server,
)


@pytest.fixture(scope="session")
def moto() -> Iterator[S3Server]:
    with moto_server() as server:
        yield server


@pytest.fixture(scope="session")
def versitygw(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with versitygw_server(tmp_path_factory.mktemp("versitygw") / "data") as server:
        yield server


@pytest.fixture
def aws_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(params=["moto", "versitygw"])
def s3_server(request: pytest.FixtureRequest, aws_credentials: None) -> S3Server:
    server: S3Server = request.getfixturevalue(request.param)
    return server


@pytest.fixture
def s3_store(s3_server: S3Server) -> S3Store:
    return S3Store(BUCKET, f"run-{uuid.uuid4().hex}", s3_server.settings, retry_seconds=3)


@pytest.fixture(params=["local", "moto", "versitygw"])
def store(request: pytest.FixtureRequest, tmp_path: Path, aws_credentials: None) -> Store:
    if request.param == "local":
        (tmp_path / "store").mkdir()
        return LocalStore(tmp_path / "store")
    server: S3Server = request.getfixturevalue(request.param)
    return S3Store(BUCKET, f"run-{uuid.uuid4().hex}", server.settings, retry_seconds=3)
