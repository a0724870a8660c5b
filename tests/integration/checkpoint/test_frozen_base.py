"""Runs that train a part of a model: checkpoints hold that part, and all else is the base's, on a resume too."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.torch import load_file, save_file

from sft_api.ports import free_port
from sft_api.trainer_config import TrainerConfig
from sft_trainer.checkpoint.catalog import Catalog
from sft_trainer.checkpoint.index_reading import open_index
from sft_trainer.checkpoint.local import LocalStore
from sft_trainer.distributed import Ranks
from sft_trainer.errors import StopRequested, TrainingError
from sft_trainer.events import Asking, Control, Listener, Request, StepDone
from sft_trainer.trainable import Trainable
from sft_trainer.trainer import Trainer
from tests.exports import export_live
from tests.integration.checkpoint import ranks
from tests.parity.runs import manifest, resolve
from tests.tensors import gathered

Numbers = npt.NDArray[np.float32]

ATTENTION = Trainable(trains=lambda name: "self_attn" in name)
"""What is trained: embeddings, norms and the rest of the layers are the base."""


class Watching(Listener):
    """Notes every loss, and asks to stop after a step."""

    def __init__(self, last: int | None) -> None:
        self.losses: dict[int, float] = {}
        self._last = last

    def on_ask(self, event: Asking, control: Control) -> None:
        if event.step == self._last:
            control.ask(Request.STOP)

    def on_step(self, event: StepDone, control: Control) -> None:
        self.losses[event.step] = event.loss


@dataclass(frozen=True)
class Ended:
    losses: dict[int, float]
    weights: dict[str, Numbers]
    """Whole."""
    error: str
    """What the run was refused with."""


def train(config: TrainerConfig, folder: Path, last: int | None, rank: int, size: int, port: int) -> Ended:
    """One process of a run up to its end, or up to step ``last``; the live model is gathered into ``folder``/live."""
    os.environ["SFT_CACHE_DIR"] = str(folder.parent / "cache")
    watching = Watching(last)
    run_dir = folder / f"run-{rank}"
    run_dir.mkdir(parents=True, exist_ok=True)
    group = Ranks(rank, rank, size, size, "127.0.0.1", port, "0")
    trainer = Trainer(config, group, run_dir, [watching], trainable=ATTENTION)
    try:
        trainer.run()
    except StopRequested:
        assert last is not None
    except TrainingError as error:
        return Ended(watching.losses, {}, f"{type(error).__name__}: {error}")
    live = folder / "live"
    if rank == 0:
        shutil.rmtree(live, ignore_errors=True)
    export_live(trainer.prepared.model.blueprint, live, trainer.prepared.model.path, writes=rank == 0)
    whole = {
        name: gathered(parameter.detach()).numpy()
        for name, parameter in trainer.prepared.model.blueprint.huggingface.named_parameters()
    }
    return Ended(watching.losses, whole, "")


def run(folder: Path, inputs: Any, processes: int, last: int | None = None, model: Path | None = None) -> Ended:
    """A run of ``processes`` in ``folder``, which goes on there if it can."""
    job = manifest(
        folder,
        folder / "store",
        processes=processes,
        model={"uri": f"file://{model or inputs.model}"},
        data={"train": [{"uri": f"file://{inputs.train}", "split": "train[:60]"}], "maxLength": 256},
        training={"steps": 4, "globalBatchTokens": 1536, "maxTokensPerMicroBatch": 256},
        export={"atEnd": True},
    )
    port = free_port()
    started = [
        ranks.start(train, resolve(job), folder, last, rank, processes, port, rank=rank) for rank in range(processes)
    ]
    first, *others = ranks.answers(started)
    assert all(other.error == first.error and other.losses == first.losses for other in others)
    return first


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def same(left: Ended, right: Ended) -> bool:
    return left.weights.keys() == right.weights.keys() and all(
        np.array_equal(value, right.weights[name]) for name, value in left.weights.items()
    )


@pytest.mark.parametrize(("processes", "others"), [(1, 3), (2, 1), (3, 2)])
def test_a_run_goes_on_with_its_base(tmp_path: Path, tiny_inputs: Any, processes: int, others: int) -> None:
    # Given a run that trains attention only, to its end, and one that was stopped in the middle
    undisturbed = run(tmp_path / "undisturbed", tiny_inputs, processes)
    assert not run(tmp_path / "stopped", tiny_inputs, processes, last=2).error

    # When that goes on
    resumed = run(tmp_path / "stopped", tiny_inputs, processes)

    # Then it is the same to the last bit: losses, what was trained, and what was not
    assert (resumed.error, sorted(resumed.losses)) == ("", [3, 4])
    assert resumed.losses == {step: undisturbed.losses[step] for step in (3, 4)}
    assert same(resumed, undisturbed)
    base = load_file(tiny_inputs.model / "model.safetensors")
    changed = {name for name, value in resumed.weights.items() if not np.array_equal(value, base[name].float().numpy())}
    assert changed == {name for name in resumed.weights if "self_attn" in name}

    # And checkpoints hold what was trained and no more, exports all of it
    store = LocalStore(tmp_path / "stopped" / "store")
    (newest, *_) = Catalog(store).candidates()
    index, _ = open_index(store, newest)  # type: ignore[arg-type]
    assert {entry.name for entry in index.tensors} == changed
    exported = files(tmp_path / "stopped" / "store" / "export")
    assert exported
    assert exported == files(tmp_path / "stopped" / "live") == files(tmp_path / "undisturbed" / "live")

    # And another number of processes goes on there with the same weights
    (tmp_path / "stopped" / "store" / "done.json").unlink()
    again = run(tmp_path / "stopped", tiny_inputs, others)
    assert again.losses == {}
    assert same(again, undisturbed)


def test_another_base_than_the_run_started_from_is_refused(tmp_path: Path, tiny_inputs: Any) -> None:
    # Given a run of two processes that was stopped, and a model that is another one since then
    model = tmp_path / "model"
    shutil.copytree(tiny_inputs.model, model)
    assert not run(tmp_path / "run", tiny_inputs, 2, last=2, model=model).error
    before = (model / "model.safetensors").read_bytes()
    tensors = load_file(model / "model.safetensors")
    save_file({name: value * 2 for name, value in tensors.items()}, model / "model.safetensors", {"format": "pt"})

    # When it goes on, on any number of processes
    refused = [run(tmp_path / "run", tiny_inputs, processes, model=model) for processes in (2, 1)]

    # Then it is refused in words before anything is trained
    for ended in refused:
        assert ended.losses == {}
        assert ended.error.startswith(
            "ConfigError: the checkpoints hold only what was trained, and all else comes from "
        )
        assert (
            f"the model in file://{model}, which is not the one beside which that was trained: its digest was"
            in ended.error
        )
        assert "name that model in model.uri, pinned to a commit (@revision)" in ended.error

    # And with the model that it was it goes on
    (model / "model.safetensors").write_bytes(before)
    assert sorted(run(tmp_path / "run", tiny_inputs, 2, model=model).losses) == [3, 4]
