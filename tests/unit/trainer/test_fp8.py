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
from sft_trainer.checkpoint.local import LocalStore
from sft_trainer.errors import ModelError
from sft_trainer.export.plan import plan_export
from sft_trainer.models.causal_lm import CausalLM, build_on_meta
from sft_trainer.models.digest import base_digest
from sft_trainer.models.tensors import whole_boxes
from sft_trainer.models.weights import load_weights, unread_tensors, untrained_tensors, weights_layout
from tests.exports import export, exported
from tests.parity.runs import manifest, resolve
from tests.unit.trainer.exporting import checkpoint
from tests.unit.trainer.test_models import build, save_model, stored_buffers
from tests.whole_models import change_config, save_whole

pytestmark = pytest.mark.usefixtures("process_group")

FILE = "model.safetensors"
QUANTISED = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
STATIC = {**QUANTISED, "activation_scheme": "static", "weight_block_size": None}
"""As Mistral publishes: a scale for each tensor."""
WEIGHTS = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "block_structure": None}


def compressed(strategy: str, **changed: Any) -> dict[str, Any]:
    """A quantization_config as llm-compressor writes it, with a scale for each ``strategy``."""
    groups = {"group_0": {"targets": ["Linear"], "weights": {**WEIGHTS, "strategy": strategy, **changed}}}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups}


UP = "model.layers.1.mlp.experts.up_proj.weight"
SIZES = {"hidden_size": 160, "intermediate_size": 300, "moe_intermediate_size": 136}
"""More than a block, and none of them whole ones."""
ENDS = {
    "fp8": ("_scale_inv", "activation_scale"),
    "compressed-tensors": ("_scale", "input_scale"),
}
"""How scales of weights are called behind their names, and those of activations in their layers."""


def in_fp8(value: torch.Tensor, shared: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values (rows, columns) in E4M3, scales in ``dtype`` and what they mean, with a scale for each that is ``shared``:
    a "block", "row" or "tensor"."""
    rows, columns = {"block": (128, 128), "row": (1, value.shape[1]), "tensor": tuple(value.shape)}[shared]
    counts = math.ceil(value.shape[0] / rows), math.ceil(value.shape[1] / columns)
    values, scales, meant = torch.empty(value.shape, dtype=torch.float8_e4m3fn), torch.empty(counts), value.clone()
    for row, column in torch.cartesian_prod(*map(torch.arange, counts)).tolist():
        at = slice(rows * row, rows * row + rows), slice(columns * column, columns * column + columns)
        scales[row, column] = scale = (value[at].abs().max() / 448).to(dtype).float()
        values[at] = (value[at] / scale).to(torch.float8_e4m3fn)
        meant[at] = values[at].float() * scale
    return values, scales.to(dtype), meant.bfloat16()


def _is_of_images(name: str) -> bool:
    return "vision" in name or "visual" in name


def quantise(
    folder: Path, dtype: torch.dtype = torch.float32, shared: str = "block", fields: dict[str, Any] = QUANTISED
) -> dict[str, torch.Tensor]:
    """Put the linear layers and experts of the model in ``folder`` in FP8, the rest in bf16; what all of it means."""
    meant, files = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    of_weights, of_activations = ENDS[fields["quant_method"]]
    for name, value in load_file(folder / "model.safetensors").items():
        if value.ndim != 2 or ".layers." not in name or name.endswith("mlp.gate.weight") or _is_of_images(name):
            files[name] = meant[name] = value if "correction" in name else value.bfloat16()
            continue
        files[name], scales, meant[name] = in_fp8(value, shared, dtype)
        if shared == "tensor":
            scales = scales.view(() if fields["quant_method"] == "fp8" else 1)
            files[f"{name.removesuffix('weight')}{of_activations}"] = torch.tensor(0.5)
        files[f"{name}{of_weights}"] = scales
    if shared == "tensor":
        files |= {"model.layers.0.self_attn.k_scale": torch.ones(1), "model.layers.0.self_attn.v_scale": torch.ones(1)}
    save_file(files, folder / "model.safetensors", {"format": "pt"})
    change_config(folder, quantization_config=fields, dtype="bfloat16")
    return meant


def loaded(path: Path) -> CausalLM:
    model = build_on_meta(path).to_empty(device="cpu")
    load_weights(whole_boxes(model), model.names, path)
    return model


@pytest.mark.parametrize(
    ("kind", "dtype", "shared", "fields"),
    [
        ("deepseek_v3", torch.float32, "block", QUANTISED),
        ("qwen3", torch.bfloat16, "block", QUANTISED),
        ("ministral3", torch.bfloat16, "tensor", STATIC),
        ("deepseek_v3", torch.bfloat16, "row", compressed("channel")),
        ("qwen3", torch.bfloat16, "tensor", compressed("tensor")),
        ("qwen3", torch.float32, "block", compressed("block", block_structure=[128, 128])),
    ],
)
def test_a_model_is_read_as_a_copy_of_it_in_bf16(
    tmp_path: Path, kind: str, dtype: torch.dtype, shared: str, fields: dict[str, Any]
) -> None:
    # Given a model in FP8, and what transformers reads of a copy
    from transformers import AutoModelForCausalLM

    save_model(kind, tmp_path / "copy", **SIZES)
    save_model(kind, tmp_path / "model", **SIZES)
    meant = quantise(tmp_path / "model", dtype, shared, fields)
    save_file(meant, tmp_path / "copy" / "model.safetensors", {"format": "pt"})
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


def test_what_older_files_say_elsewhere_is_read_alike(tmp_path: Path) -> None:
    save_model("qwen3", tmp_path, **SIZES)
    quantise(tmp_path, torch.bfloat16, "row", compressed("channel"))
    expected = {box.name: box.read() for box in whole_boxes(loaded(tmp_path))}
    config = json.loads((tmp_path / "config.json").read_text())
    config["compression_config"] = config.pop("quantization_config")
    (tmp_path / "config.json").write_text(json.dumps(config))

    model = loaded(tmp_path)

    assert all(torch.equal(box.read(), expected[box.name]) for box in whole_boxes(model))
    huggingface: Any = model.huggingface
    assert (model.read_as, hasattr(huggingface.config, "compression_config")) == ("fp8", False)


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


def test_scales_of_whole_tensors_are_read_as_transformers_reads_them(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    save_model("ministral3", tmp_path, **SIZES)
    quantise(tmp_path, torch.bfloat16, "tensor", STATIC)
    # On a CPU it has them in bf16
    expected = dict(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).named_parameters())

    huggingface: Any = loaded(tmp_path).huggingface

    for name, value in huggingface.named_parameters():
        assert torch.equal(value, expected[name].float()), name


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({**QUANTISED, "weight_block_size": [64, 64]}, "weight_block_size [64, 64]"),
        (compressed("block", block_structure=[64, 64]), "block_structure [64, 64]"),
        (compressed("group", type="int", num_bits=4), "weights of type 'int' in 4 bits"),
        (compressed("channel", symmetric=False), "weights of type 'float' in 8 bits with zero points"),
        (compressed("group"), "weights with a scale for each 'group'"),
        ({**compressed("channel"), "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config {'format':"),
        ({**compressed("channel"), "transform_config": {"config_groups": {"u": {}}}}, "transform_config {"),
        ({**compressed("channel"), "config_groups": None}, "config_groups None"),
    ],
)
def test_other_kinds_of_it_are_refused(tmp_path: Path, fields: dict[str, Any], words: str) -> None:
    save_model("qwen3", tmp_path, **SIZES)
    change_config(tmp_path, quantization_config=fields)
    with pytest.raises(ModelError, match=rf"are read, and not {re.escape(words)}.*\) .* not quantised, or remove"):
        build_on_meta(tmp_path)


@pytest.mark.parametrize(
    ("kind", "text", "shared", "fields"),
    [
        ("mistral3", {"model_type": "ministral3"}, "tensor", STATIC),
        ("qwen3_vl", {}, "row", compressed("channel")),
        ("qwen3_5", {}, "block", QUANTISED),
    ],
)
def test_of_a_model_of_images_and_texts_the_export_is_a_whole_one_in_bf16(
    tmp_path: Path, kind: str, text: dict[str, Any], shared: str, fields: dict[str, Any]
) -> None:
    # Given one in FP8, of which a layer of another part is too
    source, out, store = tmp_path / "model", tmp_path / "out", LocalStore(tmp_path / "store")
    save_whole(kind, source, hidden_size=160, **text)
    meant = quantise(source, torch.bfloat16, shared, fields)
    other = next(name for name in meant if _is_of_images(name) and meant[name].ndim == 2)
    tensors = load_file(source / FILE)
    tensors[other], scales, meant[other] = in_fp8(meant[other].float(), shared, torch.bfloat16)
    tensors[f"{other}{ENDS[fields['quant_method']][0]}"] = scales
    save_file(tensors, source / FILE, {"format": "pt"})

    # When nothing is trained of it
    ours = build(source)
    manifest = checkpoint(ours, store, base_digest=base_digest(build_on_meta(source), source))
    export(exported(store, manifest, source), LocalStore(out))

    # Then each tensor has what it means, in bf16, and no config says otherwise
    found = load_file(out / FILE)
    assert found.keys() == meant.keys()
    assert all(torch.equal(found[name], value.bfloat16()) for name, value in meant.items())
    assert all(value.dtype == torch.bfloat16 for value in found.values())
    config = json.loads((out / "config.json").read_text())
    assert "quantization_config" not in {**config, **config["text_config"]}
    assert config["dtype"] == "bfloat16"
    assert not unread_tensors(build_on_meta(source), source)


@pytest.mark.parametrize(
    ("kind", "shared", "ending"), [("qwen3_vl_moe", "block", "_scale"), ("mistral4", "tensor", "_scale_inv")]
)
def test_experts_that_are_stacked_have_scales_for_each(tmp_path: Path, kind: str, shared: str, ending: str) -> None:
    # As those of Mistral Small 4 are; the matrices of Qwen3-VL's are turned, too
    save_whole(kind, tmp_path, hidden_size=160, moe_intermediate_size=136)
    tensors, meant = load_file(tmp_path / FILE), dict[str, torch.Tensor]()
    names = [name for name in tensors if ".experts." in name]
    job = manifest(tmp_path, tmp_path.with_name("store"), model={"uri": f"file://{tmp_path}"}, lora={"rank": 4})
    plain = measure_trained(resolve(job).spec)
    for name in names:
        parts = zip(*(in_fp8(value, shared, torch.float32) for value in tensors.pop(name)), strict=True)
        tensors[name], tensors[f"{name}{ending}"], meant[name] = (torch.stack(part) for part in parts)
        tensors[f"{name}_activation_scale"] = torch.ones(len(meant[name]))
    save_file(tensors, tmp_path / FILE, {"format": "pt"})
    change_config(tmp_path, quantization_config=QUANTISED)

    model = loaded(tmp_path)

    files = {model.names.hub(box.name, box.shape)[0].name: box for box in whole_boxes(model)}
    for name in names:
        expected = meant[name].float()
        assert torch.equal(files[name].read(), expected.mT if kind == "qwen3_vl_moe" else expected), name
    assert not unread_tensors(build_on_meta(tmp_path), tmp_path)
    assert not [name for name, _, _ in untrained_tensors(build_on_meta(tmp_path), tmp_path).others if "scale" in name]
    assert isinstance(plain, Trained)
    assert measure_trained(resolve(job).spec) == plain


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
