"""The rules for the weights of stages: together, all stages hold every canonical tensor, each element once."""

from contextlib import nullcontext
from itertools import chain, product
from typing import Any

import pytest
import torch
import transformers

from sft_api.v1alpha1.megatron import MegatronSpec
from sft_api.v1alpha1.transformer_config import TransformerConfigOverrides
from sft_trainer.boxes import WEIGHT, Writers
from sft_trainer.errors import ConfigError
from sft_trainer.loss import PRODUCTS
from sft_trainer.models.causal_lm import CausalLM
from sft_trainer.models.tensors import whole_boxes
from sft_trainer.optim import build_optimizer, moments, set_updates, update, updates
from sft_trainer.strategies.megatron.layout import (
    Sizes,
    check,
    check_model,
    own_layers,
    parameter_shapes,
    pieces,
    rows_of,
    stage_boxes,
)
from sft_trainer.topology import Topology
from tests.unit.trainer.test_optim import spec

COMMON: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 24,
    "vocab_size": 31,
}
CONFIGS = {
    "llama": transformers.LlamaConfig(**COMMON),
    "mistral": transformers.MistralConfig(**COMMON, head_dim=4),
    "qwen2": transformers.Qwen2Config(**COMMON, tie_word_embeddings=True),
    "qwen3": transformers.Qwen3Config(**COMMON, head_dim=4, tie_word_embeddings=True),
    "qwen3-moe": transformers.Qwen3MoeConfig(**COMMON, head_dim=4, num_experts=4, moe_intermediate_size=8),
}
SHAPES = [
    (tensor, pipeline, shard, expert, 1)
    for tensor, pipeline, shard, expert in product((1, 2, 4), (1, 2, 4), (1, 2), (1, 2, 4))
    if tensor * shard % expert == 0
] + [(1, 1, 1, 2, 2), (2, 2, 1, 1, 2), (2, 1, 2, 4, 2), (1, 2, 2, 1, 4)]
"""Degrees of tensor, pipeline, shard, expert and sequence."""


def topologies(tensor: int, pipeline: int, shard: int, expert: int, sequence: int) -> list[Topology]:
    world = tensor * sequence * pipeline * shard
    sizes = {"shard": shard, "sequence": sequence, "tensor": tensor, "pipeline": pipeline, "expert": expert}
    return [Topology(rank, rank, world, world, **sizes) for rank in range(world)]


def spread(topology: Topology) -> MegatronSpec:
    return MegatronSpec(
        tensor_parallel_degree=topology.tensor,
        context_parallel_degree=topology.sequence,
        pipeline_parallel_degree=topology.pipeline,
        expert_parallel_degree=topology.expert,
    )


def uneven(stages: int, *, first: int | None = None, last: int | None = None) -> dict[str, Any]:
    ends = TransformerConfigOverrides(num_layers_in_first_pipeline_stage=first, num_layers_in_last_pipeline_stage=last)
    return {"pipeline_parallel_degree": stages, "transformer_config_overrides": ends}


@pytest.fixture(scope="module", params=CONFIGS)
def model(request: pytest.FixtureRequest) -> CausalLM:
    made = transformers.AutoModelForCausalLM.from_config(CONFIGS[request.param], dtype=torch.float32)
    return CausalLM(made, torch.float32, PRODUCTS)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_a_model_goes_into_stages_and_comes_back(model: CausalLM, shape: tuple[int, int, int, int, int]) -> None:
    """Filled from the whole model and saved by those who write, it is the same to the last bit, nothing twice."""
    huggingface: Any = model.huggingface
    sizes = Sizes.of(huggingface.config)
    if shape[3] > 1 and not sizes.experts:
        with pytest.raises(ConfigError, match="no experts"):
            check(sizes, spread(topologies(*shape)[0]))
        return
    for topology in topologies(*shape):
        check(sizes, spread(topology))
    assert_whole(model, sizes, topologies(*shape))


@pytest.mark.parametrize(
    ("spread", "layers"),
    [
        (uneven(2, first=3), [[0, 1, 2], [3]]),
        (uneven(2, last=3), [[0], [1, 2, 3]]),
        (uneven(2, first=1, last=3), [[0], [1, 2, 3]]),
        (uneven(3, last=2), [[0], [1], [2, 3]]),
        (uneven(3, first=1, last=1), [[0], [1, 2], [3]]),
        ({"pipeline_parallel_degree": 2, "virtual_pipeline_parallel_degree": 2}, [[0, 2], [1, 3]]),
    ],
)
def test_so_does_one_whose_stages_have_other_numbers_of_layers(
    model: CausalLM, spread: dict[str, Any], layers: list[list[int]]
) -> None:
    huggingface: Any = model.huggingface
    megatron = MegatronSpec(**spread, tensor_parallel_degree=2)
    sizes = Sizes.of(huggingface.config, megatron)
    places = topologies(2, len(layers), 1, 1, 1)

    check(sizes, megatron)

    assert [[*chain(*own_layers(sizes, topology))] for topology in places[::2]] == layers
    assert_whole(model, sizes, places)


def test_chunks_go_around_all_stages_in_turn() -> None:
    spread = uneven(3, first=4, last=2) | {"virtual_pipeline_parallel_degree": 2}
    config = transformers.LlamaConfig(**COMMON | {"num_hidden_layers": 14})
    sizes = Sizes.of(config, MegatronSpec(**spread))

    found = [own_layers(sizes, topology) for topology in topologies(1, 3, 1, 1, 1)]

    assert found == [[range(2), range(7, 9)], [range(2, 6), range(9, 13)], [range(6, 7), range(13, 14)]]


def assert_whole(model: CausalLM, sizes: Sizes, places: list[Topology]) -> None:
    """Of the processes in ``places``."""
    whole = {box.name: box.read() for box in whole_boxes(model)}
    saved = {name: torch.full_like(value, torch.nan) for name, value in whole.items()}
    times = {name: torch.zeros_like(value) for name, value in whole.items()}
    for topology in places:
        stage = {
            name: torch.zeros((rows_of(name, size[0], topology)[1], *size[1:]))
            for name, size in parameter_shapes(sizes, topology).items()
        }
        for box in stage_boxes(stage, WEIGHT, sizes, topology, Writers(topology)):
            assert box.shape == tuple(whole[box.name].shape)
            inside = tuple(slice(o, o + n) for o, n in zip(box.place.offsets, box.place.sizes, strict=True))
            box.write(whole[box.name][inside])
            if box.writes:
                saved[box.name][inside] = box.read()
                times[box.name][inside] += 1
    assert all(torch.equal(saved[name], value) for name, value in whole.items())
    assert all(bool((count == 1).all()) for count in times.values())


@pytest.mark.parametrize("shape", [(2, 2, 1, 1), (4, 1, 1, 4)])
def test_nothing_of_a_parameter_is_left_out_but_rows_of_no_token(
    model: CausalLM, shape: tuple[int, int, int, int]
) -> None:
    huggingface: Any = model.huggingface
    sizes = Sizes.of(huggingface.config)
    for topology in topologies(*shape[:3], shape[3] if sizes.experts else 1, 1):
        for name, size in parameter_shapes(sizes, topology).items():
            times = torch.zeros(size)
            for piece in pieces(name, sizes, topology):
                piece.of(times).add_(1)
            tokens = size[0]
            if name in ("embedding.weight", "head"):
                tokens = min(tokens, sizes.vocabulary - topology.place("tensor") * tokens)
            assert bool((times[:tokens] == 1).all())
            assert not times[tokens:].any()


@pytest.mark.parametrize(
    ("degrees", "words"),
    [
        ({"tensor_parallel_degree": 8}, "4 heads of keys and values, which it does not divide: set it to 1, 2 or 4$"),
        ({"tensor_parallel_degree": 3}, "8 attention heads"),
        ({"pipeline_parallel_degree": 3}, "4 layers, which it does not divide: set it to 1, 2 or 4, or strategy"),
        (uneven(2, first=3, last=2), "together 5, but the model has 4 layers: leave it out"),
        (
            {"context_parallel_degree": 3},
            "contextParallelDegree is 3, which does not divide the 8 attention heads of the model: set it to 1, 2, 4 "
            "or 8$",
        ),
        (
            {"tensor_parallel_degree": 4, "context_parallel_degree": 4},
            "does not divide the 2 attention heads of a process of tensorParallelDegree: 4: set it to 1 or 2$",
        ),
    ],
)
def test_what_does_not_divide_is_named(degrees: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check(Sizes.of(CONFIGS["llama"]), MegatronSpec(**degrees))


def test_where_no_degree_would_do_it_is_to_be_left_out() -> None:
    # Three processes, of which two stages cannot be whatever shares tokens.
    megatron = MegatronSpec(context_parallel_degree=3, pipeline_parallel_degree=2)
    with pytest.raises(ConfigError, match=r"contextParallelDegree is 3, .* leave it out$"):
        check(Sizes.of(CONFIGS["llama"]), megatron, processes=3)


def test_heads_of_keys_are_shared_out_or_sent_to_several() -> None:
    config = transformers.LlamaConfig(
        **COMMON | {"hidden_size": 24, "num_attention_heads": 12, "num_key_value_heads": 2}
    )
    sizes = Sizes.of(config)
    for degrees in ((1, 2), (1, 4), (1, 12), (2, 2), (2, 3), (2, 6)):
        check(sizes, MegatronSpec(tensor_parallel_degree=degrees[0], context_parallel_degree=degrees[1]))
    with pytest.raises(ConfigError, match="is 3, which neither divides the 2 heads of keys of the model nor is a mult"):
        check(sizes, MegatronSpec(context_parallel_degree=3))


def test_a_family_without_rules_is_refused() -> None:
    with pytest.raises(ConfigError, match="gemma2"):
        Sizes.of(transformers.Gemma2Config())


@pytest.mark.parametrize(("biases", "words"), [(False, ""), (True, r"self_attn\.\w_proj\.bias has the shape None")])
def test_a_model_with_other_tensors_than_the_rules_know_is_refused(biases: bool, words: str) -> None:
    config = transformers.LlamaConfig(**COMMON, attention_bias=biases)
    with torch.device("meta"):
        made = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    shapes = {box.name: box.shape for box in whole_boxes(CausalLM(made, torch.float32, PRODUCTS))}
    with pytest.raises(ConfigError, match=words) if words else nullcontext():
        check_model(shapes, Sizes.of(config))


def test_a_vocabulary_that_leaves_a_process_without_tokens_is_refused() -> None:
    config = transformers.LlamaConfig(**COMMON | {"vocab_size": 6})
    with pytest.raises(ConfigError, match="none of the 6 tokens"):
        check(Sizes.of(config), MegatronSpec(tensor_parallel_degree=4))


def test_a_process_that_updates_no_row_has_an_optimizer_as_the_others_have() -> None:
    """Of five that have the same ones, two rows each of eight, or one of four: the last one has none of any."""
    from sft_trainer.strategies.megatron.held import Held, updated

    sizes = Sizes("llama", 1, width=4, inner=2, heads=2, groups=1, head_size=2, vocabulary=8, tied=True)
    for topology in topologies(1, 1, 5, 1, 1):
        shapes = parameter_shapes(sizes, topology)
        held = [Held(name, torch.nn.Parameter(torch.ones(shape)), topology, sizes) for name, shape in shapes.items()]
        rows = dict(updated(held))
        assert any(each.numel() for each in rows.values()) == (topology.rank < 4)

        optimizer = build_optimizer(rows.items(), spec(), 1e-3)
        set_updates(optimizer, 6)
        for each in held:
            each.hand_over()
        update(optimizer, 1e-3, torch.zeros(()))

        assert updates(optimizer) == 7
        kinds = {name: moments(optimizer)[each]["exp_avg"] for name, each in rows.items()}
        boxes = stage_boxes(kinds, "exp_avg", sizes, topology, Writers(topology))
        assert bool(boxes) == (topology.rank < 4)
