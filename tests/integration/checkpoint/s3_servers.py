"""S3 servers on loopback: moto in this process, and versitygw, which is stricter (it verifies checksums)."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import boto3
from moto.server import ThreadedMotoServer

from sft_api.ports import free_port
from sft_trainer.checkpoint.store import S3Settings
from tests.cluster.binaries import binary
from tests.cluster.object_store import ObjectStore
from tests.cluster.processes import Component, Supervisor

BUCKET = "checkpoints"


@dataclass(frozen=True)
class S3Server:
    name: str
    settings: S3Settings
    access_key: str = "test-access"  # the tests' own server, on loopback
    secret_key: str = "test-secret"

    def environment(self) -> dict[str, str]:
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def client(self):
        return boto3.session.Session().client(
            "s3",
            endpoint_url=self.settings.endpoint,
            region_name=self.settings.region,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
        )


def settings(endpoint: str, checksum: Literal["when_supported", "when_required"]) -> S3Settings:
    return S3Settings(endpoint=endpoint, region="us-east-1", force_path_style=True, checksum=checksum)


def of_object_store(server: ObjectStore) -> S3Server:
    started = S3Server("versitygw", settings(server.endpoint, "when_supported"), server.access_key, server.secret_key)
    started.client().create_bucket(Bucket=BUCKET)
    return started


def named_server(endpoint: str) -> S3Server:
    """Somebody's server, with a bucket of the tests."""
    keys = os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"]
    started = S3Server("named", settings(endpoint, "when_supported"), *keys)
    with contextlib.suppress(started.client().exceptions.BucketAlreadyOwnedByYou):
        started.client().create_bucket(Bucket=BUCKET)
    return started


@contextmanager
def moto_server() -> Iterator[S3Server]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        endpoint = f"http://127.0.0.1:{server.get_host_and_port()[1]}"
        started = S3Server("moto", settings(endpoint, "when_required"))
        started.client().create_bucket(Bucket=BUCKET)
        yield started
    finally:
        server.stop()


@contextmanager
def server_on_a_tiny_disk(folder: Path, command: Callable[[Path, list[str]], list[str]]) -> Iterator[S3Server]:
    """versitygw over ``folder``, started through ``command`` (which mounts a small disk there)."""
    folder.mkdir()
    port = free_port()
    program = [str(binary("versitygw")), "--port", f"127.0.0.1:{port}", "--quiet", "posix", str(folder)]
    started = S3Server("versitygw", settings(f"http://127.0.0.1:{port}", "when_supported"))
    keys = {"ROOT_ACCESS_KEY": started.access_key, "ROOT_SECRET_KEY": started.secret_key}
    supervisor = Supervisor(folder.parent / "server", die_with_parent=True)
    try:
        supervisor.start(Component("versitygw", command(folder, program), lambda: listens(port), environment=keys))
        started.client().create_bucket(Bucket=BUCKET)
        yield started
    finally:
        supervisor.stop("versitygw")


def listens(port: int) -> str | None:
    with socket.socket() as probe:
        return None if probe.connect_ex(("127.0.0.1", port)) == 0 else f"nothing listens on port {port}"
