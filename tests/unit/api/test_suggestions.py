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


def suggested(model: str, gpu: int = 80, **sections: Any) -> dict[str, Suggestion | None]:
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
        assert found is not None
        given = document(model, **sections)
        asked = SFTJobSpec.model_validate(
            {
                **given,
                **found.sections,
                "training": {**given.get("training", {}), **found.sections["training"]},
                "compute": {**sections["compute"], "gpuMemory": "80Gi"},
            }
        )
        assert judge(asked, make_plan(asked)) == Fit()
        assert found.bytes <= 72 * GIB


def test_what_costs_less_comes_first() -> None:
    small = suggested("Qwen/Qwen3-0.6B", compute={"gpusPerNode": 8}, length=1024)

    for name, found in small.items():
        assert found is not None
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
    assert found is not None
    kept = found.sections["strategy"]["megatron"]["transformerConfigOverrides"]
    assert kept == {name: given[name] for name in left}
    asked, then = (
        SFTJobSpec.model_validate(document(model, **sections, strategy=each))
        for each in (strategy, found.sections["strategy"])
    )
    assert Numbers.of(then) == Numbers.of(asked)


def test_a_strategy_that_does_not_train_such_a_job_is_none() -> None:
    found = suggested("Qwen/Qwen3-0.6B", compute={"gpusPerNode": 8}, lora={})

    assert found["megatron"] is None
    assert found["fsdp"] is not None


def test_where_nothing_fits_nothing_is_suggested() -> None:
    assert suggested("meta-llama/Llama-3.1-70B", compute={"gpusPerNode": 1}) == {"fsdp": None, "megatron": None}


def test_no_more_stages_than_a_step_has_micro_batches_are_suggested() -> None:
    # 64 GPUs in stages of 8 fill a step of the default batch once: the second stage would wait for the first.
    where = {"compute": {"nodes": 8, "gpusPerNode": 8}, "length": 32768}

    assert suggested("meta-llama/Llama-3.1-70B", **where)["megatron"] is None
    found = suggested("meta-llama/Llama-3.1-70B", **where, training={"globalBatchTokens": 2**21})["megatron"]
    assert found is not None
    assert found.sections["strategy"]["megatron"]["pipelineParallelDegree"] > 1
