"""How workers are started in this pod, for one generation after another, and that nothing is left of the one before."""

import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from sft_api.failures import FailureClass

from .cgroup import Cgroup, available_cpus
from .environment import worker_environment
from .launcher import launcher_for
from .output import Output
from .protocol import Failure, Generation
from .settings import Settings
from .spawn import Starter
from .traces import recorder_environment
from .workers import Workers, kill_children


class Starts:
    """Starts each worker as soon as the launcher has a place for it."""

    def __init__(self, settings: Settings, output: Output, cgroup: Cgroup) -> None:
        self._settings = settings
        self._cgroup = cgroup
        self._starter = Starter(settings.module, settings.preload, output)
        self._launcher = launcher_for(settings, cgroup)
        self._recorder = recorder_environment(settings.run_dir)
        self._generation: Generation | None = None
        """That runs, or ran last."""
        self._master_address = ""
        self._started: set[int] = set()
        """Its local ranks."""
        self._not_started: list[Failure] = []

    @property
    def failures(self) -> Sequence[Failure]:
        """Why not all of this generation run, besides the ends of workers themselves."""
        return [*self._not_started, *self._launcher.failures]

    def prepare(self) -> bool:
        """Get ready to start workers; True when they can be started now."""
        return self._starter.prepare(self.environment())

    def environment(self, local_rank: int = 0) -> dict[str, str]:
        """Of a worker of this generation; before the first one of any that imports only."""
        generation = self._generation
        environment = worker_environment(
            self._settings,
            {**self._recorder, **os.environ},
            local_rank=local_rank,
            generation=generation.id if generation else 0,
            master_address=self._master_address,
            master_port=generation.master_port if generation else 0,
            cpus=available_cpus(self._cgroup),
        )
        return {**environment, **self._launcher.environment}

    def begin(self, generation: Generation, workers: Workers, *, master_address: str) -> None:
        """Start ``workers`` of ``generation``, those first that need not wait for a place."""
        self._generation, self._master_address = generation, master_address
        self._started, self._not_started = set(), []
        try:
            self._launcher.begin(generation, master_address=master_address)
        except OSError as problem:
            self._fail("the launcher", problem)
        self.go_on(workers)

    def go_on(self, workers: Workers) -> None:
        """Start those for which there is a place by now."""
        settings = self._settings
        if workers.killed or self._not_started:
            return
        for local_rank in sorted(self._launcher.granted() - self._started):
            rank = settings.ranks[local_rank]
            prefix = f"[rank {rank}] ".encode() if settings.world_size > 1 else b""
            try:
                workers.start(self._starter.start_worker, self.environment(local_rank), rank, prefix)
            except OSError as problem:
                self._fail("a worker", problem, rank)
                return
            self._started.add(local_rank)

    def note(
        self,
        ended: Mapping[int, int],
        workers: Workers | None,
        *,
        memory_ran_out: bool,
        forming: bool,
        stopping: bool = False,
    ) -> None:
        """Take in what was reaped. ``workers`` are those that run, if any; ``forming``: none of them trains yet;
        ``stopping``: this pod was asked to stop."""
        # What asked may have asked the launcher's processes too, which need not heed it as the workers do: these save.
        saving = stopping and not forming
        over = workers is None or workers.killed or workers.left_well or saving
        self._launcher.look(ended, memory_ran_out=memory_ran_out, forming=forming, over=over)
        for end in workers.ends if workers else []:
            self._launcher.rank_ended(end.rank % self._settings.processes)
        self._starter.tend(ended)

    def cleared(self, workers: Workers | None = None) -> bool:
        """Whether nothing is left of the last generation, whose ``workers`` have ended; kills what is.

        A launcher whose ranks have all left as they should stays, for those of other pods, until the next order.
        """
        stays = self._launcher.pids if workers is not None and workers.left_well else frozenset[int]()
        if not stays:
            self._launcher.end()
        server = self._starter.server_pid
        gone = kill_children(spare={*stays, *self._launcher.lasting, *([] if server is None else [server])})
        if gone and not stays:
            self._launcher.clear()
        return gone

    @property
    def begun(self) -> bool:
        """Whether a launcher that stayed must be cleared yet."""
        return self._launcher.begun

    def close(self) -> None:
        """No other generation will be started."""
        self._launcher.close()

    def _fail(self, what: str, problem: OSError, rank: int | None = None) -> None:
        self._not_started = [
            Failure(
                failure=FailureClass.WORKER_CRASHED,
                message=f"{what} could not be started: {problem}",
                time=datetime.now(UTC),
                rank=rank,
            )
        ]
