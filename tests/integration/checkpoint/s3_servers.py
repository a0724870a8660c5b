"""S3 servers on loopback: moto in this process, versitygw (stricter: verifies checksums) as a process."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import boto3
from moto.server import ThreadedMotoServer

from sft_trainer.checkpoint.store import S3Settings
from tests.cluster.binaries import binary

ACCESS_KEY, SECRET_KEY = "test-access", "test-secret"  # the tests' own server, on loopback
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": ACCESS_KEY,
    "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
    "AWS_EC2_METADATA_DISABLED": "true",
}
BUCKET = "checkpoints"


@dataclass(frozen=True)
class S3Server:
    name: str
    settings: S3Settings

    def client(self):
        return boto3.session.Session().client(
            "s3",
            endpoint_url=self.settings.endpoint,
            region_name=self.settings.region,
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
        )


def _settings(port: int) -> S3Settings:
    return S3Settings(endpoint=f"http://127.0.0.1:{port}", region="us-east-1", force_path_style=True)


@contextmanager
def moto_server() -> Iterator[S3Server]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        started = S3Server("moto", _settings(server.get_host_and_port()[1]))
        started.client().create_bucket(Bucket=BUCKET)
        yield started
    finally:
        server.stop()


@contextmanager
def versitygw_server(folder: Path, inside: Sequence[str] = ()) -> Iterator[S3Server]:
    """A server over ``folder``; ``inside`` is a command prefix to run it under."""
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    program = [str(binary("versitygw")), "--port", f"127.0.0.1:{port}", "--quiet", "posix", str(folder)]
    environment = {**os.environ, "ROOT_ACCESS_KEY": ACCESS_KEY, "ROOT_SECRET_KEY": SECRET_KEY}
    with (folder.parent / f"{folder.name}.log").open("wb") as log:
        process = subprocess.Popen([*inside, *program], stdout=log, stderr=log, env=environment)
    try:
        _wait_for(port, process)
        started = S3Server("versitygw", _settings(port))
        started.client().create_bucket(Bucket=BUCKET)
        yield started
    finally:
        process.kill()
        process.wait()


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    for _ in range(100):
        assert process.poll() is None, "versitygw ended at once"
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise AssertionError("versitygw does not listen")
