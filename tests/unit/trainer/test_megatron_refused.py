"""What the strategy on Megatron-Core refuses, before Megatron is imported."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from sft_api.v1alpha1.megatron import MegatronSpec
from sft_trainer.errors import ConfigError
from sft_trainer.models.causal_lm import build_on_meta
from sft_trainer.preparation import prepare_model
from sft_trainer.reporting import Reporter
from sft_trainer.strategies.megatron.layout import Sizes
from sft_trainer.strategies.megatron.refused import check, check_device
from sft_trainer.trainable import EVERYTHING, Trainable
from tests.parity.runs import manifest, resolve
from tests.unit.trainer.test_models import save_model
from tests.whole_models import save_whole


def refuse(
    path: Path,
    *,
    trainable: Trainable = EVERYTHING,
    kind: str = "qwen3",
    model: dict[str, Any] | None = None,
    megatron: MegatronSpec | None = None,
    processes: int = 8,
) -> None:
    save_model(kind, path, **(model or {}))
    blueprint = build_on_meta(path)
    for name, value in (model or {}).items():
        setattr(blueprint.huggingface.config, name, value)
    check(megatron or MegatronSpec(), blueprint, trainable, processes)


SPLIT = MegatronSpec(tensor_parallel_degree=2, sequence_parallel=False)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"trainable": Trainable(trains=lambda name: "q_proj" in name)}, "adapters"),
        ({"model": {"attention_dropout": 0.1}}, "dropout: set attention_dropout to 0 in model.configOverrides, or"),
        ({"kind": "granite", "model": {"logits_scaling": 6.0}}, "scaled or capped"),
        ({"model": {"hidden_act": "gelu"}}, "other than silu"),
        ({"kind": "qwen3_moe", "megatron": SPLIT}, "experts under tensorParallelDegree"),
        ({"kind": "qwen3_moe", "model": {"norm_topk_prob": True, "num_experts_per_tok": 1}}, "weighs 1"),
    ],
)
def test_what_it_does_not_compute_is_refused_in_words(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=f"strategy.megatron does not know .*{words}"):
        refuse(tmp_path, **options)


def test_the_text_part_of_a_model_of_several_is_refused(tmp_path: Path) -> None:
    save_whole("mistral3", tmp_path)

    with pytest.raises(ConfigError, match=r"does not know the text part of a model of several \('mistral3', of which"):
        check(MegatronSpec(), build_on_meta(tmp_path), EVERYTHING, 8)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kind": "gemma4_text"}, "no rules for the weights of 'gemma4_text'|scaled or capped"),
        ({"kind": "gemma2"}, "no rules for the weights of 'gemma2'|scaled or capped"),
        ({"kind": "llama", "model": {"attention_bias": True}}, "a model with attention_bias: true in its config.json"),
        ({"kind": "llama", "model": {"mlp_bias": True}}, "a model with mlp_bias: true in its config.json: choose"),
        ({"kind": "qwen3_moe", "model": {"mlp_only_layers": [1]}}, r"with mlp_only_layers: \[1\] in its config.json"),
        ({"kind": "qwen3_moe", "model": {"decoder_sparse_step": 2}}, "with decoder_sparse_step: 2 in its config.json"),
        (
            {"megatron": MegatronSpec(tensor_parallel_degree=3), "processes": 3},
            "tensorParallelDegree is 3, .* set it to 1$",
        ),
    ],
)
def test_models_that_it_cannot_spread_are_refused(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        refuse(tmp_path, **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"megatron": SPLIT},
        {"kind": "qwen3_moe", "megatron": MegatronSpec(tensor_parallel_degree=2)},
        # Fields that models of the type do not read.
        {"kind": "qwen2", "model": {"attention_bias": True, "mlp_bias": True}},
        {"kind": "mistral", "model": {"attention_bias": True}},
    ],
)
def test_other_jobs_are_not(tmp_path: Path, options: dict[str, Any]) -> None:
    refuse(tmp_path, **options)


@pytest.mark.parametrize(
    ("asked", "experts", "words"),
    [
        ({"pipeline_parallel_degree": 2}, 0, "pipelineParallelDegree needs GPUs"),
        ({"expert_parallel_degree": 2}, 4, "expertParallelDegree needs GPUs"),
        ({"tensor_parallel_degree": 2}, 0, "sequenceParallel needs GPUs"),
        ({"context_parallel_degree": 2}, 0, ""),
        ({}, 4, "a mixture of experts needs GPUs"),
        ({}, 0, ""),
        ({"tensor_parallel_degree": 2, "sequence_parallel": False}, 0, ""),
    ],
)
def test_without_a_gpu_only_matrices_are_spread(
    monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], experts: int, words: str
) -> None:
    def no_gpu() -> None:
        raise RuntimeError("Found no NVIDIA driver")

    monkeypatch.setattr(torch.cuda, "current_device", no_gpu)
    sizes = Sizes("qwen3", 2, 8, 8, 2, 2, 4, 64, tied=True, experts=experts)
    with pytest.raises(ConfigError, match=words) if words else nullcontext():
        check_device(MegatronSpec(**asked), sizes, torch.device("cpu"))
    check_device(MegatronSpec(**asked), sizes, torch.device("cuda"))


def prepare_with(path: Path, megatron: dict[str, Any], **model: Any) -> None:
    save_model("llama", path / "model", **model)
    document = manifest(path, path / "store")
    document["spec"]["model"] = {"uri": f"file://{path}/model"}
    document["spec"]["compute"] = {"gpusPerNode": 0, "processesPerNode": 2}
    document["spec"]["strategy"] = {"megatron": megatron}
    prepare_model(resolve(document), Reporter(path, writes=False), torch.device("cpu"))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"attention_bias": True}, "attention_bias: true"),
        ({"attention_dropout": 0.1}, "does not know dropout"),
        ({"hidden_act": "gelu"}, "activations other than silu"),
    ],
)
def test_a_model_is_refused_before_data_is_read(tmp_path: Path, model: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        prepare_with(tmp_path, {}, **model)


def test_what_needs_a_gpu_is_refused_before_data_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_gpu() -> None:
        raise RuntimeError("Found no NVIDIA driver")

    monkeypatch.setattr(torch.cuda, "current_device", no_gpu)
    with pytest.raises(ConfigError, match="pipelineParallelDegree needs GPUs"):
        prepare_with(tmp_path, {"pipelineParallelDegree": 2})
    prepare_with(tmp_path, {"tensorParallelDegree": 2, "sequenceParallel": False})


def test_an_image_without_megatron_is_said_to_be_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sft_trainer.strategies.megatron.refused.is_installed", lambda: False)
    with pytest.raises(ConfigError, match="needs Megatron-Core, which is not installed here"):
        refuse(tmp_path)
