"""What `sft validate` and `sft plan` say of a model by its config.json alone."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from sft_api.known_models import known_configs
from sft_api.plan import make_plan
from sft_cli.errors import UserError
from sft_cli.plan import show_plan
from sft_cli.suggest import show_suggestions
from sft_cli.validate import verdict_on

from .jobs import job, manifest

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_hidden_layers": 2,
    "vocab_size": 256,
}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "gemma2"}, "no rules for the weights of a model of type 'gemma2': choose a model of type"),
        ({"model_type": "llama", "mlp_bias": True}, "a model with mlp_bias: true in its config.json: choose strategy"),
        ({"model_type": ["llama"]}, "of a model of type ['llama']"),
        ({"model_type": "qwen3", "mlp_bias": False}, ""),
        # Fields that models of the type do not read.
        ({"model_type": "qwen2", "attention_bias": True, "mlp_bias": True}, ""),
        ({"model_type": "mistral", "attention_bias": True, **SIZES}, ""),
        ({}, ""),
    ],
)
def test_a_model_without_rules_for_megatron_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: dict[str, Any], words: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    where: dict[str, Any] = {"model": {"uri": f"file://{tmp_path}"}, "compute": {"gpusPerNode": 8}}
    asked = where | {"strategy": {"megatron": {}}}

    def problems(sections: dict[str, Any]) -> str:
        path = tmp_path / "job.yaml"
        path.write_text(json.dumps(manifest(**sections)))
        return "".join(verdict_on(path).problems)

    assert words in problems(asked)
    assert bool(problems(asked)) == bool(words)
    assert problems(where) == ""
    assert show_plan(job(**asked), "text") == (10 if words else 0)
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "qwen3_5_text"},
        {"model_type": "qwen3_next"},
        {"model_type": "lfm2_moe"},
        {"model_type": "nemotron_h"},
        {"model_type": "qwen3_5", "text_config": {"model_type": "qwen3_5_text"}, "vision_config": {}},
    ],
)
def test_tokens_of_a_model_with_linear_attention_are_not_shared_out(tmp_path: Path, config: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    path = tmp_path / "job.yaml"
    for degree, count in ((1, 0), (2, 1)):
        where: dict[str, Any] = {"model": {"uri": f"file://{tmp_path}"}, "compute": {"gpusPerNode": 8}}
        asked = where | {"strategy": {"fsdp": {"sequenceParallelDegree": degree}}}
        path.write_text(json.dumps(manifest(**asked)))
        problems = verdict_on(path).problems
        assert len(problems) == count
        assert all("is 2, but a model of type" in each and each.endswith("leave it out") for each in problems)


@pytest.mark.parametrize(
    ("differing", "why"),
    [
        ({"mlp_only_layers": 1}, "whose blocks differ in a way that no formula counts (mlp_only_layers: 1)"),
        ({"decoder_sparse_step": 0}, "whose blocks differ in a way that no formula counts (decoder_sparse_step: 0)"),
        ({"model_type": "phi"}, "of whose type 'phi' there is no formula"),
    ],
)
def test_memory_of_a_model_that_no_formula_counts_is_unknown_here_as_to_the_operator(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], differing: dict[str, Any], why: str
) -> None:
    def told(config: dict[str, Any]) -> tuple[int, str]:
        (tmp_path / "config.json").write_text(json.dumps(config))
        status = show_plan(asked, "text")
        return status, next(line for line in capsys.readouterr().out.splitlines() if "memory of a GPU" in line)

    asked = job(model={"uri": f"file://{tmp_path}"}, compute={"gpusPerNode": 1, "gpuMemory": "80Gi"})
    equal = dict(known_configs()["Qwen/Qwen3-30B-A3B"])
    assert told(equal)[0] == 10

    status, line = told({**equal, **differing})

    assert status == 0
    assert line.split()[4] == "unknown"
    memory = make_plan(asked.spec).memory
    assert memory is not None
    assert memory.total is None
    # The operator reads no files of models: it says the same, but for why.
    assert memory.unknown.replace("which is not in the table of known models", why) in line
    with pytest.raises(UserError, match=re.escape(f"the layers of file://{tmp_path}, {why}: try a strategy")):
        show_suggestions(asked, "text")


@pytest.mark.parametrize(
    ("compute", "warned"),
    [
        ({"gpusPerNode": 8, "podProfile": "h100"}, True),
        ({"gpusPerNode": 8, "podProfile": "h100", "gpuMemory": "80Gi"}, False),
        ({"gpusPerNode": 0, "podProfile": "h100"}, False),
        ({"gpusPerNode": 8}, False),
    ],
)
def test_that_the_gpus_of_a_profile_are_not_known_here_is_said(
    tmp_path: Path, compute: dict[str, Any], warned: bool
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(json.dumps(manifest(compute=compute)))

    words = " ".join(verdict_on(path).warnings)

    assert ("compute.podProfile: h100 is the platform's" in words) is warned
    memory = make_plan(job(compute=compute).spec).memory
    assert ("which the profile h100 does not say here" in (memory.unknown if memory else "")) is warned


@pytest.mark.parametrize(
    ("parts", "warned"),
    [
        ({}, True),
        ({"model": {"uri": "hf://org/model", "tokenSecretRef": {"name": "hub", "key": "token"}}}, False),
        ({"compute": {"gpusPerNode": 0, "env": [{"name": "HF_TOKEN", "value": "hf_x"}]}}, False),
        ({"training": {"dummyRun": {"steps": 3}}}, False),
        ({"model": {"uri": "file:///models/mine"}}, False),
        ({"export": {}}, False),
    ],
)
def test_that_pods_have_no_token_to_upload_with_is_said(tmp_path: Path, parts: dict[str, Any], warned: bool) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(json.dumps(manifest(**{"export": {"hub": {"repository": "org/mine"}}, **parts})))

    words = " ".join(verdict_on(path).warnings)

    assert ("nobody may write to org/mine without a token: name its Secret in model.tokenSecretRef" in words) is warned


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"quantization_config": {"quant_method": "awq", "bits": 4}},
            "of type 'qwen3' with a quantization_config (quant_",
        ),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}},
            "(quant_method 'fp8', of which weights in FP8 are read, and not weight_block_size [64, 64])",
        ),
        (
            {"text_config": {"model_type": "qwen3_5_text", "quantization_config": {"quant_method": "modelopt"}}},
            "of type 'qwen3_5_text' with a quantization_config (quant_method 'modelopt')",
        ),
        (
            {"compression_config": {"quant_method": "compressed-tensors", "config_groups": {}}},
            "with a compression_config (quant_method 'compressed-tensors', of which weights in FP8 are read, and not",
        ),
        ({"quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}}, ""),
        # Which types are published so the trainer knows.
        ({"quantization_config": {"quant_method": "mxfp4"}}, ""),
        ({"quantization_config": ["awq"], "text_config": 3}, ""),
    ],
)
def test_a_model_whose_weights_are_quantised_otherwise_is_refused(
    tmp_path: Path, config: dict[str, Any], words: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", **config}))
    path = tmp_path / "job.yaml"
    path.write_text(json.dumps(manifest(model={"uri": f"file://{tmp_path}"}, compute={"gpusPerNode": 8})))

    found = "\n".join(verdict_on(path).problems)

    assert words in found if words else not found
