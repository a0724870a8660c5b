"""With which shapes a job is said to fit: they are valid, they fit, and what costs less comes first."""

from typing import Any

import pytest

from sft_api.known_models import known_shape
from sft_api.memory_plan import Fit, judge
from sft_api.model_shape import ModelShape
from sft_api.numbers import Numbers
from sft_api.plan import make_plan
from sft_api.suggestions import Suggestion, suggestions
from sft_api.v1alpha1.job import SFTJobSpec
from tests.unit.cli.jobs import manifest

GIB = 2**30


def document(model: str, **sections: Any) -> dict[str, Any]:
    data = {"train": [{"uri": "hf://a/b"}], "maxLength": sections.pop("length", 8192)}
    spec: dict[str, Any] = manifest(model={"uri": f"hf://{model}"}, data=data, **sections)["spec"]
    return spec


def shape_of(model: str) -> ModelShape:
    shape = known_shape(f"hf://{model}")
    assert shape is not None
    return shape


def suggested(model: str, gpu: int = 80, **sections: Any) -> dict[str, Suggestion | str]:
    return suggestions(SFTJobSpec.model_validate(document(model, **sections)), shape_of(model), gpu * GIB)


@pytest.mark.parametrize(
    ("model", "sections"),
    [
        ("meta-llama/Llama-3.1-8B", {"compute": {"gpusPerNode": 8}}),
        ("meta-llama/Llama-3.1-8B", {"compute": {"gpusPerNode": 8}, "length": 65536}),
        ("meta-llama/Llama-3.1-70B", {"compute": {"nodes": 8, "gpusPerNode": 8}}),
        ("Qwen/Qwen3-30B-A3B", {"compute": {"nodes": 2, "gpusPerNode": 8}}),
    ],
)
def test_what_is_suggested_is_a_job_that_fits(model: str, sections: dict[str, Any]) -> None:
    for found in suggested(model, **sections).values():
        assert isinstance(found, Suggestion)
        # As a user puts them into the manifest: in place of what it has.
        compute = {**sections["compute"], "gpuMemory": "80Gi"}
        asked = SFTJobSpec.model_validate({**document(model, **sections), **found.sections, "compute": compute})
        assert judge(asked, make_plan(asked)) == Fit()
        assert found.bytes <= 72 * GIB


def test_what_costs_less_comes_first() -> None:
    small = suggested("Qwen/Qwen3-0.6B", compute={"gpusPerNode": 8}, length=1024)

    for name, found in small.items():
        assert isinstance(found, Suggestion)
        assert found.sections == {"training": {"activationCheckpointing": "none"}, "strategy": {name: {}}}


@pytest.mark.parametrize(
    ("model", "nodes", "given", "left"),
    [
        (
            "Qwen/Qwen3-30B-A3B",
            2,
            {"moe_router_dtype": "fp32", "batch_p2p_comm": False, "num_layers_in_last_pipeline_stage": 20},
            ["moe_router_dtype"],
        ),
        (
            "meta-llama/Llama-3.1-70B",
            4,
            {"deallocate_pipeline_outputs": False, "batch_p2p_comm": False, "num_layers_in_last_pipeline_stage": 39},
            ["deallocate_pipeline_outputs", "batch_p2p_comm"],
        ),
    ],
)
def test_what_is_said_in_megatrons_words_is_kept_but_for_layers(
    model: str, nodes: int, given: dict[str, Any], left: list[str]
) -> None:
    strategy = {"megatron": {"pipelineParallelDegree": 2, "transformerConfigOverrides": given}}
    sections = {"compute": {"nodes": nodes, "gpusPerNode": 8}, "training": {"globalBatchTokens": 2**22}}

    found = suggested(model, **sections, strategy=strategy)["megatron"]

    # One stage of the mixture, two of the other: what is about stages goes with these.
    assert isinstance(found, Suggestion)
    kept = found.sections["strategy"]["megatron"]["transformerConfigOverrides"]
    assert kept == {name: given[name] for name in left}
    asked, then = (
        SFTJobSpec.model_validate(document(model, **sections, strategy=each))
        for each in (strategy, found.sections["strategy"])
    )
    assert Numbers.of(then) == Numbers.of(asked)


def test_a_strategy_that_does_not_train_such_a_job_is_none() -> None:
    found = suggested("Qwen/Qwen3-0.6B", compute={"gpusPerNode": 8}, lora={})

    assert found["megatron"] == "strategy.megatron trains all weights: leave lora out, or choose strategy.fsdp"
    assert isinstance(found["fsdp"], Suggestion)


def test_where_nothing_fits_it_is_said_what_to_change() -> None:
    found = suggested("meta-llama/Llama-3.1-8B", compute={"gpusPerNode": 1})

    for name, words in (("fsdp", "2 GPUs in compute (69.8Gi), lora (20.4Gi), "), ("megatron", "8 GPUs in compute (")):
        said = found[name]
        assert isinstance(said, str)
        assert said.startswith(f"no shape of 1 process has room for it; strategy: {{{name}: {{}}}} and activationCheck")
        assert f"of each GPU's 80.0Gi: change one or several of: {words}" in said


def test_what_the_manifest_has_of_training_is_kept() -> None:
    given = {"globalBatchTokens": 2**20, "optimizer": {"learningRate": 2e-5}}

    for found in suggested("meta-llama/Llama-3.1-8B", compute={"gpusPerNode": 8}, training=given).values():
        assert isinstance(found, Suggestion)
        checkpointing = found.sections["training"]["activationCheckpointing"]
        assert found.sections["training"] == {**given, "activationCheckpointing": checkpointing}


def test_tokens_are_shared_over_nodes_where_a_node_has_no_room() -> None:
    # docs/megatron.md's own example: a step has two micro-batches, so that each has the GPUs of two nodes.
    degrees = {"tensorParallelDegree": 8, "contextParallelDegree": 2}
    where: dict[str, Any] = {
        "compute": {"nodes": 4, "gpusPerNode": 8},
        "length": 131072,
        "training": {"globalBatchTokens": 262144},
    }

    found = suggested("meta-llama/Llama-3.1-8B", **where, strategy={"megatron": degrees})

    assert {name: isinstance(each, Suggestion) and each.sections["strategy"] for name, each in found.items()} == {
        "fsdp": {"fsdp": {"sequenceParallelDegree": 16}},
        "megatron": {"megatron": degrees},
    }


ONE_MICRO_BATCH: dict[str, Any] = {"compute": {"nodes": 2, "gpusPerNode": 8}, "training": {"globalBatchTokens": 8192}}


def test_the_shape_of_the_manifest_is_suggested_where_it_alone_fits() -> None:
    strategy = {"megatron": {"tensorParallelDegree": 8, "pipelineParallelDegree": 2, "sequenceParallel": True}}

    found = suggested("meta-llama/Llama-3.1-70B", gpu=94, **ONE_MICRO_BATCH, strategy=strategy)["megatron"]

    assert isinstance(found, Suggestion)
    assert found.sections["strategy"] == strategy


def test_where_only_stages_fit_the_batch_is_named_that_fills_them() -> None:
    strategy = {"megatron": {"tensorParallelDegree": 8, "contextParallelDegree": 2}}

    found = suggested("meta-llama/Llama-3.1-70B", gpu=94, **ONE_MICRO_BATCH, strategy=strategy)["megatron"]

    assert isinstance(found, str)
    assert "pipelineParallelDegree: 2" in found
    assert found.endswith("more stages than a step has micro-batches: set training.globalBatchTokens: 16384, or more")


def test_no_more_stages_than_a_step_has_micro_batches_are_suggested() -> None:
    # Stages of 8 GPUs fill a step of the default batch once: the second stage would wait for the first.
    where: dict[str, Any] = {"compute": {"nodes": 8, "gpusPerNode": 8}, "length": 32768}

    stages = []
    for training in ({}, {"globalBatchTokens": 2**21}):
        found = suggested("meta-llama/Llama-3.1-70B", **where, training=training)["megatron"]
        assert isinstance(found, Suggestion)
        stages.append(found.sections["strategy"]["megatron"].get("pipelineParallelDegree", 1))

    assert stages == [1, 2]
