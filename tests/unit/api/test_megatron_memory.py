"""Memory of ``strategy.megatron`` by formula: what a stage holds, the verdict, and what to change."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sft_api.known_models import known_configs, known_shape
from sft_api.megatron import across_nodes_warning
from sft_api.memory import MemoryEstimate
from sft_api.memory_megatron import changes, estimate_stage, held_by, layer_memory
from sft_api.memory_needed import gibibytes
from sft_api.memory_plan import Fit, judge
from sft_api.model_shape import ModelShape
from sft_api.plan import make_plan
from sft_api.surprises import surprises
from sft_api.v1alpha1.job import SFTJobSpec
from sft_api.v1alpha1.megatron import megatron_of
from tests.unit.cli.jobs import job, manifest

LLAMA, EXPERTS, SMALL = "meta-llama/Llama-3.1-8B", "Qwen/Qwen3-30B-A3B", "Qwen/Qwen2.5-0.5B"


_OTHERS = ("sequenceParallel", "transformerConfigOverrides")


def overrides(**given: Any) -> dict[str, Any]:
    return {"transformerConfigOverrides": given}


def spec(model: str = LLAMA, nodes: int = 1, length: int = 8192, gpu: str = "80Gi", **parts: Any) -> SFTJobSpec:
    degrees = {name: parts.pop(name) for name in [*parts] if name.endswith("Degree") or name in _OTHERS}
    return job(
        model={"uri": f"hf://{model}"},
        compute={"nodes": nodes, "gpusPerNode": 8, "gpuMemory": gpu},
        data={"train": [{"uri": "hf://a/b"}], "maxLength": length, **parts.pop("data", {})},
        strategy={"megatron": degrees},
        **parts,
    ).spec


def shape(model: str) -> ModelShape:
    found = known_shape(f"hf://{model}")
    assert found is not None
    return found


def estimated(model: str = LLAMA, **parts: Any) -> MemoryEstimate:
    asked = spec(model, **parts)
    return estimate_stage(shape(model), asked, make_plan(asked))


def verdict(asked: SFTJobSpec) -> Fit:
    return judge(asked, make_plan(asked))


@pytest.mark.parametrize(
    ("model", "degrees"),
    [
        (LLAMA, {"tensorParallelDegree": 8}),
        (LLAMA, {"tensorParallelDegree": 2, "pipelineParallelDegree": 4}),
        (LLAMA, {"tensorParallelDegree": 2, "contextParallelDegree": 2, "pipelineParallelDegree": 2}),
        ("Qwen/Qwen2.5-7B", {"tensorParallelDegree": 4, "pipelineParallelDegree": 2}),
        (SMALL, {"pipelineParallelDegree": 8}),
        (EXPERTS, {"expertParallelDegree": 8}),
        (EXPERTS, {"tensorParallelDegree": 4, "pipelineParallelDegree": 2, "expertParallelDegree": 4}),
        (SMALL, {"pipelineParallelDegree": 4, **overrides(num_layers_in_first_pipeline_stage=3)}),
        (LLAMA, {"pipelineParallelDegree": 4, **overrides(num_layers_in_last_pipeline_stage=5)}),
    ],
)
def test_a_stage_holds_as_many_parameters_as_are_built(model: str, degrees: dict[str, Any]) -> None:
    from math import prod
    from types import SimpleNamespace

    from sft_trainer.strategies.megatron.layout import Sizes, parameter_shapes
    from sft_trainer.topology import Topology

    asked = spec(model, **degrees)
    plan = make_plan(asked)
    config = {"tie_word_embeddings": False, **known_configs()[model]}
    sizes = Sizes.of(SimpleNamespace(**config), megatron_of(asked))
    for stage in range(plan.pipeline_parallel):
        built = parameter_shapes(
            sizes,
            Topology(
                rank=stage * 8 // plan.pipeline_parallel,
                local_rank=0,
                world_size=8,
                shard=plan.data_parallel,
                sequence=plan.sequence_parallel,
                tensor=plan.tensor_parallel,
                pipeline=plan.pipeline_parallel,
                expert=plan.expert_parallel,
            ),
        )

        held = held_by(shape(model), asked, plan, stage)

        experts = [prod(size) for name, size in built.items() if ".experts." in name]
        assert held.experts == sum(experts)
        assert held.dense == sum(map(prod, built.values())) - sum(experts)
        assert held.largest == max(map(prod, built.values()))


def test_copies_share_out_moments_and_masters_only() -> None:
    alone, two = estimated(tensorParallelDegree=8), estimated(tensorParallelDegree=8, nodes=2)

    assert two.gradients == alone.gradients
    assert two.optimizer == pytest.approx(alone.optimizer / 2, rel=0.001)
    assert alone.parameters - two.parameters == pytest.approx(alone.optimizer / 4, rel=0.001)


def test_processes_that_share_tokens_share_out_what_updates_a_copy_too() -> None:
    copies, one_bin = estimated(tensorParallelDegree=2), estimated(tensorParallelDegree=2, contextParallelDegree=4)

    assert (one_bin.parameters, one_bin.gradients) == (copies.parameters, copies.gradients)
    assert one_bin.optimizer == copies.optimizer
    assert copies.activations is not None
    # A quarter of the tokens; of the keys what arrived is kept, and not what was sent.
    assert one_bin.activations == pytest.approx(copies.activations / 4, rel=0.02)


def test_heads_of_keys_that_go_to_several_are_kept_by_each() -> None:
    def kept(context: int) -> float:
        asked = spec(nodes=4, tensorParallelDegree=4, contextParallelDegree=context)
        return layer_memory(shape(LLAMA), asked, make_plan(asked), 2).kept

    # Two heads of keys and values, of 128 numbers, for a process of a matrix: each goes to one of two, or four of eight
    assert kept(8) - kept(2) == 2 * (4 - 1) * 2 * 2 * 128


def test_copies_of_experts_share_out_what_updates_them_by_whole_experts() -> None:
    def optimizer(nodes: int, expert: int) -> int:
        return estimated(EXPERTS, expertParallelDegree=expert, nodes=nodes).optimizer

    one = 8 * 48 * 3 * 2048 * 768
    # 16 experts of each process, of one copy, of two, and of three
    dense = [optimizer(nodes, 8) - experts * one for nodes, experts in ((1, 16), (2, 8), (3, 6))]
    assert dense == sorted(dense, reverse=True)
    assert dense[1] == pytest.approx(dense[0] / 2, rel=0.001)
    assert dense[2] == pytest.approx(dense[0] / 3, rel=0.001)
    # Half of the processes have twice the experts, in twice the copies
    assert optimizer(2, 4) == optimizer(2, 8)
    # Gradients and weights are whole
    assert estimated(EXPERTS, nodes=2).gradients == estimated(EXPERTS).gradients


def test_the_first_stage_keeps_more_micro_batches_and_the_last_one_has_the_loss() -> None:
    many = {"training": {"globalBatchTokens": 8192 * 64}}
    one = estimated(tensorParallelDegree=2, **many)
    four = estimated(tensorParallelDegree=2, pipelineParallelDegree=4, **many)

    # Four times the micro-batches of a quarter of the layers.
    assert four.activations == pytest.approx(one.activations, rel=0.05)
    assert four.logits == 0
    small = estimated(SMALL, pipelineParallelDegree=4, training={"activationCheckpointing": "full"})
    assert small.logits is not None
    assert small.logits > 0


def test_copies_of_an_embedding_are_exchanged_where_nothing_else_is() -> None:
    small = replace(shape(SMALL), vocabulary=32000)
    asked = spec(SMALL, length=8, pipelineParallelDegree=8)

    tied, apart = (estimate_stage(replace(small, tied=each), asked, make_plan(asked)) for each in (True, False))

    assert tied.gathered == 4 * 32000 * small.hidden_size
    assert apart.gathered == 2 * 32000 * small.hidden_size


def test_more_tokens_between_matrices_are_kept_where_they_are_not_shared() -> None:
    shared, whole = (estimated(tensorParallelDegree=8, sequenceParallel=shares) for shares in (True, False))

    assert shared.activations is not None
    assert whole.activations is not None
    assert shared.activations < 0.6 * whole.activations


def test_of_a_model_that_nobody_knows_weights_and_moments_are_reckoned() -> None:
    asked = spec("org/unknown", tensorParallelDegree=4, pipelineParallelDegree=2)
    asked = asked.model_copy(update={"model": asked.model.model_copy(update={"parameters": "8B"})})

    memory = make_plan(asked).memory

    assert memory is not None
    assert (memory.parameters, memory.gradients, memory.optimizer) == ("5.6Gi", "3.7Gi", "7.5Gi")
    assert memory.activations is None


def test_what_does_not_fit_is_refused_with_what_this_strategy_can_change() -> None:
    refused = verdict(spec()).refused

    assert refused.startswith("it does not fit: ")
    remedies = [part.split(" (")[0] for part in refused.partition("several of: ")[2].split("), ")]
    assert remedies == [
        "training.activationCheckpointing: selective",
        "training.activationCheckpointing: full",
        "strategy.megatron.contextParallelDegree: 8",
        "strategy.megatron.tensorParallelDegree: 2",
        "strategy.megatron.pipelineParallelDegree: 8",
        "16 GPUs in compute",
        "data.maxLength: 4096",
    ]


@pytest.mark.parametrize(
    "asked",
    [
        spec(pipelineParallelDegree=2, length=32768, training={"globalBatchTokens": 131072}),
        spec(pipelineParallelDegree=4, virtualPipelineParallelDegree=2, training={"globalBatchTokens": 16384}),
        spec(EXPERTS, nodes=2, expertParallelDegree=8, training={"globalBatchTokens": 131072}),
        spec(length=4096, training={"globalBatchSize": 32}),
        spec(data={"packing": "none"}, training={"globalBatchSize": 16}),
    ],
)
@pytest.mark.parametrize("fit", [True, False])
def test_what_is_said_of_a_proposal_is_what_its_own_plan_says(asked: SFTJobSpec, fit: bool) -> None:
    """Fewer copies have more micro-batches each, of which stages keep more: that was once left out."""
    known = known_shape(asked.model.uri)
    assert known is not None
    proposed = [*changes(asked, make_plan(asked), known, lambda *_: fit)]

    assert proposed
    for words, other, plan in proposed:
        own = make_plan(other)
        assert (plan.data_parallel, plan.gradient_accumulation) == (own.data_parallel, own.gradient_accumulation), words
        assert estimate_stage(known, other, plan) == estimate_stage(known, other, own), words


@pytest.mark.parametrize(
    ("asked", "remedy", "changed"),
    [
        (
            spec(pipelineParallelDegree=4, length=65536, training={"globalBatchTokens": 8 * 65536}),
            "data.maxLength: 32768",
            spec(pipelineParallelDegree=4, length=32768, training={"globalBatchTokens": 8 * 65536}),
        ),
        (
            spec(
                pipelineParallelDegree=4,
                length=65536,
                training={"globalBatchTokens": 8 * 65536, "maxTokensPerMicroBatch": 65536},
            ),
            "data.maxLength and training.maxTokensPerMicroBatch: 32768",
            spec(
                pipelineParallelDegree=4,
                length=32768,
                training={"globalBatchTokens": 8 * 65536, "maxTokensPerMicroBatch": 32768},
            ),
        ),
        (
            spec(
                pipelineParallelDegree=4,
                training={"globalBatchTokens": 2 * 65536, "maxTokensPerMicroBatch": 65536},
            ),
            "training.maxTokensPerMicroBatch: 8192",
            spec(
                pipelineParallelDegree=4,
                training={"globalBatchTokens": 2 * 65536, "maxTokensPerMicroBatch": 8192},
            ),
        ),
        (
            spec(
                pipelineParallelDegree=4,
                data={"packing": "none"},
                training={"globalBatchSize": 32, "microBatchSize": 16},
            ),
            "training.microBatchSize: 1",
            spec(
                pipelineParallelDegree=4,
                data={"packing": "none"},
                training={"globalBatchSize": 32, "microBatchSize": 1},
            ),
        ),
    ],
)
def test_smaller_micro_batches_are_more_of_which_stages_keep_some(
    asked: SFTJobSpec, remedy: str, changed: SFTJobSpec
) -> None:
    fit = verdict(asked)

    own = estimate_stage(shape(LLAMA), changed, make_plan(changed)).total
    assert f"{remedy} ({gibibytes(own)})" in fit.refused + fit.warning


def test_shorter_examples_are_no_remedy_where_stages_keep_more_of_them() -> None:
    asked = spec(pipelineParallelDegree=4, length=65536, training={"globalBatchTokens": 4 * 65536})

    assert make_plan(asked).gradient_accumulation == 2
    assert "data.maxLength" not in verdict(asked).refused


def test_remedies_for_the_largest_job_are_looked_for_among_degrees_that_there_are() -> None:
    """The operator judges what any tenant applies: of 262,144 processes, four times, it would stand still for long."""
    document = manifest(
        model={"uri": f"hf://{LLAMA}"},
        compute={"nodes": 4096, "gpusPerNode": 64, "gpuMemory": "16Gi"},
        data={"train": [{"uri": "hf://a/b"}], "maxLength": 8},
        strategy={"megatron": {}},
    )["spec"]
    tried: list[int] = []
    asked = SFTJobSpec.model_validate(document)

    found = [*changes(asked, make_plan(asked), shape(LLAMA), lambda _, plan: bool(tried.append(plan.processes)))]

    assert found
    assert len(tried) < 100
    for _, other, _ in found:
        SFTJobSpec.model_validate(other.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_unset=True))


def test_of_a_mixture_experts_can_be_spread_further() -> None:
    refused = verdict(spec(EXPERTS, nodes=2, expertParallelDegree=8)).refused

    assert "strategy.megatron.expertParallelDegree: 16 (" in refused


def test_degrees_that_no_rule_allows_together_are_no_remedy() -> None:
    """Experts under tensorParallelDegree share tokens; that they do not is allowed without it, and says nothing."""
    refused = verdict(spec(EXPERTS, expertParallelDegree=2, sequenceParallel=False)).refused

    assert "strategy.megatron.tensorParallelDegree" not in refused
    assert "strategy.megatron.expertParallelDegree: 8 (" in refused


def test_matrices_are_never_proposed_to_be_spread_over_nodes() -> None:
    refused = verdict(spec("meta-llama/Llama-3.1-70B", nodes=8, tensorParallelDegree=8)).refused

    assert "strategy.megatron.tensorParallelDegree" not in refused
    assert "strategy.megatron.contextParallelDegree" not in refused
    assert "strategy.megatron.pipelineParallelDegree: 4 (60.6Gi)" in refused


def test_with_enough_processes_for_each_copy_it_fits() -> None:
    assert verdict(spec(tensorParallelDegree=8)) == Fit()


@pytest.mark.parametrize(
    "asked",
    [
        spec(
            length=32768,
            tensorParallelDegree=4,
            training={"globalBatchTokens": 262144, "activationCheckpointing": "selective"},
        ),
        spec(
            length=32768,
            tensorParallelDegree=2,
            contextParallelDegree=2,
            training={"globalBatchTokens": 262144, "activationCheckpointing": "selective"},
        ),
        spec(
            nodes=4,
            length=131072,
            tensorParallelDegree=8,
            contextParallelDegree=2,
            training={"globalBatchTokens": 524288, "activationCheckpointing": "selective"},
        ),
        spec(
            EXPERTS,
            tensorParallelDegree=4,
            expertParallelDegree=8,
            training={"activationCheckpointing": "full"},
        ),
        spec(
            "meta-llama/Llama-3.1-70B",
            nodes=8,
            tensorParallelDegree=8,
            pipelineParallelDegree=4,
            training={"globalBatchTokens": 1048576, "activationCheckpointing": "selective"},
        ),
    ],
)
def test_the_worked_examples_of_the_page_fit(asked: SFTJobSpec) -> None:
    assert verdict(asked) == Fit()


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (
            spec(SMALL, tensorParallelDegree=8),
            "tensorParallelDegree is 8, but the model has 14 attention heads, which it does not divide: set it to 1 or",
        ),
        (
            spec(SMALL, tensorParallelDegree=2, contextParallelDegree=2),
            "contextParallelDegree is 2, which does not divide the 7 attention heads of a process of "
            "tensorParallelDegree: 2: set it to 1",
        ),
        (spec("microsoft/phi-4", tensorParallelDegree=2), "no rules for the weights"),
    ],
)
def test_a_model_that_cannot_be_spread_so_is_refused_before_any_pod_is_made(asked: SFTJobSpec, words: str) -> None:
    assert words in verdict(asked).refused


def test_matrices_over_several_nodes_are_a_surprise() -> None:
    over = spec(nodes=2, tensorParallelDegree=16)

    assert "a node has 8 processes" in across_nodes_warning(over)
    assert across_nodes_warning(over) in surprises(over, None)
    assert across_nodes_warning(spec(nodes=2, tensorParallelDegree=8)) == ""

    tokens = across_nodes_warning(spec(nodes=2, tensorParallelDegree=4, contextParallelDegree=4))
    assert "tensorParallelDegree x contextParallelDegree is 16, and a node has 8 processes: queries, keys" in tokens
    assert across_nodes_warning(spec(nodes=2, tensorParallelDegree=2, contextParallelDegree=4)) == ""
    assert across_nodes_warning(job().spec) == ""
