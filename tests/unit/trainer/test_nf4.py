"""Weights in 4 bits: the same as bitsandbytes makes, and a base that is held so computes as one that was rounded so."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sft_trainer.errors import ConfigError
from sft_trainer.models import grouped_experts, nf4, packed_rows
from sft_trainer.models.causal_lm import build_on_meta
from sft_trainer.models.grouped_experts import grouped_linear
from sft_trainer.models.nf4 import NF4, linear, pack, unpacked
from sft_trainer.models.probe import check_trains_on
from sft_trainer.models.quantised import Nf4Linear, PackedBox, packed_weights
from sft_trainer.models.tensors import stored_tensors
from sft_trainer.preparation import _part_that_is_trained
from sft_trainer.strategies.fsdp import FsdpStrategy
from sft_trainer.trainable import trainable_of
from tests.parity.runs import manifest, resolve
from tests.tensors import gathered
from tests.unit.trainer.test_lora import BINS, TRAINED, filled, strategy
from tests.unit.trainer.test_models import save_model

pytestmark = pytest.mark.usefixtures("process_group")

WIDE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"attention_bias": True}),
    ("qwen3", {"tie_word_embeddings": True}),
    ("qwen2", {}),
    ("phi3", {}),
    ("gemma", {}),
    ("olmo2", {}),
    ("lfm2", {"layer_types": ["conv", "full_attention"]}),
    ("falcon_h1", {"mamba_d_head": 32, "mamba_d_ssm": 128}),
]
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 64, "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8}
MIXTURES: list[tuple[str, dict[str, Any]]] = [
    ("qwen3_moe", EXPERTS),
    ("gpt_oss", EXPERTS),
    ("mixtral", EXPERTS),
    ("olmoe", EXPERTS),
    ("flex_olmo", EXPERTS),
    ("granitemoe", EXPERTS),
    ("granitemoeshared", {**EXPERTS, "shared_intermediate_size": 64}),
    ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 64}),
    ("glm4_moe", EXPERTS),
    ("afmoe", EXPERTS),
    ("deepseek_v3", {**EXPERTS, "q_lora_rank": 64, "kv_lora_rank": 64, "qk_rope_head_dim": 16, "v_head_dim": 16}),
    ("minimax_m2", EXPERTS),
    ("gemma4_text", {**EXPERTS, "hidden_size_per_layer_input": 64}),
    ("lfm2_moe", {**EXPERTS, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1}),
    ("granitemoehybrid", {**EXPERTS, "shared_intermediate_size": 64, "mamba_d_head": 32}),
    ("nemotron_h", {**EXPERTS, "moe_shared_expert_intermediate_size": 64, "mamba_head_dim": 16}),
    (
        "qwen3_next",
        {**EXPERTS, "shared_expert_intermediate_size": 64, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
    ),
]


def weights(kind: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    drawn = torch.randn(96, 320, generator=generator) * 0.02
    if kind == "with odd blocks":
        drawn[0] = 0.0
        drawn[1, :64] = 0.5
        drawn[2] = -drawn[2].abs()
        drawn[3] *= 1e-36
        drawn[4] *= 1e36
        drawn[5, 1:] = 0.0
    if kind == "on the borders":
        values = drawn.new_tensor(nf4.VALUES)
        drawn[:, :64] = torch.cat([values, (values[:-1] + values[1:]) / 2, values, -values, values[:1]])
    return drawn.bfloat16() if kind == "in bf16" else drawn


KINDS = ["normal", "in bf16", "with odd blocks", "on the borders"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("at_once", [2**20, 700])
def test_the_bits_are_those_of_bitsandbytes(monkeypatch: pytest.MonkeyPatch, kind: str, at_once: int) -> None:
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    monkeypatch.setitem(packed_rows._AT_ONCE, "cpu", at_once)
    drawn = weights(kind)
    theirs, state = quantize_4bit(drawn.float(), blocksize=64, quant_type="nf4", compress_statistics=False)

    ours = pack(drawn)

    assert ours.shape == (96, 320 // 2 + 320 // 64 * 4)
    assert torch.equal(ours[:, :160].flatten(), theirs.flatten())
    assert torch.equal(ours[:, 160:].contiguous().view(torch.float32).flatten(), state.absmax)
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(unpacked(ours, dtype), dequantize_4bit(theirs, state).to(dtype))


def test_experts_are_what_bitsandbytes_makes_of_a_parameter_of_any_module() -> None:
    # As the card of an export says it
    from bitsandbytes.nn.parametrize import replace_parameter_4bit

    experts = torch.nn.Module()
    stacked = weights("normal").view(4, 24, 320)
    experts.gate_up_proj = torch.nn.Parameter(stacked.clone())
    replace_parameter_4bit(experts, "gate_up_proj", quant_type="nf4", blocksize=64)

    assert torch.equal(experts.gate_up_proj, unpacked(pack(stacked), torch.float32))


def test_what_was_rounded_once_is_not_rounded_again() -> None:
    rounded = unpacked(pack(weights("normal")), torch.float32)
    assert torch.equal(unpacked(pack(rounded), torch.float32), rounded)
    assert 0.01 < (rounded - weights("normal")).norm() / weights("normal").norm() < 0.12


def test_a_product_keeps_the_packed_weight_and_has_the_gradient_of_the_whole_one() -> None:
    packed, inputs = pack(weights("normal")).view(torch.float32), torch.randn(7, 320, requires_grad=True)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        output = linear(inputs, packed, torch.ones(96))
    (gradient,) = torch.autograd.grad(output.square().sum(), inputs)

    whole = unpacked(packed, torch.float32)
    expected = torch.nn.functional.linear(inputs, whole, torch.ones(96))
    assert torch.equal(output, expected)
    assert torch.equal(gradient, torch.autograd.grad(expected.square().sum(), inputs)[0])
    assert [each.nbytes for each in kept] == [96 * 320 * 9 // 16]


@pytest.mark.parametrize("transposed", [False, True])
def test_a_product_of_experts_keeps_the_packed_weights_too(transposed: bool) -> None:
    # Given experts of which one has no tokens
    whole = torch.randn(4, 128, 192)
    packed, inputs = pack(whole).view(torch.float32), torch.randn(9, 128 if transposed else 192, requires_grad=True)
    whole, ends = unpacked(packed, torch.float32), torch.tensor([2, 2, 5, 9], dtype=torch.int32)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        output = grouped_linear(inputs, packed, ends, turned=transposed, packed=NF4)
    (gradient,) = torch.autograd.grad(output.square().sum(), inputs)

    expected = grouped_linear(inputs, whole, ends, turned=transposed)
    assert torch.equal(output, expected)
    assert torch.equal(gradient, torch.autograd.grad(expected.square().sum(), inputs)[0])
    assert sum(each.nbytes for each in kept) <= packed.nbytes + ends.nbytes


def packed_in_files(model: Path) -> set[str]:
    """Names in the files of the model of the tensors that are held in 4 bits."""
    built = build_on_meta(model)
    shapes = {name: tuple(weight.shape) for name, weight in built.huggingface.named_parameters()}
    packed = packed_weights(built.huggingface, "nf4", lambda name: False)
    parts = [part for name in packed for part in built.names.parts(name, shapes[name])]
    return {tensor.name for part in parts for tensor in built.names.hub(part.name, part.shape)}


def rounded_copy(model: Path, to: Path) -> Path:
    """The model with those weights rounded that are held in 4 bits; all others are numbers of bf16 in both."""
    tensors = {name: value.bfloat16().float() for name, value in load_file(model / "model.safetensors").items()}
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    for name in packed_in_files(model):
        tensors[name] = unpacked(pack(tensors[name]), torch.float32)
    to.mkdir()
    for file in model.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    return to


def both(folder: Path, kind: str, lora: dict[str, Any], **options: Any) -> list[FsdpStrategy]:
    """A run whose base is in 4 bits, and one whose base was rounded so before."""
    training = {key: options.pop(key) for key in ("precision", "activationCheckpointing") if key in options}
    save_model(kind, folder / "model", **WIDE, **options)
    rounded_copy(folder / "model", folder / "rounded")
    held = filled(strategy(folder / "model", {"rank": 4, **lora, "basePrecision": "nf4"}, **training))
    before = filled(strategy(folder / "rounded", {"rank": 4, **lora}, **training))
    return [held, before]


@pytest.mark.parametrize(
    ("kind", "options", "precision", "activation_checkpointing"),
    [
        *((*FAMILIES[0], precision, how) for precision in ("fp32", "bf16") for how in ("none", "selective", "full")),
        *((*family, "bf16", "selective") for family in FAMILIES[1:]),
        *((*MIXTURES[0], precision, how) for precision in ("fp32", "bf16") for how in ("none", "selective", "full")),
        *((*mixture, "bf16", "selective") for mixture in MIXTURES[1:]),
    ],
)
def test_a_base_in_4_bits_computes_as_one_that_was_rounded_before(
    tmp_path: Path, kind: str, options: dict[str, Any], precision: str, activation_checkpointing: str
) -> None:
    lora = {"excludeModules": ["out_proj" if kind.startswith("lfm2") else "o_proj"], "dropout": 0.1}
    chosen = {"precision": precision, "activationCheckpointing": activation_checkpointing}

    runs = both(tmp_path, kind, lora, **options, **chosen)

    for _ in range(2):
        losses = [of.forward_backward(BINS, TRAINED) for of in runs]
        assert torch.equal(*losses)
        norms = [of.grad_norm() for of in runs]
        assert torch.equal(*map(gathered, norms))
        for of, norm in zip(runs, norms, strict=True):
            of.apply(1e-2, 1.0, norm, torch.tensor(True))
        assert torch.equal(*(of.forward_sums(BINS) for of in runs))


def test_only_linear_layers_are_packed_and_take_nine_sixteenths_of_a_byte(tmp_path: Path) -> None:
    save_model("qwen3", tmp_path, **WIDE, tie_word_embeddings=False)
    of = strategy(tmp_path, {"rank": 4, "basePrecision": "nf4", "targetModules": ["q_proj"]}, precision="bf16")
    held = {name: tensor for name, tensor in stored_tensors(of.model) if not name.endswith("lora_B.weight")}

    numbers = {name: p.numel() for name, p in build_on_meta(tmp_path).huggingface.named_parameters()}
    packed = {name for name in numbers if name.split(".")[-2].endswith("_proj")}
    assert len(packed) == 2 * 7
    for name in numbers:
        tensor = held[name]
        assert not tensor.requires_grad
        assert tensor.nbytes == numbers[name] * (9 / 16 if name in packed else 2)
    boxes = {box.name: box for box in of.boxes("base")}
    assert {name for name, box in boxes.items() if isinstance(box, PackedBox)} == packed
    # Boxes are those of the model, whatever is in them
    stored = load_file(tmp_path / "model.safetensors")
    for name, box in boxes.items():
        assert (box.shape, box.place.sizes) == (stored[name].shape, stored[name].shape)
        wanted = unpacked(pack(stored[name]), torch.float32) if name in packed else stored[name].bfloat16()
        assert torch.equal(box.read(), wanted)
    # Its layers are still linear ones
    kinds = {type(module) for module in of.model.modules() if isinstance(module, torch.nn.Linear)}
    assert Nf4Linear in kinds


def test_modules_that_are_trained_are_left_as_they_are(tmp_path: Path) -> None:
    save_model("llama", tmp_path, **WIDE)
    sections = {"lora": {"basePrecision": "nf4"}, "training": {"trainableModules": ["layers.1.mlp"]}}
    trainable = trainable_of(resolve(manifest(tmp_path, tmp_path.with_name("store"), **sections)))
    packed = trainable.packed(build_on_meta(tmp_path).huggingface)
    assert len(packed) == 14 - 3
    assert not any("layers.1.mlp" in name for name in packed)


def test_a_row_of_a_packed_weight_is_written_whole(tmp_path: Path) -> None:
    save_model("llama", tmp_path, **WIDE)
    of = strategy(tmp_path, {"rank": 4, "basePrecision": "nf4"})
    box = next(box for box in of.boxes("base") if isinstance(box, PackedBox))
    before, rows = box.read().clone(), torch.randn(3, box.shape[1])
    box.write(rows, type(box.place)((2, 0), (3, box.shape[1])))
    before[2:5] = unpacked(pack(rows), torch.float32)
    assert torch.equal(box.read(), before)


@pytest.mark.parametrize(
    ("kind", "options", "wrong"),
    [
        ("llama", {**WIDE, "intermediate_size": 96}, "layers.0.mlp.down_proj.weight have 96 weights: they must be"),
        ("qwen3_moe", {**WIDE, "moe_intermediate_size": 32}, "layers.0.mlp.experts.down_proj have 32 weights"),
    ],
)
def test_models_whose_weights_do_not_come_in_blocks_are_refused(
    tmp_path: Path, kind: str, options: dict[str, Any], wrong: str
) -> None:
    save_model(kind, tmp_path, **options)
    with pytest.raises(ConfigError, match=r"lora\.basePrecision is nf4") as refused:
        strategy(tmp_path, {"rank": 4, "basePrecision": "nf4"})
    assert wrong in str(refused.value)


@pytest.mark.parametrize(
    ("lora", "fits"),
    [
        ({"basePrecision": "fp32"}, True),
        ({"basePrecision": "nf4"}, False),
        ({"basePrecision": "fp32", "targetModules": ["experts"]}, False),
    ],
    ids=str,
)
def test_a_device_without_our_product_for_experts_is_found_out_about_before_data_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lora: dict[str, Any], fits: bool
) -> None:
    # Given one that has it for others
    def none(*_: Any, **__: Any) -> None:
        raise RuntimeError("only for compute capability 8.0")

    monkeypatch.setattr(grouped_experts, "grouped_mm", none)
    save_model("qwen3_moe", tmp_path, **WIDE, **EXPERTS)

    model = build_on_meta(tmp_path)
    _part_that_is_trained(model, resolve(manifest(tmp_path, tmp_path.with_name("store"), lora=lora)), ())
    refused = pytest.raises(ConfigError, match=r"qwen3_moe.* cannot be trained in fp32 .* only for compute capability")
    with nullcontext() if fits else refused:
        check_trains_on(model.huggingface, torch.device("cpu"), torch.float32)
