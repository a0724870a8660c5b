"""What every store must do, whatever it is made of."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from sft_trainer.checkpoint.errors import ObjectNotFoundError
from sft_trainer.checkpoint.store import Store
from sft_trainer.errors import ConfigError
from tests.waiting import PATIENCE_SECONDS

MiB = 2**20


def test_what_is_written_is_read(store: Store) -> None:
    store.put("a/b.json", b"first")
    store.put("a/b.json", b"second")
    assert store.read("a/b.json") == b"second"
    assert store.read_range("a/b.json", 2, 3) == b"con"
    assert store.read_range("a/b.json", 4, 100) == b"nd"


def test_missing_objects_are_told_apart_from_missing_stores(store: Store) -> None:
    with pytest.raises(ObjectNotFoundError, match=r"no/such\.bin"):
        store.read("no/such.bin")
    with pytest.raises(ObjectNotFoundError):
        store.read_range("no/such.bin", 0, 1)
    with pytest.raises(ObjectNotFoundError):
        store.open_read("no/such.bin")


def test_probe_finds_conditional_writes_and_leaves_nothing(store: Store) -> None:
    result = store.probe()
    assert result.conditional_writes, result.message
    assert store.list("") == []


def test_create_never_overwrites(store: Store) -> None:
    assert store.create("attempts/00001.json", b"mine")
    assert not store.create("attempts/00001.json", b"yours")
    assert store.read("attempts/00001.json") == b"mine"


def test_exactly_one_of_many_racing_creates_wins(store: Store) -> None:
    contents = [b"claim %d" % thread for thread in range(8)]
    for key in [f"attempts/{number:05d}.json" for number in range(1, 6)]:
        with ThreadPoolExecutor(8) as pool:
            won = list(pool.map(store.create, [key] * 8, contents))
        assert sum(won) == 1
        assert store.read(key) == contents[won.index(True)]


@pytest.mark.parametrize("size", [0, 1, 8 * MiB, 8 * MiB + 1, 17 * MiB])
def test_streams_of_any_size_arrive_whole(store: Store, size: int) -> None:
    data = os.urandom(size)
    with store.open_write("shards/x.bin", size) as stream:
        for start in range(0, size, 3 * MiB + 7):
            stream.write(data[start : start + 3 * MiB + 7])
    assert stream.size == size
    assert [(entry.key, entry.size) for entry in store.list("shards/")] == [("shards/x.bin", size)]
    assert store.read("shards/x.bin") == data
    with store.open_read("shards/x.bin") as reader:
        reader.seek(size // 2)
        assert reader.read() == data[size // 2 :]


def test_a_buffer_may_be_reused_after_each_write(store: Store) -> None:
    buffer = bytearray(b"a" * 9 * MiB)
    with store.open_write("x.bin") as stream:
        stream.write(buffer)
        buffer[:] = b"b" * len(buffer)
        stream.write(buffer)
    assert store.read("x.bin") == b"a" * 9 * MiB + b"b" * 9 * MiB


@pytest.mark.parametrize("size", [40_001, 3 * MiB + 5])
def test_what_is_lent_arrives_whole(store: Store, size: int) -> None:
    """Many small pieces of memory in a part, and few large ones that end in the middle of parts."""
    data = os.urandom(20 * MiB)
    with store.open_write("x.bin", len(data)) as stream:
        for start in range(0, len(data), size):
            stream.lend(memoryview(data)[start : start + size])
    assert stream.size == len(data)
    assert store.read("x.bin") == data


def test_memory_is_filled_from_a_range_bit_by_bit(store: Store) -> None:
    store.put("x.bin", b"0123456789")
    memory = memoryview(bytearray(4))
    with store.open_range("x.bin", 1, 6) as stream:
        assert stream.fill(memory) == 4
        assert memory == b"1234"
        assert stream.fill(memory[:0]) == 0
        assert stream.fill(memory[:2]) == 2
        assert memory == b"5634"
    with store.open_range("x.bin", 8, 4) as stream:
        assert stream.fill(memory) == 2, "the object ends"
        assert memory[:2] == b"89"
        assert stream.fill(memory) == 0
    with store.open_range("no/such.bin", 0, 4) as stream, pytest.raises(ObjectNotFoundError):
        stream.fill(memory)


def test_any_contiguous_buffer_can_be_written(store: Store) -> None:
    with store.open_write("x.bin") as stream:
        for data in (b"", np.empty((0, 3), np.float32).data, np.arange(4, dtype=np.int16).data, bytearray(b"end")):
            stream.write(data)
    assert store.read("x.bin") == b"\0\0\1\0\2\0\3\0end"


@pytest.mark.parametrize("size", [10, 20 * MiB])
def test_an_exception_leaves_nothing_behind(store: Store, size: int) -> None:
    def fail_in_the_middle() -> None:
        with store.open_write("shards/x.bin") as stream:
            stream.write(b"x" * size)
            raise RuntimeError("the training step failed")

    with pytest.raises(RuntimeError, match="training step"):
        fail_in_the_middle()
    assert store.list("") == []
    assert store.abort_incomplete_uploads("") == 0


def test_an_object_is_invisible_until_its_stream_is_closed(store: Store) -> None:
    stream = store.open_write("shards/x.bin")
    stream.write(b"x" * 10 * MiB)
    assert store.list("") == []
    stream.close()
    assert [entry.key for entry in store.list("")] == ["shards/x.bin"]
    with pytest.raises(ValueError, match="closed"):
        stream.write(b"more")


def test_unfinished_uploads_of_a_crashed_writer_are_removed(store: Store) -> None:
    for key in ("checkpoints/a/x.bin", "export/y.bin", "export/z.bin"):
        stream = store.open_write(key)  # never closed, as after kill -9
        stream.write(b"x" * 20 * MiB)
    assert store.abort_incomplete_uploads("checkpoints/") == 1
    assert store.abort_incomplete_uploads("checkpoints/") == 0
    assert store.abort_incomplete_uploads("export/y") == 1, "a prefix of keys, not a folder"
    assert store.abort_incomplete_uploads("export/") == 1


def test_list_is_by_string_prefix_and_sorted(store: Store) -> None:
    for key in ("b/2", "b/1", "b/10", "bb/1", "a"):
        store.put(key, b"x" * len(key))
    assert [entry.key for entry in store.list("b/")] == ["b/1", "b/10", "b/2"]
    assert [entry.key for entry in store.list("b")] == ["b/1", "b/10", "b/2", "bb/1"]
    assert [entry.key for entry in store.list("b/1")] == ["b/1", "b/10"]
    assert store.list("nothing/here") == []
    assert [entry.size for entry in store.list("a")] == [1]


def test_delete_removes_what_is_there_and_ignores_the_rest(store: Store) -> None:
    store.put("checkpoints/a/x", b"")
    store.put("checkpoints/a/y", b"")
    store.put("checkpoints/b/z", b"")
    store.delete(["checkpoints/a/x", "checkpoints/a/y", "checkpoints/a/never-there"])
    assert [entry.key for entry in store.list("")] == ["checkpoints/b/z"]


@pytest.mark.parametrize("key", ["", "/etc/passwd", "a/../../b", "a//b", "./a", "a/..", "a\\b"])
def test_keys_cannot_lead_outside(store: Store, key: str) -> None:
    for operation in (store.read, store.open_read, store.open_write):
        with pytest.raises(ConfigError, match="is no key"):
            operation(key)
    with pytest.raises(ConfigError, match="is no key"):
        store.create(key, b"")


def _put_in_child(store: Store, key: str) -> None:
    store.put(key, b"from the child")


def test_a_store_works_on_both_sides_of_a_fork(store: Store) -> None:
    store.put("before", b"x")
    child = multiprocessing.get_context("fork").Process(target=_put_in_child, args=(store, "child"))
    child.start()
    child.join(PATIENCE_SECONDS)
    assert child.exitcode == 0
    store.put("after", b"y")
    assert [entry.key for entry in store.list("")] == ["after", "before", "child"]
