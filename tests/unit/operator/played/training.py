"""What trains on the pods of a run."""

from __future__ import annotations

from sft_api.progress import Phase, Progress, TrainingProgress
from tests.unit.operator.make import at
from tests.unit.operator.played.cluster import PODS, TICK, Story
from tests.unit.operator.played.nodes import TOTAL_STEPS, Nodes, PlayedPod

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
            self._attempts += 1
            leader.attempt, leader.peer = self._attempts, peer.uid
            leader.step = leader.resumed_from = self.saved
            leader.trains_from = self._story.seconds + _START_SECONDS
        if self._story.seconds < leader.trains_from:
            return
        leader.step = min(TOTAL_STEPS, leader.step + TICK * _STEPS_A_SECOND)
        self.saved = max(self.saved, int(leader.step) // _SAVED_EVERY * _SAVED_EVERY)
        if leader.step >= TOTAL_STEPS:
            for pod in group.values():
                self._nodes.end(pod, 0)

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
