"""Moments in 8 bits are saved, and gone on with, by any number of processes, to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from sft_trainer.boxes import WEIGHT
from sft_trainer.checkpoint.index_reading import open_index
from sft_trainer.checkpoint.local import LocalStore
from sft_trainer.checkpoint.manager import CheckpointManager
from tests.integration.checkpoint import ranks
from tests.integration.checkpoint.shared_out import all_here, go_on_here, save_here
from tests.topologies import here

EIGHTH: dict[str, Any] = {"precision": "bf16", "parameterDtype": "bf16", "optimizer": {"stateDtype": "int8"}}


def test_any_number_of_processes_goes_on_to_the_last_bit(tmp_path: Path) -> None:
    # Given two steps of three processes, saved
    (alone,) = ranks.run(1, tmp_path, all_here, (1, 1), EIGHTH)
    whole = {key: value for key, _, value in alone}
    in_blocks = {name for name, kind in whole if kind == "exp_avg_exponents"}
    assert len(in_blocks) == 7
    store = LocalStore(tmp_path / "store")
    ranks.run(3, tmp_path, save_here, store, (3, 3), EIGHTH)

    for shape in ((1, 1), (4, 2)):
        # When another number goes on with them
        for held in ranks.run(shape[0], tmp_path, go_on_here, store, shape, EIGHTH):
            # Then what each holds is what one process has that made all steps: weights, codes and exponents
            assert held
            for key, place, value in held:
                if key[0] in in_blocks:
                    assert np.array_equal(value, whole[key][place]), key
                elif key[1] != WEIGHT:
                    # Of an odd number of elements torch's kernel computes the last ones otherwise
                    expected = whole[key][place].view(np.float32)
                    assert np.allclose(value.view(np.float32), expected, rtol=1e-6), key

    # And parts of a fused tensor are saved by themselves, with the exponents of their rows
    manager = CheckpointManager(store, here())
    manager.claim_attempt("job")
    choice = manager.latest()
    assert choice is not None
    index, _ = open_index(store, choice.manifest)
    saved = {entry.key: (entry.dtype, entry.shape) for entry in index.tensors}
    gate = "model.layers.0.mlp.experts.gate_proj.weight"
    assert saved[gate, "exp_avg"] == ("int8", (5, 3, 64))
    assert saved[gate, "exp_avg_sq"] == ("uint8", (5, 3, 64))
    assert saved[gate, "exp_avg_exponents"] == saved[gate, "exp_avg_sq_exponents"] == ("uint8", (5, 3, 1))
    assert saved["model.layers.0.mlp.experts.down_proj.weight", "exp_avg"] == ("float32", (5, 64, 3))
    assert saved["model.norm.weight", "exp_avg_sq"] == ("float32", (64,))
