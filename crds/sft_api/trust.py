"""Certificate authorities of the platform's own, which are trusted beside those that an image brings."""

import ssl
from collections.abc import MutableMapping
from pathlib import Path

VARIABLES = ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE")
"""By which botocore, requests (MLflow) and OpenSSL (the hub's library, W&B) are told of a file instead of theirs."""
_ELSE = {"AWS_CA_BUNDLE": "REQUESTS_CA_BUNDLE", "REQUESTS_CA_BUNDLE": "CURL_CA_BUNDLE"}
"""By which botocore and requests are told where their own variable says nothing."""
MAX_BUNDLE_BYTES = 64 * 1024
"""Each job's ConfigMap and Job have a copy."""


def checked_bundle(bundle: str) -> str:
    """``bundle``, certificates in PEM, as it is; raises ``ValueError`` with what to change."""
    if len(bundle.encode()) > MAX_BUNDLE_BYTES:
        raise ValueError(f"is larger than {MAX_BUNDLE_BYTES // 1024} KiB: give the authorities that are needed alone")
    if "PRIVATE KEY-----" in bundle:
        raise ValueError("holds a private key, which every namespace with jobs would be given: certificates alone")
    if not bundle.isascii():
        raise ValueError("holds characters that are not ASCII: leave out what stands between the certificates")
    if bundle:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=bundle)
        except ssl.SSLError as error:
            raise ValueError(f"holds no certificates in PEM ({error.reason or error})") from error
    return bundle


def trust(bundle: str, folder: Path, environment: MutableMapping[str, str]) -> None:
    """Have what reads ``environment`` trust ``bundle`` besides: files are made in ``folder``, with what is trusted now.

    That is the file that a variable names already, as images of companies do, its own or the one that is heeded without
    it, else the authorities of certifi.
    """
    if not bundle:
        return
    import certifi  # not by those who are told of no bundle

    for name in VARIABLES:
        # Before that variable is set itself: the order is that in which one stands in for another.
        other = environment.get(_ELSE.get(name, ""), "")
        known = Path(environment.get(name) or (other if Path(other).is_file() else certifi.where()))
        if known.is_file():
            told = folder / f"{name.lower()}.pem"
            told.write_bytes(known.read_bytes() + b"\n" + bundle.encode())
            environment[name] = str(told)
