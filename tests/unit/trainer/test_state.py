"""What a checkpoint records besides tensors, and which of it a resume compares."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from sft_trainer.preparation import Prepared
from sft_trainer.state import Facts, changed_fields
from sft_trainer.topology import ALONE
from tests.parity.runs import manifest, resolve


def environment(folder: Path, **sections: Any) -> dict[str, str | int]:
    prepared = SimpleNamespace(train=(), base_digest="", companions={})
    config = resolve(manifest(folder, folder / "store", **sections))
    return Facts.of(config, cast(Prepared, prepared), torch.device("cpu"), ALONE).environment


@pytest.mark.parametrize(
    ("sections", "change"),
    [
        ({"training": {"compile": True}}, "compiled: None -> 'yes'"),
        ({"strategy": {"fsdp": {"cpuOffload": True}}}, "cpuOffload: None -> 'yes'"),
    ],
)
def test_a_resume_that_computes_in_another_way_says_that_its_last_bits_differ(
    tmp_path: Path, sections: dict[str, Any], change: str
) -> None:
    assert changed_fields(environment(tmp_path), environment(tmp_path, **sections)) == [change]
