"""What a checkpoint records besides tensors, and which of it a resume compares."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from sft_api.checkpoints import Manifest, RunState
from sft_trainer import state
from sft_trainer.models import flash_attention
from sft_trainer.models.flash_attention import Kind
from sft_trainer.prepared import Prepared
from sft_trainer.state import Facts, changed_companions, changed_fields
from sft_trainer.topology import ALONE, Topology
from tests.parity.runs import manifest, resolve

CHUNKS = {"pipelineParallelDegree": 2, "virtualPipelineParallelDegree": 2}
UNEVEN = {"pipelineParallelDegree": 2, "transformerConfigOverrides": {"num_layers_in_last_pipeline_stage": 3}}


def environment(folder: Path, topology: Topology = ALONE, **sections: Any) -> dict[str, str | int]:
    prepared = SimpleNamespace(train=(), model=SimpleNamespace(digest=""), companions={}, eval={})
    config = resolve(manifest(folder, folder / "store", **sections))
    return Facts.of(config, cast(Prepared, prepared), torch.device("cpu"), topology).environment


def warned(before: dict[str, str | int], now: dict[str, str | int], **plan: int) -> list[str]:
    run = RunState.model_validate({"environment": before, "plan": plan})
    manifest = cast(Manifest, SimpleNamespace(run=run, step=1))
    return state.resume_warnings(manifest, Facts(now, {}, "", {}, {}), "file:///model")


def test_other_evaluation_data_is_said_with_what_changed() -> None:
    before = cast(Manifest, SimpleNamespace(run=RunState(eval_data={"a": "1", "b": "2"}), step=100))

    def told(now: dict[str, str]) -> list[str]:
        return state.resume_warnings(before, Facts({}, {}, "", {}, now), "file:///model")

    assert [text for text in told({"a": "1", "b": "3"}) if "evaluation" in text] == [
        "the evaluation data is not what it was at step 100: digests of data.eval.b: '2' -> '3'; losses of before are "
        "compared with none of now: early stopping and the best checkpoint begin anew"
    ]
    assert told({"b": "1", "a": "2"}) == told({"a": "1", "b": "2"}) == []


def test_what_was_usual_before_is_said(tmp_path: Path) -> None:
    here = environment(tmp_path)
    shared = {**here, "sequenceParallelDegree": 2}

    assert warned(here, shared) == [
        "resumed in another environment (sequenceParallelDegree: 1 -> 2): not equal to the last bit"
    ]
    assert "(sequenceParallelDegree: 2 -> 1)" in warned(shared, here)[0]
    assert "(compiled: 'yes' -> 'no')" in warned({**here, "compiled": "yes"}, here)[0]
    assert warned(here, here) == []


def test_another_version_of_transformers_is_said_where_it_is_known(tmp_path: Path) -> None:
    """A retry after an upgrade runs in the image of now."""
    here = environment(tmp_path)
    before = {name: value for name, value in here.items() if name != "transformers"}

    assert f"(transformers: '5.0' -> '{here['transformers']}')" in warned({**before, "transformers": "5.0"}, here)[0]
    assert warned(before, here) == []


@pytest.mark.parametrize(
    ("sections", "change"),
    [
        ({"training": {"compile": True}}, "compiled: None -> 'yes'"),
        (
            {"training": {"compile": True, "activationCheckpointing": "selective"}},
            "compiled: None -> 'yes, selective activation checkpointing'",
        ),
        ({"strategy": {"fsdp": {"cpuOffload": True}}}, "cpuOffload: None -> 'yes'"),
        ({"strategy": {"megatron": {}}}, "strategy: None -> 'megatron TP1 PP1 EP1'"),
        (
            {
                "strategy": {"megatron": {"contextParallelDegree": 2}},
                "compute": {"gpusPerNode": 0, "processesPerNode": 2},
            },
            "strategy: None -> 'megatron TP1 PP1 EP1 CP2'",
        ),
        ({"strategy": {"megatron": CHUNKS}, "processes": 2}, "strategy: None -> 'megatron TP1 PP2 EP1 VPP2'"),
        ({"strategy": {"megatron": UNEVEN}, "processes": 2}, "strategy: None -> 'megatron TP1 PP2 EP1 last3'"),
    ],
)
def test_a_resume_that_computes_in_another_way_says_that_its_last_bits_differ(
    tmp_path: Path, sections: dict[str, Any], change: str
) -> None:
    assert changed_fields(environment(tmp_path), environment(tmp_path, **sections)) == [change]


def test_what_is_computed_again_is_said_where_it_is_compiled(tmp_path: Path) -> None:
    ways = [{"activationCheckpointing": how} for how in ("none", "full")]
    plain, again = (environment(tmp_path, training=way) for way in ways)
    assert warned(plain, again) == []

    plain, again = (environment(tmp_path, training={"compile": True, **way}) for way in ways)
    assert warned(plain, again) == [
        "resumed in another environment (compiled: 'yes' -> 'yes, full activation checkpointing'): not equal to the "
        "last bit"
    ]


def test_other_kernels_of_attention_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a checkpoint of before there were any, or of a start for which they were wrong
    monkeypatch.setattr(flash_attention, "_USED", {})
    monkeypatch.setattr(state, "version", lambda name: "4.0")
    before = environment(tmp_path)

    flash_attention.use([Kind(2, 128, 128, windowed=False, cap=None, sinks=False)])
    now = environment(tmp_path)
    assert warned(before, now) == [
        "resumed in another environment (attention: \"PyTorch's\" -> 'FlashAttention 4.0: heads of 128, 2 for each of "
        "keys'): not equal to the last bit"
    ]
    assert warned(now, now) == []


def test_sums_in_another_order_are_said_where_several_processes_make_them(tmp_path: Path) -> None:
    two = Topology(rank=0, local_rank=0, world_size=2, shard=2)
    once = {"strategy": {"fsdp": {"reduceGradients": "oncePerStep"}}}

    assert changed_fields(environment(tmp_path, two), environment(tmp_path, two, **once)) == [
        "reduceGradients: None -> 'oncePerStep'"
    ]
    assert environment(tmp_path) == environment(tmp_path, **once)
    before = {**environment(tmp_path, two, **once)}
    assert "(reduceGradients: 'oncePerStep' -> 'everyMicroBatch')" in warned(before, environment(tmp_path, two))[0]


def test_replicas_that_add_up_their_gradients_apart_are_said(tmp_path: Path) -> None:
    four = {"rank": 0, "local_rank": 0, "world_size": 4}
    whole, halves = (Topology(**four, shard=4), Topology(**four, shard=2, replicate=2))

    assert changed_fields(environment(tmp_path, whole), environment(tmp_path, halves)) == ["replicas: None -> 2"]
    # An earlier version told of them in its plan alone
    before, now = environment(tmp_path, whole), environment(tmp_path, halves)
    assert warned(before, now, processes=4, shardDegree=2) == []
    assert "(replicas: 1 -> 2)" in warned(before, now, processes=4, shardDegree=4)[0]


def test_a_run_that_an_earlier_version_began_is_told_that_its_bins_were_dealt_out_otherwise(tmp_path: Path) -> None:
    # Given what that version said of two processes
    here = environment(tmp_path, Topology(rank=0, local_rank=0, world_size=2, shard=2))
    before = {name: value for name, value in here.items() if name != "bins"}

    # Then it differs, and that of one process, which has all bins, does not
    assert warned(before, here) == [
        "resumed in another environment (bins: 'dealt in order' -> 'dealt by cost'): not equal to the last bit"
    ]
    assert "bins" not in environment(tmp_path)


def test_a_template_of_a_processor_that_an_earlier_version_told_nothing_of_is_no_change() -> None:
    before, now = {"config.json": "1"}, {"config.json": "1", "chat_template.json": "2"}
    assert changed_companions(before, now) == []
    assert changed_companions(now, now | {"chat_template.json": "3"}) == ["chat_template.json: '2' -> '3'"]
    assert changed_companions(before, {"tokenizer.json": "4"}) == [
        "config.json: '1' -> None",
        "tokenizer.json: None -> '4'",
    ]
