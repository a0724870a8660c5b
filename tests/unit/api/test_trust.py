"""Certificate authorities of the platform's own: which are taken, and how processes are told of them."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from sft_api.trust import MAX_BUNDLE_BYTES, checked_bundle, trust
from tests.certificates import self_signed


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> str:
    return self_signed(tmp_path_factory.mktemp("authority"))[0].read_text()


def test_certificates_are_taken_as_they_are(authority: str) -> None:
    assert checked_bundle("") == ""
    assert checked_bundle(f"# ours\n{authority}{authority}") == f"# ours\n{authority}{authority}"


@pytest.mark.parametrize(
    ("bundle", "words"),
    [
        ("ours", "holds no certificates in PEM"),
        ("-----BEGIN CERTIFICATE-----\nnone\n-----END CERTIFICATE-----\n", "holds no certificates in PEM"),
        ("-----BEGIN PRIVATE KEY-----\nMC4=\n-----END PRIVATE KEY-----\n", "holds a private key"),
        ("# Zertifizierungsstelle für alle\n", "not ASCII"),
        ("#" * (MAX_BUNDLE_BYTES + 1), "larger than 64 KiB"),
    ],
)
def test_what_is_none_is_refused_before_any_pod_trusts_it(bundle: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        checked_bundle(bundle)


def test_they_are_trusted_beside_the_usual_ones(authority: str, tmp_path: Path) -> None:
    # Given an image that names authorities of its own for one kind of client, and a folder of them for another
    mine, _ = self_signed(tmp_path)
    environment = {"SSL_CERT_FILE": str(mine), "REQUESTS_CA_BUNDLE": str(tmp_path)}
    (tmp_path / "made").mkdir()

    trust(authority, tmp_path / "made", environment)

    # Then the given ones are trusted beside these, and beside the usual ones by whom was told of none
    assert environment["REQUESTS_CA_BUNDLE"] == str(tmp_path)
    assert trusted(environment["SSL_CERT_FILE"]) == {der(authority), der(mine.read_text())}
    usual = trusted(environment["AWS_CA_BUNDLE"])
    assert der(authority) in usual
    assert len(usual) > 50


@pytest.mark.parametrize(
    ("variable", "heeded_by"),
    [("REQUESTS_CA_BUNDLE", ["AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE"]), ("CURL_CA_BUNDLE", ["REQUESTS_CA_BUNDLE"])],
)
def test_so_are_those_of_a_variable_that_another_client_heeds_too(
    authority: str, tmp_path: Path, variable: str, heeded_by: list[str]
) -> None:
    """botocore takes REQUESTS_CA_BUNDLE where AWS_CA_BUNDLE is not set, and requests takes that of curl."""
    mine, _ = self_signed(tmp_path)
    environment = {variable: str(mine)}

    trust(authority, tmp_path, environment)

    for name in heeded_by:
        assert trusted(environment[name]) == {der(authority), der(mine.read_text())}


def test_without_any_nothing_changes(tmp_path: Path) -> None:
    environment: dict[str, str] = {}

    trust("", tmp_path, environment)

    assert environment == {}
    assert list(tmp_path.iterdir()) == []


def trusted(file: str) -> set[bytes]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(file)
    return set(context.get_ca_certs(binary_form=True))


def der(certificate: str) -> bytes:
    return ssl.PEM_cert_to_DER_cert(certificate)
