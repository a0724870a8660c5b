"""Mixtures of experts against plain Hugging Face: what is computed, the loss of routers, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy

from sft_api.families import FAMILIES
from sft_cli.trained import Trained, measure_trained
from sft_trainer.data.batches import empty_micro_batch
from sft_trainer.data.feed import BinTensors
from sft_trainer.errors import ConfigError, ModelError
from sft_trainer.export.plan import plan_export
from sft_trainer.models.causal_lm import build_on_meta
from sft_trainer.models.digest import base_digest
from sft_trainer.models.experts import PROVEN, UNBALANCED, Balance, check_balances, load_balance
from sft_trainer.models.lora import adapted_layers, add_adapters, is_adapter
from sft_trainer.models.weights import load_weights
from sft_trainer.strategies.fsdp import FsdpStrategy
from sft_trainer.topology import ALONE
from sft_trainer.trainable import trainable_of
from tests.bins import RoomFor, random_bin
from tests.mxfp4 import pack
from tests.parity.runs import manifest, resolve
from tests.unit.trainer.test_fsdp_strategy import whole
from tests.unit.trainer.test_models import save_mixture, save_model

pytestmark = pytest.mark.usefixtures("process_group")

CPU = torch.device("cpu")
COEFFICIENT = 0.5
KINDS = ["qwen3_moe", "mixtral", "olmoe", "qwen2_moe", "granitemoe", "flex_olmo", "gpt_oss"]
KINDS += [
    "minimax_m2",
    "ernie4_5_moe",
    "mellum",
    "granitemoe_swa",
    "qwen3_next",
    "qwen3_5_moe_text",
    "qwen3_vl_moe_text",
    "glm4v_moe_text",
]
LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "mistral4")
BINS = (random_bin(1, 5, 9), random_bin(2, 12), random_bin(3, 3, 4, 6), random_bin(4, 7), random_bin(5, 2, 11))
EMPTY = BinTensors.of(empty_micro_batch(), counts=False)
TRAINED = sum(len(bin_.labels) for bin_ in BINS)
TOKENS = sum(len(bin_.input_ids) for bin_ in BINS)


def strategy(
    path: Path, coefficient: float = COEFFICIENT, how: str = "none", memory: Any = None, **training: Any
) -> FsdpStrategy:
    training = {"routerAuxLossCoefficient": coefficient, "activationCheckpointing": how, **training}
    config = resolve(manifest(path, path.with_name("store"), model={"uri": f"file://{path}"}, training=training))
    built = FsdpStrategy(config, build_on_meta(path), trainable_of(config), ALONE, CPU, memory)
    load_weights(built.boxes("base") + built.boxes("trained"), built.model.names, path)
    return built


def gradients(of: FsdpStrategy) -> dict[str, torch.Tensor]:
    model = of.model
    return {model.module_of_whole(name): whole(p.grad) for name, p in model.huggingface.named_parameters()}


def step(of: FsdpStrategy, bins: Any = BINS) -> tuple[list[float], dict[str, torch.Tensor]]:
    of.optimizer.zero_grad()
    sums = of.forward_backward(bins, TRAINED, TOKENS)
    return sums.tolist(), gradients(of)


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    difference = sum((one[name] - other[name]).square().sum() for name in one)
    return float((difference / sum(value.square().sum() for value in other.values())).sqrt())


def plain(reference: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same step by transformers alone: document by document, its own loss of routers over each bin."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    config = reference.config.get_text_config()
    reference.train()
    total, uneven, sums = torch.zeros(()), torch.zeros(()), [0.0, 0.0]
    for bin_ in BINS:
        outputs, labels, start = [], [], 0
        position = dict(zip(bin_.targets.tolist(), bin_.labels.tolist(), strict=True))
        for length in bin_.boundaries.lengths:
            ids = bin_.input_ids[start : start + length]
            outputs.append(reference(input_ids=ids[None], output_router_logits=True, use_cache=False))
            labels.append(torch.tensor([position.get(start + i, -100) for i in range(length)]))
            start += length
        loss = torch.stack(
            [
                cross_entropy(output.logits[0], label, reduction="sum", ignore_index=-100)
                for output, label in zip(outputs, labels, strict=True)
            ]
        ).sum()
        routers = tuple(torch.cat(layers) for layers in zip(*(output.router_logits for output in outputs), strict=True))
        aux = load_balancing_loss_func(routers, routers[0].shape[-1], config.num_experts_per_tok)
        total = total + loss / TRAINED
        uneven = uneven + aux * start / TOKENS
        sums = [sums[0] + loss.item(), sums[1] + aux.item() * start]
    (total + COEFFICIENT * uneven).backward()
    return sums, {name: weight.grad for name, weight in reference.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize("how", ["none", "selective", "full"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_with_the_loss_of_routers_is_that_of_transformers(tmp_path: Path, kind: str, how: str) -> None:
    # Given a small mixture of experts, and a step of bins of several documents
    expected = plain(save_mixture(kind, tmp_path))

    # When it is trained, whatever is computed again
    trained = strategy(tmp_path, how=how)
    sums, found = step(trained)

    # Then loss, the loss of the routers, and gradients are those of transformers to rounding
    assert sums == pytest.approx(expected[0], rel=1e-6)
    assert distance(found, expected[1]) <= 1e-6
    # And of what was computed again nothing is kept
    routers = [module for module in trained.model.huggingface.modules() if hasattr(module, "asked")]
    assert routers
    assert all(router.logits is None for router in routers)


@pytest.mark.parametrize(
    ("kind", "name", "hub"),
    [
        ("deepseek_v3", "gate.e_score_correction_bias", "gate.e_score_correction_bias"),
        # Parameters for transformers, which nothing trains.
        ("ernie4_5_moe", "gate.moe_statics.e_score_correction_bias", "moe_statics.e_score_correction_bias"),
        ("afmoe", "expert_bias", "expert_bias"),
    ],
)
def test_corrections_of_routers_stay_as_they_are_published(tmp_path: Path, kind: str, name: str, hub: str) -> None:
    # Given a model whose weights are in bf16, and corrections of its routers' choices in fp32
    save_model(kind, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {each: value if hub in each else value.bfloat16() for each, value in load_file(file).items()}
    save_file(tensors, file)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))

    # When it is trained, with weights and all that is computed in bf16
    trained = strategy(tmp_path, 0, precision="bf16", parameterDtype="bf16")
    before = trained.forward_backward(BINS, TRAINED)
    trained.apply(1e-2, 1.0, trained.grad_norm(), torch.tensor(True))
    assert trained.forward_backward(BINS, TRAINED) < before

    # Then they are what they were, and are exported so
    full, published = f"model.layers.1.mlp.{name}", tensors[f"model.layers.1.mlp.{hub}"]
    assert torch.equal(trained.model.huggingface.get_buffer(full), published)
    assert published.bfloat16().float().ne(published).any()
    (box,) = (box for box in trained.boxes("trained") if box.name.endswith(hub))
    assert torch.equal(box.read(), published)
    plan = plan_export(build_on_meta(tmp_path), torch.bfloat16)
    assert {entry.dtype for file in plan.files for entry in file.entries if hub in entry.name} == {torch.float32}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_model("qwen3_moe", path)
    return path


def test_bins_together_and_empty_ones_change_nothing(folder: Path) -> None:
    room = RoomFor(3, 512, seen=max(bin_.input_ids.shape[0] for bin_ in BINS))
    alone, grouped = strategy(folder), strategy(folder, memory=room)
    step(grouped)
    step(grouped)
    assert grouped._at_once > 1

    wanted, found, beside = step(alone), step(grouped), step(alone, [*BINS, EMPTY])

    assert found[0] == pytest.approx(wanted[0], rel=1e-6)
    assert distance(found[1], wanted[1]) <= 1e-6
    assert beside[0] == wanted[0]
    assert distance(beside[1], wanted[1]) == 0


def test_without_a_coefficient_it_is_the_cross_entropy_alone(folder: Path) -> None:
    without, with_one = strategy(folder, 0), strategy(folder)
    loss = without.forward_backward(BINS, TRAINED)

    sums, found = step(with_one)

    assert not without.auxiliary
    assert loss.shape == ()
    assert float(loss) == sums[0]
    assert distance(found, gradients(without)) > 1e-3
    assert float(without.forward_sums(BINS)[0]) == pytest.approx(sums[0], rel=1e-6)


def test_even_use_of_the_experts_is_as_many_as_a_token_is_sent_to() -> None:
    # Given 4 experts, of which each token is sent to 2: one bin evenly, another to the same two
    even = torch.tensor([[9.0, 9, 0, 0], [0, 0, 9, 9]]).repeat(3, 1)
    same = torch.tensor([[9.0, 9, 0, 0]]).repeat(4, 1)

    found = load_balance([torch.cat([even, same])], Balance(1.0, (6, 4), (6, 4)), 2)

    # Then the first is 2, the least there is, the second 4 where the others have no chance
    assert float(found) == pytest.approx(6 * 2 + 4 * 4, rel=1e-3)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("qwen3", "sends no tokens to experts"),
        ("glm4_moe", "transformers knows"),
        ("llama4_text", "transformers knows"),
    ],
)
def test_a_loss_that_the_model_does_not_have_is_refused(tmp_path: Path, kind: str, why: str) -> None:
    save_mixture(kind, tmp_path)
    model: Any = build_on_meta(tmp_path).huggingface
    for _ in range(2):
        with pytest.raises(ConfigError, match=f"training.routerAuxLossCoefficient is set, .*{why}"):
            check_balances(model)
        # Neither where its file has a field that its type does not know
        model.config.router_aux_loss_coef = 0.01


@pytest.mark.parametrize("kind", [kind for kind, family in FAMILIES.items() if family.mixture])
def test_whose_loss_transformers_knows_is_known_before_a_pod_is_made(kind: str) -> None:
    from transformers import AutoConfig

    has_coefficient = hasattr(AutoConfig.for_model(kind), "router_aux_loss_coef")
    assert FAMILIES[kind].balanced == (has_coefficient and kind not in UNBALANCED)


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_that_it_has_is_not(tmp_path: Path, kind: str) -> None:
    save_mixture(kind, tmp_path)
    check_balances(build_on_meta(tmp_path).huggingface)


def test_widths_that_the_kernel_does_not_take_are_refused(tmp_path: Path) -> None:
    save_model("qwen3_moe", tmp_path, moe_intermediate_size=12)
    with pytest.raises(ModelError, match=r"has the shape \(4, 32, 12\): .* multiples of 8"):
        build_on_meta(tmp_path)


def test_adapters_are_put_beside_attention_and_not_on_routers_or_experts(folder: Path) -> None:
    huggingface: Any = build_on_meta(folder).huggingface
    job = manifest(folder, folder, lora={"rank": 4})
    lora = resolve(job).spec.lora
    assert lora is not None

    leaves = {name.rpartition(".")[2] for name in adapted_layers(huggingface, lora)}

    assert leaves == {"q_proj", "k_proj", "v_proj", "o_proj"}
    there = "are q_proj, k_proj, v_proj, o_proj; routers get no adapters, and experts where .* experts, or"
    for name in ("gate", "gate_up_proj", "up_proj", "experts.0.up_proj"):
        with pytest.raises(ConfigError, match=f"lora.targetModules names '{name}', and no linear layer .* {there}"):
            adapted_layers(huggingface, lora.model_copy(update={"target_modules": [name]}))
    experts = "and no experts of the model are called so: they are model.layers.0.mlp.experts.gate_up_proj to "
    for name in ("experts.gate", "block_sparse_moe.experts", "layers.9.mlp.experts"):
        with pytest.raises(ConfigError, match=f"lora.targetModules names '{name}', {experts}"):
            adapted_layers(huggingface, lora.model_copy(update={"target_modules": [name]}))


@pytest.mark.parametrize(
    ("kind", "chosen"),
    [*((kind, chosen) for kind in ("qwen3_moe", "mixtral", "glm4_moe") for chosen in (0, 99)), ("deepseek_v2", None)],
)
def test_a_token_is_sent_to_as_many_experts_as_there_are(tmp_path: Path, kind: str, chosen: int | None) -> None:
    # Given a config.json by which every token goes to none of the experts, or to more than there are
    save_model(kind, tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "num_experts_per_tok": chosen}))
    with pytest.raises(ModelError, match=rf"has \d+ experts and sends every token to {chosen} of them"):
        build_on_meta(tmp_path)


def test_experts_that_no_file_can_hold_are_refused_before_they_are_listed(tmp_path: Path) -> None:
    save_model("qwen3_moe", tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "num_experts": 10_000, "num_local_experts": 10_000}))
    with pytest.raises(
        ModelError, match=r"says 10000 experts \(.*\), but all files of weights together have \d+ tensors"
    ):
        base_digest(build_on_meta(tmp_path), tmp_path)


@pytest.mark.parametrize("names", [["all-linear"], ["all-linear", "experts"], ["layers.1.mlp.experts", "q_proj"]])
@pytest.mark.parametrize("kind", PROVEN)
def test_the_plan_counts_the_adapters_that_the_trainer_adds(tmp_path: Path, kind: str, names: list[str]) -> None:
    save_mixture(kind, tmp_path)
    if kind.startswith("granite"):
        names = [name.replace("mlp", "block_sparse_moe") for name in names]
    block = {"lfm2_moe": "feed_forward", "llama4_text": "feed_forward", "nemotron_h": "mixer"}.get(kind, "mlp")
    names = [name.replace("mlp", block) for name in names]
    if kind in LATENT:
        names = [name.replace("q_proj", "kv_b_proj") for name in names]
    if kind == "gemma4_text":
        names = [name.replace(".mlp.experts", ".experts") for name in names]
    lora = {"rank": 4, "targetModules": names, **({"expertRank": 3} if len(names) > 1 else {})}
    spec = resolve(manifest(tmp_path, tmp_path.with_name("store"), model={"uri": f"file://{tmp_path}"}, lora=lora)).spec
    assert spec.lora is not None
    huggingface: Any = build_on_meta(tmp_path).huggingface
    frozen = sum(parameter.numel() for parameter in huggingface.parameters())
    layers = add_adapters(huggingface, spec.lora)
    trained = sum(p.numel() for name, p in huggingface.named_parameters() if is_adapter(name))

    found = measure_trained(spec)

    assert isinstance(found, Trained)
    of_experts = {name.rpartition(".")[0] for name in layers if ".experts." in name}
    assert (found.layers, found.experts) == (sum(".experts." not in name for name in layers), len(of_experts))
    assert found.parameters == trained
    # Files hold corrections of routers besides, which are no parameters.
    assert found.frozen == pytest.approx(frozen, abs=64)


def test_the_plan_leaves_out_layers_that_the_model_has_in_its_files_alone(tmp_path: Path) -> None:
    save_model("glm4_moe", tmp_path)
    spec = resolve(
        manifest(tmp_path, tmp_path.with_name("store"), model={"uri": f"file://{tmp_path}"}, lora={"rank": 4})
    ).spec
    plain = measure_trained(spec)
    assert isinstance(plain, Trained)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    further = {
        name.replace(".layers.1.", ".layers.2."): value.clone()
        for name, value in tensors.items()
        if ".layers.1." in name
    }
    beside = {
        "model.layers.2.eh_proj.weight": torch.zeros(32, 64),
        "mtp.layers.0.mlp.up_proj.weight": torch.zeros(9, 9),
    }
    save_file({**tensors, **further, **beside}, file)
    assert measure_trained(spec) == plain


def test_the_plan_knows_layers_by_the_names_that_the_model_has(tmp_path: Path) -> None:
    save_model("hy_v3", tmp_path)
    lora = {"rank": 4, "targetModules": ["shared_experts.down_proj"]}
    spec = resolve(manifest(tmp_path, tmp_path.with_name("store"), model={"uri": f"file://{tmp_path}"}, lora=lora)).spec
    found = measure_trained(spec)
    assert isinstance(found, Trained)
    assert found.layers == 1


def test_the_plan_counts_the_values_of_packed_experts(tmp_path: Path) -> None:
    save_model("gpt_oss", tmp_path, intermediate_size=32)
    lora = {"rank": 4, "targetModules": ["all-linear", "experts"]}
    spec = resolve(manifest(tmp_path, tmp_path.with_name("store"), model={"uri": f"file://{tmp_path}"}, lora=lora)).spec
    plain = measure_trained(spec)
    assert isinstance(plain, Trained)
    assert plain.experts > 0
    pack(tmp_path)
    assert measure_trained(spec) == plain


def test_the_plan_says_what_experts_there_are_in_files_too(tmp_path: Path) -> None:
    save_model("flex_olmo", tmp_path)
    lora = {"targetModules": ["layers.7.mlp.experts"]}
    job = manifest(tmp_path, tmp_path.with_name("store"), model={"uri": f"file://{tmp_path}"}, lora=lora)
    assert "no experts of the model are called so: they are model.layers.0.mlp" in str(
        measure_trained(resolve(job).spec)
    )
