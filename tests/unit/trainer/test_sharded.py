"""Boxes of a model that is not sharded, and the number of updates."""

import pytest
import torch
from torch import nn

from sft_trainer.models.causal_lm import CausalLM
from sft_trainer.names.canonical import Names
from sft_trainer.names.rules import Rules
from sft_trainer.optim import set_updates, updates
from sft_trainer.strategies.fsdp.boxes import model_boxes, optimizer_boxes
from sft_trainer.topology import ALONE


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.ones(3))
        self.register_buffer("computed", torch.ones(2), persistent=False)


def build() -> tuple[CausalLM, torch.optim.AdamW]:
    model = CausalLM(Inner())
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)


def test_tied_weights_are_there_once_and_computed_buffers_never() -> None:
    model, optimizer = build()
    names = Names(Rules())
    assert [(box.name, box.kind) for box in model_boxes(model, names, ALONE)] == [
        ("embedding.weight", "weight"),
        ("scale", "weight"),
    ]
    assert [(box.name, box.kind) for box in optimizer_boxes(model, optimizer, names, ALONE)] == [
        ("embedding.weight", "exp_avg"),
        ("embedding.weight", "exp_avg_sq"),
    ]


def test_moments_are_made_without_touching_weights_or_rates() -> None:
    model, optimizer = build()
    before = model.huggingface.embedding.weight.detach().clone()  # type: ignore[union-attr, operator]
    boxes = optimizer_boxes(model, optimizer, Names(Rules()), ALONE)
    assert all(box.read().eq(0).all() for box in boxes)
    assert torch.equal(model.huggingface.embedding.weight, before)  # type: ignore[arg-type, union-attr]
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert updates(optimizer) == 0
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_number_of_updates_is_one_for_all() -> None:
    model, optimizer = build()
    assert updates(optimizer) == 0
    set_updates(optimizer, 7)
    assert updates(optimizer) == 7
    optimizer_boxes(model, optimizer, Names(Rules()), ALONE)
    assert updates(optimizer) == 7

    other = torch.optim.AdamW([nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))])
    set_updates(other, 2)
    next(iter(other.state.values()))["step"].fill_(3)
    with pytest.raises(ValueError, match=r"updated \[2\.0, 3\.0\] times"):
        updates(other)
