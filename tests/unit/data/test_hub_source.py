"""hf:// data sources against a server with the few routes of the hub that a data set needs."""

import errno
import gzip
import hashlib
import io
import json
import os
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets.arrow_writer
import datasets.config
import huggingface_hub.constants
import pyarrow
import pyarrow.parquet
import pytest

from sft_api.v1alpha1 import DataSource, DataSpec, TrainSource
from sft_trainer.checkpoint.store import S3Settings
from sft_trainer.data.first_rows import check_first_rows
from sft_trainer.data.hub import hub_beginning
from sft_trainer.data.source_rows import SourceRows
from sft_trainer.data.sources import open_source
from sft_trainer.errors import AccessDeniedError, DataError, ModelError, StorageFullError, StorageUnavailableError
from sft_trainer.fetch import localise
from tests.answering import Answering, served


def parquet(columns: dict[str, list[float]]) -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), file)
    return file.getvalue()


COMMIT = "b" * 40
README = b"""---
configs:
- config_name: default
  data_files:
  - {split: train, path: data/train.jsonl}
  - {split: test, path: data/test.jsonl}
- config_name: other
  data_files: data/other.jsonl
- config_name: large
  data_files: data/large.jsonl
- config_name: packed
  data_files: data/packed.jsonl.gz
- {config_name: inside, data_files: data/inside.json, field: rows}
- {config_name: western, data_files: data/western.jsonl, encoding: latin-1}
---
"""
CHAT = {
    "README.md": README,
    "data/train.jsonl": b"".join(b'{"n": %d, "m": [{"role": "user"}]}\n' % i for i in range(10)),
    "data/test.jsonl": b'{"n": 99, "m": [{"role": "user", "name": "ann"}]}\n{"n": 98, "m": [{"role": "tool"}]}\n',
    "data/other.jsonl": b'{"n": 5}\n',
    "data/large.jsonl": b'{"n": 1, "m": []}\n' + b" " * 8_000_000 + b"\n",
    "data/packed.jsonl.gz": gzip.compress(b'{"n": 3, "m": [{"at": "2024-01-01"}]}\n{"n": 4, "m": ["a"]}\n'),
}
# csv is not among the kinds that we read ourselves
TABLE = {"table.csv": b"n,instruction,output\n7,Add.,\n8,Add.,4\n"}
CHAT |= {
    "data/inside.json": b'{"rows": [{"n": 6}, {"n": 7}], "made": "2024"}',
    "data/western.jsonl": b'{"n": "\xe9"}\n',
}
COLUMNS = {
    "README.md": b"""---
configs:
- {config_name: some, data_files: table.parquet, filters: [[n, '>', 1]], columns: [n]}
- {config_name: all, data_files: table.parquet}
---
""",
    "table.parquet": parquet({"n": [1, 2, 3], "weight": [0.0, 1.0, 0.5]}),
}

OTHERS = {
    "table": TABLE,
    "columns": COLUMNS,
    "script": {"script.py": b"import datasets\n"},
    "unclosed": {"README.md": b"---\nconfigs: [\n---\n", "train.jsonl": b'{"n": 1}\n'},
    "deep": {"README.md": b"---\nconfigs: " + b"[" * 100_000 + b"\n---\n", "train.jsonl": b'{"n": 1}\n'},
    "words": {"README.md": b"# Nothing yet\n"},
    "pictures": {
        "README.md": b"""---
configs:
- {config_name: default, data_files: rows.json, field: rows}
dataset_info:
  features:
  - {name: n, dtype: int64}
  - {name: picture, dtype: image}
  - {name: pages, list: [{name: shown, dtype: image}]}
---
""",
        "rows.json": b'{"rows": [{"n": 1, "picture": "/no/picture.png", "pages": [{"shown": "/no/page.png"}]}]}',
    },
}


@dataclass
class Hub:
    commit: str = COMMIT
    status: int = 200
    gone_for: str = ""
    """A file at whose request the connection is closed."""
    downloaded: set[str] = field(default_factory=set)
    sent: int = 0
    """Bytes of files."""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    state = Hub()

    class Handler(Answering):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            files = next((files for name, files in OTHERS.items() if f"org/{name}" in path), CHAT)
            if state.status != 200:
                self.answer(b"{}", state.status)
            elif state.gone_for and path.endswith(state.gone_for):
                self.close_connection = True
            elif "/resolve/" in path:
                data = files.get(path.partition(f"/resolve/{state.commit}/")[2])
                if data is None:
                    self.answer(b"{}", 404, {"X-Error-Code": "EntryNotFound"})
                else:
                    state.downloaded.add(path.partition(f"/resolve/{state.commit}/")[2])
                    etag = hashlib.sha1(data).hexdigest()
                    start, _, stop = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
                    part = data[int(start) : int(stop) + 1 if stop else None]
                    state.sent += len(part) if self.command == "GET" else 0
                    status = 206 if "Range" in self.headers else 200
                    self.answer(part, status, {"ETag": f'"{etag}"', "X-Repo-Commit": state.commit})
            elif "/tree/" in path:
                folder = path.partition(f"/tree/{state.commit}")[2].strip("/")
                tree = [
                    {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                    for name, data in files.items()
                    if name.startswith(f"{folder}/" if folder else "")
                ]
                self.answer(json.dumps(tree).encode())
            else:
                siblings = [{"rfilename": name} for name in files]
                self.answer(json.dumps({"id": "org/chat", "sha": state.commit, "siblings": siblings}).encode())

    with served(Handler) as endpoint:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
        template = f"{endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", endpoint)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        yield state


def open_hub(tmp_path: Path, uri: str = "hf://org/chat", **fields: Any) -> SourceRows:
    return open_source(DataSource(uri=uri, **fields), cache_dir=tmp_path / "cache")


@pytest.mark.parametrize(
    ("fields", "numbers"),
    [
        ({}, list(range(10))),
        ({"split": "train[:3]"}, [0, 1, 2]),
        ({"split": "test"}, [99, 98]),
        ({"split": "train[-1:]+test[:50%]"}, [9, 99]),
        ({"subset": "other"}, [5]),
        ({"subset": "packed"}, [3, 4]),
        ({"uri": "hf://org/table", "split": "train[-1:]"}, [8]),
        ({"uri": "hf://org/chat@refs/pr/3", "split": "train[:1]"}, [0]),
        ({"uri": "hf://org/chat@refs/convert/parquet", "split": "train[:1]"}, [0]),
    ],
)
def test_splits_slices_and_subsets(hub: Hub, tmp_path: Path, fields: dict[str, Any], numbers: list[int]) -> None:
    rows = open_hub(tmp_path, **fields)
    assert len(rows) == len(numbers)
    # in this process and in another
    for copy in (rows, pickle.loads(pickle.dumps(rows))):
        assert [row["n"] for _, row in copy.read(0, len(rows))] == numbers


@pytest.mark.parametrize("token", ["hf_secret\n", "\r\nhf_secret ", "", "\n"])
def test_a_token_is_sent_without_the_line_end_of_its_secret(hub: Hub, tmp_path: Path, token: str) -> None:
    rows = open_source(DataSource(uri="hf://org/chat"), cache_dir=tmp_path / "cache", token=token)
    assert len(rows) == 10
    assert hub_beginning(DataSource(uri="hf://org/chat"), tmp_path / "other", token).columns == ("n", "m")
    assert localise("hf://org/model", tmp_path, None, token, kind="tokenizer").name == COMMIT


def test_a_token_that_cannot_be_sent_is_refused_in_words_that_do_not_show_it(hub: Hub, tmp_path: Path) -> None:
    for token in ("hf_secr\u00e9t", "hf_\0secret"):
        with pytest.raises(AccessDeniedError, match=r"token for the hub has characters.*tokenSecretRef") as raised:
            open_source(DataSource(uri="hf://org/chat"), cache_dir=tmp_path / "cache", token=token)
        with pytest.raises(AccessDeniedError) as of_model:
            localise("hf://org/model", tmp_path, None, token, kind="tokenizer")
        assert str(of_model.value) == str(raised.value)
        assert "hf_" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "subset", "rows"),
    [
        ("chat", "inside", [{"n": 6}, {"n": 7}]),
        ("chat", "western", [{"n": "\u00e9"}]),
        ("columns", "some", [{"n": 2}, {"n": 3}]),
        ("columns", "all", [{"n": 1, "weight": 0.0}, {"n": 2, "weight": 1.0}, {"n": 3, "weight": 0.5}]),
    ],
)
def test_rows_are_those_that_the_card_says(
    hub: Hub, tmp_path: Path, name: str, subset: str, rows: list[dict[str, Any]]
) -> None:
    found = open_hub(tmp_path, f"hf://org/{name}", subset=subset)
    assert [row for _, row in found.read(0, len(found))] == rows


def test_pictures_beside_the_text_are_not_opened(hub: Hub, tmp_path: Path) -> None:
    # Their addresses are chosen by whoever wrote the data set.
    found = open_hub(tmp_path, "hf://org/pictures")
    row = {"n": 1, "picture": {"path": "/no/picture.png"}, "pages": [{"shown": {"path": "/no/page.png"}}]}
    assert [row for _, row in found.read(0, len(found))] == [row]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("script", r"hf://org/script is made by a script, which is not run .*: add @refs/convert/parquet"),
        ("unclosed", r"hf://org/unclosed: the head of its README\.md, .*, is no YAML that can be read: correct it"),
        ("deep", r"hf://org/deep: the head of its README\.md, .*, is no YAML that can be read: correct it"),
        ("words", r"hf://org/words has no data files; name another data set or revision"),
    ],
)
def test_a_repository_that_is_no_data_set_is_refused_and_not_asked_for_again(
    hub: Hub, tmp_path: Path, name: str, words: str
) -> None:
    with pytest.raises(DataError, match=words):
        open_hub(tmp_path, f"hf://org/{name}")
    with pytest.raises(DataError, match=words):
        hub_beginning(DataSource(uri=f"hf://org/{name}"), tmp_path / "cache", None)


def test_only_the_files_of_the_wanted_split_are_downloaded(hub: Hub, tmp_path: Path) -> None:
    told: list[int] = []
    rows = open_source(
        DataSource(uri="hf://org/chat", split="test"), cache_dir=tmp_path / "cache", on_fetch=told.append
    )
    assert max(told) == len(CHAT["data/test.jsonl"])
    assert hub.downloaded == {"README.md", "data/test.jsonl"}
    place, row = next(rows.read(0, 1))
    assert place.endswith(f"{COMMIT}/data/test.jsonl line 1")
    # and read as they are, though the rows of the splits differ in the keys of their messages
    assert row["m"] == [{"role": "user", "name": "ann"}]


def test_packed_files_are_read_as_they_are(hub: Hub, tmp_path: Path) -> None:
    beginning = hub_beginning(DataSource(uri="hf://org/chat", subset="packed"), tmp_path / "cache", None)
    assert (beginning.columns, beginning.first) == (
        ("n", "m"),
        ("data/packed.jsonl.gz line 1", {"n": 3, "m": [{"at": "2024-01-01"}]}),
    )
    rows = open_hub(tmp_path, subset="packed")
    assert hub.downloaded == {"README.md", "data/packed.jsonl.gz"}
    # though lists of such different things are no column of a table
    assert [row["m"] for _, row in rows.read(0, 2)] == [[{"at": "2024-01-01"}], ["a"]]


def test_a_kept_list_of_files_that_is_damaged_is_asked_for_again(hub: Hub, tmp_path: Path) -> None:
    open_hub(tmp_path)
    (kept,) = (tmp_path / "cache" / "hub-datasets").glob("files-*.json")
    whole = kept.read_bytes()
    kept.write_bytes(b"")

    assert len(open_hub(tmp_path)) == 10
    assert kept.read_bytes() == whole


def test_files_that_only_the_hub_library_reads(hub: Hub, tmp_path: Path) -> None:
    rows = open_hub(tmp_path, "hf://org/table")
    assert list(rows.read(0, 1)) == [("hf://org/table row 1", {"n": 7, "instruction": "Add.", "output": None})]


def test_identity_is_the_commit_the_subset_and_the_split(hub: Hub, tmp_path: Path) -> None:
    digest = open_hub(tmp_path).digest
    assert open_hub(tmp_path, "hf://org/chat@main").digest == digest
    assert open_hub(tmp_path, f"hf://org/chat@{COMMIT}").digest == digest
    assert open_hub(tmp_path, split="test").digest != digest
    assert open_hub(tmp_path, subset="other").digest != digest
    hub.commit = "c" * 40
    assert open_hub(tmp_path).digest != digest


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"split": "nope"}, "hf://org/chat: no split 'nope', found test, train"),
        ({"subset": "nope"}, "hf://org/chat: BuilderConfig 'nope' not found. Available: .*'other'"),
    ],
)
def test_unknown_splits_and_subsets_are_named(hub: Hub, tmp_path: Path, fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        open_hub(tmp_path, **fields)


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (401, AccessDeniedError),
        (403, AccessDeniedError),
        (404, DataError),
        (503, StorageUnavailableError),
    ],
)
@pytest.mark.parametrize("uri", ["hf://org/chat", "hf://org/chat@v1"])
def test_the_hub_says_no(hub: Hub, tmp_path: Path, uri: str, status: int, expected: type[Exception]) -> None:
    hub.status = status
    with pytest.raises(expected, match=uri):
        open_hub(tmp_path, uri)


@pytest.mark.parametrize(
    ("uri", "field", "values", "status"),
    [
        *(("hf://org/chat", "n", [0, 1, 2], status) for status in (401, 503, 0)),
        *(("hf://org/table", "output", [None, 4], status) for status in (401, 0)),
    ],
)
def test_the_hub_is_not_needed_twice(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uri: str, field: str, values: list[Any], status: int
) -> None:
    # Given a data set that was read once
    split = "train[:3]" if uri == "hf://org/chat" else None
    digest = open_hub(tmp_path, uri, split=split).digest
    source = DataSource(uri=uri, split=split)
    beginning = hub_beginning(source, tmp_path / "cache", None)

    # When the hub says no, fails, or is away
    if status:
        hub.status = status
    else:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:1")
    rows = open_hub(tmp_path, uri, split=split)

    # Then it is read again, as it was
    assert rows.digest == digest
    assert hub_beginning(source, tmp_path / "cache", None) == beginning
    assert [row[field] for _, row in rows.read(0, len(rows))] == values


def test_what_was_never_fetched_is_not_made_up(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_hub(tmp_path, split="train")
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:1")
    hub.gone_for = "data/test.jsonl"
    with pytest.raises(StorageUnavailableError, match="the hub does not answer"):
        open_hub(tmp_path, split="test")


def test_a_shell_that_forbids_the_hub_is_told_so_and_not_to_try_again(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    forbidden = r"hf://org/.* is not in .*, and HF_HUB_OFFLINE .* forbids asking the hub: unset it, or fetch it there"
    with pytest.raises(DataError, match=f"data source {forbidden}"):
        open_hub(tmp_path, split="train")
    with pytest.raises(ModelError, match=forbidden):
        localise("hf://org/never", tmp_path / "cache", S3Settings(), None, kind="model")


def test_a_hub_that_goes_away_while_files_are_fetched(hub: Hub, tmp_path: Path) -> None:
    hub.gone_for = "data/train.jsonl"
    with pytest.raises(StorageUnavailableError, match=r"hf://org/chat: the hub does not answer .*; try again later"):
        open_hub(tmp_path)


@pytest.mark.parametrize(
    ("number", "expected", "words"),
    [
        (errno.ENOSPC, StorageFullError, r"enlarge compute\.cacheSize"),
        (errno.EROFS, AccessDeniedError, r"cannot write the cache .* SFT_CACHE_DIR \(HF_HOME for the hub\)"),
    ],
)
@pytest.mark.parametrize("uri", ["hf://org/chat", "hf://org/table"])
def test_a_cache_that_cannot_be_written(
    hub: Hub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    uri: str,
    number: int,
    expected: type[Exception],
    words: str,
) -> None:
    def failing(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number), str(tmp_path))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", failing)
    monkeypatch.setattr(datasets.arrow_writer.ArrowWriter, "write_table", failing)
    with pytest.raises(expected, match=words):
        open_hub(tmp_path, uri)


def test_no_hub_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(StorageUnavailableError, match="the hub does not answer"):
        open_hub(tmp_path)


def test_of_a_large_file_only_the_beginning_is_fetched(hub: Hub, tmp_path: Path) -> None:
    source = DataSource(uri="hf://org/chat", subset="large")

    beginning = hub_beginning(source, tmp_path / "cache", None)

    assert beginning.first is not None
    assert beginning.first[1] == {"n": 1, "m": []}
    assert (beginning.columns, beginning.all_columns) == (("n", "m"), None)
    assert hub.sent < len(CHAT["data/large.jsonl"]) / 2


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"split": "nope"}, "hf://org/chat: no split 'nope', found test, train"),
        ({"messages_key": "turns"}, "hf://org/chat: no column 'turns', which messagesKey names, found m, n"),
        ({}, "hf://org/chat: columns m, n match no known format"),
    ],
)
def test_what_is_wrong_shows_before_a_download(hub: Hub, tmp_path: Path, fields: dict[str, Any], sentence: str) -> None:
    source = TrainSource(uri="hf://org/chat", **fields)
    with pytest.raises(DataError, match=sentence):
        check_first_rows(
            source, DataSpec(train=[source]), lambda: None, cache_dir=tmp_path / "cache", s3=S3Settings(), token=None
        )


def test_files_of_other_kinds_are_left_to_the_run(hub: Hub, tmp_path: Path) -> None:
    source = TrainSource(uri="hf://org/table", messages_key="turns")
    check_first_rows(
        source, DataSpec(train=[source]), lambda: None, cache_dir=tmp_path / "cache", s3=S3Settings(), token=None
    )
