"""Adapters beside the stacked weights of experts: their steps, and their exports, beside those of peft."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sft_api.v1alpha1 import LoraSpec
from sft_trainer.checkpoint.local import LocalStore
from sft_trainer.export.forms import Adapters
from sft_trainer.models.causal_lm import build_on_meta
from sft_trainer.models.digest import base_digest
from sft_trainer.models.experts import PROVEN
from sft_trainer.strategies.fsdp import FsdpStrategy
from tests.adapters_of_peft import as_here, experts_of
from tests.exports import export, exported, save
from tests.tensors import gathered
from tests.unit.trainer.test_lora import BINS, TRAINED, filled, strategy, their_loss
from tests.unit.trainer.test_models import process_group, save_model  # noqa: F401 - a fixture

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def exports(of: FsdpStrategy, folder: Path, lora: dict[str, Any], form: Any, target: Path) -> Path:
    """What is exported of what ``of``, which began from the model in ``folder``, has trained."""
    store = LocalStore(target.with_name(f"{target.name}-run"))
    boxes = [*of.boxes("trained"), *of.boxes("optimizer")]
    manifest = save(boxes, store, base_digest=base_digest(build_on_meta(folder), folder))
    adapters = Adapters(LoraSpec.model_validate(lora), form, f"file://{folder}")
    export(replace(exported(store, manifest, folder), adapters=adapters), LocalStore(target))
    return target


@pytest.mark.parametrize("kind", PROVEN)
def test_loss_gradients_and_both_exports_are_those_of_peft(tmp_path: Path, kind: str) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    # Given adapters of which none is 0, of experts of another rank, and with what peft makes of their export
    folder = tmp_path / "model"
    reference = save_model(kind, folder)
    lora = {"rank": 4, "alpha": 10, "expertRank": 3, "targetModules": [*ATTENTION, "experts"]}
    ours = filled(strategy(folder, lora))
    theirs = PeftModel.from_pretrained(
        reference, exports(ours, folder, lora, "adapter", tmp_path / "adapter"), is_trainable=True
    )
    merged = AutoModelForCausalLM.from_pretrained(exports(ours, folder, lora, "model", tmp_path / "merged"))

    # When both compute the loss of bins, transformers document by document
    loss = ours.forward_backward(BINS, TRAINED)
    expected = their_loss(theirs)
    (expected / TRAINED).backward()

    # Then it is the same, that of the merged model too, and so are gradients
    torch.testing.assert_close(loss.float(), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(their_loss(merged), expected, rtol=1e-6, atol=0)
    assert (expected - their_loss(AutoModelForCausalLM.from_pretrained(folder))).abs() > 1e-2
    found = {
        name: gathered(parameter.grad)
        for name, parameter in ours.model.huggingface.named_parameters()
        if parameter.grad is not None
    }
    experts = experts_of(merged)
    wanted = dict(as_here(name, p.grad, experts) for name, p in theirs.named_parameters() if p.grad is not None)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert (found[name] - gradient).norm() <= 5e-6 * gradient.norm() + 1e-9, name
