"""Nodes, and their kubelets, which start and end pods: as far as there is room, the image is there, and they live."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sft_api.failures import FailureClass
from sft_api.progress import TerminationMessage
from tests.unit.operator.make import Object, pod_manifest, stamp
from tests.unit.operator.played.cluster import PODS, ApiServer, Story, Violation, condition

if TYPE_CHECKING:
    from tests.unit.operator.played.training import Training

TOTAL_STEPS = 60
INTERRUPTED, CRASHED, FATAL, IN_USE, KILLED, LOST = 30, 31, 11, 18, 143, 255
"""Exit codes."""
_NAMES = tuple(f"node-{number}" for number in range(4))
_UNHEARD_SECONDS = 40.0
"""After which the cluster says that nothing is heard of a node, and its pods are to go a minute later."""
_NO_ROOM = "0/4 nodes are available: 4 Insufficient nvidia.com/gpu."
_NO_IMAGE = {"name": "trainer", "state": {"waiting": {"reason": "ErrImagePull", "message": "not found"}}}


@dataclass
class PlayedPod:
    """What is known of a pod on its node."""

    name: str
    uid: str
    index: int
    job_uid: str
    replaced: int
    starts_within: float
    """Seconds from its binding to its start."""
    saves_for: float
    """Seconds from being asked to end to its end."""
    phase: str = "Pending"
    node: str = ""
    """Where it has a place."""
    placed: float = 0.0
    asked: float | None = None
    """When it was asked to end."""
    began: float | None = None
    ended: float | None = None
    """When its trainer did: a container beside it may live on."""
    exit_code: int | None = None
    is_pulling: bool = False
    # Of index 0, which tells of the run:
    attempt: int = 0
    step: float = 0.0
    resumed_from: int = 0
    trains_from: float = 0.0
    peer: str = ""

    @property
    def living(self) -> bool:
        return self.phase in ("Pending", "Running")

    @property
    def serving(self) -> bool:
        return self.phase == "Running" and self.asked is None and self.ended is None


class Nodes:
    """All pods."""

    def __init__(self, story: Story, api: ApiServer) -> None:
        self._story = story
        self._api = api
        self.pods: list[PlayedPod] = []
        self.room = PODS
        """So many pods find a place."""
        self.has_image = True
        self.has_sidecars = False
        """A container beside the trainer outlives it."""
        self.skews = dict.fromkeys(_NAMES, 0.0)
        """Seconds by which the clocks of nodes are ahead."""
        self._lost: tuple[str, float] | None = None
        """A node of which nothing is heard, and since when."""
        self._made = 0

    def make(self, job: Object, index: int, replaced: int) -> None:
        story, random, uid = self._story, self._story.random, job["metadata"]["uid"]
        self._made += 1
        name = f"tulu-{index}-{self._made}"
        manifest = pod_manifest(
            index, job_uid=uid, phase="Pending", replaced=(replaced, 0), node=None, ready_since=story.time
        )
        manifest["metadata"]["name"] = name
        made = self._api.add("Pod", manifest)["metadata"]["uid"]
        starts_within, saves_for = random.uniform(0.5, 4), random.uniform(0.5, 12)
        self.pods.append(PlayedPod(name, made, index, uid, replaced, starts_within, saves_for))
        if len({pod.job_uid for pod in self.pods if pod.living}) > 1:
            raise Violation("Pods of two Jobs never live at the same time.")

    def lose(self, node: str) -> None:
        """Nothing is heard of the node until it is ``found``."""
        self._lost = (node, self._story.seconds)

    def find(self, *, anew: bool = False) -> None:
        """The node is back; ``anew``: it has started again, and its containers are gone."""
        node, self._lost = self._lost[0] if self._lost else "", None
        for pod in [pod for pod in self.pods if self._api.find("Pod", pod.name)]:
            if pod.node == node and pod.phase == "Running" and anew:
                self.end(pod, LOST)
            elif pod.node == node and pod.phase == "Running" and pod.ended is None:
                self._say_ready(pod, True)

    def is_lost(self, pod: PlayedPod) -> bool:
        return self._lost is not None and pod.node == self._lost[0]

    @property
    def lost_node(self) -> str:
        return self._lost[0] if self._lost else ""

    def step(self, training: Training) -> None:
        self._notice_loss()
        for pod in list(self.pods):
            manifest = self._api.find("Pod", pod.name)
            if manifest is None:
                self.pods.remove(pod)  # somebody has deleted it with no time to end
                continue
            if pod.living and manifest["status"]["phase"] == "Failed":
                pod.phase, pod.ended = "Failed", self._story.seconds  # given up
            if pod.asked is None and "deletionTimestamp" in manifest["metadata"]:
                pod.asked = self._story.seconds
            if pod.living and not self.is_lost(pod):
                self._live(pod, training)

    def _live(self, pod: PlayedPod, training: Training) -> None:
        now = self._story.seconds
        asked_long_ago = pod.asked is not None and now >= pod.asked + pod.saves_for
        if pod.phase == "Pending" and asked_long_ago:
            self.end(pod, KILLED)
        elif pod.phase == "Pending" and not pod.node:
            self._place(pod)
        elif pod.phase == "Pending" and now >= pod.placed + pod.starts_within:
            self._start(pod)
        elif pod.phase == "Running" and asked_long_ago and pod.ended is not None:
            self._end_wholly(pod)
        elif pod.phase == "Running" and asked_long_ago:
            training.save(pod)
            self.end(pod, INTERRUPTED, FailureClass.INTERRUPTED)

    def _place(self, pod: PlayedPod) -> None:
        if sum(bool(other.node) for other in self.pods if other.living) >= self.room:
            told = condition("PodScheduled", False, self._story.now(), reason="Unschedulable", message=_NO_ROOM)
            if self._said(pod, "PodScheduled").get("status") != "False":
                self._tell(pod, [told])
            return
        lost = self._lost[0] if self._lost else ""
        pod.node = self._story.random.choice([name for name in _NAMES if name != lost])
        pod.placed = self._story.seconds
        self._api.change("Pod", pod.name, {"spec": {"nodeName": pod.node}})
        self._tell(pod, [condition("PodScheduled", True, self._story.now())])

    def _start(self, pod: PlayedPod) -> None:
        if not self.has_image:
            if not pod.is_pulling:
                pod.is_pulling = True
                self._tell(pod, [], _NO_IMAGE)
            return
        pod.phase, pod.began = "Running", self._story.seconds
        state = {"running": {"startedAt": self._by(pod, pod.began)}}
        heard = [condition(kind, True, self._by(pod, pod.began)) for kind in ("Ready", "ContainersReady")]
        self._tell(pod, heard, {"name": "trainer", "state": state, "started": True, "ready": True})

    def end(self, pod: PlayedPod, exit_code: int, failure: FailureClass | None = None) -> None:
        """End its trainer, and with it the pod, unless a container beside it lives on."""
        pod.ended, pod.exit_code = self._story.seconds, exit_code
        if not (self.has_sidecars and pod.phase == "Running" and pod.asked is None and exit_code != LOST):
            pod.phase = "Failed" if exit_code else "Succeeded"
        message = ""
        if pod.attempt and exit_code not in (KILLED, LOST):
            said = TerminationMessage(failure=failure, attempt=pod.attempt, step=int(pod.step), total_steps=TOTAL_STEPS)
            message = said.model_dump_json(by_alias=True)
        began, ended = self._by(pod, pod.began or pod.ended), self._by(pod, pod.ended)
        state = {"exitCode": exit_code, "reason": "Unknown" if exit_code == LOST else "Error", "message": message}
        state |= {"startedAt": began, "finishedAt": ended}
        not_ready = [condition(kind, False, ended) for kind in ("Ready", "ContainersReady")]
        self._tell(pod, not_ready, {"name": "trainer", "state": {"terminated": state}})

    def _end_wholly(self, pod: PlayedPod) -> None:
        """The container beside the trainer has ended as well."""
        pod.phase = "Failed" if pod.exit_code else "Succeeded"
        self._api.change("Pod", pod.name, {"status": {"phase": pod.phase}})

    def _by(self, pod: PlayedPod, seconds: float) -> str:
        """A time by the clock of the pod's node."""
        return stamp(seconds + self._story.ahead + self.skews.get(pod.node, 0.0))

    def _notice_loss(self) -> None:
        node, since = self._lost or ("", 0.0)
        unheard = self._story.seconds - since
        if not node or unheard < _UNHEARD_SECONDS:
            return
        for pod in self._on(node):
            self._say_ready(pod, False)
            if unheard >= _UNHEARD_SECONDS + 60:
                self._api.ask_to_end(pod.name, "DeletionByTaintManager")

    def _on(self, node: str) -> Iterator[PlayedPod]:
        return (pod for pod in self.pods if pod.node == node and pod.living and self._api.find("Pod", pod.name))

    def _say_ready(self, pod: PlayedPod, is_ready: bool) -> None:
        said = self._said(pod, "Ready")
        if said.get("reason") != ("NodeStatusUnknown" if not is_ready else ""):
            told = condition("Ready", is_ready, self._story.now(), reason="" if is_ready else "NodeStatusUnknown")
            self._tell(pod, [told])

    def _said(self, pod: PlayedPod, kind: str) -> Object:
        conditions = self._api.objects["Pod", pod.name]["status"]["conditions"]
        return next((item for item in conditions if item["type"] == kind), {})

    def _tell(self, pod: PlayedPod, conditions: list[Object], trainer: Object | None = None) -> None:
        manifest = self._api.find("Pod", pod.name)
        if manifest is None:
            return
        told = {item["type"]: item for item in [*manifest["status"]["conditions"], *conditions]}
        status: Object = {"phase": pod.phase, "conditions": list(told.values())}
        if trainer:
            status["containerStatuses"] = [trainer]
        self._api.change("Pod", pod.name, {"status": status})

    def remove(self, pod: PlayedPod) -> None:
        if self._api.find("Pod", pod.name):
            self._api.remove("Pod", pod.name)
        self.pods.remove(pod)
