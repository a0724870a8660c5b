"""The boxes of all ranks cover every tensor of the model and its optimizer exactly once, however it is sharded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from sft_trainer.boxes import Box
from sft_trainer.models.attention import IMPLEMENTATION, Boundaries, register
from sft_trainer.models.causal_lm import CausalLM
from sft_trainer.names.canonical import Names
from sft_trainer.optim import build_optimizer, updates
from sft_trainer.strategies.fsdp import build_model
from sft_trainer.strategies.fsdp.boxes import model_boxes, optimizer_boxes
from sft_trainer.trainable import EVERYTHING
from tests.integration.checkpoint import ranks
from tests.parity.runs import manifest, resolve
from tests.tensors import gathered
from tests.topologies import here

Numbers = npt.NDArray[np.float32]
Held = tuple[str, str, tuple[int, ...], tuple[slice, ...], bool, Numbers]


def sizes(kind: str) -> Any:
    """A tiny model whose rows and experts do not divide among 3 processes, nor all of its rows among 2."""
    from transformers import AutoConfig

    experts = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 3} if "moe" in kind else {}
    return AutoConfig.for_model(
        kind,
        vocab_size=31,
        hidden_size=8,
        intermediate_size=7,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        tie_word_embeddings=True,
        **experts,
    )


def build(kind: str, processes: int, shard_degree: int) -> tuple[CausalLM, torch.optim.Optimizer, Names]:
    from transformers import AutoModelForCausalLM

    register()
    job = manifest(Path("/inputs"), Path("/store"), processes=processes)
    config = resolve(job)
    with torch.device("meta"):
        huggingface = AutoModelForCausalLM.from_config(
            sizes(kind), dtype=torch.float32, attn_implementation=IMPLEMENTATION
        )
    model = build_model(config, CausalLM(huggingface), EVERYTHING, here(shard_degree), torch.device("cpu"))
    return model, build_optimizer(model.named_parameters(), config.spec, 1e-3), Names.of(sizes(kind))


def boxes_of(model: CausalLM, optimizer: torch.optim.Optimizer, names: Names, shard_degree: int) -> list[Box]:
    topology = here(shard_degree)
    return [*model_boxes(model, names, topology), *optimizer_boxes(model, optimizer, names, topology)]


def numbers(box: Box) -> torch.Tensor:
    """Of the whole tensor: another one for every element, and for every kind."""
    start = 0.0 if box.kind == "weight" else 0.5
    return torch.arange(torch.Size(box.shape).numel(), dtype=torch.float32).reshape(box.shape) + start


def where(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, o + s) for o, s in zip(box.place.offsets, box.place.sizes, strict=True))


def fill_and_tell(processes: int, shard_degree: int) -> tuple[list[Held], dict[str, Numbers]]:
    """Fill every box; tell what the boxes hold when taken again, and what the modules' parameters then are."""
    model, optimizer, names = build("qwen3_moe", processes, shard_degree)
    for box in boxes_of(model, optimizer, names, shard_degree):
        box.write(numbers(box)[where(box)])
    assert updates(optimizer) == 0
    held = [
        (box.name, box.kind, box.shape, where(box), box.writes, box.read().numpy().copy())
        for box in boxes_of(model, optimizer, names, shard_degree)
    ]
    whole = {name: gathered(parameter.detach()).numpy() for name, parameter in model.huggingface.named_parameters()}
    return held, whole


@pytest.mark.parametrize(("processes", "shard_degree"), [(1, 1), (3, 3), (4, 2)])
def test_every_element_is_held_and_written_once(tmp_path: Path, processes: int, shard_degree: int) -> None:
    # Given a model sharded unevenly, or twice over two replicas, whose boxes were filled
    answers = ranks.run(processes, tmp_path, fill_and_tell, processes, shard_degree)

    # When what each rank has to write is put together
    covered: dict[tuple[str, str], Numbers] = {}
    values: dict[tuple[str, str], Numbers] = {}
    for held, _ in answers:
        for name, moment, shape, place, writes, value in held:
            if writes:
                covered.setdefault((name, moment), np.zeros(shape, np.float32))[place] += 1
                values.setdefault((name, moment), np.zeros(shape, np.float32))[place] = value

    # Then nothing is missing or there twice, and every element is where it belongs
    parameters = {name for name, _ in covered}
    assert set(covered) == {(name, moment) for name in parameters for moment in ("weight", "exp_avg", "exp_avg_sq")}
    assert "model.embed_tokens.weight" in parameters
    assert "lm_head.weight" not in parameters
    for (name, moment), count in covered.items():
        assert (count == 1).all(), (name, moment)
        start = 0.0 if moment == "weight" else 0.5
        expected = np.arange(count.size, dtype=np.float32).reshape(count.shape) + start
        assert np.array_equal(values[name, moment], expected), (name, moment)

    # And replicas share the work of it
    elements = [sum(value.size for *_, writes, value in held if writes) for held, _ in answers]
    if shard_degree < processes:
        assert max(elements) < 1.5 * min(elements), elements

    # And the modules hold what the boxes say
    for _, whole in answers:
        for name, parameter in whole.items():
            if name.endswith("experts.gate_up_proj"):
                stem = name.removesuffix("gate_up_proj")
                gate, up = (values[f"{stem}{half}.weight", "weight"] for half in ("gate_proj", "up_proj"))
                assert np.array_equal(parameter, np.concatenate([gate, up], axis=1))
            else:
                hub = f"{name}.weight" if name.endswith("experts.down_proj") else name
                assert np.array_equal(parameter, values[hub, "weight"]), name


def look_after_a_forward() -> tuple[bool, bool, int]:
    """Whether boxes taken after a forward hold the same as before; the gathered root would be the whole."""
    model, optimizer, names = build("qwen3", 3, 3)
    for box in model_boxes(model, names, here()):
        box.write(torch.full_like(box.local, 0.1))
    before = [(box.name, box.place, box.read().clone()) for box in model_boxes(model, names, here())]
    ids = torch.arange(4)
    with torch.no_grad():
        model(ids, ids, Boundaries.of((4,)), ids[:3], ids[1:], 1.0)
    after = [(box.name, box.place, box.read()) for box in model_boxes(model, names, here())]
    same = [b[:2] == a[:2] and torch.equal(b[2], a[2]) for b, a in zip(before, after, strict=True)]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    changed = any(
        not torch.equal(b[2], a.read()) for b, a in zip(before, model_boxes(model, names, here()), strict=True)
    )
    moments = [box for box in optimizer_boxes(model, optimizer, names, here()) if box.kind == "exp_avg"]
    assert all(box.read().gt(0).all() for box in moments)
    return all(same), changed, updates(optimizer)


def test_a_forward_and_a_step_change_no_place(tmp_path: Path) -> None:
    assert ranks.run(3, tmp_path, look_after_a_forward) == [(True, True, 1)] * 3


def count_collectives() -> tuple[int, int]:
    """Those of taking all boxes after a forward, and of gathering one tensor."""
    from torch.distributed.tensor.debug import CommDebugMode

    model, optimizer, names = build("qwen3", 2, 2)
    for box in model_boxes(model, names, here()):
        box.write(torch.full_like(box.local, 0.1))
    ids = torch.arange(4)
    with torch.no_grad():
        model(ids, ids, Boundaries.of((4,)), ids[:3], ids[1:], 1.0)
    with CommDebugMode() as taking:
        boxes_of(model, optimizer, names, 2)
    with CommDebugMode() as gathering:
        next(model.parameters()).full_tensor()  # type: ignore[attr-defined]
    return taking.get_total_counts(), gathering.get_total_counts()


def test_boxes_are_taken_without_the_others(tmp_path: Path) -> None:
    assert ranks.run(2, tmp_path, count_collectives) == [(0, 1)] * 2
