"""Index 0's driver, ``python -m sft_trainer.on_ray.driver``: waits for the raylets of all pods, and calls ``fit()``.

Nothing is tried again here, by Ray neither: the group's coordinator starts the next generation. Why it ended otherwise
is written for the supervisor beside it.
"""

import os
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sft_api.failures import FailureClass
from sft_api.progress import WorkerError
from sft_api.rundir import write_atomically

from .places import (
    ADDRESS_VARIABLE,
    DRIVER_ERROR,
    FILES_VARIABLE,
    FOLDER,
    GPUS_VARIABLE,
    HEAD_VARIABLE,
    JOIN_SECONDS,
    NODES_VARIABLE,
    PLACE_SECONDS_VARIABLE,
    POD_RESOURCE,
    PROCESSES_VARIABLE,
    RANK_RESOURCE,
)
from .worker import hold_place

_POLL_SECONDS = 0.2
_NO_PLACES = "WorkerGroupStartupTimeoutError"
"""What Ray Train calls it; the class is one of its private ones."""
_NOT_STARTED = "WorkerGroupStartupFailedError"
"""The same: a Ray worker died before its function ran."""
_OWN_ERROR = "UserExceptionWithTraceback"
"""As that: what the function of a worker has raised."""


class NotFormedError(Exception):
    """Ray's cluster did not form."""

    def __init__(self, failure: FailureClass, message: str) -> None:
        super().__init__(message)
        self.failure = failure


def missing_pods(alive: list[dict[str, float]], nodes: int) -> list[int]:
    """Indices of the pods whose raylet is in none of the ``alive`` nodes' resources."""
    found = {name.removeprefix(POD_RESOURCE) for resources in alive for name in resources}
    return [index for index in range(nodes) if str(index) not in found]


def _connect(ray: Any, deadline: float) -> None:
    while True:
        try:
            ray.init(
                address=os.environ[HEAD_VARIABLE],
                _node_ip_address=os.environ[ADDRESS_VARIABLE],
                log_to_driver=False,
            )
            return
        except Exception as problem:
            if time.monotonic() > deadline:
                message = f"index 0's own raylet did not answer within {JOIN_SECONDS:.0f} s: {problem}"
                raise NotFormedError(FailureClass.UNKNOWN, message) from problem
            time.sleep(_POLL_SECONDS)


def _resources(ray: Any) -> list[dict[str, float]]:
    """Of each node whose raylet is alive."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _wait_for_pods(ray: Any, nodes: int, deadline: float) -> None:
    while missing := missing_pods(_resources(ray), nodes):
        if time.monotonic() > deadline:
            names = ", ".join(str(index) for index in missing[:10])
            message = (
                f"the raylets of {len(missing)} of {nodes} pods ({names}) did not join index 0's within "
                f"{JOIN_SECONDS:.0f} s: the pods must reach one another on every TCP port"
            )
            raise NotFormedError(FailureClass.PEER_LOST, message)
        time.sleep(_POLL_SECONDS)


def configuration(ranks: int, gpus: int, files: Path) -> dict[str, Any]:
    """What Ray Train is told besides the function: a place for each of ``ranks``, ``gpus`` of a pod, and no retries.

    It keeps what it writes below ``files``.
    """
    from ray.train.backend import BackendConfig
    from ray.train.v2.api.config import FailureConfig, RunConfig, ScalingConfig

    resources = {RANK_RESOURCE: 1.0, **({"GPU": 1.0} if gpus else {})}
    return {
        # Its backend does nothing: the processes form their group themselves.
        "backend_config": BackendConfig(),
        # Ray takes GPUs among the resources for a mistake where it is not told that they are used.
        "scaling_config": ScalingConfig(num_workers=ranks, use_gpu=gpus > 0, resources_per_worker=resources),
        "run_config": RunConfig(
            name="fit",
            storage_path=str(files / "results"),
            failure_config=FailureConfig(max_failures=0, controller_failure_limit=0, max_preemption_failures=0),
        ),
    }


def _fit(ray: Any) -> None:
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
    from ray.train.v2.api.exceptions import ControllerError

    nodes = int(os.environ[NODES_VARIABLE])
    ranks = nodes * int(os.environ[PROCESSES_VARIABLE])
    told = configuration(ranks, int(os.environ[GPUS_VARIABLE]), Path(os.environ[FILES_VARIABLE]))
    trainer = DataParallelTrainer(hold_place, **told)
    began = time.monotonic()
    try:
        trainer.fit()
    except ControllerError as error:
        seconds = time.monotonic() - began
        resources = told["scaling_config"].resources_per_worker
        free = {name: ray.available_resources().get(name, 0.0) for name in resources}
        message = why_unplaced(error.controller_failure, ranks, resources, free, seconds)
        missing = missing_pods(_resources(ray), nodes)
        too_soon = seconds < float(os.environ[PLACE_SECONDS_VARIABLE])
        failure = failure_of_places(error.controller_failure, missing=missing, too_soon=too_soon)
        raise NotFormedError(failure, message) from error


def failure_of_places(failure: Exception, *, missing: Sequence[int], too_soon: bool) -> FailureClass:
    """What it is that ranks have no places: of pods that are ``missing``, and workers that died, others know more.

    ``too_soon``: before Ray's deadline, which is an error while it waited. A mistake repeats, and is judged then.
    """
    name = type(failure).__name__
    lost = missing or name == _NOT_STARTED or (name == _NO_PLACES and too_soon) or _is_echo(failure)
    return FailureClass.PEER_LOST if lost else FailureClass.UNKNOWN


def why_unplaced(
    failure: Exception, ranks: int, resources: Mapping[str, float], free: Mapping[str, float], seconds: float
) -> str:
    """Why Ray started none of the ``ranks``, each of which takes ``resources``, ``seconds`` after it was asked to."""
    asked = f"{ranks} ranks of {resources} each (free: {free})"
    if type(failure).__name__ == _NO_PLACES:
        # Which may be sooner than its deadline: Ray takes an error while it waits for a place that is not there.
        return (
            f"no places were found for {asked} in {seconds:.0f} s: a raylet has gone, or tasks of a callback hold "
            "what ranks need"
        )
    return f"could not start {asked}: {failure}"


def failure_of(error: Exception) -> FailureClass:
    """What ``error`` of the driver is: mostly the pod or Ray worker at the other end is gone, and this is its echo.

    Its own supervisor or the group knows that better. What is no word of Ray's or the network's is nobody's echo.
    """
    if isinstance(error, NotFormedError):
        return error.failure
    return FailureClass.PEER_LOST if _is_echo(error) else FailureClass.UNKNOWN


def _is_echo(error: BaseException) -> bool:
    try:
        from ray.exceptions import RayActorError, RayError, RayTaskError
    except ImportError:
        return False
    if isinstance(error, RayTaskError):
        return _is_echo(error.cause)
    if isinstance(error, RayActorError):
        # With an error of its own at its start it is not gone: it never was.
        return not error.actor_init_failed
    if failures := getattr(error, "worker_failures", None):
        # Ray Train's, by rank: errors of the function, and words of Ray Train on workers that do not answer.
        return not any(type(failure).__name__ == _OWN_ERROR for failure in failures.values())
    return isinstance(error, RayError | ConnectionError | TimeoutError)


def _say(what: str) -> None:
    """In driver.log, of which the supervisor tells the last lines when this takes too long."""
    print(what, flush=True)


def main() -> int:
    """Run until all ranks have ended; returns the exit code."""
    try:
        import ray
        import ray.train  # slow: while the raylets start

        deadline = time.monotonic() + JOIN_SECONDS
        _say("waiting for index 0's own raylet")
        _connect(ray, deadline)
        _say("waiting for the raylets of all pods")
        _wait_for_pods(ray, int(os.environ[NODES_VARIABLE]), deadline)
        _say("waiting for Ray to place the ranks")
        _fit(ray)
    except Exception as error:
        traceback.print_exc()
        failure = failure_of(error)
        words = str(error) if isinstance(error, NotFormedError) else f"{type(error).__name__}: {error}"
        report = WorkerError(failure=failure, message=f"Ray: {words}"[:2000], rank=0)
        write_atomically(Path(os.environ["SFT_RUN_DIR"]) / FOLDER / DRIVER_ERROR, report)
        return 1
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Ray's clean-up at the exit may wait for nodes that are gone.
    os._exit(code)
