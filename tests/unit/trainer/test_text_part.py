"""Models of images and texts: their text part is trained, and the whole of them is exported."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy

from sft_api.checkpoints import RunState
from sft_api.model_config import shape_of
from sft_api.v1alpha1 import LoraSpec
from sft_api.v1alpha1.model_config import ConfigOverrides
from sft_cli.trained import Trained, measure_trained
from sft_trainer.checkpoint.local import LocalStore
from sft_trainer.errors import ConfigError, ModelError
from sft_trainer.export.alone import exported_alone
from sft_trainer.export.companions import model_card
from sft_trainer.export.forms import Adapters
from sft_trainer.first_adapters import FirstAdapters
from sft_trainer.models.attention import Boundaries
from sft_trainer.models.causal_lm import CausalLM, build_on_meta
from sft_trainer.models.digest import base_digest
from sft_trainer.models.lora import add_adapters
from sft_trainer.models.weights import unread_tensors, untrained_tensors
from sft_trainer.trainable import trainable_of
from sft_trainer.trainer import Trainer
from sft_trainer.versions import of_texts
from tests.exports import export, exported
from tests.parity.runs import manifest as job
from tests.parity.runs import resolve
from tests.tensors import gathered
from tests.unit.trainer.exporting import SMALL, checkpoint, goes_on_alike, trained
from tests.unit.trainer.test_lora import filled, strategy
from tests.unit.trainer.test_models import LENGTHS, build
from tests.whole_models import KINDS, change_config, rename, save_whole, turn_experts, whole_config

pytestmark = pytest.mark.usefixtures("process_group")

IDS = torch.randint(3, 120, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))
DOCUMENTS = IDS.split(LENGTHS)
EXPERTS: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
LORA: dict[str, Any] = {"rank": 3, "alpha": 6}
MXFP4 = {"quant_method": "mxfp4"}


def packed_loss(model: CausalLM) -> torch.Tensor:
    """Of all three documents in one micro-batch."""
    starts = (0, LENGTHS[0], LENGTHS[0] + LENGTHS[1])
    targets = torch.cat([torch.arange(s, s + n - 1) for s, n in zip(starts, LENGTHS, strict=True)])
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    loss: torch.Tensor = model(IDS, positions, Boundaries.of(LENGTHS), targets, IDS[targets + 1], 1.0)[0]
    return loss


def loss_of(whole: Any) -> torch.Tensor:
    """The same by transformers' own model, one document after the other."""
    losses = [cross_entropy(whole(input_ids=d[None]).logits[0, :-1], d[1:], reduction="sum") for d in DOCUMENTS]
    return torch.stack(losses).sum()


def loaded(folder: Path) -> Any:
    from transformers import AutoModelForImageTextToText

    whole = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return of_texts(whole.eval())


@pytest.mark.parametrize(
    ("kind", "text", "how"),
    [
        *((kind, {}, "none") for kind in KINDS),
        ("mistral3", {"model_type": "ministral3"}, "none"),
        ("internvl", EXPERTS, "none"),
        ("llama4", {"num_experts_per_tok": 2, "attn_temperature_tuning": False}, "full"),
        ("llama4", {"use_qk_norm": False, "interleave_moe_layer_step": 1}, "selective"),
    ],
)
def test_loss_and_gradients_equal_those_of_the_whole_model(
    tmp_path: Path, kind: str, text: dict[str, Any], how: str
) -> None:
    reference = save_whole(kind, tmp_path, **text)
    ours = build(tmp_path, activationCheckpointing=how)
    model: CausalLM = ours.model

    loss = packed_loss(model)
    loss.backward()
    ours.grad_norm()
    expected = loss_of(reference)
    expected.backward()

    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    # And memory is reckoned of the same weights
    shape = shape_of(json.loads((tmp_path / "config.json").read_text()))
    counted = sum(parameter.numel() for parameter in model.huggingface.parameters())
    assert shape is not None
    assert (shape.is_part, shape.parameters) == (True, counted)
    wanted = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    found = {model.module_of_whole(name): gathered(p.grad) for name, p in model.huggingface.named_parameters()}
    assert found.keys() == wanted.keys()
    size = torch.nn.utils.get_total_norm(wanted.values())
    # Scores are not divided by the root of a head's size there: transformers' own two ways differ by 1e-5.
    rounding = 2e-5 if kind == "gemma4" else 2e-6
    for name, gradient in wanted.items():
        assert (found[name] - gradient).norm() <= rounding * gradient.norm() + 1e-8 * size, name


# As transformers names its modules; of the other kinds the files that it saves are called so already.
@pytest.mark.parametrize("kind", ["gemma3", "mistral3"])
def test_files_may_name_the_text_part_as_any_version_does(tmp_path: Path, kind: str) -> None:
    save_whole(kind, tmp_path)
    before = packed_loss(build(tmp_path).model)
    rename(tmp_path, "language_model.lm_head", "lm_head")
    rename(tmp_path, "language_model.model", "model.language_model")

    ours = build(tmp_path)

    assert torch.equal(packed_loss(ours.model), before)
    assert unread_tensors(build_on_meta(tmp_path), tmp_path) == []


def test_files_may_have_experts_stacked_as_those_of_whole_models_do(tmp_path: Path) -> None:
    source, store, out = tmp_path / "model", LocalStore(tmp_path / "store"), tmp_path / "out"
    save_whole("internvl", source, **EXPERTS)
    expected = packed_loss(build(source).model)
    weights = load_file(source / "model.safetensors")
    for layer in (0, 1):
        experts = f"language_model.model.layers.{layer}.mlp.experts"
        gate, up, down = (
            torch.stack([weights.pop(f"{experts}.{expert}.{name}_proj.weight") for expert in range(4)])
            for name in ("gate", "up", "down")
        )
        weights |= {f"{experts}.gate_up_proj": torch.cat([gate, up], 1), f"{experts}.down_proj": down}
    save_file(weights, source / "model.safetensors", {"format": "pt"})

    ours = build(source)

    assert torch.equal(packed_loss(ours.model), expected)
    assert unread_tensors(build_on_meta(source), source) == []
    manifest = checkpoint(ours, store, base_digest=base_digest(build_on_meta(source), source))
    export(exported(store, manifest, source), LocalStore(out))
    again = load_file(out / "model.safetensors")
    assert again.keys() == weights.keys()
    assert all(torch.equal(again[name], weights[name]) for name in weights)


def test_files_may_have_experts_turned_or_not(tmp_path: Path) -> None:
    save_whole("qwen3_vl_moe", tmp_path)
    published = packed_loss(build(tmp_path).model)
    turn_experts(tmp_path)

    assert torch.equal(packed_loss(build(tmp_path).model), published)
    # Of square ones nothing tells
    save_whole("qwen3_vl_moe", tmp_path, moe_intermediate_size=16)
    with pytest.raises(ModelError, match=r"gate_up_proj' has matrices of 32 x 32 for its experts"):
        build(tmp_path)


@pytest.mark.parametrize("kind", ["gemma3", "gemma4", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "llama4"])
def test_the_export_is_the_whole_model(tmp_path: Path, kind: str) -> None:
    # Given a published model in bf16, with what belongs to its images, in a few files
    source, out = tmp_path / "model", tmp_path / "out"
    save_whole(kind, source, torch.bfloat16)
    unused: set[str] = set()
    if kind == "gemma4":
        unused = add_unused_keys(source)
        assert unread_tensors(build_on_meta(source), source) == []
    weights = load_file(source / "model.safetensors")
    weights["vision_tower.calls"] = torch.tensor(3)
    weights["vision_tower.unused"] = torch.tensor([float("nan"), 1.0])
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    (source / "preprocessor_config.json").write_text('{"image_mean": [0.5]}')
    ours, store = trained(source), LocalStore(tmp_path / "store")
    manifest = checkpoint(ours, store, base_digest=base_digest(build_on_meta(source), source))

    # When its text part was trained, and is exported
    export(exported(store, manifest, source), LocalStore(out), file_bytes=SMALL)

    # Then the files are those of the whole: what was not trained to the last bit
    found = {name: tensor for file in out.glob("*.safetensors") for name, tensor in load_file(file).items()}
    for scale in [name for name in weights if name.endswith("layer_scalar")]:
        # What is no weight is never rounded: it has the same value in fp32.
        assert torch.equal(found.pop(scale), weights.pop(scale).float())
    assert {name: (value.dtype, value.shape) for name, value in found.items()} == {
        name: (value.dtype, value.shape) for name, value in weights.items()
    }
    place = build_on_meta(source).whole.files  # type: ignore[union-attr]
    for name, value in weights.items():
        same = (
            torch.equal(found[name].view(torch.uint8), value.view(torch.uint8)) if value.shape else found[name] == value
        )
        assert same == (not place.has(name) or name in unused), name
    assert json.loads((out / "config.json").read_text()) == json.loads((source / "config.json").read_text())
    assert (out / "preprocessor_config.json").read_text() == '{"image_mean": [0.5]}'
    # And it makes of texts what was trained, and of images what it did
    rounded = ours.model.to(torch.bfloat16).float()
    whole = loaded(out)
    torch.testing.assert_close(loss_of(whole), packed_loss(rounded), rtol=1e-5, atol=0)
    before = loaded(source)
    pictures = images_of(kind)
    found_pieces, pieces = features(whole, pictures), features(before, pictures)
    assert pieces
    assert all(map(torch.equal, found_pieces, pieces))


def images_of(kind: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    if kind == "gemma4":
        places = torch.cartesian_prod(torch.arange(4), torch.arange(4))
        return {"pixel_values": torch.randn(1, 16, 3 * 4 * 4, generator=generator), "image_position_ids": places[None]}
    if kind.startswith("qwen"):
        pixels = torch.randn(16, 3 * 2 * 4 * 4, generator=generator)
        return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 4, 4]])}
    sizes = {"image_sizes": torch.tensor([[16, 16]])} if kind == "mistral3" else {}
    return {"pixel_values": torch.randn(1, 3, 16, 16, generator=generator), **sizes}


@torch.no_grad()
def features(whole: Any, images: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """What ``whole`` makes of ``images`` for its text part."""
    found = whole.get_image_features(**images)
    pieces = found if isinstance(found, list | tuple) else found.pooler_output
    pieces = found.last_hidden_state if pieces is None else pieces
    pieces = [*pieces] if isinstance(pieces, list | tuple) else [pieces]
    return [piece for piece in pieces if isinstance(piece, torch.Tensor)]


def add_unused_keys(folder: Path) -> set[str]:
    """Give layers of Gemma 4 that use keys and values of others tensors for their own, as published files do; their
    names."""
    weights = load_file(folder / "model.safetensors")
    unused = {
        name.replace(f".layers.{layer}.", f".layers.{layer + 2}."): value + 1
        for layer in (0, 1)
        for name, value in weights.items()
        if re.search(rf"language_model\.layers\.{layer}\.self_attn\.(k_|v_)", name)
    }
    save_file(weights | unused, folder / "model.safetensors", {"format": "pt"})
    return {*unused}


def test_what_is_no_weight_comes_back_from_a_checkpoint_too(tmp_path: Path) -> None:
    # Gemma 4's layers have numbers of their own
    save_whole("gemma4", tmp_path / "model")
    goes_on_alike(tmp_path / "model", LocalStore(tmp_path / "store"))


def test_an_export_alone_fetches_the_whole_model(tmp_path: Path) -> None:
    source, store = tmp_path / "model", LocalStore(tmp_path / "store")
    save_whole("gemma3", source)
    tokens = tmp_path / "tokens"
    tokens.mkdir()
    (tokens / "config.json").write_bytes((source / "config.json").read_bytes())
    from tests.parity.mask_tokenizers import chat_tokenizer

    for folder in (source, tokens):
        chat_tokenizer("chatml").save_pretrained(folder)
    manifest = checkpoint(trained(source), store, base_digest=base_digest(build_on_meta(source), source))
    fetched = list[str]()

    def fetch(uri: str, kind: str) -> Path:
        fetched.append(kind)
        return source if kind == "model" else tokens

    config = resolve(job(source, tmp_path / "store", model={"uri": f"file://{source}"}))
    what = exported_alone(config, config.spec.model, store, manifest, fetch, pytest.fail)
    export(what, LocalStore(tmp_path / "out"))

    assert load_file(tmp_path / "out" / "model.safetensors").keys() == load_file(source / "model.safetensors").keys()
    assert fetched == ["tokenizer", "model", "model"]
    assert "\npipeline_tag: image-text-to-text\n" in (tmp_path / "out" / "README.md").read_text()


def test_the_weights_of_other_parts_come_from_the_model_that_was_trained_and_no_other(tmp_path: Path) -> None:
    source, store = tmp_path / "model", LocalStore(tmp_path / "store")
    save_whole("gemma3", source)
    manifest = checkpoint(trained(source), store, base_digest="0" * 64)

    with pytest.raises(ConfigError, match=r"lacks 34 tensors.*they would come from model\.uri"):
        export(exported(store, manifest, source), LocalStore(tmp_path / "out"))


def test_a_run_goes_on_beside_the_other_parts_that_it_began_with_and_no_others(tmp_path: Path) -> None:
    # Found before a step, and not by the export after the last one
    save_whole("mistral3", tmp_path / "model")
    ranks: Any = SimpleNamespace(rank=0, local_rank=0, local_world_size=1, world_size=1)
    run: Any = Trainer(resolve(job(tmp_path / "model", tmp_path / "store")), ranks, tmp_path)
    run._saves_all = True
    model = SimpleNamespace(blueprint=build_on_meta(tmp_path / "model"), digest="a" * 64)
    run.prepared = SimpleNamespace(model=model)

    run._check_own_base(RunState(cursor=1, base_digest="a" * 64))
    with pytest.raises(ConfigError, match="all else comes from the model in"):
        run._check_own_base(RunState(cursor=1, base_digest="b" * 64))
    model.blueprint.whole = None
    run._check_own_base(RunState(cursor=1, base_digest="b" * 64))


@pytest.mark.parametrize(
    ("kind", "layers", "lora"),
    [
        ("gemma3", 14, LORA),
        ("qwen3_vl", 14, LORA),
        ("qwen3_5", 15, LORA),
        # Of four layers two have all nine, two no keys and values of their own; one more makes inputs for all.
        ("gemma4", 33, LORA),
        ("qwen3_vl_moe", 8, LORA),
        ("glm4v_moe", 14, LORA),
        ("llama4", 16 + 2 * 3 + 2 * 3 + 2 * 2, {**LORA, "targetModules": ["all-linear", "experts"]}),
    ],
)
def test_adapters_are_beside_the_whole_model_for_peft_and_are_read_back(
    tmp_path: Path, kind: str, layers: int, lora: dict[str, Any]
) -> None:
    from peft import AutoPeftModelForCausalLM, PeftModel

    source, out, store = tmp_path / "model", tmp_path / "out", LocalStore(tmp_path / "store")
    save_whole(kind, source)
    ours = filled(strategy(source, lora))
    manifest = checkpoint(ours, store, base_digest=base_digest(build_on_meta(source), source))
    spec = LoraSpec.model_validate(lora)
    what = replace(exported(store, manifest, source), adapters=Adapters(spec, "adapter", f"file://{source}"))

    export(what, LocalStore(out))

    with safe_open(out / "adapter_model.safetensors", "pt") as reader:
        decoder = "language_model.model" if kind == "llama4" else "model.language_model"
        assert f"base_model.model.{decoder}.layers.1.self_attn.q_proj.lora_A.weight" in [*reader.keys()]
    with_peft = PeftModel.from_pretrained(loaded(source), str(out))
    torch.testing.assert_close(loss_of(with_peft), packed_loss(ours.model), rtol=1e-5, atol=0)
    adapted = {name.partition(".lora_A")[0] for name, _ in with_peft.named_parameters() if ".lora_A" in name}
    assert all("language_model." in name for name in adapted)
    assert len(adapted) == layers
    # What loads the base too takes the whole, also where transformers has a class for its text part alone
    (out / "tokenizer_config.json").unlink()  # peft would make embeddings as many as the test's tokenizer has tokens
    by_itself = AutoPeftModelForCausalLM.from_pretrained(str(out))
    assert type(by_itself.get_base_model()) is type(with_peft.get_base_model())
    of_texts(by_itself.get_base_model())
    torch.testing.assert_close(loss_of(by_itself), packed_loss(ours.model), rtol=1e-5, atol=0)
    # And a run that begins with them has them
    config = resolve(job(source, tmp_path / "store", model={"uri": f"file://{source}"}, lora=lora))
    blueprint = build_on_meta(source)
    add_adapters(blueprint.huggingface, spec)
    again = strategy(source, lora)
    FirstAdapters.of(out, "file:///out", spec, blueprint, trainable_of(config)).fill(again.boxes("trained"))
    assert torch.equal(packed_loss(again.model), packed_loss(ours.model))


@pytest.mark.parametrize(
    ("kind", "layers"), [("gemma3", 14), ("gemma4", 33), ("mistral3", 14), ("qwen2_5_vl", 14), ("qwen3_vl", 14)]
)
def test_sft_counts_what_is_trained_of_the_text_part(tmp_path: Path, kind: str, layers: int) -> None:
    source = tmp_path / "model"
    save_whole(kind, source)
    if kind == "gemma4":
        # As they are published: keys and values also of layers that use those of others.
        add_unused_keys(source)
    spec = resolve(job(source, tmp_path / "store", model={"uri": f"file://{source}"}, lora=LORA)).spec
    huggingface = build_on_meta(source).huggingface
    own = sum(parameter.numel() for parameter in huggingface.parameters())
    add_adapters(huggingface, LoraSpec.model_validate(LORA))
    added = sum(parameter.numel() for parameter in huggingface.parameters()) - own

    assert measure_trained(spec) == Trained(added, own, layers, 0, "the files of model.uri")


def test_adapters_in_the_weights_are_in_those_of_the_whole(tmp_path: Path) -> None:
    source, out, store = tmp_path / "model", tmp_path / "out", LocalStore(tmp_path / "store")
    save_whole("mistral3", source)
    ours = filled(strategy(source, LORA))
    manifest = checkpoint(ours, store, base_digest=base_digest(build_on_meta(source), source))
    adapters = Adapters(LoraSpec.model_validate(LORA), "model", f"file://{source}")

    export(replace(exported(store, manifest, source), adapters=adapters), LocalStore(out))

    torch.testing.assert_close(loss_of(loaded(out)), packed_loss(ours.model), rtol=1e-5, atol=0)
    before, after = load_file(source / "model.safetensors"), load_file(out / "model.safetensors")
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert len(changed) == 14
    assert all(name.startswith("language_model.model.layers.") for name in changed)


# The first as the class of Mistral 3 has it where config.json does not say it, though its files have a head.
@pytest.mark.parametrize(("said", "same", "tied"), [(None, False, False), (None, True, True), (False, True, False)])
def test_what_is_tied_is_what_transformers_ties(tmp_path: Path, said: bool | None, same: bool, tied: bool) -> None:
    source, out, store = tmp_path / "model", tmp_path / "out", LocalStore(tmp_path / "store")
    save_whole("mistral3", source)
    weights = load_file(source / "model.safetensors")
    if same:
        weights["language_model.lm_head.weight"] = weights["language_model.model.embed_tokens.weight"].clone()
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    change_config(source, tie_word_embeddings=said)

    ours = trained(source)

    whole = loaded(source)
    assert (whole.get_output_embeddings().weight is whole.get_input_embeddings().weight) == tied
    huggingface = ours.model.huggingface
    assert (huggingface.get_output_embeddings().weight is huggingface.get_input_embeddings().weight) == tied
    manifest = checkpoint(ours, store, base_digest=base_digest(build_on_meta(source), source))
    export(exported(store, manifest, source), LocalStore(out))
    assert load_file(out / "model.safetensors").keys() == weights.keys()
    torch.testing.assert_close(loss_of(loaded(out)), packed_loss(ours.model), rtol=1e-5, atol=0)


def test_overrides_are_those_of_the_text_part_in_the_export_too(tmp_path: Path) -> None:
    source, out, store = tmp_path / "model", tmp_path / "out", LocalStore(tmp_path / "store")
    save_whole("mistral3", source)
    given = {"rope_parameters": {"rope_type": "linear", "factor": 2.0}, "attention_dropout": 0.25}
    overrides = ConfigOverrides.model_validate(given)
    model = build_on_meta(source, overrides)
    huggingface: Any = model.huggingface
    assert huggingface.config.rope_parameters["factor"] == 2.0
    manifest = checkpoint(trained(source), store, base_digest=base_digest(build_on_meta(source), source))

    export(exported(store, manifest, source, model), LocalStore(out))

    written = loaded(out).config
    assert written.text_config.rope_parameters["factor"] == 2.0
    assert written.text_config.attention_dropout == 0.25
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (source, out))
    changed = {name for name in after["text_config"] if after["text_config"][name] != before["text_config"].get(name)}
    assert changed == given.keys()
    assert {**after, "text_config": None} == {**before, "text_config": None}


def test_the_card_of_adapters_says_how_the_whole_is_loaded_with_overrides(tmp_path: Path) -> None:
    source, given = tmp_path / "model", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}
    save_whole("mistral3", source)
    in_its_place = resolve(
        job(source, tmp_path / "store", model={"uri": f"file://{source}", "configOverrides": given}, lora=LORA)
    )
    store, model = LocalStore(tmp_path / "store"), build_on_meta(source)
    card = model_card(in_its_place, checkpoint(trained(source), store, metrics={"loss": 1.0}), model)
    code = card.split("```python\n")[1].split("```")[0]
    # What peft loads of the folder is shown in the test of models of text
    names: dict[str, Any] = {"base": str(source), "revision": None}
    lines = [line for line in code.splitlines() if "peft" not in line.lower() and "saved" not in line]

    exec("\n".join(lines), names)

    loaded_config = names["model"].config.text_config
    overridden: Any = build_on_meta(source, ConfigOverrides.model_validate(given)).huggingface
    assert loaded_config.rope_parameters == overridden.config.rope_parameters
    assert names["model"].model.language_model.config.rope_parameters["factor"] == 2.0


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        (
            "internvl",
            {"model_type": "jamba"},
            "of a model of type 'internvl' the text part would be trained, and that is refused: a model of type "
            "'jamba' is not supported: it has layers of type linear_attention",
        ),
        ("internvl", {"model_type": "cohere2", "logit_scale": 0.25}, "'internvl' .*makes something else of a text"),
    ],
)
def test_what_is_refused_of_a_text_part_is_refused_of_the_whole(
    tmp_path: Path, kind: str, text: dict[str, Any], words: str
) -> None:
    whole_config(kind, **text).save_pretrained(tmp_path)

    with pytest.raises(ModelError, match=words):
        build_on_meta(tmp_path)


@pytest.mark.parametrize(("fields", "words"), [({"quant_method": "awq"}, "'awq'"), (MXFP4, "'mxfp4'")])
def test_quantised_ones_are_refused(tmp_path: Path, fields: dict[str, Any], words: str) -> None:
    save_whole("mistral3", tmp_path)
    change_config(tmp_path, quantization_config=fields)

    with pytest.raises(ModelError, match=rf"'mistral3' with a quantization_config \(quant_method {words}\)"):
        build_on_meta(tmp_path)


def test_tensors_that_no_export_could_have_are_refused(tmp_path: Path) -> None:
    save_whole("mistral3", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["vision_tower.rounded"] = torch.zeros(2, dtype=torch.float8_e4m3fn)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})

    with pytest.raises(ModelError, match=r"tensor 'vision_tower.rounded' is stored as F8_E4M3, .* in bf16 or fp32"):
        untrained_tensors(build_on_meta(tmp_path), tmp_path)


def test_tensors_of_the_text_part_that_are_not_read_are_told_and_no_others(tmp_path: Path) -> None:
    save_whole("gemma3", tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())["text_config"]
    change_config(tmp_path, text_config={**text, "num_hidden_layers": 1, "layer_types": ["sliding_attention"]})

    unread = unread_tensors(build_on_meta(tmp_path), tmp_path)

    assert unread
    assert all(name.startswith("language_model.model.layers.1.") for name in unread)
