"""Storage that is missing, forbidden, full, silent or forgetful: the right class, a sentence, in bounded time."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import re
import socket
import struct
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError

from sft_api.ports import free_port
from sft_trainer.checkpoint import s3 as s3_module
from sft_trainer.checkpoint import s3_errors
from sft_trainer.checkpoint import store as store_module
from sft_trainer.checkpoint.local import LocalStore
from sft_trainer.checkpoint.opening import open_store
from sft_trainer.checkpoint.s3 import S3Store, part_size
from sft_trainer.checkpoint.s3_errors import UploadGone
from sft_trainer.errors import (
    AccessDeniedError,
    ConfigError,
    StorageFullError,
    StorageNotFoundError,
    StorageRefusedError,
    StorageUnavailableError,
)
from sft_trainer.outage import is_outage
from tests.answering import served
from tests.integration.checkpoint.s3_servers import BUCKET, S3Server, server_on_a_tiny_disk, settings
from tests.waiting import PATIENCE_SECONDS, wait_until

MiB = 2**20


def test_missing_bucket(s3_server: S3Server) -> None:
    store = S3Store("no-such-bucket", "runs/a", s3_server.settings, retry_seconds=3)
    for operation in (store.probe, lambda: store.list(""), lambda: store.put("x", b"")):
        with pytest.raises(StorageNotFoundError, match=r"'no-such-bucket' is not there; create it"):
            operation()


def test_wrong_credentials(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    if s3_server.name == "moto":  # moto accepts any key: its own refusal stands in for a server's
        monkeypatch.setattr(S3Store, "call", _refuse)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    store = S3Store(BUCKET, "runs/a", s3_server.settings, retry_seconds=3)
    with pytest.raises(AccessDeniedError, match=r"s3://checkpoints/runs/a/.*check the access key"):
        store.probe()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    with pytest.raises(AccessDeniedError, match="check the access key"):
        S3Store(BUCKET, "runs/a", s3_server.settings, retry_seconds=3).put("x", b"")


def test_keys_with_a_line_end_are_taken_without_it(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, f"{os.environ[name]}\n")
    store = S3Store(BUCKET, "runs/a", s3_server.settings, retry_seconds=0)
    store.put("x", b"")
    keys = store._client._request_signer._credentials.get_frozen_credentials()
    assert not any(key.endswith("\n") for key in keys[:2])  # which of both moto does not look at


def _refuse(store: S3Store, client: Any, operation: str, key: str, arguments: dict[str, Any]) -> Any:
    answer: Any = {"Error": {"Code": "InvalidAccessKeyId"}, "ResponseMetadata": {"HTTPStatusCode": 403}}
    raise ClientError(answer, operation)


def test_no_credentials(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(AccessDeniedError, match="credentialsSecretRef"):
        S3Store(BUCKET, "runs/a", s3_server.settings, retry_seconds=3).put("x", b"")


class Provider:
    """A program that hands out the right credentials of a server, for a time, when asked again after ``failures``."""

    def __init__(self, server: S3Server, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._answers = folder / "answers.json"
        self._failures = folder / "failures"
        self._server = server
        script = folder / "provider.py"
        script.write_text(
            "import pathlib, sys\n"
            f"failures = pathlib.Path({str(self._failures)!r})\n"
            "left = int(failures.read_text())\n"
            "failures.write_text(str(max(0, left - 1)))\n"
            "if left:\n"
            "    sys.exit('the provider is being restarted')\n"
            f"print(pathlib.Path({str(self._answers)!r}).read_text())\n"
        )
        (folder / "config").write_text(f"[default]\ncredential_process = {sys.executable} {script}\n")
        monkeypatch.setenv("AWS_CONFIG_FILE", str(folder / "config"))
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(folder / "none"))
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        self.answer()

    def answer(self, *, failures: int = 0, minutes: int = 5) -> None:
        """Fail so often, then give credentials that end in so many ``minutes``: within ten they are always renewed."""
        self._failures.write_text(str(failures))
        ends = datetime.now(UTC) + timedelta(minutes=minutes)
        answer = {
            "Version": 1,
            "AccessKeyId": self._server.access_key,
            "SecretAccessKey": self._server.secret_key,
            "Expiration": ends.isoformat(),
        }
        self._answers.write_text(json.dumps(answer))

    def stop_answering(self) -> None:
        self._answers.write_text("half of an ans")


@pytest.fixture
def provider(s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Provider:
    return Provider(s3_server, tmp_path, monkeypatch)


def test_who_hands_out_credentials_may_be_away_for_a_while(s3_server: S3Server, provider: Provider) -> None:
    store = S3Store(BUCKET, f"run-{uuid.uuid4().hex}", s3_server.settings, retry_seconds=30)
    # At the first request, and when what it gave has to be renewed
    for name in ("first", "second"):
        provider.answer(failures=2)
        store.put(name, b"x")
    assert len(store.list("")) == 2


def test_a_provider_that_stays_away_is_named_and_no_error_of_the_settings(
    s3_server: S3Server, provider: Provider
) -> None:
    store = S3Store(BUCKET, f"run-{uuid.uuid4().hex}", s3_server.settings, retry_seconds=0.5)
    sentence = r"the credential provider gives no credentials \(.*from {}: .*{}"
    provider.answer(failures=99)
    with pytest.raises(StorageUnavailableError, match=sentence.format("custom-process", "is being restarted")):
        store.put("x", b"x")
    provider.answer()
    store.put("x", b"x")
    provider.stop_answering()
    with pytest.raises(StorageUnavailableError, match=sentence.format("custom-process", "JSONDecodeError")):
        store.put("x", b"x")
    provider.answer(minutes=-1)
    with pytest.raises(StorageUnavailableError, match=sentence.format("custom-process", "RuntimeError: .*expired")):
        store.put("x", b"x")
    provider.answer()
    assert store.read("x") == b"x"


def test_a_token_that_is_not_written_yet_is_no_error_of_the_settings(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    (tmp_path / "token").touch()
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/trainer")
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    store = S3Store(BUCKET, "runs/a", s3_server.settings, retry_seconds=0)
    with pytest.raises(StorageUnavailableError, match=r"provider gives no credentials .*ParamValidationError"):
        store.put("x", b"x")


class Metadata(BaseHTTPRequestHandler):
    """Those of a node, which hand out the credentials of its role."""

    away = True
    server_of_objects: S3Server

    def do_PUT(self) -> None:
        self._answer("token")

    def do_GET(self) -> None:
        if self.path.endswith("/"):
            self._answer("role")
            return
        ends = (datetime.now(UTC) + timedelta(hours=1)).strftime("%Y-%m-%dT%H:%M:%SZ")
        keys = self.server_of_objects
        names = {"AccessKeyId": keys.access_key, "SecretAccessKey": keys.secret_key, "Token": ""}
        self._answer(json.dumps({"Code": "Success", "Expiration": ends, **names}))

    def _answer(self, said: str) -> None:
        self.send_response(503 if self.away else 200)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said.encode())

    def log_message(self, *arguments: Any) -> None: ...


def test_a_node_that_hands_out_no_credentials_for_a_moment_does_so_later(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A process that saves for the first time meanwhile would go without them for as long as it lives."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_EC2_METADATA_DISABLED"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))

    class Here(Metadata):
        server_of_objects = s3_server

    with served(Here) as url:
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", url)
        store = S3Store(BUCKET, f"run-{uuid.uuid4().hex}", s3_server.settings, retry_seconds=0)
        with pytest.raises(AccessDeniedError, match="no credentials"):
            store.put("x", b"x")
        Here.away = False
        store.put("x", b"x")


@pytest.fixture
def some_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test-access")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test-secret")


def test_unreachable_endpoint_ends_in_bounded_time(some_credentials: None, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    clock = SimpleNamespace(sleep=pauses.append, monotonic=lambda: sum(pauses))
    monkeypatch.setattr(s3_errors, "time", clock)
    port = free_port()
    with pytest.raises(StorageUnavailableError, match=rf"http://127.0.0.1:{port}.*checkpoint\.s3\.endpoint"):
        S3Store(BUCKET, "runs/a", settings(f"http://127.0.0.1:{port}", "when_required"), retry_seconds=20).read("x")
    assert len(pauses) > 2
    assert sum(pauses) == pytest.approx(20)


def test_nothing_is_removed_after_a_removal_has_failed(some_credentials: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that wait for a thread are given up with the first that fails, and those on their way are waited for."""
    store = S3Store(BUCKET, "", settings(f"http://127.0.0.1:{free_port()}", "when_required"), retry_seconds=0.5)
    asked: list[str] = []
    request = store.request

    def counted(operation: str, key: str, **arguments: Any) -> Any:
        asked.append(key)
        try:
            return request(operation, key, **arguments)
        finally:
            asked.remove(key)

    monkeypatch.setattr(store, "request", counted)
    began = time.monotonic()
    with pytest.raises(StorageUnavailableError):
        store.delete(f"checkpoints/x/{number}" for number in range(160))
    assert asked == []
    with pytest.raises(StorageUnavailableError):
        store.delete(["checkpoints/y"])
    assert time.monotonic() - began < 4  # ten rounds of 0.5 s are waited for by nobody


@pytest.mark.parametrize("endpoint", ["not a url", "ftp//x"])
def test_malformed_endpoint(endpoint: str, some_credentials: None) -> None:
    with pytest.raises(ConfigError, match=re.escape(endpoint)):
        S3Store(BUCKET, "x", settings(endpoint, "when_required")).read("x")


class Flaky(S3Store):
    """Performs each request named in ``lost``, then loses the answer, once."""

    lost: set[str]

    def call(self, client: Any, operation: str, key: str, arguments: dict[str, Any]) -> Any:
        answer = super().call(client, operation, key, arguments)
        if operation in self.lost:
            self.lost.discard(operation)
            raise EndpointConnectionError(endpoint_url="lost")
        return answer


@pytest.fixture
def flaky(s3_server: S3Server) -> Flaky:
    return Flaky(BUCKET, f"run-{uuid.uuid4().hex}", s3_server.settings, retry_seconds=PATIENCE_SECONDS)


def test_a_claim_whose_answer_was_lost_is_still_ours(flaky: Flaky) -> None:
    flaky.lost = {"put_object"}
    assert flaky.create("attempts/00001.json", b"claim with an id of its own")
    flaky.lost = {"put_object"}
    assert not flaky.create("attempts/00001.json", b"another claim")


@pytest.mark.parametrize("number", [1, 2])
def test_a_lost_answer_to_the_probe_says_nothing_about_conditional_writes(
    s3_store: S3Store, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a server that knows them, and loses one of its answers to who finds out
    plain, puts = S3Store.call, 0

    def losing(store: S3Store, client: Any, operation: str, key: str, arguments: dict[str, Any]) -> Any:
        nonlocal puts
        puts += operation == "put_object"
        if operation != "put_object" or puts != number:
            return plain(store, client, operation, key, arguments)
        with contextlib.suppress(ClientError):
            plain(store, client, operation, key, arguments)
        raise EndpointConnectionError(endpoint_url="lost")

    monkeypatch.setattr(S3Store, "call", losing)

    # Then they are relied on
    assert s3_store.probe().conditional_writes
    assert puts == 3


def test_uploads_survive_lost_answers(flaky: Flaky) -> None:
    flaky.lost = {"upload_part", "complete_multipart_upload"}
    data = os.urandom(20 * MiB)
    with flaky.open_write("x.bin") as stream:
        stream.write(data)
    assert flaky.lost == set()
    flaky.lost = {"get_object"}
    assert flaky.read("x.bin") == data


def test_an_upload_that_is_gone_before_its_completion_arrives_is_a_save_that_failed(
    s3_store: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a completing request that never arrives, and an upload that somebody drops meanwhile
    plain, completions = S3Store.call, 0

    def losing(store: S3Store, client: Any, operation: str, key: str, arguments: dict[str, Any]) -> Any:
        nonlocal completions
        if operation != "complete_multipart_upload":
            return plain(store, client, operation, key, arguments)
        completions += 1
        if completions == 1:
            plain(store, client, "abort_multipart_upload", key, {"UploadId": arguments["UploadId"]})
            raise EndpointConnectionError(endpoint_url="lost")
        gone: Any = {"Error": {"Code": "NoSuchUpload"}, "ResponseMetadata": {"HTTPStatusCode": 404}}
        raise ClientError(gone, operation)  # moto answers 500

    monkeypatch.setattr(S3Store, "call", losing)

    # Then it is tried again as any other, and does not end the run as a bucket that is not there
    with pytest.raises(UploadGone, match="the upload was aborted") as failed, s3_store.open_write("x.bin") as stream:
        stream.write(bytes(9 * MiB))
    assert completions == 2
    assert is_outage(failed.value)
    assert s3_store.list("") == []


def test_uploads_without_checksum_headers(s3_server: S3Server) -> None:
    for checksum in ("when_required", "when_supported"):
        store = S3Store(BUCKET, f"run-{uuid.uuid4().hex}", settings(str(s3_server.settings.endpoint), checksum))
        with store.open_write("x.bin") as stream:
            stream.write(b"x" * 9 * MiB)
        store.put("y.bin", b"small")
        assert [entry.size for entry in store.list("")] == [9 * MiB, 5]


def test_parts_are_sent_from_where_they_lie_and_not_hashed_for_their_signature(s3_store: S3Store) -> None:
    # Given a look at what goes to the server
    data = memoryview(os.urandom(20 * MiB))
    sent: list[tuple[str, Any]] = []

    def look(request: Any, **_: Any) -> None:
        sent.append((request.headers["X-Amz-Content-SHA256"].decode(), request.body))

    client = s3_store._connected()
    client.meta.events.register_last("before-send.s3.UploadPart", look)
    client.meta.events.register_last("before-send.s3.PutObject", look)

    # When large memory is lent, and something small is put
    with s3_store.open_write("x.bin", len(data)) as stream:
        stream.lend(data)
    s3_store.put("index", b"the digests of all pieces")

    # Then the parts are that memory, and what has their digests is signed with its content
    *parts, (signed, _) = sent
    assert [hashed for hashed, _ in parts] == ["UNSIGNED-PAYLOAD"] * 3
    assert all(view.obj is data.obj for _, body in parts for view in body)
    assert len(signed) == 64
    assert s3_store.read("x.bin") == data

    # And what nobody has a digest of is signed as well
    sent.clear()
    with s3_store.open_write("y.bin", len(data)) as stream:
        stream.write(data)
    assert [len(hashed) for hashed, _ in sent] == [64] * 3
    assert s3_store.read("y.bin") == data


class SlowServer(BaseHTTPRequestHandler):
    """Takes uploads at 0.2 MB/s a connection."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        known = "uploadId" in self.path
        self._answer("CompleteMultipartUploadResult><ETag>x</ETag" if known else "R><UploadId>1</UploadId")

    def do_PUT(self) -> None:
        left = int(self.headers["Content-Length"])
        while left and (block := self.rfile.read1(min(left, 2**16))):
            left -= len(block)
            time.sleep(len(block) / 2e5)
        self._answer()

    do_DELETE = do_PUT

    def _answer(self, root: str = "") -> None:
        body = f"<{root}></{root.partition('>')[0]}>".encode() if root else b""
        with contextlib.suppress(OSError):  # who has asked is gone
            self.send_response(200)
            self.send_header("ETag", "x")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, *arguments: Any) -> None: ...


class SmallBuffers(ThreadingHTTPServer):
    daemon_threads = True

    def server_bind(self) -> None:
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
        super().server_bind()


@pytest.mark.parametrize("size", [2 * MiB, MiB - 1], ids=["in parts", "at once"])
def test_a_server_that_takes_long_for_what_it_is_sent_is_no_server_that_is_away(
    some_credentials: None, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """While it takes something: the time-out for connecting is in force, too, for each call that sends.

    A line that all processes of a group share, sixteen connections of each, has little for each one.
    """
    monkeypatch.setattr("sft_trainer.checkpoint.s3._CONNECT_SECONDS", 2.0)
    monkeypatch.setattr("sft_trainer.checkpoint.s3._KEEPALIVE", ((socket.SOL_SOCKET, socket.SO_SNDBUF, 2**16),))
    monkeypatch.setattr("sft_trainer.checkpoint.s3.PART_SIZE", MiB)
    with served(SlowServer, SmallBuffers) as url:
        place = settings(url, "when_required")
        with S3Store(BUCKET, "runs/a", place, retry_seconds=0).open_write("x", size) as stream:
            stream.lend(bytes(size))


class KeepsConnections(SlowServer):
    """Says nothing at all any more over the connections that it has, and takes new ones."""

    protocol_version = "HTTP/1.1"
    connections: ClassVar[list[socket.socket]] = []

    def setup(self) -> None:
        super().setup()
        self.connections.append(self.connection)

    @classmethod
    def fall_silent(cls) -> None:
        """What comes is dropped by the kernel, which does not even acknowledge it, as by a router that forgot them."""
        drop_all = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # BPF: return 0
        program = struct.pack("HP", 1, ctypes.addressof(drop_all))
        for connection in cls.connections:
            connection.setsockopt(socket.SOL_SOCKET, 26, program)  # SO_ATTACH_FILTER


def is_connected_to(port: int) -> bool:
    """Whether a socket of this machine believes so."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return any(row[2].endswith(f":{port:04X}") and row[3] == "01" for row in rows)


def test_what_was_dropped_without_a_word_between_two_saves_takes_no_time_of_the_next_one(
    some_credentials: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    probes = [(name, option, min(value, 1)) for name, option, value in s3_module._KEEPALIVE]
    monkeypatch.setattr(s3_module, "_KEEPALIVE", probes)
    monkeypatch.setattr(s3_module, "_READ_SECONDS", 20)
    with ThreadingHTTPServer(("127.0.0.1", 0), KeepsConnections) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        place = settings(f"http://127.0.0.1:{server.server_port}", "when_required")
        store = S3Store(BUCKET, "runs/a", place, retry_seconds=20)
        try:
            # Given a save, after which its connection is forgotten on the way
            store.put("x", b"first")
            time.sleep(0.1)  # the last answer is acknowledged
            KeepsConnections.fall_silent()
            wait_until(lambda: not is_connected_to(server.server_port))

            # When there is another one
            began = time.monotonic()
            store.put("x", b"second")
        finally:
            server.shutdown()

    # Then it did not wait for an answer that could not come
    assert time.monotonic() - began < 10
    assert len(KeepsConnections.connections) == 2


def test_an_upload_aborted_by_a_newer_attempt_fails(s3_store: S3Store) -> None:
    s3_store.retry_seconds = 0.5  # both servers answer 500 to a part of an upload that is gone
    stream = s3_store.open_write("checkpoints/x.bin")
    stream.write(b"x" * 20 * MiB)
    while s3_store.abort_incomplete_uploads("checkpoints/"):
        pass
    with pytest.raises(StorageUnavailableError):
        stream.close()
    assert s3_store.list("") == []


def test_a_server_without_conditional_writes_is_noticed(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = S3Store.call

    def ignoring(store: S3Store, client: Any, operation: str, key: str, arguments: dict[str, Any]) -> Any:
        arguments = {name: value for name, value in arguments.items() if name != "IfNoneMatch"}
        return plain(store, client, operation, key, arguments)

    monkeypatch.setattr(S3Store, "call", ignoring)
    store = S3Store(BUCKET, f"run-{uuid.uuid4().hex}", s3_server.settings, retry_seconds=30)
    result = store.probe()
    assert not result.conditional_writes
    assert "lacks conditional writes" in result.message
    assert store.create("attempts/00001.json", b"a")
    assert not store.create("attempts/00001.json", b"b")


def test_memory_of_an_upload_is_bounded(s3_store: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given slow uploads, a writer of 160 MiB never has more than five parts of 8 MiB in memory."""
    alive, most, lock = 0, 0, threading.Lock()
    plain = S3Store.call

    def slow(store: S3Store, client: Any, operation: str, key: str, arguments: dict[str, Any]) -> Any:
        nonlocal alive, most
        if operation != "upload_part":
            return plain(store, client, operation, key, arguments)
        with lock:
            alive += 1
            most = max(most, alive)
        time.sleep(0.02)
        with lock:
            alive -= 1
        return {"ETag": "x"}

    monkeypatch.setattr(S3Store, "call", slow)
    stream = s3_store.open_write("x.bin")
    block = b"x" * 4 * MiB
    for _ in range(40):
        stream.write(block)
    stream.abort()
    assert 2 <= most <= 4


def test_part_size_keeps_every_object_below_the_limit() -> None:
    assert part_size(0) == part_size(50 * 2**30) == 8 * MiB
    for size in (100 * 2**30, 2**40, 5 * 2**40):
        assert size / part_size(size) <= 9000
        assert part_size(size) % MiB == 0


FILL = textwrap.dedent(
    """
    import sys
    from sft_trainer.checkpoint.opening import open_store
    from sft_trainer.checkpoint.store import S3Settings
    from sft_trainer.errors import StorageFullError
    settings = S3Settings(endpoint=sys.argv[2], region="us-east-1", force_path_style=True)
    store = open_store(sys.argv[1], settings)
    store.put("small.json", b"fits")
    for write in (lambda: fill(), lambda: store.create("big.json", b"x" * 40 * 2**20)):
        def fill():
            with store.open_write("big.bin") as stream:
                for _ in range(10):
                    stream.write(b"x" * 4 * 2**20)
        try:
            write()
        except StorageFullError as error:
            print("FULL", error)
    print("LEFT", [entry.key for entry in store.list("")], store.abort_incomplete_uploads(""))
    """
)


def _on_tiny_disk(folder: Path, command: list[str]) -> list[str]:
    """``command``, seeing a disk of 24 MiB at ``folder``."""
    script = 'mount -t tmpfs -o size=24m tmpfs "$1" && shift && exec "$@"'
    user = [] if os.getuid() == 0 else ["--map-root-user"]
    return ["unshare", *user, "--mount", "sh", "-c", script, "sh", str(folder), *command]


def test_full_disk(tmp_path: Path) -> None:
    command = _on_tiny_disk(tmp_path, [sys.executable, "-c", FILL, f"file://{tmp_path}/run", "http://unused"])
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 3, done.stdout
    assert "big.bin: No space left on device" in lines[0]
    assert "checkpoint.keep" in lines[0]
    assert "big.json: No space left on device" in lines[1]
    assert lines[2] == "LEFT ['small.json'] 0"


def test_full_s3_server(tmp_path: Path, some_credentials: None) -> None:
    with server_on_a_tiny_disk(tmp_path / "disk", _on_tiny_disk) as server:
        command = [sys.executable, "-c", FILL, f"s3://{BUCKET}/run", str(server.settings.endpoint)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "no room left" in done.stdout.splitlines()[0], done.stdout
    assert done.stdout.splitlines()[-1] == "LEFT ['small.json'] 0"


def test_too_large_a_file_counts_as_full(tmp_path: Path) -> None:
    limited = ["sh", "-c", 'ulimit -f 20480; exec "$@"', "sh"]
    command = [*limited, sys.executable, "-c", FILL, f"file://{tmp_path}", "http://unused"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "File too large" in done.stdout, done.stderr


def test_read_only_folder(tmp_path: Path) -> None:
    """A read-only bind mount, since root ignores permissions."""
    script = 'mount --bind "$1" "$1" && mount -o remount,ro,bind "$1" && shift && exec "$@"'
    python = "import sys; from sft_trainer.checkpoint.opening import open_store; open_store(sys.argv[1]).probe()"
    command = ["sh", "-c", script, "sh", str(tmp_path), sys.executable, "-c", python, f"file://{tmp_path}/run"]
    done = subprocess.run(["unshare", "--mount", *command], capture_output=True, text=True, timeout=60, check=False)
    assert "AccessDeniedError" in done.stderr
    assert "Read-only file system; the filesystem is mounted read-only: have it mounted so that it can" in done.stderr
    assert "(another checkpoint.uri begins another run)" in done.stderr


@pytest.mark.parametrize(
    ("user", "help"), [(1000, "give user 1000 access, by chown or chmod"), (0, r"even root may not do that: .*squash")]
)
def test_a_folder_that_may_not_be_written_says_what_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user: int, help: str
) -> None:
    def denied(path: Any, *_: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(os, "link", denied)
    monkeypatch.setattr(os, "getuid", lambda: user)
    with pytest.raises(AccessDeniedError, match=f"Permission denied; {help}"):
        LocalStore(tmp_path).create("run.json", b"x")


def test_what_is_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    (tmp_path / "folder").mkdir()
    with pytest.raises(StorageNotFoundError, match=f"; {tmp_path}/run is a file in the way of a folder: remove or re"):
        LocalStore(tmp_path / "run" / "deep").put("x/y", b"")
    with pytest.raises(StorageNotFoundError, match=f"; {tmp_path}/folder is a folder in the way of a file: remove"):
        LocalStore(tmp_path).put("folder", b"")


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (errno.EIO, StorageUnavailableError),
        (errno.ESTALE, StorageUnavailableError),
        (errno.EACCES, AccessDeniedError),
        (errno.ENOENT, None),
    ],
)
def test_a_folder_that_cannot_be_listed_is_not_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, expected: type[Exception] | None
) -> None:
    # Given a claim and a checkpoint in folders that fail (or went away) while they are listed
    store = LocalStore(tmp_path)
    store.put("attempts/00003.json", b"claim")
    store.put("checkpoints/step-00000010-a00003/manifest.json", b"{}")
    scandir = os.scandir

    def failing(path: Any) -> Any:
        if str(path).endswith(("attempts", "a00003")):
            raise OSError(number, os.strerror(number), str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", failing)

    # Then nobody is told that there is nothing, except where that is so
    for prefix in ("attempts/", "checkpoints/"):
        if expected is None:
            assert store.list(prefix) == []
        else:
            with pytest.raises(expected, match=os.strerror(number)):
                store.list(prefix)


def test_a_folder_that_has_nothing_of_what_is_looked_for_need_not_be_readable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given the root of a volume, with a folder for its owner only
    store = LocalStore(tmp_path)
    for key in ("lost+found/x", "model.safetensors", "model-0/deep/part"):
        store.put(key, b"x")
    store.open_write("model-00001-of-00002.safetensors").write(b"x")
    scandir = os.scandir

    def denied(path: Any) -> Any:
        if str(path).endswith("lost+found"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", denied)

    assert [entry.key for entry in store.list("model")] == ["model-0/deep/part", "model.safetensors"]
    assert store.abort_incomplete_uploads("model-0") == 1
    with pytest.raises(AccessDeniedError):
        store.list("")


def test_missing_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(f"file://{tmp_path}/not/yet")
    with pytest.raises(StorageNotFoundError, match="not/yet"):
        store.list("")
    with pytest.raises(StorageNotFoundError, match="not/yet"):
        store.read("x")
    store.put("x", b"writing creates it")
    assert store.read("x") == b"writing creates it"

    monkeypatch.setattr(store_module, "PVC_MOUNTS", tmp_path)
    with pytest.raises(StorageNotFoundError, match="claim 'data' is not mounted"):
        open_store("pvc://data/runs")
    (tmp_path / "data").mkdir()
    mounted = open_store("pvc://data/runs/a")
    mounted.put("x", b"1")
    assert (tmp_path / "data/runs/a/x").read_bytes() == b"1"
    assert mounted.uri == "pvc://data/runs/a"


@pytest.mark.parametrize("uri", ["/plain/path", "file://relative", "gs://bucket", "s3://", "pvc://claim/../other"])
def test_uris_that_cannot_work(uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "PVC_MOUNTS", tmp_path)
    (tmp_path / "claim").mkdir()
    with pytest.raises(ConfigError):
        open_store(uri)


def test_a_file_system_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "link", no_links)
    store = LocalStore(tmp_path)
    assert store.probe().conditional_writes
    assert store.create("x", b"mine")
    assert not store.create("x", b"yours")
    assert store.read("x") == b"mine"


def test_a_file_system_that_renames_nothing_is_none_that_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a bucket that is mounted as a folder: each start would be told to look after the volume's health."""

    def no(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    for name in ("link", "rename", "replace"):
        monkeypatch.setattr(os, name, no)
    store = LocalStore(tmp_path)
    for write in (store.probe, lambda: store.put("alive.json", b"{}"), lambda: store.create("run.json", b"{}")):
        with pytest.raises(StorageRefusedError, match="Function not implemented; the file system there cannot do that"):
            write()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(StorageRefusedError, match="File name too long"):
        LocalStore(tmp_path / ("x" * 300)).put("run.json", b"{}")


NO_LINKS = textwrap.dedent(
    """
    import os, pathlib, sys
    from sft_trainer.checkpoint.local import LocalStore
    from sft_trainer.errors import StorageFullError

    def no_links(*_):
        raise OSError(95, "Operation not supported")

    os.link = no_links
    folder = pathlib.Path(sys.argv[1])
    (folder / "filler").write_bytes(bytes(int(sys.argv[2])))
    store = LocalStore(folder)
    for write, fill in ((store.create, b"1"), (store.put, b"2")):
        try:
            write("run.json", fill * 2**20)
        except StorageFullError:
            print("FULL")
        for path in folder.iterdir():
            if path.name != "filler":
                print(path.name, path.stat().st_size, path.read_bytes()[:1])
    """
)


@pytest.mark.parametrize(
    ("room", "said"),
    [
        (0.5, ["FULL", "FULL"]),
        (1.5, ["run.json 1048576 b'1'", "FULL", "run.json 1048576 b'1'"]),
    ],
    ids=["not even for one copy", "for one copy and a half"],
)
def test_no_half_of_a_record_is_left_on_a_full_disk_without_hard_links(
    tmp_path: Path, room: float, said: list[str]
) -> None:
    taken = int((24 - room) * MiB)
    command = _on_tiny_disk(tmp_path, [sys.executable, "-c", NO_LINKS, str(tmp_path), str(taken)])
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == said


def test_a_file_that_says_only_when_it_is_closed_that_the_disk_is_full_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a disk that is full, as NFS tells it: of what was written, at the end
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    stream = LocalStore(tmp_path).open_write("run.json")
    stream.write(b"half")
    file = stream._file  # type: ignore[attr-defined]
    stream._file = SimpleNamespace(fileno=file.fileno, close=full)  # type: ignore[attr-defined]
    monkeypatch.setattr(os, "fsync", full)

    with pytest.raises(StorageFullError):
        stream.close()
    assert list(tmp_path.iterdir()) == []
    file.close()


def test_what_nfs_leaves_of_a_file_that_somebody_reads_keeps_no_other_from_going(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a removed file that is open, which cannot be removed once more
    store, unlink = LocalStore(tmp_path), Path.unlink
    folders = ("checkpoints/step-00000020-a00001", "checkpoints/step-00000010-a00001")
    for folder in folders:
        for name in (".nfs00000000000a1b2c00000001", "r00000-0-1.bin"):
            store.put(f"{folder}/{name}", b"x")

    def busy(path: Path, missing_ok: bool = False) -> None:
        if path.name.startswith(".nfs"):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", busy)

    store.delete([entry.key for entry in store.list("checkpoints/")])
    assert {entry.key.rpartition("/")[2] for entry in store.list("checkpoints/")} == {".nfs00000000000a1b2c00000001"}


def test_a_link_whose_answer_was_lost_is_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS repeats a request whose answer it missed, and then reports that the name exists."""
    link = os.link

    def answered_twice(source: Path, target: Path) -> None:
        link(source, target)
        raise FileExistsError(17, "File exists")

    monkeypatch.setattr(os, "link", answered_twice)
    assert LocalStore(tmp_path).create("x", b"mine")
    monkeypatch.undo()
    assert not LocalStore(tmp_path).create("x", b"yours")


def test_credentials_never_appear_in_errors(s3_server: S3Server) -> None:
    store = S3Store("no-such-bucket", "runs/a", s3_server.settings, retry_seconds=3)
    with pytest.raises(StorageNotFoundError) as failure:
        store.probe()
    assert s3_server.access_key not in str(failure.value)
