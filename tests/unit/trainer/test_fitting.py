"""What the trainer does with a run that does not fit its GPU, before it loads a weight."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sft_api.layers import with_added_tokens
from sft_api.memory import Sizes, estimate, sizes_of
from sft_api.memory_needed import staging
from sft_api.memory_remedies import remedies
from sft_api.model_config import shape_of
from sft_trainer import trainer
from sft_trainer.errors import ConfigError
from sft_trainer.models.causal_lm import build_on_meta
from sft_trainer.models.lora import add_adapters
from sft_trainer.models.trained_rows import add_rows
from sft_trainer.muon import MOMENTUM
from sft_trainer.strategies.fitting import check_fits
from sft_trainer.strategies.fsdp import FsdpStrategy, fitting
from sft_trainer.strategies.fsdp.fitting import estimate_blueprint, sizes_seen
from sft_trainer.strategies.megatron.fitting import estimate_blueprint as estimate_stage
from sft_trainer.topology import ALONE
from sft_trainer.trainable import trainable_of
from tests.mxfp4 import QUANTISED
from tests.parity.runs import manifest, resolve
from tests.unit.trainer.test_models import save_model

pytestmark = pytest.mark.usefixtures("process_group")

CPU = torch.device("cpu")
IN_BLOCKS = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 16}
"""Rows of whole blocks of 64 weights."""


@dataclass
class Device:
    has: int

    def total(self) -> int:
        return self.has

    def allocated(self) -> int:
        return 0

    most_allocated = available = allocated


def check(folder: Path, share: float, **spec: Any) -> int:
    """Check a model on a device of which it takes so much; bytes that it takes."""
    save_model("qwen3", folder, tie_word_embeddings=True)
    config = resolve(manifest(folder, folder.with_name("store"), **spec))
    blueprint, trainable = build_on_meta(folder), trainable_of(config)
    taken = estimate_blueprint(config, blueprint, trainable)
    check_fits(config, blueprint, round(taken.total / share), CPU, lambda: taken, tells=True)
    return taken.total


def test_what_takes_more_than_110_percent_is_refused_for_good(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"it does not fit: .* of each GPU's .* would be taken"):
        check(tmp_path, 1.15)
    check(tmp_path, 1.15, compute={"memoryCheck": "Warn"})


def test_what_may_not_fit_is_warned_of_and_what_fits_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="sft_trainer"):
        check(tmp_path, 0.95)
        check(tmp_path, 0.5)

    told = [(record.levelname, record.message.split(":")[0]) for record in caplog.records]
    reckoned = ("INFO", "memory of the first steps, as reckoned")
    assert told == [reckoned, ("WARNING", "it may not fit"), reckoned]


def test_of_a_model_without_a_formula_remedies_are_told_without_numbers(tmp_path: Path) -> None:
    # Given the number of its parameters, of which nothing follows of what its layers keep
    save_model("arcee", tmp_path)
    config = resolve(manifest(tmp_path, tmp_path.with_name("store"), model={"parameters": "9B"}))
    blueprint = build_on_meta(tmp_path)
    taken = estimate_blueprint(config, blueprint, trainable_of(config))

    with pytest.raises(ConfigError) as refusal:
        check_fits(config, blueprint, round(taken.total / 1.15), CPU, lambda: taken, tells=True)

    # Then what makes layers keep less is told, beside the rest
    told = str(refusal.value).partition("several of: ")[2].partition(". Where")[0].split(", ")
    assert told[:3] == [
        "training.activationCheckpointing: selective",
        "training.activationCheckpointing: full",
        "2 GPUs in compute",
    ]
    assert "data.maxLength: 256" in told
    assert not any("Gi" in words for words in told)


@pytest.mark.parametrize("packed", [True, False])
def test_experts_are_said_to_fit_as_they_are_published_where_they_are_so(tmp_path: Path, packed: bool) -> None:
    # Given the config of a gpt-oss with many experts
    save_model("gpt_oss", tmp_path, **IN_BLOCKS)
    written = json.loads((tmp_path / "config.json").read_text())
    written |= {"num_local_experts": 32768, **({"quantization_config": QUANTISED} if packed else {})}
    (tmp_path / "config.json").write_text(json.dumps(written))
    config = resolve(manifest(tmp_path, tmp_path.with_name("store"), lora={"rank": 4}))
    blueprint, trainable = build_on_meta(tmp_path), trainable_of(config)
    add_adapters(blueprint.huggingface, config.spec.lora, ())
    taken = estimate_blueprint(config, blueprint, trainable)

    with pytest.raises(ConfigError) as refusal:
        check_fits(config, blueprint, round(taken.total / 1.15), CPU, lambda: taken, tells=True)

    # Then a copy with plain weights is rounded
    assert f"lora.basePrecision: {'mxfp4' if packed else 'nf4'} (" in str(refusal.value)


def test_rows_of_added_tokens_are_counted_once_in_what_remedies_leave(tmp_path: Path) -> None:
    # Given a config with wide rows, of which a run adds far more than there are
    save_model("qwen3", tmp_path, vocab_size=64, **IN_BLOCKS)
    written = json.loads((tmp_path / "config.json").read_text()) | {"hidden_size": 65536}
    (tmp_path / "config.json").write_text(json.dumps(written))
    shape = shape_of(written)
    tokens = [f"<{number}>" for number in range(1000)]
    model = {"uri": f"file://{tmp_path}", "addedTokens": tokens}
    config = resolve(manifest(tmp_path, tmp_path.with_name("store"), model=model))
    blueprint = build_on_meta(tmp_path, None, range(64, 64 + len(tokens)))
    taken = estimate_blueprint(config, blueprint, trainable_of(config))
    gpu = round(taken.total / 1.15)

    with pytest.raises(ConfigError) as refusal:
        check_fits(config, blueprint, gpu, CPU, lambda: taken, tells=True)

    # Then it is told what the operator tells, by the model's files
    assert remedies(config.spec, config.plan, shape, gpu) in str(refusal.value)


def test_a_stage_that_does_not_fit_is_refused_too(tmp_path: Path) -> None:
    save_model("qwen3", tmp_path)
    gpus = {"compute": {"gpusPerNode": 2, "processesPerNode": 2}, "strategy": {"megatron": {"tensorParallelDegree": 2}}}
    config, blueprint = resolve(manifest(tmp_path, tmp_path.with_name("store"), **gpus)), build_on_meta(tmp_path)
    taken = estimate_stage(config, blueprint)

    with pytest.raises(ConfigError, match=r"it does not fit: .* of each GPU's .* would be taken"):
        check_fits(config, blueprint, round(taken.total / 1.15), CPU, lambda: taken, tells=True)


@pytest.mark.parametrize(("saved", "verdict"), [(False, "Refuse"), (True, "Warn")])
def test_what_has_been_trained_before_is_not_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: bool, verdict: str
) -> None:
    built: list[Any] = []
    monkeypatch.setattr(trainer, "build", lambda config, *_: built.append(config))
    save_model("qwen3", tmp_path / "model")
    job = manifest(tmp_path / "model", tmp_path / "store", compute={"gpusPerNode": 1})
    ranks: Any = SimpleNamespace(rank=0, local_rank=0, local_world_size=1, world_size=1)
    run: Any = trainer.Trainer(resolve(job), ranks, tmp_path)
    run.device = CPU
    run.prepared = SimpleNamespace(model=SimpleNamespace(blueprint=build_on_meta(tmp_path / "model")))
    run.saving = SimpleNamespace(anything_saved=lambda: saved)

    run._build()

    assert [config.spec.compute.memory_check for config in built] == [verdict]


def test_what_cannot_be_followed_is_trained_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def lost(*_: Any) -> Any:
        raise RuntimeError("an operator without a fake")

    taken = check(tmp_path, 0.5)
    monkeypatch.setattr(fitting, "track_blocks", lost)
    config = resolve(manifest(tmp_path, tmp_path.with_name("store")))
    with caplog.at_level(logging.INFO, logger="sft_trainer"):
        FsdpStrategy(config, build_on_meta(tmp_path), trainable_of(config), ALONE, CPU, Device(taken // 9))

    assert "could not be reckoned" in caplog.text


def sizes(
    folder: Path, modules: list[str], lora: dict[str, Any] | None, added: Sequence[str] = ()
) -> tuple[Sizes, Sizes]:
    """Of the model in ``folder``, to whose tokens, as many as it has rows, some are ``added``: as it is and by its
    shape."""
    sections: dict[str, Any] = {"lora": lora} if lora else {}
    if added:
        sections["model"] = {"uri": f"file://{folder}", "addedTokens": [*added]}
    if modules:
        sections["training"] = {"trainableModules": modules}
    config = resolve(manifest(folder, folder.with_name("store"), **sections))
    shape = shape_of(json.loads((folder / "config.json").read_text()))
    assert shape is not None
    new = range(shape.vocabulary, shape.vocabulary + len(added))
    blueprint = build_on_meta(folder, None, new)
    huggingface: Any = blueprint.huggingface
    if config.spec.lora:
        add_adapters(huggingface, config.spec.lora, modules)
        if tokens := len(config.spec.tokens_with_rows):
            add_rows(blueprint, range(new.stop - tokens, new.stop), modules)
    return sizes_seen(blueprint, trainable_of(config)), sizes_of(with_added_tokens(shape, config.spec), config.spec)


@pytest.mark.parametrize("lora", [None, {"rank": 4}, {"rank": 4, "basePrecision": "nf4"}])
@pytest.mark.parametrize(
    "modules",
    [[], ["layers.1"], ["embed_tokens"], ["model.norm", "layers.1.mlp"], ["layers.1.mlp", "lm_head", "embed_tokens"]],
)
@pytest.mark.parametrize("tied", [False, True])
def test_sizes_are_those_of_the_shape(tmp_path: Path, tied: bool, modules: list[str], lora: Any) -> None:
    save_model("qwen3", tmp_path, tie_word_embeddings=tied, **IN_BLOCKS)
    seen, reckoned = sizes(tmp_path, modules, lora)

    assert seen == reckoned


@pytest.mark.parametrize("lora", [None, {"rank": 4}, {"rank": 4, "trainableTokens": ["a", "b"]}])
@pytest.mark.parametrize("modules", [[], ["layers.1"], ["embed_tokens"], ["lm_head", "embed_tokens"]])
@pytest.mark.parametrize("tied", [False, True])
def test_so_are_those_with_added_tokens(tmp_path: Path, tied: bool, modules: list[str], lora: Any) -> None:
    save_model("qwen3", tmp_path, tie_word_embeddings=tied, vocab_size=100, **IN_BLOCKS)
    seen, reckoned = sizes(tmp_path, modules, lora, added=("<a>", "<b>", "<c>"))

    assert seen == reckoned
    assert seen.vocabulary == 128


@pytest.mark.parametrize("modules", [[], ["layers.1.mlp.experts"], ["q_proj", "lm_head"]])
@pytest.mark.parametrize(
    ("kind", "base"), [*((kind, "nf4") for kind in ("qwen3_moe", "gpt_oss", "mixtral", "olmoe")), ("gpt_oss", "mxfp4")]
)
def test_sizes_of_a_mixture_in_4_bits_are_those_of_the_shape(
    tmp_path: Path, kind: str, base: str, modules: list[str]
) -> None:
    save_model(kind, tmp_path, moe_intermediate_size=64, num_experts=8, num_local_experts=8, **IN_BLOCKS)
    seen, reckoned = sizes(tmp_path, modules, {"rank": 4, "basePrecision": base})

    assert (seen.packed, seen.packed_block) == (reckoned.packed, reckoned.packed_block)
    assert seen.in_blocks == reckoned.in_blocks
    assert seen.packed_matrix == reckoned.packed_matrix == 8 * 128 * 64 * (1 if kind == "qwen3_moe" else 2)


@pytest.mark.parametrize(
    ("optimizer", "moment"),
    [({"stateDtype": "int8"}, "exp_avg_exponents"), ({"type": "muon"}, MOMENTUM)],
    ids=["int8", "muon"],
)
@pytest.mark.parametrize("lora", [None, {"rank": 64, "expertRank": 4, "targetModules": ["all-linear", "experts"]}])
@pytest.mark.parametrize("kind", ["qwen2", "phi3", "olmo2", "qwen3_moe", "gpt_oss"])
def test_moments_that_are_smaller_take_what_is_reckoned_to_the_byte(
    tmp_path: Path, kind: str, lora: Any, optimizer: dict[str, Any], moment: str
) -> None:
    # Given biases, norms of heads, routers, and matrices whose rows are no whole blocks
    save_model(kind, tmp_path, moe_intermediate_size=96, num_experts=8, num_local_experts=8, **IN_BLOCKS)
    if lora and kind not in ("qwen3_moe", "gpt_oss"):
        lora = {"rank": 64}
    sections = {"training": {"optimizer": optimizer}, **({"lora": lora} if lora else {})}
    config = resolve(manifest(tmp_path, tmp_path.with_name("store"), **sections))
    blueprint = build_on_meta(tmp_path)
    huggingface: Any = blueprint.huggingface
    shape = shape_of(huggingface.config.to_dict())
    assert shape is not None
    if config.spec.lora:
        add_adapters(huggingface, config.spec.lora, [])
    reckoned = estimate(shape, config.spec, config.plan)

    strategy = FsdpStrategy(config, blueprint, trainable_of(config), ALONE, CPU)

    moments = strategy.boxes("optimizer")
    assert sum(box.local.nbytes for box in moments) == reckoned.optimizer
    assert {box.kind for box in moments} >= {moment}
    assert staging(config.spec, shape) == sum(box.local.nbytes for box in [*strategy.boxes("trained"), *moments])
