"""``sft run``: an SFTJob on this machine, with the trainer, the supervisor and the status of the cluster."""

import fcntl
import os
import shlex
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sft_api.failures import ExitCode, FailureClass
from sft_api.place import TAKE_OVER_VARIABLE
from sft_api.ports import free_port
from sft_api.progress import BEFORE_TRAINING, Phase, Progress
from sft_api.restarts import count_incidents, exhausted
from sft_api.rundir import write_atomically
from sft_api.slow_gpus import slow_gpu
from sft_api.times import timestamp
from sft_api.v1alpha1.job import SFTJob
from sft_api.v1alpha1.status import RestartsStatus

from .console import document, result, say
from .ending import Ending, Times, ending_of, is_retried, run_status
from .errors import UserError
from .interruptions import Interruptions
from .live import Display, incident_line, open_display
from .local import CONFIG_FILE, LocalRun, local_devices, prepare, with_gpu_memory, with_launcher
from .logs import LogTail, last_lines
from .machine import gpu_memory, visible_gpus
from .overrides import in_words
from .summary import summary
from .supervisor import Supervisor
from .words import counted

_POLL_SECONDS = 0.25
_LOG_LINES_SHOWN = 20
_LOCK = ".lock"
_LOG_SAYS_MORE = (
    FailureClass.WORKER_CRASHED,
    FailureClass.UNKNOWN,
    FailureClass.HANG,
    FailureClass.RESTARTS_EXHAUSTED,
)
_OF_A_CLUSTER: dict[str, Any] = {
    "observed_generation": True,
    "conditions": {"__all__": {"observed_generation"}},
    "restarts": {"counted", "repeated", "echoes", "last_failure", "replaced_pods"},
    "goodput": {"marks"},
}
"""Of a status, what says something in a cluster alone."""


@dataclass(frozen=True)
class RunFiles:
    """The files of one run in its folder."""

    config: Path
    log: Path
    run_dir: Path


@dataclass(frozen=True)
class Options:
    """What the command was given besides the manifest."""

    name: str | None = None
    overrides: tuple[str, ...] = ()
    """Each as it was given to --set."""
    processes: int | None = None
    launcher: str | None = None
    fresh: bool = False
    take_over: bool = False
    output: str = "text"
    verbose: bool = False


def run_job(job: SFTJob, manifest: Path, options: Options) -> int:
    """Run ``job`` to its end and print its status; returns the exit code.

    Raises UserError for what cannot work on this machine, before anything is started.
    """
    # A key that is pressed too late, as a second Ctrl-C when the run has just saved, takes away neither what is told of
    # it at the end nor its exit code.
    with ExitStack() as signals:
        return _run_job(job, manifest, options, signals)


def _run_job(job: SFTJob, manifest: Path, options: Options, signals: ExitStack) -> int:
    job = with_launcher(job, options.launcher)
    gpus = visible_gpus(os.environ) if job.spec.compute.gpus_per_node else 0
    job = with_gpu_memory(job, gpu_memory(os.environ) if gpus else None)
    run = prepare(job, processes=options.processes, working_folder=Path.cwd(), environment=os.environ, gpus=gpus)
    with ExitStack() as locks:
        held = {locks.enter_context(_lock(file, folder)) for file, folder in _lock_files(run)}
        if options.fresh:
            set_aside(run, datetime.now())
            held |= {locks.enter_context(_lock(file, folder)) for file, folder in _lock_files(run) if not file.exists()}
        files = _write_files(run)
        _introduce(run, files, options.overrides)
        start, began = datetime.now(UTC), time.monotonic()
        interruptions = signals.enter_context(Interruptions())
        with (
            Supervisor(
                config=files.config,
                processes=run.config.plan.processes,
                port=free_port(),
                run_dir=files.run_dir,
                log=files.log,
                environment={**os.environ, **run.environment, **_take_over(options)},
                inherited=[descriptor for descriptor in held if descriptor is not None],
                grace_seconds=job.spec.run_policy.termination_grace_period_seconds,
            ) as supervisor,
        ):
            display = open_display(live=options.output == "text")
            try:
                follower = Follower(
                    supervisor,
                    display,
                    LogTail(files.log) if options.verbose else None,
                    max_restarts=job.spec.run_policy.max_restarts,
                )
                returncode = follower.follow(interruptions)
            finally:
                display.close()
            ending = ending_of(
                returncode,
                supervisor.termination(),
                interrupted=interruptions.count > 0,
                given_up=follower.given_up,
            )
    times = Times(start, follower.first_step, datetime.now(UTC), seconds=time.monotonic() - began)
    status = run_status(
        run.config.plan, follower.progress, follower.restarts, ending, times, devices=local_devices(run.config)
    )
    lines = summary(
        job,
        status,
        ending,
        seconds=times.seconds,
        command=_command(manifest, options),
        log=files.log,
    )
    _conclude(lines, ending, files, options.output)
    if options.output != "text":
        shown = status.model_dump(mode="json", by_alias=True, exclude_none=True, exclude=_OF_A_CLUSTER)
        document(_without_empty(shown), options.output)
    return ending.exit_code


class Follower:
    """Watches a supervisor until it ends, shows what is new, and judges whether the run may go on."""

    def __init__(
        self,
        supervisor: Supervisor,
        display: Display,
        tail: LogTail | None,
        *,
        max_restarts: int,
    ) -> None:
        self._supervisor = supervisor
        self._display = display
        self._tail = tail
        self._max_restarts = max_restarts
        self._said: set[str] = set()
        self.progress = Progress()
        """The last report."""
        self.restarts = RestartsStatus()
        self.given_up: Ending | None = None
        """How the run ends because it has failed too often."""
        self.first_step: datetime | None = None

    def follow(self, interruptions: Interruptions) -> int:
        """The return code of the supervisor; negative for a signal."""
        handled = 0
        while (returncode := self._supervisor.wait(_POLL_SECONDS)) is None:
            while handled < interruptions.count:
                handled += 1
                self._interrupt(handled + (self.given_up is not None))
            self._look(self._supervisor.progress())
            if interruptions.count == 0:
                self._judge()
        self._look(self._supervisor.last_report(self.progress))
        return returncode

    def _look(self, progress: Progress | None) -> None:
        if self._tail is not None:
            for line in self._tail.new_lines():
                self._display.say(line, dim=True)
        if progress is None:
            return
        # Claims carry what ended attempts of earlier commands: it is theirs.
        incidents = [incident for incident in progress.incidents if self._supervisor.has_seen(incident)]
        progress = self.progress = progress.model_copy(update={"incidents": incidents})
        self.restarts = count_incidents(self.restarts, progress.incidents)
        training = progress.training
        if training.phase not in (Phase.COMPLETE, Phase.FAILED):  # then more is said at the end
            self._display.show(progress)
        if self.first_step is None and training.step > (training.resumed_from_step or 0):
            self.first_step = training.update_time
        for warning in training.warnings:
            self._say_once(warning, f"Warning: {warning}")
        if (outage := training.storage_outage) is not None:
            since = f"nothing can be saved since {timestamp(outage.since)}"
            ends = timestamp(outage.ends)
            # Training goes on meanwhile, but the last save and the export wait: the line of progress says which it is.
            waits, lasts = f"the run waits until {ends}", f"the run ends at {ends} if that lasts"
            then = waits if training.phase in BEFORE_TRAINING else lasts
            self._say_once(f"{since}: {then}", f"Warning: {since}: {outage.message}; {then}")
        for slow in training.slow_gpus:
            self._say_once(f"slow {slow.uuid} {slow.since}", f"Warning: {slow_gpu(slow)}")
        for incident in filter(is_retried, progress.incidents):
            self._say_once(incident.id, incident_line(incident))

    def _judge(self) -> None:
        sentence = exhausted(self.restarts, self._max_restarts)
        if sentence is not None and self.given_up is None:
            ranks = [incident.rank for incident in self.progress.incidents if is_retried(incident)]
            self.given_up = Ending(FailureClass.RESTARTS_EXHAUSTED, sentence, ranks[-1] if ranks else None)
            self._supervisor.interrupt()

    def _say_once(self, key: str, message: str) -> None:
        if key not in self._said:
            self._said.add(key)
            self._display.say(message, fg="yellow")

    def _interrupt(self, count: int) -> None:
        if count == 1:
            self._display.say("Saving a checkpoint, then leaving; again to kill.", fg="yellow")
            self._supervisor.interrupt()
        elif count == 2:
            self._display.say("Killing the workers.", fg="yellow")
            self._supervisor.interrupt()
        else:
            self._supervisor.kill()


def _take_over(options: Options) -> dict[str, str]:
    """What tells the trainer to take its place over; a word of its own for each command."""
    return {TAKE_OVER_VARIABLE: datetime.now(UTC).isoformat()} if options.take_over else {}


def _lock_files(run: LocalRun) -> list[tuple[Path, Path]]:
    """The locks that ``run`` needs, each with what it guards: its folder, and its checkpoints."""
    files = [(run.folder.parent / f".{run.folder.name}.lock", run.folder)]
    if run.store is not None:
        # Inside, because nothing beside a mounted volume may be writable. Also where it is the folder of this run: a
        # run of another folder may name it as its checkpoint.uri.
        files.append((run.store / _LOCK, run.store))
    return files


@contextmanager
def _lock(file: Path, folder: Path) -> Iterator[int | None]:
    """One run at a time in ``folder``; gives the descriptor of the lock ``file``, which the supervisor holds too.

    None in a place for checkpoints in which nothing can be written: nobody trains there, and the trainer, which looks
    at it first, says what is wrong with it, or that the run is complete.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        if file.parent != folder:
            raise UserError(f"cannot write to {file.parent} ({error.strerror}): run sft where you may write") from error
        if os.access(folder, os.W_OK) and not folder.is_file():
            raise UserError(
                f"{file} cannot be opened ({error.strerror}): it keeps a second run out of checkpoint.uri; give "
                f"user {os.getuid()} access to it, or remove it when no other run trains there"
            ) from error
        yield None
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"another sft run trains in {folder}, or is still saving: wait for it, or give this job another "
                "metadata.name (and another checkpoint.uri, if it names one)",
                exit_code=ExitCode.PLACE_IN_USE,
            ) from error
        yield descriptor
    finally:
        os.close(descriptor)


def set_aside(run: LocalRun, now: datetime) -> None:
    """Move what an earlier run left out of the way."""
    if run.is_dummy:
        raise UserError("training.dummyRun leaves nothing to set aside, and what the run has saved alone: omit --fresh")
    if run.store is None:
        raise UserError(
            f"--fresh cannot set {run.config.checkpoint_uri} aside: name another place in spec.checkpoint.uri"
        )
    if run.store.is_dir() and any(entry.name != _LOCK for entry in run.store.iterdir()):
        aside = _unused(run.store.with_name(f"{run.store.name}-until-{now:%Y%m%d-%H%M%S}"))
        try:
            run.store.rename(aside)
        except OSError as error:
            raise UserError(
                f"--fresh cannot rename {run.store} to {aside.name} ({error.strerror}; is it a mounted volume?): "
                "move what is in it away, or name another folder in spec.checkpoint.uri"
            ) from error
        say(f"The earlier run is now in {aside}.")


def _unused(path: Path) -> Path:
    """``path``, or with a number where one before it in the same second took that name."""
    number = 1
    unused = path
    while os.path.lexists(unused):
        number += 1
        unused = path.with_name(f"{path.name}-{number}")
    return unused


def _write_files(run: LocalRun) -> RunFiles:
    files = RunFiles(
        config=run.folder / CONFIG_FILE,
        log=run.folder / "logs" / f"{datetime.now():%Y%m%d-%H%M%S}.log",
        run_dir=run.folder / "run",
    )
    shutil.rmtree(files.run_dir, ignore_errors=True)
    try:
        files.run_dir.mkdir(parents=True)
        files.log.parent.mkdir(exist_ok=True)
        write_atomically(files.config, run.config)
    except OSError as error:
        raise UserError(
            f"cannot write to {run.folder} ({error.strerror}): free space there, or run sft elsewhere"
        ) from error
    return files


def _introduce(run: LocalRun, files: RunFiles, overrides: Sequence[str]) -> None:
    plan, spec = run.config.plan, run.config.spec
    device = "GPU" if spec.compute.gpus_per_node else "CPU"
    say(f"{run.config.job.name}: {counted(plan.processes, 'process')} on {device}, {plan.precision}", bold=True)
    if run.is_dummy:
        say("Dummy run:   random tokens in full batches; no data is read, nothing is saved")
    else:
        say(f"Checkpoints: {run.config.checkpoint_uri}")
    say(f"Log:         {files.log}")
    if overrides:
        say(f"Instead of the manifest: {in_words(overrides)}")
    for note in run.notes:
        say(note)


def _command(manifest: Path, options: Options) -> str:
    """The command that goes on with this run."""
    given = {"--job": options.name, "--processes": options.processes, "--launcher": options.launcher}
    words = [word for option, value in given.items() if value is not None for word in (option, str(value))]
    words += [word for text in options.overrides for word in ("--set", text)]
    return shlex.join(["sft", "run", str(manifest), *words])


def _conclude(lines: Sequence[str], ending: Ending, files: RunFiles, output: str) -> None:
    """Say how it ended; a complete run's result is what the command was asked for, unless that is the status."""
    if ending.failure in _LOG_SAYS_MORE:
        for line in last_lines(files.log, ending.rank, _LOG_LINES_SHOWN):
            say(f"  {line}", dim=True)
    stopped = ending.failure is FailureClass.INTERRUPTED
    colour = "green" if ending.failure is None else "yellow" if stopped else "red"
    tell = result if ending.failure is None and output == "text" else say
    first, *others = lines
    tell(first, fg=colour, bold=True)
    for line in others:
        tell(line)


def _without_empty(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_empty(item) for key, item in value.items() if item not in ("", [], {})}
    return [_without_empty(item) for item in value] if isinstance(value, list) else value
