"""AdamW with moments in bf16 or 8 bits, or weights in bf16: as torch's but for rounding, right on average and the same
everywhere."""

from typing import Any

import pytest
import torch

from sft_api.v1alpha1 import SFTJobSpec
from sft_trainer import rounded_adamw
from sft_trainer.optim import build_optimizer, moments, set_updates, updates
from sft_trainer.rounded_adamw import round_stochastically_
from sft_trainer.trainable import DTYPES
from tests.unit.trainer.test_optim import spec


def with_state(dtype: str, weights: str, **options: Any) -> SFTJobSpec:
    document = spec().model_dump(by_alias=True, mode="json", exclude_none=True)
    document["training"] |= {"precision": "bf16", "parameterDtype": weights}
    document["training"]["optimizer"] |= {"stateDtype": dtype, **options}
    return SFTJobSpec.model_validate(document)


def optimizer_of(
    dtype: str, *shapes: tuple[int, ...], first: int = 0, weights: str = "fp32", rate: float = 1e-2, **options: Any
) -> tuple[Any, list[Any]]:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator).to(DTYPES[weights]) for shape in shapes]
    parameters = [torch.nn.Parameter(value) for value in values]
    named = [(f"layer.{index}", parameter) for index, parameter in enumerate(parameters)]
    chosen = with_state(dtype, weights, **options)
    return build_optimizer(named, chosen, rate, lambda tensor: (tensor, first)), parameters


def train(optimizer: Any, parameters: list[Any], steps: int, scale: float = 1.0, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for parameter in parameters:
            parameter.grad = (torch.randn(parameter.shape, generator=generator) * scale).to(parameter.dtype)
        optimizer.step()


ALL = slice(0, 2**22)
KEY = torch.tensor(12345, dtype=torch.int32)


def test_rounding_is_right_on_average_and_leaves_what_bf16_holds() -> None:
    # Given a number at three tenths of the way between two of bf16
    low, high = 1.0, 1.0 + 2**-7
    values = torch.full((100_000,), low + 0.3 * (high - low))
    rounded = round_stochastically_(values, KEY, 0)
    assert set(rounded.tolist()) == {low, high}
    assert float((rounded == high).float().mean()) == pytest.approx(0.3, abs=0.01)
    # And neighbours, in place and in time, are rounded apart from one another
    later = round_stochastically_(torch.full((100_000,), low + 0.3 * (high - low)), KEY + 747796405, 0)
    ups = torch.stack([rounded[:-1] == high, rounded[1:] == high, later[:-1] == high]).double()
    assert torch.corrcoef(ups).fill_diagonal_(0).abs().max() < 0.02

    # And numbers below 0 as those above
    assert torch.equal(round_stochastically_(torch.full((100_000,), -low - 0.3 * (high - low)), KEY, 0), -rounded)

    exact = torch.tensor([0.0, -1.0, 1.0, 2.0**-130, 3.3895e38]).bfloat16().float()
    assert torch.equal(round_stochastically_(exact.clone(), KEY, 7), exact)


@pytest.mark.parametrize("beta", [0.9, 0.99, 0.999])
def test_a_weight_without_gradients_comes_to_rest(beta: float) -> None:
    # Given a weight that had gradients once, such as the embedding of a rare token
    ends = []
    for dtype in ("bf16", "int8", "fp32"):
        optimizer, (parameter,) = optimizer_of(dtype, (64, 64), betas=[beta, 0.999], weightDecay=0.0)
        before = parameter.detach().clone()
        for step in range(500):
            parameter.grad = torch.full_like(parameter, float(step < 100))
            optimizer.step()
        ends.append(float((parameter.detach() - before).mean()))
    # Then it moves on by what those leave behind, and no more
    assert ends[:2] == pytest.approx([ends[2]] * 2, rel=0.03)


def test_random_numbers_are_spread_evenly_and_differ_for_what_is_rounded_by_other_keys() -> None:
    keys = [KEY, KEY.bitwise_xor(rounded_adamw._OF_FIRST), KEY.bitwise_xor(rounded_adamw._OF_WEIGHTS)]
    drawn = torch.stack([rounded_adamw._uniform(torch.empty(200_000), key, 0) for key in keys])
    assert torch.corrcoef(drawn).fill_diagonal_(0).abs().max() < 0.01
    counts = torch.stack([torch.histc(each, 100, 0.0, 1.0) for each in drawn])
    assert torch.allclose(counts, torch.full_like(counts, 2000.0), rtol=0.1)
    assert 0 <= float(drawn.min()) < float(drawn.max()) < 1


def test_bits_are_those_of_the_place_in_the_whole() -> None:
    whole = torch.rand(1000, generator=torch.Generator().manual_seed(0))
    parts = [round_stochastically_(whole[a:b].clone(), KEY, a) for a, b in ((0, 300), (300, 301), (301, 1000))]
    assert torch.equal(torch.cat(parts), round_stochastically_(whole.clone(), KEY, 0))
    # Places beyond 32 bits are places too.
    assert round_stochastically_(whole.clone(), KEY, 2**33 - 500).shape == whole.shape


@pytest.mark.parametrize("slice_elements", [7, 2**22])
def test_steps_are_those_of_torch_but_for_rounding(monkeypatch: pytest.MonkeyPatch, slice_elements: int) -> None:
    monkeypatch.setitem(rounded_adamw._SLICE_ELEMENTS, "cpu", slice_elements)
    exact, weights = optimizer_of("fp32", (30, 20), (20,))
    rounded, others = optimizer_of("bf16", (30, 20), (20,))

    # The first step is made of moments that are not rounded yet
    train(exact, weights, 1)
    train(rounded, others, 1)
    for one, other in zip(weights, others, strict=True):
        assert torch.equal(one, other)
    # And the following ones are off by what bf16 is
    start = [weight.detach().clone() for weight in weights]
    train(exact, weights, 20, seed=2)
    train(rounded, others, 20, seed=2)
    assert updates(rounded) == updates(exact) == 21
    for one, other, before in zip(weights, others, start, strict=True):
        assert 0 < (one - other).norm() < 0.02 * (one - before).norm()
    kept = [value.dtype for state in moments(rounded).values() for value in state.values()]
    assert kept == [torch.bfloat16] * 4


def test_the_second_moment_decays_where_the_nearest_number_would_be_the_same_one() -> None:
    # Given gradients that become ten times smaller
    exact, weights = optimizer_of("fp32", (500,))
    rounded, others = optimizer_of("bf16", (500,))
    means = []
    for optimizer, parameters in ((exact, weights), (rounded, others)):
        train(optimizer, parameters, 200)
        train(optimizer, parameters, 1500, scale=0.1, seed=2)
        (state,) = moments(optimizer).values()
        means.append(float(state["exp_avg_sq"].float().mean()))
    # Then so does the second moment: a fifth of what it was is left, as in fp32, and no bias is added
    assert means[1] == pytest.approx(means[0], rel=0.02)
    (state,) = moments(rounded).values()
    nearest = (state["exp_avg_sq"].float() * 0.999).bfloat16()
    assert torch.equal(nearest, state["exp_avg_sq"]), "to the nearest, none of these would ever become less"


def values_of(optimizer: Any) -> list[torch.Tensor]:
    """Of all moments, and counts of updates, in fp32."""
    found = []
    for state in optimizer.state.values():
        flat = {kind: value.view(-1) for kind, value in state.items()}
        found += [flat["step"], *(rounded_adamw._read(flat, kind, ALL) for kind in ("exp_avg", "exp_avg_sq"))]
    return [value.clone() for value in found]


def test_steps_with_moments_in_8_bits_are_on_average_those_with_fp32() -> None:
    # Given rows in which gradients differ by far, and become a tenth of what they were
    sizes = torch.tensor([1.0, 0.1, 0.01, 1e-6]).repeat(16)
    after = []
    for dtype in ("int8", "fp32"):
        optimizer, (parameter,) = optimizer_of(dtype, (200, 64), weightDecay=0.0, rate=1e-3)
        generator = torch.Generator().manual_seed(1)
        for step in range(600):
            drawn = torch.randn(parameter.shape, generator=generator) + 0.3
            parameter.grad = drawn * sizes * (1.0 if step < 100 else 0.1)
            if step == 500:
                before = parameter.detach().clone()
            optimizer.step()
        after.append((parameter.detach() - before, values_of(optimizer)[2].view(200, 64)))
    (steps, second), (exact_steps, exact_second) = after

    # Then weights move as far, and their second moments have become as small
    for column in range(3):
        of = slice(column, None, 4)
        assert float(steps[:, of].mean()) == pytest.approx(float(exact_steps[:, of].mean()), rel=0.07), column
        assert float((second / exact_second)[:, of].mean()) == pytest.approx(1.0, abs=0.02), column
    # And none jumps whose second moment is less than can be told beside the others
    assert float(steps[:, 3::4].abs().max()) < float(exact_steps.abs().max())


def test_moments_of_8_bits_are_those_of_matrices_with_rows_of_whole_blocks() -> None:
    names = {
        "layers.0.mlp.up_proj.weight": (8, 128),
        "layers.0.mlp.down_proj.weight": (128, 8),
        "layers.0.mlp.experts.gate_up_proj": (2, 6, 64),
        "layers.0.mlp.experts.gate_up_proj_bias": (2, 64),
        "layers.0.self_attn.q_norm.weight": (2, 64),
        "norm.weight": (64,),
    }
    named = [(name, torch.nn.Parameter(torch.ones(shape))) for name, shape in names.items()]
    optimizer = build_optimizer(named, with_state("int8", "fp32"), 1e-2)
    held = {name: moments(optimizer)[parameter] for name, parameter in named}
    bytes_of = {
        name: sum(value.nbytes for value in of.values()) / parameter.numel()
        for (name, parameter), of in zip(named, held.values(), strict=True)
    }
    eighth = [name for name, each in bytes_of.items() if each == 2 * (1 + 1 / 64)]
    assert eighth == ["layers.0.mlp.up_proj.weight", "layers.0.mlp.experts.gate_up_proj"]
    assert {bytes_of[name] for name in {*names}.difference(eighth)} == {8.0}
    kinds = {
        kind: (value.dtype, tuple(value.shape)) for kind, value in held["layers.0.mlp.experts.gate_up_proj"].items()
    }
    assert kinds == {
        "exp_avg": (torch.int8, (2, 6, 64)),
        "exp_avg_exponents": (torch.uint8, (2, 6, 1)),
        "exp_avg_sq": (torch.uint8, (2, 6, 64)),
        "exp_avg_sq_exponents": (torch.uint8, (2, 6, 1)),
    }
    # All of them, and what they belong to, go on counting together
    train(optimizer, [parameter for _, parameter in named], 2)
    assert updates(optimizer) == 2


@pytest.mark.parametrize("slice_elements", [64, 2**22])
def test_the_first_steps_with_moments_of_8_bits_are_those_of_torch(
    monkeypatch: pytest.MonkeyPatch, slice_elements: int
) -> None:
    monkeypatch.setitem(rounded_adamw._SLICE_ELEMENTS, "cpu", slice_elements)
    exact, weights = optimizer_of("fp32", (5, 128), (20,))
    rounded, others = optimizer_of("int8", (5, 128), (20,))
    train(exact, weights, 1)
    train(rounded, others, 1)
    for one, other in zip(weights, others, strict=True):
        assert torch.equal(one, other)
    start = weights[0].detach().clone()
    train(exact, weights, 20, seed=2)
    train(rounded, others, 20, seed=2)
    assert updates(rounded) == updates(exact) == 21
    assert 0 < (weights[0] - others[0]).norm() < 0.1 * (weights[0] - start).norm()
    assert torch.equal(weights[1], others[1]), "what stays in fp32 is as ever"


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_weights_in_bf16_move_on_average_as_those_in_fp32(dtype: str) -> None:
    # Given steps that are a hundredth of what numbers of bf16 are apart, or less, and weights that decay
    options: dict[str, Any] = {"rate": 1e-5, "weightDecay": 5.0}
    exact, (weight,) = optimizer_of("fp32", (300, 300), **options)
    rounded, (other,) = optimizer_of(dtype, (300, 300), weights="bf16", **options)
    with torch.no_grad():
        weight.copy_(other)
    before = other.detach().float()

    # When they are made with the same gradients
    slopes = torch.randn(300, 300, generator=torch.Generator().manual_seed(1)).bfloat16()
    for _ in range(40):
        weight.grad, other.grad = slopes.float(), slopes.clone()
        exact.step()
        rounded.step()

    # Then the mean of what changed is right, of weights that grow and of those that shrink
    moved, should = other.detach().float() - before, weight.detach() - before
    for which in (slopes > 0, slopes < 0):
        assert float(moved[which].mean()) == pytest.approx(float(should[which].mean()), rel=0.05)
    decayed, expected = (moved * before).sum(), (should * before).sum()
    assert float(decayed) == pytest.approx(float(expected), rel=0.1)
    # And rounded to the nearest number hardly any would have changed at all
    nearest = (before + should / 40).bfloat16().float()
    assert float((nearest != before).float().mean()) < 0.02
    # Moments know nothing of it
    if dtype == "fp32":
        for one, same in zip(moments(exact)[weight].values(), moments(rounded)[other].values(), strict=True):
            assert torch.equal(one, same)


def test_weights_and_moments_are_rounded_by_bits_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given an optimizer that rounds all three
    keys = []
    monkeypatch.setattr(rounded_adamw, "round_stochastically_", lambda values, key, _: keys.append(int(key)) or values)
    optimizer, parameters = optimizer_of("bf16", (3,), (3,), weights="bf16", betas=[0.99, 0.999])
    # When it makes two steps, then no two use the same bits
    train(optimizer, parameters, 2)
    assert len({*keys}) == len(keys) == 12


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
@pytest.mark.parametrize("weights", ["fp32", "bf16"])
def test_a_step_that_is_not_finite_changes_nothing(weights: str, dtype: str) -> None:
    optimizer, parameters = optimizer_of(dtype, (30, 64), (20,), weights=weights)
    train(optimizer, parameters, 3)
    state = [value.clone() for of in optimizer.state.values() for value in of.values()]
    before = [parameter.detach().clone() for parameter in parameters]

    optimizer.found_inf = torch.tensor(1.0)
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, torch.nan)
    optimizer.step()

    assert all(torch.equal(one, other) for one, other in zip(before, parameters, strict=True))
    now = [value for of in optimizer.state.values() for value in of.values()]
    assert all(torch.equal(one, other) for one, other in zip(state, now, strict=True))
    assert updates(optimizer) == 3


@pytest.mark.parametrize(
    ("dtype", "weights"),
    [("bf16", "fp32"), ("bf16", "bf16"), ("fp32", "bf16"), ("int8", "fp32"), ("int8", "bf16")],
)
def test_a_part_of_a_parameter_is_updated_like_the_whole_and_goes_on_alike(dtype: str, weights: str) -> None:
    # Given the last rows of a parameter, on another process, from its moments and count of updates
    whole, (weight,) = optimizer_of(dtype, (30, 64), weights=weights)
    train(whole, [weight], 4)
    part, (rows,) = optimizer_of(dtype, (10, 64), first=1280, weights=weights)
    with torch.no_grad():
        rows.copy_(weight[20:])
    for kind, value in moments(part)[rows].items():
        value.copy_(moments(whole)[weight][kind][20:])
    set_updates(part, updates(whole))

    # When both make a step
    gradient = torch.randn(30, 64, generator=torch.Generator().manual_seed(5)).to(weight.dtype)
    weight.grad, rows.grad = gradient, gradient[20:]
    whole.step()
    part.step()

    # Then to the last bit the same
    assert torch.equal(rows, weight[20:])
    for kind, value in moments(part)[rows].items():
        assert torch.equal(value, moments(whole)[weight][kind][20:])
