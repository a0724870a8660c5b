"""Models and data become local paths: whole, verified, once per machine, or an error that says what is wrong."""

from __future__ import annotations

import errno
import hashlib
import json
import multiprocessing
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import huggingface_hub.constants
import pytest

from sft_api.peft_files import AdapterFilesError, PeftFiles
from sft_api.v1alpha1 import DataSource
from sft_trainer import fetch
from sft_trainer.checkpoint import store as store_module
from sft_trainer.checkpoint.s3 import S3Store
from sft_trainer.classify import classify
from sft_trainer.data.sources import open_source
from sft_trainer.errors import (
    AccessDeniedError,
    ConfigError,
    DataError,
    ModelError,
    StorageFullError,
    StorageUnavailableError,
)
from sft_trainer.fetch import localise
from tests.answering import Answering, served
from tests.integration.checkpoint.s3_servers import BUCKET, S3Server
from tests.waiting import PATIENCE_SECONDS

MODEL = {
    "config.json": b"{}",
    "model.safetensors": os.urandom(1000),
    "sub/tokenizer.json": b"tokens",
    "pytorch_model.bin": b"a pickle",
    "original/params.json": b"{}",
}


@pytest.fixture
def model_uri(s3_store: S3Store) -> str:
    for name, data in MODEL.items():
        s3_store.put(f"models/tiny/{name}", data)
    s3_store.put("models/tiny-other/config.json", b"not this one")
    for name in ("original/model.safetensors", "consolidated.safetensors"):
        s3_store.put(f"models/tiny/{name}", b"the same weights again")
    for name in ("config.json", "model.safetensors"):
        s3_store.put(f"models/tiny/step-00001000/{name}", b"of a model that was exported on the way to this one")
    return f"{s3_store.uri}/models/tiny"


def files_below(path: Path) -> dict[str, bytes]:
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_a_model_from_a_bucket(s3_server: S3Server, model_uri: str, tmp_path: Path) -> None:
    path = localise(model_uri, tmp_path, s3_server.settings, kind="model")
    # A cache is named after the list of files: of original/ only weights may be missing in it
    assert files_below(path) == {name: data for name, data in MODEL.items() if not name.endswith(".bin")}
    tokenizer = localise(model_uri, tmp_path, s3_server.settings, kind="tokenizer")
    assert set(files_below(tokenizer)) == {"config.json", "sub/tokenizer.json", "original/params.json"}


def test_what_is_wrong_in_a_copy_is_said_of_the_place_that_the_manifest_names(
    s3_server: S3Server, model_uri: str, tmp_path: Path
) -> None:
    """``no usable tokenizer in /var/cache/…: put tokenizer.json there`` would send people into the cache of a pod."""
    path = localise(f"{model_uri}/", tmp_path, s3_server.settings, kind="model")

    _, message = classify(ModelError(f"{path / 'sub'} lacks a file; put it into {path}"), step=0)

    assert message == f"{model_uri}/sub lacks a file; put it into {model_uri}"


def test_what_is_there_is_not_downloaded_again(
    s3_server: S3Server, model_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = localise(model_uri, tmp_path, s3_server.settings, kind="model")
    reads: list[str] = []
    plain = S3Store.read_range
    monkeypatch.setattr(S3Store, "read_range", lambda self, key, *span: reads.append(key) or plain(self, key, *span))
    assert localise(model_uri, tmp_path, s3_server.settings, kind="model") == first
    assert reads == []

    (first / "model.safetensors").write_bytes(b"truncated by a full disk")
    assert localise(model_uri, tmp_path, s3_server.settings, kind="model") == first
    assert files_below(first)["model.safetensors"] == MODEL["model.safetensors"]


def test_changed_content_gets_another_folder(
    s3_server: S3Server, s3_store: S3Store, model_uri: str, tmp_path: Path
) -> None:
    before = localise(model_uri, tmp_path, s3_server.settings, kind="model")
    s3_store.put("models/tiny/model.safetensors", bytes(1000))  # the same size
    after = localise(model_uri, tmp_path, s3_server.settings, kind="model")
    assert after != before
    assert files_below(after)["model.safetensors"] == bytes(1000)


def test_large_files_come_in_blocks(
    s3_server: S3Server, s3_store: S3Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "_BLOCK", 1000)
    data = os.urandom(7001)
    s3_store.put("data/train.jsonl", data)
    told: list[int] = []
    path = localise(
        f"{s3_store.uri}/data/train.jsonl", tmp_path, s3_server.settings, kind="dataset", on_progress=told.append
    )
    assert path.name == "train.jsonl"
    assert path.read_bytes() == data
    assert told == [1000, 2000, 3000, 4000, 5000, 6000, 7000, 7001]


def test_what_an_earlier_try_finished_is_not_downloaded_again(
    s3_server: S3Server, s3_store: S3Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a folder of three files, the middle one of which cannot be read at first
    monkeypatch.setattr(fetch, "_BLOCK", 1000)
    monkeypatch.setattr(fetch, "_DOWNLOADS", 1)
    files = {name: os.urandom(2500) for name in ("a.jsonl", "b.jsonl", "sub/c.jsonl")}
    for name, data in files.items():
        s3_store.put(f"data/{name}", data)
    plain = S3Store.read_range
    reads: list[str] = []

    def failing(self: S3Store, key: str, offset: int, length: int) -> bytes:
        reads.append(key)
        if key.endswith("b.jsonl") and offset == 2000:
            raise StorageUnavailableError("out")
        return plain(self, key, offset, length)

    monkeypatch.setattr(S3Store, "read_range", failing)
    with pytest.raises(StorageUnavailableError, match="out"):
        localise(f"{s3_store.uri}/data", tmp_path, s3_server.settings, kind="dataset")
    assert len(reads) == 6, "nothing more is read after an error"

    # When it is tried again
    reads.clear()
    monkeypatch.setattr(S3Store, "read_range", lambda *call: reads.append(call[1]) or plain(*call))
    path = localise(f"{s3_store.uri}/data", tmp_path, s3_server.settings, kind="dataset")

    # Then the file that was whole is there without being read
    assert files_below(path) == files
    assert {key.rpartition("/")[2] for key in reads} == {"b.jsonl", "c.jsonl"}
    assert [entry.name for entry in path.parent.parent.iterdir() if entry.name.startswith((".partial", ".unf"))] == []


def test_the_beginning_of_a_name_is_no_name(s3_server: S3Server, s3_store: S3Store, tmp_path: Path) -> None:
    s3_store.put("data/train-1.jsonl", b"{}")
    (tmp_path / "train-1.jsonl").write_text("{}")
    with pytest.raises(DataError, match=r"data/train-: there is nothing under this key; check the bucket, the prefix"):
        localise(f"{s3_store.uri}/data/train-", tmp_path, s3_server.settings, kind="dataset")
    with pytest.raises(DataError, match=r"train-: there is no .*train- here; check the path"):
        localise(f"file://{tmp_path}/train-", tmp_path, kind="dataset")


def _localise_in_child(uri: str, cache: Path, settings: store_module.S3Settings, results: object) -> None:
    reads = []
    plain = S3Store.read_range
    S3Store.read_range = lambda self, key, *span: reads.append(key) or plain(self, key, *span)  # type: ignore[method-assign]
    path = localise(uri, cache, settings, kind="model")
    results.put((str(path), len(reads)))  # type: ignore[attr-defined]


def test_one_process_downloads_for_all(s3_server: S3Server, model_uri: str, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    children = [
        context.Process(target=_localise_in_child, args=(model_uri, tmp_path, s3_server.settings, results))
        for _ in range(4)
    ]
    for child in children:
        child.start()
    answers = [results.get(timeout=PATIENCE_SECONDS) for _ in children]
    for child in children:
        child.join()
    assert len({path for path, _ in answers}) == 1
    assert sorted(reads for _, reads in answers) == [0, 0, 0, 4]


def test_nothing_there(s3_server: S3Server, s3_store: S3Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="nothing under this key"):
        localise(f"{s3_store.uri}/no/model", tmp_path, s3_server.settings, kind="model")
    with pytest.raises(ModelError, match=r"File name too long.; check the path"):
        localise(f"file://{tmp_path}/{256 * 'x'}", tmp_path, kind="model")
    with pytest.raises(DataError, match="'no-such-bucket' is not there"):
        localise("s3://no-such-bucket/data", tmp_path, s3_server.settings, kind="dataset")
    with pytest.raises(ModelError, match="there is no"):
        localise(f"file://{tmp_path}/absent", tmp_path, kind="model")
    monkeypatch.setattr(store_module, "PVC_MOUNTS", tmp_path)
    with pytest.raises(DataError, match="claim 'data' is not mounted"):
        localise("pvc://data/train.jsonl", tmp_path, kind="dataset")
    (tmp_path / "data").mkdir()
    with pytest.raises(DataError, match="there is no"):
        localise("pvc://data/train.jsonl", tmp_path, kind="dataset")
    (tmp_path / "data/train.jsonl").write_text("{}")
    assert localise("pvc://data/train.jsonl", tmp_path, kind="dataset") == tmp_path / "data/train.jsonl"
    with pytest.raises(ConfigError, match="no known scheme"):
        localise("./model", tmp_path, kind="model")


def test_keys_that_lead_outside_are_refused(s3_server: S3Server, tmp_path: Path) -> None:
    if s3_server.name == "versitygw":
        return  # its objects are files: such a key cannot exist there
    prefix = f"evil-{uuid.uuid4().hex}"
    s3_server.client().put_object(Bucket=BUCKET, Key=f"{prefix}/../../../config.json", Body=b"x")
    with pytest.raises(ConfigError, match="is no key"):
        localise(f"s3://{BUCKET}/{prefix}", tmp_path, s3_server.settings, kind="model")


def test_full_cache_disk(s3_server: S3Server, model_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = fetch.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(fetch.shutil, "disk_usage", lambda _: usage._replace(free=10))
    with pytest.raises(StorageFullError, match=r"enlarge compute\.cacheSize"):
        localise(model_uri, tmp_path, s3_server.settings, kind="model")
    # One that does not say how large it is
    monkeypatch.setattr(fetch.shutil, "disk_usage", lambda _: usage._replace(total=0, used=0, free=0))
    localise(model_uri, tmp_path, s3_server.settings, kind="model")


@pytest.mark.parametrize(
    ("number", "expected", "words"),
    [
        (errno.ENOSPC, StorageFullError, r"enlarge compute\.cacheSize"),
        (errno.EROFS, AccessDeniedError, r"user \d+ cannot write the cache .* set SFT_CACHE_DIR"),
        (errno.EACCES, AccessDeniedError, r"user \d+ cannot write the cache .* set SFT_CACHE_DIR"),
        (errno.EIO, StorageUnavailableError, r"check its disk \(compute\.cacheSize, SFT_CACHE_DIR\)"),
    ],
)
def test_a_cache_that_cannot_be_written(
    s3_server: S3Server,
    model_uri: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    expected: type[Exception],
    words: str,
) -> None:
    def failing(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number), str(tmp_path))

    monkeypatch.setattr(fetch, "_download", failing)
    with pytest.raises(expected, match=words):
        localise(model_uri, tmp_path, s3_server.settings, kind="model")


@dataclass
class Hub:
    """The few routes of the hub that a snapshot needs."""

    endpoint: str = ""
    status: int = 200
    error_code: str = ""
    error_message: str = ""
    requests: list[str] = field(default_factory=list)


COMMIT = "a" * 40
HUB_FILES = {
    **MODEL,
    "README.md": b"card",
    "original/model.safetensors": b"the same weights again",
    "consolidated-00001-of-00002.safetensors": b"the same weights again",
    "checkpoint-500/model.safetensors": b"a model on the way to this one",
    "model.fp16.safetensors": b"the same weights again",
    "step-00001000/config.json": b"{}",
    "step-00001000/model.safetensors": b"a model that was exported on the way to this one",
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    state = Hub()

    class Handler(Answering):
        def do_GET(self) -> None:
            # As it came: Python's server makes one slash of two at the beginning of a path.
            state.requests.append(self.requestline.split()[1])
            if state.status != 200:
                self.answer(
                    b"{}", state.status, {"X-Error-Code": state.error_code, "X-Error-Message": state.error_message}
                )
            elif "/revision/" in self.path:
                self.answer(json.dumps({"id": "org/tiny", "sha": COMMIT, "siblings": []}).encode())
            elif "/tree/" in self.path:
                tree = [
                    {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                    for name, data in HUB_FILES.items()
                ]
                self.answer(json.dumps(tree).encode())
            else:
                data = HUB_FILES[self.path.partition(f"/resolve/{COMMIT}/")[2]]
                etag = f'"{hashlib.sha1(data).hexdigest()}"'
                self.answer(data, 200, {"ETag": etag, "X-Repo-Commit": COMMIT})

    with served(Handler) as state.endpoint:
        monkeypatch.setenv("HF_ENDPOINT", state.endpoint)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        yield state


def test_a_model_from_the_hub(hub: Hub, tmp_path: Path) -> None:
    told: list[int] = []
    path = localise("hf://org/tiny@v1", tmp_path, token="hf_secret", kind="model", on_progress=told.append)
    assert max(told) >= len(MODEL["model.safetensors"])
    assert files_below(path) == {
        name: HUB_FILES[name]
        for name in ("config.json", "model.safetensors", "original/params.json", "sub/tokenizer.json")
    }
    assert any("/revision/v1" in request for request in hub.requests)


def test_of_adapters_two_files_are_fetched(
    hub: Hub, s3_server: S3Server, s3_store: S3Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {name: name.encode() for name in ("adapter_config.json", "adapter_model.safetensors")}
    others = ("README.md", "tokenizer.json", "adapter_model.bin", "checkpoint-5/adapter_config.json", "optimizer.pt")
    for name in (*files, *others):
        monkeypatch.setitem(HUB_FILES, name, name.encode())
        s3_store.put(f"tuned/{name}", name.encode())
    for uri in ("hf://org/tiny", f"{s3_store.uri}/tuned"):
        assert files_below(localise(uri, tmp_path, s3_server.settings, kind="adapter")) == files


def test_a_model_where_adapters_are_meant_is_called_so(
    hub: Hub, s3_server: S3Server, s3_store: S3Store, tmp_path: Path
) -> None:
    for name in ("config.json", "model.safetensors"):
        s3_store.put(f"whole/{name}", b"{}")
    s3_store.put("notes/README.md", b"none")
    for uri in ("hf://org/tiny", f"{s3_store.uri}/whole"):
        path = localise(uri, tmp_path, s3_server.settings, kind="adapter")
        with pytest.raises(AdapterFilesError, match=r"holds a model, and no adapters: name it in model\.uri"):
            PeftFiles.read(path)
    with pytest.raises(ModelError, match=r"notes: there are no files of adapters of peft under this key, but 'notes/R"):
        localise(f"{s3_store.uri}/notes", tmp_path, s3_server.settings, kind="adapter")


def test_of_a_model_in_shards_the_hub_is_asked_for_those_of_the_index(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "body/model.safetensors"}}
    shards = dict.fromkeys(index["weight_map"].values(), b"weights")
    others = dict.fromkeys(("model-00003-of-00003.safetensors", "head/model.safetensors"), b"others")
    files = {**shards, **others, "config.json": b"{}", "model.safetensors.index.json": json.dumps(index).encode()}
    for name in list(HUB_FILES):
        monkeypatch.delitem(HUB_FILES, name)
    for name, data in files.items():
        monkeypatch.setitem(HUB_FILES, name, data)

    found = files_below(localise("hf://org/tiny", tmp_path, kind="model"))

    assert found == {name: data for name, data in files.items() if name not in others}

    # Where it was saved anew as one file, that is the model, and what is left of the shards is not asked for
    monkeypatch.setitem(HUB_FILES, "model.safetensors", b"weights")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "another"))
    assert not files_below(localise("hf://org/tiny", tmp_path, kind="model")).keys() & shards.keys()


def test_a_mirror_is_asked_for_no_empty_folders(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", f"{hub.endpoint}/")
    localise("hf://org/tiny", tmp_path, kind="model")
    assert not [request for request in hub.requests if "//" in request]


@pytest.mark.parametrize("status", [401, 403, 503])
def test_the_hub_is_not_needed_twice(hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture, status: int) -> None:
    caplog.set_level("INFO", "sft_trainer")
    path = localise("hf://org/tiny", tmp_path, kind="model")
    asked = len(hub.requests)
    hub.status = status
    assert localise("hf://org/tiny", tmp_path, kind="model") == path
    assert [entry.message for entry in caplog.records if entry.levelname == "INFO"] == [
        f"hf://org/tiny is commit {COMMIT}"
    ] * 2
    # Of what is there already only the revision was asked for
    assert {request.rpartition("/api/models/")[2] for request in hub.requests[asked:]} == {"org/tiny/revision/main"}


@pytest.mark.parametrize(
    ("status", "code", "expected", "match"),
    [
        (404, "RepoNotFound", ModelError, "not on the hub"),
        (401, "RepoNotFound", ModelError, "not on the hub"),
        (404, "RevisionNotFound", ModelError, "no such revision"),
        (403, "GatedRepo", AccessDeniedError, "accept the terms"),
        (403, "", AccessDeniedError, "refuses access"),
        (503, "", StorageUnavailableError, "does not answer"),
    ],
)
def test_the_hub_says_no(
    hub: Hub, tmp_path: Path, status: int, code: str, expected: type[Exception], match: str
) -> None:
    hub.status, hub.error_code = status, code
    with pytest.raises(expected, match=match):
        localise("hf://org/tiny@v2", tmp_path, kind="model")


@pytest.mark.parametrize(
    ("status", "message", "expected", "match"),
    [
        (401, 'User Access Token "ci" is expired', AccessDeniedError, r'\(User Access Token "ci" is expired\)'),
        (401, "Invalid credentials in Authorization header", AccessDeniedError, r"\(Invalid credentials in "),
        (400, "Invalid rev id: v..2", DataError, "Invalid rev id"),
        (451, "", DataError, r"the hub refuses it \(.*451 Unavailable"),
        (410, "", DataError, "the hub refuses it"),
    ],
)
def test_what_the_hub_itself_says_is_told(
    hub: Hub, tmp_path: Path, status: int, message: str, expected: type[Exception], match: str
) -> None:
    hub.status, hub.error_message = status, message
    with pytest.raises(ModelError if expected is DataError else expected, match=match):
        localise("hf://org/tiny@v..2", tmp_path, kind="model")
    with pytest.raises(expected, match=match):
        open_source(DataSource(uri="hf://org/rows@v..2"), cache_dir=tmp_path)


def test_malformed_hub_names(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="hf://org/name"):
        localise("hf://a/b/c", tmp_path, kind="model")
