"""The S3 server of the tests keeps the two promises that checkpoints build on."""

from __future__ import annotations

import base64

import pytest
from botocore.exceptions import ClientError

from tests.cluster.object_store import ObjectStore


@pytest.fixture
def client(versitygw: ObjectStore):
    return versitygw.client()


def test_a_conditional_create_happens_once(client, versitygw: ObjectStore) -> None:
    client.create_bucket(Bucket="once")
    client.put_object(Bucket="once", Key="attempts/1.json", Body=b"first", IfNoneMatch="*")

    with pytest.raises(ClientError, match="PreconditionFailed"):
        client.put_object(Bucket="once", Key="attempts/1.json", Body=b"second", IfNoneMatch="*")

    assert (versitygw.folder / "once" / "attempts" / "1.json").read_bytes() == b"first"


def test_a_body_that_does_not_match_its_checksum_is_refused(client) -> None:
    client.create_bucket(Bucket="checked")
    wrong = base64.b64encode(bytes(32)).decode()

    with pytest.raises(ClientError, match="BadDigest"):
        client.put_object(Bucket="checked", Key="a", Body=b"data", ChecksumSHA256=wrong)
