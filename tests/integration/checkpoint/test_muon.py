"""Muon: matrices that processes share out by rows are orthogonalised whole; what follows is what one process has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sft_trainer.boxes import WEIGHT
from sft_trainer.checkpoint.local import LocalStore
from sft_trainer.muon import MOMENTUM
from tests.integration.checkpoint import ranks
from tests.integration.checkpoint.shared_out import all_here, go_on_here, save_here

HALF = {"precision": "bf16", "parameterDtype": "bf16", "optimizer": {"type": "muon", "stateDtype": "bf16"}}
FULL = {"precision": "fp32", "optimizer": {"type": "muon", "momentum": 0.99}}


@pytest.mark.parametrize("training", [FULL, HALF], ids=["fp32", "bf16"])
def test_any_number_of_processes_goes_on_to_the_last_bit(tmp_path: Path, training: dict[str, Any]) -> None:
    # Given two steps of three processes, saved: none has as many rows of a matrix as another one
    (alone,) = ranks.run(1, tmp_path, all_here, (1, 1), training)
    whole = {key: value for key, _, value in alone}
    by_muon = {name for name, kind in whole if kind == MOMENTUM}
    assert by_muon == {name for name, kind in whole if kind == WEIGHT and ".layers." in name and "norm" not in name}
    store = LocalStore(tmp_path / "store")
    ranks.run(3, tmp_path, save_here, store, (3, 3), training)

    # When another number goes on with them, of which some have no row of the router, and some the same as others
    for shape in ((4, 4), (4, 2)) if training is HALF else ((2, 1),):
        for held in ranks.run(shape[0], tmp_path, go_on_here, store, shape, training):
            # Then what each holds is what one process has that made all steps
            assert {name for (name, kind), _, _ in held if kind == MOMENTUM} <= by_muon
            for (name, kind), place, value in held:
                expected = whole[name, kind][place]
                if name in by_muon or training is HALF:
                    assert np.array_equal(value, expected), (shape, name, kind)
                else:
                    # Of an odd number of elements torch's kernel computes the last ones otherwise
                    assert np.allclose(value.view(np.float32), expected.view(np.float32), rtol=1e-6), (name, kind)
