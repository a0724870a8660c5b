"""The numbers of the trainer against what they must be; each check returns its worst error."""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from sft_api.trainer_config import TrainerConfig
from sft_trainer.optim import learning_rate
from sft_trainer.preparation import prepare
from sft_trainer.prepared import Prepared
from sft_trainer.reporting import Reporter
from tests.adapters_of_peft import plain_name
from tests.errors import worst
from tests.worker_processes import descendants, is_worker

from .reference import peft_model, reference_loss, reference_model, reference_steps
from .runs import capture, manifest, resolve, step_records

Gradients = list[dict[str, torch.Tensor]]

_STANDING = Path(__file__).parents[1] / "standing"


def relative_error(actual: Gradients, expected: Gradients) -> float:
    """Distance of the gradient (of all parameters, as one vector) from what is expected, relative to its length.

    The largest of all steps. By parameter it would measure rounding: where large terms cancel, fp32 is off by 1e-6.
    """
    return worst(
        (
            sum((one[name] - other[name]).double().square().sum() for name in other)
            / sum(gradient.double().square().sum() for gradient in other.values())
        )
        .sqrt()
        .item()
        for one, other in zip(actual, expected, strict=True)
    )


def loss_error(store: Path, expected: list[float]) -> float:
    """Largest relative error of the recorded losses."""
    losses = [record["loss"] for record in step_records(store).values()]
    return worst(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))


def against_reference(
    inputs: Path,
    work: Path,
    *,
    packing: str,
    processes: int,
    steps: int,
    strategy: dict[str, Any] | None = None,
    **chosen: Any,
) -> dict[str, float]:
    """Losses, gradients and the last evaluation of the trainer against a plain Hugging Face loop from the same weights.

    ``strategy`` is the section ``strategy.fsdp``, ``chosen`` goes into the section ``training``.
    """
    training: dict[str, Any] = {
        "steps": steps,
        "globalBatchSize": 32,
        # Adam moves a weight whose gradient is nothing but rounding as far as any other: with its usual eps, two right
        # trainers part after the first step. This one is small beside gradients and large beside their rounding.
        "optimizer": {"learningRate": 1e-3, "eps": 1e-4},
        **chosen,
    }
    if packing == "none":
        training["microBatchSize"] = 8 // processes
    job = manifest(
        inputs,
        work / "store",
        processes=processes,
        training=training,
        data={
            "packing": packing,
            "trainOn": "allAssistantMessages",
            "eval": [{"name": "held-out", "uri": f"file://{inputs}/data/eval.jsonl", "split": "train[:24]"}],
        },
        strategy={"fsdp": strategy or {}},
    )
    config = resolve(job)
    captured = capture(config, work / "run")
    model = reference_model(config)
    expected = _reference(config, work, steps, model)
    held_out = reference_loss(model, _prepared(config, work).eval["held-out"])
    return {
        "evaluation": abs(step_records(work / "store")[steps]["evalLoss"] / held_out - 1),
        "loss": loss_error(work / "store", [step.loss for step in expected]),
        "gradients": relative_error(captured, [step.gradients for step in expected]),
        "norm": norm_error(work / "store", [step.grad_norm for step in expected]),
        **_aux_error(work / "store", [step.aux_loss for step in expected]),
    }


def _aux_error(store: Path, expected: list[float]) -> dict[str, float]:
    """Largest relative error of the recorded losses of routers, where there is any."""
    records = step_records(store).values()
    if not any(expected):
        return {}
    return {"aux": worst(abs(record["auxLoss"] / loss - 1) for record, loss in zip(records, expected, strict=True))}


def against_peft(
    inputs: Path, work: Path, *, processes: int, steps: int, lora: dict[str, Any] | None = None, **chosen: Any
) -> dict[str, float]:
    """Losses and gradients of adapters, and what they are after ``steps``, against peft in a plain loop.

    ``lora`` is merged into the section of that name, ``chosen`` goes into the section ``training``.
    """
    job = manifest(
        inputs,
        work / "store",
        processes=processes,
        lora={"rank": 4, "alpha": 16, "excludeModules": ["k_proj"], "basePrecision": "fp32", **(lora or {})},
        training={"steps": steps, "globalBatchSize": 32, "optimizer": {"learningRate": 1e-2, "eps": 1e-4}, **chosen},
        data={"trainOn": "allAssistantMessages"},
    )
    config = resolve(job)
    captured = capture(config, work / "run")
    model = peft_model(config)
    expected = _reference(config, work, steps, model)
    adapters = load_file(work / "store" / "export" / "adapter_model.safetensors")
    wanted = {plain_name(name): p.detach() for name, p in model.named_parameters() if p.requires_grad}
    return {
        "loss": loss_error(work / "store", [step.loss for step in expected]),
        "gradients": relative_error(captured, [step.gradients for step in expected]),
        "norm": norm_error(work / "store", [step.grad_norm for step in expected]),
        **_aux_error(work / "store", [step.aux_loss for step in expected]),
        "adapters": relative_error([{plain_name(name): value for name, value in adapters.items()}], [wanted]),
    }


def norm_error(store: Path, expected: list[float]) -> float:
    """Largest relative error of the recorded gradient norms."""
    norms = [record["gradNorm"] for record in step_records(store).values()]
    return worst(abs(a - b) / b for a, b in zip(norms, expected, strict=True))


def _reference(config: TrainerConfig, work: Path, steps: int, model: Any = None) -> list[Any]:
    prepared = _prepared(config, work)
    rates = [learning_rate(config.spec, config.plan.learning_rate, step, prepared.total_steps) for step in range(steps)]
    return reference_steps(config, prepared, rates, model)


def _prepared(config: TrainerConfig, work: Path) -> Prepared:
    os.environ["SFT_CACHE_DIR"] = str(work / "run" / "cache")
    return prepare(config, Reporter(work / "run" / "reference", writes=False), torch.device("cpu"))


def accumulation(inputs: Path, work: Path) -> float:
    """Gradients of eight micro-batches of one example against those of one of eight."""
    results = []
    for size in (1, 8):
        job = manifest(
            inputs,
            work / f"micro-{size}" / "store",
            training={"steps": 1, "globalBatchSize": 8, "microBatchSize": size},
            data={"packing": "none"},
        )
        results.append(capture(resolve(job), work / f"micro-{size}"))
    return relative_error(results[0], results[1])


def processes(inputs: Path, work: Path) -> float:
    """Gradients on two processes against those on one, with packed micro-batches."""
    results = []
    for count in (1, 2):
        job = manifest(
            inputs,
            work / f"world-{count}" / "store",
            processes=count,
            training={"steps": 1, "globalBatchTokens": 4096, "maxTokensPerMicroBatch": 1024},
        )
        results.append(capture(resolve(job), work / f"world-{count}"))
    return relative_error(results[1], results[0])


def killed_and_resumed(
    inputs: Path, work: Path, *, processes: int, steps: int, seed: int, sections: dict[str, Any] | None = None
) -> tuple[int, int]:
    """Kill a random worker with SIGKILL at a random step of ``sft run``; compare with the undisturbed run.

    ``sections`` are merged into the spec. Returns the step after which it was killed, and the number of step records
    and exported files of weights that differ.
    """
    generator = random.Random(seed)
    straight, disturbed = work / "straight", work / "disturbed"
    kill_after = generator.randrange(3, steps - 1)
    victim = generator.randrange(processes)
    sft_run(inputs, straight, processes, steps, sections=sections)
    sft_run(inputs, disturbed, processes, steps, kill_after=kill_after, victim=victim, sections=sections)
    attempts = list((disturbed / "store" / "attempts").iterdir())
    if len(attempts) != 2:
        raise AssertionError(f"the disturbed run has {len(attempts)} attempts instead of 2")
    return kill_after, differences(straight / "store", disturbed / "store", steps)


def differences(one: Path, other: Path, steps: int) -> int:
    """How many of the records of ``steps`` steps and of the exported tensors differ, or are not there."""
    first, second = step_records(one), step_records(other)
    compared = ("loss", "gradNorm", "learningRate", "tokens", "trainedTokens", "epoch")
    different = sum(
        step not in first or step not in second or any(first[step][key] != second[step][key] for key in compared)
        for step in range(1, steps + 1)
    )
    digests = [_of_weights(store / "export") for store in (one, other)]
    return different + (digests[0] != digests[1])


def _of_weights(export: Path) -> dict[str, bytes]:
    """Digest of each file of weights; FileNotFoundError where there is none."""
    found = {file.name: hashlib.sha256(file.read_bytes()).digest() for file in export.glob("*.safetensors")}
    if not found:
        raise FileNotFoundError(export)
    return found


def sft_run(
    inputs: Path,
    folder: Path,
    count: int,
    steps: int,
    *,
    every: int = 3,
    kill_after: int | None = None,
    victim: int = 0,
    sections: dict[str, Any] | None = None,
    **training: Any,
) -> None:
    """``sft run`` of ``steps`` on ``count`` processes, a checkpoint ``every`` so many.

    ``training`` is merged into the section of that name, ``sections`` into the others.

    The worker of rank ``victim`` gets SIGKILL after step ``kill_after``, where the run stands still meanwhile.
    """
    folder.mkdir(parents=True)
    others = dict(sections or {})
    training = {**others.pop("training", {}), **training}
    stands = folder / "stands"
    if kill_after is not None:
        arguments = {"step": str(kill_after), "stands": str(stands)}
        training["callbacks"] = [{"class": "standing:StandsStill", "arguments": arguments}]
    job = manifest(
        inputs,
        folder / "store",
        processes=count,
        training={"steps": steps, "globalBatchTokens": 2048, "maxTokensPerMicroBatch": 512, **training},
        checkpoint={"uri": f"file://{folder}/store", "everySteps": every},
        **others,
    )
    (folder / "job.yaml").write_text(json.dumps(job))
    environment = {**os.environ, "SFT_CACHE_DIR": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    sources = [str(_STANDING), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    environment["PYTHONPATH"] = os.pathsep.join(str(Path(each).resolve()) for each in sources)
    with (folder / "sft.log").open("w") as log:
        run = subprocess.Popen(
            [sys.executable, "-m", "sft_cli.main", "run", str(folder / "job.yaml"), "--output", "json", "--verbose"],
            env=environment,
            # What a run leaves besides its store is below sft-runs, by the name that all have.
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=log,
        )
        try:
            if kill_after is not None:
                _kill_worker(run, folder, stands, victim)
            code = run.wait(timeout=300)
        finally:
            run.terminate()
    if code != 0:
        raise AssertionError(f"sft run ended with {code}: " + (folder / "sft.log").read_text()[-3000:])


def _kill_worker(run: "subprocess.Popen[bytes]", folder: Path, stands: Path, victim: int) -> None:
    """SIGKILL to one of the workers as soon as ``stands`` says that the run stands still; the next ones do not."""
    deadline = time.monotonic() + 200
    while not stands.exists():
        if time.monotonic() > deadline or run.poll() is not None:
            raise AssertionError("the step was not reached: " + (folder / "sft.log").read_text()[-3000:])
        time.sleep(0.005)
    workers = [pid for pid in descendants(run.pid) if is_worker(pid)]
    os.kill(workers[victim], signal.SIGKILL)
    stands.with_suffix(".over").touch()
