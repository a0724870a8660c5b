"""What is computed here of Llama 4; its loss and gradients are compared with transformers' as those of other models."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sft_trainer.errors import ModelError
from sft_trainer.models import attention
from sft_trainer.models.attention import Boundaries
from sft_trainer.models.causal_lm import build_on_meta
from sft_trainer.models.compiling import why_not
from sft_trainer.models.experts import kernel_options
from sft_trainer.models.llama4 import at_temperature, in_chunks
from sft_trainer.models.tracking import track_blocks
from sft_trainer.models.windows import Chunks, windows
from tests.unit.trainer.test_models import LENGTHS
from tests.unit.trainer.test_text_part import build, loss_of, packed_loss
from tests.whole_models import save_whole

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.mark.parametrize(
    ("lengths", "ends"),
    [
        ((3, 4), None),
        ((5,), [0, 4, 5]),
        ((4, 9, 1), [0, 4, 8, 12, 13, 14]),
    ],
)
def test_documents_end_where_chunks_do(lengths: tuple[int, ...], ends: list[int] | None) -> None:
    found = in_chunks(SimpleNamespace(attention_chunk=4), Boundaries.of(lengths).host_ends)

    assert (None if found is None else found.tolist()) == ends
    assert in_chunks(SimpleNamespace(attention_chunk=None), Boundaries.of(lengths).host_ends) is None


def test_temperature_is_that_of_each_document_by_itself() -> None:
    module = SimpleNamespace(has_temperature=True, floor_scale=3, attn_scale=0.1)
    query = torch.ones(1, 2, 8, 4)

    found = at_temperature(module, query, Boundaries.of((2, 6)).ends, 6)[0, 0, :, 0]

    steps = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2])
    torch.testing.assert_close(found, torch.log1p(steps) * 0.1 + 1)
    # Documents that are all shorter have none, whatever they are packed to
    assert at_temperature(module, query, Boundaries.of((2, 2, 2, 2)).ends, 2) is query


@pytest.mark.parametrize(
    ("name", "otherwise"),
    [("in_chunks", lambda module, ends: None), ("at_temperature", lambda module, query, ends, longest: query)],
)
def test_without_either_another_model_is_trained(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, otherwise: Any
) -> None:
    reference = save_whole("llama4", tmp_path)
    model = build(tmp_path).model
    expected = loss_of(reference)
    monkeypatch.setattr(attention, name, otherwise)

    assert abs(packed_loss(model) / expected - 1) > 1e-5


def test_it_is_seen_as_it_is_and_not_compiled(tmp_path: Path) -> None:
    save_whole("llama4", tmp_path)
    model = build_on_meta(tmp_path)
    huggingface: Any = model.huggingface

    assert windows(huggingface) == [Chunks(4), None, Chunks(4), None]
    seen = track_blocks(model, torch.bfloat16, lambda name: True, sum(LENGTHS))
    assert sorted(seen.values()) == [2, 2]
    assert "attention in chunks" in why_not(huggingface, torch.device("cpu"), torch.float32, tmp_path)
    assert kernel_options(huggingface.config) == {}


def test_by_itself_its_text_part_is_refused(tmp_path: Path) -> None:
    save_whole("llama4", tmp_path)
    build_on_meta(tmp_path).huggingface.config.save_pretrained(tmp_path / "text")

    with pytest.raises(ModelError, match="'llama4_text' by itself is not supported: name the model of images"):
        build_on_meta(tmp_path / "text")
