"""Weights in MXFP4: all values are those of transformers' own conversion, whole or in parts; others are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sft_trainer.boxes import WEIGHT, Box, Rectangle
from sft_trainer.errors import ConfigError, ModelError
from sft_trainer.models import mxfp4, packed_rows
from sft_trainer.models.causal_lm import CausalLM, build_on_meta
from sft_trainer.models.mxfp4 import dequantised
from sft_trainer.models.quantised import PackedBox
from sft_trainer.models.tensors import whole_boxes
from sft_trainer.models.weights import load_weights, weights_layout
from sft_trainer.preparation import _part_that_is_trained
from tests.live_bytes import LiveBytes
from tests.mxfp4 import pack, packed
from tests.parity.runs import manifest, resolve
from tests.tensors import gathered
from tests.unit.trainer.test_lora import BINS, TRAINED, filled, strategy
from tests.unit.trainer.test_models import save_model

pytestmark = pytest.mark.usefixtures("process_group")

GATE_UP = "model.layers.1.mlp.experts.gate_up_proj"


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.int16)


def test_every_pair_of_values_with_every_scale_is_that_of_transformers() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    # Given all bytes with all scales that are numbers
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).repeat(255, 1, 1, 1)
    scales = torch.arange(255, dtype=torch.uint8)[:, None, None].repeat(1, 1, 16)

    found = dequantised(blocks, scales)

    # Then they are the same bit by bit, and what the specification says where bf16 has such a number
    assert torch.equal(bits(found.transpose(1, 2)), bits(convert_moe_packed_tensors(blocks, scales)))
    sizes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    codes = torch.stack([blocks % 16, blocks // 16], -1).flatten(-3).long()
    exact = torch.cat([sizes, -sizes])[codes] * 2.0 ** (scales[..., :1].double() - 127)
    finite = exact.abs() < 2.0**128
    assert torch.equal(found.double()[finite], exact[finite])
    assert not found[~finite].isfinite().any()
    assert dequantised(blocks[:1], torch.full_like(scales[:1], 255)).isnan().all()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A gpt-oss whose experts are in MXFP4, blocks and scales of one weight in different files."""
    path = tmp_path_factory.mktemp("model")
    save_model("gpt_oss", path, hidden_size=64, intermediate_size=96)
    pack(path, files=3)
    return path


def loaded(path: Path) -> CausalLM:
    model = build_on_meta(path).to_empty(device="cpu")
    load_weights(whole_boxes(model), model.names, path)
    return model


def test_a_model_is_read_as_transformers_reads_it(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, Mxfp4Config

    expected = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=Mxfp4Config(dequantize=True)
    )

    model = loaded(folder)

    huggingface: Any = model.huggingface
    ours, theirs = dict(huggingface.named_parameters()), dict(expected.named_parameters())
    assert ours.keys() == theirs.keys()
    for name, parameter in theirs.items():
        assert torch.equal(ours[name], parameter.float()), name
    # It is exported in bf16, which holds all of it, by a config that says so
    assert model.stored_dtype == torch.bfloat16
    assert not hasattr(huggingface.config, "quantization_config")
    assert f"{GATE_UP} [4, 64, 192] MXFP4" in weights_layout(whole_boxes(model), model.names, folder)


@pytest.mark.parametrize(
    "ranges", [((1, 3), (5, 60), (7, 100)), ((0, 4), (32, 64), (0, 192)), ((3, 4), (0, 1), (1, 2))]
)
def test_a_process_reads_its_part_wherever_blocks_begin(folder: Path, ranges: tuple[tuple[int, int], ...]) -> None:
    model = loaded(folder)
    (whole,) = (box for box in whole_boxes(model) if box.name == GATE_UP)
    place = Rectangle(tuple(a for a, _ in ranges), tuple(b - a for a, b in ranges))
    mine = Box(whole.name, whole.kind, whole.shape, place, torch.full(place.sizes, torch.nan))

    load_weights([mine], model.names, folder)

    assert torch.equal(mine.read(), whole.read()[place.within(Rectangle.whole(whole.shape))])


def test_all_that_it_holds_is_packed_and_unpacked_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given blocks of random values with every scale, of zeros, and of one pair of values each; some rows at a time
    monkeypatch.setitem(packed_rows._AT_ONCE, "cpu", 1000)
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(256, (253, 4, 16), generator=generator, dtype=torch.uint8)
    blocks[7], blocks[8], blocks[9, 0] = 0, 0x88, 1
    blocks[:, 3] = torch.arange(253, dtype=torch.uint8)[:, None]
    scales = torch.arange(253, dtype=torch.uint8)[:, None].repeat(1, 4)
    values = dequantised(blocks, scales)
    assert values.isfinite().all()

    packed = mxfp4.pack(values.view(11, 23, 128))

    # Then they are the same, in 17 bytes for 32 of them
    assert packed.shape == (11, 23, 4 * 17)
    assert mxfp4.row_bytes(96) == 52
    assert mxfp4.columns_of(packed.view(torch.float32)) == 128
    for dtype in (torch.bfloat16, torch.float32):
        assert torch.equal(mxfp4.unpacked(packed.view(dtype), dtype).view(253, 128), values.to(dtype))
    # Others are rounded, each to what is nearest by the scale of its block
    odd = torch.tensor([7.9, 0.9, -5.1, 2.4]).repeat(8)
    assert mxfp4.unpacked(mxfp4.pack(odd[None]), torch.float32)[0, :4].tolist() == [8, 1, -6, 2]


def test_one_expert_at_a_time_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given the experts of one weight that are not looked up at once
    monkeypatch.setitem(packed_rows._AT_ONCE, "cpu", 64 * 96)
    shape = (16, 64, 96)
    values = torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    rows = torch.zeros((16, 96, mxfp4.row_bytes(64)), dtype=torch.uint8)
    box = PackedBox(GATE_UP, WEIGHT, shape, Rectangle.whole(shape), rows, False, mxfp4.MXFP4)

    with LiveBytes() as live:
        box.write(values)

    # Then less is there besides than all of them take, of which a GPU has no room for a copy
    assert live.most < values.nbytes
    assert torch.equal(box.read(), values.float())


def test_experts_that_are_held_so_compute_as_those_in_the_precision_of_the_run(folder: Path) -> None:
    # Given adapters beside them, and beside the same numbers as plain ones
    held, plain = (
        filled(strategy(folder, {"rank": 4, "basePrecision": base}, activationCheckpointing="selective"))
        for base in ("mxfp4", "fp32")
    )

    boxes = {box.name: box for box in held.boxes("base")}
    experts = {name: box for name, box in boxes.items() if isinstance(box, PackedBox)}
    assert {name.rpartition(".")[2] for name in experts} == {"gate_up_proj", "down_proj"}
    for box in plain.boxes("base"):
        assert (boxes[box.name].shape, boxes[box.name].place) == (box.shape, box.place)
        assert torch.equal(boxes[box.name].read(), box.read())
    held_bytes = sum(box.local.nbytes for box in experts.values())
    # Rows of the narrower weight are filled up by a byte
    assert held_bytes == 2 * 4 * (192 * 36 + 64 * 52)

    for _ in range(2):
        losses = [of.forward_backward(BINS, TRAINED) for of in (held, plain)]
        torch.testing.assert_close(*losses, rtol=1e-6, atol=0)
        norms = [of.grad_norm() for of in (held, plain)]
        torch.testing.assert_close(*map(gathered, norms), rtol=1e-5, atol=0)
        for of, norm in zip((held, plain), norms, strict=True):
            of.apply(1e-2, 1.0, norm, torch.tensor(True))


def test_what_is_not_in_it_is_refused_and_never_rounded(tmp_path: Path) -> None:
    lora = {"rank": 4, "basePrecision": "mxfp4"}
    save_model("qwen3_moe", tmp_path / "other")
    with pytest.raises(ConfigError, match="a model of type 'qwen3_moe' is not published in that: take nf4"):
        strategy(tmp_path / "other", lora)
    save_model("gpt_oss", tmp_path / "model", hidden_size=64, intermediate_size=96)
    with pytest.raises(ConfigError, match=r"gate_up_proj of the model is not: it would be rounded"):
        filled(strategy(tmp_path / "model", lora))
    save_model("gpt_oss", tmp_path / "narrow", hidden_size=48, head_dim=8, num_attention_heads=4)
    with pytest.raises(ConfigError, match=r"rows of .*gate_up_proj have 48 weights: they must be a multiple of 32"):
        strategy(tmp_path / "narrow", lora)
    # And by its config before that
    config = resolve(manifest(tmp_path / "model", tmp_path / "store", lora=lora))
    with pytest.raises(ConfigError, match=r"mxfp4, but file://.* is not: it would be rounded; take nf4, or bf16"):
        _part_that_is_trained(build_on_meta(tmp_path / "model"), config, ())


def test_rounding_in_these_tests_is_to_the_nearest() -> None:
    weight = torch.randn((2, 64, 6), generator=torch.Generator().manual_seed(0))
    blocks, scales = packed(weight)
    read = dequantised(blocks, scales).transpose(1, 2).float()
    assert (read - weight).norm() < 0.15 * weight.norm()
    assert torch.equal(dequantised(*packed(read)).transpose(1, 2).float(), read)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"_scales": None}, "lacks 1 of the .* tensors of the model, the first is '.*gate_up_proj_scales'"),
        ({"_blocks": None}, "lacks 1 of the .* tensors of the model, the first is '.*gate_up_proj'"),
        ({"_scales": lambda scales: scales[:, :-1]}, r"shape \(4, 191, 2\) .*are no weight in MXFP4"),
        ({"_blocks": lambda blocks: blocks[..., :8].contiguous()}, "are no weight in MXFP4"),
        ({"_blocks": lambda blocks: blocks.to(torch.int16)}, r"\(I16, U8\) are no weight in MXFP4"),
        ({"_scales": lambda scales: torch.full_like(scales, 255)}, "gate_up_proj' of the model holds NaN"),
        ({"_blocks": lambda b: b[:, :64], "_scales": lambda s: s[:, :64]}, r"has shape \(4, 64, 64\) in the file"),
    ],
)
def test_what_is_none_is_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    save_model("gpt_oss", tmp_path, hidden_size=64, intermediate_size=96)
    pack(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for leaf, changed in change.items():
        value = tensors.pop(f"{GATE_UP}{leaf}")
        if changed is not None:
            tensors[f"{GATE_UP}{leaf}"] = changed(value).contiguous()
    save_file(tensors, tmp_path / "model.safetensors")

    with pytest.raises(ModelError, match=words):
        loaded(tmp_path)


def test_plain_weights_beside_such_a_config_are_read_as_they_are(tmp_path: Path) -> None:
    reference = save_model("gpt_oss", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}}))

    huggingface: Any = loaded(tmp_path).huggingface

    wanted = dict(reference.named_parameters())
    assert all(torch.equal(value, wanted[name]) for name, value in huggingface.named_parameters())
