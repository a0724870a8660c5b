"""Exports of adapters: peft's files, or the model with them in its weights, each in place of the other."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sft_api.place import EXPORT_MARK, ExportRecord
from sft_api.v1alpha1 import LoraSpec
from sft_trainer.checkpoint import pieces
from sft_trainer.checkpoint.local import LocalStore
from sft_trainer.errors import ConfigError, StorageFullError
from sft_trainer.export import values
from sft_trainer.export.companions import model_card
from sft_trainer.export.exporting import Exported
from sft_trainer.export.forms import Adapters
from sft_trainer.export.record import is_finished, read_export
from sft_trainer.models.causal_lm import build_on_meta
from sft_trainer.models.digest import base_digest
from sft_trainer.models.nf4 import pack, unpacked
from sft_trainer.models.quantised import packed_weights
from tests.bins import random_bin
from tests.exports import content, export, exported
from tests.parity.runs import manifest as job
from tests.parity.runs import resolve
from tests.unit.trainer.exporting import SMALL, checkpoint, make_model
from tests.unit.trainer.test_export_folder import Watched, full_at
from tests.unit.trainer.test_lora import adapters_of, filled, strategy, their_loss
from tests.unit.trainer.test_models import save_model
from tests.whole_models import save_whole

pytestmark = pytest.mark.usefixtures("process_group")

LORA: dict[str, Any] = {"rank": 3, "alpha": 6, "excludeModules": ["1.mlp.up_proj"]}
SPEC = LoraSpec.model_validate(LORA)
WHOLE_BLOCKS = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 16}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Of a model that is stored in fp32."""
    return make_model(tmp_path / "model", "llama", "float32")


@pytest.fixture
def run(tmp_path: Path, source: Path) -> tuple[Any, Exported]:
    """What a run has trained, and its checkpoint as it is exported by default."""
    ours, store = filled(strategy(source, LORA)), LocalStore(tmp_path / "store")
    manifest = checkpoint(ours, store, base_digest=base_digest(build_on_meta(source), source))
    return ours, of_adapters(store, manifest, source)


def of_adapters(store: LocalStore, manifest: Any, source: Path, uri: str = "hf://org/model@0123abc") -> Exported:
    return replace(exported(store, manifest, source), adapters=Adapters(SPEC, "adapter", uri))


def merged(what: Exported) -> Exported:
    return replace(what, adapters=Adapters(SPEC, "model", "hf://org/model"), model=build_on_meta(what.folder))


def anew(what: Exported) -> Exported:
    """The same once more: a model that got adapters cannot get them twice."""
    return replace(what, model=build_on_meta(what.folder))


def sums(ours: Any, source: Path) -> dict[str, torch.Tensor]:
    """The weights with what the adapters add to them."""
    adapters = adapters_of(ours)
    weights = load_file(source / "model.safetensors")
    for name in adapters:
        if name.endswith("lora_A.weight"):
            layer = name.removesuffix(".lora_A.weight")
            weights[f"{layer}.weight"] += 2.0 * (adapters[f"{layer}.lora_B.weight"] @ adapters[name])
    return weights


@pytest.mark.parametrize("block", [2**27, 3000], ids=["large blocks", "small blocks"])
def test_the_merged_model_is_the_base_and_what_the_adapters_add(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: tuple[Any, Exported], source: Path, block: int
) -> None:
    monkeypatch.setattr(values, "BLOCK_BYTES", block)
    monkeypatch.setattr(pieces, "MAX_PIECE_BYTES", block)
    ours, what = run

    export(merged(what), LocalStore(tmp_path / "out"), file_bytes=SMALL)

    wanted, found = sums(ours, source), {}
    for file in (tmp_path / "out").glob("*.safetensors"):
        found |= load_file(file)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-7)
    untouched = load_file(source / "model.safetensors")
    changed = {name for name in found if not torch.equal(found[name], untouched[name])}
    assert changed == {name.replace("lora_A.", "") for name in adapters_of(ours) if "lora_A" in name}, (
        "what has no adapter is the base's, to the last bit"
    )


def test_a_merged_model_in_bf16_is_rounded_once(tmp_path: Path) -> None:
    # Given a model that is stored, and said to be, in bf16
    source = make_model(tmp_path / "model", "llama")
    tensors = load_file(source / "model.safetensors")
    save_file(
        {name: value.bfloat16() for name, value in tensors.items()}, source / "model.safetensors", {"format": "pt"}
    )
    ours, store = filled(strategy(source, LORA)), LocalStore(tmp_path / "store")
    manifest = checkpoint(ours, store, base_digest=base_digest(build_on_meta(source), source))
    tensors = load_file(source / "model.safetensors")
    save_file({name: value.float() for name, value in tensors.items()}, tmp_path / "model.safetensors")

    export(merged(of_adapters(store, manifest, source)), LocalStore(tmp_path / "out"))

    exact = sums(ours, tmp_path)
    for name, value in load_file(tmp_path / "out" / "model.safetensors").items():
        assert value.dtype == torch.bfloat16
        # To the nearest; that of a sum which lies between two may be either
        torch.testing.assert_close(value.float(), exact[name], rtol=2**-8, atol=1e-9)


def test_adapters_have_the_names_and_the_configuration_of_peft(tmp_path: Path, run: tuple[Any, Exported]) -> None:
    ours, what = run

    export(what, LocalStore(tmp_path / "out"))

    found = load_file(tmp_path / "out" / "adapter_model.safetensors")
    wanted = {f"base_model.model.{name}": value for name, value in adapters_of(ours).items()}
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("org/model", "0123abc")
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (3, 6, "LORA")
    assert isinstance(config["lora_alpha"], int)
    from peft import LoraConfig, PeftConfig

    assert isinstance(PeftConfig.from_pretrained(str(tmp_path / "out")), LoraConfig)
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert files >= {"README.md", "tokenizer.json", "chat_template.jinja", "training-run.json"}
    assert not {"config.json", EXPORT_MARK} & files


@pytest.mark.parametrize("base", ["bf16", "nf4"])
def test_by_dora_both_forms_are_what_was_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, base: str) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    # Given adapters with magnitudes beside a base that is rounded, or not, and values that come in small blocks
    source = make_model(tmp_path / "model", "llama", "float32", **(WHOLE_BLOCKS if base == "nf4" else {}))
    lora = {**LORA, "useDora": True, "basePrecision": base if base == "nf4" else "fp32"}
    ours, store = filled(strategy(source, lora)), LocalStore(tmp_path / "store")
    manifest = checkpoint(ours, store, base_digest=base_digest(build_on_meta(source), source))
    spec = LoraSpec.model_validate(lora)
    monkeypatch.setattr(values, "BLOCK_BYTES", 3000)
    what = replace(exported(store, manifest, source), adapters=Adapters(spec, "adapter", "hf://org/model@0123abc"))
    export(what, LocalStore(tmp_path / "adapters"))
    whole = replace(what, adapters=Adapters(spec, "model", "hf://org/model"), model=build_on_meta(source))
    export(whole, LocalStore(tmp_path / "merged"))

    # Then peft and transformers make of a text what was trained
    bins = (random_bin(2, 12),)
    wanted = ours.forward_sums(bins)[0].float()
    plain = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    if base == "nf4":
        with torch.no_grad():
            for name in packed_weights(plain, "nf4", lambda name: False):
                plain.get_parameter(name).copy_(unpacked(pack(plain.get_parameter(name)), torch.float32))
    untrained = their_loss(plain, bins).detach()
    loaded = PeftModel.from_pretrained(plain, str(tmp_path / "adapters"))
    merged_model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    for found in (loaded, merged_model):
        torch.testing.assert_close(their_loss(found, bins).detach(), wanted, rtol=1e-5, atol=0)
    assert abs(untrained - wanted) > 0.01
    assert json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())["use_dora"]


def test_each_form_takes_the_place_of_the_other(tmp_path: Path, run: tuple[Any, Exported]) -> None:
    _, what = run
    export(merged(what), LocalStore(tmp_path / "model alone"), file_bytes=SMALL)
    export(anew(what), LocalStore(tmp_path / "adapters alone"))
    out = LocalStore(tmp_path / "out")

    # When one is exported where the other lies, finished or begun, then nothing of that is left
    export(anew(what), out)
    export(merged(what), out, file_bytes=SMALL)
    assert content(tmp_path / "out") == content(tmp_path / "model alone")
    export(anew(what), out)
    assert content(tmp_path / "out") == content(tmp_path / "adapters alone")
    with pytest.raises(StorageFullError):
        export(merged(what), Watched(tmp_path / "out", full_at("model-00002")), file_bytes=SMALL)
    assert not (tmp_path / "out" / "adapter_config.json").exists(), "half a model is none"
    # Also of a file that was being written when its process was killed
    (tmp_path / "out" / f".incomplete-{'0' * 32}-model-00002-of-00003.safetensors").write_bytes(b"half")
    export(anew(what), out)
    assert content(tmp_path / "out") == content(tmp_path / "adapters alone")

    # And what is there is known for what it is
    record = read_export(out)
    assert record is not None
    assert record.form == "adapter"
    assert is_finished(out, ExportRecord.of("tiny", what.manifest, "adapter"))
    assert not is_finished(out, ExportRecord.of("tiny", what.manifest, "model"))
    watched = Watched(tmp_path / "out")
    export(anew(what), watched)
    assert watched.told == []


def test_the_last_file_comes_last_and_one_that_was_killed_goes_on(tmp_path: Path, run: tuple[Any, Exported]) -> None:
    _, what = run
    with pytest.raises(StorageFullError):
        export(anew(what), Watched(tmp_path / "out", full_at("README")))
    assert not (tmp_path / "out" / "adapter_config.json").exists()
    target = Watched(tmp_path / "out")
    export(anew(what), target)
    assert "adapter_model.safetensors" not in target.told
    assert target.told[-2:] == ["adapter_config.json", f"-{EXPORT_MARK}"]


def test_a_merged_model_needs_the_base_that_was_trained_on_and_adapters_do_not(
    tmp_path: Path, run: tuple[Any, Exported], source: Path
) -> None:
    _, what = run
    other = tmp_path / "other"
    shutil.copytree(source, other)
    tensors = load_file(other / "model.safetensors")
    save_file({name: value * 2 for name, value in tensors.items()}, other / "model.safetensors", {"format": "pt"})
    elsewhere = of_adapters(LocalStore(tmp_path / "store"), what.manifest, other)

    with pytest.raises(ConfigError, match=r"they would come from model.uri, which has the digest .* but the run start"):
        export(merged(elsewhere), LocalStore(tmp_path / "out"))
    assert not (tmp_path / "out" / "config.json").exists()
    export(elsewhere, LocalStore(tmp_path / "out"))
    assert (tmp_path / "out" / "adapter_config.json").exists()


def test_the_card_says_what_lies_there(tmp_path: Path, run: tuple[Any, Exported]) -> None:
    _, what = run
    sections: dict[str, Any] = {"model": {"uri": "hf://org/model@main"}, "lora": {**LORA, "learningRateRatio": 16}}
    cards = {
        merge: model_card(
            resolve(job(Path("/in"), Path("/out"), **sections, export={"mergeAdapter": merge})),
            what.manifest,
            what.model,
        )
        for merge in (False, True)
    }
    assert cards[False].startswith("---\nlibrary_name: peft\nbase_model: org/model\n")
    assert cards[True].startswith("---\nlibrary_name: transformers\nbase_model: org/model\n")
    for card in cards.values():
        assert "- sft\n- lora\n---\n" in card
        assert "| adapters | rank 3, alpha 6 |\n| learning rate of B | 16 times that of A |" in card
        assert f"| digest of the model | {what.manifest.run.base_digest} |" in card
        assert "4 bits" not in card
    sections["lora"] = {**LORA, "basePrecision": "nf4"}
    packed = {
        (merge, precision): model_card(
            resolve(
                job(
                    Path("/in"),
                    Path("/out"),
                    **sections,
                    export={"mergeAdapter": merge},
                    training={"steps": 2, "precision": precision},
                )
            ),
            what.manifest,
            what.model,
        )
        for merge in (False, True)
        for precision in ("fp32", "bf16")
    }
    for precision, computed in (("fp32", "float32"), ("bf16", "bfloat16")):
        assert (
            '| trained beside | weights in 4 bits: `BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", '
            f'bnb_4bit_compute_dtype="{computed}")` |' in packed[False, precision]
        )
        assert "need no quantisation |" in packed[True, precision]
        assert "replace_parameter_4bit" not in packed[False, precision]
        assert "BitsAndBytesConfig" not in packed[True, precision]
    # Experts are no layers of bitsandbytes, but routers may be, and those of other parts of a whole model are
    asked = resolve(job(Path("/in"), Path("/out"), **sections))
    save_model("afmoe", tmp_path / "afmoe")
    card = model_card(asked, what.manifest, build_on_meta(tmp_path / "afmoe"))
    assert "llm_int8_skip_modules=['lm_head', 'router.gate'])`" in card
    save_whole("mistral3", tmp_path / "mistral3")
    card = model_card(asked, what.manifest, build_on_meta(tmp_path / "mistral3"))
    assert "llm_int8_skip_modules=['lm_head', 'model.multi_modal_projector', 'model.vision_tower'])` |" in card
    told = {}
    for kind in ("qwen3_moe", "gpt_oss", "nemotron_h"):
        save_model(kind, tmp_path / kind)
        told[kind] = model_card(asked, what.manifest, build_on_meta(tmp_path / kind))
    besides = (
        "`, and experts, which it leaves as they are: `bitsandbytes.nn.parametrize.replace_parameter_4bit(experts, "
        'name, quant_type="nf4", blocksize=64)` for gate_up_proj and down_proj of each layer'
    )
    assert f"{besides} |" in told["qwen3_moe"]
    assert f"{besides.replace('gate_up_proj', 'up_proj')} |" in told["nemotron_h"]
    # And files in MXFP4 are refused beside its config
    assert f"{besides}; files in MXFP4 take no such config: they are loaded with `Mxfp4Config(" in told["gpt_oss"]
    # Nor has peft adapters beside experts in 4 bits: it keeps what they add from one forward pass to the next
    lora = {**sections["lora"], "rank": 8, "expertRank": 4, "targetModules": ["all-linear", "experts"]}
    asked = resolve(job(Path("/in"), Path("/out"), **{**sections, "lora": lora}))
    card = model_card(asked, what.manifest, build_on_meta(tmp_path / "qwen3_moe"))
    assert "| adapters | rank 8, of experts 4, alpha" in card
    assert "weights in 4 bits: of experts too, beside which peft puts no adapters: these load beside" in card
    assert "BitsAndBytesConfig" not in card
