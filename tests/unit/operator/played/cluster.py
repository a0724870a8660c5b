"""What happens and when, and the API server that holds all objects and tells of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random

from tests.unit.operator.make import Object, stamp
from tests.unit.operator.test_reconciler import KEY, merged

PODS = 2
TICK = 0.1
"""Seconds; whatever happens, happens at such a moment."""
GRACE_SECONDS = 30


class Violation(AssertionError):
    """Something happened that never may."""


class Story:
    """What happens in a life, by chance and one thing after the other, and when."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.seconds = 0.0
        """Since it began, by a clock that is never set."""
        self.ahead = 0.0
        """Seconds by which the clock of the API server was set forward."""
        self.lines: list[str] = []

    @property
    def time(self) -> float:
        """By the clock of the API server."""
        return self.seconds + self.ahead

    def now(self) -> str:
        return stamp(self.time)

    def tell(self, words: str) -> None:
        self.lines.append(f"{self.seconds:7.1f} s  {words}")


class ApiServer:
    """All objects; whatever happens to one is told to the ``watchers``."""

    def __init__(self, story: Story) -> None:
        self.objects: dict[tuple[str, str], Object] = {}
        self.watchers: list[Callable[[str, str, Object], None]] = []
        self.statuses: list[tuple[Object, Object]] = []
        """Those that an operator wrote of the SFTJob: what stood there, and what does now."""
        self.events: Counter[str] = Counter()
        self.writes = 0
        """Of operators."""
        self.version = 100
        self.is_terminating = False
        """The namespace is to go: nothing is made there any more."""
        self.on_deletion: Callable[[Object], None] = lambda manifest: None
        """Called with an SFTJob that an operator deletes."""
        self.refuses_jobs = False
        """No Job may be made: a quota of the namespace is used."""
        self._story = story
        self._made = 0

    def find(self, kind: str, name: str = KEY.name) -> Object | None:
        return self.objects.get((kind, name))

    def all_of(self, kind: str) -> list[Object]:
        return [manifest for (held, _), manifest in self.objects.items() if held == kind]

    def add(self, kind: str, manifest: Object) -> Object:
        self._made += 1
        given = {"uid": f"{kind.lower()}-{self._made}", "creationTimestamp": self._story.now()}
        metadata = {"namespace": KEY.namespace, "generation": 1, **manifest["metadata"], **given}
        return self._keep(kind, "ADDED", {"status": {}, **manifest, "metadata": metadata})

    def change(self, kind: str, name: str, patch: Object) -> Object:
        """The object after a merge patch, by which nothing happens when it says nothing new."""
        before = self.objects[kind, name]
        after = merged(before, patch)
        if after == before:
            return before
        if after.get("spec") != before.get("spec"):
            after["metadata"] = {**after["metadata"], "generation": before["metadata"]["generation"] + 1}
        if "deletionTimestamp" in after["metadata"] and kind == "SFTJob" and not after["metadata"].get("finalizers"):
            self._story.tell("SFTJob is gone")
            self.objects[kind, name] = after
            self.remove(kind, name)
            return after
        return self._keep(kind, "MODIFIED", after)

    def say(self, kind: str, name: str, **conditions: tuple[bool, str, str]) -> None:
        """Have an object's conditions be so (whether they hold, reason and message); a time is that of a change."""
        told = {item["type"]: item for item in self.objects[kind, name]["status"].get("conditions", ())}
        for what, (holds, reason, message) in conditions.items():
            before = told.get(what, {})
            unchanged = before.get("status") == str(holds)
            since = before["lastTransitionTime"] if unchanged else self._story.now()
            told[what] = condition(what, holds, since, reason=reason, message=message)
        self.change(kind, name, {"status": {"conditions": list(told.values())}})

    def holds(self, kind: str, name: str, what: str) -> bool:
        """Whether a condition of an object holds."""
        conditions = self.objects[kind, name]["status"].get("conditions", ())
        return any(item["type"] == what and item["status"] == "True" for item in conditions)

    def remove(self, kind: str, name: str = KEY.name) -> None:
        self._keep(kind, "DELETED", self.objects[kind, name])
        del self.objects[kind, name]

    def delete(self, kind: str, name: str, *, at_once: bool = False) -> None:
        """As asked for: pods end first, unless their node is not waited for."""
        found = self.find(kind, name)
        if kind == "Pod" and not at_once:
            self.ask_to_end(name)
        elif found and kind == "SFTJob" and found["metadata"].get("finalizers"):
            if "deletionTimestamp" not in found["metadata"]:
                self.change(kind, name, {"metadata": {"deletionTimestamp": self._story.now()}})
        elif found:
            self.remove(kind, name)

    def ask_to_end(self, name: str, disrupted_by: str = "") -> None:
        """Have a pod asked to end, as a deletion does, or whatever is named."""
        pod = self.objects["Pod", name]
        if "deletionTimestamp" in pod["metadata"]:
            return
        conditions = pod["status"]["conditions"]
        if disrupted_by:
            conditions = [*conditions, condition("DisruptionTarget", True, self._story.now(), reason=disrupted_by)]
        ends = stamp(self._story.time + GRACE_SECONDS)
        metadata = {"deletionTimestamp": ends, "deletionGracePeriodSeconds": GRACE_SECONDS}
        self.change("Pod", name, {"metadata": metadata, "status": {"conditions": conditions}})

    def _keep(self, kind: str, event: str, manifest: Object) -> Object:
        self.version += 1
        metadata = {**manifest["metadata"], "resourceVersion": str(self.version)}
        kept = self.objects[kind, metadata["name"]] = {**manifest, "metadata": metadata}
        for watcher in self.watchers:
            watcher(kind, event, kept)
        return kept


def condition(kind: str, holds: bool, since: str, *, reason: str = "", message: str = "") -> Object:
    said = {"reason": reason, "message": message or reason, "lastTransitionTime": since}
    return {"type": kind, "status": str(holds), **said}
