"""Lists are read as they arrive, in pieces of any size."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sft_operator.cluster.list_body import ListBody

ITEMS: list[Any] = [
    {"metadata": {"name": 'a"]}\\'}, "n": [1, {"ü": "\U0001f600"}]},
    {},
    {"x": "y" * 5000},
    {"n": -1.5e3},
]
BUILT_IN = {"kind": "PodList", "metadata": {"resourceVersion": "42", "continue": "more"}, "items": ITEMS}
CUSTOM = {"apiVersion": "v1", "items": ITEMS, "kind": "SFTJobList", "metadata": {"resourceVersion": "42"}}


def read(text: bytes, size: int) -> tuple[list[Any], dict[str, Any]]:
    body = ListBody()
    items = [item for at in range(0, len(text), size) for item in body.feed(text[at : at + size])]
    items += body.close()
    return items, body.fields


@pytest.mark.parametrize("size", [1, 7, 64, 100_000])
@pytest.mark.parametrize("document", [BUILT_IN, CUSTOM, {"items": [], "n": 123}, {"items": None}])
@pytest.mark.parametrize("indent", [None, 2])
def test_it_reads_what_json_reads(document: dict[str, Any], size: int, indent: int | None) -> None:
    text = json.dumps(document, ensure_ascii=False, indent=indent).encode()

    items, fields = read(text, size)

    assert items == (document["items"] or [])
    assert {"items": document["items"], **fields} == document


@pytest.mark.parametrize(
    "text", [b"", b"<html>", b"[]", b'{"items": [{"a": 1}', b'{"items": [{]}', b'{"items": []', b"nul"]
)
def test_what_is_no_complete_list_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"no list|is none"):
        read(text, 5)


@pytest.mark.parametrize("bad", ['{"a":' * 20_000 + "1" + "}" * 20_000, '{"n": ' + "9" * 5000 + "}"])
def test_an_object_that_no_parser_takes_hides_no_other(bad: str) -> None:
    text = f'{{"items": [{{"n": 1}}, {bad}, {{"n": 2}}], "metadata": {{}}}}'.encode()

    items, _ = read(text, 1000)

    assert items == [{"n": 1}, {"n": 2}]


def test_one_object_exists_at_a_time() -> None:
    body = ListBody()
    text = json.dumps({"items": [{"n": n, "fat": "x" * 10_000} for n in range(50)]}).encode()
    longest = 0
    for at in range(0, len(text), 1000):
        list(body.feed(text[at : at + 1000]))
        longest = max(longest, len(body._text))

    assert longest < 25_000
