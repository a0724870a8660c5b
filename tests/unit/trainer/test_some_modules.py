"""Some modules of a model are trained: the same steps as a plain loop makes with them, and nothing else moves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sft_api.adapters import within
from sft_api.v1alpha1 import LoraSpec
from sft_trainer.errors import ConfigError
from sft_trainer.flops import ModelFlops
from sft_trainer.models.causal_lm import CausalLM, build_on_meta
from sft_trainer.models.lora import add_adapters, initialize_adapters, is_adapter
from sft_trainer.models.weights import load_weights
from sft_trainer.strategies.fsdp import FsdpStrategy
from sft_trainer.topology import ALONE
from sft_trainer.trainable import check_modules, trainable_of
from tests.architectures import accepted
from tests.parity.runs import manifest, resolve
from tests.tensors import gathered
from tests.unit.trainer.test_lora import BINS, CPU, TRAINED, their_loss
from tests.unit.trainer.test_models import save_model

pytestmark = pytest.mark.usefixtures("process_group")


def strategy(folder: Path, modules: list[str], **fields: Any) -> FsdpStrategy:
    """A model as a run begins with it."""
    training = {"trainableModules": modules, **fields.pop("training", {})}
    job = manifest(folder, folder.with_name("store"), model={"uri": f"file://{folder}"}, training=training, **fields)
    config = resolve(job)
    blueprint = build_on_meta(folder)
    if config.spec.lora is not None:
        add_adapters(blueprint.huggingface, config.spec.lora, modules)
    check_modules(blueprint.huggingface, modules)
    built = FsdpStrategy(config, blueprint, trainable_of(config), ALONE, CPU)
    boxes = [*built.boxes("base"), *built.boxes("trained")]
    load_weights([box for box in boxes if not is_adapter(box.name)], built.model.names, folder)
    if config.spec.lora is not None:
        initialize_adapters(boxes, config.spec.lora, config.spec.training.seed)
    return built


CASES: list[tuple[str, dict[str, Any], list[str]]] = [
    ("llama", {}, ["layers.1"]),
    ("llama", {}, ["lm_head"]),
    ("llama", {}, ["lm_head", "model.norm"]),
    ("qwen3", {"tie_word_embeddings": True}, ["model.embed_tokens"]),
    ("qwen3", {"tie_word_embeddings": True}, ["layers.0.self_attn.q_proj", "input_layernorm"]),
    ("qwen3", {}, ["mlp.down_proj", "self_attn"]),
    ("gpt_neox", {}, ["layers.1.attention", "final_layer_norm"]),
    ("qwen3_moe", {}, ["layers.1.mlp.experts"]),
    ("olmo_hybrid", {"linear_value_head_dim": 16}, ["layers.0.linear_attn.conv1d"]),
]


@pytest.mark.parametrize(("kind", "options", "modules"), CASES)
@pytest.mark.parametrize("activation_checkpointing", ["none", "full"])
def test_steps_are_those_of_a_plain_loop_that_trains_the_same(
    tmp_path: Path, kind: str, options: dict[str, Any], modules: list[str], activation_checkpointing: str
) -> None:
    # Given the same model, of which a plain loop trains the same parameters
    reference = save_model(kind, tmp_path, **options)
    untouched = {name: parameter.detach().clone() for name, parameter in reference.named_parameters()}
    training = {
        "activationCheckpointing": activation_checkpointing,
        "optimizer": {"weightDecay": 0.1, "eps": 1e-4, "maxGradNorm": 0.05},
    }
    ours = strategy(tmp_path, modules, training=training)
    for name, parameter in reference.named_parameters():
        parameter.requires_grad_(within(name, modules))
    trained = {name: parameter for name, parameter in reference.named_parameters() if parameter.requires_grad}
    assert 0 < len(trained) < len(untouched)
    decayed = [parameter for parameter in trained.values() if parameter.ndim > 1]
    others = [parameter for parameter in trained.values() if parameter.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=1e-2, eps=1e-4, foreach=False)

    # When both make steps
    for _ in range(4):
        loss = ours.forward_backward(BINS, TRAINED)
        norm = ours.grad_norm()
        ours.apply(1e-2, 0.05, norm, torch.tensor(True))
        expected = their_loss(reference)
        (expected / TRAINED).backward()
        torch.testing.assert_close(loss.float(), expected, rtol=2e-6, atol=0)
        theirs = torch.nn.utils.clip_grad_norm_(trained.values(), 0.05)
        torch.testing.assert_close(gathered(norm), theirs, rtol=2e-5, atol=0)
        optimizer.step()
        optimizer.zero_grad()

    # Then what is trained is equal, and all else is what it was to the last bit
    for name, parameter in ours.model.huggingface.named_parameters():
        value = gathered(parameter.detach())
        if name in trained:
            torch.testing.assert_close(value, trained[name].detach(), rtol=1e-4, atol=2e-6)
            assert not torch.equal(value, untouched[name])
        else:
            assert torch.equal(value, untouched[name]), name
    names = {box.name for box in ours.boxes("trained")}
    assert {box.name for box in ours.boxes("optimizer")} == names
    assert not names & {box.name for box in ours.boxes("base")}


def test_frozen_weights_are_held_as_they_are_computed_with(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    ours = strategy(tmp_path, ["layers.1"], training={"precision": "bf16"})
    held = {name: parameter.dtype for name, parameter in ours.model.huggingface.named_parameters()}
    assert {held[name] for name in held if ".layers.1." in name} == {torch.float32}
    assert {held[name] for name in held if ".layers.1." not in name} == {torch.bfloat16}


def test_beside_adapters_modules_are_trained_as_peft_does_it(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    reference = save_model("llama", tmp_path)
    ours = strategy(tmp_path, ["lm_head", "model.norm"], lora={"rank": 4})
    config = LoraConfig(
        r=4, lora_alpha=4, target_modules="all-linear", modules_to_save=["lm_head", "model.norm"], task_type="CAUSAL_LM"
    )
    theirs = get_peft_model(reference, config)
    found = {name: gathered(value.detach()) for name, value in ours.model.huggingface.named_parameters()}

    def named(name: str) -> str:
        return name.removeprefix("base_model.model.").replace(".modules_to_save.default", "").replace(".default", "")

    trained = {named(name): value for name, value in theirs.named_parameters() if value.requires_grad}
    assert trained.keys() == {box.name for box in ours.boxes("trained")}
    with torch.no_grad():
        for name, value in trained.items():
            value.copy_(found[name])

    loss = ours.forward_backward(BINS, TRAINED)
    expected = their_loss(theirs)
    (expected / TRAINED).backward()

    torch.testing.assert_close(loss.float(), expected, rtol=1e-6, atol=0)
    for name, value in ours.model.huggingface.named_parameters():
        assert (value.grad is None) == (name not in trained), name
        if name in trained:
            gradient = trained[name].grad
            assert gradient is not None
            assert (gathered(value.grad) - gradient).norm() <= 5e-6 * gradient.norm() + 1e-9, name


@pytest.mark.parametrize(
    ("modules", "tied", "each"),
    [
        # Of both layers, the norm behind them and the head, for a weight: 2 forwards, 2 for its gradient where it is
        # trained, 2 for that of its input where anything before it is.
        (["lm_head"], False, (2, 2, 2, 4)),
        (["model.norm"], False, (2, 2, 4, 4)),
        (["model.norm", "lm_head"], False, (2, 2, 4, 6)),
        (["layers.1"], False, (2, 6, 4, 4)),
        (["layers.1", "lm_head"], False, (2, 6, 4, 6)),
        (["layers.0", "lm_head"], False, (6, 4, 4, 6)),
        (["embed_tokens"], False, (4, 4, 4, 4)),
        (["model", "lm_head"], False, (6, 6, 6, 6)),
        (["model.norm"], True, (2, 2, 4, 4)),
        (["layers.1"], True, (2, 6, 4, 4)),
        (["embed_tokens"], True, (4, 4, 4, 6)),
        (["model"], True, (6, 6, 6, 6)),
    ],
)
def test_a_weight_counts_for_what_is_computed_with_it(
    tmp_path: Path, modules: list[str], tied: bool, each: tuple[int, ...]
) -> None:
    # Given a model of which some modules are trained
    save_model("llama", tmp_path, tie_word_embeddings=tied)
    blueprint = build_on_meta(tmp_path)
    huggingface: Any = blueprint.huggingface
    parts = [*blueprint.blocks, huggingface.model.norm, huggingface.lm_head]
    sizes = [sum(parameter.numel() for parameter in part.parameters()) for part in parts]

    # When the FLOPs of a token are counted
    flops = ModelFlops(blueprint, lambda name: within(name, modules), CPU).training([[1]])

    # Then beside attention, a third of which is computed forwards, each weight counts for what is computed with it
    passes = sum(1 if count == 2 else 3 for count in each[:2])
    attention = 2 * huggingface.config.num_attention_heads * huggingface.config.head_dim * passes
    assert flops - attention == sum(size * count for size, count in zip(sizes, each, strict=True))


@pytest.mark.parametrize("kind", accepted())
def test_no_gradient_comes_to_the_layers_for_what_follows_them(tmp_path: Path, kind: str) -> None:
    # Given a model of which nothing is trained but what follows its layers, by the order of its modules
    huggingface = save_model(kind, tmp_path)
    model = CausalLM(huggingface)
    for name, parameter in huggingface.named_parameters():
        parameter.requires_grad_(model.first_trained(name.__eq__) == len(model.blocks))
    given: list[Any] = []
    model.blocks[-1].register_forward_hook(lambda module, inputs, output: given.append(output))

    # When it is computed
    huggingface(input_ids=torch.tensor([[5, 6, 7]]), use_cache=False)

    # Then its layers give what needs no gradient
    (output,) = given
    assert not (output[0] if isinstance(output, tuple) else output).requires_grad


@pytest.mark.parametrize(
    ("options", "modules", "sentence"),
    [
        (
            {},
            ["layers.1", "q_prj"],
            "training.trainableModules names 'q_prj', and no module of the model with weights is called so: there are "
            "model.embed_tokens, model.layers.N.self_attn.q_proj, ",
        ),
        ({}, ["layers.7"], "names 'layers.7', and no module"),
        (
            {"tie_word_embeddings": True},
            ["lm_head"],
            "names 'lm_head', and lm_head.weight is the same tensor as model.embed_tokens.weight in this model: name "
            "model.embed_tokens too, or instead",
        ),
    ],
)
def test_names_that_mean_nothing_or_a_part_of_tied_weights_are_refused(
    tmp_path: Path, options: dict[str, Any], modules: list[str], sentence: str
) -> None:
    save_model("llama", tmp_path, **options)
    with pytest.raises(ConfigError) as refused:
        strategy(tmp_path, modules)
    assert sentence in str(refused.value)


def test_tied_weights_may_be_named_by_both_names(tmp_path: Path) -> None:
    save_model("llama", tmp_path, tie_word_embeddings=True)
    ours = strategy(tmp_path, ["lm_head", "embed_tokens"])
    assert {box.name for box in ours.boxes("trained")} == {"model.embed_tokens.weight"}


def test_what_is_trained_whole_gets_no_adapters(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    ours = strategy(tmp_path, ["layers.1", "o_proj"], lora={"rank": 2})
    names = [name for name, _ in ours.model.huggingface.named_parameters()]
    adapted = {name.rpartition(".lora_")[0] for name in names if is_adapter(name)}
    linear = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "gate_proj", "up_proj", "down_proj"]
    assert adapted == {f"model.layers.0.{'' if '.' in name else 'mlp.'}{name}" for name in linear}
    with pytest.raises(ConfigError, match=r"^training.trainableModules leaves no layer to adapt: all of q_proj"):
        strategy(tmp_path, ["layers"], lora={"rank": 2})


@pytest.mark.parametrize("name", ["adapters", "gate_up_proj", "lora_A"])
def test_adapters_are_no_modules_that_could_be_named(tmp_path: Path, name: str) -> None:
    # Given a model whose experts' gate and up are stacked in a tensor, which is no module, and have adapters
    huggingface = save_model("qwen2_moe", tmp_path)
    add_adapters(huggingface, LoraSpec(target_modules=["all-linear", "experts"]))
    with pytest.raises(ConfigError, match=f"names '{name}', and no module of the model with weights is called so"):
        check_modules(huggingface, [name])
