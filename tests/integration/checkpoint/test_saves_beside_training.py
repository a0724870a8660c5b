"""What is saved while the next step is computed is the state of the step that it is said to be of."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from sft_api.checkpoints import Manifest
from sft_api.ports import free_port
from sft_api.trainer_config import TrainerConfig
from sft_trainer.checkpoint.catalog import Catalog
from sft_trainer.checkpoint.index import Index
from sft_trainer.checkpoint.index_reading import open_index
from sft_trainer.checkpoint.local import LocalStore
from sft_trainer.checkpoint.staging import HostStaging
from sft_trainer.distributed import Ranks
from sft_trainer.saving import Saving
from sft_trainer.trainer import Trainer
from tests.integration.checkpoint import ranks
from tests.parity.runs import manifest, resolve

STEPS = 3


def train(config: TrainerConfig, folder: Path, rank: int, size: int, port: int) -> None:
    """One process of a run whose copies for a save begin once a step has its gradients and waits for them."""
    os.environ["SFT_CACHE_DIR"] = str(folder.parent / "cache")
    run_dir = folder / f"run-{rank}"
    run_dir.mkdir(parents=True)
    waited_for, copy, copied = threading.Event(), HostStaging._copy, Saving.copied

    def late(self: HostStaging, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        waited_for.wait(3)  # a run that does not wait goes on meanwhile, and fails the test
        waited_for.clear()
        return copy(self, tensors)

    def wait(self: Saving, device: torch.device) -> float:
        waited_for.set()
        return copied(self, device)

    HostStaging._copy, Saving.copied = late, wait  # type: ignore[method-assign]
    Trainer(config, Ranks(rank, rank, size, size, "127.0.0.1", port, "0"), run_dir).run()


def saved(folder: Path, inputs: Any, *, asynchronous: bool) -> dict[int, list[tuple[str, str, bytes]]]:
    """What each checkpoint of a run of two processes holds: name, kind and digest of every piece."""
    job = manifest(
        folder,
        folder / "store",
        processes=2,
        model={"uri": f"file://{inputs.model}"},
        data={"train": [{"uri": f"file://{inputs.train}", "split": "train[:60]"}], "maxLength": 256},
        training={"steps": STEPS, "globalBatchTokens": 512, "maxTokensPerMicroBatch": 256},
        # Steps that are kept for ever are saved at once, though the one before is still being uploaded
        checkpoint={"everySteps": 1, "async": asynchronous, "keep": {"everySteps": 1}},
    )
    port = free_port()
    started = [ranks.start(train, resolve(job), folder, rank, 2, port, rank=rank) for rank in range(2)]
    ranks.answers(started)
    store = LocalStore(folder / "store")
    found = [each for each in Catalog(store).candidates() if isinstance(each, Manifest)]
    return {each.step: sorted(pieces(open_index(store, each)[0])) for each in found}


def pieces(index: Index) -> Iterator[tuple[str, str, bytes]]:
    for number, digest in zip(index.tensor, index.digests, strict=True):
        yield *index.tensors[number].key, digest.tobytes()


def test_what_is_copied_beside_the_next_step_is_what_the_step_has_left(tmp_path: Path, tiny_inputs: Any) -> None:
    beside = saved(tmp_path / "beside", tiny_inputs, asynchronous=True)
    waiting = saved(tmp_path / "waiting", tiny_inputs, asynchronous=False)
    assert beside.keys() == waiting.keys() == {1, 2, 3}
    assert beside == waiting
    assert beside[1] != beside[2]
