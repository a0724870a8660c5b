"""Before a run starts from nothing in the platform's store, the places of its name beside it are named."""

from pathlib import Path

import pytest

from sft_api.checkpoints import CheckpointId
from sft_api.numbers import Numbers
from sft_api.place import folder_name
from sft_api.trainer_config import TrainerConfig
from sft_trainer.checkpoint.store import Store
from sft_trainer.errors import AccessDeniedError
from sft_trainer.siblings import told_of_siblings
from tests.parity.runs import manifest, resolve

UID = "0b5c8f2e-1a2b-4c3d-8e9f-001122334455"


def saved(store: Store, folder: str, *steps: int) -> None:
    """Committed checkpoints in the place ``folder`` of ``store``."""
    for step in steps:
        store.put(f"{folder}/{CheckpointId(1, step).manifest_key}", b"{}")


def job(store: Store, folder: str | None = None) -> TrainerConfig:
    config = resolve(manifest(Path("/inputs"), Path("/store")))
    folder = folder or folder_name("parity", config.numbers())
    return config.model_copy(update={"checkpoint_uri": f"{store.uri}/{folder}"})


def test_places_of_other_numbers_and_of_earlier_versions_are_named(store: Store) -> None:
    other = f"parity-{'0' * 16}"
    saved(store, other, 10, 20)
    saved(store, f"parity-{UID}", 7)
    saved(store, "parity-two-0123456789abcdef", 5)  # of another name
    store.put(f"parity-{'1' * 16}/run.json", b"{}")  # nothing was saved there

    (told,) = told_of_siblings(job(store), lambda uri: store)

    parent = store.uri
    assert told.startswith(
        "this run starts from the model; there are checkpoints of jobs of this name with other settings"
    )
    assert (
        f"in {parent}/{other} (step 20), {parent}/parity-{UID} (step 7): to go on as one of them, restore its settings"
        in told
    )


def test_nothing_is_said_where_there_is_nothing_or_where_the_user_has_chosen(store: Store) -> None:
    config = job(store)
    store.put("notes.txt", b"mine")
    saved(store, config.checkpoint_uri.rpartition("/")[2], 3)
    assert told_of_siblings(config, lambda uri: store) == []
    saved(store, f"parity-{UID}", 3)
    assert len(told_of_siblings(config, lambda uri: store)) == 1
    assert told_of_siblings(job(store, "chosen"), lambda uri: store) == []


def test_who_may_not_list_is_not_stopped(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object) -> None:
        raise AccessDeniedError("s3:ListBucket")

    monkeypatch.setattr(type(store), "list", denied)
    assert told_of_siblings(job(store), lambda uri: store) == []


def test_the_name_of_a_place_follows_from_name_and_numbers() -> None:
    one = Numbers({"model.uri": "hf://org/model", "data.train": [{"uri": "hf://org/data"}]})
    assert folder_name("tiny", one) == f"tiny-{one.digest[:16]}"
    assert folder_name("tiny", Numbers({**one.values, "training.seed": 1})) != folder_name("tiny", one)
