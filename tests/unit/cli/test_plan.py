"""What `sft plan` says about where numbers come from."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from sft_api.known_models import known_shape
from sft_api.plan import make_plan
from sft_cli.decisions import Decision, Origin
from sft_cli.errors import UserError
from sft_cli.explain import explain
from sft_cli.manifest import load_manifest
from sft_cli.plan import show_plan
from sft_cli.suggest import show_suggestions
from sft_cli.trained import Trained, measure_trained
from sft_cli.validate import verdict_on
from tests.peft_folders import adapters_in

from .jobs import job, manifest


def decisions(**spec: Any) -> dict[str, Decision]:
    asked = job(**spec).spec
    return {decision.subject: decision for decision in explain(asked, make_plan(asked), measure_trained(asked))}


def test_what_the_manifest_leaves_open_is_default_or_computed() -> None:
    shown = decisions(compute={"nodes": 2})

    assert (shown["processes"].value, shown["processes"].origin) == ("2 on GPU", Origin.GIVEN)
    assert shown["copies of the model"].value == "1, each over 2 processes"
    assert (shown["length"].value, shown["length"].origin) == ("1 epoch", Origin.DEFAULT)
    assert (shown["tokens a step"].value, shown["tokens a step"].origin) == ("65,536", Origin.COMPUTED)
    assert shown["tokens a micro-batch"].value == "4,096"
    assert shown["gradient accumulation"].value == "8"
    assert (shown["learning rate"].value, shown["learning rate"].origin) == ("1e-05", Origin.DEFAULT)
    assert shown["schedule"].value == "cosine, warm-up 3% of the steps"
    assert (shown["precision"].value, shown["precision"].origin) == ("bf16", Origin.COMPUTED)
    assert shown["checkpoints"].value == "every 10m0s; kept: the last 2"
    assert not {"evaluation", "launcher"} & shown.keys()


def test_ray_is_shown_where_it_is_asked_for() -> None:
    shown = decisions(compute={"launcher": "ray"})["launcher"]

    assert (shown.value, shown.origin) == ("Ray, in the job's own pods", Origin.GIVEN)


def test_what_the_manifest_gives_is_marked_so() -> None:
    shown = decisions(
        data={
            "train": [{"uri": "hf://org/data"}],
            "eval": [{"uri": "hf://org/data", "name": "held"}],
            "packing": "none",
        },
        training={
            "steps": 1200,
            "globalBatchSize": 8,
            "microBatchSize": 2,
            "precision": "bf16",
            "optimizer": {"learningRate": 1e-5},
            "schedule": {"type": "linear", "warmupSteps": 10},
            "evaluation": {"everySteps": 100, "beforeTraining": True},
        },
        checkpoint={"uri": "file:///c", "everySteps": 50, "keep": {"best": 1, "everySteps": 500}},
        export={"atEnd": False},
    )

    computed = {subject for subject, decision in shown.items() if decision.origin is not Origin.GIVEN}
    assert computed == {"copies of the model", "gradient accumulation", "seed"}
    assert shown["length"].value == "1,200 steps"
    assert shown["gradient accumulation"].value == "4"
    assert shown["schedule"].value == "linear, warm-up 10 steps"
    assert shown["evaluation"].value == "before, every 100 steps and at the end"
    kept = "the last 2, the best 1, those of every 500 steps"
    assert shown["checkpoints"].value == f"every 10m0s or 50 steps; kept: {kept}"
    assert shown["export"].value == "none"


def test_intervals_in_passes_are_shown() -> None:
    data = {"train": [{"uri": "hf://org/data"}], "eval": [{"uri": "hf://org/data", "name": "held"}]}

    shown = decisions(data=data, training={"evaluation": {"everyEpochs": 0.25}}, checkpoint={"everyEpochs": 1})

    assert shown["evaluation"].value == "every 0.25 epochs and at the end"
    assert shown["evaluation"].origin is shown["checkpoints"].origin is Origin.GIVEN
    assert shown["checkpoints"].value == "every 10m0s or epoch; kept: the last 2"


def test_what_is_evaluated_on_is_told() -> None:
    one = {"uri": "hf://org/data", "name": "one"}
    for eval_, told in (([], ""), ([one], "1 set of data.eval and ")):
        data = {"train": [{"uri": "hf://org/data"}], "eval": eval_, "heldOut": {"fraction": 0.05}}
        assert decisions(data=data)["evaluation"].why == f"{told}0.05 of the rows of data.train (data.heldOut)"


def test_a_batch_that_was_rounded_says_from_what() -> None:
    shown = decisions(training={"globalBatchTokens": 10_000})

    assert shown["tokens a step"].value == "8,192"
    assert "10,000, rounded down" in shown["tokens a step"].why


@pytest.mark.parametrize(
    ("schedule", "shown"),
    [
        ({}, "decay in the last 10% of the steps"),
        ({"decayRatio": 0.2}, "decay in the last 20% of the steps"),
        ({"decayRatio": 0.005}, "decay in the last 0.5% of the steps"),
        ({"decaySteps": 50}, "decay in the last 50 steps"),
    ],
)
def test_a_stable_schedule_says_when_it_decays(schedule: dict[str, Any], shown: str) -> None:
    training = {"schedule": {"type": "warmupStableDecay", **schedule}}
    assert decisions(training=training)["schedule"].value == f"warmupStableDecay, warm-up 3% of the steps, {shown}"


def test_accumulation_that_varies_says_so() -> None:
    assert decisions(training={"globalBatchSize": 8})["gradient accumulation"].value == "varies"


def test_adapters_are_shown_with_what_is_trained_of_a_model_on_this_machine(tmp_path: Path) -> None:
    # Given the headers of a model's files
    shapes = {
        "model.embed_tokens.weight": [100, 8],
        "model.layers.0.input_layernorm.weight": [8],
        "model.layers.0.self_attn.q_proj.weight": [8, 8],
        "model.layers.0.self_attn.q_proj.bias": [8],
        "model.layers.0.mlp.up_proj.weight": [24, 8],
        "lm_head.weight": [100, 8],
    }
    header = json.dumps({"__metadata__": {}, **{name: {"shape": shape} for name, shape in shapes.items()}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    model = {"uri": f"file://{tmp_path}"}

    shown = decisions(model=model, lora={"rank": 2, "dropout": 0.1})

    held = 2 * 800 + 8 + 64 + 8 + 192
    trained = 2 * (8 + 8) + 2 * (24 + 8)
    assert shown["trained parameters"].value == f"{trained} of {trained + held:,} ({trained / (trained + held):.2%})"
    assert shown["trained parameters"].why == "2 layers with adapters, by the files of model.uri"
    assert (shown["adapters"].value, shown["adapters"].origin) == ("rank 2, alpha 2, dropout 0.1", Origin.GIVEN)
    assert shown["adapters on"].value == "all-linear"
    assert (shown["frozen weights in"].value, shown["frozen weights in"].origin) == ("fp32", Origin.COMPUTED)
    assert shown["learning rate"].value == "0.0001"
    assert shown["exported"].value == "the adapters, for peft"
    packed = decisions(model=model, lora={"rank": 2, "basePrecision": "nf4"})["frozen weights in"]
    assert (packed.value, packed.origin) == ("nf4 (experts, linear layers but the head; others in fp32)", Origin.GIVEN)
    published = decisions(model=model, lora={"rank": 2, "basePrecision": "mxfp4"})["frozen weights in"]
    assert published.value == "mxfp4 (experts; others in fp32)"
    only = decisions(model=model, lora={"rank": 2, "targetModules": ["up_proj"]}, export={"mergeAdapter": True})
    assert only["trained parameters"].value.startswith("64 of ")
    assert only["exported"].value == "the model with its adapters merged"


def test_where_the_export_is_uploaded_to() -> None:
    assert "uploaded to" not in decisions()
    hub = decisions(export={"hub": {"repository": "org/mine"}})["uploaded to"]
    assert (hub.value, hub.origin) == ("org/mine, branch main", Origin.GIVEN)


def test_adapters_to_begin_with_are_looked_at_where_they_are_on_this_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = [f"model.layers.{block}.self_attn.q_proj" for block in range(36)]
    uri = f"file://{adapters_in(tmp_path / 'adapters', *layers)}"

    def told(uri: str, **lora: Any) -> str:
        show_plan(job(model={"uri": "hf://Qwen/Qwen3-8B"}, lora={"adapterUri": uri, **lora}), "text")
        told = capsys.readouterr()
        assert uri in told.out
        return told.err

    # The model's layers are known without its files
    advice = "write lora: {rank: 8, alpha: 16, targetModules: [q_proj], adapterUri: …}"
    assert advice in told(uri, rank=8, alpha=16)
    own = {"rank": 8, "alpha": 16, "targetModules": ["q_proj"]}
    assert "Warning: lora.adapterUri: the adapters were trained beside 'org/model'" in told(uri, **own)
    assert f"lora.adapterUri: there is no {tmp_path}/absent on this machine" in told(f"file://{tmp_path}/absent", **own)
    (tmp_path / "adapters" / "adapter_config.json").write_text("{")
    assert "adapter_config.json cannot be read" in told(uri, **own)
    # In the hub's cache too, and of what is not there nothing is said
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert "lora.adapterUri" not in told("hf://org/adapters@abc", **own)
    snapshot = adapters_in(tmp_path / "hub" / "models--org--adapters" / "snapshots" / "abc", *layers)
    weights = (snapshot / "adapter_model.safetensors").rename(tmp_path / "aside")
    assert "lora.adapterUri" not in told("hf://org/adapters@abc", rank=16)
    weights.rename(snapshot / "adapter_model.safetensors")
    assert advice in told("hf://org/adapters@abc", rank=16)


def test_what_is_trained_of_a_model_whose_shape_is_known_is_told_without_its_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Of a name in the table: the figure that docs/lora.md has from a copy of the model
    show_plan(job(model={"uri": "hf://Qwen/Qwen3-8B"}, lora={}), "text")
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "trained parameters" in line]
    assert "87,293,952 of 8,278,029,312 (1.05%)" in row
    assert row.endswith("252 layers with adapters, by the sizes that memory is counted by")
    # And of a mixture, of whose experts there are as many adapters
    lora = {"targetModules": ["all-linear", "experts"], "expertRank": 2, "learningRateRatio": 16}
    show_plan(job(model={"uri": "hf://Qwen/Qwen3-30B-A3B"}, lora=lora), "text")
    rows = capsys.readouterr().out.splitlines()
    (row,) = [line for line in rows if "trained parameters" in line]
    added = 48 * (32 * (6144 + 2 * 2560 + 6144) + 2 * 128 * (2048 + 1536 + 768 + 2048))
    assert f" {added:,} of " in row
    assert row.endswith("192 layers and the experts of 48 layers with adapters, by the sizes that memory is counted by")
    (row,) = [line for line in rows if line.split()[0] == "adapters" and "rank" in line]
    assert "rank 32, of experts 2, alpha 32 " in row
    assert any("0.0001, of B 0.0016 (lora.learningRateRatio)" in line for line in rows)
    assert row.endswith("lora.rank, .expertRank, .alpha, .dropout")
    lora = {"targetModules": ["layers.0.mlp.experts"]}
    show_plan(job(model={"uri": "hf://Qwen/Qwen3-30B-A3B"}, lora=lora), "text")
    assert "the experts of 1 layer with adapters" in capsys.readouterr().out
    # Of some of the layers of a folder that has only its config.json
    sizes = {"hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 1, "intermediate_size": 24}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 8, **sizes}))
    some = {"rank": 2, "targetModules": ["q_proj", "layers.1.mlp.up_proj"]}
    show_plan(job(model={"uri": f"file://{tmp_path}"}, lora=some), "text")
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "trained parameters" in line]
    assert f" {3 * 2 * (8 + 8) + 2 * (24 + 8)} of " in row
    assert "4 layers with adapters" in row
    # Of names that the layers do not have it is not known, for the reason that is given with them
    show_plan(job(model={"uri": "hf://Qwen/Qwen3-8B"}, lora={"targetModules": ["query"]}), "text")
    told = capsys.readouterr()
    assert "lora.targetModules names 'query', and no linear layer of the model is called so" in told.err
    (row,) = [line for line in told.out.splitlines() if "trained parameters" in line]
    assert row.split() == ["trained", "parameters", "unknown", "computed", "as", "said", "above"]


def test_names_of_layers_that_a_model_on_this_machine_lacks_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    header = json.dumps({"model.layers.0.self_attn.q_proj.weight": {"shape": [8, 8]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)

    asked = manifest(model={"uri": f"file://{tmp_path}"}, lora={"targetModules": ["query"]})
    (tmp_path / "job.yaml").write_text(json.dumps(asked))
    show_plan(load_manifest(tmp_path / "job.yaml"), "text")
    (warning,) = verdict_on(tmp_path / "job.yaml").warnings

    assert "lora.targetModules names 'query'" in warning
    told = capsys.readouterr()
    assert "lora.targetModules names 'query', and no linear layer of the model is called so" in told.err + told.out
    assert "trained parameters" in told.out
    # With a config beside the file the name is refused: once, by all the names there are
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 8, **sizes}))
    refused = verdict_on(tmp_path / "job.yaml")
    assert len(refused.problems) == 1
    assert "its linear layers are q_proj, k_proj" in refused.problems[0]
    assert not any("query" in text for text in refused.warnings)
    # Refused for something else it is warned of
    shared = {"compute": {"gpusPerNode": 2}, "strategy": {"fsdp": {"sequenceParallelDegree": 2}}}
    asked = manifest(model={"uri": f"file://{tmp_path}"}, lora={"targetModules": ["query"]}, **shared)
    (tmp_path / "job.yaml").write_text(json.dumps(asked))
    refused = verdict_on(tmp_path / "job.yaml")
    assert "sequenceParallelDegree" in refused.problems[0]
    assert any("lora.targetModules names 'query'" in text for text in refused.warnings)
    capsys.readouterr()
    show_plan(load_manifest(tmp_path / "job.yaml"), "text")
    told = capsys.readouterr()
    assert "Warning: lora.targetModules names 'query'" in told.err + told.out
    (tmp_path / "config.json").unlink()
    # The head is a linear layer, also where it is tied and in no file: to except it says nothing wrong
    tied = job(model={"uri": f"file://{tmp_path}"}, lora={"excludeModules": ["lm_head"]})
    show_plan(tied, "text")
    told = capsys.readouterr()
    assert "Warning: lora" not in told.err + told.out
    assert "1 layer with adapters" in told.out


DEEP = b"[" * 100_000 + b"]" * 100_000
"""JSON into which Python can read no further."""


@pytest.mark.parametrize(
    "content",
    [
        None,
        b"",
        b"\xff" * 40,
        b"\x02\0\0\0\0\0\0\0[]",
        b"\x02\0\0\0\0\0\0\0{}",
        pytest.param(len(DEEP).to_bytes(8, "little") + DEEP, id="deep"),
    ],
)
def test_what_is_trained_is_unknown_where_the_model_cannot_be_read(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "model.safetensors").write_bytes(content)
    for uri in ("hf://org/model", f"file://{tmp_path}"):
        unknown = decisions(model={"uri": uri}, lora={})["trained parameters"]
        assert unknown.value == "unknown"
        assert "known here of a folder (file://), of a model of the table in docs/memory.md, and" in unknown.why
    assert "adapters" not in decisions(model={"uri": f"file://{tmp_path}"})


def test_what_takes_less_memory_is_said_where_it_was_chosen() -> None:
    def chosen(**spec: Any) -> set[str]:
        return decisions(**spec).keys() & {"activations", "weights", "moments", "sums of gradients"}

    assert chosen() == set()
    assert chosen(training={"activationCheckpointing": "selective"}) == {"activations"}
    assert chosen(training={"precision": "bf16", "parameterDtype": "bf16"}) == {"weights"}
    assert chosen(training={"optimizer": {"stateDtype": "bf16"}}, strategy={"fsdp": {"reduceDtype": "bf16"}}) == {
        "moments",
        "sums of gradients",
    }


def test_what_else_than_cross_entropy_is_trained_is_said_where_it_was_chosen() -> None:
    def chosen(**training: Any) -> dict[str, str]:
        found = decisions(training=training)
        return {name: found[name].value for name in ("loss", "label smoothing", "noise on embeddings") if name in found}

    assert chosen() == chosen(loss="crossEntropy", labelSmoothing=0, neftuneNoiseAlpha=0) == {}
    assert chosen(loss="dft", neftuneNoiseAlpha=5) == {
        "loss": "dft: cross-entropy times probability",
        "noise on embeddings": "alpha 5",
    }
    assert chosen(labelSmoothing=0.1) == {"label smoothing": "0.1"}


def test_muon_is_said_where_it_was_chosen() -> None:
    def shown(**optimizer: Any) -> Any:
        return decisions(training={"optimizer": optimizer}).get("optimizer")

    assert shown() is None
    assert shown(type="adamw") is None
    assert shown(type="muon").value == "Muon with momentum 0.95 for matrices of layers, AdamW for all else"
    assert "momentum 0.9 for" in shown(type="muon", momentum=0.9).value


def test_powers_and_cycles_of_schedules_are_shown() -> None:
    def shown(**schedule: Any) -> str:
        return str(decisions(training={"schedule": schedule})["schedule"].value)

    warm = "warm-up 3% of the steps"
    assert shown(type="polynomial", power=2.5) == f"polynomial, {warm}, to the power of 2.5"
    assert shown(type="cosineWithRestarts", cycles=3) == f"cosineWithRestarts, {warm}, 3 times"


def test_processes_that_share_tokens_are_shown() -> None:
    assert "tokens shared by" not in decisions()
    shared = decisions(strategy={"fsdp": {"sequenceParallelDegree": 2}}, compute={"gpusPerNode": 8})
    assert shared["tokens shared by"].value == "2 processes"


def test_gradients_that_are_not_summed_as_usual_are_shown() -> None:
    eight = {"compute": {"gpusPerNode": 8}}
    assert "gradients" not in decisions(**eight)
    given = decisions(strategy={"fsdp": {"reduceGradients": "oncePerStep"}}, **eight)["gradients"]
    assert (given.value, given.origin) == ("summed once a step", Origin.GIVEN)
    assert decisions(lora={}, training={"globalBatchTokens": 2**20}, **eight)["gradients"].origin == Origin.COMPUTED
    often = decisions(strategy={"fsdp": {"reduceGradients": "everyMicroBatch"}}, **eight)["gradients"]
    assert often.value == "summed after every micro-batch"


def test_layers_that_stay_gathered_are_shown_and_what_was_asked_for() -> None:
    known = {"model": {"uri": "hf://meta-llama/Llama-3.2-1B"}, "compute": {"gpusPerNode": 8, "gpuMemory": "80Gi"}}
    assert "layers" not in decisions(compute={"gpusPerNode": 8})
    kept = decisions(**known)["layers"]
    assert (kept.value, kept.origin) == ("gathered once a micro-batch", Origin.COMPUTED)
    freed = decisions(strategy={"fsdp": {"reshardAfterForward": True}}, **known)["layers"]
    assert (freed.value, freed.origin) == ("gathered for each pass", Origin.GIVEN)


def test_how_megatron_spreads_a_model_is_shown() -> None:
    degrees = {"tensorParallelDegree": 4, "pipelineParallelDegree": 2}
    shown = decisions(strategy={"megatron": degrees}, compute={"nodes": 2, "gpusPerNode": 8})

    assert "experts spread over" not in shown
    assert shown["matrices shared by"].value == "4 processes, and tokens between them"
    assert shown["stages"].why == "strategy.megatron.pipelineParallelDegree"
    assert shown["copies of the model"].value == "2, each over 8 processes"
    assert "strategy" not in decisions()
    assert "tokens shared by" not in shown

    degrees = {"tensorParallelDegree": 2, "contextParallelDegree": 4}
    shown = decisions(strategy={"megatron": degrees}, compute={"nodes": 2, "gpusPerNode": 8})
    assert shown["tokens shared by"].value == "4 processes"
    assert shown["tokens shared by"].why == "strategy.megatron.contextParallelDegree"
    assert shown["copies of the model"].value == "8, each over 2 processes"


def test_what_megatron_is_told_in_its_own_words_is_shown() -> None:
    overrides = {"num_layers_in_last_pipeline_stage": 3, "deallocate_pipeline_outputs": False}
    degrees = {"pipelineParallelDegree": 2, "transformerConfigOverrides": overrides}
    shown = decisions(strategy={"megatron": degrees}, compute={"nodes": 2, "gpusPerNode": 8})

    assert shown["stages"].value == "2, of other layers each, 3 in the last"
    assert shown["strategy"].why == (
        "strategy.megatron: docs/megatron.md; transformerConfigOverrides: num_layers_in_last_pipeline_stage: 3, "
        "deallocate_pipeline_outputs: false"
    )


def test_validate_refuses_heads_that_cannot_be_shared_out(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    asked = {"strategy": {"fsdp": {"sequenceParallelDegree": 4}}, "compute": {"gpusPerNode": 4}}
    path.write_text(json.dumps(manifest(model={"uri": "hf://Qwen/Qwen2.5-0.5B"}, **asked)))

    (problem,) = verdict_on(path).problems

    assert problem.endswith("set it to 1 or 2")


def test_what_is_another_in_the_config_of_the_model_is_shown() -> None:
    assert "model's config" not in decisions()
    yarn = {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 32768, "truncate": False}
    overrides = {"rope_parameters": yarn, "max_position_embeddings": 131072, "attention_dropout": 0.0}
    shown = decisions(model={"uri": "hf://Qwen/Qwen3-8B", "configOverrides": overrides})["model's config"]
    assert (shown.value, shown.origin) == ("3 fields of ours", Origin.GIVEN)
    assert shown.why == (
        "model.configOverrides: rope_parameters: {rope_type: yarn, factor: 4, "
        "original_max_position_embeddings: 32768, truncate: false}, "
        "max_position_embeddings: 131072, attention_dropout: 0"
    )


def test_added_tokens_are_shown() -> None:
    assert "added tokens" not in decisions()
    given = {"addedTokens": ["<a>", "<b>"], "addedSpecialTokens": ["<|c|>"]}
    shown = decisions(model={"uri": "hf://Qwen/Qwen3-8B", **given})["added tokens"]
    assert (shown.value, shown.origin) == ("3, 1 of them special", Origin.GIVEN)
    assert shown.why == "where the tokenizer lacks them: <a> <b> <|c|>"


def test_rows_of_tokens_are_counted_among_what_is_trained(tmp_path: Path) -> None:
    lora = {"rank": 4, "trainableTokens": ["a", "b", "\n"]}
    model = {"uri": "hf://Qwen/Qwen3-8B", "addedTokens": ["<a>", "a"]}
    shown = decisions(model=model, lora=lora)["trained tokens"]
    assert (shown.value, shown.origin, shown.why) == ("3", Origin.GIVEN, r"lora.trainableTokens: a b \n")

    # In embeddings and head, or in both at once, but in none that is trained whole
    whole = known_shape("hf://Qwen/Qwen3-8B")
    assert whole is not None
    added, heads = -(-(whole.vocabulary + 2) // 64) * 64 - whole.vocabulary, {"trainableModules": ["lm_head"]}
    for tied, training, rows in ((False, {}, 2 * 4), (True, {}, 4), (False, heads, 4 + added)):
        shape = replace(whole, tied=tied)

        def trained(uri: dict[str, Any], lora: dict[str, Any], *, of: Any = shape, by: Any = training) -> int:
            found = measure_trained(job(model=uri, lora=lora, training=by).spec, of)
            assert isinstance(found, Trained)
            return found.parameters

        without = trained({"uri": "hf://Qwen/Qwen3-8B"}, {"rank": 4})
        assert trained(model, lora) - without == rows * whole.hidden_size

    # And by the files of a model
    shapes = {"model.layers.0.self_attn.q_proj": (4, 8), "model.embed_tokens": (10, 8), "lm_head": (10, 8)}
    save_file({f"{name}.weight": torch.zeros(*size) for name, size in shapes.items()}, tmp_path / "model.safetensors")
    for config, rows in (({}, 8), ({"tie_word_embeddings": True}, 4)):
        (tmp_path / "config.json").write_text(json.dumps(config))
        found = measure_trained(job(model={**model, "uri": f"file://{tmp_path}"}, lora=lora).spec)
        assert isinstance(found, Trained)
        assert found.parameters == 4 * (4 + 8) + rows * 8

    # What is called as a table there and is no matrix is none
    shapes["lm_head"] = (10,)
    save_file({f"{name}.weight": torch.zeros(*size) for name, size in shapes.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    found = measure_trained(job(model={**model, "uri": f"file://{tmp_path}"}, lora=lora).spec)
    assert isinstance(found, Trained)
    assert found.parameters == 4 * (4 + 8) + 4 * 8


def test_what_may_surprise_is_said_by_validate_and_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.yaml"
    asked = manifest(model={"uri": "hf://Qwen/Qwen3-0.6B"}, training={"steps": 3}, monitoring={"profile": {}})
    path.write_text(json.dumps(asked))
    said = "monitoring.profile.startStep is 10, and the run has 3 steps: no trace"

    assert any(said in warning for warning in verdict_on(path).warnings)
    show_plan(load_manifest(path), "json")
    assert said in capsys.readouterr().err


def test_the_loss_of_routers_is_shown_where_it_is_trained() -> None:
    assert "loss of routers" not in decisions()
    assert decisions(training={"routerAuxLossCoefficient": 1e-3})["loss of routers"].value == "times 0.001"


def test_only_the_files_of_its_index_are_the_model(tmp_path: Path) -> None:
    def write(name: str, **shapes: list[int]) -> None:
        named = {f"model.layers.0.{key}.weight": {"shape": shape} for key, shape in shapes.items()}
        header = json.dumps(named).encode()
        (tmp_path / name).write_bytes(len(header).to_bytes(8, "little") + header)

    # Given a model in two files, and another form of it beside them
    write("model-00001-of-00002.safetensors", q_proj=[8, 8])
    write("model-00002-of-00002.safetensors", up_proj=[24, 8])
    write("consolidated.safetensors", wq=[8, 8], w1=[24, 8])
    files = {"q": "model-00001-of-00002.safetensors", "up": "model-00002-of-00002.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))

    shown = decisions(model={"uri": f"file://{tmp_path}"}, lora={"rank": 2})["trained parameters"]

    trained = 2 * (8 + 8) + 2 * (24 + 8)
    assert shown.value.startswith(f"{trained} of {trained + 64 + 192} ")

    # When it was saved anew as one file, then what is left of the shards is none of it
    write("model.safetensors", q_proj=[16, 8])
    shown = decisions(model={"uri": f"file://{tmp_path}"}, lora={"rank": 2})["trained parameters"]
    assert shown.value.startswith(f"{2 * (16 + 8)} of {2 * (16 + 8) + 128} ")


CONFIG = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}
ON_ONE_GPU = {"gpusPerNode": 1, "gpuMemory": "80Gi", "resources": {"limits": {"memory": "64Gi"}}}


def test_memory_is_reckoned_by_the_config_of_a_model_on_this_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    asked = job(model={"uri": f"file://{tmp_path}"}, compute=ON_ONE_GPU)

    assert show_plan(asked, "text") == 10
    told = capsys.readouterr()
    assert "Error: it does not fit: " in told.err + told.out
    assert "Warning: a save in the background takes 98.7Gi" in told.err + told.out
    assert "weights 29.9Gi, gradients 29.9Gi, optimizer 59.8Gi" in told.out
    # The same from the hub's cache
    snapshot = tmp_path / "hub" / "models--org--own" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(CONFIG))
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc")
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert show_plan(job(model={"uri": "hf://org/own"}, compute=ON_ONE_GPU), "text") == 10
    assert show_plan(job(model={"uri": "hf://org/other"}, compute=ON_ONE_GPU), "text") == 0
    assert "the shape of hf://org/other" in capsys.readouterr().out


MIXTURE = {**CONFIG, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (CONFIG | {"num_hidden_layers": 10**400}, "num_hidden_layers = 10000"),
        (CONFIG | {"head_dim": -4}, "head_dim = -4:"),
        (MIXTURE | {"num_local_experts": 10**18}, f"num_local_experts = {10**18}:"),
        (MIXTURE | {"num_local_experts": 0}, "num_local_experts = 0:"),
        (MIXTURE | {"num_local_experts": "4"}, "num_local_experts = '4':"),
        (MIXTURE | {"num_experts_per_tok": True}, "num_experts_per_tok = True:"),
        (MIXTURE | {"num_experts_per_tok": 9}, "num_experts_per_tok = 9:"),
    ],
)
def test_sizes_that_are_none_are_told_and_nothing_is_reckoned_by_them(
    tmp_path: Path, sizes: dict[str, Any], words: str
) -> None:
    from sft_cli.validate import verdict_on

    (tmp_path / "config.json").write_text(json.dumps(sizes))
    path = tmp_path / "job.yaml"
    path.write_text(json.dumps(manifest(model={"uri": f"file://{tmp_path}"}, compute=ON_ONE_GPU)))

    verdict = verdict_on(path)

    assert verdict.problems == ()
    (warning,) = verdict.warnings
    assert f"{tmp_path}/config.json has {words}" in warning


def test_a_config_that_is_nested_too_deeply_is_as_one_that_is_no_json(tmp_path: Path) -> None:
    from sft_cli.validate import verdict_on

    (tmp_path / "config.json").write_bytes(DEEP)
    path = tmp_path / "job.yaml"
    path.write_text(json.dumps(manifest(model={"uri": f"file://{tmp_path}"}, compute=ON_ONE_GPU)))

    assert verdict_on(path).problems == ()


def test_validate_refuses_what_does_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(json.dumps(manifest(model={"uri": "hf://Qwen/Qwen3-8B"}, compute=ON_ONE_GPU)))

    verdict = verdict_on(path)

    assert [problem.split(":")[1] for problem in verdict.problems] == [" it does not fit"]
    assert any("a save in the background" in warning for warning in verdict.warnings)


def test_a_shape_that_fits_is_suggested(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = job(model={"uri": "hf://Qwen/Qwen3-0.6B"}, compute={"gpusPerNode": 8, "gpuMemory": "80Gi"})

    assert show_suggestions(asked, "text") == 0
    said = capsys.readouterr().out
    assert re.search(r"FSDP: [\d.]+Gi of each GPU's 80.0Gi\n  training: {activationCheckpointing: none}", said)
    assert "megatron: {}" in said

    assert show_suggestions(asked, "json") == 0
    assert json.loads(capsys.readouterr().out)["megatron"]["strategy"] == {"megatron": {}}


def test_where_no_shape_fits_it_is_said_what_to_change(capsys: pytest.CaptureFixture[str]) -> None:
    asked = job(model={"uri": "hf://meta-llama/Llama-3.1-8B"}, compute=ON_ONE_GPU)

    assert show_suggestions(asked, "text") == 10
    said = capsys.readouterr().out
    assert re.search(r"^FSDP: no shape of 1 process has room for it; .*: change one or several of: .*lora \(", said)

    assert show_suggestions(asked, "json") == 10
    assert json.loads(capsys.readouterr().out) == {"fsdp": None, "megatron": None}


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"compute": {"gpusPerNode": 0}}, "set spec.compute.gpusPerNode"),
        ({"compute": {"gpusPerNode": 8}}, "set spec.compute.gpuMemory"),
        ({"compute": {"gpuMemory": "80Gi"}, "model": {"uri": "s3://b/own"}}, "of s3://b/own: .* --set model.uri=file"),
        ({"compute": {"gpuMemory": "80Gi"}, "model": {"uri": "hf://a/own"}}, "hf download a/own config.json"),
    ],
)
def test_nothing_is_suggested_without_a_model_and_a_gpu(sections: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        show_suggestions(job(**{"model": {"uri": "hf://Qwen/Qwen3-0.6B"}, **sections}), "text")


def test_whether_layers_are_compiled_is_shown_where_it_is_asked_for_or_not_usual() -> None:
    assert "compiled" not in decisions(compute={"gpusPerNode": 8})
    assert "compiled" not in decisions(compute={"gpusPerNode": 0})
    unusual = decisions(compute={"gpusPerNode": 8}, training={"precision": "fp32"})["compiled"]
    assert (unusual.value, unusual.origin) == ("nothing", Origin.COMPUTED)
    asked = decisions(compute={"gpusPerNode": 0}, training={"compile": True})["compiled"]
    assert (asked.value, asked.origin) == ("the layers", Origin.GIVEN)


def test_of_some_modules_is_said_which_and_how_much_they_are() -> None:
    asked = job(
        model={"uri": "hf://Qwen/Qwen3-8B"},
        training={"trainableModules": ["layers.35", "model.norm"]},
        compute={"gpusPerNode": 1},
    ).spec
    shape = known_shape(asked.model.uri)
    shown = {row.subject: row for row in explain(asked, make_plan(asked), measure_trained(asked, shape))}

    assert shown["trained modules"].why == "training.trainableModules: layers.35, model.norm"
    assert (shown["frozen weights in"].value, shown["frozen weights in"].origin) == ("bf16", Origin.COMPUTED)
    assert shape is not None
    trained = shape.block_parameters + shape.hidden_size
    assert shown["trained parameters"].value.startswith(f"{trained:,} of {shape.parameters:,} (")
    assert "trained modules" not in decisions()


def test_of_the_files_of_a_model_the_tensors_within_modules_are_counted(tmp_path: Path) -> None:
    tensors = {
        "model.embed_tokens.weight": torch.zeros(10, 4),
        "model.layers.0.mlp.up_proj.weight": torch.zeros(6, 4),
        "model.layers.1.mlp.up_proj.weight": torch.zeros(6, 4),
        "model.norm.weight": torch.zeros(4),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    uri = f"file://{tmp_path}"

    some = measure_trained(job(model={"uri": uri}, training={"trainableModules": ["layers.1", "model.norm"]}).spec)
    both = measure_trained(job(model={"uri": uri}, lora={"rank": 2}, training={"trainableModules": ["layers.1"]}).spec)

    assert isinstance(some, Trained)
    assert (some.parameters, some.frozen, some.layers) == (24 + 4, 40 + 24, 0)
    assert isinstance(both, Trained)
    assert (both.parameters, both.frozen, both.layers) == (24 + 2 * (6 + 4), 40 + 24 + 4, 1)
    assert measure_trained(job(model={"uri": uri}, training={"trainableModules": ["lm_head"]}).spec) is None


def test_what_a_module_has_under_other_names_in_files_is_counted_or_nothing_is_told(tmp_path: Path) -> None:
    tensors = {
        "model.embed_tokens.weight": torch.zeros(10, 4),
        "model.layers.0.self_attn.q_proj.weight": torch.zeros(4, 4),
        "model.layers.0.block_sparse_moe.experts.0.w1.weight": torch.zeros(6, 4),
        "model.layers.0.block_sparse_moe.experts.1.w1.weight": torch.zeros(6, 4),
        "embed_out.weight": torch.zeros(10, 4),
    }
    save_file(tensors, tmp_path / "model.safetensors")

    def found(*modules: str) -> Trained | str | None:
        return measure_trained(job(model={"uri": f"file://{tmp_path}"}, training={"trainableModules": [*modules]}).spec)

    experts = found("layers.0.mlp.experts", "lm_head")
    assert isinstance(experts, Trained)
    assert (experts.parameters, experts.frozen) == (48 + 40, 40 + 16)
    assert found("embed_tokens", "mlp.gate_up") is None
