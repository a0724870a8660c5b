"""A small model that several processes share out, its optimizer, and steps by gradients that are drawn."""

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
from sft_trainer.checkpoint.manager import CheckpointManager
from sft_trainer.checkpoint.store import Store
from sft_trainer.models.attention import IMPLEMENTATION, register
from sft_trainer.models.causal_lm import CausalLM
from sft_trainer.names.canonical import Names
from sft_trainer.optim import build_optimizer, matrices_of, set_updates, updates
from sft_trainer.strategies.fsdp import build_model
from sft_trainer.strategies.fsdp.boxes import model_boxes, optimizer_boxes, part_by_rows
from sft_trainer.strategies.fsdp.sharding import computed_dtype
from sft_trainer.strategies.fsdp.whole_matrices import orthogonalise_shared
from sft_trainer.trainable import trainable_of
from tests.integration.checkpoint.test_resharding import Shape
from tests.integration.checkpoint.test_sharded import where
from tests.parity.runs import manifest, resolve
from tests.topologies import here

Held = list[tuple[tuple[str, str], tuple[slice, ...], npt.NDArray[np.uint8]]]


class Run:
    """A mixture of experts whose rows and experts do not divide among 3 processes, and its optimizer."""

    def __init__(self, shape: Shape, training: dict[str, Any]) -> None:
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
        config = resolve(manifest(Path("/inputs"), Path("/store"), processes=shape[0], training=training))
        with torch.device("meta"):
            whole = AutoModelForCausalLM.from_config(sizes, dtype=torch.float32, attn_implementation=IMPLEMENTATION)
        self._model = build_model(config, CausalLM(whole), trainable_of(config), self._topology, torch.device("cpu"))
        held = functools.partial(part_by_rows, topology=self._topology)
        self.optimizer: Any = build_optimizer(
            self._model.named_parameters(),
            config.spec,
            1e-3,
            held,
            matrices_of(self._model.blocks),
            functools.partial(orthogonalise_shared, dtype=computed_dtype(config), topology=self._topology),
        )
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

    def save(self, store: Store, step: int) -> None:
        manager = CheckpointManager(store, self._topology)
        manager.claim_attempt("job")
        manager.save(step, self.boxes, RunState(updates=updates(self.optimizer)), asynchronous=True)
        assert manager.wait() is not None

    def load(self, store: Store) -> Run:
        manager = CheckpointManager(store, self._topology)
        manager.claim_attempt("job")
        manifest = manager.load_newest(self.boxes)
        assert manifest is not None
        set_updates(self.optimizer, manifest.run.updates)
        return self

    def held(self) -> Held:
        return [
            ((box.name, box.kind), where(box), box.read().contiguous()[..., None].view(torch.uint8).numpy().copy())
            for box in self.boxes
        ]


def drawn(shape: tuple[int, ...], seed: str) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(seed.encode())))


def all_here(shape: Shape, training: dict[str, Any]) -> Held:
    """What each process holds after three steps."""
    return Run(shape, training).begin().train(1, 2, 3).held()


def save_here(store: Store, shape: Shape, training: dict[str, Any]) -> None:
    """After two of them."""
    Run(shape, training).begin().train(1, 2).save(store, 2)


def go_on_here(store: Store, shape: Shape, training: dict[str, Any]) -> Held:
    """What each holds after the third, which follows on what is saved."""
    return Run(shape, training).load(store).train(3).held()
