"""A process that waits for another one's download says how far that is."""

import fcntl
import threading
from pathlib import Path

import pytest

from sft_trainer import fetch
from sft_trainer.checkpoint.local import LocalStore
from sft_trainer.fetch import localise
from tests.waiting import PATIENCE_SECONDS, wait_until

MIB = 2**20


def test_a_download_of_another_process_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given another process that downloads the same
    store = LocalStore(tmp_path / "bucket")
    store.put("model/config.json", b"{}")
    monkeypatch.setattr(fetch, "listing", lambda *_: (store, "model", list(store.list("model"))))
    monkeypatch.setattr(fetch, "_identity", lambda *_: "content")
    target = tmp_path / "cache" / "s3" / "bucket-content"
    unfinished = target.with_name(f".unfinished-{target.name}")
    unfinished.mkdir(parents=True)
    file = unfinished / "model.safetensors"
    with file.open("wb") as empty:
        empty.truncate(100 * MIB)
    told: list[int] = []
    with target.with_name(f".lock-{target.name}").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting = threading.Thread(
            target=localise,
            args=("s3://bucket/model", tmp_path / "cache"),
            kwargs={"kind": "model", "on_progress": told.append},
        )
        waiting.start()

        # When that gets on, it is a word each time; the size that a file shall have is none
        wait_until(lambda: len(told) == 1)
        assert told[0] < MIB
        with file.open("r+b") as growing:
            growing.write(bytes(3 * MIB))
        wait_until(lambda: told[-1] >= 3 * MIB)

    # Then it is its turn
    waiting.join(PATIENCE_SECONDS)
    assert (target / "model" / "config.json").read_bytes() == b"{}"


def test_of_an_export_the_models_on_the_way_to_it_are_not_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given the place of an export with export.everySteps, which another run begins from
    store = LocalStore(tmp_path / "bucket")
    own = {"config.json", "model.safetensors", "step-by-step.json"}
    for name in own | {"step-00001000/config.json", "step-00001000/model.safetensors"}:
        store.put(f"export/{name}", b"{}")
    monkeypatch.setattr("sft_trainer.checkpoint.s3.S3Store", lambda *_: store)

    path = localise("s3://bucket/export", tmp_path / "cache", kind="model")

    assert {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()} == own
