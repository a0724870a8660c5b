"""Stages that do not all have as many layers, and the rest of ``transformerConfigOverrides``: plan, memory, numbers."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from sft_api.known_models import known_shape
from sft_api.megatron import even_enough, given_in_words, layers_of, layers_of_stages, model_problem, stages_in_words
from sft_api.memory_plan import judge
from sft_api.numbers import Numbers
from sft_api.plan import make_plan
from sft_api.suggestions import suggestions
from sft_api.v1alpha1.megatron import MegatronSpec
from tests.unit.api.test_megatron_memory import EXPERTS, LLAMA, estimated, overrides, shape, spec

FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"


def megatron(stages: int = 1, chunks: int = 1, **overrides: Any) -> MegatronSpec:
    degrees = {"pipelineParallelDegree": stages, "virtualPipelineParallelDegree": chunks}
    return MegatronSpec.model_validate({**degrees, "transformerConfigOverrides": overrides})


@pytest.mark.parametrize(
    ("stages", "ends", "each"),
    [
        (1, {}, [12]),
        (4, {}, [3, 3, 3, 3]),
        (2, {FIRST: 7}, [7, 5]),
        (2, {LAST: 3}, [9, 3]),
        (4, {FIRST: 3, LAST: 1}, [3, 4, 4, 1]),
        (3, {LAST: 2}, [5, 5, 2]),
    ],
)
def test_what_the_ends_leave_is_shared_out_evenly(stages: int, ends: dict[str, int], each: list[int]) -> None:
    assert layers_of(megatron(stages, **ends), 12) == each


@pytest.mark.parametrize("layers", range(1, 40))
@pytest.mark.parametrize("stages", range(1, 9))
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_the_ends_that_are_proposed_make_stages_of_all_layers(layers: int, stages: int, chunks: int) -> None:
    proposed = even_enough(layers, stages, chunks)

    if layers % (stages * chunks) == 0 or layers % chunks or layers < stages * chunks:
        assert proposed == {}
        return
    each = layers_of_stages(layers, stages, proposed[FIRST], proposed[LAST])
    assert sum(each) == layers
    assert min(each) >= 1
    assert len(set(each[1:-1])) <= 1
    assert each[-1] <= each[0]
    assert all(of_stage % chunks == 0 for of_stage in each)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (megatron(4), ""),
        (megatron(4, **{FIRST: 7, LAST: 7}), ""),
        (megatron(2, **{FIRST: 31}), ""),
        (megatron(2, **{FIRST: 20, LAST: 12}), ""),
        (
            megatron(6),
            "pipelineParallelDegree is 6, but the model has 32 layers, which it does not divide: set it to 1, 2, 4, 8, "
            "16 or 32, or strategy.megatron.transformerConfigOverrides to num_layers_in_first_pipeline_stage: 4, "
            "num_layers_in_last_pipeline_stage: 4",
        ),
        (
            megatron(6, **{LAST: 3}),
            "strategy.megatron.transformerConfigOverrides has num_layers_in_last_pipeline_stage: 3, which leaves 29 of "
            "the model's 32 layers for the 5 other stages, which all need as many: "
            "num_layers_in_first_pipeline_stage: 4, num_layers_in_last_pipeline_stage: 4 would do",
        ),
        (
            megatron(2, **{FIRST: 32}),
            "which leaves 0 of the model's 32 layers for the other stage: leave it out (16 each), or set "
            "num_layers_in_first_pipeline_stage: 31",
        ),
        (
            megatron(2, **{FIRST: 20, LAST: 13}),
            "together 33, but the model has 32 layers: leave it out (16 each), or set "
            "num_layers_in_first_pipeline_stage: 20, num_layers_in_last_pipeline_stage: 12",
        ),
        (
            megatron(4, **{FIRST: 7}),
            "which leaves 25 of the model's 32 layers for the 3 other stages, which all need as many: leave it out "
            "(8 each), or set num_layers_in_first_pipeline_stage: 5",
        ),
        (megatron(4, 2, **{FIRST: 7}), "leave it out (8 each), or set num_layers_in_first_pipeline_stage: 2"),
        (
            megatron(moe_router_dtype="fp32"),
            "transformerConfigOverrides has moe_router_dtype, but the model has no routers: leave it out",
        ),
    ],
)
def test_layers_that_do_not_come_out_even_are_refused_with_what_would(asked: MegatronSpec, words: str) -> None:
    problem = model_problem(asked, shape(LLAMA))

    assert words in problem
    assert bool(problem) == bool(words)


def test_routers_have_a_precision_of_their_own() -> None:
    assert model_problem(megatron(moe_router_dtype="fp32"), shape(EXPERTS)) == ""


@pytest.mark.parametrize(
    ("stages", "chunks", "ends", "words"),
    [
        (4, 2, {}, ""),
        (4, 2, {FIRST: 6, LAST: 6}, ""),
        (
            4,
            3,
            {},
            "virtualPipelineParallelDegree is 3, but stages have 8 of the model's 32 layers, which it does not "
            "divide: set it to 1, 2, 4 or 8",
        ),
        (
            4,
            4,
            {FIRST: 6, LAST: 6},
            "but stages have 6 or 10 of the model's 32 layers, which it does not divide: set it to 1 or 2",
        ),
    ],
)
def test_chunks_divide_the_layers_of_every_stage(stages: int, chunks: int, ends: dict[str, int], words: str) -> None:
    asked = megatron(stages, **ends).model_copy(update={"virtual_pipeline_parallel_degree": chunks})

    problem = model_problem(asked, shape(LLAMA))

    assert words in problem
    assert bool(problem) == bool(words)


@pytest.mark.parametrize(
    ("layers", "asked", "named"),
    [
        (30, megatron(4, 2), f"transformerConfigOverrides to {FIRST}: 8, {LAST}: 6"),
        (30, megatron(4, 4), ""),
        (30, megatron(4, 2, **{FIRST: 5}), f"{FIRST}: 8, {LAST}: 6 would do"),
        (20, megatron(4, 2, **{FIRST: 7}), f"{FIRST}: 4, {LAST}: 4 would do"),
    ],
)
def test_uneven_stages_are_named_where_chunks_divide_them(layers: int, asked: MegatronSpec, named: str) -> None:
    problem = model_problem(asked, replace(shape(LLAMA), layers=layers))

    assert problem.endswith(named) if named else FIRST not in problem
    ends = even_enough(layers, 4, asked.virtual_pipeline_parallel_degree)
    if ends:
        fixed = megatron(4, asked.virtual_pipeline_parallel_degree, **ends)
        assert model_problem(fixed, replace(shape(LLAMA), layers=layers)) == ""


@pytest.mark.parametrize(
    ("layers", "asked", "words"),
    [
        (32, megatron(6, 2), f"set it to 2, 4, 8 or 16, or strategy.megatron.transformerConfigOverrides to {FIRST}: 4"),
        (31, megatron(4, 2), "leave virtualPipelineParallelDegree out and set pipelineParallelDegree to 1 or 31"),
        (
            36,
            megatron(8, 3),
            f"set it to 2, 3, 4, 6 or 12, or strategy.megatron.transformerConfigOverrides to {FIRST}:",
        ),
    ],
)
def test_stages_that_are_named_have_whole_chunks(layers: int, asked: MegatronSpec, words: str) -> None:
    model = replace(shape(LLAMA), layers=layers)

    problem = model_problem(asked, model)

    assert words in problem
    chunks = 1 if "Degree out" in problem else asked.virtual_pipeline_parallel_degree
    named = re.split(", | or ", re.split("set (?:it|pipelineParallelDegree) to ", problem)[1].partition(", or ")[0])
    assert [model_problem(megatron(int(stages), chunks), model) for stages in named] == [""] * len(named)


@pytest.mark.parametrize(
    ("model", "degrees", "words"),
    [
        (
            "Qwen/Qwen3-8B",
            {"pipelineParallelDegree": 8},
            "36 layers, which it does not divide: set it to 1, 2 or 4, or",
        ),
        ("Qwen/Qwen2.5-7B", {"contextParallelDegree": 8}, "28 attention heads of the model: set it to 1, 2 or 4$"),
        (
            "Qwen/Qwen2.5-7B",
            {"tensorParallelDegree": 8},
            "28 attention heads, which it does not .*: set it to 1, 2 or 4$",
        ),
        (
            "Qwen/Qwen2.5-7B",
            {"tensorParallelDegree": 8, "contextParallelDegree": 2, "nodes": 2},
            "28 attention heads, which it does not .*: set it to 1 or 2$",
        ),
        (
            "Qwen/Qwen2.5-7B",
            {"tensorParallelDegree": 8, "sequenceParallel": True},
            "28 attention heads, which it does not .*: set it to 2 or 4$",
        ),
        (
            "Qwen/Qwen2.5-7B",
            {"pipelineParallelDegree": 8, "transformerConfigOverrides": {"batch_p2p_comm": False}},
            "28 layers, which it does not divide: set it to 2 or 4, or ",
        ),
    ],
)
def test_degrees_that_are_named_are_such_that_the_job_can_have(model: str, degrees: dict[str, Any], words: str) -> None:
    asked = spec(model, **degrees)

    assert re.search(words, judge(asked, make_plan(asked)).refused)


def test_where_no_degree_will_do_what_asks_for_one_is_named_too() -> None:
    odd = replace(shape(LLAMA), heads=31, kv_heads=31)
    asked = MegatronSpec(tensor_parallel_degree=2, sequence_parallel=True)
    assert model_problem(asked, odd).endswith(
        "31 attention heads, which it does not divide: leave it out, and sequenceParallel"
    )


def test_a_config_with_absurd_numbers_is_refused_as_soon_as_others() -> None:
    """Remedies are looked for among what a degree may be: a config.json may say 2^31 layers."""
    assert "which it does not divide: set it to 1" in model_problem(
        megatron(2), replace(shape(LLAMA), layers=2**31 - 1)
    )


def test_chunks_of_one_stage_are_refused() -> None:
    with pytest.raises(ValidationError, match="needs pipelineParallelDegree"):
        MegatronSpec(virtual_pipeline_parallel_degree=2)


@pytest.mark.parametrize("given", [{FIRST: 3}, {LAST: 3}, {"batch_p2p_comm": True}, {FIRST: 0}])
def test_what_says_nothing_of_one_stage_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        megatron(**given)


def test_what_is_said_is_shown() -> None:
    assert stages_in_words(megatron(4)) == "4, of other layers each"
    assert (
        stages_in_words(megatron(4, **{FIRST: 7, LAST: 9})) == "4, of other layers each, 7 in the first, 9 in the last"
    )
    chunks = MegatronSpec(pipeline_parallel_degree=4, virtual_pipeline_parallel_degree=2)
    assert stages_in_words(chunks) == "4, of 2 chunks of other layers each"
    assert given_in_words(megatron()) == "strategy.megatron: docs/megatron.md"


MANY = {"pipelineParallelDegree": 4, "training": {"globalBatchTokens": 2**20}}


def test_a_stage_takes_what_its_own_layers_take() -> None:
    even, fewer, more = (
        estimated(**MANY, **overrides(**ends)) for ends in ({}, {FIRST: 7, LAST: 7}, {FIRST: 11, LAST: 5})
    )

    # The embedding with 7 layers takes less than 9 layers between the ends.
    assert fewer.gradients < even.gradients < more.gradients
    assert more.activations == pytest.approx(even.activations * 11 / 8, rel=0.05)


def test_outputs_that_are_not_forgotten_are_kept_with_each_micro_batch() -> None:
    forgotten, kept = (
        estimated(**MANY, **overrides(**given)) for given in ({}, {"deallocate_pipeline_outputs": False})
    )

    # Four micro-batches are under way in the first stage, of 8k tokens and 4096 numbers in bf16 each.
    assert kept.activations - forgotten.activations == 4 * 8192 * 4096 * 2


@pytest.mark.parametrize(("chunks", "tokens", "micro_batches"), [(1, 64, 4), (2, 64, 5.5), (4, 64, 19 / 4), (2, 4, 4)])
def test_chunks_keep_parts_of_more_micro_batches(chunks: int, tokens: int, micro_batches: float) -> None:
    """By 1 + (stages - 1) / (stages x chunks) as many: Narayanan et al. 2021, arXiv 2104.04473."""
    batch = {"globalBatchTokens": 2 * tokens * 8192}
    degrees = {"pipelineParallelDegree": 4, "virtualPipelineParallelDegree": chunks}

    one, several = estimated(training=batch), estimated(**degrees, training=batch)

    assert several.activations == pytest.approx(one.activations * micro_batches / 4, rel=0.05)


def test_a_router_in_its_own_precision_keeps_what_it_sees() -> None:
    given: tuple[dict[str, str], ...] = ({}, {"moe_router_dtype": "fp32"})
    one, own = (estimated(EXPERTS, expertParallelDegree=8, **overrides(**each)) for each in given)

    assert own.activations - one.activations == pytest.approx(48 * 8192 * 2048 * 2, rel=0.25)


def test_a_model_whose_layers_few_degrees_divide_is_proposed_uneven_stages() -> None:
    large = replace(shape("meta-llama/Llama-3.1-70B"), layers=91)
    asked = spec("meta-llama/Llama-3.1-70B", nodes=4, training={"globalBatchTokens": 2**22})

    found = suggestions(asked.model_copy(update={"strategy": None}), large, 80 * 2**30)["megatron"]

    assert found is not None
    assert found.sections["strategy"]["megatron"] == {
        "tensorParallelDegree": 8,
        "pipelineParallelDegree": 2,
        "transformerConfigOverrides": {FIRST: 46, LAST: 45},
    }


@pytest.mark.parametrize(
    ("given", "counts"),
    [
        ({FIRST: 3, LAST: 3, "batch_p2p_comm": False, "deallocate_pipeline_outputs": False}, False),
        ({"moe_router_dtype": "fp32"}, True),
    ],
)
def test_only_what_changes_numbers_is_one(given: dict[str, Any], counts: bool) -> None:
    asked = spec(pipelineParallelDegree=4)
    assert asked.strategy is not None
    other = asked.strategy.model_copy(update={"megatron": megatron(4, **given)})

    changed = Numbers.of(asked.model_copy(update={"strategy": other}))

    assert (changed.digest != Numbers.of(asked).digest) is counts
    path = "strategy.megatron.transformerConfigOverrides.moe_router_dtype"
    assert changed.differences(Numbers.of(asked)) == ([f'{path}: "fp32" -> not set'] if counts else [])


def test_the_text_part_of_a_model_of_several_is_refused_by_its_name_too() -> None:
    alone = known_shape("hf://mistralai/Mistral-Small-24B-Instruct-2501")
    part = known_shape("hf://mistralai/Mistral-Small-3.1-24B-Instruct-2503")

    assert alone
    assert part == alone
    assert model_problem(megatron(), alone) == ""
    assert "no rules for the weights of the text part of a model of several" in model_problem(megatron(), part)
