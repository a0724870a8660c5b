"""Tokenised sources beside the checkpoints: read in place of tokenising, and in doubt not at all."""

import errno
import itertools
import json
import logging
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from sft_api.place import LONGEST_RECORD, Done
from sft_api.v1alpha1 import DataSpec, TrainSource
from sft_api.v1alpha1.job import SFTJobSpec
from sft_trainer import keeps_tokens, trainer
from sft_trainer.checkpoint.local import LocalStore
from sft_trainer.checkpoint.opening import open_store
from sft_trainer.checkpoint.store import Store
from sft_trainer.data import tokenize
from sft_trainer.data.kept import KeptTokens
from sft_trainer.data.tokenize import TokenizedSource, _bytes_written
from sft_trainer.data.writing import JOURNAL_FILE
from sft_trainer.entering import Entered
from sft_trainer.errors import AccessDeniedError, StorageUnavailableError
from sft_trainer.events import Control, Ended, Started
from sft_trainer.keeps_tokens import KeepsTokens, kept_tokens
from sft_trainer.topology import ALONE
from sft_trainer.trainer import Trainer
from tests.parity.mask_tokenizers import chat_tokenizer
from tests.unit.data.tokenizing import tokenize_source


class Node:
    """One with a cache of its own."""

    def __init__(self, folder: Path, cache: str, store: Store | None) -> None:
        self.cache = folder / cache
        self.kept = KeptTokens(store) if store else None
        self.source = TrainSource(uri=f"file://{folder}/rows.jsonl")
        self.fetched: list[int] = []

    def tokenize(self, on_fetch: Callable[[int], None] | None = None) -> TokenizedSource:
        data = DataSpec(train=[self.source])
        return tokenize_source(
            self.source,
            data,
            chat_tokenizer("chatml"),
            cache_dir=self.cache,
            kept=self.kept,
            on_fetch=on_fetch or self.fetched.append,
        )


@pytest.fixture
def store(tmp_path: Path) -> Store:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": f"row {i}"}) + "\n" for i in range(9)))
    (tmp_path / "place").mkdir()
    return open_store(f"file://{tmp_path}/place")


@pytest.fixture
def kept(tmp_path: Path, store: Store) -> TokenizedSource:
    """A source that one node has tokenised, and has kept in ``store``."""
    source = Node(tmp_path, "first", store).tokenize()
    KeptTokens(store).keep(source, Event())
    return source


def objects(store: Store) -> list[str]:
    return [entry.key.rpartition(".")[2] for entry in store.list("tokenized/")]


def same(one: TokenizedSource, other: TokenizedSource) -> bool:
    return one.digest == other.digest and all(
        (a == b).all() for i in range(len(one)) for a, b in zip(one.example(i), other.example(i), strict=True)
    )


def forbid_tokenising(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenize, "tokenize_rows", lambda *_: pytest.fail("it was tokenised"))


def test_another_node_reads_what_was_kept(
    tmp_path: Path, store: Store, kept: TokenizedSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid_tokenising(monkeypatch)
    node = Node(tmp_path, "second", store)

    read = node.tokenize()

    assert same(read, kept)
    assert read.report == kept.report
    assert node.fetched == [(kept.folder / "examples.arrow").stat().st_size]
    assert objects(store) == ["arrow", "json"]
    assert sorted(path.name for path in read.folder.iterdir()) == ["examples.arrow", "report.json"]


def test_what_is_in_the_cache_is_not_asked_for(tmp_path: Path, store: Store, kept: TokenizedSource) -> None:
    node = Node(tmp_path, "first", store)
    assert same(node.tokenize(), kept)
    assert node.fetched == []


def test_a_node_that_had_begun_to_tokenise_reads_it_as_well(
    tmp_path: Path, store: Store, kept: TokenizedSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(tmp_path, "second", None)
    with monkeypatch.context() as broken:
        broken.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            node.tokenize()
    (begun,) = (node.cache / "tokenized").glob(".*-*")
    (begun / JOURNAL_FILE).write_text("half a line")
    forbid_tokenising(monkeypatch)

    read = Node(tmp_path, "second", store).tokenize()

    assert same(read, kept)
    assert sorted(path.name for path in read.folder.iterdir()) == ["examples.arrow", "report.json"]


def damage(path: Path, how: str, tokens: bytes = b"") -> None:
    """What ``how`` says; flipped is a bit of ``tokens``, for not every byte of a file means something."""
    content = bytearray(path.read_bytes())
    if how == "flipped":
        content[content.index(tokens) if tokens else len(content) // 2] ^= 1
    if how == "long":
        content = b" " * LONGEST_RECORD + content
    path.write_bytes(content[: len(content) // 2] if how == "cut" else content)
    if how == "gone":
        path.unlink()


@pytest.mark.parametrize(
    ("which", "how"),
    [*itertools.product(["arrow", "json"], ["flipped", "cut", "gone"]), ("json", "long")],
)
def test_what_is_damaged_is_not_used(
    tmp_path: Path, store: Store, kept: TokenizedSource, caplog: pytest.LogCaptureFixture, which: str, how: str
) -> None:
    (file,) = (tmp_path / "place" / "tokenized").glob(f"*.{which}")
    damage(file, how, kept.example(0)[0].tobytes() if which == "arrow" else b"")

    read = Node(tmp_path, "second", store).tokenize()

    assert same(read, kept)
    assert ("is not used, and the rows are tokenised again: " in caplog.text) == (how != "gone")
    assert sorted(path.name for path in read.folder.iterdir()) == ["examples.arrow", "report.json"]


def test_whatever_is_damaged_leads_to_tokenising(tmp_path: Path, store: Store, kept: TokenizedSource) -> None:
    (file,) = (tmp_path / "place" / "tokenized").glob("*.arrow")
    whole = file.read_bytes()
    record = file.with_suffix(".json")
    written = record.read_bytes()
    name = kept.folder.name
    for place in range(0, len(whole), 5):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 0x80]) + whole[place + 1 :])
        record.write_bytes(written)
        (folder := tmp_path / "work").mkdir(exist_ok=True)
        if KeptTokens(store).fetch(folder, name, lambda _: None):
            assert same(TokenizedSource(folder), kept)


def test_what_was_found_damaged_is_written_anew(tmp_path: Path, store: Store, kept: TokenizedSource) -> None:
    (file,) = (tmp_path / "place" / "tokenized").glob("*.arrow")
    whole = file.read_bytes()
    damage(file, "flipped", kept.example(0)[0].tobytes())

    KeptTokens(store).keep(Node(tmp_path, "second", store).tokenize(), Event())

    assert file.read_bytes() == whole
    assert KeptTokens(store).fetch(Node(tmp_path, "third", None).tokenize().folder, kept.folder.name, lambda _: None)


def test_what_was_cut_is_written_anew(tmp_path: Path, store: Store, kept: TokenizedSource) -> None:
    (file,) = (tmp_path / "place" / "tokenized").glob("*.arrow")
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])

    KeptTokens(store).keep(kept, Event())

    assert file.read_bytes() == whole


def test_a_cache_that_was_damaged_before_it_was_kept_is_found(tmp_path: Path, store: Store) -> None:
    source = Node(tmp_path, "first", None).tokenize()
    damage(source.folder / "examples.arrow", "flipped", source.example(0)[0].tobytes())
    KeptTokens(store).keep(source, Event())

    read = Node(tmp_path, "second", store).tokenize()

    read.check()
    with pytest.raises(ValueError, match="not those that were written"):
        TokenizedSource(source.folder).check()


class Away:
    """A store that does not answer, or whose node has no room left."""

    uri = "s3://bucket/run"

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __getattr__(self, name: str) -> Any:
        raise self._error


def test_a_store_that_is_away_keeps_nobody_from_tokenising(tmp_path: Path, kept: TokenizedSource) -> None:
    away: Any = Away(StorageUnavailableError("no answer"))
    assert same(Node(tmp_path, "second", away).tokenize(), kept)


def test_a_full_disk_is_told(tmp_path: Path, store: Store) -> None:
    full: Any = Away(OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(OSError, match="No space left"):
        Node(tmp_path, "second", full).tokenize()


def test_it_is_written_once_and_not_when_the_run_ends_meanwhile(
    store: Store, kept: TokenizedSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as once:
        once.setattr(type(store), "open_write", lambda *_, **__: pytest.fail("it was written again"))
        KeptTokens(store).keep(kept, Event())
    KeptTokens(store).remove([kept])
    assert objects(store) == []

    stopped = Event()
    stopped.set()
    KeptTokens(store).keep(kept, stopped)
    assert objects(store) == []


def test_only_what_runs_keep_is_removed(tmp_path: Path, store: Store, kept: TokenizedSource) -> None:
    theirs = tmp_path / "place" / "tokenized"
    (theirs / "another-run").mkdir()
    for name in ("train.jsonl", "a.arrow", f"another-run/{kept.folder.name}.json"):
        (theirs / name).write_text("of somebody else")

    KeptTokens(store).remove([kept])

    left = sorted(path.relative_to(theirs).as_posix() for path in theirs.rglob("*") if path.is_file())
    assert left == ["a.arrow", f"another-run/{kept.folder.name}.json", "train.jsonl"]


def test_uploads_that_nobody_may_list_keep_nothing_from_being_kept_or_removed(
    store: Store, kept: TokenizedSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*_: object) -> int:
        raise AccessDeniedError("no right to list uploads")

    monkeypatch.setattr(type(store), "abort_incomplete_uploads", denied)
    KeptTokens(store).remove([kept])
    assert objects(store) == []
    KeptTokens(store).keep(kept, Event())
    assert objects(store) == ["arrow", "json"]


def test_what_an_earlier_upload_has_left_is_dropped_by_the_next(
    tmp_path: Path, store: Store, kept: TokenizedSource
) -> None:
    KeptTokens(store).remove([kept])
    store.open_write(f"tokenized/{kept.folder.name}.arrow").write(b"half of it")

    KeptTokens(store).keep(kept, Event())

    assert len([*(tmp_path / "place" / "tokenized").iterdir()]) == 2


def test_who_waits_for_what_is_fetched_sees_it_grow(tmp_path: Path, store: Store, kept: TokenizedSource) -> None:
    node = Node(tmp_path, "second", store)
    seen: list[int] = []
    folder = node.cache / "tokenized" / kept.folder.name
    node.tokenize(lambda _: seen.append(_bytes_written(folder)))
    assert seen == [(kept.folder / "examples.arrow").stat().st_size]


# While a run goes on


def listened(store: Store, source: TokenizedSource, error: BaseException | None, *, wanted: bool = True) -> list[str]:
    """What lies in ``store`` before the end of a run, and after it."""
    listener = KeepsTokens(store, lambda: [source], wanted=wanted)
    listener.on_start(Started(0, 9), Control())
    if listener._thread.ident is not None:
        listener._thread.join(60)
    before = objects(store)
    listener.on_end(Ended(9, error), Control())
    return [*before, "then", *objects(store)]


@pytest.mark.parametrize(
    ("least", "error", "expected"),
    [
        (1, None, ["arrow", "json", "then"]),
        (1, RuntimeError(), ["arrow", "json", "then", "arrow", "json"]),
        (1_000_000, None, ["then"]),
    ],
)
def test_a_run_keeps_it_until_it_is_complete(
    tmp_path: Path,
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
    least: int,
    error: BaseException | None,
    expected: list[str],
) -> None:
    monkeypatch.setattr(keeps_tokens, "LEAST_TOKENS", least)
    source = Node(tmp_path, "first", None).tokenize()
    assert listened(store, source, error) == expected


def test_what_is_not_wanted_any_more_is_removed_at_once(
    store: Store, kept: TokenizedSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeps_tokens, "LEAST_TOKENS", 1)
    assert listened(store, kept, RuntimeError(), wanted=False) == ["then"]


def test_a_start_of_a_complete_run_removes_what_its_end_had_no_time_for(
    tmp_path: Path, kept: TokenizedSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Trainer.__new__(Trainer)
    one.topology, one.store = ALONE, LocalStore(tmp_path / "place", "pvc://claim/place")
    one.config = one.reporter = None  # type: ignore[assignment]
    one._place = Entered(None, None)
    monkeypatch.setattr(trainer, "end_again", lambda *_: None)
    assert objects(one.store) == ["arrow", "json"]

    one._end_again(Done(step=6, attempt=1))

    assert objects(one.store) == []


def test_a_run_whose_data_cannot_be_kept_goes_on(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(keeps_tokens, "LEAST_TOKENS", 1)
    source = Node(tmp_path, "first", None).tokenize()
    away: Any = Away(StorageUnavailableError("no answer"))
    listener = KeepsTokens(away, lambda: [source])
    with caplog.at_level(logging.WARNING):
        listener.on_start(Started(0, 9), Control())
        listener._thread.join(60)
        listener.on_end(Ended(9), Control())
    assert "tokenised data is not kept, another node would tokenise it again: no answer" in caplog.text
    assert "the tokenised data of the run was not removed: no answer" in caplog.text


@pytest.mark.parametrize(
    ("uri", "wanted", "kept"),
    [("s3://bucket/run", True, True), ("s3://bucket/run", False, False), ("file:///runs/one", True, False)],
)
def test_it_is_kept_where_other_nodes_find_it_and_nobody_says_no(uri: str, wanted: bool, kept: bool) -> None:
    data = {"train": [{"uri": "hf://org/rows"}], "keepTokenized": wanted}
    spec = SFTJobSpec.model_validate({"model": {"uri": "hf://org/model"}, "data": data, "compute": {}})
    assert (kept_tokens(spec, open_store(uri)) is not None) == kept
