"""Whether layers stay gathered, and how often gradients are summed, where a manifest leaves it open: by memory."""

from itertools import groupby
from typing import Any
from unittest.mock import ANY

import pytest

from sft_api.known_models import known_shape
from sft_api.memory import reshards
from sft_api.memory_plan import judge
from sft_api.plan import make_plan
from sft_api.traffic import with_traffic
from sft_api.v1alpha1.job import SFTJobSpec
from sft_api.v1alpha1.status import PlanStatus
from tests.unit.cli.jobs import job

ONCE = {"fsdp": {"reduceGradients": "oncePerStep"}}
SMALL, LARGE = "hf://meta-llama/Llama-3.2-1B", "hf://meta-llama/Llama-3.1-8B"


def spec(model: str = SMALL, gpus: int = 8, *, memory: str | None = "80Gi", **parts: Any) -> SFTJobSpec:
    """A million tokens a step, in micro-batches of 4096; layers are not compiled."""
    compute = {"gpusPerNode": gpus, **({"gpuMemory": memory} if memory else {})}
    training = {"globalBatchTokens": 2**20, "compile": False, **parts.pop("training", {})}
    return job(model={"uri": model}, compute=compute, training=training, **parts).spec


def chosen(asked: SFTJobSpec) -> str:
    return make_plan(asked).reduce_gradients


def test_once_a_step_where_whole_gradients_fit_beside_as_many_micro_batches() -> None:
    assert chosen(spec()) == "oncePerStep"
    # 8B: 28 GiB of gradients beside the activations of one more micro-batch, and beside next to none
    assert chosen(spec(LARGE)) == "everyMicroBatch"
    assert chosen(spec(LARGE, training={"activationCheckpointing": "full"})) == "oncePerStep"
    assert chosen(spec(LARGE, 2, training={"activationCheckpointing": "full"})) == "everyMicroBatch"


@pytest.mark.parametrize(
    "asked",
    [
        spec(memory=None),
        spec("hf://someone/own"),
        spec(gpus=1),
        spec(strategy={"megatron": {}}),
        spec(strategy={"fsdp": {"shardDegree": 1}}),
        # All of a step goes through one forward pass
        spec(training={"globalBatchTokens": 8 * 4 * 4096}),
        spec(training={"globalBatchTokens": 8 * 4096}, lora={}),
        spec(strategy={"fsdp": {"reduceDtype": "bf16"}}),
        spec(strategy={"fsdp": {"cpuOffload": True}}, lora={}),
    ],
    ids=[
        "GPU unknown",
        "model unknown",
        "alone",
        "Megatron",
        "replicas",
        "one pass",
        "one micro-batch",
        "in bf16",
        "offloaded",
    ],
)
def test_after_each_micro_batch_where_it_saves_nothing_or_nobody_knows(asked: SFTJobSpec) -> None:
    assert chosen(asked) == "everyMicroBatch"


def test_small_adapters_have_room_whatever_is_known_and_large_ones_do_not() -> None:
    large = "hf://Qwen/Qwen2.5-32B"
    assert chosen(spec(large, memory=None, lora={"rank": 16})) == "oncePerStep"
    assert chosen(spec(large, memory=None, lora={"rank": 512})) == "everyMicroBatch"
    assert chosen(spec(SMALL, memory=None, lora={"rank": 512})) == "everyMicroBatch"
    assert chosen(spec(SMALL, memory=None, lora={"rank": 64})) == "oncePerStep"
    # Of a model that is not known the rank is
    for memory in (None, "80Gi"):
        assert chosen(spec("hf://someone/own", memory=memory, lora={})) == "oncePerStep"
        assert chosen(spec("hf://someone/own", memory=memory, lora={"rank": 33})) == "everyMicroBatch"
        # And who knows how many experts there are
        experts = {"rank": 1, "targetModules": ["experts"]}
        assert chosen(spec("hf://someone/own", memory=memory, lora=experts)) == "everyMicroBatch"
    mixture, of_experts = "hf://Qwen/Qwen3-30B-A3B", {"targetModules": ["all-linear", "experts"]}
    assert chosen(spec(mixture, memory=None, lora={"rank": 16})) == "oncePerStep"
    assert chosen(spec(mixture, memory=None, lora={"rank": 16, **of_experts})) == "everyMicroBatch"
    assert chosen(spec(mixture, memory=None, lora={"rank": 16, "expertRank": 1, **of_experts})) == "oncePerStep"
    assert chosen(spec(LARGE, lora={"dropout": 0.1})) == "oncePerStep"
    # But not where a GPU is full without them
    assert chosen(spec(LARGE, 1, memory="16Gi", lora={})) == "everyMicroBatch"
    assert chosen(spec(LARGE, 2, memory="16Gi", lora={})) == "everyMicroBatch"


KEPT, FREED = {"reshardAfterForward": False}, {"reshardAfterForward": True}
FULL = {"training": {"activationCheckpointing": "full"}}


def kept(asked: SFTJobSpec) -> bool:
    return not make_plan(asked).reshard_after_forward


def test_layers_stay_gathered_where_as_many_micro_batches_go_at_once_with_them() -> None:
    # Given models of which weights, in bf16, are small beside a GPU, and not
    assert kept(spec())
    assert kept(spec(LARGE))
    assert not kept(spec("hf://Qwen/Qwen2.5-32B", 16, **FULL))
    # One process copies too what it computes with, and gathers nothing it holds so
    assert kept(spec(gpus=1))
    assert kept(spec(strategy={"fsdp": {"shardDegree": 1}}))
    assert kept(spec(LARGE, 1, lora={}))
    # One forward pass for all of a step saves as much
    assert kept(spec(training={"globalBatchTokens": 8 * 4096}))


@pytest.mark.parametrize(
    "asked",
    [
        spec(memory=None),
        spec("hf://someone/own"),
        spec("hf://someone/own", lora={}),
        spec(strategy={"megatron": {}}),
        spec(strategy={"fsdp": {"cpuOffload": True}}),
        spec(LARGE, 1),
        spec(strategy={"fsdp": FREED}),
    ],
    ids=["GPU unknown", "model unknown", "small adapters", "Megatron", "offloaded", "full", "asked for"],
)
def test_layers_are_gathered_again_where_it_saves_nothing_or_nobody_knows(asked: SFTJobSpec) -> None:
    assert not kept(asked)


def test_a_run_without_gpus_or_copies_keeps_nothing() -> None:
    cpu = job(model={"uri": SMALL}, compute={"gpusPerNode": 0, "processesPerNode": 2, "gpuMemory": "80Gi"}).spec
    alone = spec(gpus=1, training={"precision": "fp32"})
    assert (kept(cpu), kept(alone)) == (False, False)


def test_what_is_asked_for_of_layers_is_done_and_a_plan_that_says_nothing_means_what_it_meant() -> None:
    for asked, freed in ((KEPT, False), (FREED, True)):
        unknown = spec("hf://someone/own", memory=None, strategy={"fsdp": asked})
        assert kept(unknown) == (not freed)
        # A plan of before has no such field, and its manifest says it
        before = PlanStatus.model_validate(make_plan(unknown).model_dump(exclude={"reshard_after_forward"}))
        assert reshards(unknown, before) == freed
    left_out = spec()
    before = PlanStatus.model_validate(make_plan(left_out).model_dump(exclude={"reshard_after_forward"}))
    assert reshards(left_out, before)
    assert not reshards(left_out, make_plan(left_out))


def test_room_for_more_micro_batches_than_a_step_has_is_room_for_gathered_layers() -> None:
    # Given a step of two micro-batches, and a GPU with room for three of them, or for two beside gathered layers
    model, sizes = "hf://Qwen/Qwen3-8B", {n: {"globalBatchTokens": n * 8 * 4096, "compile": True} for n in (2, 3)}
    assert kept(spec(model, lora={"rank": 8}, training=sizes[2]))
    # But not where the step has three
    assert not kept(spec(model, lora={"rank": 8}, training=sizes[3]))


def both(asked: SFTJobSpec) -> tuple[bool, bool]:
    plan = make_plan(asked)
    return not plan.reshard_after_forward, plan.reduce_gradients == "oncePerStep"


def test_of_the_two_the_one_goes_first_that_saves_more() -> None:
    # Given room for both, or for what 8B keep gathered (13 GiB) and not for its gradients (26 GiB more)
    assert both(spec()) == (True, True)
    assert both(spec(LARGE)) == (True, False)
    # Then of many passes the sums of all but the last are worth more than to gather once less in each
    sizes = [f"{size}Gi" for size in range(20, 90)]
    ways = [both(spec(LARGE, 8, memory=size, **FULL)) for size in sizes]
    assert [way for way, _ in groupby(ways)] == [(False, False), (True, False), (False, True), (True, True)]
    # Gradients of adapters are little beside the base, which is gathered: that goes first as soon as there is room
    ways = [both(spec(LARGE, 8, memory=size, lora={"rank": 64, "dropout": 0.1})) for size in sizes]
    assert [way for way, _ in groupby(ways)] == [(False, False), (False, True), (True, False), (True, True)]


def test_what_is_given_of_the_one_leaves_the_other_to_the_plan() -> None:
    assert both(spec(strategy={"fsdp": KEPT})) == (True, True)
    assert both(spec(LARGE, strategy={"fsdp": KEPT})) == (True, False)
    assert both(spec(LARGE, strategy={"fsdp": {**FREED, **ONCE["fsdp"]}})) == (False, True)
    assert both(spec(LARGE, strategy=ONCE)) == (False, True)


def test_layers_that_stay_gathered_are_counted_and_are_a_remedy() -> None:
    crowded = {"training": {"maxTokensPerMicroBatch": 10240}}
    asked, freed = (spec(LARGE, strategy={"fsdp": fsdp}, **crowded) for fsdp in (KEPT, FREED))
    then = make_plan(freed).memory
    assert then is not None
    fit = judge(asked, make_plan(asked))
    assert f"strategy.fsdp.reshardAfterForward: true ({then.total})" in fit.warning + fit.refused


def test_a_strategy_that_says_nothing_is_as_none() -> None:
    assert chosen(spec(strategy={})) == chosen(spec())
    assert chosen(spec("hf://someone/own", lora={}, strategy={})) == "oncePerStep"


def test_what_is_asked_for_is_done() -> None:
    unknown = spec("hf://someone/own", memory=None, strategy=ONCE)
    often = spec(strategy={"fsdp": {"reduceGradients": "everyMicroBatch"}})
    assert (chosen(unknown), chosen(often)) == ("oncePerStep", "everyMicroBatch")


def test_it_follows_from_the_plan_alone() -> None:
    # What one machine knows of a model decides nothing: another one may not
    plan = make_plan(spec("file:///models/own"), shape=known_shape(SMALL))
    assert (plan.reduce_gradients, plan.reshard_after_forward) == ("everyMicroBatch", True)
    assert with_traffic(spec(), make_plan(spec()), None, None) == plan.model_copy(update={"memory": ANY})


def test_what_it_takes_is_counted_and_is_a_remedy() -> None:
    # Given a run that fits but for the gradients of the whole model
    asked = spec(LARGE, strategy=ONCE)

    freed = {"reshardAfterForward": True}
    once, often = make_plan(asked), make_plan(spec(LARGE, strategy={"fsdp": freed}))
    assert once.memory is not None
    assert often.memory is not None
    assert (once.memory.gradients, often.memory.gradients) == ("29.9Gi", "3.7Gi")
    fit = judge(asked, once)
    assert f"strategy.fsdp.reduceGradients: everyMicroBatch ({often.memory.total})" in fit.warning + fit.refused
    # With one micro-batch a step there is nothing to keep
    alone = make_plan(spec(LARGE, strategy=ONCE, training={"globalBatchTokens": 8 * 4096})).memory
    assert alone is not None
    assert alone.gradients == "3.7Gi"
