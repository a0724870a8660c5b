"""What trains on the pods of a run."""

from __future__ import annotations

from sft_api.failures import FailureClass
from sft_api.place import TAKE_OVER_VARIABLE
from sft_api.progress import Phase, Progress, TrainingProgress
from tests.unit.operator.make import at
from tests.unit.operator.played.cluster import PODS, TICK, ApiServer, Story
from tests.unit.operator.played.nodes import FATAL, IN_USE, INTERRUPTED, TOTAL_STEPS, Nodes, PlayedPod
from tests.unit.operator.played.store import PlayedStore
from tests.unit.operator.played.writing import Writer

_STEPS_A_SECOND = 0.75
_SAVED_EVERY = 10
_START_SECONDS = 3.0
"""Until the group of an attempt does its first step."""


class Training:
    """The run, which goes on from what it has saved whenever all its pods serve."""

    def __init__(self, story: Story, nodes: Nodes) -> None:
        self._story = story
        self._nodes = nodes
        self.saved = self._attempts = 0

    def begin_anew(self) -> None:
        self.saved = self._attempts = 0

    def step(self) -> None:
        group = {pod.index: pod for pod in self._nodes.pods if pod.serving and not self._nodes.is_lost(pod)}
        if len(group) < PODS:
            return
        leader, peer = group[0], group[1]
        if leader.peer != peer.uid:
            if not self._begin(leader, peer):
                return
            self._attempts += 1
            leader.attempt, leader.peer = self._attempts, peer.uid
            leader.step = leader.resumed_from = self.saved
            leader.trains_from = self._story.seconds + _START_SECONDS
        if self._story.seconds < leader.trains_from:
            return
        leader.step = min(TOTAL_STEPS, leader.step + TICK * _STEPS_A_SECOND)
        due = int(leader.step) // _SAVED_EVERY * _SAVED_EVERY
        if due > self.saved:
            self._save(leader, due)
            if not leader.serving:
                return
        if leader.step >= TOTAL_STEPS and self._complete(leader):
            for pod in group.values():
                self._nodes.end(pod, 0)

    def _begin(self, leader: PlayedPod, peer: PlayedPod) -> bool:
        """Whether the next attempt may begin."""
        return True

    def _save(self, leader: PlayedPod, step: int) -> None:
        self.saved = step

    def _complete(self, leader: PlayedPod) -> bool:
        return True

    def save(self, pod: PlayedPod) -> None:
        """As a pod does that was asked to end."""
        if pod.index == 0:
            self.saved = max(self.saved, int(pod.step))

    def report(self, pod_uid: str, job_uid: str) -> Progress | None:
        """What its supervisor answers; None: nobody is there."""
        pod = next((pod for pod in self._nodes.pods if pod.uid == pod_uid and pod.phase == "Running"), None)
        if pod is None or pod.ended is not None or self._nodes.is_lost(pod):
            return None
        trains = pod.attempt and self._story.seconds >= pod.trains_from
        progress = TrainingProgress(
            attempt=pod.attempt,
            step=int(pod.step),
            total_steps=TOTAL_STEPS,
            phase=Phase.TRAINING if trains else Phase.LOADING,
            update_time=at(self._story.time),
            resumed_from_step=pod.resumed_from or None,
        )
        return Progress(job_uid=job_uid, training=progress)


class StoredTraining(Training):
    """The same, of a run that saves in a store, where others may come."""

    def __init__(self, story: Story, api: ApiServer, nodes: Nodes, store: PlayedStore) -> None:
        super().__init__(story, nodes)
        self._api = api
        self._store = store
        self._writers: dict[str, Writer] = {}
        """By the uids of pods, also of those that live on behind a lost node."""
        self._kept: dict[str, PlayedPod] = {}

    def begin_anew(self) -> None:
        pass

    def step(self) -> None:
        self._look()
        super().step()

    def _look(self) -> None:
        """Each process looks now and then whether the place is its own still; some are no more."""
        for uid, writer in list(self._writers.items()):
            pod = self._kept[uid]
            is_given_up = pod not in self._nodes.pods or pod.phase == "Failed"
            is_ghost = is_given_up and pod.exit_code is None and pod.node == self._nodes.lost_node
            if (pod.phase != "Running" or pod.ended is not None) and not is_ghost:
                if pod.exit_code in (0, INTERRUPTED, FATAL, IN_USE):
                    writer.say_ended("it has")
                self._forget(uid)
            elif pod not in self._nodes.pods and not is_ghost:
                self._forget(uid)
            elif writer.attempt and is_ghost and self._story.random.random() < 0.005:
                # It trains on behind its lost node, and saves until it finds that it has to go.
                pod.step += 1
                if not writer.save(int(pod.step)) and not self._store.is_away:
                    self._forget(uid)
            elif writer.attempt and (found := writer.look()) != "ours":
                self._story.tell(f"{pod.name} of {writer.uid} finds its place {found}")
                self._forget(uid)
                if found == "another's" and not is_ghost and not self._nodes.is_lost(pod):
                    self._nodes.end(pod, IN_USE, FailureClass.PLACE_IN_USE)

    def _forget(self, uid: str) -> None:
        del self._writers[uid], self._kept[uid]

    def _begin(self, leader: PlayedPod, peer: PlayedPod) -> bool:
        job = self._api.find("Job")
        if job is None or job["metadata"]["uid"] != leader.job_uid:
            return False
        owners = job["metadata"].get("ownerReferences") or [{"uid": "left"}]
        writer = self._writers.setdefault(leader.uid, Writer(self._story, self._store, owners[0]["uid"], leader.name))
        self._kept[leader.uid] = leader
        env = job["spec"]["template"]["spec"]["containers"][0].get("env", ())
        found = writer.enter(next((item["value"] for item in env if item["name"] == TAKE_OVER_VARIABLE), ""))
        if found == "in use":
            self._forget(leader.uid)
            self._nodes.end(leader, IN_USE, FailureClass.PLACE_IN_USE)
        elif found == "complete":
            for pod in (leader, peer):
                self._nodes.end(pod, 0)
        if found != "entered":
            return False
        self._attempts, self.saved = writer.attempt - 1, writer.saved()
        return True

    def _save(self, leader: PlayedPod, step: int) -> None:
        writer = self._writers.get(leader.uid)
        if writer and writer.save(step):
            self.saved = step
        elif writer and not self._store.is_away and writer.find() == "another's":
            self._story.tell(f"{leader.name} of {writer.uid} finds its place another's")
            self._forget(leader.uid)
            self._nodes.end(leader, IN_USE, FailureClass.PLACE_IN_USE)

    def _complete(self, leader: PlayedPod) -> bool:
        writer = self._writers.get(leader.uid)
        if writer is None or not writer.save(TOTAL_STEPS):
            return False
        writer.complete(TOTAL_STEPS)
        return True

    def save(self, pod: PlayedPod) -> None:
        writer = self._writers.get(pod.uid)
        if pod.index == 0 and writer and pod.step > self.saved and writer.save(int(pod.step)):
            self.saved = int(pod.step)
