"""Adapters that a run begins with: their values are those that peft has of the same files, or they are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sft_trainer.boxes import Box, Rectangle
from sft_trainer.errors import ConfigError, ModelError, TrainingError
from sft_trainer.first_adapters import FirstAdapters
from sft_trainer.models.causal_lm import build_on_meta
from sft_trainer.models.lora import add_adapters
from sft_trainer.preparation import prepare_model
from sft_trainer.reporting import Reporter
from sft_trainer.strategies.fsdp import FsdpStrategy
from sft_trainer.trainable import trainable_of
from tests.integration.trainer.test_adapters_of_experts import EVERYTHING, exports
from tests.parity.runs import manifest, resolve
from tests.tensors import gathered
from tests.unit.trainer.test_lora import BINS, CPU, adapters_of, filled, strategy, their_loss
from tests.unit.trainer.test_models import save_model
from tests.unit.trainer.test_some_modules import strategy as with_modules

pytestmark = pytest.mark.usefixtures("process_group")

RANK = 4


def first(
    folder: Path, model: Path, lora: dict[str, Any], modules: list[str] | None = None, uri: str = "hf://org/adapters"
) -> FirstAdapters:
    """The adapters in ``folder``, for a run with ``lora`` that trains ``modules`` besides."""
    training = {"trainableModules": modules} if modules else {}
    job = manifest(model, model.with_name("store"), model={"uri": f"file://{model}"}, training=training, lora=lora)
    config = resolve(job)
    assert config.spec.lora is not None
    blueprint = build_on_meta(model)
    add_adapters(blueprint.huggingface, config.spec.lora, modules or ())
    return FirstAdapters.of(folder, uri, config.spec.lora, blueprint, trainable_of(config))


def begun(folder: Path, model: Path, lora: dict[str, Any], modules: list[str] | None = None) -> FsdpStrategy:
    of = with_modules(model, modules, lora=lora) if modules else strategy(model, lora)
    first(folder, model, lora, modules).fill([*of.boxes("base"), *of.boxes("trained")])
    return of


def of_peft(reference: Any, folder: Path, **config: Any) -> Any:
    """The model with adapters of peft that add something, saved to ``folder``."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(reference, LoraConfig(r=RANK, task_type="CAUSAL_LM", **config))
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                change = torch.randn_like(parameter) * 0.1
                parameter.copy_(change if "lora_" in name else parameter + change)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize(
    ("kind", "config", "lora", "modules"),
    [
        ("llama", {"lora_alpha": 10, "target_modules": "all-linear"}, {"alpha": 10}, None),
        ("llama", {"use_rslora": True, "target_modules": ["q_proj", "down_proj"]}, {"alpha": 16}, None),
        ("qwen3", {"target_modules": ["v_proj"], "layers_to_transform": [1], "lora_dropout": 0.2}, {"alpha": 8}, None),
        ("phi3", {"target_modules": r".*\.1\.mlp\.(gate_up|down)_proj"}, {"alpha": 8}, None),
        (
            "qwen3_moe",
            {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
            {"alpha": 8},
            None,
        ),
        ("gpt_oss", {"target_modules": ["q_proj"], "target_parameters": ["experts.down_proj"]}, {"alpha": 8}, None),
        (
            "llama",
            {"target_modules": ["o_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
            {"alpha": 8},
            ["embed_tokens", "lm_head"],
        ),
    ],
)
def test_the_loss_is_that_of_peft(
    tmp_path: Path, kind: str, config: dict[str, Any], lora: dict[str, Any], modules: list[str] | None
) -> None:
    # Given adapters of peft, and a manifest that says what the refusal of another one advises
    reference, model = save_model(kind, tmp_path / "model"), tmp_path / "model"
    theirs = of_peft(reference, tmp_path / "adapters", **config)
    with pytest.raises(ConfigError) as refused:
        first(tmp_path / "adapters", model, {"rank": RANK + 1}, modules)
    written = str(refused.value).partition("write lora: {")[2].partition(", adapterUri")[0]
    fields = dict(
        field.split(": ") for field in written.replace(", alpha", "\nalpha").replace(", target", "\ntarget").split("\n")
    )
    advised = {
        "rank": int(fields["rank"]),
        "alpha": float(fields["alpha"]),
        "targetModules": fields["targetModules"].strip("[]").split(", "),
    }
    assert advised["alpha"] == lora["alpha"]

    # When a run begins with them, its loss is theirs
    ours = begun(tmp_path / "adapters", model, advised, modules)
    expected = their_loss(theirs.eval()).detach()
    torch.testing.assert_close(ours.forward_sums(BINS)[0].float(), expected, rtol=1e-6, atol=0)
    with theirs.disable_adapter():
        assert (their_loss(theirs) - expected).abs() > 1e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_they_are_read_in_whatever_they_are_stored_and_under_any_name_of_the_adapter(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    save_model("llama", tmp_path / "model")
    lora = {"rank": RANK, "targetModules": ["q_proj"]}
    ours = filled(strategy(tmp_path / "model", lora))
    out = exports(ours, tmp_path / "model", lora, "adapter", tmp_path / "adapters")
    file = out / "adapter_model.safetensors"
    values = {
        name.replace("_A.", "_A.mine.").replace("_B.", "_B.mine."): v.to(dtype) for name, v in load_file(file).items()
    }
    save_file(values, file)

    found = adapters_of(begun(out, tmp_path / "model", lora))

    wanted = {name: value.to(dtype).float() for name, value in adapters_of(ours).items()}
    assert all(value.dtype == torch.float32 and torch.equal(value, wanted[name]) for name, value in found.items())


@pytest.mark.parametrize(
    ("kind", "options", "lora", "modules"),
    [
        ("qwen3", {"tie_word_embeddings": True}, {"rank": 3}, ["embed_tokens", "lm_head"]),
        ("qwen3_moe", {}, EVERYTHING, None),
        ("gpt_oss", {}, {**EVERYTHING, "targetModules": ["experts.down_proj"]}, ["layers.1.mlp.experts"]),
        ("mixtral", {}, {**EVERYTHING, "targetModules": ["o_proj", "experts"]}, ["layers.0.mlp"]),
        ("glm4_moe", {}, {"rank": 4}, None),
    ],
)
def test_what_is_exported_is_what_a_run_can_begin_with_on_any_number_of_processes(
    tmp_path: Path, kind: str, options: dict[str, Any], lora: dict[str, Any], modules: list[str] | None
) -> None:
    # Given an export of all that a run trains
    model = tmp_path / "model"
    save_model(kind, model, **options)
    before = filled(with_modules(model, modules, lora=lora) if modules else strategy(model, lora))
    out = exports(before, model, lora, "adapter", tmp_path / "adapters", tuple(modules or ()))

    # When another one begins with it
    after = begun(out, model, lora, modules)

    # Then it has the same values, all of them
    wanted = {box.name: box.read() for box in before.boxes("trained")}
    assert wanted.keys() == {box.name for box in after.boxes("trained")}
    assert all(torch.equal(box.read(), wanted[box.name]) for box in after.boxes("trained"))
    # And a process that holds a part of each reads that part
    adapters = first(out, model, lora, modules)
    for name, whole in wanted.items():
        for dimension, size in enumerate(whole.shape):
            offsets, sizes = [0] * whole.ndim, [*whole.shape]
            offsets[dimension], sizes[dimension] = size // 3, size - size // 3
            place = Rectangle(tuple(offsets), tuple(sizes))
            part = Box(name, "weight", tuple(whole.shape), place, torch.full(tuple(sizes), torch.nan))
            adapters.fill([part])
            assert torch.equal(part.read(), whole[place.within(Rectangle.whole(tuple(whole.shape)))]), name


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    save_model("llama", folder / "model")
    of = filled(strategy(folder / "model", OF_Q))
    exports(of, folder / "model", OF_Q, "adapter", folder / "adapters")
    return folder


@pytest.fixture
def saved(exported: Path, tmp_path: Path) -> Path:
    """Adapters of two layers, as they are exported; the model is beside them."""
    shutil.copytree(exported, tmp_path, dirs_exist_ok=True)
    return tmp_path / "adapters"


OF_Q: dict[str, Any] = {"rank": RANK, "targetModules": ["q_proj"]}
Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({f"{Q}.lora_B.weight": None}, ConfigError, r"has no model\.layers\.0\.self_attn\.q_proj\.lora_B\.weight, and"),
        (
            {f"{Q}.lora_A.weight": None},
            ConfigError,
            r"write lora: \{rank: 4, alpha: 4, targetModules: \[model\.layers\.1",
        ),
        ({f"{Q}.lora_A.weight": (RANK, 7)}, ConfigError, r"tensor '.*q_proj\.lora_A\.weight' has shape \(4, 7\), and"),
        (
            {f"{Q}.lora_magnitude_vector": (3,)},
            ConfigError,
            r"1 tensors of which nothing .* 'base.*lora_magnitude_vector'",
        ),
        (
            {"base_model.model.lm_head.weight": (3, 3)},
            ConfigError,
            r"'base_model.model.lm_head.weight': name modules that",
        ),
        ({f"{Q}.lora_A.default.weight": (RANK, 3)}, ModelError, r"are both .*: save one adapter alone"),
    ],
)
def test_a_tensor_that_is_missing_left_or_of_another_shape_is_named(
    saved: Path, tmp_path: Path, change: dict[str, Any], error: type[TrainingError], said: str
) -> None:
    file = saved / "adapter_model.safetensors"
    tensors = load_file(file) | {name: torch.zeros(shape) for name, shape in change.items() if shape}
    save_file({name: value for name, value in tensors.items() if change.get(name, ()) is not None}, file)
    with pytest.raises(error, match=f"^hf://org/adapters.*{said}"):
        first(saved, tmp_path / "model", OF_Q)


def test_numbers_that_are_none_are_refused(saved: Path, tmp_path: Path) -> None:
    file = saved / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors[f"{Q}.lora_B.weight"][0, 0] = torch.inf
    save_file(tensors, file)
    with pytest.raises(ModelError, match=r"tensor '.*q_proj\.lora_B\.weight' holds NaN or infinities"):
        begun(saved, tmp_path / "model", OF_Q)


def test_tied_weights_that_peft_trained_apart_are_refused(tmp_path: Path) -> None:
    model, modules = tmp_path / "model", ["embed_tokens", "lm_head"]
    save_model("qwen3", model, tie_word_embeddings=True)
    of = filled(with_modules(model, modules, lora=OF_Q))
    out = exports(of, model, OF_Q, "adapter", tmp_path / "adapters", tuple(modules))
    file = out / "adapter_model.safetensors"
    both = load_file(file)
    apart = {name: v * (2 if "lm_head" in name else 1) for name, v in both.items()}
    # Of one of them alone peft leaves the other as that of the model
    alone = ({name: v for name, v in both.items() if each not in name} for each in modules)
    for tensors in (apart, *alone):
        save_file(tensors, file)
        with pytest.raises(ModelError, match=r"values for 'base_model.model.lm_head.weight' than for .*unti"):
            first(out, model, OF_Q, modules)


def test_modules_that_are_not_among_them_begin_as_those_of_the_model(saved: Path, tmp_path: Path) -> None:
    of = begun(saved, tmp_path / "model", OF_Q, ["lm_head"])
    weight = gathered(of.model.huggingface.get_parameter("lm_head.weight")).detach()
    assert torch.equal(weight, load_file(tmp_path / "model" / "model.safetensors")["lm_head.weight"])


def test_a_run_has_them_and_is_warned_where_they_were_trained_beside_another_model(saved: Path, tmp_path: Path) -> None:
    job = manifest(tmp_path / "model", tmp_path / "store", lora={**OF_Q, "adapterUri": f"file://{saved}"})
    job["spec"]["model"] = {"uri": f"file://{tmp_path}/model"}

    def prepared() -> list[str]:
        reporter = Reporter(tmp_path, writes=False)
        adapters = prepare_model(resolve(job), reporter, CPU).adapters
        assert adapters is not None
        assert len(adapters.sources) == 4
        return [warning for warning in reporter.progress.warnings if "base_model_name_or_path" in warning]

    assert prepared() == []
    file = saved / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": "org/another"}))
    (warning,) = prepared()
    assert warning.startswith(f"file://{saved}: the adapters were trained beside 'org/another' (base_model")


def test_the_digest_is_of_both_files(saved: Path, tmp_path: Path) -> None:
    def digest(folder: Path) -> str:
        return first(folder, tmp_path / "model", OF_Q).digest

    copy = shutil.copytree(saved, tmp_path / "copy")
    (copy / "README.md").write_text("another card")
    assert digest(copy) == digest(saved)
    config = json.loads((copy / "adapter_config.json").read_text())
    (copy / "adapter_config.json").write_text(json.dumps({**config, "peft_version": "0"}))
    assert digest(copy) != digest(saved)
    shutil.copy(saved / "adapter_config.json", copy)
    save_file(
        {name: v + 1 for name, v in load_file(copy / "adapter_model.safetensors").items()},
        copy / "adapter_model.safetensors",
    )
    assert digest(copy) != digest(saved)


def test_a_folder_of_adapters_is_no_model(saved: Path) -> None:
    with pytest.raises(
        ModelError, match=r"has no config.json: .*, and the adapters that are here belong into lora.adapterUri"
    ):
        build_on_meta(saved)
