"""What the monkey does to a job, and what the job's status must count for it."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.cluster.node import ctr
from tests.cluster.processes import Supervisor
from tests.e2e import disturbances
from tests.e2e.stage import Stage
from tests.worker_processes import descendants, is_worker

_CHILDREN = ("services", "configmaps", "networkpolicies")


class NothingToHarm(Exception):
    """What the deed is done to is not there now: another deed is chosen."""


@dataclass(frozen=True)
class Deed:
    """One thing to do to a job of two pods.

    ``failures`` and ``disruptions`` are what it counts as in ``status.restarts``. While the job is not training, what
    kills no pod may find nobody to fail, or a process that is ending: then it counts as that at most
    (``certain`` False).
    """

    name: str
    do: Callable[[Stage, str, random.Random], None]
    failures: int = 0
    disruptions: int = 0
    certain: bool = False


def kill_worker(stage: Stage, name: str, dice: random.Random) -> None:
    """SIGKILL to a worker."""
    os.kill(_worker(_container(stage, name, dice)), signal.SIGKILL)


def kill_supervisor(stage: Stage, name: str, dice: random.Random) -> None:
    """SIGKILL to the first process of a pod."""
    os.kill(_container(stage, name, dice), signal.SIGKILL)


def kill_container(stage: Stage, name: str, dice: random.Random) -> None:
    """The container runtime ends the task: all of its processes at once."""
    container = _running_pod(stage, name, dice)["status"]["containerStatuses"][0]["containerID"].partition("://")[2]
    ctr("tasks", "kill", "--all", "--signal=SIGKILL", container)


def delete_pod(stage: Stage, name: str, dice: random.Random) -> None:
    """kubectl delete pod: SIGTERM, and a replacement."""
    stage.kubectl("delete", "pod", _running_pod(stage, name, dice)["metadata"]["name"], "--wait=false")


def force_delete_pod(stage: Stage, name: str, dice: random.Random) -> None:
    """The pod is gone at once, as when its node loses power."""
    pod = _running_pod(stage, name, dice)["metadata"]["name"]
    stage.kubectl("delete", "pod", pod, "--grace-period=0", "--force", "--wait=false")


def kill_operator(stage: Stage, name: str, dice: random.Random) -> None:
    """The leader, without a chance to say goodbye."""
    disturbances.kill_operator(stage, name)


def kill_api_server(stage: Stage, name: str, dice: random.Random) -> None:
    """SIGKILL to the API server, and a new one some seconds later."""
    disturbances.restart_api_server(stage, name)


def take_store_away(stage: Stage, name: str, dice: random.Random) -> None:
    """The object store says nothing for 5 to 20 seconds."""
    pid = Supervisor(stage.store.folder.parent).pid("versitygw")
    if pid is None:
        raise NothingToHarm("no object store")
    _freeze(pid, dice.uniform(5, 20))


def freeze_worker(stage: Stage, name: str, dice: random.Random) -> None:
    """A worker stands still for 5 to 15 seconds."""
    _freeze(_worker(_container(stage, name, dice)), dice.uniform(5, 15))


def freeze_supervisor(stage: Stage, name: str, dice: random.Random) -> None:
    """The first process of a pod stands still for 3 to 8 seconds."""
    _freeze(_container(stage, name, dice), dice.uniform(3, 8))


def delete_children(stage: Stage, name: str, dice: random.Random) -> None:
    """One kind of what the operator made beside the Job is deleted."""
    stage.kubectl("delete", dice.choice(_CHILDREN), f"--selector=sftjob.dev/job={name}", "--wait=false")


DEEDS = (
    Deed("worker-killed", kill_worker, failures=1),
    Deed("supervisor-killed", kill_supervisor, failures=1, certain=True),
    Deed("container-killed", kill_container, failures=1, certain=True),
    Deed("pod-deleted", delete_pod, disruptions=1, certain=True),
    Deed("pod-force-deleted", force_delete_pod, disruptions=1, certain=True),
    Deed("operator-killed", kill_operator),
    Deed("api-server-killed", kill_api_server),
    # Also while a group starts: what is done here is done after the first step, and a run that has begun waits for its
    # store (docs/continuing.md).
    Deed("store-away", take_store_away),
    Deed("worker-frozen", freeze_worker),
    Deed("supervisor-frozen", freeze_supervisor),
    Deed("children-deleted", delete_children),
)


def _running_pod(stage: Stage, name: str, dice: random.Random) -> dict[str, Any]:
    """One of the job's pods whose container runs and that nobody has deleted."""
    found = json.loads(stage.kubectl("get", "pods", f"--selector=sftjob.dev/job={name}", "-o", "json"))["items"]
    alive = [pod for pod in found if "deletionTimestamp" not in pod["metadata"] and _runs(pod)]
    if not alive:
        raise NothingToHarm("no pod runs")
    chosen: dict[str, Any] = dice.choice(sorted(alive, key=lambda pod: str(pod["metadata"]["name"])))
    return chosen


def _runs(pod: dict[str, Any]) -> bool:
    return any("running" in each["state"] for each in pod["status"].get("containerStatuses", ()))


def _container(stage: Stage, name: str, dice: random.Random) -> int:
    """Pid, on this machine, of the first process of one of the job's pods."""
    status = _running_pod(stage, name, dice)["status"]
    container = status["containerStatuses"][0]["containerID"].partition("://")[2]
    for line in ctr("tasks", "ls").splitlines():
        if line.startswith(container):
            return int(line.split()[1])
    raise NothingToHarm("its container has just ended")


def _worker(container: int) -> int:
    for pid in filter(is_worker, descendants(container)):
        return pid
    raise NothingToHarm("no worker runs")


def _freeze(pid: int, seconds: float) -> None:
    os.kill(pid, signal.SIGSTOP)
    thaw = threading.Timer(seconds, _go_on, [pid])
    thaw.daemon = True
    thaw.start()


def _go_on(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        return
