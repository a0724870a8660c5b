"""A manager over a store, small tensors to save with it, and what there is afterwards."""

from __future__ import annotations

from typing import Any

import torch

from sft_api.checkpoints import CheckpointId, Manifest, RunState
from sft_trainer.boxes import Box
from sft_trainer.checkpoint.catalog import Catalog, KeepPolicy
from sft_trainer.checkpoint.manager import CheckpointManager
from sft_trainer.checkpoint.store import Store
from tests.topologies import here
from tests.unit.checkpoint.boxed import whole

Tensors = dict[str, torch.Tensor]


def state(step: int) -> Tensors:
    generator = torch.Generator().manual_seed(step)
    return {
        "weight": torch.randn(50, 20, generator=generator),
        "exp_avg": torch.randn(50, 20, generator=generator),
        "exp_avg_sq": torch.tensor(float(step)),
    }


def blank() -> Tensors:
    return {kind: torch.full_like(tensor, -1) for kind, tensor in state(0).items()}


def boxes(tensors: Tensors) -> list[Box]:
    """All of each tensor, as one kind of the parameter ``model.weight``."""
    return [box for kind, tensor in tensors.items() for box in whole({"model.weight": tensor}, kind)]


def loaded_by(manager: CheckpointManager, into: Tensors | None = None) -> Manifest | None:
    """Load the newest checkpoint, into tensors that nobody looks at unless ``into`` is given."""
    return manager.load_newest(boxes(blank() if into is None else into))


def equal(left: Tensors, right: Tensors) -> bool:
    return all(torch.equal(left[name], right[name]) for name in right)


def started(store: Store, uid: str = "job-a") -> CheckpointManager:
    manager = CheckpointManager(store, here())
    manager.claim_attempt(uid)
    return manager


def save(manager: CheckpointManager, step: int, keep: KeepPolicy | None = None, **run: Any) -> None:
    run_state = RunState(cursor=step, updates=step, **run)
    manager.save(step, boxes(state(step)), run_state, asynchronous=False, keep=keep or KeepPolicy(last=99))


def folders(store: Store) -> list[str]:
    return [identity.folder for identity in Catalog(store).folders()]


def a_file_of(store: Store, identity: CheckpointId) -> str:
    return next(entry.key for entry in store.list(identity.prefix) if entry.key.endswith(".bin"))


def truncate(store: Store, identity: CheckpointId) -> None:
    key = a_file_of(store, identity)
    store.put(key, store.read(key)[:-1])


def remove(store: Store, identity: CheckpointId) -> None:
    store.delete([a_file_of(store, identity)])
