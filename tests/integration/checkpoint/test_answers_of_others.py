"""What answers in the place of an S3 server: a proxy that has lost its way, a page. No word of it is the server's."""

from __future__ import annotations

import dataclasses
import re
import uuid
from collections.abc import Callable, Iterator

import pytest

from sft_trainer.checkpoint.inspecting import damage, folders_of
from sft_trainer.checkpoint.s3 import PART_SIZE, S3Store
from sft_trainer.errors import TrainingError
from sft_trainer.outage import is_outage
from tests.fault_proxy import Answer, FaultProxy, Says, fault_proxy
from tests.integration.checkpoint.managers import save, started
from tests.integration.checkpoint.s3_servers import BUCKET, S3Server

_HTML = (("Content-Type", "text/html"),)
PAGES = {
    "404": Answer(404, "Not Found", (("Content-Type", "text/plain"),), b"404 page not found\n"),
    "404-empty": Answer(404, "Not Found", (), b""),
    "404-page": Answer(404, "Not Found", _HTML, b"<html><body><h1>404 Not Found<hr></body></html>"),
    "200-page": Answer(200, "OK", _HTML, b"<!DOCTYPE html><html><body>Back at noon<br></body></html>"),
    "200-well-formed": Answer(200, "OK", _HTML, b"<html><body>Back at noon</body></html>"),
}
KEY = "there.bin"


def multipart(store: S3Store) -> None:
    with store.open_write("large.bin", 2 * PART_SIZE) as stream:
        stream.write(bytes(PART_SIZE + 1))


def ranged(store: S3Store) -> None:
    with store.open_range(KEY, 0, 4) as stream:
        stream.fill(memoryview(bytearray(4)))


REQUESTS: dict[str, tuple[str, Callable[[S3Store], object]]] = {
    "put": ("PUT", lambda store: store.put("x", b"x")),
    "claim": ("PUT", lambda store: store.create("x", b"x")),
    "list": ("GET", lambda store: store.list("")),
    "read": ("GET", lambda store: store.read(KEY)),
    "range": ("GET", ranged),
    "begin": ("POST", multipart),
    "part": ("PUT", multipart),
    "uploads": ("GET", lambda store: store.abort_incomplete_uploads("")),
}


@pytest.fixture
def through(s3_server: S3Server) -> Iterator[tuple[S3Store, FaultProxy]]:
    with fault_proxy(s3_server.settings.endpoint or "") as proxy:
        settings = dataclasses.replace(s3_server.settings, endpoint=proxy.endpoint)
        store = S3Store(BUCKET, f"run-{uuid.uuid4().hex}", settings, retry_seconds=0.5)
        store.put(KEY, b"bytes")
        yield store, proxy


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("request_", REQUESTS)
def test_it_is_an_outage_that_says_what_to_look_at(
    through: tuple[S3Store, FaultProxy], page: str, request_: str
) -> None:
    store, proxy = through
    method, request = REQUESTS[request_]
    fault = proxy.add(Says(method, "", PAGES[page], count=None))
    with pytest.raises(TrainingError) as refused:
        request(store)
    assert is_outage(refused.value)
    # Of what it cannot parse botocore makes, for some requests, an answer of a server that fails.
    words = "there is no S3 server" if page != "200-page" else "(there is no S3 server|the server keeps failing)"
    assert re.search(f"{words} .*; check ", str(refused.value))
    # With the server itself there again, all is as it was
    fault.stop()
    assert store.read(KEY) == b"bytes"
    assert request(store) is not False


def test_one_of_them_says_nothing_of_the_conditional_writes_of_the_server(through: tuple[S3Store, FaultProxy]) -> None:
    store, proxy = through
    proxy.add(Says("PUT", "/probe-", PAGES["404"]))
    with pytest.raises(TrainingError, match="there is no S3 server") as refused:
        store.probe()
    assert is_outage(refused.value)
    assert store.probe().conditional_writes


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_they_are_no_verdict_on_a_checkpoint(through: tuple[S3Store, FaultProxy]) -> None:
    store, proxy = through
    save(started(store), 10)
    (folder,) = folders_of(store)
    proxy.add(Says("GET", r"\.idx", PAGES["404"], count=None))
    for look in (lambda: folders_of(store), lambda: damage(store, folder)):
        with pytest.raises(TrainingError, match="there is no S3 server"):
            look()
