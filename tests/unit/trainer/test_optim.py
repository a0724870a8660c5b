"""The learning-rate schedule as a function of the step, and what decays."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from sft_api.v1alpha1 import SFTJobSpec
from sft_trainer.models.causal_lm import build_on_meta
from sft_trainer.optim import build_optimizer, learning_rate, update
from tests.architectures import small_config


def spec(**schedule: Any) -> SFTJobSpec:
    return SFTJobSpec.model_validate(
        {
            "model": {"uri": "file:///m"},
            "data": {"train": [{"uri": "file:///d"}]},
            "compute": {"gpusPerNode": 0},
            "training": {"schedule": schedule, "optimizer": {"weightDecay": 0.1}},
        }
    )


def rates(total: int, **schedule: Any) -> list[float]:
    return [learning_rate(spec(**schedule), 1.0, step, total) for step in range(total)]


def test_warm_up_starts_above_zero_and_reaches_the_peak() -> None:
    assert rates(10, type="constantWithWarmup", warmupSteps=4) == [0.25, 0.5, 0.75] + [1.0] * 7


def test_linear_decays_to_the_minimum_one_step_after_the_end() -> None:
    assert rates(4, type="linear", warmupSteps=0, minRatio=0.2) == pytest.approx([1.0, 0.8, 0.6, 0.4])


def test_cosine_is_half_way_down_in_the_middle() -> None:
    values = rates(8, type="cosine", warmupSteps=0)
    assert values[0] == 1.0
    assert values[4] == pytest.approx(0.5)
    assert values == sorted(values, reverse=True)


def test_a_stable_rate_decays_linearly_in_the_last_steps() -> None:
    schedule = {"type": "warmupStableDecay", "warmupSteps": 2, "decaySteps": 4, "minRatio": 0.2}
    assert rates(8, **schedule) == pytest.approx([0.5, 1.0, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4])


def test_a_stable_rate_decays_as_that_of_transformers() -> None:
    from transformers import get_wsd_schedule

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = get_wsd_schedule(
        optimizer, num_warmup_steps=0, num_decay_steps=10, num_training_steps=50, decay_type="linear", min_lr_ratio=0.1
    )
    expected = []
    for _ in range(50):
        expected += theirs.get_last_lr()
        optimizer.step()
        theirs.step()
    found = rates(50, type="warmupStableDecay", warmupSteps=0, decayRatio=0.2, minRatio=0.1)
    assert found == pytest.approx(expected)


@pytest.mark.parametrize("warmup", [0, 7])
@pytest.mark.parametrize(
    ("schedule", "theirs", "options"),
    [
        ({"type": "polynomial", "power": 2.5}, "get_polynomial_decay_schedule_with_warmup", {"power": 2.5}),
        (
            {"type": "polynomial", "power": 1, "minRatio": 0.2},
            "get_polynomial_decay_schedule_with_warmup",
            {"lr_end": 0.2, "power": 1.0},
        ),
        ({"type": "inverseSqrt"}, "get_inverse_sqrt_schedule", {}),
        (
            {"type": "cosineWithRestarts", "cycles": 3},
            "get_cosine_with_hard_restarts_schedule_with_warmup",
            {"num_cycles": 3},
        ),
        ({"type": "linear"}, "get_linear_schedule_with_warmup", {}),
        ({"type": "cosine"}, "get_cosine_schedule_with_warmup", {}),
    ],
)
def test_after_the_warm_up_rates_are_those_of_transformers(
    schedule: dict[str, Any], theirs: str, options: dict[str, Any], warmup: int
) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    steps = {} if schedule["type"] == "inverseSqrt" else {"num_training_steps": 50}
    if schedule["type"] == "polynomial":
        options = {"lr_end": 0.0, **options}
    made = getattr(transformers, theirs)(optimizer, num_warmup_steps=warmup, **steps, **options)
    expected = []
    for _ in range(50):
        expected += made.get_last_lr()
        optimizer.step()
        made.step()
    found = rates(50, warmupSteps=warmup, **schedule)
    assert found[warmup:] == pytest.approx(expected[warmup:])
    # Theirs begins at 0, and comes to the peak a step later
    assert found[:warmup] == pytest.approx(expected[1 : warmup + 1])


def test_every_restart_has_the_peak_whatever_numbers_divide() -> None:
    # 49 times a 49th is less than 1 in floating point
    assert 49 * (1 / 49) < 1
    found = rates(98, type="cosineWithRestarts", cycles=49, warmupSteps=0)
    assert found == pytest.approx([1.0, 0.5] * 49)
    assert rates(49, type="cosineWithRestarts", cycles=49, warmupSteps=0) == [1.0] * 49


def test_an_inverse_square_root_comes_near_the_lowest_rate() -> None:
    found = rates(400, type="inverseSqrt", warmupSteps=4, minRatio=0.2)
    assert found[4] == 1.0
    assert found[12] == pytest.approx(0.2 + 0.8 * (4 / 12) ** 0.5)
    assert 0.2 < found[-1] < 0.3


def test_constant_is_constant() -> None:
    assert rates(3, type="constant") == [1.0, 1.0, 1.0]


def test_default_warm_up_is_three_percent() -> None:
    assert rates(100)[2] == 1.0
    assert rates(100)[1] == pytest.approx(2 / 3)


@pytest.mark.parametrize(("steps", "warm"), [(10, 0), (16, 0), (17, 1), (49, 1), (51, 2)])
def test_a_share_of_the_steps_is_rounded_to_the_nearest_number(steps: int, warm: int) -> None:
    given = rates(steps, type="cosine")
    assert given == pytest.approx(rates(steps, type="cosine", warmupSteps=warm))


def test_a_run_shorter_than_its_warm_up_never_exceeds_the_peak() -> None:
    assert rates(4, type="cosine", warmupSteps=50) == pytest.approx([0.25, 0.5, 0.75, 1.0])


def test_norms_and_biases_do_not_decay() -> None:
    layer = torch.nn.Linear(3, 2)
    optimizer = build_optimizer(layer.named_parameters(), spec(), 1e-3)
    decay = {tuple(p.shape): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decay == {(2, 3): 0.1, (2,): 0.0}


def test_nor_do_biases_of_stacked_experts() -> None:
    weight, bias = (torch.nn.Parameter(torch.zeros(shape)) for shape in ((4, 2, 6), (4, 6)))
    named = [("experts.gate_up_proj", weight), ("experts.gate_up_proj_bias", bias)]
    optimizer = build_optimizer(named, spec(), 1e-3)
    assert [(group["weight_decay"], group["params"]) for group in optimizer.param_groups] == [
        (0.1, [weight]),
        (0.0, [bias]),
    ]


def test_nor_do_norms_that_have_weights_for_each_head(tmp_path: Path) -> None:
    # Given a model whose norms of queries and keys have a row for each head, as Command R+ has
    small_config("cohere", use_qk_norm=True).save_pretrained(tmp_path)
    model: Any = build_on_meta(tmp_path).huggingface
    attention = model.base_model.layers[0].self_attn
    assert attention.q_norm.weight.ndim == 2

    # Then its matrices decay, and they do not
    optimizer = build_optimizer(model.named_parameters(), spec(), 1e-3)
    decay = {parameter: group["weight_decay"] for group in optimizer.param_groups for parameter in group["params"]}
    assert decay[attention.q_proj.weight] == 0.1
    assert decay[attention.q_norm.weight] == decay[attention.k_norm.weight] == 0.0


@pytest.mark.parametrize("moments", ["fp32", "int8"])
def test_b_of_an_adapter_has_a_rate_of_its_own(moments: str) -> None:
    # Given adapters, and what is trained whole beside them, by LoRA+
    names = ["q_proj.lora_A.weight", "q_proj.lora_B.weight", "experts.adapters.down_proj.lora_B.weight", "norm.weight"]
    document = spec().model_dump(by_alias=True, mode="json", exclude_none=True)
    document["training"]["optimizer"] |= {"stateDtype": moments, "weightDecay": 0.5}
    after = []
    for ratio in (None, 1, 4):
        document["lora"] = {} if ratio is None else {"learningRateRatio": ratio}
        parameters = [torch.nn.Parameter(torch.ones(2, 64) if "." in name[:-7] else torch.ones(64)) for name in names]
        optimizer = build_optimizer(
            zip(names, parameters, strict=True), SFTJobSpec.model_validate(document), 1.0, lambda tensor: (tensor, 0)
        )
        # When two steps are made, of which the second is at half the rate
        for rate in (1e-2, 5e-3):
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            update(optimizer, rate, torch.zeros(()))
        after.append([float(parameter.detach().mean()) for parameter in parameters])

    # Then B moves, and decays, by so many times the rate, and all else as ever
    def moved(rate: float, decay: float) -> float:
        first = 1 - rate * decay - rate
        return first - rate / 2 * decay * first - rate / 2

    assert after[0] == after[1]
    assert after[2] == pytest.approx([moved(0.01, 0.5), moved(0.04, 0.5), moved(0.04, 0.5), moved(0.01, 0)], abs=1e-4)
