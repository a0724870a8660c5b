"""The loss over a head whose rows several processes have: that of one process which has them all."""

import itertools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from sft_trainer import loss as loss_module
from sft_trainer.loss import CROSS_ENTROPY, PRODUCTS, Logits, Objective, evaluation_sums, linear_cross_entropy
from sft_trainer.strategies.megatron.vocabulary import GroupRows
from tests.integration.checkpoint.ranks import run

VOCABULARY, WIDTH, POSITIONS = 97, 16, 50
LOGITS = [PRODUCTS, Logits(factor=0.7), Logits(factor=1.3, cap=4.0)]
OBJECTIVES = [CROSS_ENTROPY, Objective(by_probability=True), Objective(smoothing=0.1)]


def compared(degree: int) -> list[dict[str, float]]:
    """For all logits and objectives, with room for few rows at a time, differences from one process as shares of it."""
    assert dist.group.WORLD is not None
    each, rank = -(-VOCABULARY // degree), dist.get_rank()
    here = slice(rank * each, min(VOCABULARY, (rank + 1) * each))
    held = GroupRows(here.start, each, VOCABULARY, dist.group.WORLD)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(POSITIONS, WIDTH, generator=generator), torch.randn(97, WIDTH, generator=generator)
    # Equal rows on two processes: of tokens that are as likely the first one counts.
    weight[-1] = weight[0]
    labels = torch.randint(0, VOCABULARY, (POSITIONS,), generator=generator)
    loss_module.CHUNK_ELEMENTS = 21 * each
    found = []
    for logits, objective in itertools.product(LOGITS, OBJECTIVES):
        wanted = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        scaled, total = linear_cross_entropy(*wanted, labels, 1 / 7, logits, objective=objective)
        expected = torch.autograd.grad(scaled, wanted)
        mine = [hidden.clone().requires_grad_(), weight[here].clone().requires_grad_()]
        scaled_here, total_here = linear_cross_entropy(*mine, labels, 1 / 7, logits, held, objective=objective)
        of_hidden, of_weight = torch.autograd.grad(scaled_here, mine)
        dist.all_reduce(of_hidden)
        products = logits.log_probabilities(hidden @ weight.T)[0]
        labels[:10] = products[:10].argmax(-1)
        evaluated, right = evaluation_sums(hidden, weight, labels, logits)
        evaluated_here, right_here = evaluation_sums(hidden, weight[here], labels, logits, held)
        found.append(
            {
                "total": float((total_here - total).abs() / total),
                "scaled": float((scaled_here - scaled).abs() / scaled),
                "hidden": float((of_hidden - expected[0]).abs().max() / expected[0].abs().max()),
                "weight": float((of_weight - expected[1][here]).abs().max() / expected[1].abs().max()),
                "evaluated": float((evaluated_here - evaluated).abs() / evaluated),
                "right": abs(int(right_here) - int(right)),
                "none right": float(int(right) < 10),
            }
        )
    return found


@pytest.mark.parametrize("degree", [2, 3])
def test_loss_gradients_and_evaluation_are_those_of_one_process(degree: int, tmp_path: Path) -> None:
    for answers in run(degree, tmp_path, compared, degree):
        for figures in answers:
            assert {name: value for name, value in figures.items() if value > 2e-6} == {}


def likely() -> list[int]:
    assert dist.group.WORLD is not None
    held = GroupRows(3 * dist.get_rank(), 3, 6, dist.group.WORLD)
    values = torch.tensor([[[0.0, 2.0, 1.0], [1.0, 0.0, 0.0]], [[2.0, 0.0, 2.0], [1.0, 3.0, 0.0]]])[dist.get_rank()]
    tokens: list[int] = held.most_likely(values).tolist()
    return tokens


def test_of_equals_the_first_token_is_the_most_likely(tmp_path: Path) -> None:
    assert run(2, tmp_path, likely) == [[1, 4], [1, 4]]
