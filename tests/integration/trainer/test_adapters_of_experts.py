"""Adapters beside the stacked weights of experts: their steps, and their exports, beside those of peft."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sft_api.adapters import OF_EXPERTS
from sft_api.v1alpha1 import LoraSpec
from sft_trainer.boxes import WEIGHT, Box, Rectangle
from sft_trainer.checkpoint import pieces
from sft_trainer.checkpoint.local import LocalStore
from sft_trainer.export import values
from sft_trainer.export.forms import Adapters
from sft_trainer.models.causal_lm import build_on_meta
from sft_trainer.models.digest import base_digest
from sft_trainer.models.experts import PROVEN
from sft_trainer.models.lora import initialize_adapters
from sft_trainer.models.nf4 import pack, unpacked
from sft_trainer.models.quantised import packed_weights
from sft_trainer.preparation import _part_that_is_trained, prepare_model
from sft_trainer.reporting import Reporter
from sft_trainer.strategies.fsdp import FsdpStrategy
from sft_trainer.versions import of_texts
from tests import mxfp4
from tests.adapters_of_peft import as_here, experts_of
from tests.exports import export, exported, save
from tests.parity.runs import manifest, resolve
from tests.tensors import gathered
from tests.unit.trainer.exporting import make_model
from tests.unit.trainer.test_lora import BINS, CPU, TRAINED, adapters_of, filled, strategy, their_loss
from tests.unit.trainer.test_models import save_mixture, save_model
from tests.unit.trainer.test_some_modules import strategy as with_modules

pytestmark = pytest.mark.usefixtures("process_group")

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
LATENT_ATTENTION = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
FIRST = {"nemotron_h": "up_proj"}
"""The tensor of experts before ``down_proj``, where it is another than usual."""
NAMES = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "mistral4"), LATENT_ATTENTION),
    "lfm2_moe": ["in_proj", "q_proj", "k_proj", "v_proj", "out_proj"],
    "granitemoehybrid": ["in_proj", "out_proj", *ATTENTION],
    "nemotron_h": ["in_proj", *ATTENTION],
}
EVERYTHING: dict[str, Any] = {"rank": 4, "expertRank": 3, "alpha": 10, "targetModules": ["all-linear", "experts"]}
SCALING = 10 / 4


def exports(
    of: FsdpStrategy, folder: Path, lora: dict[str, Any], form: Any, target: Path, modules: tuple[str, ...] = ()
) -> Path:
    """What is exported of what ``of``, which began from the model in ``folder``, has trained."""
    store = LocalStore(target.with_name(f"{target.name}-run"))
    boxes = [*of.boxes("trained"), *of.boxes("optimizer")]
    saved = save(boxes, store, base_digest=base_digest(build_on_meta(folder), folder))
    adapters = Adapters(LoraSpec.model_validate(lora), form, f"file://{folder}", modules)
    export(replace(exported(store, saved, folder), adapters=adapters), LocalStore(target))
    return target


def gradients(of: FsdpStrategy) -> dict[str, torch.Tensor]:
    return {
        of.model.module_of_whole(name): gathered(parameter.grad).clone()
        for name, parameter in of.model.huggingface.named_parameters()
        if parameter.grad is not None
    }


def assert_gradients_are(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert (found[name] - gradient).norm() <= 5e-6 * gradient.norm() + 1e-9, name


def loaded(kind: Any, folder: Path) -> Any:
    """The model in ``folder``, of the class ``kind``, as transformers computes it of texts."""
    return of_texts(kind.from_pretrained(folder))


@pytest.mark.parametrize("kind", PROVEN)
def test_loss_gradients_and_both_exports_are_those_of_peft(tmp_path: Path, kind: str) -> None:
    from peft import PeftModel

    # Given adapters of which none is 0, of experts of another rank, and with what peft makes of their export
    folder = tmp_path / "model"
    reference = save_mixture(kind, folder)
    lora = {**EVERYTHING, "targetModules": [*NAMES.get(kind, ATTENTION), "experts"]}
    ours = filled(strategy(folder, lora))
    theirs = PeftModel.from_pretrained(
        reference, exports(ours, folder, lora, "adapter", tmp_path / "adapter"), is_trainable=True
    )
    merged = loaded(type(reference), exports(ours, folder, lora, "model", tmp_path / "merged"))

    # When both compute the loss of bins, transformers document by document
    loss = ours.forward_backward(BINS, TRAINED)
    expected = their_loss(theirs)
    (expected / TRAINED).backward()

    # Then it is the same, that of the merged model too, and so are gradients
    torch.testing.assert_close(loss.float(), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(their_loss(merged), expected, rtol=1e-6, atol=0)
    assert (expected - their_loss(loaded(type(reference), folder))).abs() > 1e-2
    experts, adapted = experts_of(merged), [FIRST.get(kind, "gate_up_proj"), "down_proj"]
    assert_gradients_are(
        gradients(ours),
        dict(
            as_here(name, p.grad, experts, adapted, swapped=kind == "llama4_text")
            for name, p in theirs.named_parameters()
            if p.grad is not None
        ),
    )


@pytest.mark.parametrize(
    ("kind", "targets", "adapted", "rank"),
    [
        ("qwen3_moe", ["experts.down_proj"], ["down_proj"], {}),
        ("gpt_oss", ["experts.down_proj"], ["down_proj"], {"expertRank": 5}),
        ("gpt_oss", ["all-linear", "experts.gate_up_proj"], ["gate_up_proj"], {}),
        ("qwen3_moe", ["layers.1.mlp.experts"], ["gate_up_proj", "down_proj"], {"expertRank": 5}),
        ("mixtral", ["layers.1.mlp.experts"], ["gate_up_proj", "down_proj"], {}),
        ("mixtral", ["o_proj", "0.mlp.experts.gate_up_proj"], ["gate_up_proj"], {"expertRank": 5}),
    ],
)
def test_some_experts_have_adapters_for_peft_too(
    tmp_path: Path, kind: str, targets: list[str], adapted: list[str], rank: dict[str, int]
) -> None:
    from peft import PeftModel

    # Given adapters of one of the tensors of experts, or of the experts of one layer
    folder = tmp_path / "model"
    reference = save_model(kind, folder)
    lora = {"rank": 4, "targetModules": targets, **rank}
    ours = filled(strategy(folder, lora))

    # When peft loads what is exported of them
    out = exports(ours, folder, lora, "adapter", tmp_path / "adapter")
    theirs = PeftModel.from_pretrained(reference, out, is_trainable=True)

    # Then it has adapters where they were trained, and none else, with the same values and gradients
    found = adapters_of(ours)
    loaded = {name: p for name, p in theirs.named_parameters() if "lora_" in name}
    experts = experts_of(reference)
    values_of = dict(as_here(name, p.detach(), experts, adapted) for name, p in loaded.items())
    assert found.keys() == values_of.keys()
    assert all(torch.equal(value, values_of[name]) for name, value in found.items())
    loss, expected = ours.forward_backward(BINS, TRAINED), their_loss(theirs)
    (expected / TRAINED).backward()
    torch.testing.assert_close(loss.float(), expected, rtol=1e-6, atol=0)
    assert_gradients_are(gradients(ours), dict(as_here(name, p.grad, experts, adapted) for name, p in loaded.items()))


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("modules", [("layers.1.mlp.experts", "lm_head"), ("layers.0.mlp",)])
def test_beside_modules_that_are_trained_adapters_of_other_experts_are_those_of_peft(
    tmp_path: Path, kind: str, modules: tuple[str, ...]
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    # Given experts of one layer that are trained themselves, and those of another that have adapters
    folder = tmp_path / "model"
    reference = save_model(kind, folder)
    ours = filled(with_modules(folder, [*modules], lora=EVERYTHING))
    names = {box.name for box in ours.boxes("trained")}
    assert {"0" in modules[0]} == {".layers.1." in name for name in names if ".experts.adapters." in name}

    # When what is exported of them is loaded
    adapter = exports(ours, folder, EVERYTHING, "adapter", tmp_path / "adapter", modules)
    theirs = PeftModel.from_pretrained(reference, adapter)
    merged = AutoModelForCausalLM.from_pretrained(
        exports(ours, folder, EVERYTHING, "model", tmp_path / "merged", modules)
    )

    # Then it is what was trained
    expected = ours.forward_sums(BINS)[0].float()
    with torch.no_grad():
        for model in (theirs, merged):
            torch.testing.assert_close(their_loss(model), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("kind", "options", "lora"),
    [
        ("glm4_moe", {}, {"dropout": 0.1}),
        ("glm4_moe", {}, {"excludeModules": ["up_proj", "down_proj"]}),
        ("qwen3_moe", {"mlp_only_layers": [0]}, {"targetModules": ["all-linear", "experts"], "expertRank": 3}),
        ("mellum", {"mlp_layer_types": ["dense", "sparse"]}, {}),
        *((kind, {}, {}) for kind in ("qwen2_moe", "granitemoeshared", "afmoe", "deepseek_v2", "deepseek_v3", "dots1")),
        *((kind, {}, {}) for kind in ("ernie4_5_moe", "exaone_moe", "glm4_moe_lite", "hunyuan_v1_moe", "hy_v3")),
        ("solar_open", {}, {}),
        ("cohere2_moe", {"num_shared_experts": 1}, {}),
        *((kind, {}, {"targetModules": ["all-linear", "experts"]}) for kind in ("qwen3_next", "qwen3_5_moe_text")),
        ("qwen3_5_text", {}, {}),
        ("granitemoehybrid", {}, {}),
        ("nemotron_h", {}, {}),
        ("falcon_h1", {}, {}),
        *(("lfm2_moe", {}, {"targetModules": names}) for names in (["all-linear"], ["all-linear", "experts"])),
    ],
)
def test_peft_loads_layers_that_are_called_as_its_experts_were(
    tmp_path: Path, kind: str, options: dict[str, Any], lora: dict[str, Any]
) -> None:
    from peft import PeftModel

    # Given adapters of linear layers beside experts: gate_proj and the like, by which peft means experts of some types
    folder = tmp_path / "model"
    reference = save_model(kind, folder, **options)
    lora = {"rank": 4, **lora}
    ours = filled(strategy(folder, lora))

    loaded = PeftModel.from_pretrained(reference, exports(ours, folder, lora, "adapter", tmp_path / "adapter"))

    torch.testing.assert_close(their_loss(loaded), ours.forward_sums(BINS)[0].float(), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("base", "merge", "excluded", "warned"),
    [
        ("nf4", False, [], True),
        ("nf4", True, [], False),
        ("nf4", False, ["gate_proj", "up_proj", "down_proj"], False),
        ("bf16", False, [], False),
    ],
)
def test_beside_weights_in_4_bits_it_does_not_which_is_warned_of(
    tmp_path: Path, base: str, merge: bool, excluded: list[str], warned: bool
) -> None:
    sizes = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 128, "moe_intermediate_size": 128}
    save_model("glm4_moe", tmp_path / "model", **sizes)
    lora = {"rank": 4, "basePrecision": base, "excludeModules": excluded}
    document = manifest(tmp_path, tmp_path / "store", lora=lora, export={"mergeAdapter": merge})
    document["spec"]["model"] = {"uri": f"file://{tmp_path}/model"}
    reporter = Reporter(tmp_path, writes=False)

    prepare_model(resolve(document), reporter, CPU)

    told = [warning for warning in reporter.progress.warnings if "peft takes gate_proj, up_proj, down_proj" in warning]
    assert len(told) == warned


def test_modules_that_are_called_as_a_tensor_of_experts_are_alone_trained_whole(tmp_path: Path) -> None:
    # Given a shared expert whose down_proj is trained, beside adapters of what experts have of that name
    folder = tmp_path / "model"
    save_model("qwen2_moe", folder)
    ours = filled(with_modules(folder, ["down_proj"], lora=EVERYTHING))
    adapter = exports(ours, folder, EVERYTHING, "adapter", tmp_path / "adapter", ("down_proj",))

    # Then peft is told of that layer alone
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert config["modules_to_save"] == [f"model.layers.{layer}.mlp.shared_expert.down_proj" for layer in (0, 1)]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_numbers_are_the_same_to_the_last_bit_whatever_is_computed_again(
    tmp_path: Path, kind: str, precision: str
) -> None:
    save_model(kind, tmp_path)
    found = []
    for how in ("none", "selective", "full"):
        ours = filled(strategy(tmp_path, EVERYTHING, activationCheckpointing=how, precision=precision))
        found.append((ours.forward_backward(BINS, TRAINED), gradients(ours)))
    for loss, of in found[1:]:
        assert torch.equal(loss, found[0][0])
        assert of.keys() == found[0][1].keys()
        assert all(torch.equal(gradient, found[0][1][name]) for name, gradient in of.items())


def changed(folder: Path, base: str, adapters: dict[str, torch.Tensor], scaling: float) -> Any:
    """The model in ``folder`` in fp32, with what ``adapters`` add, as a run has it that holds it in ``base``."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).float()
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for name in packed_weights(model, "nf4", lambda name: False) if base == "nf4" else []:
            weights[name].copy_(unpacked(pack(weights[name]), torch.float32))
        for name, a in adapters.items():
            if not name.endswith(".lora_A.weight"):
                continue
            added = scaling * adapters[name.replace("lora_A", "lora_B")] @ a
            layer = name.removesuffix(".lora_A.weight")
            experts, _, leaf = layer.rpartition(".adapters.")
            turned = experts and model.get_submodule(experts).is_transposed
            weights[f"{experts}.{leaf}" if experts else f"{layer}.weight"] += added.mT if turned else added
    return model


WHOLE, EXPERTS, ROWS, COLUMNS = 2**27, 40_000, 3000, 256
"""Bytes of blocks, by what of a tensor of experts they hold at most."""


@pytest.mark.parametrize(
    ("kind", "base", "dtype", "block"),
    [
        ("qwen3_moe", "fp32", "float32", EXPERTS),
        ("qwen3_moe", "fp32", "bfloat16", ROWS),
        ("granitemoe", "fp32", "float32", COLUMNS),
        ("gpt_oss", "fp32", "float32", EXPERTS),
        ("gpt_oss", "fp32", "float32", ROWS),
        ("gpt_oss", "fp32", "float32", COLUMNS),
        ("mixtral", "nf4", "float32", WHOLE),
        ("mixtral", "nf4", "bfloat16", ROWS),
        ("gpt_oss", "nf4", "float32", EXPERTS),
        ("gpt_oss", "mxfp4", "bfloat16", ROWS),
    ],
)
def test_a_merged_model_is_what_was_trained_however_its_experts_are_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, base: str, dtype: str, block: int
) -> None:
    from transformers import AutoModelForCausalLM

    # Given adapters beside experts whose rows are whole blocks of 64 weights
    sizes = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 128, "moe_intermediate_size": 128}
    folder = make_model(tmp_path / "model", kind, dtype, **sizes)
    if base == "mxfp4":
        mxfp4.pack(folder)
    lora = {**EVERYTHING, "basePrecision": base}
    ours = filled(strategy(folder, lora))
    expected = changed(folder, base, adapters_of(ours), SCALING)

    # When it is exported in blocks of so many bytes
    monkeypatch.setattr(values, "BLOCK_BYTES", block)
    monkeypatch.setattr(pieces, "MAX_PIECE_BYTES", max(block, ROWS))
    out = exports(ours, folder, lora, "model", tmp_path / "merged")

    # Then all weights are those that were trained with, rounded once where the model is stored in bf16
    found = AutoModelForCausalLM.from_pretrained(out)
    off = 2**-8 if dtype == "bfloat16" else 1e-6
    for name, weight in found.named_parameters():
        assert weight.dtype == getattr(torch, dtype)
        torch.testing.assert_close(weight.float(), expected.get_parameter(name), rtol=off, atol=1e-7)


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_what_is_exported_of_adapters_does_not_depend_on_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    folder = tmp_path / "model"
    save_model(kind, folder)
    ours = filled(strategy(folder, EVERYTHING))
    found = []
    for block in (WHOLE, 1000, 64):
        monkeypatch.setattr(values, "BLOCK_BYTES", block)
        monkeypatch.setattr(pieces, "MAX_PIECE_BYTES", max(block, 1000))
        out = exports(ours, folder, EVERYTHING, "adapter", tmp_path / f"{block}")
        found.append(load_file(out / "adapter_model.safetensors"))
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        assert all(torch.equal(value, found[0][name]) for name, value in other.items())
    config = json.loads((tmp_path / "64" / "adapter_config.json").read_text())
    names = ["experts.gate_up_proj", "experts.down_proj"]
    assert config["target_parameters"] == names
    assert (config["r"], config["rank_pattern"]) == (4, dict.fromkeys(names, 3))
    assert (config["lora_alpha"], config["alpha_pattern"]) == (10, dict.fromkeys(names, 7.5))


NAME, SHAPE = "0.experts.adapters.down_proj.lora_A.weight", (4, 64, 512)


def first_values(method: Any, place: Rectangle, shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    values = torch.full(place.sizes, torch.nan)
    initialize_adapters([Box(NAME, WEIGHT, shape, place, values)], LoraSpec(init_method=method), 1)
    return values


@pytest.mark.parametrize("method", ["kaiming", "gaussian"])
def test_adapters_of_each_expert_start_as_those_of_a_layer_do(method: Any) -> None:
    # Given first values of experts, and those of a layer, which are distributed as peft's
    whole = first_values(method, Rectangle.whole(SHAPE))
    layer = first_values(method, Rectangle.whole(SHAPE[1:]), SHAPE[1:])

    for number, each in enumerate(whole):
        assert each.std().item() == pytest.approx(layer.std().item(), rel=0.02)
        assert each.mean().abs().item() < 0.02 * layer.std().item()
        assert each.abs().max().item() == pytest.approx(layer.abs().max().item(), rel=0.2)
        # And others for another expert
        assert not any(torch.equal(each, other) for other in whole[:number])

    # And on any process a part is that part of the whole: experts, one of which it has no part, and less than one
    for offsets, sizes in (((1, 0, 0), (2, 64, 512)), ((4, 0, 0), (0, 64, 512)), ((3, 5, 7), (1, 9, 11))):
        part = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
        assert torch.equal(first_values(method, Rectangle(offsets, sizes)), whole[part])


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (["all-linear"], "adapters of rank 4 on 8 layers (q_proj, k_proj, v_proj, o_proj)"),
        (
            ["q_proj", "experts"],
            "adapters of rank 4 on 2 layers (q_proj) and adapters of rank 3 on the experts of 2 layers (gate_up_proj, "
            "down_proj)",
        ),
        (["experts.down_proj"], "adapters of rank 3 on the experts of 2 layers (down_proj)"),
    ],
)
def test_the_log_says_where_adapters_are_and_how_experts_get_some(
    tmp_path: Path, targets: list[str], said: str
) -> None:
    save_model("qwen3_moe", tmp_path)
    lora = {"rank": 4, "targetModules": targets, **({"expertRank": 3} if "all-linear" not in targets else {})}
    config = resolve(manifest(tmp_path, tmp_path.with_name("store"), lora=lora))

    line = _part_that_is_trained(build_on_meta(tmp_path), config, ())

    assert line.startswith(f"{said}: ")
    assert line.endswith("are not" if "all-linear" not in targets else f"are not; {OF_EXPERTS}")
