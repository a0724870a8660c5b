"""Runs that train some modules: what their checkpoints hold, how they go on, and what they export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sft_api.adapters import within
from tests.integration.checkpoint.test_lora_runs import Ended, fp32_copy, goes_on_exactly, logits, run

MODULES = ["layers.1.mlp", "model.norm", "layers.0.self_attn.q_proj"]


def some(modules: list[str], **training: Any) -> dict[str, Any]:
    return {"lora": None, "training": {"trainableModules": modules, **training}}


@pytest.mark.parametrize(
    ("processes", "shard", "others", "precision", "off"),
    [(2, None, 1, "fp32", 2e-5), (4, 2, 2, "fp32", 2e-5), (1, None, 2, "bf16", 2e-3)],
    ids=["sharded", "hybrid", "alone"],
)
def test_a_run_goes_on_exactly_and_its_checkpoints_hold_these_modules_only(
    tmp_path: Path, tiny_inputs: Any, processes: int, shard: int | None, others: int, precision: str, off: float
) -> None:
    sections = some(MODULES, precision=precision)
    resumed = goes_on_exactly(tmp_path, tiny_inputs, processes, shard, others, off, **sections)
    assert all(within(name, MODULES) for name in resumed.weights)
    assert len(resumed.weights) == 5


def test_the_export_is_the_whole_model(tmp_path: Path, tiny_inputs: Any) -> None:
    from transformers import AutoModelForCausalLM

    # Given a model in fp32, so that nothing is rounded
    model = fp32_copy(tiny_inputs.model, tmp_path / "model")
    ended = run(tmp_path / "run", tiny_inputs, 2, model={"uri": f"file://{model}"}, **some(MODULES))
    assert ended.error == ""

    # Then it has what was trained, and all else as it came, to the last bit
    folder = tmp_path / "run" / "store" / "export"
    exported, before = load_file(folder / "model.safetensors"), load_file(model / "model.safetensors")
    assert exported.keys() == before.keys()
    for name, value in exported.items():
        wanted = torch.from_numpy(ended.weights[name]) if name in ended.weights else before[name]
        assert torch.equal(value, wanted), name
    assert not any(torch.equal(exported[name], before[name]) for name in ended.weights)
    assert torch.isfinite(logits(AutoModelForCausalLM.from_pretrained(folder), tiny_inputs)).all()


@pytest.mark.parametrize("modules", [["layers.1.mlp", "model.norm"], ["embed_tokens"]], ids=["layers", "embeddings"])
def test_beside_adapters_they_are_exported_for_peft_and_merged(
    tmp_path: Path, tiny_inputs: Any, modules: list[str]
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = fp32_copy(tiny_inputs.model, tmp_path / "model")
    sections: dict[str, Any] = {
        "model": {"uri": f"file://{model}"},
        "lora": {"excludeModules": []},
        "training": {"trainableModules": modules},
    }
    ended = run(tmp_path / "run", tiny_inputs, 2, **sections)
    assert ended.error == ""
    folder = tmp_path / "run" / "store" / "export"

    # Given what was trained, put into the model by hand
    expected = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        for name, value in ended.weights.items():
            if name.endswith("lora_B.weight"):
                layer = name.removesuffix(".lora_B.weight")
                a, b = torch.from_numpy(ended.weights[f"{layer}.lora_A.weight"]), torch.from_numpy(value)
                expected.get_submodule(layer).weight += 12 / 3 * (b @ a)
            elif "lora_" not in name:
                expected.get_parameter(name).copy_(torch.from_numpy(value))
    wanted = logits(expected, tiny_inputs)

    # Then peft computes the same with the export, and so does the model of a merged one
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), str(folder))
    torch.testing.assert_close(logits(loaded, tiny_inputs), wanted, rtol=1e-5, atol=1e-5)
    assert run(tmp_path / "run", tiny_inputs, 2, **sections, export={"mergeAdapter": True}).error == ""
    merged = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.testing.assert_close(logits(merged, tiny_inputs), wanted, rtol=1e-5, atol=1e-5)


def test_another_run_begins_from_the_same_modules_only(tmp_path: Path, tiny_inputs: Any) -> None:
    def begun(name: str, origin: str, **sections: Any) -> Ended:
        resume = {"from": {"uri": f"file://{tmp_path}/{origin}/store"}}
        checkpoint = {"uri": f"file://{tmp_path}/{name}/store", "resume": resume}
        return run(tmp_path / name, tiny_inputs, 1, checkpoint=checkpoint, **sections)

    # Given a run that trained these modules, and one that trained all weights
    assert run(tmp_path / "some", tiny_inputs, 1, **some(MODULES, steps=2)).error == ""
    assert run(tmp_path / "all", tiny_inputs, 1, lora=None, training={"steps": 2}).error == ""

    # Then others begin with them where they mean the same there
    same_order = [*reversed(MODULES)]
    assert sorted(begun("again", "some", **some(same_order, steps=1)).losses) == [1]
    for name, origin, sections in (
        ("others", "some", some(["layers.1"], steps=1)),
        ("fewer", "all", some(MODULES, steps=1)),
        ("more", "some", {"lora": None, "training": {"steps": 1}}),
    ):
        refused = begun(name, origin, **sections)
        assert refused.losses == {}, name
        assert f"file://{tmp_path}/{origin}/store, which checkpoint.resume.from names, holds what" in refused.error
        assert "export that checkpoint (sft export" in refused.error

    adapters = begun("adapters", "some", training={"trainableModules": MODULES, "steps": 1})
    assert "holds some weights of a model, and this run trains adapters (lora) beside those of" in adapters.error

    # And with others the run itself is another one
    other = run(tmp_path / "some", tiny_inputs, 1, **some(["layers.1"], steps=2))
    assert "with other settings (training.trainableModules: " in other.error
    assert "checkpoint: {resume" not in other.error, "other modules cannot begin from these"


def test_a_name_that_no_module_has_is_refused_before_the_data_is_read(tmp_path: Path, tiny_inputs: Any) -> None:
    refused = run(tmp_path / "run", tiny_inputs, 1, **some(["layers.1", "q_prj"]))
    assert refused.error.startswith("ConfigError: training.trainableModules names 'q_prj', and no module")
    assert not list((tmp_path / "cache").rglob("*.arrow"))
