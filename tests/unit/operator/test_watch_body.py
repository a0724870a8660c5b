"""Watches are read as they arrive, in pieces of any size; a bad line costs its own object only."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sft_operator.cluster.watch_body import Event, WatchBody

POD: dict[str, Any] = {"metadata": {"name": "ü\U0001f600", "uid": "u", "resourceVersion": "7"}}


def line(kind: str) -> bytes:
    return json.dumps({"type": kind, "object": POD}, ensure_ascii=False).encode() + b"\n"


def read(text: bytes, size: int = 100_000, longest_line: int = 10_000) -> list[Event | None]:
    body = WatchBody("Pod", longest_line)
    return [event for at in range(0, len(text), size) for event in body.feed(text[at : at + size])]


@pytest.mark.parametrize("size", [1, 7, 64, 100_000])
def test_every_line_is_an_event_however_it_arrives(size: int) -> None:
    kinds = ["ADDED", "MODIFIED", "DELETED", "BOOKMARK", "ERROR"]

    events = read(b"\n".join(line(kind) for kind in kinds), size)

    assert events == [Event(kind, POD) for kind in kinds]


def test_half_a_line_is_not_read() -> None:
    assert read(line("ADDED") + line("DELETED")[:-1]) == [Event("ADDED", POD)]


@pytest.mark.parametrize(
    "bad",
    [
        b"<html>",
        b"\xff\xfe",
        b"{}",
        b"[]",
        b"7",
        b'{"type": "ADDED"}',
        b'{"type": "ADDED", "object": []}',
        b'{"type": ["ADDED"], "object": {}}',
        b'{"type": "PRUNED", "object": {}}',
        b'{"type": "ADDED", "object": ' + b'{"a":' * 20_000 + b"1" + b"}" * 20_000 + b"}",
        b'{"type": "ADDED", "object": {"metadata": {"uid": ' + b"9" * 5000 + b"}}}",
    ],
)
def test_a_line_that_nobody_can_read_hides_no_other(bad: bytes) -> None:
    events = read(line("ADDED") + bad + b"\n" + line("DELETED"), 1000, longest_line=10**6)

    assert events == [Event("ADDED", POD), None, Event("DELETED", POD)]


def test_a_line_longer_than_any_object_is_not_held() -> None:
    body = WatchBody("Pod", longest_line=1000)
    list(body.feed(line("ADDED") + b'{"type": "ADDED", "object": "'))
    for _ in range(100):
        assert list(body.feed(b"x" * 500)) == []
        assert sum(map(len, body._pieces)) <= 1000

    assert list(body.feed(b"\n" + line("DELETED"))) == [None, Event("DELETED", POD)]


def test_a_bare_status_is_an_error() -> None:
    status = {"kind": "Status", "code": 410, "message": "too old"}

    assert read(json.dumps(status).encode() + b"\n") == [Event("ERROR", status)]


@pytest.mark.parametrize(
    ("kind", "value", "ends"),
    [("BOOKMARK", "true", True), ("BOOKMARK", "false", False), ("BOOKMARK", None, False), ("ADDED", "true", False)],
)
def test_the_end_of_a_streamed_list_is_a_bookmark_that_says_so(kind: str, value: str | None, ends: bool) -> None:
    annotations = {"k8s.io/initial-events-end": value} if value else {}

    assert Event(kind, {"metadata": {"annotations": annotations}}).ends_list is ends
