"""Layers whose attention is told of documents here, as they do not tell it themselves."""

from pathlib import Path
from typing import Any

import pytest
import torch

from sft_trainer.errors import ModelError
from sft_trainer.models.attention import Boundaries, boundary_arguments
from sft_trainer.models.causal_lm import build_on_meta
from sft_trainer.models.compiling import why_not
from sft_trainer.models.documents_told import KEEPING
from sft_trainer.models.probe import small_model
from tests.architectures import small_config


@pytest.mark.parametrize("kind", KEEPING)
def test_attention_is_told_in_each_pass_and_in_none_that_is_told_nothing(tmp_path: Path, kind: str) -> None:
    small_config(kind).save_pretrained(tmp_path)
    huggingface: Any = build_on_meta(tmp_path).huggingface
    small = small_model(huggingface)
    ids = torch.arange(3, 9)[None]

    small.base_model(input_ids=ids, use_cache=False, **boundary_arguments(Boundaries.of((2, 4))))

    # What was told in one pass is not known in the next
    with pytest.raises(ModelError, match="does not pass document boundaries on"):
        small.base_model(input_ids=ids, use_cache=False)
    assert not any("forward" in vars(module) for module in small.modules())
    assert "cannot be compiled" in why_not(huggingface, torch.device("cpu"), torch.float32, tmp_path)
