"""What a run fetches is what it was when the run began."""

from pathlib import Path
from typing import Any

import pytest

from sft_trainer import revisions as recorded
from sft_trainer.revisions import pinned
from tests.parity.runs import manifest, resolve


def test_adapters_that_a_run_begins_with_are_of_the_commit_that_it_began_with(tmp_path: Path) -> None:
    config = resolve(manifest(tmp_path, tmp_path / "store", lora={"adapterUri": "hf://org/adapters"}))
    lora = pinned(config, {"lora.adapterUri": "c" * 40}).spec.lora
    assert lora is not None
    assert lora.adapter_uri == f"hf://org/adapters@{'c' * 40}"


def test_adapters_are_in_the_record_and_what_changed_in_a_bucket_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed: list[tuple[str, str]] = []

    def now(uri: str, *of: Any) -> str:
        listed.append((uri, of[-1]))
        return "what is there now"

    monkeypatch.setattr(recorded, "_listed", now)
    config = resolve(manifest(tmp_path, tmp_path / "store", lora={"adapterUri": "s3://bucket/tuned"}))
    assert recorded.revisions(config) == {"lora.adapterUri": "what is there now"}
    assert listed == [("s3://bucket/tuned", "adapter")]
    (told,) = recorded.changed(config, {"lora.adapterUri": "what was there"})
    assert told.startswith("s3://bucket/tuned (lora.adapterUri) is not what it was when this run began")
    assert told.endswith("a start before the first checkpoint begins with what is there now")


def test_rows_that_are_held_back_are_of_the_commit_that_is_trained(tmp_path: Path) -> None:
    # Given training data and what is held back from it, by slices of one data set, and another one
    document = manifest(
        tmp_path,
        tmp_path / "store",
        data={
            "train": [{"uri": "hf://org/chats", "split": "train[:98%]"}],
            "eval": [
                {"uri": "hf://org/chats@main", "split": "train[98%:]", "name": "held-out"},
                {"uri": "hf://org/chats@v2", "split": "test", "name": "later"},
                {"uri": "hf://org/other", "name": "other"},
            ],
        },
    )

    # When the branch has moved since the run began
    data = pinned(resolve(document), {"data.train[0].uri": "c" * 40}).spec.data

    # Then both are read at the commit of then
    assert [source.uri for source in data.train] == [f"hf://org/chats@{'c' * 40}"]
    assert [source.uri for source in data.eval] == [f"hf://org/chats@{'c' * 40}", "hf://org/chats@v2", "hf://org/other"]
    assert [source.split for source in data.eval] == ["train[98%:]", "test", None]
