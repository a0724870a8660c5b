"""What a block keeps beside weights in 4 bits, on tensors without memory."""

from __future__ import annotations

import pytest

from sft_api.model_config import shape_of
from sft_trainer.models import nf4, packed_rows
from tests.integration.run.test_step_memory import first_rows
from tests.unit.trainer.test_block_memory import TOKENS, both, model_of

PACKED = [
    *((kind, names) for kind in ("llama", "phi3", "gemma3_text") for names in (["all-linear"], ["o_proj"])),
    *((kind, ["all-linear"]) for kind in ("qwen3_moe", "gpt_oss")),
]


@pytest.mark.parametrize("how", ["none", "selective", "full"])
@pytest.mark.parametrize(("kind", "names"), PACKED)
def test_beside_a_base_in_4_bits_the_same_is_kept_and_at_most_a_matrix_is_there_besides(
    monkeypatch: pytest.MonkeyPatch, kind: str, names: list[str], how: str
) -> None:
    # Given few weights that are unpacked at a time, the first ones alone
    at_once = 2**17
    monkeypatch.setattr(packed_rows, "_AT_ONCE", {"cpu": at_once})
    monkeypatch.setattr(nf4, "some_rows", first_rows)
    spec = {"lora": {"rank": 32, "targetModules": names}, "training": {"activationCheckpointing": how}}
    _, half = both(kind, **spec)
    _, packed = both(kind, **{**spec, "lora": {**spec["lora"], "basePrecision": "nf4"}})

    assert packed.kept == half.kept
    shape = shape_of(model_of(kind).huggingface.config.to_dict())
    assert shape is not None
    matrix = 2 * max(rows * columns for rows, columns in {**shape.linear, **shape.stacked}.values()) / TOKENS
    # It need not be there where most is held besides
    assert half.working <= packed.working <= half.working + matrix + 6 * at_once / TOKENS
