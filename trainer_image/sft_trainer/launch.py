"""The pod's entry: ``python -m sft_trainer.launch`` starts the workers of a run and sees it through.

Exit code 0 means that the run is complete; the others are those of ``sft_api.failures``.
"""

import signal
from types import FrameType

_early_signals: list[int] = []


def _remember(number: int, _: FrameType | None) -> None:
    _early_signals.append(number)


# Before the imports below: PID 1 loses the signals it has no handler for, and a pod may be stopped at any time.
for _number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(_number, _remember)

import argparse  # noqa: E402
import asyncio  # noqa: E402
import importlib.util  # noqa: E402
import os  # noqa: E402
import shutil  # noqa: E402
import tempfile  # noqa: E402
import traceback  # noqa: E402
from pathlib import Path  # noqa: E402

from pydantic import ValidationError  # noqa: E402

from sft_api import ray  # noqa: E402
from sft_api.failures import FailureClass, exit_code  # noqa: E402
from sft_api.megatron import MISSING, is_installed  # noqa: E402
from sft_api.progress import PROGRESS_PORT, Incident, TerminationMessage  # noqa: E402
from sft_api.trainer_config import CONFIG_PATH, TrainerConfig  # noqa: E402
from sft_api.trust import trust  # noqa: E402
from sft_api.v1alpha1.megatron import megatron_of  # noqa: E402
from sft_trainer.supervisor import identity  # noqa: E402
from sft_trainer.supervisor.descriptors import raise_limit  # noqa: E402
from sft_trainer.supervisor.liveness import SILENT_SECONDS  # noqa: E402
from sft_trainer.supervisor.node import Node  # noqa: E402
from sft_trainer.supervisor.output import Output  # noqa: E402
from sft_trainer.supervisor.settings import Settings  # noqa: E402
from sft_trainer.versions import SLOW_IMPORTS  # noqa: E402

MAX_TERMINATION_BYTES = 4096
INCIDENT_CHARACTERS = 200
"""Of the message of the last incident."""
_SHOWN_FIELDS = 5
"""Of those that are not known."""
WORKER_IMPORTS = (
    "sft_trainer.trainer",
    *SLOW_IMPORTS,
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
)
"""What a worker imports on its way to the first step, the slow ones named."""
MEGATRON = "sft_trainer.strategies.megatron.strategy"
"""Imports Megatron-Core, which takes seconds."""
CHECK = "sft_trainer.check"
_KUBERNETES_TERMINATION_LOG = Path("/dev/termination-log")


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    environment = os.environ.get
    parser = argparse.ArgumentParser(prog="python -m sft_trainer.launch", description="Supervise one pod of a run.")
    parser.add_argument("--config", type=Path, default=Path(environment("SFT_CONFIG", CONFIG_PATH)))
    parser.add_argument("--nodes", type=int, default=environment("SFT_NODES"), help="pods; from the config when absent")
    parser.add_argument("--node-rank", type=int, default=environment("JOB_COMPLETION_INDEX", "0"))
    parser.add_argument("--processes", type=int, help="workers of each pod; from the config when absent")
    parser.add_argument("--coordinator", default=environment("SFT_COORDINATOR"), help="host of index 0")
    parser.add_argument("--port", type=int, default=environment("SFT_PORT", str(PROGRESS_PORT)))
    parser.add_argument("--bind", help="address to listen on; all when absent")
    parser.add_argument("--run-dir", type=Path, default=environment("SFT_RUN_DIR"), help="a new folder when absent")
    parser.add_argument("--instance", default="", help="what ids of its incidents begin with; made up when absent")
    parser.add_argument("--worker-module", default="sft_trainer", help="each worker is python -m of this")
    parser.add_argument("--preload", nargs="*", help="modules imported once for all workers; none: no such process")
    parser.add_argument(
        "--lost-after", type=float, default=60.0, help="seconds of silence without a step after which a pod is lost"
    )
    parser.add_argument(
        "--silent-after", type=float, default=SILENT_SECONDS, help="seconds after which silent workers hang"
    )
    parser.add_argument(
        "--judged-first",
        action="store_true",
        help="after any failure start again only when it was judged: for who reads the reports all the time",
    )
    return parser.parse_args(arguments)


def _config(path: Path) -> TrainerConfig:
    """Raises ValueError with what to change."""
    try:
        return TrainerConfig.model_validate_json(path.read_bytes())
    except OSError as problem:
        raise ValueError(f"the configuration {path} cannot be read: {problem.strerror}") from problem
    except ValidationError as problem:
        unknown = [".".join(map(str, error["loc"])) for error in problem.errors() if error["type"] == "extra_forbidden"]
        if unknown:
            # What a field means that is not known here may be what the run is about: it is never left out.
            raise ValueError(
                f"a newer operator made the configuration of this run, with fields that this image does not know "
                f"({', '.join(unknown[:_SHOWN_FIELDS])}): let it have an image as new (pods.image, or in a new SFTJob "
                "compute.image) and sft retry, or delete the SFTJob (with deletionPolicy: Delete its checkpoints go "
                "too) and apply it again: it goes on in its place"
            ) from problem
        raise ValueError(f"the configuration {path} is not valid: {problem}") from problem


def _settings(options: argparse.Namespace, config: TrainerConfig, run_dir: Path) -> Settings:
    """Raises ValueError with what to change."""
    compute, policy = config.spec.compute, config.spec.run_policy
    nodes = options.nodes or compute.nodes
    if not 0 <= options.node_rank < nodes:
        raise ValueError(f"--node-rank {options.node_rank} (JOB_COMPLETION_INDEX) must be from 0 to {nodes - 1}")
    if options.node_rank > 0 and not options.coordinator:
        raise ValueError("--coordinator (SFT_COORDINATOR) must name the host of index 0 when there are several nodes")
    if compute.launcher == "ray" and (missing := ray.what_is_missing()):
        raise ValueError(
            f"compute.launcher is ray, and in this image {missing}: take the trainer image as it is built here, "
            "install ray[train]==2.60.0 in your own, or leave compute.launcher out"
        )
    megatron = megatron_of(config.spec)
    if megatron is not None and not is_installed():
        raise ValueError(MISSING)
    ours = options.preload is None and _is_ours(options.worker_module)
    return Settings(
        config=options.config.absolute(),
        job_uid=config.job.uid,
        place="" if config.spec.training.dummy_run else config.checkpoint_uri,
        nodes=nodes,
        node=options.node_rank,
        gpus=compute.gpus_per_node,
        processes=options.processes or compute.effective_processes_per_node,
        coordinator=options.coordinator or "127.0.0.1",
        port=options.port,
        bind=options.bind,
        run_dir=run_dir,
        module=options.worker_module,
        preload=_worker_imports(config) if ours else tuple(options.preload or ()),
        # What it looks at is the same from every node.
        check=CHECK if ours and options.node_rank == 0 else None,
        lost_after=options.lost_after,
        silent_after=options.silent_after,
        token=identity.group_token(config.job.uid, os.environ),
        version=identity.code_version(),
        instance=options.instance,
        pod_uid=os.environ.get(identity.POD_VARIABLE, ""),
        host=os.environ.get(identity.HOST_VARIABLE, ""),
        judged_first=options.judged_first,
        launcher=compute.launcher,
        splits_matrices=megatron is not None and megatron.tensor_parallel_degree > 1,
        address=os.environ.get(identity.ADDRESS_VARIABLE) or options.bind or "127.0.0.1",
        progress_deadline_seconds=policy.progress_deadline_seconds,
        storage_deadline_seconds=policy.storage_deadline_seconds,
        grace_seconds=policy.termination_grace_period_seconds,
    )


def _worker_imports(config: TrainerConfig) -> tuple[str, ...]:
    return WORKER_IMPORTS if megatron_of(config.spec) is None else (*WORKER_IMPORTS, MEGATRON)


def _is_ours(module: str) -> bool:
    """Whether ``module`` is the worker that lies beside this file."""
    spec = importlib.util.find_spec(f"{module}.__main__")
    return spec is not None and spec.origin == str(Path(__file__).with_name("__main__.py"))


def _termination_log() -> Path | None:
    if given := os.environ.get("SFT_TERMINATION_LOG"):
        return Path(given)
    return _KUBERNETES_TERMINATION_LOG if _KUBERNETES_TERMINATION_LOG.exists() else None


def termination_json(end: TerminationMessage) -> str:
    """``end`` as JSON of at most 4096 bytes: words are cut where needed, incidents have the room that is left."""
    incidents, end = end.incidents, end.model_copy(update={"incidents": []})
    if len(_as_json(end.model_copy(update={"message": "", "warning": ""})).encode()) > MAX_TERMINATION_BYTES:
        end = end.model_copy(update={"spent": None})
    text = _as_json(end)
    for words in ("warning", "message", "stopped_early", "dummy_run"):
        while (excess := len(text.encode()) - MAX_TERMINATION_BYTES) > 0 and (said := getattr(end, words)):
            # A character takes one to six bytes in JSON: cut the least that can be enough, and look again.
            end = end.model_copy(update={words: said[: max(0, len(said) - excess // 6 - 1)]})
            text = _as_json(end)
    told: list[Incident] = []
    for incident in reversed(incidents):
        # They are counted, and what is shown is the message of the last one.
        words = "" if told else incident.message[:INCIDENT_CHARACTERS]
        told.insert(0, incident.model_copy(update={"message": words}))
        longer = _as_json(end.model_copy(update={"incidents": told}))
        if len(longer.encode()) > MAX_TERMINATION_BYTES:
            break
        text = longer
    return text


def _as_json(end: TerminationMessage) -> str:
    return end.model_dump_json(by_alias=True, exclude_none=True, exclude_defaults=True)


_kept: list[asyncio.AbstractEventLoop] = []
"""Until the process ends: a thread that collected one would take its signal handlers away, which the main one alone may
do, and a signal would be written to a descriptor that is closed."""


def _supervise(options: argparse.Namespace, output: Output) -> TerminationMessage:
    made = options.run_dir is None
    run_dir = Path(tempfile.mkdtemp(prefix="sft-run-")) if made else options.run_dir.absolute()
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        try:
            config = _config(options.config)
            # For this process and for the workers, which are given its environment.
            trust(config.ca_bundle, run_dir, os.environ)
            settings = _settings(options, config, run_dir)
        except ValueError as problem:
            return TerminationMessage(failure=FailureClass.CONFIG_ERROR, message=str(problem)[:2000])
        loop = asyncio.new_event_loop()
        _kept.append(loop)
        return loop.run_until_complete(Node(settings, output).run(_early_signals))
    except Exception as problem:
        # Its workers die with this process; the pod's end must say why.
        traceback.print_exc()
        message = f"the supervisor failed: {type(problem).__name__}: {problem}"
        return TerminationMessage(failure=FailureClass.UNKNOWN, message=message[:2000])
    finally:
        if made:
            shutil.rmtree(run_dir, ignore_errors=True)


def main(arguments: list[str] | None = None) -> int:
    """Run the supervisor; returns the exit code."""
    options = _parse(arguments)
    raise_limit()
    output = Output()
    end = _supervise(options, output)
    text = termination_json(end)
    if log := _termination_log():
        try:
            log.write_text(text)
        except OSError as problem:
            output.say(f"the termination message could not be written to {log}: {problem}")
    output.say(f"end: {text}")
    output.flush(2.0)
    return 0 if end.failure is None else int(exit_code(end.failure))


if __name__ == "__main__":
    code = main()
    # Not sys.exit: threads that wait for a name server or a full pipe must not hold up the end of the pod.
    os._exit(code)
