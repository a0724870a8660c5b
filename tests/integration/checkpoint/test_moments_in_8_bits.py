"""Moments in 8 bits are saved, and gone on with, by any number of processes, to the last bit."""

from __future__ import annotations

import functools
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from sft_api.checkpoints import RunState
from sft_trainer.boxes import WEIGHT, Box
from sft_trainer.checkpoint.index_reading import open_index
from sft_trainer.checkpoint.local import LocalStore
from sft_trainer.checkpoint.manager import CheckpointManager
from sft_trainer.checkpoint.store import Store
from sft_trainer.models.attention import IMPLEMENTATION, register
from sft_trainer.models.causal_lm import CausalLM
from sft_trainer.names.canonical import Names
from sft_trainer.optim import build_optimizer, set_updates, updates
from sft_trainer.strategies.fsdp import build_model
from sft_trainer.strategies.fsdp.boxes import model_boxes, optimizer_boxes, part_by_rows
from sft_trainer.trainable import trainable_of
from tests.integration.checkpoint import ranks
from tests.integration.checkpoint.test_resharding import Shape
from tests.integration.checkpoint.test_sharded import where
from tests.parity.runs import manifest, resolve
from tests.topologies import here

Held = list[tuple[tuple[str, str], tuple[slice, ...], npt.NDArray[np.uint8]]]


class Run:
    """A mixture of experts whose rows and experts do not divide among 3 processes, and its optimizer."""

    def __init__(self, shape: Shape) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        register()
        self._topology = here(shape[1])
        sizes = AutoConfig.for_model(
            "qwen3_moe",
            vocab_size=31,
            hidden_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            tie_word_embeddings=True,
            num_experts=5,
            num_experts_per_tok=2,
            moe_intermediate_size=3,
        )
        training = {"precision": "bf16", "parameterDtype": "bf16", "optimizer": {"stateDtype": "int8"}}
        config = resolve(manifest(Path("/inputs"), Path("/store"), processes=shape[0], training=training))
        with torch.device("meta"):
            whole = AutoModelForCausalLM.from_config(sizes, dtype=torch.float32, attn_implementation=IMPLEMENTATION)
        self._model = build_model(config, CausalLM(whole), trainable_of(config), self._topology, torch.device("cpu"))
        held = functools.partial(part_by_rows, topology=self._topology)
        self.optimizer: Any = build_optimizer(self._model.named_parameters(), config.spec, 1e-3, held)
        self._names = Names.of(sizes)

    @property
    def boxes(self) -> list[Box]:
        model, names, topology = self._model, self._names, self._topology
        return [*model_boxes(model, names, topology), *optimizer_boxes(model, self.optimizer, names, topology)]

    def begin(self) -> Run:
        for box in self.boxes:
            if box.kind == WEIGHT:
                box.write(drawn(box.shape, box.name)[where(box)])
        return self

    def train(self, *steps: int) -> Run:
        """Updates by gradients that are the same on any number of processes, large and small ones in each row."""
        for step in steps:
            for name, parameter in self._model.named_parameters():
                gradient = drawn(tuple(parameter.shape), f"{name} {step}").pow(3).to(parameter.dtype)
                if isinstance(parameter, DTensor):
                    gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
                parameter.grad = gradient
            self.optimizer.step()
        return self

    def held(self) -> Held:
        return [
            ((box.name, box.kind), where(box), box.read().contiguous()[..., None].view(torch.uint8).numpy().copy())
            for box in self.boxes
        ]


def drawn(shape: tuple[int, ...], seed: str) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(seed.encode())))


def all_here(shape: Shape) -> Held:
    return Run(shape).begin().train(1, 2, 3).held()


def save_here(store: Store, shape: Shape) -> None:
    run = Run(shape).begin().train(1, 2)
    manager = CheckpointManager(store, here(shape[1]))
    manager.claim_attempt("job")
    manager.save(2, run.boxes, RunState(updates=updates(run.optimizer)), asynchronous=True)
    assert manager.wait() is not None


def go_on_here(store: Store, shape: Shape) -> Held:
    run = Run(shape)
    manager = CheckpointManager(store, here(shape[1]))
    manager.claim_attempt("job")
    manifest = manager.load_newest(run.boxes)
    assert manifest is not None
    set_updates(run.optimizer, manifest.run.updates)
    return run.train(3).held()


def test_any_number_of_processes_goes_on_to_the_last_bit(tmp_path: Path) -> None:
    # Given two steps of three processes, saved
    (alone,) = ranks.run(1, tmp_path, all_here, (1, 1))
    whole = {key: value for key, _, value in alone}
    in_blocks = {name for name, kind in whole if kind == "exp_avg_exponents"}
    assert len(in_blocks) == 7
    store = LocalStore(tmp_path / "store")
    ranks.run(3, tmp_path, save_here, store, (3, 3))

    for shape in ((1, 1), (4, 2)):
        # When another number goes on with them
        for held in ranks.run(shape[0], tmp_path, go_on_here, store, shape):
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
