"""Runs with adapters: what their checkpoints hold, how they go on, and what they export."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sft_api.checkpoints import Manifest
from sft_api.ports import free_port
from sft_api.trainer_config import TrainerConfig
from sft_trainer.checkpoint.catalog import Catalog
from sft_trainer.checkpoint.index_reading import open_index
from sft_trainer.checkpoint.local import LocalStore
from sft_trainer.distributed import Ranks
from sft_trainer.errors import StopRequested, TrainingError
from sft_trainer.models.lora import is_adapter
from sft_trainer.models.nf4 import pack, unpacked
from sft_trainer.models.quantised import packed_weights
from sft_trainer.trainer import Trainer
from tests.integration.checkpoint import ranks
from tests.integration.checkpoint.test_frozen_base import Ended, Watching, same
from tests.parity.mixtures import make_mixture
from tests.parity.runs import manifest, resolve
from tests.tensors import gathered
from tests.wider import wider_model

LORA: dict[str, Any] = {"rank": 3, "alpha": 12, "excludeModules": ["0.mlp.down_proj"]}
OF_EXPERTS: dict[str, Any] = {"targetModules": ["all-linear", "experts"], "expertRank": 2, "excludeModules": []}
STEPS = 4


def train(config: TrainerConfig, folder: Path, last: int | None, rank: int, size: int, port: int) -> Ended:
    """One process of a run up to its end, or up to step ``last``, with the weights of all that is trained, whole."""
    os.environ["SFT_CACHE_DIR"] = str(folder.parent / "cache")
    watching = Watching(last)
    run_dir = folder / f"run-{rank}"
    run_dir.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(config, Ranks(rank, rank, size, size, "127.0.0.1", port, "0"), run_dir, [watching])
    try:
        trainer.run()
    except StopRequested:
        assert last is not None
    except TrainingError as error:
        return Ended(watching.losses, {}, f"{type(error).__name__}: {error}")
    # A run that was complete already has made nothing
    model = trainer.prepared.model.blueprint if hasattr(trainer, "prepared") else None
    trained = {
        name: gathered(parameter.detach()).numpy()
        for name, parameter in (model.huggingface.named_parameters() if model else ())
        if parameter.requires_grad
    }
    return Ended(watching.losses, trained, "")


def run(
    folder: Path, inputs: Any, processes: int = 1, *, shard: int | None = None, last: int | None = None, **sections: Any
) -> Ended:
    """A run of ``processes`` in ``folder``, which goes on there if it can."""
    base: dict[str, Any] = {
        "model": {"uri": f"file://{inputs.model}"},
        "lora": LORA,
        "data": {
            "train": [{"uri": f"file://{inputs.train}", "split": "train[:60]"}],
            "eval": [{"uri": f"file://{inputs.eval}", "split": "train[:10]", "name": "held-out"}],
            "maxLength": 256,
        },
        "training": {
            "steps": STEPS,
            "globalBatchTokens": 1536,
            "maxTokensPerMicroBatch": 256,
            "optimizer": {"learningRate": 1e-2},
        },
    }
    if shard is not None:
        base["strategy"] = {"fsdp": {"shardDegree": shard}}
    for section, fields in sections.items():
        base[section] = None if fields is None else {**base.get(section, {}), **fields}
    base = {section: fields for section, fields in base.items() if fields is not None}
    config = resolve(manifest(folder, folder / "store", processes=processes, **base))
    port = free_port()
    started = [ranks.start(train, config, folder, last, rank, processes, port, rank=rank) for rank in range(processes)]
    first, *others = ranks.answers(started)
    assert all(other.error == first.error and other.losses == first.losses for other in others)
    return first


def newest(folder: Path) -> Manifest:
    found = next(Catalog(LocalStore(folder / "store")).candidates())
    assert isinstance(found, Manifest)
    return found


def goes_on_exactly(
    folder: Path, inputs: Any, processes: int, shard: int | None, others: int, off: float, **sections: Any
) -> Ended:
    """A run that was stopped in the middle and goes on, on as many processes and, within ``off``, on ``others``.

    What it trains is all that its checkpoint holds, in 12 bytes a parameter: its value and its moments.
    """
    # Given a run to its end, and one that was stopped in the middle
    # A step that is made of whole micro-batches on either number of processes
    sections["training"] = {"globalBatchTokens": 1024 if shard else 1536, **sections["training"]}
    undisturbed = run(folder / "undisturbed", inputs, processes, shard=shard, **sections)
    assert undisturbed.error == ""
    assert undisturbed.losses[STEPS] < undisturbed.losses[1]
    assert not run(folder / "stopped", inputs, processes, shard=shard, last=2, **sections).error

    # When that goes on, on as many processes and on others
    shutil.copytree(folder / "stopped", folder / "others")
    resumed = run(folder / "stopped", inputs, processes, shard=shard, **sections)
    resharded = run(folder / "others", inputs, others, **sections)

    # Then it is the same to the last bit, and elsewhere but for rounding
    assert (resumed.error, resharded.error) == ("", "")
    assert resumed.losses == {step: undisturbed.losses[step] for step in (3, 4)}
    assert same(resumed, undisturbed)
    assert resharded.losses == pytest.approx(resumed.losses, rel=off)

    # And its checkpoint holds what is trained, and nothing else
    found = newest(folder / "stopped")
    index, _ = open_index(LocalStore(folder / "stopped" / "store"), found)
    assert {tensor.name for tensor in index.tensors} == resumed.weights.keys()
    size = 4 * sum(value.size for value in resumed.weights.values())
    assert found.kinds == {"weight": size, "exp_avg": size, "exp_avg_sq": size}
    assert sum(file.size for file in found.files) == 3 * size
    assert found.run.updates == STEPS
    assert found.run.metrics["evalLoss"] is not None
    return resumed


def wide_model(inputs: Any, folder: Path, kind: str) -> Path:
    """One whose rows are whole blocks of 64 weights, dense without a ``kind``."""
    if not kind:
        return wider_model(inputs.model, folder / "model")
    return make_mixture(inputs.model.parent, folder / "mixture", kind, width=64) / "model"


@pytest.mark.parametrize(
    ("processes", "shard", "others", "lora", "precision", "off"),
    [
        (2, None, 1, {"dropout": 0.2}, "fp32", 2e-5),
        (4, 2, 2, {"rank": 1, "basePrecision": "bf16"}, "fp32", 2e-5),
        # Its base is none of FSDP's parameters, and that of two processes is
        (1, None, 2, {}, "bf16", 2e-3),
        (4, 2, 1, {"basePrecision": "nf4", "useDora": True}, "fp32", 2e-5),
        (1, None, 3, {"basePrecision": "nf4"}, "bf16", 2e-3),
        # Of four experts the third of three processes has none
        (3, None, 1, {"basePrecision": "nf4", "excludeModules": [], "kind": "qwen3_moe"}, "fp32", 2e-5),
        (1, None, 3, {"basePrecision": "mxfp4", "excludeModules": [], "kind": "gpt_oss"}, "bf16", 2e-3),
        (3, None, 1, {**OF_EXPERTS, "kind": "qwen3_moe"}, "fp32", 2e-5),
        (1, None, 2, {**OF_EXPERTS, "basePrecision": "mxfp4", "kind": "gpt_oss"}, "bf16", 2e-3),
    ],
    ids=[
        "sharded",
        "hybrid",
        "alone",
        "magnitudes, hybrid in 4 bits",
        "alone in 4 bits",
        "experts in 4 bits",
        "experts as published",
        "adapters of experts",
        "adapters of experts as published",
    ],
)
def test_a_run_goes_on_exactly_and_its_checkpoints_hold_adapters_only(
    tmp_path: Path,
    tiny_inputs: Any,
    processes: int,
    shard: int | None,
    others: int,
    lora: dict[str, Any],
    precision: str,
    off: float,
) -> None:
    lora = {**lora}
    kind = lora.pop("kind", "")
    sections: dict[str, Any] = {"lora": lora, "training": {"precision": precision}}
    if kind or "4" in lora.get("basePrecision", ""):
        sections["model"] = {"uri": f"file://{wide_model(tiny_inputs, tmp_path, kind)}"}
    resumed = goes_on_exactly(tmp_path, tiny_inputs, processes, shard, others, off, **sections)
    assert all(is_adapter(name) for name in resumed.weights)


def logits(model: Any, inputs: Any) -> torch.Tensor:
    ids = torch.arange(20).reshape(1, 20) + 5
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=ids).logits
    return found


def test_exports_are_what_peft_and_transformers_load(tmp_path: Path, tiny_inputs: Any) -> None:
    from peft import AutoPeftModelForCausalLM, PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # Given a model in fp32, so that nothing is rounded, and a run that exports adapters
    model = fp32_copy(tiny_inputs.model, tmp_path / "model")
    sections: dict[str, Any] = {"model": {"uri": f"file://{model}"}}
    ended = run(tmp_path / "run", tiny_inputs, 2, **sections)
    assert ended.error == ""
    folder = tmp_path / "run" / "store" / "export"
    assert {file.name for file in folder.iterdir()} >= {"adapter_config.json", "adapter_model.safetensors", "README.md"}
    assert not (folder / "config.json").exists()
    assert not list(folder.glob("model*"))

    # Then transformers computes with them what was trained
    expected = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    untouched = logits(expected, tiny_inputs)
    with torch.no_grad():
        for name, value in ended.weights.items():
            if name.endswith("lora_B.weight"):
                layer = name.removesuffix(".lora_B.weight")
                a, b = torch.from_numpy(ended.weights[f"{layer}.lora_A.weight"]), torch.from_numpy(value)
                expected.get_submodule(layer).weight += 12 / 3 * (b @ a)
    wanted = logits(expected, tiny_inputs)
    assert (wanted - untouched).abs().max() > 0.01
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), str(folder))
    torch.testing.assert_close(logits(loaded, tiny_inputs), wanted, rtol=1e-5, atol=1e-5)
    theirs = {name: p.numel() for name, p in loaded.named_parameters() if "lora_" in name}
    assert sum(theirs.values()) == sum(value.size for value in ended.weights.values())
    # By its folder alone, too: it names the model, and has the tokenizer with its template
    whole = AutoPeftModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    torch.testing.assert_close(logits(whole, tiny_inputs), wanted, rtol=1e-5, atol=1e-5)
    assert AutoTokenizer.from_pretrained(folder).chat_template

    # And when the same run is asked for the merged model, nothing is trained: the whole model takes their place
    merged = run(tmp_path / "run", tiny_inputs, 2, **sections, export={"mergeAdapter": True})
    assert (merged.error, merged.losses) == ("", {})
    assert not list(folder.glob("adapter*"))
    torch.testing.assert_close(
        logits(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), tiny_inputs),
        wanted,
        rtol=1e-5,
        atol=1e-5,
    )
    # And once more the adapters; what is there already is not written again
    assert run(tmp_path / "run", tiny_inputs, 2, **sections).error == ""
    assert not (folder / "config.json").exists()
    assert not list(folder.glob("model*"))
    before = (folder / "adapter_model.safetensors").stat().st_mtime_ns
    assert run(tmp_path / "run", tiny_inputs, 1, **sections).error == ""
    assert (folder / "adapter_model.safetensors").stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("kind", "base", "dtype", "off"),
    [
        ("", "nf4", "float32", 1e-5),
        ("", "nf4", "bfloat16", 0.1),
        ("qwen3_moe", "nf4", "float32", 1e-5),
        ("granitemoe", "nf4", "float32", 1e-5),
        # From files in MXFP4
        ("gpt_oss", "nf4", "bfloat16", 0.1),
        ("gpt_oss", "mxfp4", "bfloat16", 0.1),
    ],
)
def test_what_is_merged_into_a_base_in_4_bits_is_what_was_trained(
    tmp_path: Path, tiny_inputs: Any, kind: str, base: str, dtype: str, off: float
) -> None:
    from transformers import AutoModelForCausalLM

    # Given a run beside a model in 4 bits, whose files have fp32 whatever its configuration says
    model = wide_model(tiny_inputs, tmp_path, kind)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "dtype": dtype}))
    lora = {"basePrecision": base, "excludeModules": ["0.self_attn.o_proj" if kind else "0.mlp.down_proj"]}
    sections: dict[str, Any] = {"model": {"uri": f"file://{model}"}, "lora": lora}
    ended = run(tmp_path / "run", tiny_inputs, 2, **sections, export={"mergeAdapter": True})
    assert ended.error == ""

    # Then in the whole model that it exports all weights are those that were trained with: rounded, and added to
    expected = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    whole = logits(expected, tiny_inputs)
    packed = packed_weights(expected, "nf4", lambda name: False)
    with torch.no_grad():
        for name in packed:
            weight = expected.get_parameter(name)
            if base == "nf4":
                weight.copy_(unpacked(pack(weight), torch.float32))
            if (b := ended.weights.get(name.replace("weight", "lora_B.weight"))) is not None:
                a = ended.weights[name.replace("weight", "lora_A.weight")]
                weight += 12 / 3 * (torch.from_numpy(b) @ torch.from_numpy(a))
    wanted = logits(expected, tiny_inputs)
    assert (wanted - whole).abs().max() > 2 * off
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "store" / "export")
    assert str(exported.dtype) == f"torch.{dtype}"
    # One layer has no adapter, and is rounded all the same
    alone = next(name for name in packed if "down_proj" in name)
    assert torch.equal(exported.get_parameter(alone), expected.get_parameter(alone).to(exported.dtype))
    torch.testing.assert_close(logits(exported.float(), tiny_inputs), wanted, rtol=off, atol=off)


def fp32_copy(model: Path, to: Path) -> Path:
    shutil.copytree(model, to)
    tensors = load_file(to / "model.safetensors")
    save_file({name: value.float() for name, value in tensors.items()}, to / "model.safetensors", {"format": "pt"})
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**config, "dtype": "float32", "torch_dtype": "float32"}))
    return to


def test_another_base_than_the_run_started_from_is_refused(tmp_path: Path, tiny_inputs: Any) -> None:
    # Given a run that was stopped, and a model that is another one since then
    model = fp32_copy(tiny_inputs.model, tmp_path / "model")
    sections: dict[str, Any] = {"model": {"uri": f"file://{model}"}}
    assert not run(tmp_path / "run", tiny_inputs, 2, last=2, **sections).error
    before = (model / "model.safetensors").read_bytes()
    tensors = load_file(model / "model.safetensors")
    save_file({name: value * 2 for name, value in tensors.items()}, model / "model.safetensors", {"format": "pt"})

    # When it goes on, it is refused in words before anything is trained
    refused = run(tmp_path / "run", tiny_inputs, 1, **sections)
    assert refused.losses == {}
    assert f"all else comes from the model in file://{model}, which is not the one beside" in refused.error

    # And with the model that it was it goes on; with other adapters it is another run
    (model / "model.safetensors").write_bytes(before)
    other = run(tmp_path / "run", tiny_inputs, 1, **sections, lora={"alpha": 3})
    assert "belongs to the run parity with other settings (lora.alpha: 12 -> 3)" in other.error
    assert "to go on after its step" not in other.error, "other adapters cannot begin from these"
    assert sorted(run(tmp_path / "run", tiny_inputs, 2, **sections).losses) == [3, 4]


@pytest.mark.parametrize(("kind", "lora"), [("", {}), ("qwen3_moe", OF_EXPERTS)], ids=["layers", "experts"])
def test_a_run_begins_from_the_adapters_of_another(
    tmp_path: Path, tiny_inputs: Any, kind: str, lora: dict[str, Any]
) -> None:
    # Given a run with a constant rate
    constant = {"schedule": {"type": "constant"}}
    model = wide_model(tiny_inputs, tmp_path, kind) if kind else tiny_inputs.model
    sections: dict[str, Any] = {"model": {"uri": f"file://{model}"}, "lora": lora}
    first = run(tmp_path / "first", tiny_inputs, 2, **sections, training={**constant, "steps": 2})
    assert first.error == ""

    def begun(name: str, what: str, processes: int, **others: Any) -> Ended:
        origin = {"resume": {"from": {"uri": f"file://{tmp_path}/first/store", "what": what}}}
        checkpoint = {"uri": f"file://{tmp_path}/{name}/store", **origin}
        return run(tmp_path / name, tiny_inputs, processes, checkpoint=checkpoint, **{**sections, **others})

    # When others begin from it, with everything or with its adapters only
    whole = run(tmp_path / "whole", tiny_inputs, 2, **sections, training=constant)
    longer = begun("longer", "everything", 2, training=constant)
    # Experts have no dropout
    otherwise = {} if kind else {"lora": {"dropout": 0.1}}
    again = begun("again", "weights", 1, training={**constant, "seed": 7, "steps": 1}, **otherwise)

    # Then the one goes on as if the first had been longer, the other begins at step 1 with what was learnt
    assert (longer.error, again.error) == ("", "")
    assert longer.losses == {step: whole.losses[step] for step in (3, 4)}
    assert same(longer, whole)
    assert sorted(again.losses) == [1]
    started = newest(tmp_path / "again").run.model_extra or {}
    assert started["first_eval_loss"] is None


@pytest.mark.parametrize(
    ("kind", "lora"), [("", {"basePrecision": "nf4"}), ("qwen3_moe", OF_EXPERTS)], ids=["in 4 bits", "experts"]
)
def test_a_run_begins_with_what_another_exported(
    tmp_path: Path, tiny_inputs: Any, kind: str, lora: dict[str, Any]
) -> None:
    # Given a run that exported its adapters, and another that names them
    model = wide_model(tiny_inputs, tmp_path, kind)
    sections: dict[str, Any] = {"model": {"uri": f"file://{model}"}, "lora": lora}
    first = run(tmp_path / "first", tiny_inputs, 1, **sections, training={"steps": 2})
    assert first.error == ""
    exported = tmp_path / "first" / "store" / "export"
    sections["lora"] = {**lora, "adapterUri": f"file://{exported}"}
    sections["training"] = {"evaluation": {"beforeTraining": True}}

    # When that begins, on other processes, is stopped, and goes on
    stopped = run(tmp_path / "second", tiny_inputs, 3, **sections, last=2)
    resumed = run(tmp_path / "second", tiny_inputs, 1, **sections)

    # Then it evaluates before its first step as the other one at its end, and goes on from its own checkpoint
    assert (stopped.error, resumed.error) == ("", "")
    assert (sorted(stopped.losses), sorted(resumed.losses)) == ([1, 2], [3, 4])
    before = (newest(tmp_path / "second").run.model_extra or {})["first_eval_loss"]
    assert before == pytest.approx(newest(tmp_path / "first").run.metrics["evalLoss"], rel=1e-6)
    assert resumed.losses[4] < stopped.losses[1]

    # And who changes its steps is told how to go on from there, where these adapters are named no more
    longer = run(tmp_path / "second", tiny_inputs, 1, **{**sections, "training": {"steps": 9}})
    assert "to go on after its step 4 as another run" in longer.error
    assert longer.error.endswith("what: everything}}}, without lora.adapterUri")
