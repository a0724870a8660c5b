"""A manager over a store, small tensors to save with it, and what there is afterwards."""

from __future__ import annotations

from typing import Any

import torch

from sft_api.checkpoints import CheckpointId, RunState
from sft_trainer.checkpoint.catalog import Catalog, KeepPolicy
from sft_trainer.checkpoint.manager import CheckpointManager
from sft_trainer.checkpoint.store import Store

Tensors = dict[str, torch.Tensor]


def state(step: int) -> Tensors:
    generator = torch.Generator().manual_seed(step)
    return {
        "model.weight": torch.randn(50, 20, generator=generator),
        "optimizer.state.weight.exp_avg": torch.randn(50, 20, generator=generator),
        "optimizer.state.weight.step": torch.tensor(float(step)),
    }


def blank() -> Tensors:
    return {name: torch.full_like(tensor, -1) for name, tensor in state(0).items()}


def equal(left: Tensors, right: Tensors) -> bool:
    return all(torch.equal(left[name], right[name]) for name in right)


def started(store: Store, uid: str = "job-a") -> CheckpointManager:
    manager = CheckpointManager(store)
    manager.claim_attempt(uid)
    return manager


def save(manager: CheckpointManager, step: int, keep: KeepPolicy | None = None, **run: Any) -> None:
    manager.save(step, state(step), RunState(cursor=step, **run), asynchronous=False, keep=keep or KeepPolicy(last=99))


def folders(store: Store) -> list[str]:
    return [identity.folder for identity in Catalog(store).folders()]


def a_file_of(store: Store, identity: CheckpointId) -> str:
    return next(entry.key for entry in store.list(identity.prefix) if entry.key.endswith(".bin"))


def truncate(store: Store, identity: CheckpointId) -> None:
    key = a_file_of(store, identity)
    store.put(key, store.read(key)[:-1])


def remove(store: Store, identity: CheckpointId) -> None:
    store.delete([a_file_of(store, identity)])
