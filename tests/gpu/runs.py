"""Checks of whole runs on the device: the trainer through its front door, a configuration and a worker process."""

import hashlib
import importlib.util
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sft_api.trainer_config import TrainerConfig
from tests.parity.checks import sft_run, worst
from tests.parity.runs import manifest, resolve, step_records

from .figures import Figure
from .forked import run_worker
from .isolated import Skipped
from .kernels import require
from .plain import read_examples

Gradients = dict[str, torch.Tensor]
_PACKED = {"globalBatchTokens": 2048, "maxTokensPerMicroBatch": 512}
_MOST_TOKENS = 512
"""Of an example, in all runs of tests.parity.runs."""


@dataclass(frozen=True)
class Place:
    """Where the runs of one check find their inputs, leave their files, and compute."""

    inputs: Path
    folder: Path
    device: torch.device

    @property
    def compute(self) -> dict[str, Any]:
        return {"gpusPerNode": 1 if self.device.type == "cuda" else 0, "processesPerNode": 1}

    def config(self, name: str, **sections: Any) -> TrainerConfig:
        """The configuration of a short run of the small model; ``sections`` are merged in."""
        merged: dict[str, Any] = {
            "compute": self.compute,
            "export": {"atEnd": False},
            **sections,
            # Compiling takes longer than these runs: where it is not what is looked at, it is left out.
            "training": {"steps": 1, "compile": False, **_PACKED, **sections.get("training", {})},
        }
        return resolve(manifest(self.inputs, self.folder / name / "store", **merged))

    def gradients(self, name: str, **training: Any) -> tuple[Gradients, float]:
        """Gradients and loss of the first step of a run."""
        run_worker(self.config(name, training=training), self.folder / name, module="tests.parity.capture")
        # Not to the GPU, which this process must not use while others are forked from it.
        (gradients,) = torch.load(self.folder / name / "gradients.pt", map_location="cpu")
        return gradients, step_records(self.folder / name / "store")[1]["loss"]


def _distance(one: Gradients, other: Gradients) -> tuple[float, float]:
    """Distance of two gradients, all parameters as one vector, relative to the other; and 1 - cosine."""
    a, b = (torch.cat([tensors[name].double().cpu().flatten() for name in other]) for tensors in (one, other))
    return ((a - b).norm() / b.norm()).item(), 1 - (a @ b / (a.norm() * b.norm())).item()


def precision(place: Place) -> dict[str, Figure]:
    """The first step in bf16 against the same in fp32, and against itself with activations that are computed again."""
    # All runs first: torch's threads, which the comparisons start, do not survive a fork.
    right, loss = place.gradients("fp32", precision="fp32")
    bf16, bf16_loss = place.gradients("bf16", precision="bf16")
    again, _ = place.gradients("again", precision="bf16", activationCheckpointing="full")
    on_gpu = place.device.type == "cuda"
    on_cpu = Place(place.inputs, place.folder, torch.device("cpu"))
    expected, expected_loss = on_cpu.gradients("fp32-cpu", precision="fp32") if on_gpu else (right, loss)
    error, missing_cosine = _distance(bf16, right)
    again_error, _ = _distance(again, bf16)
    require("bf16 against fp32: error of the loss", abs(bf16_loss / loss - 1), 1e-2)
    require("bf16 against fp32: 1 - cosine of the gradients", missing_cosine, 1e-2)
    require("activations computed again: error of the gradients", again_error, 1e-2)
    figures: dict[str, Figure] = {
        "bf16_loss_error": abs(bf16_loss / loss - 1),
        "bf16_gradient_error": error,
        "bf16_gradient_cosine": 1 - missing_cosine,
        "activation_checkpointing_gradient_error": again_error,
    }
    if on_gpu:
        error, _ = _distance(right, expected)
        require("fp32 on the GPU against the CPU: error of the loss", abs(loss / expected_loss - 1), 1e-4)
        require("fp32 on the GPU against the CPU: error of the gradients", error, 1e-3)
        figures |= {"fp32_loss_error_to_cpu": abs(loss / expected_loss - 1), "fp32_gradient_error_to_cpu": error}
    return figures


def compiled(place: Place) -> dict[str, Figure]:
    """The first step of packed bins in bf16 with compiled layers against the same with those that are not."""
    right, loss = place.gradients("as-they-are", precision="bf16")
    found, found_loss = place.gradients("compiled", precision="bf16", compile=True)
    error, _ = _distance(found, right)
    require("compiled layers: error of the loss", abs(found_loss / loss - 1), 1e-2)
    require("compiled layers: error of the gradients", error, 5e-2)
    return {"compiled_loss_error": abs(found_loss / loss - 1), "compiled_gradient_error": error}


def resumed(place: Place, steps: int, every: int, kill_after: int) -> dict[str, Figure]:
    """``sft run`` killed with SIGKILL after a save in the background, against the same run undisturbed.

    On a GPU sums are taken in any order: what two runs make of it differs in the last bits, and grows with the steps.
    """
    losses = []
    for name, kill in (("straight", None), ("killed", kill_after)):
        sft_run(
            place.inputs,
            place.folder / name,
            1,
            steps,
            every=every,
            kill_after=kill,
            sections={"compute": place.compute, "export": {"atEnd": False}},
        )
        records = step_records(place.folder / name / "store")
        losses.append([records[step]["loss"] for step in range(1, steps + 1)])
    attempts = list((place.folder / "killed" / "store" / "attempts").iterdir())
    if len(attempts) != 2:
        raise AssertionError(f"the killed run has {len(attempts)} attempts instead of 2")
    errors = [abs(a / b - 1) for a, b in zip(*losses, strict=True)]
    soon = worst(errors[: kill_after + 10])
    require("losses of the resumed run: error", soon, 0 if place.device.type == "cpu" else 1e-2)
    log = (place.folder / "killed" / "sft.log").read_text()
    if "could not be page-locked" in log or "saved while training waits" in log:
        raise AssertionError("saves were not made in the background from page-locked memory: see the log")
    return {"resumed_loss_error": soon, "resumed_loss_error_at_end": errors[-1]}


def placed_by_ray(place: Place, steps: int) -> dict[str, Figure]:
    """``sft run`` whose process Ray places, on its GPU where there is one, against the same without Ray."""
    if importlib.util.find_spec("ray") is None:
        raise Skipped("no_ray")
    losses = []
    for launcher in ("supervisor", "ray"):
        compute = {**place.compute, "launcher": launcher}
        sections = {"compute": compute, "export": {"atEnd": False}}
        sft_run(place.inputs, place.folder / launcher, 1, steps, every=steps, sections=sections)
        records = step_records(place.folder / launcher / "store")
        losses.append([records[step]["loss"] for step in range(1, steps + 1)])
    if not list((place.folder / "ray").glob("sft-runs/*/run/ray/place-0.json")):
        raise AssertionError("the process had no place of Ray's")
    error = worst(abs(a / b - 1) for a, b in zip(*losses, strict=True))
    require("losses of the run that Ray placed: error", error, 0 if place.device.type == "cpu" else 1e-2)
    return {"ray_loss_error": error}


def saved_and_exported(place: Place) -> dict[str, Figure]:
    """A run that saves, evaluates and exports; resumed when it is complete, it exports the same bytes again.

    What transformers computes with the exported model on the CPU in fp32 is the evaluation loss of the run.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    rows = place.inputs / "data" / "eval.jsonl"
    config = place.config(
        "exported",
        training={"steps": 8, "optimizer": {"learningRate": 1e-3}, "compile": place.device.type == "cuda"},
        data={"eval": [{"name": "held-out", "uri": f"file://{rows}"}], "trainOn": "allAssistantMessages"},
        checkpoint={"everySteps": 3},
        export={"atEnd": True},
    )
    store = place.folder / "exported" / "store"
    digests = []
    for attempt in range(2):
        run_worker(config, place.folder / "exported" / f"attempt-{attempt}", module="sft_trainer")
        digests.append(_digest(store / "export"))
        if attempt == 0:
            shutil.copytree(store / "export", place.folder / "exported" / "first")
            shutil.rmtree(store / "export")
    if digests[0] != digests[1]:
        raise AssertionError("the export of the resumed run differs from that of the run itself")
    tokenizer = AutoTokenizer.from_pretrained(store / "export")
    model = AutoModelForCausalLM.from_pretrained(store / "export", dtype=torch.float32)
    # The run drops what is longer.
    examples = [example for example in read_examples(str(rows), tokenizer) if len(example[0]) <= _MOST_TOKENS]
    expected = _mean_loss(model, examples)
    told = step_records(store)[8]["evalLoss"]
    require("evaluation loss of the run against the exported model's", abs(told / expected - 1), 1e-2)
    return {"export_equal": 1, "export_loss_error": abs(told / expected - 1)}


def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


@torch.no_grad()
def _mean_loss(model: Any, examples: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    total, count = 0.0, 0
    for ids, labels in examples:
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
        total += torch.nn.functional.cross_entropy(logits, labels[1:], ignore_index=-100, reduction="sum").item()
        count += int((labels[1:] != -100).sum())
    return total / count


def launched(place: Place) -> dict[str, Figure]:
    """No launch of a step waits for the device, once the first two are made; a resumed run begins with one bin at once.

    On a CPU, which is never waited for, nothing may read a value, and memory for several bins is only pretended.
    """
    compiled = {"compile": True} if place.device.type == "cuda" else {}
    config = place.config("launched", training={"steps": 10, "precision": "bf16", **compiled})
    made: list[list[dict[str, Any]]] = []
    for stop in (5, 0):
        file = place.folder / f"stopped-at-{stop}"
        run_worker(config, file.with_suffix(".run"), module="tests.gpu.watched", arguments=[str(file), str(stop)])
        made.append([json.loads(line) for line in file.read_text().splitlines()])
    if [step["step"] for run in made for step in run] != list(range(1, 11)):
        raise AssertionError(f"not the ten steps of a run that was stopped and resumed: {made}")
    at_once = [[step["at_once"] for step in run] for run in made]
    if any(run[:2] != [1, 1] or min(run[2:]) < 2 for run in at_once):
        raise AssertionError(f"not one bin at once in two steps of a process, then several: {at_once}")
    watched = sum(step["watched"] for run in made for step in run)
    said = "launches_that_wait_for_nothing" if place.device.type == "cuda" else "launches_that_read_nothing"
    return {said: watched, "bins_at_once": at_once[0][-1]}


def checks(inputs: Path, folder: Path, device: torch.device) -> list[tuple[str, Callable[[], dict[str, Figure]]]]:
    """All checks of whole runs, by name; each has a folder of that name below ``folder``."""
    # Steps of a GPU take milliseconds: many of them, so that a kill comes between the first save and the end.
    steps, every, kill_after = (9, 2, 4) if device.type == "cpu" else (400, 20, 50)
    placed_steps = 3 if device.type == "cpu" else 10

    def at(name: str) -> Place:
        return Place(inputs, folder / name, device)

    return [
        ("precision", lambda: precision(at("precision"))),
        ("compiled", lambda: compiled(at("compiled"))),
        ("launched", lambda: launched(at("launched"))),
        ("resumed", lambda: resumed(at("resumed"), steps, every, kill_after)),
        ("placed_by_ray", lambda: placed_by_ray(at("placed_by_ray"), placed_steps)),
        ("saved_and_exported", lambda: saved_and_exported(at("saved_and_exported"))),
    ]
