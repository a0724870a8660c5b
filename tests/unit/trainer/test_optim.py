"""The learning-rate schedule as a function of the step, and what decays."""

from pathlib import Path
from typing import Any

import pytest
import torch

from sft_api.v1alpha1 import SFTJobSpec
from sft_trainer.models.causal_lm import build_on_meta
from sft_trainer.optim import build_optimizer, learning_rate
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
