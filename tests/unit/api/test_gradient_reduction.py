"""How often gradients are summed over processes, where a manifest leaves it open: by memory, alike everywhere."""

from typing import Any

import pytest

from sft_api.gradient_reduction import reduces_once
from sft_api.known_models import known_shape
from sft_api.memory_plan import judge
from sft_api.plan import make_plan
from sft_api.v1alpha1.job import SFTJobSpec
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
    assert chosen(spec(LARGE, lora={"dropout": 0.1})) == "oncePerStep"
    # But not where a GPU is full without them
    assert chosen(spec(LARGE, 1, memory="16Gi", lora={})) == "everyMicroBatch"
    assert chosen(spec(LARGE, 2, memory="16Gi", lora={})) == "everyMicroBatch"


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
    assert plan.reduce_gradients == "everyMicroBatch"
    assert not reduces_once(spec(), make_plan(spec()), None, None)


def test_what_it_takes_is_counted_and_is_a_remedy() -> None:
    # Given a run that fits but for the gradients of the whole model
    asked = spec(LARGE, strategy=ONCE)

    once, often = make_plan(asked), make_plan(spec(LARGE))
    assert once.memory is not None
    assert often.memory is not None
    assert (once.memory.gradients, often.memory.gradients) == ("29.9Gi", "3.7Gi")
    fit = judge(asked, once)
    assert f"strategy.fsdp.reduceGradients: everyMicroBatch ({often.memory.total})" in fit.warning + fit.refused
    # With one micro-batch a step there is nothing to keep
    alone = make_plan(spec(LARGE, strategy=ONCE, training={"globalBatchTokens": 8 * 4096})).memory
    assert alone is not None
    assert alone.gradients == "3.7Gi"
