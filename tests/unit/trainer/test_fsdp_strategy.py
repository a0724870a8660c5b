"""What FSDP promises the loop: what is trained, steps skipped on the device, bins alone or together."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM

from sft_trainer.data.batches import empty_micro_batch
from sft_trainer.data.feed import BinTensors
from sft_trainer.errors import ConfigError
from sft_trainer.models.causal_lm import build_on_meta
from sft_trainer.models.weights import load_weights
from sft_trainer.strategies.fsdp import FsdpStrategy, sharding
from sft_trainer.strategies.fsdp import strategy as strategy_module
from sft_trainer.strategies.fsdp.memory import Memory
from sft_trainer.topology import ALONE, Topology
from sft_trainer.trainable import EVERYTHING, Trainable, trainable_of
from sft_trainer.versions import tensors_in, watching_operators
from tests.bins import RoomFor, random_bin
from tests.parity.runs import manifest, resolve
from tests.unit.trainer.test_models import save_model

pytestmark = pytest.mark.usefixtures("process_group")

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_model("qwen3", path, tie_word_embeddings=True)
    return path


def strategy(
    path: Path,
    trainable: Trainable = EVERYTHING,
    *,
    precision: str = "fp32",
    keeps: bool = False,
    memory: Memory | None = None,
    **training: Any,
) -> FsdpStrategy:
    job = manifest(
        path,
        path.with_name("store"),
        model={"uri": f"file://{path}"},
        training={"precision": precision, **training},
        strategy={"fsdp": {"reshardAfterForward": not keeps}},
    )
    config = resolve(job)
    built = FsdpStrategy(config, build_on_meta(path), trainable, ALONE, CPU, memory)
    load_weights(built.boxes("base") + built.boxes("trained"), built.model.names, path)
    built.loaded()
    return built


EMPTY = BinTensors.of(empty_micro_batch(), counts=False)
BINS = (random_bin(1, 5, 9), random_bin(2, 12), random_bin(3, 3, 4, 6), random_bin(4, 7), random_bin(5, 2, 11))
BIN_TOKENS = 512
"""Of the manifest: as long as an example may be."""
TRAINED = sum(len(bin_.labels) for bin_ in BINS)


def whole(tensor: Any) -> torch.Tensor:
    full: torch.Tensor = tensor.full_tensor().detach().clone() if hasattr(tensor, "full_tensor") else tensor.clone()
    return full


def weights(of: FsdpStrategy) -> dict[str, torch.Tensor]:
    return {name: whole(parameter) for name, parameter in of.model.named_parameters()}


def moments(of: FsdpStrategy) -> list[torch.Tensor]:
    return [whole(value) for state in of.optimizer.state.values() for value in state.values()]


def gradients(of: FsdpStrategy) -> dict[str, torch.Tensor]:
    return {name: whole(parameter.grad) for name, parameter in of.model.named_parameters()}


def step(of: FsdpStrategy, *, ok: bool = True) -> None:
    of.forward_backward(BINS, TRAINED)
    of.apply(1e-2, 1.0, of.grad_norm(), torch.tensor(ok))


@pytest.mark.parametrize(
    "chosen",
    [
        {},
        {"optimizer": {"type": "muon"}},
        {"precision": "bf16", "parameterDtype": "bf16", "optimizer": {"type": "muon", "stateDtype": "bf16"}},
    ],
    ids=["adamw", "muon", "muon in bf16"],
)
def test_a_step_that_is_not_finite_changes_nothing_and_is_not_counted(folder: Path, chosen: dict[str, Any]) -> None:
    # Given two alike, after a step
    skips, goes_on = strategy(folder, **chosen), strategy(folder, **chosen)
    step(skips)
    step(goes_on)
    before, before_moments = weights(skips), moments(skips)

    # When the gradients of one are not finite, which only the device knows
    skips.forward_backward(BINS, TRAINED)
    for parameter in skips.model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(torch.nan)
    norm = skips.grad_norm()
    skips.apply(1e-2, 1.0, norm, torch.isfinite(norm))

    # Then it is as it was to the last bit, its moments and counts of steps too
    for name, value in weights(skips).items():
        assert torch.equal(value, before[name]), name
    for now, then in zip(moments(skips), before_moments, strict=True):
        assert torch.equal(now, then)
    assert all(parameter.grad is None for parameter in skips.model.parameters())

    # And the next step is that of the other
    step(skips)
    step(goes_on)
    for name, value in weights(goes_on).items():
        assert torch.equal(value, weights(skips)[name]), name


def test_a_first_step_that_is_skipped_leaves_an_optimizer_as_new(folder: Path) -> None:
    skips = strategy(folder)
    step(skips, ok=False)
    assert all(not moment.any() for moment in moments(skips))


def test_one_process_that_copies_nothing_computes_what_one_that_does_to_the_last_bit(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given one that computes with what it holds, tied weights and all, and one that FSDP gathers for
    alone = strategy(folder)
    monkeypatch.setattr(sharding, "computes_with_copies", lambda *_: True)
    copied = strategy(folder)
    assert [isinstance(of.model, FSDPModule) for of in (alone, copied)] == [False, True]
    _compute_the_same(alone, copied)


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("qwen3", {}),
        ("qwen3", {"activationCheckpointing": "selective"}),
        # Gradients of norms in fp32, and experts.
        ("olmo2", {}),
        ("gpt_oss", {}),
    ],
)
def test_one_process_with_copies_of_its_own_computes_what_fsdp_does_to_the_last_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, how: dict[str, Any]
) -> None:
    with_copies_and_without(tmp_path, monkeypatch, kind, how)


def with_copies_and_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, how: dict[str, Any]) -> None:
    """One process with copies of its own of a model of this ``kind`` computes what FSDP does, to the last bit."""
    # Given one that casts its weights itself, tied weights and all, and one for which FSDP does
    save_model(kind, tmp_path, tie_word_embeddings=kind == "qwen3")
    alone = strategy(tmp_path, precision="bf16", keeps=True, **how)
    for module in (sharding, strategy_module):
        monkeypatch.setattr(module, "holds_copies", lambda *_: False)
    copied = strategy(tmp_path, precision="bf16", keeps=True, **how)
    assert [isinstance(of.model, FSDPModule) for of in (alone, copied)] == [False, True]
    _compute_the_same(alone, copied)
    # What is trained is in fp32, and what was computed with is nowhere
    assert {parameter.dtype for parameter in alone.model.parameters()} == {torch.float32}
    assert {parameter.grad.dtype for parameter in alone.model.parameters() if parameter.grad is not None} == {
        torch.float32
    }


def test_gradients_in_bf16_are_added_up_as_they_come(folder: Path) -> None:
    # Given one process with copies of its own, in its second pass, where there are sums in fp32
    ours = strategy(folder, precision="bf16", keeps=True)
    ours.forward_backward(BINS[:1], TRAINED)
    sums = {parameter.grad.data_ptr() for parameter in ours.model.parameters() if parameter.grad is not None}
    matrices = {parameter.shape for parameter in ours.model.parameters() if parameter.ndim == 2}
    made: list[torch.Tensor] = []

    # When that is computed
    with watching_operators(made.extend):
        ours.forward_backward(BINS[1:2], TRAINED)

    # Then nothing of a matrix's size is there in fp32 besides: it would be twice its gradient
    of_matrices = [tensor for tensor in made if tensor.shape in matrices and tensor.dtype == torch.float32]
    assert of_matrices
    assert {tensor.data_ptr() for tensor in of_matrices} <= sums


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("kind", ["qwen3", "olmo2", "ernie4_5", "gemma3_text"])
def test_what_a_model_computes_in_fp32_beside_layers_in_bf16_stays_so(kind: str, keeps: bool, tmp_path: Path) -> None:
    def given(model: torch.nn.Module) -> list[torch.dtype]:
        """Of all that goes into the layers of ``model``, in their order."""
        seen: list[torch.dtype] = []

        def look(_: torch.nn.Module, values: tuple[Any, ...], named: dict[str, Any]) -> None:
            seen.extend(tensor.dtype for tensor in tensors_in((values, named)) if tensor.is_floating_point())

        for layer in model.get_submodule("model.layers"):
            layer.register_forward_pre_hook(look, with_kwargs=True)
        return seen

    save_model(kind, tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    expected = given(plain)
    plain(input_ids=torch.arange(5, 12)[None], use_cache=False)

    ours = strategy(tmp_path, precision="bf16", keeps=keeps)
    found = given(ours.model.huggingface)
    ours.forward_sums([random_bin(1, 7)])

    assert found == expected
    assert (torch.float32 in found) == (kind in ("olmo2", "ernie4_5"))


def _compute_the_same(alone: FsdpStrategy, copied: FsdpStrategy) -> None:

    # When both make two steps of several micro-batches
    for one in (alone, copied):
        step(one)
    losses = [one.forward_backward(BINS, TRAINED) for one in (alone, copied)]

    # Then no bit differs: losses, gradients, norm, weights, moments, evaluation
    assert torch.equal(*losses)
    assert torch.equal(alone.grad_norm(), copied.grad_norm())
    for name, gradient in gradients(copied).items():
        assert torch.equal(gradients(alone)[name], gradient), name
    for name, value in weights(copied).items():
        assert torch.equal(weights(alone)[name], value), name
    for one, other in zip(moments(alone), moments(copied), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(alone.forward_sums(BINS), copied.forward_sums(BINS))
    # And a checkpoint holds the same
    for which in ("trained", "optimizer"):
        ours, theirs = [{(box.name, box.kind): box for box in of.boxes(which)} for of in (alone, copied)]
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key].read(), theirs[key].read()) for key in ours)


def test_gradients_are_clipped_to_their_norm_in_the_step(folder: Path) -> None:
    clipped, not_clipped = strategy(folder), strategy(folder)
    for one, most in ((clipped, 0.01), (not_clipped, 0.0)):
        one.forward_backward(BINS, TRAINED)
        norm = one.grad_norm()
        assert norm > 0.1
        one.apply(1e-2, most, norm, torch.tensor(True))
    ratios = [
        a.norm() / b.norm() for a, b in zip(*(_first_moments(one) for one in (clipped, not_clipped)), strict=True)
    ]
    assert torch.stack(ratios).tolist() == pytest.approx([0.01 / float(norm)] * len(ratios), rel=1e-4)


def _first_moments(of: FsdpStrategy) -> list[torch.Tensor]:
    return [whole(state["exp_avg"]) for state in of.optimizer.state.values()]


def room_for(bins: int) -> RoomFor:
    return RoomFor(bins, BIN_TOKENS, seen=max(bin_.input_ids.shape[0] for bin_ in BINS))


@pytest.mark.parametrize("together", [2, 3, 5])
def test_bins_together_give_the_sums_of_bins_alone(folder: Path, together: int) -> None:
    # Given two alike, of which one has memory for more than one bin
    alone, grouped = strategy(folder), strategy(folder, memory=room_for(together))
    forwards: list[int] = []
    grouped.model.register_forward_pre_hook(lambda _, arguments: forwards.append(len(arguments[0])))
    bins = [*BINS, EMPTY]
    for one in (alone, grouped):
        for _ in range(2):
            step(one)
    assert len(forwards) == 2 * len(BINS), "of the first two steps each goes alone"

    # When another step follows
    forwards.clear()
    losses = [one.forward_backward(bins, TRAINED) for one in (alone, grouped)]

    # Then it is made with fewer passes, and the same sums
    assert len(forwards) == -(-len(bins) // together)
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=0)
    for name, gradient in gradients(alone).items():
        assert (gradients(grouped)[name] - gradient).norm() <= 2e-6 * gradient.norm() + 1e-9, name
    torch.testing.assert_close(grouped.forward_sums(bins)[0], losses[0], rtol=1e-6, atol=0)


@pytest.mark.parametrize("keeps", [False, True])
def test_what_is_there_once_are_weights_that_stay_gathered(
    folder: Path, keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (sharding, strategy_module):
        monkeypatch.setattr(module, "holds_copies", lambda *_: False)
    # Given a model in bf16, which one process casts when it gathers it; tied weights are there once
    fsdp = {"fsdp": {"reshardAfterForward": not keeps}}
    job = manifest(folder, folder.with_name("store"), strategy=fsdp, training={"precision": "bf16"})
    config = resolve(job)
    built = FsdpStrategy(config, build_on_meta(folder), EVERYTHING, ALONE, CPU)
    numbers = {name: parameter.numel() for name, parameter in built.model.named_parameters()}
    outside = {name: number for name, number in numbers.items() if ".layers." not in name}

    expected = 2 * sum((numbers if keeps else outside).values())
    assert sharding.kept_gathered_bytes(config, built.model) == expected > 0


def test_where_random_numbers_are_drawn_every_bin_goes_alone(tmp_path: Path) -> None:
    save_model("llama", tmp_path, attention_dropout=0.25)
    alone, asked = strategy(tmp_path), strategy(tmp_path, memory=room_for(3))
    for one in (alone, asked):
        for _ in range(2):
            one.forward_backward(BINS, TRAINED)
    assert alone.forward_backward(BINS, TRAINED).item() == asked.forward_backward(BINS, TRAINED).item()
    # And they are drawn by the bin, whatever came before it.
    others = strategy(tmp_path)
    others.forward_backward(BINS[3:], TRAINED)
    assert others.forward_backward(BINS, TRAINED).item() == alone.forward_backward(BINS, TRAINED).item()


def test_an_evaluation_draws_nothing_and_leaves_no_gradients(tmp_path: Path) -> None:
    save_model("llama", tmp_path, attention_dropout=0.25)
    built = strategy(tmp_path)
    sums = [float(built.forward_sums([bin_])[0]) for bin_ in BINS]
    assert float(built.forward_sums(BINS)[0]) == pytest.approx(sum(sums))
    assert all(parameter.grad is None for parameter in built.model.parameters())
    assert float(built.forward_backward(BINS, TRAINED)) != pytest.approx(sum(sums), rel=1e-5)


def test_an_empty_bin_counts_nothing(folder: Path) -> None:
    built = strategy(folder)
    assert float(built.forward_backward([EMPTY], TRAINED)) == 0
    assert all(not gradient.any() for gradient in gradients(built).values())
    assert not built.forward_sums([EMPTY]).any()


def test_only_what_is_trained_changes_and_the_base_has_its_own_dtype(folder: Path) -> None:
    # Given a model of which one projection is trained, the rest in bf16
    chosen = Trainable(trains=lambda name: name.endswith("q_proj.weight"), base_dtype=torch.bfloat16)
    built = strategy(folder, chosen, precision="bf16")
    before = weights(built)
    dtypes = {name.rpartition("layers.")[2]: value.dtype for name, value in before.items()}
    assert dtypes["0.self_attn.q_proj.weight"] == torch.float32
    assert dtypes["0.self_attn.k_proj.weight"] == torch.bfloat16

    # When a step is made
    step(built)

    # Then nothing else changed, has moments, or is saved
    changed = [name for name, value in weights(built).items() if not torch.equal(value, before[name])]
    assert [name.removeprefix("huggingface.model.layers.") for name in changed] == [
        "0.self_attn.q_proj.weight",
        "1.self_attn.q_proj.weight",
    ]
    assert len(built.optimizer.state) == 2
    # Boxes are apart in the same way
    names = [name.removeprefix("huggingface.") for name in changed]
    assert [box.name for box in built.boxes("trained")] == names
    assert {(box.name, box.kind) for box in built.boxes("optimizer")} == {
        (name, kind) for name in names for kind in ("exp_avg", "exp_avg_sq")
    }
    assert [box.name for box in built.boxes("base")] == [
        name.removeprefix("huggingface.") for name in before if name not in changed
    ]


def test_weights_in_bf16_are_trained_saved_and_added_up_in_it_and_their_norm_is_right(folder: Path) -> None:
    # Given a model whose weights are held as they are computed with
    config = resolve(manifest(folder, folder, training={"precision": "bf16", "parameterDtype": "bf16"}))
    held = strategy(folder, trainable_of(config), precision="bf16", parameterDtype="bf16")
    assert not any(isinstance(module, FSDPModule) for module in held.model.modules()), "one process copies nothing"
    in_fp32 = strategy(folder, precision="bf16")

    # When a step of several micro-batches is computed
    losses = [float(of.forward_backward(BINS, TRAINED)) for of in (held, in_fp32)]

    # Then its loss is that of weights which are rounded for it, and gradients are off by what adding up in bf16 is
    assert losses[0] == losses[1]
    for name, gradient in gradients(held).items():
        assert gradient.dtype == torch.bfloat16, name
        assert (gradient.float() - gradients(in_fp32)[name]).norm() <= 0.01 * gradient.float().norm(), name
    # And their norm is no number of bf16
    squares = sum(gradient.double().square().sum() for gradient in gradients(held).values())
    assert float(held.grad_norm()) == pytest.approx(float(squares) ** 0.5, rel=1e-6)

    # When it is made, then all weights change that had a gradient, tied ones once, and boxes hold them in bf16
    before = weights(held)
    held.apply(1e-2, 1.0, held.grad_norm(), torch.tensor(True))
    assert [name for name, value in weights(held).items() if torch.equal(value, before[name])] == []
    assert {box.dtype for box in held.boxes("trained")} == {torch.bfloat16}
    assert {box.dtype for box in held.boxes("optimizer")} == {torch.float32}


def test_what_boxes_are_filled_with_is_trained(folder: Path) -> None:
    # Given a model that is all trained, so that there is no base
    filled, loaded = strategy(folder), strategy(folder)
    assert filled.boxes("base") == []
    values = {box.name: box.read().clone() for box in loaded.boxes("trained")}

    # When its boxes are filled, after they held something else
    for box in filled.boxes("trained"):
        box.write(torch.zeros_like(box.local))
        box.write(values[box.name])
    filled.loaded()

    # Then it computes what the other does
    assert torch.equal(filled.forward_sums(BINS), loaded.forward_sums(BINS))


def test_what_is_trained_is_all_of_it_in_fp32() -> None:
    assert EVERYTHING.trains("model.norm.weight")
    assert EVERYTHING.saves("model.norm.weight")
    assert EVERYTHING.dtype("model.norm.weight") == torch.float32


def test_other_parallelism_than_of_data_is_refused(folder: Path) -> None:
    config = resolve(manifest(folder, folder.with_name("store")))
    tensor = Topology(rank=0, local_rank=0, world_size=2, tensor=2)
    with pytest.raises(ConfigError, match="only over processes that compute on other tokens"):
        FsdpStrategy(config, build_on_meta(folder), EVERYTHING, tensor, CPU)
