"""Muon: torch's own, to the bit where that is computed in bf16; which parameters are its, and whose turn they are."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sft_api.v1alpha1 import SFTJobSpec
from sft_trainer import muon
from sft_trainer.models.causal_lm import build_on_meta
from sft_trainer.models.lora import add_adapters
from sft_trainer.muon import MOMENTUM, orthogonalise_, orthogonalise_all
from sft_trainer.optim import build_optimizer, matrices_of, moments, update
from sft_trainer.strategies.fsdp.whole_matrices import rounds_of
from tests.architectures import small_config
from tests.unit.trainer.test_optim import spec
from tests.unit.trainer.test_rounded_adamw import with_state

RATES = [1e-2 * (1 - step / 10) for step in range(10)]


class Block(nn.Module):
    """A wide matrix, a tall one, one of a single row, and what is none."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(24, 40)
        self.down = nn.Linear(40, 24, bias=False)
        self.gate = nn.Linear(24, 1, bias=False)
        self.norm = nn.LayerNorm(24)


def blocks() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleList([Block(), Block()])


def of_muon(**optimizer: Any) -> SFTJobSpec:
    return with_state("fp32", "fp32", type="muon", **optimizer)


def draw_gradients(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


@pytest.mark.parametrize("momentum", [None, 0.8])
def test_steps_are_those_of_torch_to_the_last_bit(momentum: float | None) -> None:
    # Given torch's Muon for the matrices, and its AdamW for all else
    ours, theirs = blocks(), blocks()
    chosen = of_muon(weightDecay=0.1, **({} if momentum is None else {"momentum": momentum}))
    in_bf16 = partial(orthogonalise_all, dtype=torch.bfloat16)
    optimizer = build_optimizer(ours.named_parameters(), chosen, 1.0, matrices=matrices_of(ours), orthogonalise=in_bf16)
    matrices = [each for each in theirs.parameters() if each.ndim == 2]
    both = [
        torch.optim.Muon(
            matrices,
            weight_decay=0.1,
            adjust_lr_fn="match_rms_adamw",
            **({} if momentum is None else {"momentum": momentum}),
        ),
        torch.optim.AdamW([each for each in theirs.parameters() if each.ndim < 2], weight_decay=0.0, fused=True),
    ]

    # When ten steps are made, at rates of their own
    for step, rate in enumerate(RATES):
        for model in (ours, theirs):
            draw_gradients(model, step)
        update(optimizer, rate, torch.zeros(()))
        for each in both:
            each.param_groups[0]["lr"] = rate
            each.step()

    # Then weights and momentum are the same
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, other), name
    for mine, other in zip(matrices_of(ours), matrices, strict=True):
        assert torch.equal(moments(optimizer)[mine][MOMENTUM], both[0].state[other]["momentum_buffer"])


def test_each_matrix_of_a_stack_is_orthogonalised_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = torch.randn(5, 6, 4, generator=torch.Generator().manual_seed(0))
    alone = torch.stack([orthogonalise_(each.clone()) for each in drawn])
    for at_once in (1, 2 * 6 * 4, 2**26):
        monkeypatch.setattr(muon, "_STACKED_ELEMENTS", at_once)
        torch.testing.assert_close(orthogonalise_(drawn.clone()), alone, rtol=1e-5, atol=1e-6)
    values = torch.linalg.svdvals(alone)
    assert 0.6 < float(values.min()) < float(values.max()) < 1.3


def test_a_matrix_without_gradients_stays_where_it_is() -> None:
    # Given the first factor of an adapter, which has none before the second one is other than 0
    ours = blocks()
    optimizer = build_optimizer(ours.named_parameters(), of_muon(weightDecay=0.0), 1.0, matrices=matrices_of(ours))
    before = [each.detach().clone() for each in ours.parameters()]
    for parameter in ours.parameters():
        parameter.grad = torch.zeros_like(parameter)
    update(optimizer, 1e-2, torch.zeros(()))
    assert all(torch.equal(one, other) for one, other in zip(before, ours.parameters(), strict=True))


@pytest.mark.parametrize("momentum", [0.9, 0.99, 0.999])
def test_a_momentum_in_bf16_is_right_on_average(momentum: float) -> None:
    # Given gradients that became ten times smaller
    averages = []
    for dtype in ("fp32", "bf16"):
        weight = nn.Parameter(torch.zeros(64, 64))
        named, chosen = [("weight", weight)], with_state(dtype, "fp32", type="muon", momentum=momentum)
        optimizer = build_optimizer(named, chosen, 1.0, matrices=[weight])
        for step in range(300):
            weight.grad = torch.full_like(weight, 1.0 if step < 100 else 0.1)
            update(optimizer, 1e-3, torch.zeros(()))
        averages.append(float(moments(optimizer)[weight][MOMENTUM].float().mean()))
    assert averages[1] == pytest.approx(averages[0], rel=0.01)


def test_weights_in_bf16_move_as_those_in_fp32_on_average() -> None:
    # Given updates of less than half of what numbers of bf16 are apart
    moved = []
    for held in ("fp32", "bf16"):
        weight = nn.Parameter(torch.full((64, 64), 1.0).to(torch.bfloat16 if held == "bf16" else torch.float32))
        chosen = with_state("fp32", held, type="muon", weightDecay=0.0)
        optimizer = build_optimizer([("weight", weight)], chosen, 1.0, matrices=[weight])
        weight.grad = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).to(weight.dtype)
        slope = weight.grad
        for _ in range(50):
            weight.grad = slope
            update(optimizer, 1e-3, torch.zeros(()))
        moved.append(weight.detach().float() - 1)
    assert float((moved[1] * moved[0]).sum() / moved[0].square().sum()) == pytest.approx(1, abs=0.05)


def test_matrices_of_layers_and_of_experts_are_its_and_nothing_else(tmp_path: Path) -> None:
    def left(kind: str, lora: dict[str, Any] | None = None, **options: Any) -> set[str]:
        """Which matrices, and tensors of more dimensions, are not: the ends of their names, tables and heads aside."""
        small_config(kind, **options).save_pretrained(tmp_path / kind)
        model = build_on_meta(tmp_path / kind)
        huggingface: Any = model.huggingface
        if lora is not None:
            document = spec().model_dump(by_alias=True, mode="json", exclude_none=True)
            asked = SFTJobSpec.model_validate({**document, "lora": lora}).lora
            assert asked
            add_adapters(huggingface, asked)
        its = {*matrices_of(model.blocks)}
        assert its
        assert its.isdisjoint({huggingface.get_input_embeddings().weight, huggingface.get_output_embeddings().weight})
        others = (name for name, each in huggingface.named_parameters() if each not in its and each.ndim > 1)
        return {".".join(name.split(".")[-2:]) for name in others} - {"embed_tokens.weight", "lm_head.weight"}

    assert left("qwen3_moe") == set()
    # Filters, norms of heads with weights of their own, and biases of experts
    assert left("lfm2") == {"conv.weight"}
    assert left("cohere", use_qk_norm=True) == {"q_norm.weight", "k_norm.weight"}
    assert left("gpt_oss") == {"experts.gate_up_proj_bias", "experts.down_proj_bias"}
    # And both factors of adapters are its
    assert left("qwen3", lora={"rank": 4, "useDora": True}) == set()


def test_turns_are_taken_largest_first_and_by_one_replica_each() -> None:
    shapes = [(2, 3), (8, 8), (4, 4), (6, 6), (5, 5), (3, 2, 2), (2, 2)]
    tensors: Any = [torch.empty(shape) for shape in shapes]

    def turns(holders: int, copies: int) -> list[list[list[tuple[int, ...]]]]:
        return [
            [[tuple(each.shape) for each in turn] for turn in turns] for turns in rounds_of(tensors, holders, copies)
        ]

    assert turns(2, 1) == [[[(8, 8), (6, 6)]], [[(5, 5), (4, 4)]], [[(2, 3), (2, 2)]], [[(3, 2, 2)]]]
    assert turns(4, 2) == [[[(8, 8), (6, 6), (5, 5), (4, 4)], [(2, 3), (2, 2)]], [[(3, 2, 2)]]]
