"""Who says when a pod's workers may start: nobody but the supervisor, or Ray."""

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from .cgroup import Cgroup, available_cpus
from .protocol import Failure, Generation
from .settings import Settings


class Launcher(Protocol):
    """Finds places for the workers of one generation after another. The supervisor starts and ends them."""

    @property
    def begun(self) -> bool:
        """Whether something of a generation may be left to ``end``."""

    @property
    def pids(self) -> Collection[int]:
        """Its own processes."""

    @property
    def lasting(self) -> Collection[int]:
        """Those of its own processes that serve all generations."""

    @property
    def failures(self) -> Sequence[Failure]:
        """Of its own, in this generation."""

    @property
    def environment(self) -> Mapping[str, str]:
        """What workers find in their environment besides."""

    def begin(self, generation: Generation, *, master_address: str) -> None:
        """Look for places. Raises OSError when it cannot."""

    def granted(self) -> set[int]:
        """Local ranks whose workers may run."""

    def rank_ended(self, local_rank: int) -> None:
        """The worker of ``local_rank`` has ended, in whatever way."""

    def look(self, ended: Mapping[int, int], *, memory_ran_out: bool, forming: bool, over: bool) -> None:
        """See which of its own processes have ended; ``forming``: the group does not train yet; ``over``: they may."""

    def end(self) -> None:
        """Kill its own processes; may be repeated."""

    def clear(self) -> None:
        """Nothing of the generation runs any more: remove what is left of it."""

    def close(self) -> None:
        """There will be no other generation."""


class OwnLauncher:
    """The supervisor's own: all may run at once."""

    begun = False
    pids: Collection[int] = frozenset()
    lasting: Collection[int] = frozenset()
    failures: Sequence[Failure] = ()
    environment: Mapping[str, str] = {}

    def __init__(self, processes: int) -> None:
        self._ranks = set(range(processes))

    def begin(self, generation: Generation, *, master_address: str) -> None:
        """Nothing to be done."""

    def granted(self) -> set[int]:
        return self._ranks

    def rank_ended(self, local_rank: int) -> None:
        """Nobody to be told."""

    def look(self, ended: Mapping[int, int], *, memory_ran_out: bool, forming: bool, over: bool) -> None:
        """No processes."""

    def end(self) -> None:
        """No processes."""

    def clear(self) -> None:
        """No files."""

    def close(self) -> None:
        """No files."""


def launcher_for(settings: Settings, cgroup: Cgroup) -> Launcher:
    """As ``compute.launcher`` says, for a pod that may use what ``cgroup`` allows."""
    if settings.launcher == "supervisor":
        return OwnLauncher(settings.processes)
    from .ray_launcher import RayLauncher

    return RayLauncher(settings, cpus=available_cpus(cgroup), memory=cgroup.available_memory())
