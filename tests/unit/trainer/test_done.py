"""A complete run is not trained again: it ends at once, makes the export that is missing, or says what is gone."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from sft_api.checkpoints import STATUS_KEY, CheckpointId, Manifest, checkpoint_id
from sft_api.place import DONE_KEY, EXPORT_RECORD, Done
from sft_api.progress import Phase, TrainingProgress
from sft_api.trainer_config import TrainerConfig
from sft_trainer import done as done_again
from sft_trainer.checkpoint.catalog import Catalog
from sft_trainer.checkpoint.local import LocalStore
from sft_trainer.done import DoneFile, end_again
from sft_trainer.errors import AccessDeniedError, ConfigError
from sft_trainer.events import Control, Ended
from sft_trainer.export.record import refuse_other_run
from sft_trainer.outage import of_the_place
from sft_trainer.place import read_done
from sft_trainer.reporting import Reporter
from sft_trainer.saving import Saving
from sft_trainer.storage import check_storage
from tests.exports import content
from tests.parity.mask_tokenizers import chat_tokenizer
from tests.parity.runs import manifest, resolve
from tests.unit.trainer.exporting import checkpoint, trained

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.fixture
def config(tmp_path: Path, source: Path) -> TrainerConfig:
    chat_tokenizer("chatml").save_pretrained(source)
    return resolve(manifest(tmp_path, tmp_path / "store", model={"uri": f"file://{source}"}))


@pytest.fixture
def final(config: TrainerConfig, source: Path, tmp_path: Path) -> Manifest:
    """The last checkpoint of the run, beside the word that it is the last."""
    store = LocalStore(tmp_path / "store")
    made = checkpoint(trained(source), store, 6, numbers=config.numbers().as_record())
    store.put(STATUS_KEY, TrainingProgress(step=6, total_steps=6, attempt=1, loss=0.5).model_dump_json().encode())
    store.put(DONE_KEY, Done(step=6, attempt=1).model_dump_json(by_alias=True).encode())
    return made


def again(config: TrainerConfig, folder: Path) -> Reporter:
    """What a start of the complete run says."""
    store, reporter = LocalStore(folder / "store"), Reporter(folder, writes=True)
    done = read_done(store)
    assert done is not None
    end_again(config, store, done, {}, reporter)
    return reporter


@pytest.mark.usefixtures("final")
def test_what_is_missing_is_exported_once_and_nothing_else_is_done(config: TrainerConfig, tmp_path: Path) -> None:
    progress = again(config, tmp_path).progress
    assert (progress.phase, progress.step, progress.loss, progress.resumed_from_step) == (Phase.COMPLETE, 6, 0.5, 6)
    assert progress.export is not None
    assert (progress.export.uri, progress.export.step) == (config.export_uri, 6)
    export = tmp_path / "store" / "export"
    assert {"config.json", "model.safetensors", EXPORT_RECORD} <= set(content(export))

    # Started again, and without its checkpoint: the model that is there stays as it is
    before = {path.name: path.stat().st_mtime_ns for path in export.iterdir()}
    again(config, tmp_path)
    shutil.rmtree(tmp_path / "store" / "checkpoints")
    assert again(config, tmp_path).progress.export is not None
    assert {path.name: path.stat().st_mtime_ns for path in export.iterdir()} == before


@pytest.mark.usefixtures("final")
def test_figures_that_a_newer_trainer_has_reported_are_told_again(config: TrainerConfig, tmp_path: Path) -> None:
    told = TrainingProgress(step=6, total_steps=6, attempt=1, loss=0.5).model_dump(mode="json", by_alias=True)
    told["spent"]["invented"] = 1.0
    LocalStore(tmp_path / "store").put(STATUS_KEY, json.dumps(told).encode())

    assert again(config, tmp_path).progress.loss == 0.5


def damaged_config(export: Path) -> None:
    (export / "config.json").unlink()


def a_file_less(export: Path) -> None:
    (export / "model.safetensors").unlink()


def half_a_file(export: Path) -> None:
    (export / "model.safetensors").write_bytes(b"half")


@pytest.mark.usefixtures("final")
@pytest.mark.parametrize("harm", [damaged_config, a_file_less, half_a_file])
def test_an_export_that_is_not_whole_is_made_anew(
    config: TrainerConfig, tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    again(config, tmp_path)
    export = tmp_path / "store" / "export"
    whole = content(export)
    harm(export)
    again(config, tmp_path)
    assert content(export) == whole


@pytest.mark.usefixtures("final")
def test_a_model_of_an_earlier_checkpoint_of_the_same_name_is_not_this_run_s(
    config: TrainerConfig, source: Path, tmp_path: Path
) -> None:
    # Given a run whose checkpoints were removed after its export, and that was trained again
    again(config, tmp_path)
    export = tmp_path / "store" / "export"
    before = content(export)
    for folder in ("checkpoints", "attempts"):
        shutil.rmtree(tmp_path / "store" / folder)
    numbers = config.numbers().as_record()
    made = checkpoint(trained(source, seed=8), LocalStore(tmp_path / "store"), 6, numbers=numbers)
    assert made.id == CheckpointId(1, 6)

    again(config, tmp_path)

    changed = {name for name, raw in content(export).items() if raw != before[name]}
    assert changed == {"model.safetensors", EXPORT_RECORD}


def test_the_best_of_a_complete_run_is_exported_where_that_is_asked_for(
    config: TrainerConfig, source: Path, tmp_path: Path
) -> None:
    # Given a complete run whose last checkpoint is not its best, and one that nobody evaluated
    store, numbers = LocalStore(tmp_path / "store"), config.numbers().as_record()
    for step, loss in ((2, 1.5), (4, 1.25), (6, 1.75), (5, None)):
        checkpoint(trained(source, seed=step), store, step, numbers=numbers, metrics={"evalLoss": loss})
    found = {path.parent.name: path for path in (tmp_path / "store" / "checkpoints").glob("*/manifest.json")}
    best = next(name for name in found if name.startswith("step-00000004"))
    last = next(name for name in found if name.startswith("step-00000006"))
    assert Catalog(store).best() == Catalog(store).find(checkpoint_id(best) or CheckpointId(0, 0))
    done = Done(step=6, attempt=int(last[-5:]), best=best)
    store.put(DONE_KEY, done.model_dump_json(by_alias=True).encode())
    spec = config.spec.model_copy(update={"export": config.spec.export.model_copy(update={"checkpoint": "best"})})

    # When it is started again, then the best is what lies there, and with another word the last
    for chosen, step, folder in ((spec, 4, best), (config.spec, 6, last)):
        progress = again(config.model_copy(update={"spec": chosen}), tmp_path).progress
        assert progress.export is not None
        assert (progress.step, progress.export.step) == (6, step)
        assert json.loads((tmp_path / "store" / "export" / EXPORT_RECORD).read_text())["checkpoint"] == folder

    # Also where the word was written before there was a choice, and names none
    store.put(DONE_KEY, done.model_copy(update={"best": ""}).model_dump_json(by_alias=True).encode())
    progress = again(config.model_copy(update={"spec": spec}), tmp_path).progress
    assert progress.export is not None
    assert progress.export.step == 4
    assert json.loads((tmp_path / "store" / "export" / EXPORT_RECORD).read_text())["checkpoint"] == best

    # Of one that is gone, as its export is, no model can be made: not even beside a last one that is whole
    store.put(DONE_KEY, done.model_dump_json(by_alias=True).encode())
    shutil.rmtree(tmp_path / "store" / "export")
    shutil.rmtree(tmp_path / "store" / "checkpoints" / best)
    with pytest.raises(ConfigError, match=rf"neither its best checkpoint nor its export in .* can be used \({best}: "):
        again(config.model_copy(update={"spec": spec}), tmp_path)

    # And where none was evaluated the last one is the best
    assert Done(step=6, attempt=1).exported("best") == CheckpointId(1, 6)


@pytest.mark.usefixtures("final")
def test_when_all_is_gone_nothing_is_trained_in_silence(config: TrainerConfig, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "store" / "checkpoints")
    sentence = r"is complete since step 6, but neither its last checkpoint nor its export in .*/export can be used \(s"
    with pytest.raises(ConfigError, match=sentence):
        again(config, tmp_path)
    without = config.model_copy(update={"export_uri": None})
    with pytest.raises(ConfigError, match=r"but neither its last checkpoint can be used"):
        again(without, tmp_path)


@pytest.mark.usefixtures("final")
def test_an_export_of_bytes_that_are_damaged_is_refused_at_once(config: TrainerConfig, tmp_path: Path) -> None:
    (file,) = (tmp_path / "store" / "checkpoints").glob("step-00000006-*/*.bin")
    file.write_bytes(bytes(file.stat().st_size))
    sentence = r"complete since step 6, but its export in .*/export is missing, and the checkpoint .* damaged.*restore"
    with pytest.raises(ConfigError, match=sentence):
        again(config, tmp_path)


@pytest.mark.usefixtures("final")
def test_a_model_that_is_refused_to_the_export_is_no_outage_of_the_place(
    config: TrainerConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*_: object, **__: object) -> Path:
        raise AccessDeniedError("gated")

    monkeypatch.setattr(done_again, "localise", denied)
    with pytest.raises(AccessDeniedError) as raised, of_the_place():
        again(config, tmp_path)
    assert raised.value.outage is False


@pytest.mark.usefixtures("final")
def test_a_run_that_exports_nothing_ends_at_once(config: TrainerConfig, tmp_path: Path) -> None:
    progress = again(config.model_copy(update={"export_uri": None}), tmp_path).progress
    assert (progress.phase, progress.export) == (Phase.COMPLETE, None)
    assert not (tmp_path / "store" / "export").exists()


@pytest.mark.usefixtures("final")
def test_the_model_of_another_run_is_never_taken_away(config: TrainerConfig, tmp_path: Path) -> None:
    # Given the model of one run, and another run that is told to export to the same place
    again(config, tmp_path)
    before = content(tmp_path / "store" / "export")
    target = LocalStore(tmp_path / "store" / "export")
    other = config.model_copy(update={"job": config.job.model_copy(update={"name": "other"})})

    # Then it is refused before it trains, and before it exports
    sentence = (
        r"export holds the model of the run parity \(step-00000006-a00001\), which is not written over: name another"
    )
    with pytest.raises(ConfigError, match=sentence):
        check_storage(other, LocalStore(tmp_path / "store"), Reporter(tmp_path, writes=True))
    with pytest.raises(ConfigError, match=sentence):
        again(other, tmp_path)
    with pytest.raises(ConfigError, match="the run parity with other settings"):
        refuse_other_run(target, "parity", "0" * 64)
    assert content(tmp_path / "store" / "export") == before


def test_the_word_is_written_when_the_last_checkpoint_is_found_whole(
    config: TrainerConfig, final: Manifest, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(tmp_path / "store")
    store.delete([DONE_KEY])
    monkeypatch.setattr(Saving, "checkpoint_of", lambda self, step: CheckpointId(1, step))
    listener = DoneFile(store, Saving.__new__(Saving))

    listener.on_end(Ended(6, KeyboardInterrupt()), Control())
    assert read_done(store) is None
    listener.on_end(Ended(5), Control())
    assert read_done(store) is None, "there is no such checkpoint"
    listener.on_end(Ended(6), Control())
    assert read_done(store) == Done(step=6, attempt=1)

    # Also that it is the last because the run was stopped early
    run = {"stopped_early": "after step 4: no better", "metrics": {"evalLoss": 1.5}}
    checkpoint(trained(source), LocalStore(tmp_path / "early"), 4, **run)
    early = LocalStore(tmp_path / "early")
    DoneFile(early, Saving.__new__(Saving)).on_end(Ended(4), Control())
    assert read_done(early) == Done(
        step=4, attempt=1, stopped_early="after step 4: no better", best="step-00000004-a00001"
    )

    store.put(DONE_KEY, json.dumps({"version": 1}).encode())
    with pytest.raises(
        ConfigError, match=r"done\.json says that this run is complete, and cannot be used: it is no whole"
    ):
        read_done(store)
