"""The short form of ``make parity``; masks and killed runs have tests of their own in the suites."""

from pathlib import Path
from typing import Any

import pytest

from tests.parity import checks
from tests.parity.__main__ import LIMIT


@pytest.mark.parametrize(("packing", "processes"), [("ffd", 2), ("none", 1)])
def test_loss_gradients_and_norm_equal_a_plain_loop(
    packing: str, processes: int, tiny_inputs: Any, tmp_path: Path
) -> None:
    inputs = tiny_inputs.model.parent

    figures = checks.against_reference(inputs, tmp_path, packing=packing, processes=processes, steps=2)

    assert max(figures.values()) <= LIMIT, figures


def test_accumulated_gradients_equal_those_of_one_micro_batch(tiny_inputs: Any, tmp_path: Path) -> None:
    assert checks.accumulation(tiny_inputs.model.parent, tmp_path) <= LIMIT
