"""What a run fetches is what it was when the run began."""

from pathlib import Path

from sft_trainer.revisions import pinned
from tests.parity.runs import manifest, resolve


def test_adapters_that_a_run_begins_with_are_of_the_commit_that_it_began_with(tmp_path: Path) -> None:
    config = resolve(manifest(tmp_path, tmp_path / "store", lora={"adapterUri": "hf://org/adapters"}))
    lora = pinned(config, {"lora.adapterUri": "c" * 40}).spec.lora
    assert lora is not None
    assert lora.adapter_uri == f"hf://org/adapters@{'c' * 40}"


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
