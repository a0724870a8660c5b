"""A group of pods on a clock of its own, for tables of what it does."""

from datetime import UTC, datetime, timedelta

from sft_api.failures import FailureClass
from sft_api.progress import Phase, TrainingProgress
from sft_trainer.supervisor.group import Group
from sft_trainer.supervisor.ledger import Ledger
from sft_trainer.supervisor.protocol import Ended, Failure, Generation, Order, OrderKind, Outcome, Report
from sft_trainer.supervisor.refusals import Refusals

START = datetime(2026, 1, 1, tzinfo=UTC)
GRACE = 30.0
STORAGE_DEADLINE = 600.0


class World:
    """A group with members that obey at once, unless a test says otherwise."""

    def __init__(
        self, size: int, *, judged_first: bool = False, lost_after: float = 10.0, claimed: bool = False
    ) -> None:
        self.now = 0.0
        self.ports = 20_000
        self.group = Group(
            size=size,
            incarnation="one",
            grace_seconds=GRACE,
            lost_after=lost_after,
            ledger=Ledger(run="one", judged_first=judged_first, jitter=lambda: 0.5),
            refusals=Refusals(STORAGE_DEADLINE, now=lambda: START + timedelta(seconds=self.now), claimed=claimed),
            new_generation=self.new_generation,
            wall_clock=lambda: START + timedelta(seconds=self.now),
        )
        self.reports = {node: self.report(node, f"instance-{node}") for node in range(size)}

    def new_generation(self) -> Generation:
        self.ports += 1
        return Generation(id=self.ports, number=self.group.starts + 1, master_port=self.ports)

    @staticmethod
    def report(node: int, instance: str) -> Report:
        return Report(job_uid="uid", node=node, processes=1, instance=instance, host=f"host-{node}")

    def say(self, node: int, **changes: object) -> Order:
        """``node`` reports with ``changes``; the order it gets."""
        self.reports[node] = self.reports[node].model_copy(update=changes)
        self.group.hear(self.reports[node], self.now)
        while self.group.advance(self.now):
            pass
        return self.group.order_for(self.reports[node])

    def obey(self, *nodes: int) -> None:
        """``nodes`` (all by default) do what they are told, and say so, until nothing changes."""
        nodes = nodes or tuple(self.reports)
        for _ in range(4):
            for node in nodes:
                order = self.say(node)
                running = order.generation.id if order.generation else None
                ended = self.reports[node].ended
                if ended is not None and ended.generation == running:
                    running = None
                self.say(node, received=order.id, running=running)

    def ends(
        self,
        node: int,
        failure: FailureClass | None = None,
        *,
        after: float = 0.0,
        outage: bool = False,
        superseded: bool = False,
        attempt: int = 0,
    ) -> Order:
        """The workers of ``node`` end by themselves."""
        generation = self.reports[node].running
        assert generation is not None
        cause = failure and Failure(
            failure=failure,
            message=f"{failure} on {node}",
            time=START + timedelta(seconds=self.now + after),
            rank=node,
            outage=outage,
            superseded=superseded,
            attempt=attempt,
        )
        outcome = Outcome.FAILED if cause else Outcome.COMPLETE
        ended = Ended(generation=generation, outcome=outcome, failure=cause)
        return self.say(node, running=None, ended=ended)

    def replace(self, node: int, instance: str = "new") -> None:
        """Another pod for ``node``."""
        self.reports[node] = self.report(node, instance)
        self.say(node)

    def passes(self, seconds: float, *silent: int) -> None:
        """Time goes by; all but ``silent`` members go on reporting."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 1.0)
            for node in self.reports:
                if node not in silent:
                    self.say(node)

    def judge(self) -> None:
        """Somebody reads what went wrong, judges, and reads on."""
        for _ in range(2):
            self.group.ledger.was_read()

    @property
    def kind(self) -> OrderKind:
        return self.group.order.kind

    @property
    def incidents(self) -> list[tuple[FailureClass, bool]]:
        return [(incident.failure, incident.disruption) for incident in self.group.ledger.incidents]


def steps(world: World, step: int, phase: Phase = Phase.TRAINING) -> None:
    """Rank 0 reports ``step``."""
    world.group.observe(TrainingProgress(phase=phase, step=step, median_step_seconds=1.0), world.now)
