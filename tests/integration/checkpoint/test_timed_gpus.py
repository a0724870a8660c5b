"""A run whose processes time their devices between steps is, to the last bit, one whose processes do not."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from sft_api.checkpoints import Manifest
from sft_api.ports import free_port
from sft_api.rundir import GPU_TIMES_FOLDER, GpuTimes
from sft_api.trainer_config import TrainerConfig
from sft_trainer.checkpoint.catalog import Catalog
from sft_trainer.checkpoint.index_reading import open_index
from sft_trainer.checkpoint.local import LocalStore
from sft_trainer.distributed import Ranks
from sft_trainer.gpu_times import GpuWork, Size, TimesGpu
from sft_trainer.trainer import Trainer
from tests.integration.checkpoint import ranks
from tests.integration.checkpoint.test_saves_beside_training import pieces
from tests.parity.runs import manifest, resolve

STEPS = 5
SMALL = Size(numbers=2**14, rows=16, inner=32, products=2, passes=2)


def train(config: TrainerConfig, folder: Path, timed: bool, rank: int, port: int) -> None:
    """One process of a run of two, with a model that drops out; timed as on GPUs, all the time."""
    os.environ["SFT_CACHE_DIR"] = str(folder.parent / "cache")
    run_dir = folder / f"run-{rank}"
    run_dir.mkdir(parents=True)
    listeners = []
    if timed:
        # The other one's clock would never let it ask.
        hours = iter(range(0, 1000, 24)) if rank == 0 else iter(())
        work = GpuWork(torch.device("cpu"), SMALL)
        listeners = [TimesGpu(run_dir, rank, work, leads=rank == 0, clock=lambda: 3600.0 * next(hours))]
    Trainer(config, Ranks(rank, rank, 2, 2, "127.0.0.1", port, "0"), run_dir, listeners).run()


def saved(folder: Path, inputs: Any, *, timed: bool) -> list[tuple[str, str, bytes]]:
    """What the last checkpoint of a run holds: name, kind and digest of every piece."""
    job = manifest(
        folder,
        folder / "store",
        processes=2,
        model={"uri": f"file://{inputs.model}"},
        lora={"rank": 2, "dropout": 0.2},
        data={"train": [{"uri": f"file://{inputs.train}", "split": "train[:60]"}], "maxLength": 256},
        training={"steps": STEPS, "globalBatchTokens": 512, "maxTokensPerMicroBatch": 256},
    )
    port = free_port()
    ranks.answers([ranks.start(train, resolve(job), folder, timed, rank, port, rank=rank) for rank in range(2)])
    store = LocalStore(folder / "store")
    newest = next(Catalog(store).candidates())
    assert isinstance(newest, Manifest)
    assert newest.step == STEPS
    return sorted(pieces(open_index(store, newest)[0]))


def test_timing_changes_no_bit_of_a_run_and_all_do_it_after_the_same_steps(tmp_path: Path, tiny_inputs: Any) -> None:
    assert saved(tmp_path / "timed", tiny_inputs, timed=True) == saved(tmp_path / "not", tiny_inputs, timed=False)

    # From the third step on: what was begun after the last one but one was read after the last one
    files = [tmp_path / "timed" / f"run-{rank}" / GPU_TIMES_FOLDER / f"rank-{rank}.json" for rank in range(2)]
    assert [GpuTimes.model_validate_json(file.read_bytes()).look for file in files] == [STEPS - 3] * 2
