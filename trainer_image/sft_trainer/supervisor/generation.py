"""Pure: what became of one generation of workers, pod by pod."""

from dataclasses import dataclass, field
from datetime import datetime

from sft_api.failures import FailureClass
from sft_api.v1alpha1 import SpentSeconds

from .causes import is_consequence
from .protocol import Ended, Failure, Generation


@dataclass
class GenerationState:
    """Of the generation that runs, or is ending."""

    generation: Generation
    instances: dict[int, str]
    hosts: dict[int, str]
    """Kubernetes nodes of the pods."""
    started: float
    began: datetime
    """The same, by the clock on the wall."""
    ended: dict[int, Ended] = field(default_factory=dict)
    failed: list[Failure | None] = field(default_factory=list)
    """Of those that neither are complete nor left as they were asked."""
    interrupted: int = 0
    """How many left as they were asked."""
    lost: dict[int, Failure] = field(default_factory=dict)
    first_interrupted: float | None = None
    stop_was_asked: bool = False
    spent: SpentSeconds | None = None
    """As its rank 0 told it last; None before it has said anything."""
    untold: float = 0.0
    """Seconds from its start of which rank 0 has not told: imports, and what is looked at before them."""
    hung: float = 0.0
    """Seconds."""
    verdict: Failure | None = None
    """Set when the group as a whole was ended: it hung, or had nothing to save when it was asked to stop."""
    hanging: int | None = None
    """The pod that stood still while others waited for it."""
    traces: str = ""
    """Folder in which it is kept what they were doing."""

    @property
    def host(self) -> str:
        """The Kubernetes node on which alone something went wrong by itself; empty when nobody knows of one."""
        if self.verdict is not None:
            return self.hosts.get(self.hanging, "") if self.hanging is not None else ""
        failed = ((node, end.failure) for node, end in self.ended.items() if end.failure is not None)
        hosts = {
            self.hosts.get(node, "")
            for node, failure in failed
            if failure.failure is not FailureClass.INTERRUPTED and not is_consequence(failure)
        }
        return hosts.pop() if len(hosts) == 1 else ""
