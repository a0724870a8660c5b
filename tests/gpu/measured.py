"""Tokens a second, model-FLOPs utilisation and peak memory of the trainer beside a plain loop, in turn: A B B A.

The trainer is as it is by default: FSDP2, and on a GPU compiled layers; what is asked for besides is measured as a
third, A B C C B A: layers that are not compiled, or are, those of Megatron-Core, the plain loop without packing.
"""

import json
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import nan
from pathlib import Path
from statistics import mean
from typing import Any

from sft_api.trainer_config import TrainerConfig
from tests.parity.runs import manifest, resolve, worker_environment

from .figures import Figure, Figures, beside_goals, one_line, say
from .forked import forked
from .inputs import ModelShape
from .isolated import last_words
from .losses import losses_in
from .plain import Settings

_POLL_SECONDS = 0.005
_STARTING_SECONDS = 25.0
"""Assumed of the first run: imports, tokenising, loading."""
_SAME_LOSS = {True: 1e-2, False: 1e-4}
"""How far losses of two strategies, or of compiled layers, may be apart, relative: in bf16 on a GPU, and in fp32."""
_GPU_MEMORY = "79Gi"
"""Of an H100; of a GPU with more the plan makes less use."""
_RATIO_GOAL = 1.2
"""Tokens a second by those of the plain loop, on a GPU."""


class OutOfTimeError(Exception):
    """A run was not done when its time was up."""


@dataclass(frozen=True)
class Effort:
    """How long one run is measured."""

    warm_up_steps: int
    least_steps: int
    seconds: float


@dataclass(frozen=True)
class Seen:
    """What the trainer told of itself after a step, and when it did."""

    step: int
    tokens: int
    time: float
    utilisation: float | None
    saved: int
    """Step of the newest checkpoint; 0 when there is none."""


@dataclass(frozen=True)
class Run:
    """One measured run."""

    tokens_per_second: float
    peak_memory: float
    seconds: float
    """From its start to its end."""
    utilisation: float | None = None
    """As the trainer reckons it."""
    attention: str = ""
    bins_at_once: int = 1
    """In one forward pass, once it was known for how many there is room."""
    compiling: float = 0.0
    """Seconds between loading and the first step, in which layers are compiled where they are."""
    losses: dict[int, float] = field(default_factory=dict)
    """By step."""


@dataclass(frozen=True)
class Scene:
    """A model with its data, and where its runs go."""

    shape: ModelShape
    parameters: int
    model: Path
    data: Path
    folder: Path
    on_gpu: bool
    effort: Effort
    deadline: float
    """Of all its runs, of ``time.monotonic``."""

    def config(
        self, name: str, *, strategy: str = "fsdp", compiled: bool | None = None, **checkpoint: Any
    ) -> TrainerConfig:
        """A run that does not end by itself; ``compiled`` as by default where it is None."""
        shape, losses = self.shape, self.folder / name / "losses.jsonl"
        job = manifest(
            self.folder,
            self.folder / name / "store",
            model={"uri": f"file://{self.model}"},
            data={
                "train": [{"uri": f"file://{self.data}"}],
                "maxLength": shape.bin_tokens,
                "trainOn": "allAssistantMessages",
                "workers": min(8, os.cpu_count() or 1),
            },
            training={
                "steps": 100_000,
                "globalBatchTokens": shape.bins * shape.bin_tokens,
                "maxTokensPerMicroBatch": shape.bin_tokens,
                "precision": "bf16" if self.on_gpu else "fp32",
                "activationCheckpointing": "none",
                **({} if compiled is None else {"compile": compiled}),
                "optimizer": {"learningRate": 1e-5},
                "callbacks": [{"class": "tests.gpu.losses:Losses", "arguments": {"file": str(losses)}}],
            },
            compute={"gpusPerNode": 1 if self.on_gpu else 0, "processesPerNode": 1},
            checkpoint={"uri": f"file://{self.folder / name / 'store'}", **checkpoint},
            export={"atEnd": False},
            strategy={strategy: {}},
            **({"lora": {"rank": shape.rank}} if shape.rank else {}),
        )
        config = resolve(job)
        if not self.on_gpu:
            return config
        # As the operator plans it for the published model, which its table knows, on GPUs whose memory it knows.
        job["spec"]["model"] = {"uri": f"hf://{shape.published}"}
        job["spec"]["compute"]["gpuMemory"] = _GPU_MEMORY
        return config.model_copy(update={"plan": resolve(job).plan})


def _seen(path: Path) -> Seen | None:
    """The progress file, and when it was written; None while there is none."""
    try:
        with path.open() as file:
            written = os.fstat(file.fileno()).st_mtime_ns / 1e9
            progress = json.load(file)
    except (OSError, ValueError):
        return None
    latest = (progress.get("checkpoints") or {}).get("latest") or {}
    return Seen(
        progress["step"],
        progress.get("tokensSeen", 0),
        written,
        progress.get("modelFlopsUtilization"),
        latest.get("step", 0),
    )


def followed(
    scene: Scene, name: str, config: TrainerConfig, enough: Callable[[list[Seen]], bool]
) -> tuple[Run, list[Seen]]:
    """Run the trainer until ``enough`` of the steps that it told of, then end it; nothing is saved at the end."""
    folder = scene.folder / name
    environment = worker_environment(config, folder) | _environment()
    environment |= {
        # The same tokens for all runs: they are made once.
        "SFT_CACHE_DIR": str(scene.folder / "cache"),
        "SFT_PEAK_MEMORY": str(folder / "peak"),
        "SFT_LOADED_SECONDS": str(folder / "loaded"),
        "RANK": "0",
        "LOCAL_RANK": "0",
    }
    (folder / "peak").unlink(missing_ok=True)
    (folder / "run" / "progress.json").unlink(missing_ok=True)
    began, steps = time.monotonic(), []  # type: ignore[var-annotated]
    with forked("tests.gpu.worker", [], environment, scene.folder / f"{name}.log") as worker:
        while not enough(steps):
            if worker.poll() is not None:
                raise RuntimeError(f"the trainer ended with {worker.code}; {last_words(scene.folder, name)}")
            if time.monotonic() > scene.deadline:
                raise OutOfTimeError(f"after {len(steps)} steps")
            seen = _seen(folder / "run" / "progress.json")
            if seen is not None and seen.step > 0 and (not steps or seen != steps[-1]):
                steps.append(seen)
            time.sleep(_POLL_SECONDS)
        if scene.on_gpu:
            time.sleep(0.6)  # it is written twice a second
        peak = _peak(folder / "peak") if scene.on_gpu else _resident(worker.pid)
    warm = [seen for seen in steps if seen.step >= scene.effort.warm_up_steps]
    # What was seen first of a step: later something else may have changed.
    first, last = warm[0], next(seen for seen in warm if seen.step == warm[-1].step)
    rate = (last.tokens - first.tokens) / max(1e-9, last.time - first.time)
    told = [seen.utilisation for seen in warm if seen.utilisation is not None]
    return Run(
        rate,
        peak,
        time.monotonic() - began,
        mean(told) if told else None,
        bins_at_once=_bins_at_once((scene.folder / f"{name}.log").read_text(errors="replace")),
        compiling=float((folder / "loaded").read_text()) if (folder / "loaded").is_file() else 0.0,
        losses=losses_in(folder / "losses.jsonl"),
    ), steps


def _bins_at_once(log: str) -> int:
    """What the trainer says of it in its log, which is nothing where it is one."""
    told = re.findall(r"memory for (\d+) bins in one forward pass", log)
    return int(told[-1]) if told else 1


def _environment() -> dict[str, str]:
    """That of every measured run: as many threads as the supervisor gives to a single process."""
    return {**os.environ, "OMP_NUM_THREADS": str(os.cpu_count() or 1)}


def _peak(path: Path) -> float:
    return float(path.read_text().split()[0])


def _resident(pid: int) -> float:
    """Most resident memory of a living process, in bytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next(float(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))


def ours(scene: Scene, name: str, **how: Any) -> Run:
    """One run of the trainer, ``how`` as for ``Scene.config``."""
    effort = scene.effort

    def enough(steps: list[Seen]) -> bool:
        warm = [seen for seen in steps if seen.step >= effort.warm_up_steps]
        return (
            bool(warm)
            and warm[-1].step - warm[0].step >= effort.least_steps
            and warm[-1].time - warm[0].time >= effort.seconds
        )

    run, _ = followed(scene, name, scene.config(name, **how), enough)
    return run


def compiled(scene: Scene, name: str) -> Run:
    """One run of the trainer with compiled layers."""
    return ours(scene, name, compiled=True)


def eager(scene: Scene, name: str) -> Run:
    """One run of the trainer with layers that are not compiled."""
    return ours(scene, name, compiled=False)


def megatron(scene: Scene, name: str) -> Run:
    """One run of the trainer on layers of Megatron-Core."""
    return ours(scene, name, strategy="megatron")


def plain(scene: Scene, name: str, *, packed: bool = True) -> Run:
    """One run of the plain loop."""
    settings = Settings(
        model=str(scene.model),
        data=str(scene.data),
        device="cuda" if scene.on_gpu else "cpu",
        bin_tokens=scene.shape.bin_tokens,
        bins=scene.shape.bins,
        rank=scene.shape.rank,
        packed=packed,
        warm_up_steps=scene.effort.warm_up_steps,
        least_steps=scene.effort.least_steps,
        seconds=scene.effort.seconds,
        result=str(scene.folder / f"{name}.json"),
    )
    settings.write(scene.folder / f"{name}.settings.json")
    began = time.monotonic()
    arguments = [str(scene.folder / f"{name}.settings.json")]
    with forked("tests.gpu.plain", arguments, _environment(), scene.folder / f"{name}.log") as process:
        code = process.wait(scene.deadline)
    if code is None:
        raise OutOfTimeError("before it told anything")
    if code != 0:
        raise RuntimeError(f"the plain loop ended with {code}; {last_words(scene.folder, name)}")
    result = json.loads(Path(settings.result).read_text())
    seconds = time.monotonic() - began
    return Run(
        result["tokens_per_second"],
        result["peak_memory"],
        seconds,
        attention=result["attention"],
        bins_at_once=result["bins_at_once"],
    )


def plain_unpacked(scene: Scene, name: str) -> Run:
    """One run of the plain loop over rows that are padded."""
    return plain(scene, name, packed=False)


KINDS: dict[str, Callable[[Scene, str], Run]] = {
    "ours": ours,
    "plain": plain,
    "plain_unpacked": plain_unpacked,
    "compiled": compiled,
    "eager": eager,
    "megatron": megatron,
}


def compare(
    scene: Scene,
    figures: Figures,
    *,
    lengths: list[int],
    peak_flops: float,
    pairs: int,
    kinds: Sequence[str] = ("ours", "plain"),
    estimates: Sequence[float] = (),
) -> None:
    """A B, B A: those of ``KINDS`` that are asked for, ``ours`` first, in turn, ``pairs`` (1 or 2) times.

    ``lengths`` are those of the documents, in tokens; ``peak_flops`` is 0 where it is not known. ``estimates`` are the
    bytes that the plan reckons of ``ours`` with one bin in a forward pass, with two, and so on.
    """
    shape = scene.shape.name
    figures.add({f"{shape}_parameters": scene.parameters})
    a_token = scene.shape.training_flops(lengths) / sum(lengths)
    runs: dict[str, list[Run]] = {who: [] for who in kinds}
    assumed = scene.effort.seconds + _STARTING_SECONDS if scene.on_gpu else 0.0
    lasted: dict[str, float] = {}
    for number, who in enumerate([*kinds, *reversed(kinds)][: pairs * len(kinds)]):
        if time.monotonic() + lasted.get(who, assumed) > scene.deadline:
            figures.add({f"{shape}_run_{number}_{who}": "no_time_left"})
            continue
        try:
            run = KINDS[who](scene, f"{number}-{who}")
        except OutOfTimeError as reason:
            figures.add({f"{shape}_run_{number}_{who}": "no_time_left"})
            say(f"{shape}: run {number} ({who}) was ended {reason}")
            continue
        except Exception as error:  # the other runs still tell something
            figures.add({f"{shape}_run_{number}_{who}": "failed"})
            say(f"{shape}: run {number} ({who}) failed: {one_line(error)}")
            continue
        lasted[who] = max(assumed, run.seconds + 3.0)
        runs[who].append(run)
        say(
            f"{shape}: run {number} ({who}): {run.tokens_per_second:.0f} tokens/s, peak {run.peak_memory / 2**30:.2f} "
            f"GiB, {run.seconds:.0f} s with its start"
        )
        figures.add(_figures_of(f"{shape}_{who}", runs[who], a_token, peak_flops))
    if runs["ours"] and estimates:
        figures.add(_beside_estimate(f"{shape}_ours", runs["ours"], estimates, on_gpu=scene.on_gpu))
    _add_ratios(shape, runs, figures, on_gpu=scene.on_gpu)
    if scene.on_gpu:
        goals = {f"{shape}_ours_mfu": scene.shape.utilisation_goal, f"{shape}_ratio_to_plain": _RATIO_GOAL}
        figures.add(beside_goals(figures.numbers(), {name: goal for name, goal in goals.items() if goal}))


def _add_ratios(shape: str, runs: dict[str, list[Run]], figures: Figures, *, on_gpu: bool) -> None:
    """Of ``ours`` to the plain loop, and of what is measured besides to ``ours``, whose losses it must have."""
    besides = [who for who in runs if who in ("compiled", "eager", "megatron") and runs[who]]
    pairs = [("ours", who, f"ratio_to_{who}") for who in ("plain", "plain_unpacked", "eager")]
    pairs += [("plain", "plain_unpacked", "plain_ratio_packed")]
    pairs += [(who, "ours", f"{who}_ratio_to_ours") for who in besides]
    for one, other, name in pairs:
        if runs.get(one) and runs.get(other):
            rates = [mean(run.tokens_per_second for run in runs[who]) for who in (one, other)]
            figures.add({f"{shape}_{name}": rates[0] / rates[1]})
    for who in besides if runs["ours"] else ():
        figures.add(same_losses(f"{shape}_{who}", runs[who][0], runs["ours"][0], _SAME_LOSS[on_gpu]))
    compiling = runs["ours" if on_gpu else "compiled"] if on_gpu or "compiled" in runs else []
    for run, name in zip(compiling, ("seconds", "again_seconds"), strict=False):
        figures.add({f"{shape}_compiling_{name}": run.compiling})


def _beside_estimate(name: str, runs: list[Run], estimates: Sequence[float], *, on_gpu: bool) -> dict[str, Figure]:
    """What the plan reckons of as many bins at once as there were; on a CPU, which counts no peak, that alone."""
    reckoned = estimates[min(runs[-1].bins_at_once, len(estimates)) - 1]
    error = {f"{name}_estimate_error": reckoned / max(run.peak_memory for run in runs) - 1} if on_gpu else {}
    return {f"{name}_estimate_gib": reckoned / 2**30, **error}


def same_losses(name: str, run: Run, other: Run, limit: float) -> dict[str, Figure]:
    """The largest relative difference of the losses of steps that both runs told of; ``failed`` where they differ."""
    steps = sorted(run.losses.keys() & other.losses.keys())
    errors = [abs(run.losses[step] / other.losses[step] - 1) for step in steps]
    figures: dict[str, Figure] = {f"{name}_losses_compared": len(steps), f"{name}_loss_error": max(errors, default=nan)}
    if not errors or not all(error <= limit for error in errors):
        figures[f"{name}_losses"] = "failed"
    return figures


def _figures_of(name: str, runs: list[Run], flops_of_a_token: float, peak_flops: float) -> dict[str, Figure]:
    rate = mean(run.tokens_per_second for run in runs)
    figures: dict[str, Figure] = {
        f"{name}_tokens_per_second": rate,
        f"{name}_peak_memory_gib": max(run.peak_memory for run in runs) / 2**30,
        f"{name}_bins_at_once": runs[-1].bins_at_once,
    }
    if peak_flops:
        figures[f"{name}_mfu"] = rate * flops_of_a_token / peak_flops
    if runs[-1].utilisation is not None:
        figures[f"{name}_mfu_as_told"] = runs[-1].utilisation
    if runs[-1].attention:
        figures[f"{name}_attention"] = runs[-1].attention
    if len(runs) > 1:
        rates = [run.tokens_per_second for run in runs]
        figures[f"{name}_spread"] = (max(rates) - min(rates)) / rate
    return figures
