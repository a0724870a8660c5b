"""A checkpoint is gone on from by the run that made it, whichever version of the trainer that was, and by no other."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from sft_api.checkpoints import CheckpointId, Manifest, RunState, StoredIndex, encode_manifest
from sft_api.numbers import Numbers
from sft_api.trainer_config import TrainerConfig
from sft_api.v1alpha1 import SFTJob
from sft_trainer.checkpoint.local import LocalStore
from sft_trainer.errors import ConfigError
from sft_trainer.place import look
from sft_trainer.storage import check_same_base

GOLDEN = Path(__file__).parents[1] / "api" / "numbers_v1"
BEFORE_VERSION_1: dict[str, Any] = json.loads((GOLDEN / "before_v1.json").read_text())
UID = "run"


def config(name: str, store: LocalStore) -> TrainerConfig:
    job = SFTJob.from_manifest(yaml.safe_load((GOLDEN / f"{name}.yaml").read_text()))
    return TrainerConfig.resolve(job, uid=UID, default_checkpoint_uri=store.uri)


def checkpoint(folder: Path, numbers: dict[str, Any], step: int = 10) -> LocalStore:
    """A store with one committed checkpoint without tensors, of a run with ``numbers``."""
    store = LocalStore(folder, uri=f"file://{folder}")
    manifest = Manifest(
        step=step, attempt=1, job_uid=UID, world_size=1, created=datetime.now(UTC),
        run=RunState(numbers=numbers), files=(),
        index=StoredIndex(name="index.idx", size=0, sha256="0" * 64, tensors=0),
    )  # fmt: skip
    store.put(f"{manifest.id.prefix}index.idx", b"")
    store.put(CheckpointId(1, step).manifest_key, encode_manifest(manifest))
    return store


def test_the_run_itself_goes_on(tmp_path: Path) -> None:
    spec = config("sources", LocalStore(tmp_path, uri="file:///c")).spec
    store = checkpoint(tmp_path, Numbers.of(spec).as_record())

    look(config("sources", store), store)


def test_other_numbers_are_refused_with_both_values(tmp_path: Path) -> None:
    store = checkpoint(tmp_path, {"version": 1, "values": {"model.uri": "hf://org/model", "data.train": [
        {"uri": "hf://org/data"}], "training.seed": 7, "lora.rank": 32}})  # fmt: skip

    with pytest.raises(ConfigError) as caught:
        look(config("smallest", store), store)

    assert str(caught.value) == (
        f"{store.uri} holds checkpoints of a run with other settings (lora.rank: 32 -> not set, training.seed: 7 -> "
        "42): give this run another metadata.name or checkpoint.uri, or restore the settings"
    )


@pytest.mark.parametrize("name", ["sources", "unpacked-open"])
def test_a_checkpoint_of_before_version_1_is_gone_on_from(tmp_path: Path, name: str) -> None:
    store = checkpoint(tmp_path, BEFORE_VERSION_1[name])

    look(config(name, store), store)
    with pytest.raises(ConfigError, match=r"other settings \(data\..* -> .*\)"):
        look(config("rows", store), store)


def test_numbers_of_a_later_version_are_no_damage_but_cannot_be_compared(tmp_path: Path) -> None:
    store = checkpoint(tmp_path, {"version": 2, "values": {}})

    sentence = r"written in version 2, this program knows version 1; go on with the version of the trainer that wrote"
    with pytest.raises(ConfigError, match=sentence):
        look(config("smallest", store), store)


def test_a_checkpoint_that_names_no_settings_is_refused(tmp_path: Path) -> None:
    store = checkpoint(tmp_path, {})

    with pytest.raises(ConfigError, match="it is not recorded with which settings they were made"):
        look(config("smallest", store), store)


def test_a_base_that_is_needed_must_be_the_one_that_is_recorded() -> None:
    check_same_base("hf://org/model", "a" * 64, "a" * 64)
    for recorded, words in (("b" * 64, "bbbbbbbbbbbbbbbb"), ("", "not recorded")):
        with pytest.raises(
            ConfigError, match=f"in hf://org/model, .* its digest was {words} and is aaaaaaaaaaaaaaaa; "
        ):
            check_same_base("hf://org/model", recorded, "a" * 64)
