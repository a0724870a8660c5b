"""The planner: which numbers follow from which spec."""

from typing import Any

import pytest

from sft_api.batch import DEFAULT_GLOBAL_BATCH_SIZE, DEFAULT_GLOBAL_BATCH_TOKENS
from sft_api.plan import decay_steps, make_plan, progress_deadline_seconds, warmup_steps
from sft_api.v1alpha1 import SFTJobSpec
from sft_api.v1alpha1.workload import TrainingSpec


def spec(**parts: Any) -> SFTJobSpec:
    """A small spec with some parts given."""
    data = {"train": [{"uri": "hf://org/rows"}], **parts.pop("data", {})}
    return SFTJobSpec.model_validate({"model": {"uri": "hf://org/name"}, "data": data, "compute": {}, **parts})


NO_PACKING = {"packing": "none"}
EIGHT = {"gpusPerNode": 8}
CPU = {"gpusPerNode": 0}

CASES: dict[str, tuple[SFTJobSpec, dict[str, Any]]] = {
    "one GPU": (
        spec(),
        {
            "processes": 1,
            "data_parallel": 1,
            "shard_degree": 1,
            "precision": "bf16",
            "learning_rate": 1e-5,
            "global_batch_size": None,
            "global_batch_tokens": 65536,
            "max_tokens_per_micro_batch": 4096,
            "gradient_accumulation": 16,
            "total_steps": None,
            "epochs": 1,
        },
    ),
    "processes fill the step": (
        spec(compute={"nodes": 4, **EIGHT}),
        {"processes": 32, "global_batch_tokens": 131072, "gradient_accumulation": 1, "shard_degree": 32},
    ),
    "whole micro-batches on every process": (
        spec(compute={"gpusPerNode": 3}),
        {"global_batch_tokens": 73728, "gradient_accumulation": 6},
    ),
    "long examples": (
        spec(data={"maxLength": 131072}, compute=EIGHT),
        {"max_tokens_per_micro_batch": 131072, "global_batch_tokens": 1048576, "gradient_accumulation": 1},
    ),
    "tokens given": (
        spec(training={"globalBatchTokens": 100_000, "maxTokensPerMicroBatch": 8192}, compute=EIGHT),
        {"global_batch_tokens": 65536, "max_tokens_per_micro_batch": 8192, "gradient_accumulation": 1},
    ),
    "examples given, packed": (
        spec(training={"globalBatchSize": 64}, compute=EIGHT),
        {
            "global_batch_size": 64,
            "global_batch_tokens": None,
            "max_tokens_per_micro_batch": 4096,
            "gradient_accumulation": None,
        },
    ),
    "not packed": (
        spec(data=NO_PACKING, compute=EIGHT),
        {
            "global_batch_size": 32,
            "global_batch_tokens": None,
            "max_tokens_per_micro_batch": None,
            "gradient_accumulation": 4,
        },
    ),
    "not packed, an odd number of processes": (
        spec(data=NO_PACKING, training={"microBatchSize": 2}, compute={"gpusPerNode": 5}),
        {"global_batch_size": 40, "gradient_accumulation": 4},
    ),
    "not packed, given": (
        spec(data=NO_PACKING, training={"globalBatchSize": 48, "microBatchSize": 3}, compute=EIGHT),
        {"global_batch_size": 48, "gradient_accumulation": 2},
    ),
    "CPU": (
        spec(compute={**CPU, "nodes": 2, "processesPerNode": 3}),
        {"processes": 6, "precision": "fp32"},
    ),
    "CPU, one process a node": (spec(compute={**CPU, "nodes": 2}), {"processes": 2}),
    "hybrid sharding": (
        spec(strategy={"fsdp": {"shardDegree": 8}}, compute={"nodes": 2, **EIGHT}),
        {"processes": 16, "data_parallel": 16, "shard_degree": 8},
    ),
    "shared tokens": (
        spec(strategy={"fsdp": {"sequenceParallelDegree": 4}}, compute={"nodes": 2, **EIGHT}),
        {
            "processes": 16,
            "data_parallel": 4,
            "sequence_parallel": 4,
            "shard_degree": 16,
            "global_batch_tokens": 65536,
            "gradient_accumulation": 4,
        },
    ),
    "shared tokens, not packed": (
        spec(
            data=NO_PACKING,
            training={"globalBatchSize": 4},
            strategy={"fsdp": {"sequenceParallelDegree": 2}},
            compute=EIGHT,
        ),
        {"global_batch_size": 4, "gradient_accumulation": 1},
    ),
    "matrices and stages": (
        spec(
            strategy={"megatron": {"tensorParallelDegree": 4, "pipelineParallelDegree": 2, "expertParallelDegree": 8}},
            compute={"nodes": 2, **EIGHT},
        ),
        {
            "processes": 16,
            "data_parallel": 2,
            "tensor_parallel": 4,
            "pipeline_parallel": 2,
            "expert_parallel": 8,
            "shard_degree": 16,
            "global_batch_tokens": 65536,
            "gradient_accumulation": 8,
            "reduce_gradients": "everyMicroBatch",
        },
    ),
    "tokens shared by Megatron": (
        spec(
            strategy={"megatron": {"tensorParallelDegree": 2, "contextParallelDegree": 4}},
            compute={"nodes": 2, **EIGHT},
        ),
        {
            "data_parallel": 2,
            "sequence_parallel": 4,
            "tensor_parallel": 2,
            "shard_degree": 16,
            "global_batch_tokens": 65536,
            "gradient_accumulation": 8,
        },
    ),
    "steps": (spec(training={"steps": 10}), {"total_steps": 10, "epochs": None}),
    "epochs": (spec(training={"epochs": 3}), {"total_steps": None, "epochs": 3}),
    "own choices": (
        spec(training={"precision": "fp32", "optimizer": {"learningRate": 3e-4}}),
        {"precision": "fp32", "learning_rate": 3e-4},
    ),
}


@pytest.mark.parametrize(("given", "expected"), CASES.values(), ids=CASES)
def test_plan(given: SFTJobSpec, expected: dict[str, Any]) -> None:
    plan = make_plan(given).model_dump(by_alias=False)

    assert {key: plan[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("schedule", "steps"),
    [
        ({}, 30),
        ({"warmupRatio": 0.1}, 100),
        ({"warmupRatio": 0}, 0),
        ({"warmupSteps": 7}, 7),
        ({"warmupSteps": 0}, 0),
        ({"type": "constant"}, 0),
        ({"type": "constantWithWarmup"}, 30),
    ],
)
def test_warmup_of_a_thousand_steps(schedule: dict[str, Any], steps: int) -> None:
    assert warmup_steps(spec(training={"schedule": schedule}), 1000) == steps


@pytest.mark.parametrize(
    ("schedule", "steps"),
    [
        ({}, 970),
        ({"type": "constantWithWarmup"}, 0),
        ({"type": "warmupStableDecay"}, 100),
        ({"type": "warmupStableDecay", "decayRatio": 0.25}, 250),
        ({"type": "warmupStableDecay", "decaySteps": 7}, 7),
        # What the warm-up has taken cannot decay
        ({"type": "warmupStableDecay", "decaySteps": 2000, "warmupSteps": 300}, 700),
        ({"type": "warmupStableDecay", "warmupSteps": 1001}, 0),
    ],
)
def test_decay_of_a_thousand_steps(schedule: dict[str, Any], steps: int) -> None:
    assert decay_steps(spec(training={"schedule": schedule}), 1000) == steps


@pytest.mark.parametrize(
    ("configured", "median", "deadline"),
    [(None, None, 1800), (None, 0.5, 180), (None, 30, 600), (5, None, 5), (5, 30, 5)],
)
def test_progress_deadline(configured: int | None, median: float | None, deadline: float) -> None:
    assert progress_deadline_seconds(configured, median) == deadline


def test_the_reference_says_which_batch_a_manifest_without_one_has() -> None:
    """It decides losses more than any other number that a manifest may leave out."""
    fields = TrainingSpec.model_fields
    assert f"{DEFAULT_GLOBAL_BATCH_TOKENS:,}" in str(fields["global_batch_tokens"].description)
    assert f"without packing {DEFAULT_GLOBAL_BATCH_SIZE}" in str(fields["global_batch_size"].description)


def test_processes_that_are_no_whole_number_of_shares_are_refused() -> None:
    asked = spec(compute=EIGHT, strategy={"megatron": {"tensorParallelDegree": 4, "pipelineParallelDegree": 2}})

    assert make_plan(asked, processes=16).data_parallel == 2
    with pytest.raises(ValueError, match="8 processes have a share of a step together: 2 are no multiple of that"):
        make_plan(asked, processes=2)


DROPOUT = {"uri": "hf://org/name", "configOverrides": {"attention_dropout": 0.1}}


@pytest.mark.parametrize(
    ("parts", "compiled"),
    [
        ({}, True),
        ({"lora": {"rank": 8}}, True),
        ({"compute": CPU}, False),
        ({"training": {"compile": False}}, False),
        ({"training": {"compile": True}, "compute": CPU}, True),
        ({"training": {"precision": "fp32"}}, False),
        ({"strategy": {"megatron": {}}}, False),
        ({"model": DROPOUT, "training": {"precision": "fp32"}}, False),
        ({"model": {"uri": "hf://openai/gpt-oss-20b"}}, False),
        ({"model": {"uri": "hf://Qwen/Qwen3-30B-A3B"}}, False),
        ({"model": {"uri": "hf://Qwen/Qwen3-30B-A3B"}, "training": {"compile": True}}, True),
    ],
    ids=str,
)
def test_layers_are_compiled_on_gpus_where_nothing_is_known_against_it(parts: dict[str, Any], compiled: bool) -> None:
    assert make_plan(spec(**parts)).compile == compiled
