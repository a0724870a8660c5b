"""Index 0's driver, ``python -m sft_trainer.on_ray.driver``: waits for the raylets of all pods, and calls ``fit()``.

Nothing is tried again here, by Ray neither: the group's coordinator starts the next generation. Why it ended otherwise
is written for the supervisor beside it.
"""

import os
import sys
import time
import traceback
from collections.abc import Mapping
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


def _wait_for_pods(ray: Any, nodes: int, deadline: float) -> None:
    while missing := missing_pods([node["Resources"] for node in ray.nodes() if node["Alive"]], nodes):
        if time.monotonic() > deadline:
            names = ", ".join(str(index) for index in missing[:10])
            message = (
                f"the raylets of {len(missing)} of {nodes} pods ({names}) did not join index 0's within "
                f"{JOIN_SECONDS:.0f} s: the pods must reach one another on every TCP port"
            )
            raise NotFormedError(FailureClass.PEER_LOST, message)
        time.sleep(_POLL_SECONDS)


def _fit(ray: Any) -> None:
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.backend import BackendConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
    from ray.train.v2.api.exceptions import ControllerError

    ranks = int(os.environ[NODES_VARIABLE]) * int(os.environ[PROCESSES_VARIABLE])
    resources = {RANK_RESOURCE: 1.0, **({"GPU": 1.0} if int(os.environ[GPUS_VARIABLE]) else {})}
    trainer = DataParallelTrainer(
        hold_place,
        # Its backend does nothing: the processes form their group themselves.
        backend_config=BackendConfig(),
        scaling_config=ScalingConfig(num_workers=ranks, resources_per_worker=resources),
        run_config=RunConfig(
            name="fit",
            storage_path=str(Path(os.environ[FILES_VARIABLE]) / "results"),
            failure_config=FailureConfig(max_failures=0, controller_failure_limit=0),
        ),
    )
    try:
        trainer.fit()
    except ControllerError as error:
        free = {name: ray.available_resources().get(name, 0.0) for name in resources}
        message = why_unplaced(error.controller_failure, ranks, resources, free)
        raise NotFormedError(FailureClass.UNKNOWN, message) from error


def why_unplaced(failure: Exception, ranks: int, resources: Mapping[str, float], free: Mapping[str, float]) -> str:
    """Why Ray started none of the ``ranks``, each of which takes ``resources``."""
    asked = f"{ranks} ranks of {resources} each (free: {free})"
    if type(failure).__name__ == _NO_PLACES:
        seconds = float(os.environ[PLACE_SECONDS_VARIABLE])
        return (
            f"no places were found for {asked} within {seconds:.0f} s: a raylet has gone, or tasks of a callback hold "
            "what ranks need"
        )
    return f"could not start {asked}: {failure}"


def main() -> int:
    """Run until all ranks have ended; returns the exit code."""
    try:
        import ray
        import ray.train  # slow: while the raylets start

        deadline = time.monotonic() + JOIN_SECONDS
        _connect(ray, deadline)
        _wait_for_pods(ray, int(os.environ[NODES_VARIABLE]), deadline)
        _fit(ray)
    except Exception as error:
        traceback.print_exc()
        # Most often the pod or Ray worker at the other end is gone, which its own supervisor or the group knows better.
        failure = error.failure if isinstance(error, NotFormedError) else FailureClass.PEER_LOST
        words = str(error).strip() or type(error).__name__
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
