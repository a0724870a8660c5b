"""Weights & Biases and MLflow as callbacks. Their libraries are not in the trainer's image.

A thread of the first process talks to the tracker: it neither holds the run up nor ends it, whatever becomes of it. A
run that goes on after an interruption goes on in the tracker too, by the place that it saves in.
"""

import contextlib
import hashlib
import logging
import math
import os
import queue
import re
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus
from importlib.util import find_spec
from typing import Any, ClassVar, NamedTuple

from .base import Callback, Control, End, Log, Run

log = logging.getLogger("sft_trainer")

_SECONDS = 30.0
"""How long the end of a run waits for its tracker."""
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0
"""Seconds until a tracker that took nothing is tried again: the first ones and the longest; each is twice the last."""
_MOST_WAITING = 10_000
_MOST_METRICS, _MOST_PARAMETERS, _LONGEST_PARAMETER = 1000, 100, 6000
"""Of one request to MLflow."""


class Point(NamedTuple):
    """Figures of a step."""

    step: int
    time: float
    """Seconds since the epoch."""
    values: dict[str, float]


class Tracker(Callback, ABC):
    """What the two have in common: a queue, and a thread that empties it."""

    library: ClassVar[str]

    def __init__(self) -> None:
        if find_spec(self.library) is None:
            raise ModuleNotFoundError(f"{self.library} is not installed: add it to compute.image (pip install)")
        self._queue: queue.Queue[Point | End] = queue.Queue(_MOST_WAITING)
        self._thread: threading.Thread | None = None
        self._troubles = 0
        self._until = 0.0
        """Until when the end of the run waits."""

    def on_start(self, run: Run, control: Control) -> None:
        if run.is_first_process:
            self._thread = threading.Thread(target=self._work, args=(run,), name=self.library, daemon=True)
            self._thread.start()

    def on_log(self, log: Log, control: Control) -> None:
        if self._thread is not None:
            self._put(Point(log.step, log.values.get("time", time.time()), numbers(log.values)))

    def on_end(self, end: End) -> None:
        if self._thread is None:
            return
        self._until = time.monotonic() + _SECONDS
        with contextlib.suppress(queue.Full):
            # One that is slow may have made room by then; how the run ended is not to be lost for a step.
            self._queue.put(end, timeout=_SECONDS)
        self._thread.join(max(0.0, self._until - time.monotonic()))
        if self._thread.is_alive():
            log.warning("%s does not answer, and may lack the last steps", self.library)

    def _put(self, item: Point) -> None:
        try:
            self._queue.put_nowait(item)
        except queue.Full:
            self._trouble("it is too slow, and lacks some steps")

    def _work(self, run: Run) -> None:
        begun, ended, pause = False, False, 0.0
        end: End | None = None
        held: list[Point] = []
        while not ended:
            for item in self._waiting(pause) if end is None else ():
                if isinstance(item, End):
                    end, pause = item, 0.0
                else:
                    held.append(item)
            try:
                if not begun:
                    self.begin(run)
                    begun = True
                if held:
                    self.send(held)
                    held = []
                if end is not None:
                    self.finish(end)
                    ended = True
                pause = 0.0
            except Exception as error:
                # What was not taken goes with what comes next.
                self._trouble(_said(error))
                held = held[-_MOST_WAITING:]
                pause = min(max(_FIRST_PAUSE, 2 * pause), _LONGEST_PAUSE)
                if end is not None:
                    # Nothing comes next. What took nothing all the time, as with a wrong key, will not now.
                    ended = not begun or time.monotonic() + pause > self._until
                    if ended:
                        log.warning("%s lacks how the run ended, and the last steps: %s", self.library, _said(error))
                    else:
                        time.sleep(pause)

    def _waiting(self, pause: float) -> Iterator[Point | End]:
        """The next item, waited for, and all behind it; after ``pause`` seconds what came meanwhile, up to the end."""
        again = time.monotonic() + pause
        if not pause:
            yield self._queue.get()
        while True:
            try:
                item = self._queue.get(timeout=max(0.0, again - time.monotonic()))
            except queue.Empty:
                return
            yield item
            if isinstance(item, End):
                return

    def _trouble(self, words: str) -> None:
        """Say what went wrong, at the first time."""
        self._troubles += 1
        if self._troubles == 1:
            log.warning("%s: %s (said once)", self.library, words)

    @abstractmethod
    def begin(self, run: Run) -> None:
        """Make the run in the tracker, or go on with it."""

    @abstractmethod
    def send(self, points: Sequence[Point]) -> None:
        """Record some."""

    @abstractmethod
    def finish(self, end: End) -> None:
        """Say how it ended."""


class WeightsAndBiases(Tracker):
    """wandb, which reads its key from the environment (``WANDB_API_KEY``)."""

    library = "wandb"

    def __init__(self, project: str, entity: str = "", tags: str = "") -> None:
        """``tags`` are separated by commas."""
        super().__init__()
        self._project, self._entity = project, entity
        self._tags = [tag.strip() for tag in tags.split(",") if tag.strip()]
        self._folder = ""
        self._broken = False
        """Whether the process that wandb has beside this one may be gone: nothing is sent by that run any more."""

    def begin(self, run: Run) -> None:
        import wandb

        self._told = run
        # One, however often this is tried.
        self._folder = self._folder or os.environ.get("WANDB_DIR") or tempfile.mkdtemp()
        self._run: Any = wandb.init(
            project=self._project,
            entity=self._entity or None,
            id=run_id(run),
            name=run.name,
            resume="allow",
            tags=self._tags or None,
            config=described(run),
            dir=self._folder,
            settings=wandb.Settings(console="off", disable_git=True, save_code=False, silent=True),
        )
        # Its own steps may only rise, and steps that were lost are made again.
        self._run.define_metric("*", step_metric="step")
        log.info("wandb: %s", self._run.url or self._run.dir)

    def send(self, points: Sequence[Point]) -> None:
        with self._whole():
            for point in points:
                self._run.log({**point.values, "step": point.step})

    def finish(self, end: End) -> None:
        with self._whole():
            self._run.finish(exit_code=int(end.outcome == "failed"))

    @contextlib.contextmanager
    def _whole(self) -> Iterator[None]:
        """Around what is sent: after an error by a process anew, as one that was killed answers nothing again."""
        if self._broken:
            import wandb

            with contextlib.suppress(Exception):
                wandb.teardown()
            self.begin(self._told)
            self._broken = False
        try:
            yield
        except Exception:
            self._broken = True
            raise


class MLflow(Tracker):
    """mlflow, or mlflow-skinny; where ``tracking_uri`` is empty ``MLFLOW_TRACKING_URI`` says it."""

    library = "mlflow"

    def __init__(self, experiment: str, tracking_uri: str = "") -> None:
        super().__init__()
        self._experiment, self._uri = experiment, tracking_uri
        self._run_id = ""
        self._untold: list[Any] = []
        """Parameters of a run that was made here, which the server has not taken yet."""

    def begin(self, run: Run) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param
        from mlflow.exceptions import MlflowException

        self._client: Any = MlflowClient(self._uri or None)
        if not self._run_id:
            experiment = self._experiment_id()
            found = self._client.search_runs([experiment], f"tags.`sft.run` = '{run_id(run)}'", max_results=1)
            if found:
                self._client.update_run(found[0].info.run_id, status="RUNNING")
                self._run_id = found[0].info.run_id  # known once it is told: the next try would leave that out
                return
            tags = {"sft.run": run_id(run), "sft.checkpointUri": run.checkpoint_uri}
            self._run_id = self._client.create_run(experiment, run_name=run.name, tags=tags).info.run_id
            self._untold = [Param(name, str(value)[:_LONGEST_PARAMETER]) for name, value in flat(described(run))]
        while self._untold:
            try:
                self._client.log_batch(self._run_id, params=self._untold[:_MOST_PARAMETERS])
            except MlflowException as error:
                if error.get_http_status_code() != HTTPStatus.BAD_REQUEST:
                    raise
                # It takes none of these at any time: figures are not held up by what they cannot be.
                self._trouble(_said(error))
            del self._untold[:_MOST_PARAMETERS]

    def _experiment_id(self) -> str:
        found = self._client.get_experiment_by_name(self._experiment)
        if found is None:
            try:
                return str(self._client.create_experiment(self._experiment))
            except Exception:  # another run was faster
                found = self._client.get_experiment_by_name(self._experiment)
                if found is None:
                    raise
        return str(found.experiment_id)

    def send(self, points: Sequence[Point]) -> None:
        from mlflow.entities import Metric

        metrics = [
            Metric(name, value, int(point.time * 1000), point.step)
            for point in points
            for name, value in point.values.items()
        ]
        for start in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(self._run_id, metrics=metrics[start : start + _MOST_METRICS])

    def finish(self, end: End) -> None:
        status = {"complete": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
        self._client.set_terminated(self._run_id, status[end.outcome])


def _said(error: Exception) -> str:
    """The words of ``error``, without what stands before a host: libraries name addresses as they were given them, also
    with a password, which a Secret may have held."""
    return re.sub(r"(?<=://)[^/?#\s'\"]*@", "", str(error)) or type(error).__name__


def run_id(run: Run) -> str:
    """The same at every start of a run, and for no other place. A claim is one of its namespace: others have others of
    that name."""
    place = run.checkpoint_uri
    if place.startswith("pvc://"):
        place = f"{run.namespace}/{place}"
    return f"{run.name}-{hashlib.sha256(place.encode()).hexdigest()[:12]}"


def described(run: Run) -> dict[str, Any]:
    """What a tracker shows of a run: of its environment the names alone, as who sees the tracker may be others than who
    may see the SFTJob, and a value may be a key."""
    told = {"namespace": run.namespace, "checkpointUri": run.checkpoint_uri, "totalSteps": run.total_steps, **run.spec}
    compute = run.spec.get("compute") or {}
    if environment := compute.get("env"):
        named = [{name: value for name, value in each.items() if name != "value"} for each in environment]
        told["compute"] = {**compute, "env": named}
    return told


def flat(value: Mapping[str, Any] | Sequence[Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Paths and values of all that is in ``value``: ``data.train.0.uri``."""
    items = value.items() if isinstance(value, Mapping) else enumerate(value)
    for name, item in items:
        if isinstance(item, Mapping | list):
            yield from flat(item, f"{path}{name}.")
        else:
            yield f"{path}{name}", item


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """The finite figures of a step by name, those of single evaluation sets by ``evalLosses/name``."""
    return dict(_numbers({name: value for name, value in values.items() if name not in ("step", "time")}))


def _numbers(values: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{path}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            yield f"{path}{name}", float(value)
