"""A run that begins from a checkpoint of another run: which one that is, over every store, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sft_api.checkpoints import CheckpointId
from sft_api.place import ORIGIN_FIELD
from sft_api.trainer_config import TrainerConfig
from sft_trainer import origin as module
from sft_trainer.boxes import WEIGHT
from sft_trainer.checkpoint.errors import NoUsableCheckpointError
from sft_trainer.checkpoint.local import LocalStore
from sft_trainer.checkpoint.manager import CheckpointManager
from sft_trainer.checkpoint.store import Store
from sft_trainer.errors import ConfigError
from sft_trainer.origin import Origin
from tests.integration.checkpoint.managers import Tensors, a_file_of, save, started, state
from tests.parity.runs import manifest, resolve
from tests.unit.checkpoint.boxed import whole

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def other(store: Store, monkeypatch: pytest.MonkeyPatch) -> Store:
    """The place of another run."""
    monkeypatch.setattr(module, "store_at", lambda uri, config: store)
    return store


def run(other: Store, *, step: int | None = None, what: str = "weights", **sections: Any) -> TrainerConfig:
    """The configuration of a run that begins there."""
    job = manifest(Path("/inputs"), Path("/mine"), **sections)
    spec = {"uri": "s3://bucket/other", "what": what, **({} if step is None else {"step": step})}
    job["spec"]["checkpoint"]["resume"] = {"from": spec}
    return resolve(job)


def begins(config: TrainerConfig, pin: str | None = None) -> Origin:
    found = Origin.of(config, {} if pin is None else {ORIGIN_FIELD: pin})
    assert found is not None
    return found


def theirs(store: Store, *steps: int, **sections: Any) -> CheckpointManager:
    """Checkpoints of another run."""
    numbers = resolve(manifest(Path("/inputs"), Path("/theirs"), **sections)).numbers().as_record()
    manager = started(store)
    for step in steps:
        save(manager, step, numbers=numbers)
    return manager


def weight(rows: int = 50, name: str = "model.weight") -> Tensors:
    return {name: torch.full((rows, 20), -1.0)}


def read(origin: Origin, tmp_path: Path, tensors: Tensors, total_steps: int = 100) -> CheckpointId:
    """Fill ``tensors``, the weights of this run, which saves elsewhere."""
    manager = started(LocalStore(tmp_path / "mine"))

    class Reads:
        def begin_from(self, *arguments: Any, goes_on: bool) -> Any:
            return manager.load_from(*arguments)

    boxes = whole(tensors, WEIGHT)
    return origin.read(Reads(), boxes, lambda run: None, total_steps).id  # type: ignore[arg-type]


def test_the_newest_is_taken_once_and_read_only(other: Store, tmp_path: Path) -> None:
    # Given another run, which this one has begun from
    theirs(other, 10, 20)
    config = run(other)
    pin = str(begins(config).pin())
    tensors = weight()

    # When that run saves another one, and this one starts again before it has saved anything
    theirs(other, 30)
    before = [(entry.key, entry.size) for entry in other.list("")]
    taken = read(begins(config, pin=pin), tmp_path, tensors)

    # Then it begins from the same, and nothing was written there
    assert taken == CheckpointId(1, 20)
    assert torch.equal(tensors["model.weight"], state(20)["weight"])
    assert [(entry.key, entry.size) for entry in other.list("")] == before
    assert begins(config).find().step == 30, "the next run begins from the newer one"


def test_a_step_can_be_named(other: Store) -> None:
    theirs(other, 10, 20)
    assert begins(run(other, step=10)).find().step == 10
    with pytest.raises(ConfigError, match=r"holds no checkpoint of step 15: name another step \(there are 10, 20\)"):
        begins(run(other, step=15)).find()


def test_without_a_usable_checkpoint_there_is_nothing_to_begin_from(other: Store) -> None:
    with pytest.raises(ConfigError, match=r"holds no checkpoint: name the checkpoint.uri of a run that has saved"):
        begins(run(other)).find()
    theirs(other, 10)
    other.delete([a_file_of(other, CheckpointId(1, 10))])
    with pytest.raises(
        ConfigError, match=r"holds no checkpoint that can be used \(step-00000010-a00001: .* is missing"
    ):
        begins(run(other)).find()


def test_what_the_run_began_from_must_still_be_what_it_was(other: Store) -> None:
    theirs(other, 10)
    config = run(other)
    pin = str(begins(config).pin())
    key = CheckpointId(1, 10).manifest_key
    original = other.read(key)
    other.put(key, original + b" ")
    with pytest.raises(ConfigError, match="is not the checkpoint that this run began from, its manifest is another"):
        begins(config, pin=pin).find()
    other.delete([key])
    with pytest.raises(ConfigError, match=r"that this run began from cannot be used .* saved none of its own yet"):
        begins(config, pin=pin).find()
    with pytest.raises(ConfigError, match=r"its revision of checkpoint.resume.from is no checkpoint: step-1"):
        begins(config, pin="step-1").find()


def test_everything_needs_the_same_data_and_a_later_end(other: Store, tmp_path: Path) -> None:
    theirs(other, 10, training={"seed": 7})
    sentence = r"goes on after a step of the same data, .* other settings \(training.seed: 7 -> 42\): restore these, or"
    with pytest.raises(ConfigError, match=sentence):
        begins(run(other, what="everything")).find()
    assert begins(run(other)).find().step == 10, "weights may be trained on any data"

    # Other steps and another learning rate decide nothing about a position
    same = run(other, what="everything", training={"seed": 7, "steps": 20, "optimizer": {"learningRate": 1e-2}})
    assert read(begins(same), tmp_path, weight(), total_steps=11).step == 10
    sentence = "that of step 10, while this run ends with step 10: give it more training.steps"
    with pytest.raises(ConfigError, match=sentence):
        read(begins(same), tmp_path, weight(), total_steps=10)


@pytest.mark.parametrize(
    ("tensors", "sentence"),
    [
        (weight(rows=49), r"shape \[50, 20\] and float32 in the checkpoint, \[49, 20\] and float32 in this run"),
        ({"model.weight": weight()["model.weight"].half()}, r"float32 in the checkpoint, \[50, 20\] and float16 in"),
        ({**weight(), **weight(name="model.more")}, "the checkpoint has no .*model.more"),
        (weight(name="model.bias"), "the checkpoint has .*model.weight.*, which the model of this run has not"),
    ],
    ids=["shape", "dtype", "smaller model", "larger model"],
)
def test_another_model_is_refused_with_what_differs(
    other: Store, tmp_path: Path, tensors: Tensors, sentence: str
) -> None:
    theirs(other, 10)
    with pytest.raises(ConfigError, match=sentence):
        read(begins(run(other)), tmp_path, tensors)


def test_damaged_bytes_are_found_and_no_other_checkpoint_is_taken_instead(other: Store, tmp_path: Path) -> None:
    theirs(other, 10, 20)
    key = a_file_of(other, CheckpointId(1, 20))
    raw = bytearray(other.read(key))
    raw[5] ^= 1
    other.put(key, bytes(raw))
    with pytest.raises(NoUsableCheckpointError, match=r"cannot begin from step-00000020-a00001: .* do not match their"):
        read(begins(run(other)), tmp_path, weight())


@pytest.mark.parametrize("what", ["weights", "everything"])
@pytest.mark.parametrize(
    ("saved", "begun", "sentence"),
    [
        (
            {},
            {"lora": {"rank": 4}},
            r"holds all weights of a model, and this run trains adapters \(lora\) beside those",
        ),
        (
            {"lora": {"rank": 4}},
            {},
            r"holds adapters \(lora\), and this run trains all weights: export that checkpoint",
        ),
        (
            {"lora": {"rank": 4, "alpha": 8}},
            {"lora": {"rank": 4}},
            r"holds other adapters \(lora.alpha: 8 -> 4\): restore these, or export that checkpoint with export.merge",
        ),
        (
            {"lora": {"rank": 4}},
            {"lora": {"rank": 4, "targetModules": ["q_proj"]}},
            r'holds other adapters \(lora.targetModules: \["all-linear"\] -> \["q_proj"\]\)',
        ),
        (
            {"lora": {"rank": 4, "expertRank": 2, "targetModules": ["experts"]}},
            {"lora": {"rank": 4, "targetModules": ["experts"]}},
            r"holds other adapters \(lora.expertRank: 2 -> not set\)",
        ),
    ],
)
def test_values_of_adapters_mean_something_for_the_same_adapters_only(
    other: Store, what: str, saved: dict[str, Any], begun: dict[str, Any], sentence: str
) -> None:
    theirs(other, 10, **saved)
    with pytest.raises(ConfigError, match=sentence):
        begins(run(other, what=what, **begun)).find()
    assert begins(run(other, what=what, **saved)).find().step == 10


@pytest.mark.parametrize(("saved", "begun"), [("int8", "fp32"), ("fp32", "int8"), ("bf16", "int8")])
def test_moments_in_8_bits_are_gone_on_with_as_they_are(other: Store, saved: str, begun: str) -> None:
    theirs(other, 10, training={"optimizer": {"stateDtype": saved}})
    other_dtype = {"training": {"optimizer": {"stateDtype": begun}}}
    with pytest.raises(
        ConfigError, match=rf"in {saved}, which is not converted to the {begun} of .*: set that to {saved}"
    ):
        begins(run(other, what="everything", **other_dtype)).find()
    assert begins(run(other, **other_dtype)).find().step == 10, "weights have new ones"
    same = {"training": {"optimizer": {"stateDtype": saved, "learningRate": 1e-3}}}
    assert begins(run(other, what="everything", **same)).find().step == 10


def test_the_state_of_another_optimizer_is_not_gone_on_with(other: Store) -> None:
    muon = {"training": {"optimizer": {"type": "muon"}}}
    theirs(other, 10)
    with pytest.raises(
        ConfigError, match=r"has that of adamw, of which none of muon is made: set training.optimizer.type to adamw, or"
    ):
        begins(run(other, what="everything", **muon)).find()
    assert begins(run(other, **muon)).find().step == 10, "weights have a new one"


def test_adapters_that_are_dropped_otherwise_begin_anew(other: Store) -> None:
    theirs(other, 10, lora={"rank": 4})
    assert begins(run(other, lora={"rank": 4, "dropout": 0.1})).find().step == 10
    with pytest.raises(ConfigError, match=r"other settings \(lora.dropout: 0 -> 0.1\): restore these, or name what:"):
        begins(run(other, what="everything", lora={"rank": 4, "dropout": 0.1})).find()
