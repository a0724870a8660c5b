"""Compiled layers and loss: the numbers of those that are not, for micro-batches of any size, from one compilation."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from sft_api.progress import TrainingProgress
from sft_api.rundir import PROGRESS_FILE
from sft_trainer import loss as loss_module
from sft_trainer.data.batches import empty_micro_batch
from sft_trainer.data.feed import BinTensors
from sft_trainer.loss import PRODUCTS
from sft_trainer.models import compiling
from sft_trainer.models.causal_lm import build_on_meta
from sft_trainer.models.lora import add_adapters, initialize_adapters
from sft_trainer.models.weights import load_weights
from sft_trainer.strategies.fsdp import FsdpStrategy
from sft_trainer.topology import ALONE
from sft_trainer.trainable import trainable_of
from tests.bins import random_bin
from tests.parity.runs import fork_workers, manifest, resolve, step_records
from tests.tensors import gathered
from tests.unit.trainer.test_fsdp_strategy import gradients, weights
from tests.unit.trainer.test_models import GEMMA_4_REUSING, save_model

pytestmark = pytest.mark.usefixtures("process_group")

CPU = torch.device("cpu")
EMPTY = BinTensors.of(empty_micro_batch(), counts=False)
BINS = (
    random_bin(1, 5, 9),
    random_bin(2, 32),  # as many tokens as the model is wide
    random_bin(3, 3, 4, 6),
    random_bin(4, 2, 2),  # as many tokens as ends and one
    random_bin(5, *[7] * 40),
    random_bin(6, 2, 1),
    EMPTY,
)
BALANCED = {"routerAuxLossCoefficient": 0.5}
WIDE = {"hidden_size": 64, "head_dim": 16, "moe_intermediate_size": 64}
"""Rows are whole blocks of 4 bits."""
OF_EXPERTS = {"rank": 4, "targetModules": ["all-linear", "experts"]}


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """All but the code itself is made, which takes most of the time; it counts what is compiled."""
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(compiling, "BACKEND", counter)
    yield counter
    torch.compiler.reset()


def built(path: Path, lora: dict[str, Any] | None = None, **training: Any) -> FsdpStrategy:
    config = resolve(
        manifest(
            path,
            path.with_name("store"),
            model={"uri": f"file://{path}"},
            data={"eval": [{"name": "held-out", "uri": f"file://{path}"}]},
            training=training,
            **({"lora": lora} if lora else {}),
        )
    )
    blueprint = build_on_meta(path)
    if config.spec.lora is not None:
        add_adapters(blueprint.huggingface, config.spec.lora)
    strategy = FsdpStrategy(config, blueprint, trainable_of(config), ALONE, CPU)
    load_weights(strategy.boxes("base"), strategy.model.names, path)
    if config.spec.lora is not None:
        initialize_adapters(strategy.boxes("trained"), config.spec.lora, 1)
        for box in strategy.boxes("trained"):
            box.write(torch.randn(box.shape, generator=torch.Generator().manual_seed(3)) * 0.1)
    else:
        load_weights(strategy.boxes("trained"), strategy.model.names, path)
    strategy.loaded()
    return strategy


@pytest.mark.parametrize(
    ("kind", "options", "lora", "training", "expected"),
    [
        ("qwen3", {}, None, {}, 2),
        # The first layer's input needs no gradient there; layers of two kinds are two.
        ("llama", {}, {"rank": 4, "dropout": 0.3}, {"activationCheckpointing": "full"}, 3),
        ("qwen3", {}, {"rank": 4, "useDora": True}, {"activationCheckpointing": "selective"}, 3),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
            None,
            {"activationCheckpointing": "selective"},
            4,
        ),
        (
            "gemma2",
            {"attn_logit_softcapping": 0.2, "sliding_window": 4},
            None,
            {"activationCheckpointing": "selective"},
            4,
        ),
        ("qwen3_moe", {}, None, {**BALANCED, "activationCheckpointing": "full"}, 2),
        ("olmoe", {}, {"rank": 4}, {**BALANCED, "activationCheckpointing": "full"}, 3),
        ("qwen2_moe", {}, None, BALANCED, 2),
        ("qwen3_moe", {}, OF_EXPERTS, {**BALANCED, "activationCheckpointing": "full"}, 3),
        # Its config asks for what transformers takes from hooks.
        (
            "mixtral",
            {"output_router_logits": True},
            {**OF_EXPERTS, "expertRank": 8},
            {**BALANCED, "activationCheckpointing": "selective"},
            3,
        ),
        ("qwen3_moe", WIDE, {**OF_EXPERTS, "basePrecision": "nf4"}, {"activationCheckpointing": "selective"}, 3),
        ("granitemoeshared", {}, None, BALANCED, 2),
        ("granitemoe", {}, None, BALANCED, 2),
        ("flex_olmo", {}, None, BALANCED, 2),
        # Layers of two kinds.
        ("qwen3_5_text", {}, None, {"activationCheckpointing": "selective"}, 4),
        ("lfm2", {}, None, {"activationCheckpointing": "selective"}, 4),
        ("bamba", {}, None, {"activationCheckpointing": "selective"}, 4),
        # Its first layer is dense.
        ("glm4_moe", {}, None, {}, 4),
        ("ernie4_5_moe", {}, None, BALANCED, 4),
        # Layers of four kinds, which hand keys and values on.
        ("gemma4_text", GEMMA_4_REUSING, {"rank": 4}, {"activationCheckpointing": "full"}, 10),
        # The last one of each kind hands them on here too, though nobody takes them.
        ("gemma4_text", {}, None, {}, 6),
    ],
)
def test_numbers_are_those_of_layers_that_are_not_compiled_and_nothing_is_compiled_after_the_start(
    tmp_path: Path,
    compiler: Any,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    options: dict[str, Any],
    lora: dict[str, Any] | None,
    training: dict[str, Any],
    expected: int,
) -> None:
    # Given the same model twice, one compiled before its first step, and a loss of several chunks
    save_model(kind, tmp_path / "model", **options)
    plain = built(tmp_path / "model", lora, **training)
    monkeypatch.setattr(loss_module, "CHUNK_ELEMENTS", 9 * vocabulary_of(plain))
    assert compiler.frame_count == 0
    compiled = built(tmp_path / "model", lora, compile=True, **training)
    # Its slopes, where the products are the logits.
    expected += compiled.model.logits == PRODUCTS
    assert compiler.frame_count == expected
    assert all(parameter.grad is None for parameter in compiled.model.parameters())

    # When bins of all sizes go through both: losses, gradients, steps, evaluations between them. Where scores are not
    # divided by the root of a head's size rounding has more weight.
    rounding = 3e-5 if kind == "gemma4_text" else 1e-5
    for number, bin_ in enumerate(BINS):
        losses = [one.forward_backward([bin_], 50, 50) for one in (plain, compiled)]
        torch.testing.assert_close(*losses, rtol=2e-6, atol=1e-5)
        right, found = trained_gradients(plain), trained_gradients(compiled)
        assert right.keys() == found.keys()
        for name, gradient in right.items():
            assert (found[name] - gradient).norm() <= rounding * gradient.norm() + 1e-7, name
        for one in (plain, compiled):
            one.apply(1e-3, 1.0, one.grad_norm(), torch.tensor(True))
        if number % 2:
            sums = [one.forward_sums(BINS)[0] for one in (plain, compiled)]
            torch.testing.assert_close(*sums, rtol=1e-4, atol=0)

    # Then names and shapes are the same, and nothing was compiled again
    assert weights(plain).keys() == weights(compiled).keys()
    assert compiler.frame_count == expected


def vocabulary_of(strategy: FsdpStrategy) -> int:
    huggingface: Any = strategy.model.huggingface
    return int(huggingface.config.vocab_size)


def trained_gradients(of: FsdpStrategy) -> dict[str, torch.Tensor]:
    if all(parameter.requires_grad for parameter in of.model.parameters()):
        return gradients(of)
    return {
        name: gathered(parameter.grad).clone()
        for name, parameter in of.model.named_parameters()
        if parameter.grad is not None
    }


@pytest.mark.parametrize(("processes", "without"), [(1, [0]), (2, [0, 1]), (2, [1])])
def test_a_run_that_nobody_asked_to_compile_goes_on_without_a_compiler(
    tiny_inputs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int, without: list[int]
) -> None:
    # Given a plan that has layers compiled, and processes that cannot, maybe not the one that tells of the run
    inputs = tiny_inputs.model.parent
    config = resolve(manifest(inputs, tmp_path / "store", processes=processes, training={"steps": 2}))
    config = config.model_copy(update={"plan": config.plan.model_copy(update={"compile": True})})
    monkeypatch.setenv("NO_COMPILER", " ".join(map(str, without)))

    # When it runs, then all of its processes train, the first says why it is slower, and nothing says "compiled"
    fork_workers(config, tmp_path / "work", module="tests.integration.run.no_compiler")
    assert [*step_records(tmp_path / "store")] == [1, 2]
    progress = TrainingProgress.model_validate_json((tmp_path / "work" / "run" / PROGRESS_FILE).read_bytes())
    (warning,) = (each for each in progress.warnings if "compiled" in each)
    assert warning.startswith("the layers are not compiled, and steps take longer than they could: the compiler does ")
    assert ("(process 1 of 2)" in warning) == (without == [1])
    assert (tmp_path / "work" / "rank-0.log").read_text().count("the layers are not compiled") == 1
    (manifest_of,) = (tmp_path / "store").glob("checkpoints/*/manifest.json")
    assert '"compiled"' not in manifest_of.read_text()
