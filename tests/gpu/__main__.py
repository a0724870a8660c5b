"""``make gpu``: what only a GPU can show, and how fast the trainer is there beside a plain loop; needs no network.

    python -m tests.gpu [--device cuda|cpu] [--minutes 9] [--only PART ...] [--short] [--record] [--logs FOLDER]

First checks: every part that has a path of its own on a GPU, then whole runs; each in a process of its own, ``ok`` or
what is wrong in one line. Then, for models in the shapes of Qwen3-0.6B and 1.7B with random weights, tokens a second,
model-FLOPs utilisation and peak memory of the trainer and of a plain Hugging Face loop in turn (A B B A), and what a
save costs; of the smaller one also with layers that are not compiled, of the larger one also on layers of Megatron-
Core where that is installed. Then adapters in the shape of Qwen3-8B, once (A B). All is printed as it comes; the last
lines repeat every figure as key=value. The exit code is 0 when every check is ok and every run was measured: what
there was no time for counts as neither. A goal that is missed is told at the end, and changes no exit code. On a CPU
the same with small shapes; what needs a GPU says ``skipped=cpu``.
"""

import argparse
import importlib
import importlib.util
import os
import shutil
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from .figures import Figures, say, text_of, warn
from .isolated import Check

_NEEDED = {
    "torch": "torch",
    "transformers": "transformers",
    "tokenizers": "tokenizers",
    "safetensors": "safetensors",
    "blake3": "blake3",
    "huggingface_hub": "huggingface-hub",
    "numpy": "numpy",
    "pyarrow": "pyarrow",
    "jinja2": "jinja2",
    "pydantic": "pydantic",
    "pydantic_core": "pydantic-core",
    "annotated_types": "annotated-types",
    "typing_inspection": "typing-inspection",
    "prometheus_client": "prometheus-client",
    "yaml": "pyyaml",
    "click": "click",
    "rich": "rich",
}
"""Modules without which nothing runs, and the packages they come in."""
_PRELOADED = (
    "sft_trainer.models",  # before transformers, from which it hides what would make that start CUDA
    "torch._dynamo",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen3.modeling_qwen3",
    "sft_trainer.trainer",
)
"""Imported once, for all processes that are forked from this one."""
_PRELOAD_VARIABLE = "SFT_GPU_PRELOAD"
_SHARE_OF_CHECKS = 0.5
"""Of the time, at most; the rest is for what is measured."""
_CHECK_SECONDS = 150.0
"""Of one check on a GPU, at most."""
_CHECKS = "checks"
"""The name of their part."""
_LAST_SECONDS = 8.0
"""Kept back to end what runs and to print the figures."""


def missing_packages() -> list[str]:
    """Packages that this Python lacks."""
    return [package for module, package in _NEEDED.items() if importlib.util.find_spec(module) is None]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--minutes", type=float, help="the command ends within so many: 9, on a CPU 60")
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="PART",
        help="only these: checks (all, or some by their names), or models by the names that their figures begin with",
    )
    parser.add_argument("--short", action="store_true", help="only some of the checks and one pair of runs")
    parser.add_argument(
        "--record", action="store_true", help="of each model only where the time of some steps goes, by a trace of them"
    )
    parser.add_argument("--logs", type=Path, help="folder for the output of every check and run; dropped when absent")
    options = parser.parse_args()
    # A GPU is lent for minutes; the processors of a test machine may be busy with anything.
    options.minutes = options.minutes or (9.0 if options.device == "cuda" else 60.0)
    return options


def main() -> int:
    """Check and measure; the exit code."""
    began = time.monotonic()
    options = _options()
    if missing := missing_packages():
        warn(f"{sys.executable} lacks {', '.join(missing)}: install them, or see docs/development/gpu.md for wheels")
        return 2
    figures = Figures()
    _end_in_words(figures)
    # Nothing is fetched, and nothing waits for a network that is not there.
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TOKENIZERS_PARALLELISM": "false"}
    # Asking whether there is a GPU must not start CUDA in the process that is forked.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    deadline = began + 60.0 * options.minutes - _LAST_SECONDS
    with tempfile.TemporaryDirectory(prefix="sft-gpu-", ignore_cleanup_errors=True) as scratch:
        work = Path(scratch)
        try:
            _check_and_measure(options, figures, work, began, deadline)
        finally:
            if options.logs is not None:
                _keep_logs(work, options.logs)
    failed, left_out = figures.with_value("failed"), figures.with_value("no_time_left")
    missed = [name.removesuffix("_reached") for name in figures.with_value("no")]
    for name in missed:
        value, goal = (text_of(figures.numbers()[which]) for which in (name, f"{name}_goal"))
        say(f"not reached: {name} is {value}, its goal is {goal}")
    figures.add({"seconds": time.monotonic() - began, "goals_missed": len(missed)})
    figures.add({"left_out": len(left_out), "failures": len(failed)})
    figures.print_all()
    return 1 if failed or left_out else 0


def _check_and_measure(
    options: argparse.Namespace, figures: Figures, work: Path, began: float, deadline: float
) -> None:
    """Everything that the time allows."""
    if _PRELOAD_VARIABLE not in os.environ:
        for module in _PRELOADED:
            importlib.import_module(module)
        say(f"imports took {time.monotonic() - began:.0f} s")
        if _cuda_was_started():
            _begin_without_preloading(deadline)
    from .models import measured_on

    models = [model.shape.name for model in measured_on(options.device, short=options.short)]
    checks = [name for group in _checks(options.device, work) for name, _ in group]
    only = set(options.only or [_CHECKS, *models])
    if unknown := only - {_CHECKS, *models, *checks}:
        there = f"there are {', '.join((_CHECKS, *models))}, and of checks {', '.join(checks)}"
        warn(f"--only: there is no {', '.join(sorted(unknown))}; {there}")
        raise SystemExit(2)
    share = began + _SHARE_OF_CHECKS * (deadline - began)
    limited = options.device == "cuda" and only & {*models}
    _check(options, figures, work, share if limited else deadline)
    _measure(options, figures, work, deadline)


def _cuda_was_started() -> bool:
    """Whether this process can no longer be forked: CUDA does not survive it."""
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            # Opened when CUDA is initialised, and not by counting devices.
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith("/dev/nvidia-uvm"):
                return True
    return False


def _begin_without_preloading(deadline: float) -> NoReturn:
    """Become this command again, in which every process imports for itself."""
    say("CUDA was started by the imports: begun again, and every process imports for itself")
    os.environ[_PRELOAD_VARIABLE] = "no"
    minutes = (deadline + _LAST_SECONDS - time.monotonic()) / 60
    os.execv(sys.executable, [sys.executable, "-m", "tests.gpu", *sys.argv[1:], "--minutes", f"{minutes:.2f}"])


def _checks(device_name: str, work: Path) -> tuple[list[tuple[str, Check]], list[tuple[str, Check]]]:
    """By their names: those of parts, the inputs first, and those of whole runs."""
    import torch

    from . import (
        estimate,
        flash,
        fused_blocks,
        fused_losses,
        gpu_times,
        kernels,
        linear_attention,
        megatron,
        runs,
        steps,
        updates,
    )
    from .inputs import make_small_inputs

    # Naming a device does not start CUDA in this process, which is forked.
    device = torch.device(device_name, 0) if device_name == "cuda" else torch.device("cpu")
    parts: list[tuple[str, Check]] = [
        (name, lambda check=check: check(device))  # type: ignore[misc]
        for name, check in (
            ("inputs", lambda _: make_small_inputs(work / "inputs")),
            ("device", kernels.device_facts),
            ("attention", kernels.attention),
            ("explicit_attention", kernels.explicit_attention),
            ("gated_delta_nets", linear_attention.gated_delta_nets),
            ("flash_attention", flash.flash_attention),
            ("loss", kernels.loss),
            ("fused_losses", fused_losses.fused_losses),
            ("fused_blocks", fused_blocks.fused_blocks),
            ("staging", kernels.staging),
            ("group", kernels.group),
            ("flight_recorder", kernels.flight_recorder),
            ("monitor", kernels.monitor),
            ("gpu_times", gpu_times.gpu_times),
            ("memory", kernels.memory),
            ("out_of_memory", kernels.out_of_memory),
            ("together", lambda device: steps.together(work / "inputs", device)),
            ("skipped", lambda device: steps.skipped(work / "inputs", device)),
            ("adapters", lambda device: steps.adapters(work / "inputs", device)),
            ("packed_base", lambda device: steps.packed_base(work / "inputs", device)),
            ("packed_experts", lambda device: steps.packed_experts(work / "inputs", device)),
            ("estimate", lambda device: estimate.estimates(work / "inputs", device)),
            ("estimate_8b", lambda device: estimate.of_8b(work / "inputs", device)),
            ("megatron", lambda device: megatron.beside_fsdp(work / "inputs", device)),
            ("megatron_estimate", lambda device: megatron.estimates(work / "inputs", device)),
            ("offload", lambda device: steps.offload(work / "inputs", device)),
            ("updates", lambda device: updates.updates(work / "inputs", device)),
        )
    ]
    return parts, runs.checks(work / "inputs", work / "checks", device)


def _check(options: argparse.Namespace, figures: Figures, work: Path, deadline: float) -> None:
    from .isolated import Outcome, last_lines, run_isolated

    parts, whole = _checks(options.device, work)
    if options.only and _CHECKS not in options.only:
        # The inputs are of all parts.
        parts = [part for part in parts if part[0] in ("inputs", *options.only)]
        whole = [part for part in whole if part[0] in options.only]

    def told(outcome: Outcome) -> None:
        # Kept before it is told: who reads of it may stop this command, and expects it among the last lines.
        figures.keep({f"check_{outcome.name}": outcome.verdict, **(outcome.figures or {})})
        said = f": {outcome.said}" if outcome.said else ""
        say(f"check {outcome.name}: {outcome.verdict} ({outcome.seconds:.1f} s){said}")
        if outcome.verdict == "failed":
            for line in last_lines(work / "checks", outcome.name):
                say(f"    {line}")
        figures.add(outcome.figures or {})

    (work / "checks").mkdir()
    # Side by side where there are processors for it: each whole run spends most of its time on imports.
    limit = _CHECK_SECONDS if options.device == "cuda" else deadline - time.monotonic()
    together = max(1, min(4, (os.cpu_count() or 1) // 4))
    for checks, at_once in ((parts, 1), (whole[:1] if options.short else whole, together)):
        run_isolated(checks, work / "checks", deadline=deadline, limit=limit, at_once=at_once, on_end=told)


def _measure(options: argparse.Namespace, figures: Figures, work: Path, deadline: float) -> None:
    from . import inputs
    from .measured import Scene, compare
    from .models import lacking, measured_on
    from .recorded import record
    from .saving import save_and_load

    on_gpu = options.device == "cuda"
    if not (work / "inputs").is_dir():
        return
    models = measured_on(options.device, short=options.short)
    models = [model for model in models if not options.only or model.shape.name in options.only]
    if models:
        inputs.make_long_rows(work / "inputs", work / "rows.jsonl", scale=1.0 if on_gpu else 0.1)
    for number, model in enumerate(models):
        shape = model.shape
        folder = work / shape.name
        share = model.share / sum(other.share for other in models[number:])
        until = time.monotonic() + (deadline - time.monotonic()) * share
        facts = _prepared(shape, work, folder, options.device, until, figures)
        if facts is None:
            continue
        if options.record:
            rows = work / "rows.jsonl"
            record(
                Scene(shape, facts["parameters"], folder / "model", rows, folder, on_gpu, model.effort, until), figures
            )
            shutil.rmtree(folder / "model", ignore_errors=True)
            continue
        for kind, package in lacking(model).items():
            say(f"{shape.name}: {kind} is not measured, as {sys.executable} lacks {package}")
            figures.add({f"{shape.name}_{kind}": f"skipped=no_{package.replace('-', '_')}"})
        scene = Scene(
            shape, facts["parameters"], folder / "model", work / "rows.jsonl", folder, on_gpu, model.effort, until
        )
        compare(
            scene,
            figures,
            lengths=facts["lengths"],
            peak_flops=facts["peak_flops"],
            pairs=model.pairs,
            kinds=[kind for kind in model.kinds if kind not in lacking(model)],
            estimates=facts["estimates"],
        )
        if model.saves:
            save_and_load(scene, figures)
        # A checkpoint has 12 bytes for every parameter: room for those of the next model.
        shutil.rmtree(folder / "saving", ignore_errors=True)
        shutil.rmtree(folder / "model", ignore_errors=True)


def _prepared(
    shape: Any, work: Path, folder: Path, device: str, deadline: float, figures: Figures
) -> dict[str, Any] | None:
    """Make the model of ``shape`` in a process that may use the GPU; its parameters, lengths of the documents, and what
    the plan reckons of memory.

    None where that failed or there was no time for it, which ``figures`` then say.
    """
    from .isolated import Outcome, last_lines, run_isolated

    facts: dict[str, Any] = {}

    def make() -> dict[str, Any]:
        import torch
        from transformers import AutoTokenizer

        from sft_trainer.flops import peak_flops

        from .estimate import of_folder
        from .inputs import make_model
        from .measured import Effort, Scene
        from .plain import read_examples

        where = torch.device(device)
        parameters = make_model(shape, work / "inputs", folder / "model", where)
        examples = read_examples(str(work / "rows.jsonl"), AutoTokenizer.from_pretrained(folder / "model"))
        lengths = [len(ids) for ids, _ in examples if len(ids) <= shape.bin_tokens]
        on_gpu, rows = device == "cuda", work / "rows.jsonl"
        scene = Scene(shape, parameters, folder / "model", rows, folder, on_gpu, Effort(0, 0, 0.0), deadline)
        estimates = of_folder(folder / "model", scene.config("estimate"), shape.bins)
        facts = {"parameters": parameters, "lengths": lengths, "peak_flops": peak_flops(where) or 0.0}
        return {**facts, "estimates": estimates}

    def told(outcome: Outcome) -> None:
        say(f"model {shape.name}: {outcome.verdict} ({outcome.seconds:.1f} s){outcome.said and ': ' + outcome.said}")
        if outcome.verdict == "failed":
            for line in last_lines(work / "checks", outcome.name):
                say(f"    {line}")
        if outcome.verdict != "ok":
            figures.add({f"{shape.name}_inputs": outcome.verdict})
        facts.update(outcome.figures or {})

    folder.mkdir()
    run_isolated(
        [(f"model_{shape.name}", make)],
        work / "checks",
        deadline=deadline,
        limit=120.0,
        at_once=1,
        on_end=told,
    )
    return facts or None


def _end_in_words(figures: Figures) -> None:
    """When it is stopped from outside, print what is known so far."""

    def stop(number: int, _: FrameType | None) -> NoReturn:
        signal.signal(number, signal.SIG_IGN)
        figures.add({"stopped_by": signal.Signals(number).name})
        figures.print_all()
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stop)


def _keep_logs(work: Path, target: Path) -> None:
    """All logs as one file, since they are many: each under its path."""
    target.mkdir(parents=True, exist_ok=True)
    with (target / "gpu.log").open("w") as together:
        for log in sorted(work.rglob("*.log")):
            together.write(f"==> {log.relative_to(work)}\n{log.read_text(errors='replace')[-200_000:]}\n")


if __name__ == "__main__":
    sys.exit(main())
