"""A run whose store has a certificate that the platform's own authority has signed, as pods are told of it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sft_api.place import DONE_KEY
from sft_api.ports import free_port
from sft_api.v1alpha1.job import SFTJob
from sft_operator.builders.config_map import trainer_config
from tests.certificates import self_signed
from tests.cluster.binaries import binary
from tests.cluster.processes import Component, Supervisor
from tests.integration.checkpoint.s3_servers import listens
from tests.integration.run.runs import Place
from tests.waiting import PATIENCE_SECONDS, wait_until

KEYS = {"AWS_ACCESS_KEY_ID": "test-access", "AWS_SECRET_ACCESS_KEY": "test-secret"}
"""Of the test's own server, on loopback."""


class Store:
    """An S3 server that speaks TLS, with the bucket ``runs``, and who signed its certificate."""

    def __init__(self, endpoint: str, folder: Path, authority: str) -> None:
        self.endpoint = endpoint
        self.folder = folder
        self.authority = authority


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    (tmp_path / "tls").mkdir()
    certificate, key = self_signed(tmp_path / "tls")
    (tmp_path / "buckets" / "runs").mkdir(parents=True)
    port = free_port()
    program = [str(binary("versitygw")), "--port", f"127.0.0.1:{port}", "--quiet", "--cert", str(certificate)]
    program += ["--key", str(key), "posix", str(tmp_path / "buckets")]
    keys = {"ROOT_ACCESS_KEY": KEYS["AWS_ACCESS_KEY_ID"], "ROOT_SECRET_KEY": KEYS["AWS_SECRET_ACCESS_KEY"]}
    supervisor = Supervisor(tmp_path / "server", die_with_parent=True)
    try:
        supervisor.start(Component("versitygw", program, lambda: listens(port), environment=keys))
        yield Store(f"https://127.0.0.1:{port}", tmp_path / "buckets" / "runs", certificate.read_text())
    finally:
        supervisor.stop("versitygw")


def launch(place: Place, store: Store, authority: str) -> tuple[int, dict[str, str]]:
    """Exit code and last words of a pod whose platform trusts ``authority`` besides."""
    s3 = {"endpoint": store.endpoint, "region": "us-east-1", "forcePathStyle": True}
    manifest = place.job(checkpoint={"uri": "s3://runs/tiny", "s3": s3})
    manifest["metadata"] |= {"namespace": "team", "uid": "uid"}
    config = trainer_config(SFTJob.model_validate(manifest), None, ca_bundle=authority)
    (place.folder / "config.json").write_text(config.model_dump_json(by_alias=True, exclude_none=True))
    words = place.folder / "words.json"
    done = subprocess.run(
        [sys.executable, "-m", "sft_trainer.launch", "--config", "config.json", "--port", "0", "--bind", "127.0.0.1"],
        cwd=place.folder,
        env={**place.environment, **KEYS, "SFT_TERMINATION_LOG": str(words)},
        timeout=PATIENCE_SECONDS,
        capture_output=True,
        check=False,
    )
    # Its processes end with it, a moment later.
    wait_until(lambda: not place.processes())
    told: dict[str, str] = json.loads(words.read_text())
    return done.returncode, told


def test_a_run_saves_into_a_store_whose_authority_the_platform_names(place: Place, store: Store) -> None:
    code, words = launch(place, store, store.authority)

    assert (code, words["message"]) == (0, "the run is complete")
    assert (store.folder / "tiny" / DONE_KEY).exists()


def test_without_it_a_run_ends_at_once_with_what_to_name(place: Place, store: Store) -> None:
    _, words = launch(place, store, "")

    assert words["failure"] == "ConfigError"
    assert "who signed the server's certificate is not trusted here" in words["message"]
    assert "caBundle" in words["message"]
