"""What the GPU command makes of its runs, and how the plain loop is tuned, with runs that are only told of."""

import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm, apply_rotary_pos_emb
from transformers.utils import import_utils

from sft_trainer.flops import ModelFlops
from sft_trainer.models.causal_lm import build_on_meta
from sft_trainer.models.lora import add_adapters
from sft_trainer.strategies.fsdp import FsdpStrategy
from sft_trainer.trainable import trainable_of
from sft_trainer.versions import hide_flash_attention_4
from tests.gpu import measured
from tests.gpu.figures import Figures
from tests.gpu.fused_blocks import Kernels, fused_blocks
from tests.gpu.inputs import QWEN3_0_6B, QWEN3_1_7B, QWEN3_8B_LORA, SMALL, SMALL_LORA, ModelShape, make_model
from tests.gpu.measured import Effort, Run, Scene, compare
from tests.gpu.plain import _arguments, _find_flash_attention_2, fastest

CPU = torch.device("cpu")


def scene_of(shape: ModelShape, folder: Path, *, on_gpu: bool) -> Scene:
    return Scene(shape, 1, folder / "model", folder / "rows", folder, on_gpu, Effort(0, 0, 0.0), float("inf"))


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Has the runs of each kind be those that are given, in turn."""

    def tell(**of: list[Run]) -> None:
        waiting = {kind: iter(each) for kind, each in of.items()}
        kinds = {kind: lambda *_, kind=kind: next(waiting[kind]) for kind in of}
        monkeypatch.setattr(measured, "KINDS", kinds)

    return tell


def compared(scene: Scene, **options: Any) -> Figures:
    figures = Figures()
    compare(scene, figures, lengths=[100, 200], pairs=2, **options)
    return figures


def test_compiled_layers_are_beside_ours_and_what_compiling_takes_is_told_apart(
    runs: Callable[..., None], tmp_path: Path
) -> None:
    losses = {1: 2.0, 2: 1.5}
    runs(
        ours=[Run(100.0, 4.0, 1.0, losses=losses), Run(120.0, 5.0, 1.0, losses=losses)],
        plain=[Run(50.0, 9.0, 1.0, attention="sdpa", bins_at_once=4)] * 2,
        plain_unpacked=[Run(25.0, 9.0, 1.0)] * 2,
        compiled=[Run(132.0, 4.0, 1.0, compiling=40.0, losses={2: 1.5}), Run(132.0, 4.0, 1.0, compiling=3.0)],
    )

    figures = compared(
        scene_of(SMALL, tmp_path, on_gpu=False), peak_flops=0.0, kinds=("ours", "plain", "compiled", "plain_unpacked")
    ).numbers()

    assert figures["small_ratio_to_plain"] == pytest.approx(2.2)
    assert figures["small_ratio_to_plain_unpacked"] == pytest.approx(4.4)
    assert figures["small_plain_ratio_packed"] == pytest.approx(2.0)
    assert figures["small_compiled_ratio_to_ours"] == pytest.approx(1.2)
    assert (figures["small_compiling_seconds"], figures["small_compiling_again_seconds"]) == (40.0, 3.0)
    assert figures["small_compiled_loss_error"] == 0.0
    assert not [name for name in figures if name.endswith("_goal")]


def test_compiled_layers_with_other_losses_are_a_failure(runs: Callable[..., None], tmp_path: Path) -> None:
    runs(ours=[Run(1.0, 1.0, 1.0, losses={1: 2.0})] * 2, compiled=[Run(1.0, 1.0, 1.0, losses={1: 2.1})] * 2)

    figures = compared(scene_of(SMALL, tmp_path, on_gpu=True), peak_flops=0.0, kinds=("ours", "compiled"))

    assert figures.with_value("failed") == ["small_compiled_losses"]


def test_goals_and_the_estimate_are_beside_what_a_gpu_showed(runs: Callable[..., None], tmp_path: Path) -> None:
    # Given runs that reach the goal of utilisation, not that beside the plain loop, two bins at once
    shape = QWEN3_0_6B
    peak_flops = 100.0 * shape.training_flops([100, 200]) / 300 / 0.41
    runs(ours=[Run(100.0, 10.0, 1.0, bins_at_once=2)] * 2, plain=[Run(90.0, 9.0, 1.0)] * 2)

    scene = scene_of(shape, tmp_path, on_gpu=True)
    figures = compared(scene, peak_flops=peak_flops, kinds=("ours", "plain"), estimates=[8.0, 11.0, 14.0])

    numbers = figures.numbers()
    assert numbers["qwen3_0.6b_ours_mfu"] == pytest.approx(0.41)
    assert numbers["qwen3_0.6b_ours_mfu_goal"] == 0.40
    assert numbers["qwen3_0.6b_ratio_to_plain_goal"] == 1.2
    assert figures.with_value("yes") == ["qwen3_0.6b_ours_mfu_reached"]
    assert figures.with_value("no") == ["qwen3_0.6b_ratio_to_plain_reached"]
    assert numbers["qwen3_0.6b_ours_estimate_error"] == pytest.approx(0.1)


def test_the_runs_are_of_what_their_names_say(tmp_path: Path) -> None:
    scene = scene_of(SMALL_LORA, tmp_path, on_gpu=False)

    usual, eager, compiled = (scene.config("run", compiled=how).spec for how in (None, False, True))

    assert (usual.training.compile, eager.training.compile, compiled.training.compile) == (None, False, True)
    plan = scene_of(QWEN3_1_7B, tmp_path, on_gpu=True).config("run").plan
    assert (plan.compile, plan.reshard_after_forward) == (True, False)
    assert usual.lora is not None
    assert usual.lora.rank == SMALL_LORA.rank
    assert scene_of(SMALL, tmp_path, on_gpu=False).config("run").spec.lora is None


def test_bins_at_once_are_read_from_what_the_trainer_says() -> None:
    sentence = re.search(r'log.info\("(there is memory .*)",', inspect.getsource(FsdpStrategy.forward_backward))
    assert sentence is not None

    assert measured._bins_at_once(f"12:00:00 INFO {sentence[1] % 3}\n") == 3
    assert measured._bins_at_once("12:00:00 INFO another line\n") == 1


@pytest.mark.parametrize("shape", [SMALL, SMALL_LORA], ids=lambda shape: shape.name)
def test_flops_are_those_that_the_trainer_reckons(shape: ModelShape, tmp_path: Path) -> None:
    # Given a model that was made, and what of it a run trains
    (tmp_path / "small" / "model").mkdir(parents=True)
    parameters = make_model(shape, tmp_path / "small", tmp_path / "model", CPU)
    config = scene_of(shape, tmp_path, on_gpu=False).config("run")
    blueprint = build_on_meta(tmp_path / "model")
    trainable, adapters = trainable_of(config), 0
    if config.spec.lora:
        add_adapters(blueprint.huggingface, config.spec.lora)
        adapters = sum(each.numel() for name, each in blueprint.named_parameters() if trainable.trains(name))

    # Then both count the same, but for norms
    reckoned = ModelFlops(blueprint, trainable.trains, CPU).training([[30, 70], [128]])
    assert shape.training_flops([30, 70, 128]) == pytest.approx(reckoned, rel=0.01)
    assert adapters == shape.adapter_parameters()
    assert parameters == sum(each.numel() for each in blueprint.parameters()) - adapters


def test_the_large_shape_has_eight_billion_parameters_of_which_few_are_trained() -> None:
    shape = QWEN3_8B_LORA
    head = shape.vocabulary * shape.hidden
    parameters = (shape.training_flops([1]) - 6.0 * shape.adapter_parameters()) / 4 + head

    assert parameters == pytest.approx(8.19e9, rel=0.001)
    assert shape.adapter_parameters() == 43_646_976


def test_the_plain_loop_takes_the_fastest_number_of_bins_for_which_there_is_room() -> None:
    tried = []

    def seconds_with(count: int) -> float:
        tried.append(count)
        if count > 2:
            raise torch.OutOfMemoryError
        return {1: 3.0, 2: 2.0}[count]

    assert fastest([1, 2, 4, 8], seconds_with) == 2
    assert tried == [1, 2, 4]
    assert fastest([1, 2], {1: 2.0, 2: 3.0}.__getitem__) == 1
    with pytest.raises(torch.OutOfMemoryError):
        fastest([4], seconds_with)


def test_the_plain_loop_finds_flash_attention_2_where_what_it_was_forked_from_hides_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given its package, and a process that looked for it while what is called so was hidden
    for name, text in {
        "flash_attn/__init__.py": "",
        "flash_attn/flash_attn_interface.py": "",
        "flash_attn-2.8.3.dist-info/METADATA": "Metadata-Version: 2.1\nName: flash-attn\nVersion: 2.8.3\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(import_utils, "is_torch_cuda_available", lambda: True)
    monkeypatch.setattr(import_utils, "_package_distribution_mapping", lambda: {"flash_attn": ["flash-attn"]})
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    looked_up = (import_utils.is_flash_attn_2_available, import_utils.is_flash_attn_greater_or_equal)
    try:
        hide_flash_attention_4()
        for look in looked_up:
            look.cache_clear()
        assert not import_utils.is_flash_attn_2_available()
        assert not import_utils.is_flash_attn_greater_or_equal("2.3.3")

        # When the plain loop looks for it, then transformers has it too
        assert _find_flash_attention_2()
        assert import_utils.is_flash_attn_2_available()
        assert import_utils.is_flash_attn_greater_or_equal("2.3.3")
    finally:
        for look in looked_up:
            look.cache_clear()
        for name in [name for name in sys.modules if name.partition(".")[0] == "flash_attn"]:
            del sys.modules[name]


@pytest.mark.parametrize("boundaries", [True, False])
def test_bins_go_through_the_plain_model_together(boundaries: bool) -> None:
    # Given two bins, of two documents and of one; -100 is not trained
    def document(*ids: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor(ids), torch.tensor([-100, *ids[1:]])

    arguments, labels = _arguments([[document(1, 2), document(3, 4, 5)], [document(6, 7)]], CPU, boundaries)

    # Then each token predicts the next one of its document: in one row with positions, or in a row for each bin
    if boundaries:
        assert arguments["input_ids"].tolist() == [[1, 2, 3, 4, 5, 6, 7]]
        assert arguments["position_ids"].tolist() == [[0, 1, 0, 1, 2, 0, 1]]
        assert labels.tolist() == [[2, -100, 4, 5, -100, 7, -100]]
    else:
        assert arguments["input_ids"].tolist() == [[1, 2, 3, 4, 5], [6, 7, 0, 0, 0]]
        assert labels.tolist() == [[2, -100, 4, 5, -100], [7, -100, -100, -100, -100]]


def test_layers_with_other_kernels_compute_with_all_of_them() -> None:
    # Given kernels that say when they compute
    used = set()

    class Norm(Qwen3RMSNorm):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            used.add("norm")
            return super().forward(hidden_states)

    class Activation(Qwen3MLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            used.add("activation")
            return super().forward(x)

    def rotation(*arguments: Any, **named: Any) -> Any:
        used.add("rotation")
        return apply_rotary_pos_emb(*arguments, **named)

    # When layers with them are compared with those without
    figures = fused_blocks(CPU, Kernels(Norm, Activation, rotation))

    # Then they have the same weights, and the same gradients
    assert used == {"norm", "activation", "rotation"}
    assert figures["blocks_liger_gradient_error"] == 0.0
    assert float(figures["blocks_liger_time_by_eager"]) > 0


def test_a_kernel_that_does_not_compute_is_told_and_hides_nothing() -> None:
    class Broken(nn.Module):
        def __init__(self, width: int, epsilon: float) -> None:
            super().__init__()

    figures = fused_blocks(CPU, Kernels(Broken, Qwen3MLP, apply_rotary_pos_emb))

    assert str(figures["blocks_liger"]).startswith("NotImplementedError: ")
    assert figures["blocks_eager_gradient_error"] == 0.0
