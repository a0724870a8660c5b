"""What a supervisor knows when it starts."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .liveness import SILENT_SECONDS


@dataclass(frozen=True)
class Settings:
    """From the command line, the environment and the run's configuration, in that order."""

    config: Path
    job_uid: str
    nodes: int
    node: int
    """Index of this pod."""
    processes: int
    """Workers of each pod."""
    coordinator: str
    """Host of index 0."""
    port: int
    """Of the supervisors' HTTP servers, the same in all pods."""
    bind: str | None
    """Address to listen on; all when None."""
    run_dir: Path
    module: str
    """Each worker is ``python -m`` this."""
    preload: tuple[str, ...]
    """What workers import, for the process that forks them; empty to start each worker anew."""
    check: str | None
    """``python -m`` this looks for what would end the run early, before ``preload``; None: nothing does."""
    lost_after: float
    """Seconds without a word and without a step after which a member is lost, and so is index 0 for its members."""
    progress_deadline_seconds: int | None
    grace_seconds: int
    """Between SIGTERM and the SIGKILL of whoever sent it."""
    storage_deadline_seconds: float = 3600.0
    """How long a store that took what the run saved is waited for."""
    silent_after: float = SILENT_SECONDS
    """Seconds without a word of any worker, outside of training, after which they hang."""
    gpus: int = 0
    """Of each pod."""
    splits_matrices: bool = False
    """Whether workers share matrices: they send while they compute."""
    place: str = ""
    """Where the run saves; empty where nothing of it may be kept."""
    launcher: Literal["supervisor", "ray"] = "supervisor"
    address: str = "127.0.0.1"
    """By which the other pods reach this one."""
    judged_first: bool = False
    """After any failure wait until it was judged, not only after those that repeat."""
    token: str = ""
    """Of the group."""
    version: str = ""
    """Of the trainer's code."""
    instance: str = ""
    """What the ids of this supervisor's incidents begin with; it makes one up where this is empty."""
    pod_uid: str = ""
    host: str = ""
    """Kubernetes node of this pod; empty outside of a cluster."""

    @property
    def world_size(self) -> int:
        """Workers of all pods."""
        return self.nodes * self.processes

    @property
    def ranks(self) -> range:
        """Of the workers of this pod."""
        return range(self.node * self.processes, (self.node + 1) * self.processes)

    @property
    def kill_after_seconds(self) -> float:
        """When workers that were asked to stop are killed: early enough to report it before our own end."""
        return self.grace_seconds - min(10.0, max(1.0, 0.1 * self.grace_seconds))

    @property
    def give_up_after_seconds(self) -> float:
        """When those that survive even that are left behind: no later could our own end be told."""
        return (self.kill_after_seconds + self.grace_seconds) / 2
