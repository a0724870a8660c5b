"""What is compiled around, and what is refused before anything is compiled."""

import errno
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor.runtime.runtime_utils import cache_dir

from sft_api.failures import FailureClass
from sft_api.trainer_config import TrainerConfig
from sft_trainer import versions
from sft_trainer.classify import classify
from sft_trainer.errors import ConfigError
from sft_trainer.loss import slopes
from sft_trainer.models import compiling
from sft_trainer.models.attention import Boundaries, _varlen, boundary_arguments
from sft_trainer.models.causal_lm import build_on_meta
from sft_trainer.models.compiling import failed_to_compile, why_not
from sft_trainer.preparation import prepare_model
from sft_trainer.reporting import Reporter
from sft_trainer.strategies.fsdp import FsdpStrategy
from tests.parity.runs import manifest, resolve
from tests.unit.trainer.test_models import save_config, save_model

CPU = torch.device("cpu")


def test_the_kernel_of_a_gpu_is_compiled_around_as_well() -> None:
    # Given what the attention of a GPU calls, and a compiler that shows what it is given
    torch.compiler.reset()
    graphs = []

    def show(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return lambda *inputs: (next(each for each in inputs if getattr(each, "ndim", 0) == 4).transpose(1, 2),)

    q, k = torch.zeros(1, 4, 9, 16, dtype=torch.bfloat16), torch.zeros(1, 2, 9, 16, dtype=torch.bfloat16)
    attention = torch.compile(_varlen, fullgraph=True, backend=show)

    # When it is compiled as a whole, then it is one operator of that graph, and after two bounds of lengths of any
    for longest in (9, 300, 600, 5000):
        ends = boundary_arguments(Boundaries.of((4, 5))) | {"max_length_q": longest}
        attention(q, k, k, 0.0, None, None, ends)
    assert len(graphs) == 2
    assert [node for node in graphs[0].graph.nodes if "varlen" in str(node.target)]


def test_what_the_kernel_of_a_gpu_takes_is_known_before_anything_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a process in which nothing was computed yet, and a model that can be compiled
    torch.compiler.reset()
    monkeypatch.setattr(versions, "_KNOW_GROUPS", {})
    monkeypatch.setattr(compiling, "BACKEND", "eager")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    save_config("llama", tmp_path)
    assert not why_not(build_on_meta(tmp_path).huggingface, CPU, torch.float32, tmp_path)

    # When attention with fewer heads of keys is computed again and again, then it was compiled once
    compiled = []

    def count(graph: torch.fx.GraphModule, _: Any) -> Any:
        compiled.append(graph)
        return lambda *inputs: (next(each for each in inputs if getattr(each, "ndim", 0) == 4).transpose(1, 2),)

    q, k = torch.zeros(1, 4, 9, 16, dtype=torch.bfloat16), torch.zeros(1, 2, 9, 16, dtype=torch.bfloat16)
    attention = torch.compile(_varlen, fullgraph=True, backend=count)
    for _ in range(2):
        attention(q, k, k, 0.0, None, None, boundary_arguments(Boundaries.of((4, 5))))
    assert len(compiled) == 1


@pytest.mark.parametrize(
    ("kind", "options", "device", "words"),
    [
        ("llama", {"attention_dropout": 0.1}, "cpu", "attention_dropout 0.1 in its config"),
        ("biogpt", {}, "cpu", "attention_probs_dropout_prob 0.1 in its config"),
        ("deepseek_v3", {}, "cpu", "heads whose values have a size of their own (v_head_dim "),
        ("deepseek_v3", {}, "cuda", "training.precision: fp32 on a GPU"),
        ("llama", {}, "cuda", "training.precision: fp32 on a GPU"),
    ],
)
def test_attention_that_is_not_one_operator_is_refused(
    tmp_path: Path, kind: str, options: dict[str, Any], device: str, words: str
) -> None:
    save_config(kind, tmp_path, **options)
    model = build_on_meta(tmp_path).huggingface
    said = why_not(model, torch.device(device), torch.float32, tmp_path)
    assert words in said
    assert said.endswith("is computed document by document, which cannot be compiled")


def test_values_that_a_gpu_has_filled_up_are_refused_for_what_they_are(tmp_path: Path) -> None:
    save_config("deepseek_v3", tmp_path)
    said = why_not(build_on_meta(tmp_path).huggingface, torch.device("cuda"), torch.bfloat16, tmp_path)
    assert said.endswith("gives its kernel values that are filled up, which nobody has tried compiled on a GPU")


def test_experts_with_biases_are_refused(tmp_path: Path) -> None:
    save_config("gpt_oss", tmp_path)
    model = build_on_meta(tmp_path).huggingface
    said = why_not(model, CPU, torch.float32, tmp_path)
    assert said == "a model of type 'gpt_oss' has experts with biases, whose layers cannot be compiled"


def test_a_missing_compiler_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torch.compiler.reset()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    save_config("llama", tmp_path)
    model = build_on_meta(tmp_path).huggingface
    # What CXX named when the compiler was imported; also after a run that left alone what could not be compiled. (Not
    # by monkeypatch, which leaves the setting deleted for all that compiles later in this process.)
    no_compiler = torch._inductor.config.patch({"cpp.cxx": (str(tmp_path / "no-compiler"),)})
    with no_compiler, torch._dynamo.config.patch(suppress_errors=True):
        said = why_not(model, CPU, torch.float32, tmp_path)
    assert said.startswith("the compiler does not work here, which needs a C++ compiler in compute.image (g++, or ")
    assert "no-compiler" in said


@pytest.mark.parametrize("named", ["nothing", "by its import", "by the user"])
def test_what_is_compiled_is_kept_in_the_cache_that_the_trainer_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    # Given the compiler imported, in this process or in the one that it was forked from
    monkeypatch.setattr(compiling, "BACKEND", "eager")
    own = str(tmp_path / "own")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", own)
    if named != "by the user":
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    if named == "by its import":
        cache_dir()
    assert ("TORCHINDUCTOR_CACHE_DIR" in os.environ) == (named != "nothing")

    save_config("llama", tmp_path)
    assert not why_not(build_on_meta(tmp_path).huggingface, CPU, torch.float32, tmp_path / "cache")

    assert cache_dir() == (own if named == "by the user" else str(tmp_path / "cache" / "inductor"))


def _fails(graph: Any, _: Any) -> Any:
    raise ValueError("no code for this")


def planned(folder: Path, kind: str = "llama", **training: Any) -> TrainerConfig:
    """A run whose plan has layers compiled, whoever asked for it."""
    save_model(kind, folder / "model")
    model = {"uri": f"file://{folder}/model"}
    config = resolve(manifest(folder, folder / "store", model=model, training=training))
    return config.model_copy(update={"plan": config.plan.model_copy(update={"compile": True})})


def test_what_cannot_be_compiled_is_an_error_only_where_somebody_asked_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.compiler.reset()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setenv("SFT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compiling, "BACKEND", _fails)
    reporter = Reporter(tmp_path, writes=False)

    reason = prepare_model(planned(tmp_path), reporter, CPU).uncompiled

    assert reason.startswith("the compiler does not work here")
    assert "no code for this" in reason

    with pytest.raises(
        ConfigError, match=r"training\.compile is true, but the compiler .*: set it to false, or leave it"
    ):
        prepare_model(planned(tmp_path, compile=True), reporter, CPU)


def test_an_error_of_the_compiler_is_told_from_one_of_what_is_compiled() -> None:
    torch.compiler.reset()
    with pytest.raises(Exception, match="no code for this") as raised:
        torch.compile(lambda numbers: numbers + 1, backend=_fails)(torch.ones(2))
    assert failed_to_compile(raised.value)
    assert not failed_to_compile(torch.OutOfMemoryError("no room"))
    assert compiling.of_the_machine(torch.OutOfMemoryError("no room")) is None
    assert not failed_to_compile(ValueError("no code for this"))


def test_layers_of_experts_are_compiled_only_where_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.compiler.reset()
    monkeypatch.setattr(compiling, "BACKEND", "eager")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    reporter = Reporter(tmp_path, writes=False)

    unless_asked, asked = (
        prepare_model(planned(tmp_path, "qwen3_moe", **training), reporter, CPU).uncompiled
        for training in ({}, {"compile": True})
    )

    assert unless_asked == "layers of experts are compiled only where training.compile: true asks for it"
    assert asked == ""


@pytest.mark.parametrize(
    ("beneath", "failure"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), FailureClass.OUT_OF_MEMORY),
        (OSError(errno.ENOSPC, "No space left on device"), FailureClass.STORAGE_FULL),
        (ValueError("no code for this"), FailureClass.CONFIG_ERROR),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_the_machine_lacks_while_layers_are_compiled_is_no_fault_of_the_manifest(
    monkeypatch: pytest.MonkeyPatch, beneath: Exception, failure: FailureClass
) -> None:
    # Given layers that are asked to be compiled, and a compiler that runs into something
    torch.compiler.reset()

    def runs_into_it(graph: Any, _: Any) -> Any:
        raise beneath

    monkeypatch.setattr(compiling, "BACKEND", runs_into_it)
    layer = torch.nn.Linear(4, 4)
    compiling.compile_layers([layer], draws_random_numbers=False)
    strategy = object.__new__(FsdpStrategy)
    strategy._compiles = True
    monkeypatch.setattr(FsdpStrategy, "_compile", lambda _: layer(torch.ones(2, 4)))

    # When they are tried, then the end of the attempt is what such an error is anywhere else
    with pytest.raises(Exception, match=re.escape(str(beneath)[:20])) as raised:
        strategy.loaded()
    assert classify(raised.value, step=0)[0] == failure


def test_a_loss_that_cannot_be_compiled_stays_as_it_is_where_nobody_asked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    torch.compiler.reset()
    monkeypatch.setattr(compiling, "BACKEND", _fails)
    products, labels = torch.randn(5, 8), torch.arange(5)[:, None]
    rows = (products, products.gather(1, labels), labels, torch.tensor(0.5))

    with pytest.raises(Exception, match="no code for this"):
        compiling.compiled_slopes()(*rows)
    left = compiling.compiled_slopes(asked=False)
    for _ in range(2):
        for found, expected in zip(left(*rows), slopes(*rows), strict=True):
            assert torch.equal(found, expected)
    assert caplog.text.count("the loss is not compiled") == 1


class Doubled(torch.nn.Module):
    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers * 2


class Squared(torch.nn.Module):
    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers * numbers


def test_what_one_run_of_a_process_leaves_as_it_is_another_may_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    monkeypatch.setattr(compiling, "BACKEND", _fails)
    # Of two kinds: code that was left once is not tried again
    left, asked = Doubled(), Squared()
    with torch._dynamo.config.patch(suppress_errors=False):
        compiling.compile_layers([left], draws_random_numbers=False, asked=False)
        assert left(torch.ones(2, 4)).shape == (2, 4)

        compiling.compile_layers([asked], draws_random_numbers=False, asked=True)
        with pytest.raises(Exception, match="no code for this"):
            asked(torch.ones(2, 4))
