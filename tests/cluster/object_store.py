"""versitygw: an S3 server over a folder, stricter than a mock (it verifies checksums)."""

from __future__ import annotations

import secrets
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config

from sft_api.ports import free_port
from tests.cluster.binaries import binary
from tests.cluster.processes import Component, Supervisor
from tests.cluster.state import BRIDGE_ADDRESS

REGION = "us-east-1"


@dataclass(frozen=True)
class ObjectStore:
    """`endpoint` is for this machine, `pod_endpoint` for pods of the test node.

    `folder` holds a folder for every bucket, with the objects as plain files.
    """

    endpoint: str
    pod_endpoint: str
    access_key: str
    secret_key: str
    region: str
    folder: Path
    _serve: Callable[[str, bool], None] = field(repr=False, compare=False)

    def serve(self, *, revoked: bool = False, read_only: bool = False) -> None:
        """The server begins again on its port: as before, or without the keys, or refusing all that writes."""
        self._serve(f"test{secrets.token_hex(8)}" if revoked else self.access_key, read_only)

    def environment(self) -> dict[str, str]:
        """The variables that boto3 and the trainer read."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_DEFAULT_REGION": self.region,
            "AWS_ENDPOINT_URL_S3": self.endpoint,
        }

    def client(self) -> Any:
        """An S3 client with the right credentials."""
        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            region_name=self.region,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            config=Config(s3={"addressing_style": "path"}),
        )


@contextmanager
def object_store(folder: Path) -> Iterator[ObjectStore]:
    """Run one server on free ports until the block ends; it dies with this process too."""
    buckets = folder / "buckets"
    buckets.mkdir(parents=True)
    port, access_key, secret_key = free_port(), f"test{secrets.token_hex(8)}", secrets.token_hex(20)
    endpoint = f"http://127.0.0.1:{port}"
    supervisor = Supervisor(folder, die_with_parent=True)

    def serve(known_key: str, read_only: bool) -> None:
        # every address, because the bridge of the node may come up later; the keys are random
        argv = [str(binary("versitygw")), "--quiet", "--keep-alive", f"--region={REGION}", f"--port=0.0.0.0:{port}"]
        argv += ["--readonly"] * read_only + ["posix", str(buckets)]
        keys = {"ROOT_ACCESS_KEY": known_key, "ROOT_SECRET_KEY": secret_key}
        supervisor.start(Component("versitygw", argv, lambda: _answers(endpoint), environment=keys))

    store = ObjectStore(
        endpoint=endpoint,
        pod_endpoint=f"http://{BRIDGE_ADDRESS}:{port}",
        access_key=access_key,
        secret_key=secret_key,
        region=REGION,
        folder=buckets,
        _serve=serve,
    )
    try:
        store.serve()
        yield store
    finally:
        supervisor.stop("versitygw")


def _answers(endpoint: str) -> str | None:
    """None when the server answers at all: an unsigned request is refused with 403."""
    try:
        with urllib.request.urlopen(endpoint, timeout=5):
            return None
    except urllib.error.HTTPError as error:
        return None if error.code == 403 else f"GET {endpoint}: {error.code}"
    except OSError as error:
        return f"GET {endpoint}: {error}"
