"""Models in FP8, in blocks that share a scale, as DeepSeek V3 is published."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sft_cli.trained import Trained, measure_trained
from sft_trainer.boxes import Box, Rectangle
from sft_trainer.errors import ModelError
from sft_trainer.export.plan import plan_export
from sft_trainer.models.causal_lm import CausalLM, build_on_meta
from sft_trainer.models.tensors import whole_boxes
from sft_trainer.models.weights import load_weights, unread_tensors, weights_layout
from tests.parity.runs import manifest, resolve
from tests.unit.trainer.test_models import save_model, stored_buffers

QUANTISED = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
UP = "model.layers.1.mlp.experts.up_proj.weight"
SIZES = {"hidden_size": 160, "intermediate_size": 300, "moe_intermediate_size": 136}
"""More than a block, and none of them whole ones."""


def quantise(folder: Path, dtype: torch.dtype = torch.float32, **changed: Any) -> dict[str, torch.Tensor]:
    """Put the linear layers and experts of the model in ``folder`` in FP8, the rest in bf16; what all of it means."""
    meant, files = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for name, value in load_file(folder / "model.safetensors").items():
        if value.ndim != 2 or ".layers." not in name or name.endswith("mlp.gate.weight"):
            files[name] = meant[name] = value if "correction" in name else value.bfloat16()
            continue
        blocks = [math.ceil(size / 128) for size in value.shape]
        scales = torch.empty(blocks)
        values, meant[name] = torch.empty(value.shape, dtype=torch.float8_e4m3fn), torch.empty(value.shape)
        for row, column in torch.cartesian_prod(*map(torch.arange, blocks)).tolist():
            at = slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128)
            scales[row, column] = scale = (value[at].abs().max() / 448).to(dtype).float()
            values[at] = (value[at] / scale).to(torch.float8_e4m3fn)
            meant[name][at] = values[at].float() * scale
        files |= {name: values, f"{name}_scale_inv": scales.to(dtype)}
        meant[name] = meant[name].bfloat16()
    save_file(files, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {**QUANTISED, **changed}}))
    return meant


def loaded(path: Path) -> CausalLM:
    model = build_on_meta(path).to_empty(device="cpu")
    load_weights(whole_boxes(model), model.names, path)
    return model


@pytest.mark.parametrize(("kind", "dtype"), [("deepseek_v3", torch.float32), ("qwen3", torch.bfloat16)])
def test_a_model_is_read_as_a_copy_of_it_in_bf16(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    # Given a model in FP8, and what transformers reads of a copy
    from transformers import AutoModelForCausalLM

    save_model(kind, tmp_path / "copy", **SIZES)
    save_model(kind, tmp_path / "model", **SIZES)
    save_file(quantise(tmp_path / "model", dtype), tmp_path / "copy" / "model.safetensors", {"format": "pt"})
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "copy", dtype=torch.float32)

    model = loaded(tmp_path / "model")

    # Then all of it is the same
    huggingface: Any = model.huggingface
    ours, theirs = ({**dict(each.named_parameters()), **stored_buffers(each)} for each in (huggingface, expected))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name
    # It is exported in bf16, by a config that says so, and nothing of the files is left over
    assert not hasattr(huggingface.config, "quantization_config")
    assert model.stored_dtype == torch.bfloat16
    dtypes = {entry.dtype for file in plan_export(model, model.stored_dtype).files for entry in file.entries}
    assert dtypes == {torch.bfloat16, *({torch.float32} if kind == "deepseek_v3" else ())}
    assert not unread_tensors(build_on_meta(tmp_path / "model"), tmp_path / "model")


@pytest.mark.parametrize(
    "ranges", [((1, 3), (5, 130), (7, 100)), ((0, 4), (128, 136), (120, 160)), ((3, 4), (0, 0), (1, 2))]
)
def test_a_process_reads_its_part_wherever_blocks_begin(tmp_path: Path, ranges: tuple[tuple[int, int], ...]) -> None:
    save_model("deepseek_v3", tmp_path, **SIZES)
    quantise(tmp_path)
    model = loaded(tmp_path)
    (whole,) = (box for box in whole_boxes(model) if box.name == UP)
    place = Rectangle(tuple(a for a, _ in ranges), tuple(b - a for a, b in ranges))
    mine = Box(whole.name, whole.kind, whole.shape, place, torch.full(place.sizes, torch.nan))

    load_weights([mine], model.names, tmp_path)

    assert torch.equal(mine.read(), whole.read()[place.within(Rectangle.whole(whole.shape))])
    assert f"{UP} [4, 136, 160] FP8" in weights_layout(whole_boxes(model), model.names, tmp_path)


def test_the_plan_counts_weights_and_not_their_scales(tmp_path: Path) -> None:
    save_model("deepseek_v3", tmp_path, **SIZES)
    spec = resolve(
        manifest(tmp_path, tmp_path.with_name("store"), model={"uri": f"file://{tmp_path}"}, lora={"rank": 4})
    ).spec
    plain = measure_trained(spec)
    assert isinstance(plain, Trained)
    quantise(tmp_path)
    assert measure_trained(spec) == plain


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"weight_block_size": None}, "None with 'dynamic'"),
        ({"weight_block_size": [64, 64]}, "[64, 64] with 'dynamic'"),
        ({"activation_scheme": "static"}, "[128, 128] with 'static'"),
    ],
)
def test_other_kinds_of_it_are_refused(tmp_path: Path, changed: dict[str, Any], words: str) -> None:
    save_model("qwen3", tmp_path, **SIZES)
    quantise(tmp_path, **changed)
    with pytest.raises(ModelError, match=rf"is read, and not {re.escape(words)}\) .* not quantised, or remove"):
        build_on_meta(tmp_path)


@pytest.mark.parametrize("what", ["scales of other blocks", "values in bf16", "no scales"])
def test_files_that_hold_something_else_are_refused(tmp_path: Path, what: str) -> None:
    save_model("qwen3", tmp_path, **SIZES)
    quantise(tmp_path)
    name, tensors = "model.layers.0.self_attn.o_proj.weight", load_file(tmp_path / "model.safetensors")
    if what == "scales of other blocks":
        tensors[f"{name}_scale_inv"] = torch.ones(3, 3)
    elif what == "values in bf16":
        tensors[name] = tensors[name].bfloat16()
    else:
        del tensors[f"{name}_scale_inv"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(
        ModelError, match=rf"{name}.* (are no weight in FP8|stored as F8_E4M3).* give the model in bf16"
    ):
        loaded(tmp_path)
