"""Adapters: which layers get them, what they start as, and their steps beside those of peft."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

from sft_api.v1alpha1 import LoraSpec
from sft_trainer.boxes import WEIGHT, Box, Rectangle
from sft_trainer.errors import ConfigError
from sft_trainer.flops import ModelFlops, training_flops
from sft_trainer.models.causal_lm import build_on_meta
from sft_trainer.models.lora import (
    MAGNITUDE,
    LoraLinear,
    adapted_layers,
    add_adapters,
    initialize_adapters,
    is_adapter,
)
from sft_trainer.models.weights import load_weights
from sft_trainer.preparation import prepare_model
from sft_trainer.reporting import Reporter
from sft_trainer.strategies.fsdp import FsdpStrategy, sharding
from sft_trainer.topology import ALONE
from sft_trainer.trainable import trainable_of
from tests.adapters_of_peft import plain_name
from tests.bins import random_bin
from tests.parity.runs import manifest, resolve
from tests.tensors import gathered
from tests.unit.trainer.test_models import save_model

pytestmark = pytest.mark.usefixtures("process_group")

CPU = torch.device("cpu")
LENGTHS = (5, 9, 14)
BINS = (random_bin(1, 5, 9), random_bin(2, 12), random_bin(3, 3, 4, 6))
TRAINED = sum(len(bin_.labels) for bin_ in BINS)


def strategy(folder: Path, lora: dict[str, Any], **training: Any) -> FsdpStrategy:
    """A model with adapters as a run begins with it."""
    job = manifest(folder, folder.with_name("store"), model={"uri": f"file://{folder}"}, training=training, lora=lora)
    config = resolve(job)
    blueprint = build_on_meta(folder)
    assert config.spec.lora is not None
    add_adapters(blueprint.huggingface, config.spec.lora)
    built = FsdpStrategy(config, blueprint, trainable_of(config), ALONE, CPU)
    load_weights(built.boxes("base"), built.model.names, folder)
    initialize_adapters(built.boxes("trained"), config.spec.lora, config.spec.training.seed)
    return built


def filled(of: FsdpStrategy, seed: int = 3) -> FsdpStrategy:
    """With adapters that add something."""
    generator = torch.Generator().manual_seed(seed)
    for box in of.boxes("trained"):
        box.write(torch.randn(box.shape, generator=generator) * 0.1)
    return of


def adapters_of(of: FsdpStrategy) -> dict[str, torch.Tensor]:
    return {
        name: gathered(parameter).detach().clone()
        for name, parameter in of.model.huggingface.named_parameters()
        if is_adapter(name)
    }


def as_peft(reference: Any, lora: LoraSpec, values: dict[str, torch.Tensor], targets: Any) -> Any:
    """The model with the same adapters, as peft makes it."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.effective_alpha,  # type: ignore[arg-type]
        lora_dropout=lora.dropout,
        target_modules=targets,
        exclude_modules=lora.exclude_modules or None,
        task_type="CAUSAL_LM",
        use_dora=bool(lora.use_dora),
    )
    model = get_peft_model(reference, config)
    theirs = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert {plain_name(name) for name in theirs} == values.keys()
    with torch.no_grad():
        for name, parameter in theirs.items():
            # Of a magnitude peft has all, which are first the norms of the rows, and we what there is more
            value = values[plain_name(name)]
            parameter.copy_(parameter + value if plain_name(name).endswith(MAGNITUDE) else value)
    return model


FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"attention_bias": True}),
    ("qwen3", {"tie_word_embeddings": True}),
    ("qwen2", {}),
    ("gemma", {}),
    ("phi3", {}),
    ("olmo2", {}),
    ("gpt_neox", {}),
]


@pytest.mark.parametrize(("kind", "options"), FAMILIES)
@pytest.mark.parametrize(
    ("targets", "excluded"),
    [
        ("all-linear", []),
        ("all-linear", ["0.mlp.down_proj", "dense"]),
        (["o_proj", "dense", "1.mlp.up_proj"], []),
        (["self_attn.o_proj", "attention.dense", "down_proj", "dense_4h_to_h"], ["layers.1.mlp.down_proj"]),
    ],
)
def test_the_layers_are_those_that_peft_would_choose(
    tmp_path: Path, kind: str, options: dict[str, Any], targets: Any, excluded: list[str]
) -> None:
    from peft import LoraConfig, get_peft_model

    reference = save_model(kind, tmp_path, **options)
    linear = {name for name, module in reference.named_modules() if isinstance(module, torch.nn.Linear)}

    def there(names: list[str]) -> list[str]:
        return [name for name in names if any(layer.endswith(f".{name}") for layer in linear)]

    # Names that a family lacks are refused by us, and ignored by peft
    chosen, without = targets if isinstance(targets, str) else there(targets), there(excluded)
    lora = LoraSpec(target_modules=[chosen] if isinstance(chosen, str) else chosen, exclude_modules=without)
    theirs = get_peft_model(
        reference, LoraConfig(target_modules=chosen, exclude_modules=without or None, task_type="CAUSAL_LM")
    )
    expected = {
        plain_name(name).removesuffix(".lora_A.weight") for name, _ in theirs.named_parameters() if "lora_A" in name
    }

    assert expected == set(adapted_layers(build_on_meta(tmp_path).huggingface, lora))


@pytest.mark.parametrize(("kind", "options"), FAMILIES)
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("activation_checkpointing", ["none", "full"])
def test_loss_and_gradients_are_those_of_peft(
    tmp_path: Path, kind: str, options: dict[str, Any], activation_checkpointing: str, dora: bool
) -> None:
    # Given the same model and adapters, of which neither is 0
    reference = save_model(kind, tmp_path, **options)
    lora = {"rank": 4, "alpha": 10, "useDora": dora}
    ours = filled(strategy(tmp_path, lora, activationCheckpointing=activation_checkpointing))
    theirs = as_peft(reference, LoraSpec.model_validate(lora), adapters_of(ours), "all-linear")

    # When both compute the loss of bins, peft document by document
    loss = ours.forward_backward(BINS, TRAINED)
    norm = ours.grad_norm()
    expected = their_loss(theirs)
    (expected / TRAINED).backward()

    # Then it is the same, and so are the gradients of the adapters; nothing else has any
    torch.testing.assert_close(loss.float(), expected, rtol=1e-6, atol=0)
    wanted = {plain_name(name): p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    found = {
        name: gathered(parameter.grad)
        for name, parameter in ours.model.huggingface.named_parameters()
        if parameter.grad is not None
    }
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert (found[name] - gradient).norm() <= 5e-6 * gradient.norm() + 1e-9, name
    torch.testing.assert_close(norm, torch.nn.utils.get_total_norm(wanted.values()), rtol=1e-6, atol=0)


def their_loss(model: Any, bins: Any = BINS) -> torch.Tensor:
    """Summed loss of the trained tokens of ``bins``, each document alone, by a model as it comes."""
    total = torch.zeros(())
    for bin_ in bins:
        labels = torch.full_like(bin_.input_ids, -100)
        labels[bin_.targets] = bin_.labels
        start = 0
        for length in bin_.boundaries.lengths:
            part = slice(start, start + length)
            logits = model(input_ids=bin_.input_ids[None, part]).logits[0]
            total = total + cross_entropy(logits, labels[part], ignore_index=-100, reduction="sum")
            start += length
    return total


@pytest.mark.parametrize("dora", [False, True])
def test_after_steps_the_adapters_are_those_of_peft_and_the_base_is_as_it_was(tmp_path: Path, dora: bool) -> None:
    # Given a model with tied embeddings, adapters that peft has too, and a gradient that is clipped
    reference = save_model("qwen3", tmp_path, tie_word_embeddings=True)
    lora = {"rank": 4, "targetModules": ["q_proj", "down_proj"], "useDora": dora}
    ours = strategy(tmp_path, lora, optimizer={"weightDecay": 0.1, "eps": 1e-4, "maxGradNorm": 0.05})
    theirs = as_peft(reference, LoraSpec(rank=4, use_dora=dora), adapters_of(ours), ["q_proj", "down_proj"])
    before = {name: box.read().clone() for name, box in _boxes(ours, "base").items()}
    begun = {name: parameter.detach().clone() for name, parameter in theirs.named_parameters()}
    trained = [parameter for parameter in theirs.parameters() if parameter.requires_grad]
    # Magnitudes are no matrices, and do not decay
    groups = [{"params": [p for p in trained if p.ndim == n], "weight_decay": decay} for n, decay in ((2, 0.1), (1, 0))]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=1e-4, foreach=False)

    # When both make steps
    for _ in range(6):
        ours.forward_backward(BINS, TRAINED)
        norm = ours.grad_norm()
        assert norm > 0.05
        ours.apply(1e-2, 0.05, norm, torch.tensor(True))
        (their_loss(theirs) / TRAINED).backward()
        torch.nn.utils.clip_grad_norm_(trained, 0.05)
        optimizer.step()
        optimizer.zero_grad()

    # Then the adapters are equal, and have moved
    for name, parameter in theirs.named_parameters():
        if parameter.requires_grad:
            found, value = adapters_of(ours)[plain_name(name)], parameter.detach()
            value = value - begun[name] if plain_name(name).endswith(MAGNITUDE) else value
            torch.testing.assert_close(found, value, rtol=1e-5, atol=1e-6)
    assert all(value.abs().max() > 1e-3 for name, value in adapters_of(ours).items() if "lora_B" in name)

    # And the base is what it was to the last bit; there are no moments but those of adapters
    for name, box in _boxes(ours, "base").items():
        assert torch.equal(box.read(), before[name]), name
    assert _boxes(ours, "base").keys() == {name for name, _ in save_model("qwen3", tmp_path).named_parameters()} - {
        "lm_head.weight"
    }
    assert {box.name for box in ours.boxes("optimizer")} == adapters_of(ours).keys()
    assert {box.name for box in ours.boxes("trained")} == adapters_of(ours).keys()


def _boxes(of: FsdpStrategy, which: Any) -> dict[str, Box]:
    return {box.name: box for box in of.boxes(which)}


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("targets", [["all-linear"], ["layers.1.self_attn.q_proj"]])
def test_a_base_that_is_not_copied_gives_the_same_numbers_to_the_last_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, targets: list[str], checkpointing: str
) -> None:
    # Given a model in bf16 with tied weights whose base is as it is computed with, and one whose base FSDP gathers too
    save_model("qwen3", tmp_path, tie_word_embeddings=True)
    lora = {"rank": 4, "targetModules": targets}
    options = {"precision": "bf16", "activationCheckpointing": checkpointing}
    left = filled(strategy(tmp_path, lora, **options))
    monkeypatch.setattr(sharding, "gathers_base", lambda *_: True)
    copied = filled(strategy(tmp_path, lora, **options))

    def held(of: FsdpStrategy) -> set[tuple[bool, bool]]:
        parameters = of.model.huggingface.named_parameters()
        return {(is_adapter(name), isinstance(each, DTensor)) for name, each in parameters}

    assert held(left) == {(True, True), (False, False)}
    assert held(copied) == {(True, True), (False, True)}
    pairs = list(zip(left.model.parameters(), copied.model.parameters(), strict=True))

    # When both make two steps, evaluate, and compute gradients once more
    for step in range(3):
        losses = [of.forward_backward(BINS, TRAINED) for of in (left, copied)]
        norms = [of.grad_norm() for of in (left, copied)]
        assert torch.equal(*losses)
        assert torch.equal(*map(gathered, norms))
        for one, other in pairs:
            assert one.requires_grad == other.requires_grad == (one.grad is not None)
            assert one.grad is None or torch.equal(gathered(one.grad), gathered(other.grad))
        if step < 2:
            for of, norm in zip((left, copied), norms, strict=True):
                of.apply(1e-2, 0.05, norm, torch.tensor(True))
            assert torch.equal(left.forward_sums(BINS), copied.forward_sums(BINS))

    # Then no bit differs, and checkpoints and exports read the same
    for which in ("base", "trained", "optimizer"):
        ours, theirs = ({(box.name, box.kind): box for box in of.boxes(which)} for of in (left, copied))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key].read(), theirs[key].read()) for key in ours)
        assert {key: box.writes for key, box in ours.items()} == {key: box.writes for key, box in theirs.items()}


def test_the_base_is_left_alone_only_where_it_is_computed_with_as_it_is_held(tmp_path: Path) -> None:
    save_model("llama", tmp_path)

    def base(**options: Any) -> set[type]:
        lora = {"rank": 4, **({"basePrecision": options.pop("base")} if "base" in options else {})}
        of = strategy(tmp_path, lora, **options)
        return {type(each) for name, each in of.model.huggingface.named_parameters() if not is_adapter(name)}

    assert base(precision="bf16") == {torch.nn.Parameter}
    assert base(precision="bf16", base="fp32") == {DTensor}
    # Nothing at all is copied
    assert base(precision="fp32") == {torch.nn.Parameter}


@pytest.mark.parametrize("lora", [{"dropout": 0.3}, {"useDora": True}], ids=str)
def test_the_first_loss_is_that_of_the_model_as_it_is(tmp_path: Path, lora: dict[str, Any]) -> None:
    reference = save_model("llama", tmp_path)
    ours = strategy(tmp_path, lora)
    torch.testing.assert_close(ours.forward_sums(BINS)[0].float(), their_loss(reference).detach(), rtol=1e-6, atol=0)
    # In bf16, too, magnitudes change nothing
    first = [strategy(tmp_path, each, precision="bf16").forward_sums(BINS)[0] for each in ({}, lora)]
    assert first[0] == first[1]


def test_magnitudes_that_peft_would_not_load_are_refused_before_a_weight_is_read(tmp_path: Path) -> None:
    # Given a model of whose layers peft takes some for its experts
    save_model("qwen3_moe", tmp_path / "model", mlp_only_layers=[0])

    def prepared(export: dict[str, Any] | None = None, **lora: Any) -> Any:
        sections = {"lora": {"useDora": True, **lora}, "export": export or {}}
        job = manifest(tmp_path, tmp_path / "store", **sections)
        return prepare_model(resolve(job), Reporter(tmp_path, writes=False), CPU)

    with pytest.raises(ConfigError, match="peft takes gate_proj, up_proj, down_proj of this model for its experts"):
        prepared()
    prepared(excludeModules=["gate_proj", "up_proj", "down_proj"])
    prepared(export={"mergeAdapter": True})


def test_a_magnitude_that_is_a_little_more_counts_in_bf16() -> None:
    # Given one that is 6 thousandths more than that of the base: the numbers of bf16 above 1 are 8 of them apart
    layer = torch.nn.Linear(64, 256).bfloat16()
    one = LoraLinear(layer, 4, 2.0, 0.0, dora=True).bfloat16()
    inputs = torch.randn(500, 64).bfloat16()
    with torch.no_grad():
        one.lora_B.weight.zero_()
        one.lora_magnitude.copy_(torch.linalg.vector_norm(layer.weight.float(), dim=1) * 6e-3)
        before, after = ((found(inputs) - layer.bias).double() for found in (layer, one))
    # Then so is what comes out, but for the rounding of each number
    assert float((after * before).sum() / before.square().sum()) == pytest.approx(1.006, abs=5e-4)


def test_dropout_is_drawn_by_the_bin_and_off_in_an_evaluation(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    one, other, none = (filled(strategy(tmp_path, {"rank": 4, "dropout": p})) for p in (0.4, 0.4, 0.0))
    # What ran before a bin changes nothing of it, and its gradients are drawn alike in a recomputation
    other.forward_backward(BINS[:1], TRAINED)
    other.optimizer.zero_grad()
    losses = [of.forward_backward(BINS[1:], TRAINED).item() for of in (one, other, none)]
    assert losses[0] == losses[1] != losses[2]
    for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert (a.grad is None and b.grad is None) or torch.equal(
            gathered(a.grad),
            gathered(b.grad),
        )
    again = filled(strategy(tmp_path, {"rank": 4, "dropout": 0.4}, activationCheckpointing="full"))
    assert again.forward_backward(BINS[1:], TRAINED).item() == losses[0]
    assert torch.equal(one.forward_sums(BINS), none.forward_sums(BINS))


def values(method: Any, name: str, shape: tuple[int, int], seed: int = 1) -> torch.Tensor:
    whole = torch.full(shape, torch.nan)
    box = Box(name, WEIGHT, shape, Rectangle.whole(shape), whole)
    initialize_adapters([box], LoraSpec(init_method=method), seed)
    return whole


@pytest.mark.parametrize("method", ["kaiming", "gaussian"])
def test_adapters_start_as_those_of_peft(method: Any) -> None:
    from peft import LoraConfig, get_peft_model

    # Given peft's first values of a layer that is large enough to see their distribution
    torch.manual_seed(0)
    start = True if method == "kaiming" else method
    model = get_peft_model(
        torch.nn.Sequential(torch.nn.Linear(512, 256, bias=False)),  # type: ignore[arg-type]
        LoraConfig(r=64, target_modules=["0"], init_lora_weights=start),
    )
    theirs = {plain_name(name): parameter for name, parameter in model.named_parameters()}["0.lora_A.weight"]

    ours = values(method, "0.lora_A.weight", (64, 512))

    assert not values(method, "0.lora_B.weight", (256, 64)).any()
    deviation, largest = theirs.std().item(), theirs.abs().max().item()
    assert ours.std().item() == pytest.approx(deviation, rel=0.02)
    assert ours.mean().abs().item() < 0.02 * deviation
    assert ours.abs().max().item() == pytest.approx(largest, rel=0.01 if method == "kaiming" else 0.2)
    # And others for another layer, and another seed; the same for the same
    assert torch.equal(ours, values(method, "0.lora_A.weight", (64, 512)))
    assert not torch.equal(ours, values(method, "1.lora_A.weight", (64, 512)))
    assert not torch.equal(ours, values(method, "0.lora_A.weight", (64, 512), seed=2))


def test_a_part_of_an_adapter_starts_as_that_part_of_the_whole() -> None:
    name, shape = "0.lora_A.weight", (8, 6)
    part = Box(name, WEIGHT, shape, Rectangle((2, 0), (3, 6)), torch.zeros(3, 6))
    initialize_adapters([part], LoraSpec(), 1)
    assert torch.equal(part.local, values("kaiming", name, shape)[2:5])


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        (
            {"target_modules": ["q_proj", "query"]},
            r"lora.targetModules names 'query', and no linear layer of the model is called so: its linear layers are "
            r"q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj$",
        ),
        ({"target_modules": ["proj"]}, "names 'proj'"),
        ({"target_modules": ["embed_tokens"]}, "names 'embed_tokens'"),
        ({"exclude_modules": ["wq"]}, "lora.excludeModules names 'wq'"),
        (
            {"target_modules": ["q_proj"], "exclude_modules": ["self_attn.q_proj"]},
            "lora.excludeModules leaves nothing to train of q_proj",
        ),
        ({"target_modules": ["q_proj", "lm_head"]}, "lora.targetModules names lm_head, the head of the model"),
    ],
)
def test_names_that_fit_nothing_are_refused_with_those_there_are(
    tmp_path: Path, lora: dict[str, Any], words: str
) -> None:
    save_model("llama", tmp_path)
    with pytest.raises(ConfigError, match=words):
        adapted_layers(build_on_meta(tmp_path).huggingface, LoraSpec(**lora))


def test_a_linear_layer_that_computes_otherwise_is_refused(tmp_path: Path) -> None:
    class Doubling(torch.nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(inputs)

    save_model("llama", tmp_path)
    model: Any = build_on_meta(tmp_path).huggingface
    model.model.layers[1].mlp.up_proj = Doubling(32, 64, bias=False)
    with pytest.raises(ConfigError, match=r"model.layers.1.mlp.up_proj .* is a Doubling, which computes otherwise"):
        adapted_layers(model, LoraSpec())


@pytest.mark.parametrize(
    ("precision", "base", "held"),
    [
        ("fp32", None, torch.float32),
        ("bf16", None, torch.bfloat16),
        ("fp32", "bf16", torch.bfloat16),
        ("bf16", "fp32", torch.float32),
    ],
)
def test_the_base_is_held_as_asked_and_computed_in_the_precision_of_training(
    tmp_path: Path, precision: str, base: str | None, held: torch.dtype
) -> None:
    # Given a model whose weights are numbers of bf16
    reference = save_model("llama", tmp_path)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.copy_(parameter.bfloat16())
    reference.save_pretrained(tmp_path)
    lora = {"rank": 4, **({"basePrecision": base} if base else {})}

    ours = filled(strategy(tmp_path, lora, precision=precision))

    assert {box.dtype for box in ours.boxes("base")} == {held}
    assert {box.dtype for box in [*ours.boxes("trained"), *ours.boxes("optimizer")]} == {torch.float32}
    # Holding it in bf16 loses nothing of such a model: sums and gradients are those of fp32, to the last bit
    whole = filled(strategy(tmp_path, {"rank": 4, "basePrecision": "fp32"}, precision=precision))
    losses = [of.forward_backward(BINS, TRAINED) for of in (ours, whole)]
    assert losses[0] == losses[1]
    for a, b in zip(ours.model.parameters(), whole.model.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None:
            assert torch.equal(gathered(a.grad), gathered(b.grad))


def test_frozen_weights_count_two_thirds_of_trained_ones(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    blueprint = build_on_meta(tmp_path)
    whole = ModelFlops(blueprint, lambda name: True, CPU).training([[7]])
    frozen = ModelFlops(blueprint, lambda name: False, CPU).training([[7]])
    config = json.loads((tmp_path / "config.json").read_text())
    matrices = sum(p.numel() for p in blueprint.parameters()) - config["vocab_size"] * config["hidden_size"]
    assert whole - frozen == 2 * matrices * 7
    # What adapters add is computed, and trained
    add_adapters(blueprint.huggingface, LoraSpec(rank=4))
    added = sum(p.numel() for name, p in blueprint.named_parameters() if is_adapter(name))
    assert ModelFlops(blueprint, is_adapter, CPU).training([[7]]) - frozen == 6 * added * 7


def test_layers_before_the_first_with_adapters_are_computed_forwards_alone(tmp_path: Path) -> None:
    # Given adapters on the second of two layers
    save_model("llama", tmp_path)
    blueprint = build_on_meta(tmp_path)
    add_adapters(blueprint.huggingface, LoraSpec(rank=4, target_modules=["layers.1.mlp.down_proj"]))
    huggingface: Any = blueprint.huggingface
    config, numbers = huggingface.config, {name: p.numel() for name, p in huggingface.named_parameters()}
    embedding = config.vocab_size * config.hidden_size
    frozen = sum(number for name, number in numbers.items() if not is_adapter(name)) - embedding
    whole = training_flops(config, {None: 2}, sum(numbers.values()), embedding, [7, 3], frozen)

    found = ModelFlops(blueprint, is_adapter, CPU).training([[7, 3]])

    # Then the first one's weights count 2, and its attention a third, of what they count where a gradient comes to them
    weights = sum(parameter.numel() for parameter in blueprint.blocks[0].parameters())
    attention = 6 * config.num_attention_heads * config.head_dim * (7**2 + 3**2)
    assert whole - found == 2 * weights * 10 + attention * 2 / 3
