"""Exports that end in the middle, meet another one, or a damaged checkpoint: never the weights of two steps."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from sft_api.place import EXPORT_MARK, EXPORT_RECORD
from sft_trainer.checkpoint.errors import CheckpointCorruptError
from sft_trainer.checkpoint.local import LocalStore
from sft_trainer.checkpoint.store import StoredObject, WriteStream
from sft_trainer.errors import AccessDeniedError, ConfigError, StorageFullError, StorageUnavailableError
from tests.exports import content, export, exported
from tests.unit.trainer.exporting import SMALL, checkpoint, make_model, trained

pytestmark = pytest.mark.usefixtures("process_group")


class Watched(LocalStore):
    """Tells what is written and removed, and does something before a file appears."""

    def __init__(self, path: Path, before: Callable[[str], None] = lambda key: None) -> None:
        super().__init__(path)
        self.told: list[str] = []
        self.before = before

    def open_write(self, key: str, size_hint: int = 0) -> WriteStream:
        self.before(key)
        self.told.append(key)
        return super().open_write(key, size_hint)

    def delete(self, keys: Any) -> None:
        keys = list(keys)
        self.told += [f"-{key}" for key in keys]
        super().delete(keys)


def full_at(name: str) -> Callable[[str], None]:
    def before(key: str) -> None:
        if name in key:
            raise StorageFullError(f"no room for {key}")

    return before


def test_what_was_finished_is_not_written_again(tmp_path: Path, source: Path, steps: Any) -> None:
    # Given an export that ended in the middle
    store, (_, manifest) = steps
    what = exported(store, manifest, source)
    export(what, LocalStore(tmp_path / "undisturbed"), file_bytes=SMALL)
    with pytest.raises(StorageFullError):
        export(what, Watched(tmp_path / "out", full_at("model-00003")), file_bytes=SMALL)
    assert not (tmp_path / "out" / "config.json").exists()
    assert (tmp_path / "out" / EXPORT_MARK).exists()

    # When it is tried again, by another process
    target = Watched(tmp_path / "out")
    export(exported(store, manifest, source), target, file_bytes=SMALL)

    # Then only what was missing is written, and the folder is that of an export in one go
    written = [key for key in target.told if key.endswith(".safetensors")]
    assert written[0].startswith("model-00003")
    assert not any(key.startswith(("model-00001", "model-00002")) for key in target.told)
    assert target.told[-2:] == ["config.json", f"-{EXPORT_MARK}"]
    assert content(tmp_path / "out") == content(tmp_path / "undisturbed")


def test_a_run_that_was_trained_again_in_an_emptied_place_is_exported_again(tmp_path: Path, source: Path) -> None:
    # Given the model of a run, and the same run trained once more, say on rows that changed: the folder of its
    # checkpoint has the same name
    exports = []
    for seed in (1, 2):
        store = LocalStore(tmp_path / f"store-{seed}")
        exports.append(exported(store, checkpoint(trained(source, seed), store), source))
    first, second = exports
    assert first.manifest.id == second.manifest.id
    for number, what in enumerate(exports):
        export(what, LocalStore(tmp_path / f"undisturbed-{number}"))
    export(first, LocalStore(tmp_path / "out"))

    # When it is exported to the same place
    export(second, LocalStore(tmp_path / "out"))

    # Then the new model is there, and stays
    assert content(tmp_path / "out") == content(tmp_path / "undisturbed-1") != content(tmp_path / "undisturbed-0")
    target = Watched(tmp_path / "out")
    export(second, target)
    assert target.told == []


@pytest.mark.parametrize("begun", [True, False], ids=["begun", "complete"])
def test_the_weights_of_two_steps_never_lie_beside_a_config(
    tmp_path: Path, source: Path, steps: Any, begun: bool
) -> None:
    # Given the export of an earlier step with more files, complete or ended in the middle
    store, (earlier, later) = steps
    export(exported(store, later, source), LocalStore(tmp_path / "undisturbed"), file_bytes=SMALL)
    before = full_at("model-00004") if begun else lambda key: None
    try:
        export(exported(store, earlier, source), Watched(tmp_path / "out", before), file_bytes=SMALL // 2)
    except StorageFullError:
        assert begun
    assert (tmp_path / "out" / "config.json").exists() != begun
    (tmp_path / "out" / "notes.txt").write_text("mine")

    # When another step is exported there
    seen: list[bool] = []
    target = Watched(
        tmp_path / "out", lambda key: seen.append("safetensors" in key and (target.path / "config.json").exists())
    )
    export(exported(store, later, source), target, file_bytes=SMALL)

    # Then the config went before the first file came, and nothing of the earlier step is left
    assert target.told[0] == "-config.json"
    assert len(seen) > 3
    assert not any(seen)
    left = content(tmp_path / "out")
    assert left.pop("notes.txt") == b"mine"
    assert left == content(tmp_path / "undisturbed")


def test_two_exports_to_one_place_do_not_mix(tmp_path: Path, source: Path, steps: Any) -> None:
    # Given an export, while which another one begins in the same place
    store, (one, other) = steps

    def another_begins(key: str) -> None:
        if key.startswith("model-00002"):
            with pytest.raises(StorageFullError):
                export(
                    exported(store, other, source), Watched(tmp_path / "out", full_at("model-00001")), file_bytes=SMALL
                )

    target = Watched(tmp_path / "out", another_begins)
    with pytest.raises(StorageUnavailableError, match=r"out: another export was begun or ended there meanwhile"):
        export(exported(store, one, source), target, file_bytes=SMALL)

    assert sorted(content(tmp_path / "out")) == [EXPORT_RECORD, EXPORT_MARK], (
        "the file that was being written is dropped"
    )


def damage(store: Any, manifest: Any) -> None:
    """Half of the checkpoint's file becomes zeros; its size stays."""
    (file,) = (entry.key for entry in store.list(manifest.id.prefix) if entry.key.endswith(".bin"))
    raw = bytearray(store.read(file))
    raw[: len(raw) // 2] = bytes(len(raw) // 2)
    store.put(file, bytes(raw))


def test_a_damaged_checkpoint_is_named_and_leaves_no_model(tmp_path: Path, source: Path, steps: Any) -> None:
    store, (_, manifest) = steps
    damage(store, manifest)

    with pytest.raises(CheckpointCorruptError, match=r"step-00000004-a00002 is damaged, and is not exported: .*digest"):
        export(exported(store, manifest, source), LocalStore(tmp_path / "out"), file_bytes=SMALL)

    assert "config.json" not in content(tmp_path / "out")
    assert not [name for name in content(tmp_path / "out") if name.startswith(".incomplete")]


def test_a_checkpoint_that_cannot_be_exported_costs_nothing_of_an_older_export(
    tmp_path: Path, source: Path, steps: Any
) -> None:
    store, (earlier, later) = steps
    export(exported(store, earlier, source), LocalStore(tmp_path / "out"))
    before = content(tmp_path / "out")
    # Given a model of other sizes
    other = make_model(tmp_path / "other", tie_word_embeddings=True, intermediate_size=48)
    with pytest.raises(ConfigError, match=r"has shape \[64, 32\] in the checkpoint .*, but \[48, 32\] by the config"):
        export(exported(store, later, other), LocalStore(tmp_path / "out"))
    # Or no index
    assert later.index is not None
    index = store.read(f"{later.id.prefix}{later.index.name}")
    store.delete([f"{later.id.prefix}{later.index.name}"])
    with pytest.raises(CheckpointCorruptError, match=r"step-00000004-a00002 is damaged.* \(checkpoint\.keep\)"):
        export(exported(store, later, source), LocalStore(tmp_path / "out"))
    # Or another content than its digests say
    store.put(f"{later.id.prefix}{later.index.name}", index)
    damage(store, later)
    with pytest.raises(CheckpointCorruptError, match=r"step-00000004-a00002 is damaged.*digest"):
        export(exported(store, later, source), LocalStore(tmp_path / "out"))
    assert content(tmp_path / "out") == before


def test_where_files_cannot_be_listed_all_are_written_anew(
    tmp_path: Path, source: Path, steps: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class WriteOnly(Watched):
        def list(self, prefix: str) -> list[StoredObject]:
            raise AccessDeniedError("no listing")

    store, (_, manifest) = steps
    export(exported(store, manifest, source), LocalStore(tmp_path / "undisturbed"))
    target = WriteOnly(tmp_path / "out")
    export(exported(store, manifest, source), target)
    export(exported(store, manifest, source), target)
    assert target.told.count("model.safetensors") == 2
    assert content(tmp_path / "out") == content(tmp_path / "undisturbed")
    assert "is not looked for, but written again: no listing" in caplog.text


@pytest.mark.parametrize("denied", ["list", "read"])
def test_an_older_model_goes_and_a_new_one_comes_where_only_writing_is_allowed(
    tmp_path: Path, source: Path, steps: Any, monkeypatch: pytest.MonkeyPatch, denied: str
) -> None:
    # Given a model in one file, in a place of which nothing can be listed, or read
    store, (earlier, later) = steps
    export(exported(store, later, source), LocalStore(tmp_path / "undisturbed"), file_bytes=SMALL)
    target = LocalStore(tmp_path / "out")
    export(exported(store, earlier, source), target)

    def refuse(key: str) -> None:
        raise AccessDeniedError(f"no {denied} of {key}")

    monkeypatch.setattr(target, denied, refuse)

    # When one of several files comes, then the single file, which readers would prefer, is gone
    export(exported(store, later, source), target, file_bytes=SMALL)
    assert content(tmp_path / "out") == content(tmp_path / "undisturbed")


def test_an_export_that_ends_while_another_begins_writes_no_config(tmp_path: Path, source: Path, steps: Any) -> None:
    store, (one, other) = steps

    # Given another one that begins while config and tokenizer are written
    def another_begins(key: str) -> None:
        if key == "README.md":
            with pytest.raises(StorageFullError):
                export(exported(store, other, source), Watched(tmp_path / "out", full_at("model")), file_bytes=SMALL)

    with pytest.raises(StorageUnavailableError, match="another export was begun"):
        export(exported(store, one, source), Watched(tmp_path / "out", another_begins), file_bytes=SMALL)

    assert "config.json" not in content(tmp_path / "out")
    assert EXPORT_MARK in content(tmp_path / "out"), "it is the other one's"


def test_pods_that_see_other_places_are_found_out(tmp_path: Path, source: Path, steps: Any) -> None:
    class Elsewhere(Watched):
        def open_write(self, key: str, size_hint: int = 0) -> WriteStream:
            other = LocalStore(tmp_path / "elsewhere")
            return other.open_write(key, size_hint) if key.endswith("safetensors") else super().open_write(key)

    store, (_, manifest) = steps
    with pytest.raises(StorageUnavailableError, match=r"model\.safetensors has no bytes instead of \d+ right after"):
        export(exported(store, manifest, source), Elsewhere(tmp_path / "out"))
    assert "config.json" not in content(tmp_path / "out")


def test_remains_of_an_export_that_was_killed_are_dropped(tmp_path: Path, source: Path, steps: Any) -> None:
    # Given exports that were killed in the middle of a file, and files of others beside and below them
    store, (_, manifest) = steps
    target = LocalStore(tmp_path / "out")
    weights = ("model.safetensors", "model-00001-of-00002.safetensors")
    for key in (*weights, EXPORT_MARK, "training-run.json", "config.json", "mine.bin", "jobs/a/model.safetensors"):
        target.open_write(key).write(b"x")

    export(exported(store, manifest, source), target)

    left = sorted(path.name.split("-", 2)[2] for path in (tmp_path / "out").rglob(".incomplete-*"))
    assert left == ["mine.bin", "model.safetensors"]
    assert (tmp_path / "out" / "jobs" / "a").is_dir()


def test_what_others_write_in_a_folder_beside_the_export_stays(tmp_path: Path, source: Path, steps: Any) -> None:
    # Given another run that saves below the place of the export, in a folder that is called after its model
    store, (_, manifest) = steps
    theirs = LocalStore(tmp_path / "out" / "model-0.5b")
    with theirs.open_write("checkpoints/step-00000002-a00001/r00000-0-abc.bin") as stream:
        stream.write(b"half")

        # When the export begins meanwhile
        export(exported(store, manifest, source), LocalStore(tmp_path / "out"), file_bytes=SMALL)

    # Then what is written there arrives
    assert theirs.read("checkpoints/step-00000002-a00001/r00000-0-abc.bin") == b"half"


def test_an_export_tells_its_bytes(tmp_path: Path, source: Path, steps: Any) -> None:
    store, (_, manifest) = steps
    told: list[int] = []
    export(exported(store, manifest, source), LocalStore(tmp_path / "out"), on_bytes=told.append)
    tensors = load_file(tmp_path / "out" / "model.safetensors").values()
    read, written = sum(tensor.numel() * 4 for tensor in tensors), sum(tensor.nbytes for tensor in tensors)
    assert sum(told) == read + written
