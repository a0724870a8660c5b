"""How the operator begins."""

from __future__ import annotations

import os
from collections.abc import Coroutine
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import yaml

from sft_api.trust import VARIABLES
from sft_operator import __main__ as operator
from sft_operator.cluster.informer import HistoryLost
from sft_operator.cluster.leadership import LeadershipLost
from sft_operator.config import load_settings
from tests.certificates import self_signed


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What each operator that begins trusts, as its clients of a store are told."""
    found: list[bytes] = []

    def run(works: Coroutine[Any, Any, None]) -> None:
        works.close()
        found.append(Path(os.environ["AWS_CA_BUNDLE"]).read_bytes() if "AWS_CA_BUNDLE" in os.environ else b"")

    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(operator, "uvloop", Mock(run=run))
    monkeypatch.setattr(operator, "gc", Mock())
    monkeypatch.setattr(os, "environ", {**os.environ})
    return found


def test_it_trusts_the_platforms_authorities_besides(begun: list[bytes], tmp_path: Path) -> None:
    certificate, _ = self_signed(tmp_path)
    for name, settings in (("plain", {}), ("own", {"caBundle": certificate.read_text()})):
        (tmp_path / name).write_text(yaml.safe_dump(settings))
        assert operator.main(["--config", str(tmp_path / name)]) == 0

    plain, own = begun
    assert plain == b""
    assert own.endswith(certificate.read_bytes())
    assert own.count(b"BEGIN CERTIFICATE") > 50


@pytest.mark.parametrize("name", ["httpPort", "http_port"])
def test_a_flag_goes_before_the_file_however_that_spells_it(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({name: 9000, "namespace": "jobs"}))

    settings = load_settings(tmp_path / "config.yaml", httpPort=9001)

    assert (settings.http_port, settings.namespace) == (9001, "jobs")


@pytest.mark.parametrize(
    ("settings", "flags", "said"),
    [
        (b"logLevel: [", [], "expected the node content"),
        (b"logLevel: \xff", [], "invalid start byte"),
        (b"- logLevel", [], "valid dictionary"),
        (b"", ["--http-port", "70000"], "less than or equal to 65535"),
    ],
)
def test_settings_and_flags_that_cannot_be_read_are_told_in_words(
    begun: list[bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: bytes, flags: list[str], said: str
) -> None:
    (tmp_path / "config.yaml").write_bytes(settings)

    assert operator.main(["--config", str(tmp_path / "config.yaml"), *flags]) == 1
    assert begun == []
    assert said in capsys.readouterr().err


def test_it_does_not_begin_with_what_no_certificate_is(
    begun: list[bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"caBundle": "ca.crt"}))

    assert operator.main(["--config", str(tmp_path / "config.yaml")]) == 1
    assert begun == []
    assert "caBundle" in (said := capsys.readouterr().err)
    assert "holds no certificates in PEM" in said


@pytest.mark.parametrize("error", [HistoryLost, LeadershipLost])
def test_what_it_cannot_go_on_after_is_a_sentence(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(works: Coroutine[Any, Any, None]) -> None:
        works.close()
        raise error("it begins anew")

    monkeypatch.setattr(operator, "uvloop", Mock(run=run))
    monkeypatch.setattr(operator, "gc", Mock())

    assert operator.main([]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "sft-operator: it begins anew"
