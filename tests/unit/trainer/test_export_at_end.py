"""What a process says while a run exports, and of which checkpoint."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file

from sft_api.checkpoints import CheckpointId, RunState
from sft_api.progress import Activity, Phase
from sft_api.rundir import ACTIVITY_FOLDER
from sft_trainer.checkpoint.errors import CheckpointCorruptError
from sft_trainer.checkpoint.local import LocalStore
from sft_trainer.checkpoint.store import WriteStream
from sft_trainer.errors import ConfigError, StorageUnavailableError
from sft_trainer.export.at_end import AtEnd
from sft_trainer.models.attention_choice import NOTHING_CHOSEN
from sft_trainer.models.causal_lm import build_on_meta
from sft_trainer.prepared import PreparedModel
from sft_trainer.reporting import Reporter
from sft_trainer.saving import Saving
from sft_trainer.topology import Topology
from tests.exports import save
from tests.parity.mask_tokenizers import chat_tokenizer
from tests.parity.runs import manifest, resolve
from tests.unit.checkpoint.boxed import whole
from tests.unit.trainer.test_models import save_model

ALONE = Topology(rank=0, local_rank=0, world_size=1)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save_model("llama", tmp_path / "model")
    return tmp_path / "model"


def at_end(folder: Path, model: Path, *, best: bool = False) -> tuple[AtEnd, Reporter]:
    prepared: Any = SimpleNamespace(
        model=PreparedModel("file:///model", model, build_on_meta(model), "", NOTHING_CHOSEN, uncompiled=""),
        tokenizer=chat_tokenizer("chatml"),
    )
    reporter = Reporter(folder, writes=True)
    config = resolve(manifest(folder, folder / "store"))
    if best:
        wanted = config.spec.export.model_copy(update={"checkpoint": "best"})
        config = config.model_copy(update={"spec": config.spec.model_copy(update={"export": wanted})})
    return AtEnd(config, prepared, LocalStore(folder / "store"), reporter, ALONE), reporter


def weights(model: Path) -> Any:
    """All of a checkpoint that an export reads."""
    return whole(load_file(model / "model.safetensors"))


def test_a_process_that_exports_says_that_it_lives(tmp_path: Path, model: Path) -> None:
    # Given an export of which every word is looked at
    export, reporter = at_end(tmp_path, model)
    saved = save(weights(model), LocalStore(tmp_path / "store"))
    reporter.phase(Phase.EXPORTING, "file:///x")
    told: list[Activity] = []

    class Looking(LocalStore):
        def open_write(self, key: str, size_hint: int = 0) -> WriteStream:
            reporter._last_alive = 0.0
            told.append(Activity.model_validate_json((tmp_path / ACTIVITY_FOLDER / "rank-0.json").read_bytes()))
            return super().open_write(key, size_hint)

    export.run(saved.id, "file:///x", Looking(tmp_path / "out"))

    assert {activity.phase for activity in told} == {Phase.EXPORTING}
    assert (tmp_path / "out" / "config.json").exists()
    assert reporter.progress.phase_detail.startswith("file:///x: ")
    assert reporter.progress.phase_detail.endswith(" MiB read and written")


def test_however_often_an_export_is_tried_its_processes_form_one_group(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a place that is away for two tries: a group is never taken down, and takes connections of every process
    formed = Mock(return_value=None)
    monkeypatch.setattr(Topology, "process_group", formed)
    export, _ = at_end(tmp_path, model)
    saved = save(weights(model), LocalStore(tmp_path / "store"))

    class Away(LocalStore):
        def open_write(self, key: str, size_hint: int = 0) -> WriteStream:
            raise StorageUnavailableError("away")

    formed.reset_mock()
    for _ in range(2):
        with pytest.raises(StorageUnavailableError):
            export.run(saved.id, "file:///x", Away(tmp_path / "out"))
    export.run(saved.id, "file:///x", LocalStore(tmp_path / "out"))

    # Then it is the one that there was at the beginning
    assert (tmp_path / "out" / "config.json").exists()
    formed.assert_not_called()


def test_it_is_the_checkpoint_of_this_step_that_is_exported_and_no_other(tmp_path: Path, model: Path) -> None:
    # Given the checkpoint that this run went on from, of the attempt before, and a damaged one of the same step
    store = LocalStore(tmp_path / "store")
    good, bad = save(weights(model), store), save(weights(model), store)
    (file,) = (entry.key for entry in store.list(bad.id.prefix) if entry.key.endswith(".bin"))
    store.put(file, b"")
    export, _ = at_end(tmp_path, model)

    export.run(good.id, "file:///x", LocalStore(tmp_path / "out"))
    assert (tmp_path / "out" / "model.safetensors").exists()

    with pytest.raises(CheckpointCorruptError, match=r"step-00000006-a00002 in .*store cannot be exported: .* 0 bytes"):
        export.run(bad.id, "file:///y", LocalStore(tmp_path / "other"))
    with pytest.raises(CheckpointCorruptError, match="its manifest is gone"):
        export.run(CheckpointId(attempt=3, step=6), "file:///y", LocalStore(tmp_path / "other"))
    assert not (tmp_path / "other").exists()


def test_a_best_checkpoint_whose_bytes_are_damaged_is_no_reason_to_try_again(tmp_path: Path, model: Path) -> None:
    # Given a best checkpoint of which a bit has changed, beside the last one, which is whole
    store = LocalStore(tmp_path / "store")
    best, last = (save(weights(model), store, step, metrics={"evalLoss": loss}) for step, loss in ((5, 1.0), (6, 2.0)))
    (key,) = (entry.key for entry in store.list(best.id.prefix) if entry.key.endswith(".bin"))
    raw = bytearray(store.read(key))
    raw[0] ^= 1
    store.put(key, bytes(raw))

    # Then the run ends with what to do: its next start would go on from the last one, and end in the same way
    export, _ = at_end(tmp_path, model, best=True)
    with pytest.raises(ConfigError, match=r"step-00000005-a00001 is damaged.*export\.checkpoint: last"):
        export.run(last.id, "file:///x", LocalStore(tmp_path / "out"))

    # But where it is the last one it is tried again, since who goes on from the one before makes that step anew
    with pytest.raises(CheckpointCorruptError, match="step-00000005-a00001 is damaged"):
        export.run(best.id, "file:///x", LocalStore(tmp_path / "out"))


def test_a_run_knows_which_checkpoint_its_step_has(tmp_path: Path, model: Path) -> None:
    # Given a run that went on from step 6 of an earlier attempt
    config = resolve(manifest(tmp_path, tmp_path / "store"))
    store = LocalStore(tmp_path / "store")
    device = torch.device("cpu")
    before = Saving(config, store, Reporter(tmp_path, writes=True), device=device, topology=ALONE)
    assert before.claim_attempt() == 1
    boxes = weights(model)
    state = RunState(cursor=6, numbers=config.numbers().as_record())
    before.save(6, boxes, state, final=True)
    assert before.checkpoint_of(6) == CheckpointId(attempt=1, step=6)
    after = Saving(config, store, Reporter(tmp_path, writes=True), device=device, topology=ALONE)
    assert after.claim_attempt() == 2
    assert after.resume(boxes) is not None

    # Then its last step is the one that it found there, or one that it saves itself
    after.save(6, boxes, state, final=True)
    assert after.checkpoint_of(6) == CheckpointId(attempt=1, step=6)
    assert after.checkpoint_of(7) == CheckpointId(attempt=2, step=7)
