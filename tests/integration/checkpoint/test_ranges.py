"""Ranges of S3 objects, received where they are to lie."""

from __future__ import annotations

import http.client
import os
from typing import Any

import pytest
import urllib3.connection

from sft_trainer.checkpoint.s3 import S3Store
from tests.integration.checkpoint.s3_servers import S3Server

MiB = 2**20


@pytest.mark.parametrize("breaks", ["reset", "end"])
def test_a_range_that_breaks_off_goes_on_where_it_did(
    s3_store: S3Store, monkeypatch: pytest.MonkeyPatch, breaks: str
) -> None:
    # Given a connection that breaks after 3 MiB of 20
    data = os.urandom(20 * MiB)
    s3_store.put("x.bin", data)
    asked: list[str] = []
    received = 0
    call, readinto = S3Store.call, http.client.HTTPResponse.readinto

    def counted(store: S3Store, client: Any, operation: str, key: str, arguments: dict[str, Any]) -> Any:
        asked.append(arguments["Range"])
        return call(store, client, operation, key, arguments)

    def breaking(response: http.client.HTTPResponse, memory: memoryview) -> int:
        nonlocal received
        if len(asked) == 1 and received == 3 * MiB:
            if breaks == "reset":
                raise ConnectionResetError
            return 0
        count = readinto(response, memory)
        received += count
        return count

    monkeypatch.setattr(S3Store, "call", counted)
    monkeypatch.setattr(http.client.HTTPResponse, "readinto", breaking)

    # When a range is read into memory, MiB after MiB
    memory = bytearray(16 * MiB)
    with s3_store.open_range("x.bin", 5, len(memory)) as stream:
        for start in range(0, len(memory), MiB):
            assert stream.fill(memoryview(memory)[start : start + MiB]) == MiB

    # Then it is whole, no byte was received twice, and none of them went through another one's memory
    assert memory == data[5 : 5 + len(memory)]
    assert asked == [f"bytes=5-{16 * MiB + 4}", f"bytes={3 * MiB + 5}-{16 * MiB + 4}"]
    assert received == len(memory)


def test_ranges_use_their_connections_again(
    s3_server: S3Server, s3_store: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = os.urandom(3 * MiB)
    s3_store.put("x.bin", data)
    connections = 0
    connect = urllib3.connection.HTTPConnection.connect

    def counted(connection: Any) -> None:
        nonlocal connections
        connections += 1
        connect(connection)

    def fill(offset: int, length: int) -> None:
        memory = bytearray(MiB)
        with s3_store.open_range("x.bin", offset, length) as stream:
            assert stream.fill(memoryview(memory)) == MiB
        assert memory == data[offset : offset + MiB]

    monkeypatch.setattr(urllib3.connection.HTTPConnection, "connect", counted)
    for number in range(3):
        fill(number * MiB, MiB)
    if s3_server.name == "moto":  # which ends each of them itself
        assert connections == 3
        return
    assert connections == 0, "the one of the put will do"
    fill(0, 3 * MiB)
    fill(MiB, MiB)
    assert connections == 1, "what is left of an answer is nobody's next one"
