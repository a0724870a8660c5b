"""What of ``strategy.megatron`` is valid and may surprise, and what a model's config.json forbids."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sft_api.megatron import idle_warning
from sft_api.memory_plan import judge
from sft_api.plan import make_plan
from sft_api.surprises import surprises
from tests.unit.api.test_megatron_memory import EXPERTS, LLAMA, shape, spec
from tests.unit.cli.jobs import job


def test_stages_that_wait_for_long_are_a_surprise() -> None:
    def said(tokens: int) -> str:
        asked = spec(pipelineParallelDegree=4, training={"globalBatchTokens": tokens})
        (warning,) = surprises(asked, None) or [""]
        assert warning == idle_warning(asked, make_plan(asked))
        return warning

    # Two copies, of 8k tokens a micro-batch
    assert said(2 * 2 * 8192) == (
        "strategy.megatron.pipelineParallelDegree is 4, and a step has only 2 micro-batches for each copy of the "
        "model: its stages wait for 60% of the time; with training.globalBatchTokens: 262144 it is 16%, and less with "
        "fewer stages or more virtualPipelineParallelDegree"
    )
    assert said(2 * 16 * 8192) == ""


def test_chunks_of_stages_wait_less() -> None:
    def said(tokens: int) -> str:
        degrees = {"pipelineParallelDegree": 4, "virtualPipelineParallelDegree": 2}
        asked = spec(**degrees, training={"globalBatchTokens": tokens})
        return idle_warning(asked, make_plan(asked))

    # Two copies: of 6 micro-batches the last two are filled up with two of nothing.
    assert "only 6 micro-batches for each copy of the model: its stages wait for 37%" in said(2 * 6 * 8192)
    assert "globalBatchTokens: 131072 it is 16%" in said(2 * 6 * 8192)
    assert said(2 * 8 * 8192) == ""


def test_more_micro_batches_that_are_no_whole_group_may_wait_for_longer() -> None:
    def said(micro_batches: int) -> str:
        degrees = {"pipelineParallelDegree": 4, "virtualPipelineParallelDegree": 4}
        asked = spec(**degrees, training={"globalBatchTokens": 2 * micro_batches * 8192})
        return idle_warning(asked, make_plan(asked))

    # Two copies: four are one group, five are two.
    assert said(4) == ""
    assert "only 5 micro-batches for each copy of the model: its stages wait for 43% of the time; with" in said(5)
    assert "training.globalBatchTokens: 131072 it is 9%" in said(5)
    assert said(15) == ""
    assert said(8) == ""


def test_examples_that_are_not_packed_are_counted_as_such() -> None:
    def said(examples: int) -> str:
        batch = {"globalBatchSize": examples, "microBatchSize": 2}
        asked = job(
            model={"uri": f"hf://{LLAMA}"},
            compute={"gpusPerNode": 8},
            data={"train": [{"uri": "hf://a/b"}], "packing": "none"},
            strategy={"megatron": {"pipelineParallelDegree": 2}},
            training=batch,
        ).spec
        return idle_warning(asked, make_plan(asked))

    assert "a step has only 1 micro-batch for" in said(8)
    assert "with training.globalBatchSize: 64 it is 11%" in said(8)
    assert said(64) == ""


@pytest.mark.parametrize(
    ("model", "degrees", "words"),
    [
        (LLAMA, {"tensorParallelDegree": 2}, "strategy.megatron.sequenceParallel needs GPUs"),
        (LLAMA, {"pipelineParallelDegree": 2}, "strategy.megatron.pipelineParallelDegree needs GPUs"),
        (EXPERTS, {"expertParallelDegree": 2}, "strategy.megatron.expertParallelDegree needs GPUs"),
        (EXPERTS, {}, "strategy.megatron with a mixture of experts needs GPUs"),
        (LLAMA, {"tensorParallelDegree": 2, "sequenceParallel": False}, ""),
        (LLAMA, {"contextParallelDegree": 2}, ""),
        (LLAMA, {}, ""),
    ],
)
def test_what_the_trainer_refuses_without_gpus_is_a_surprise(model: str, degrees: dict[str, Any], words: str) -> None:
    def said(gpus: int) -> list[str]:
        compute = {"gpusPerNode": gpus, **({} if gpus else {"processesPerNode": 8})}
        batch = {"globalBatchTokens": 2**22}
        asked = job(
            model={"uri": f"hf://{model}"}, training=batch, strategy={"megatron": degrees}, compute=compute
        ).spec
        return surprises(asked, shape(model))

    assert said(8) == []
    (warning,) = said(0) or [""]
    assert warning.startswith(f"with compute.gpusPerNode: 0 the trainer refuses this job: {words}" if words else "")
    assert bool(warning) == bool(words)


def test_a_config_by_which_a_model_has_other_tensors_is_refused_in_its_words() -> None:
    biased = replace(shape(LLAMA), attention_bias=True, output_bias=True)
    asked = spec()
    refused = judge(asked, make_plan(asked), shape=biased).refused
    assert "a model with attention_bias: true in its config.json" in refused
