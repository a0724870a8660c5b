"""The life of one job, played: a small cluster, in which a user, nodes and the operator act at random. Seeded.

The operator is the real one, but for its requests. What it sees of the cluster is played (``played/``): an API server
whose watches tell late, a Job controller, Kueue, kubelets, a training run that saves and goes on, and somebody who
changes his mind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from sft_api.failures import FailureClass
from sft_api.v1alpha1.job import RETRY_ANNOTATION, TAKE_OVER_ENDING
from sft_operator.names import QUEUE_LABEL
from tests.unit.operator.make import Object, job_manifest
from tests.unit.operator.played.cluster import PODS, TICK, ApiServer, Story, Violation
from tests.unit.operator.played.controllers import GarbageCollector, JobController
from tests.unit.operator.played.kueue import PlayedKueue
from tests.unit.operator.played.nodes import CRASHED, FATAL, Nodes, PlayedPod
from tests.unit.operator.played.operator import Operator
from tests.unit.operator.played.store import PlayedStore
from tests.unit.operator.played.training import Training
from tests.unit.operator.test_reconciler import KEY

_LAST_SECONDS = 1500
"""In which a job that is left alone is complete."""
_START_DEADLINE_SECONDS = 60


@dataclass
class Counts:
    """What has happened to an SFTJob so far."""

    evictions: int = 0
    crashes: int = 0
    suspensions: int = 0
    deleted_jobs: int = 0
    absences: int = 0
    fatal_failures: int = 0
    retries: int = 0
    others: int = 0
    """Of what else takes pods, or keeps the operator from being told of them."""


@dataclass
class Life:
    """One cluster, in which a job is made and then happens to it what ``happenings`` are, by their weights."""

    seed: int
    happenings: dict[str, float]
    on_status: Callable[[Life, Object, Object], None] = lambda life, before, after: None
    """Called with each status that the operator has written, after the one before."""
    counts: Counts = field(default_factory=Counts)
    is_queued: bool = False
    has_default_queue: bool = False
    has_sidecars: bool = False
    store: PlayedStore | None = None

    def __post_init__(self) -> None:
        self.happened: set[str] = set()
        self.story = Story(self.seed)
        self.api = ApiServer(self.story)
        self.nodes = Nodes(self.story, self.api)
        self.nodes.has_sidecars = self.has_sidecars
        self.controller = JobController(self.story, self.api, self.nodes)
        self.kueue = PlayedKueue(self.story, self.api, self.nodes)
        self.collector = GarbageCollector(self.story, self.api)
        self.training = self.new_training()
        self.operators = [self._new_operator()]

    def new_training(self) -> Training:
        return Training(self.story, self.nodes)

    def _new_operator(self) -> Operator:
        queue, store = self.has_default_queue, self.store
        return Operator(self.story, self.api, self.training, self._events, default_queue=queue, store=store)

    def _events(self) -> tuple[Any, ...]:
        return (self.controller.refused,) if self.controller.refused else ()

    @property
    def operator(self) -> Operator:
        """The one that works."""
        return self.operators[-1]

    @property
    def random(self) -> Random:
        return self.story.random

    @property
    def status(self) -> Object:
        found = self.api.find("SFTJob")
        return found["status"] if found else {}

    @property
    def hindered(self) -> set[str]:
        """Reasons for which somebody has to mend something, as far as somebody has done what there is to mend."""
        reasons = {
            "give_up": ("Deactivated",),
            "stop": ("Deactivated",),
            "lose_image": ("ImagePull",),
            "fill": ("HalfPlaced",),
            "trouble": ("Refused", "WebhookUnavailable", "ServerUnavailable"),
        }
        return {reason for name in self.happened for reason in reasons.get(name, ())}

    def pass_time(self, seconds: float) -> None:
        end = self.story.seconds + seconds
        while self.story.seconds < end:
            self.story.seconds += TICK
            self.training.step()
            self.nodes.step(self.training)
            if self.random.random() < 0.5:
                self.controller.step()
            self.kueue.step()
            self.collector.step()
            self.step()
            for operator in self.operators:
                operator.step()
            if not self.operator.is_there and self.operator.client.is_dead and self.random.random() < 0.05:
                self.story.tell("operator comes back")
                self.operator.begin()
            written, self.api.statuses = self.api.statuses, []
            for before, after in written:
                self.on_status(self, before, after)
            self._look_at_job()

    def step(self) -> None:
        """What else goes on."""

    def _look_at_job(self) -> None:
        """What Kueue has given up and deleted is not made again unasked."""
        if self._reason() in ("SuspendRequested", None) or "completionTime" in self.status:
            self.kueue.told_deactivated = False  # the user may resume it from now on
        if self.kueue.told_deactivated and self.api.find("Job"):
            raise Violation("A Job that Kueue has given up and deleted is made again, and all limits begin anew.")

    def play(self, times: int) -> None:
        """Have so many things happen, and then nothing any more until the job has ended."""
        self.make(suspend=self.random.random() < 0.3)
        names, weights = list(self.happenings), list(self.happenings.values())
        for _ in range(times):
            self.pass_time(self.random.choice([0.1, 0.4, 1, 4, 12]))
            if self.api.find("SFTJob") is None:
                self.make()
            else:
                name = self.random.choices(names, weights)[0]
                self.happened.add(name)
                getattr(self, name)()
        self.set_right()
        self.resume()
        if self.status.get("state") == "Failed":
            self.retry()
        self.story.tell("from now on nothing happens any more")
        end = self.story.seconds + _LAST_SECONDS
        while self.story.seconds < end and not self._has_ended():
            self.pass_time(5)
            if self._is_deactivated():
                self._set_going()

    def set_right(self) -> None:
        """Have all that hinders the job be over."""
        self.nodes.room, self.nodes.has_image, self.controller.is_over_quota = PODS, True, False
        self.nodes.find()
        self.kueue.is_open, self.kueue.deletes_after = True, None
        self.api.refuses_jobs = False
        self.end_troubles()
        while (
            self.api.find("SFTJob") is None or "deletionTimestamp" in self.api.objects["SFTJob", KEY.name]["metadata"]
        ):
            self.pass_time(5)
            if self.api.find("SFTJob") is None:
                self.make()

    def end_troubles(self) -> None:
        """Have the API server be well, and operators live on."""
        for operator in self.operators:
            operator.client.troubles, operator.client.lasts = 0, None

    def _is_deactivated(self) -> bool:
        return self._reason() == "Deactivated"

    def _reason(self) -> str | None:
        """Why it runs, or does not."""
        conditions = self.status.get("conditions", ())
        return next((item["reason"] for item in conditions if item["type"] == "Running"), None)

    def _set_going(self) -> None:
        """As the status advises."""
        if self.kueue.workload():
            self.story.tell("administrator lets it go on")
            self.kueue.let_go_on()
            return
        self.suspend()
        while self.status.get("state") != "Suspended":
            self.pass_time(5)
        self.resume()

    def _has_ended(self) -> bool:
        """Whether the operator says so, and has not begun again since, as it is about to where it was asked to."""
        asked = (self.api.find("SFTJob") or {})["metadata"].get("annotations", {}).get(RETRY_ANNOTATION)
        failed_anew = self.status.get("state") == "Failed" and self.status.get("retried") != asked
        return "completionTime" in self.status and not failed_anew

    # What the user does

    def make(self, suspend: bool = False) -> None:
        self.story.tell(f"SFTJob is made, suspend: {suspend}")
        self.counts, self.api.events, self.kueue.told_deactivated = Counts(), type(self.api.events)(), False
        compute = {"nodes": PODS, "gpusPerNode": 1}
        policy = {"maxRestarts": 50, "startDeadlineSeconds": _START_DEADLINE_SECONDS}
        labels = {QUEUE_LABEL: "gpus"} if self.is_queued else {}
        spec = {"compute": compute, "runPolicy": policy, "suspend": suspend, **self.spec()}
        self.api.add("SFTJob", job_manifest(labels=labels, **spec))
        self.training.begin_anew()

    def spec(self) -> Object:
        """What else its user asks for."""
        return {}

    def make_again(self) -> None:
        self.story.tell("SFTJob is deleted")
        self.api.remove("SFTJob")
        self.pass_time(self.random.choice([0, 0.3, 5]))
        self.make()

    def delete_in_foreground(self) -> None:
        self._delete("foregroundDeletion")

    def leave_behind(self) -> None:
        """As with ``--cascade=orphan``; and remove by hand what stays."""
        self._delete("orphan")
        stays = self.api.find("Job")
        if stays and not stays["metadata"].get("ownerReferences"):
            self.pass_time(self.random.choice([0, 3]))
            if self.api.find("Job") is None:
                raise Violation("What is left behind stays. But the Job is gone.")
        for kind, name in [key for key in self.api.objects if key[0] != "Pod"]:
            self.api.delete(kind, name)
        if self.api.find("SFTJob") is None:
            self.make()

    def _delete(self, finalizer: str) -> None:
        self.story.tell(f"SFTJob is deleted, {finalizer}")
        metadata = {"deletionTimestamp": self.story.now(), "finalizers": [finalizer]}
        self.api.change("SFTJob", KEY.name, {"metadata": metadata})
        for _ in range(600):
            if self.api.find("SFTJob") is None:
                break
            self.pass_time(0.5)
        else:
            raise Violation(f"What is deleted goes. But the SFTJob does not: {self.status.get('message')}")
        if finalizer != "orphan":
            self.make()

    def suspend(self) -> None:
        self.story.tell("user suspends")
        self.counts.suspensions += 1
        self._edit(suspend=True)

    def suspend_and_wait(self) -> None:
        """Whatever hinders it: what is suspended frees its place."""
        self.suspend()
        self.nodes.find()
        self.pass_time(90)
        trouble = self.operator.client.troubles or self.operator.client.lasts is not None
        if (
            trouble
            or self.api.find("SFTJob") is None
            or not self.operator.is_there
            or self.status.get("state") in ("Complete", "Failed")
        ):
            return
        living = [pod.name for pod in self.nodes.pods if pod.living]
        if living or self.status.get("state") != "Suspended":
            raise Violation(f"What is suspended frees its place. But {living} live, and it is {self.status}")

    def resume(self) -> None:
        self.story.tell("user resumes")
        self._edit(suspend=False)

    def edit(self) -> None:
        deadline, restarts = self.random.choice([None, 100_000, 200_000]), self.random.choice([50, 60])
        self._edit(runPolicy={"activeDeadlineSeconds": deadline, "maxRestarts": restarts})

    def change_queue(self) -> None:
        queue = self.random.choice(["gpus", "others", None])
        self.story.tell(f"user names queue {queue}")
        self.counts.others += 1
        self.api.change("SFTJob", KEY.name, {"metadata": {"labels": {QUEUE_LABEL: queue}}})

    def _edit(self, **spec: Any) -> None:
        self.api.change("SFTJob", KEY.name, {"spec": spec})

    def retry(self) -> None:
        self.story.tell("user asks for another try")
        self.counts.retries += 1
        word = f"{self.counts.retries}{self.random.choice(['', TAKE_OVER_ENDING])}"
        annotations = {RETRY_ANNOTATION: word}
        self.api.change("SFTJob", KEY.name, {"metadata": {"annotations": annotations}})

    def delete_job(self) -> None:
        if self.api.find("Job"):
            self.story.tell("user deletes the Job")
            self.counts.deleted_jobs += 1
            self.kueue.told_deactivated = self.kueue.told_deactivated or self._is_deactivated()
            self.api.remove("Job")

    def delete_job_and_suspend(self) -> None:
        self.delete_job()
        self.suspend()

    def delete_child(self) -> None:
        found = [key for key in self.api.objects if key[0] in ("ConfigMap", "Service", "NetworkPolicy")]
        if found:
            kind, name = self.random.choice(found)
            self.story.tell(f"user deletes {kind} {name}")
            self.api.remove(kind, name)

    def delete_pod(self) -> None:
        if pod := self._any_pod():
            self.story.tell(f"user deletes pod {pod.name}")
            self.counts.evictions += 1
            self.api.delete("Pod", pod.name)

    def resize_job(self) -> None:
        job = self.api.find("Job")
        if job:
            self.story.tell("user scales the Job")
            self.api.change("Job", KEY.name, {"spec": {"parallelism": self.random.choice([1, PODS])}})

    def write_status(self) -> None:
        self.story.tell("somebody writes the status")
        wrong = self.random.choice([{"message": "all is well"}, {"jobRef": "other"}, {"podsReady": "9/9"}])
        self.api.change("SFTJob", KEY.name, {"status": wrong})

    # What pods and nodes do

    def evict(self) -> None:
        job = self.api.find("Job")
        if job and not job["spec"].get("suspend") and (pod := self._any_pod()):
            self.story.tell(f"pod {pod.name} is evicted")
            self.counts.evictions += 1
            self.api.ask_to_end(pod.name, disrupted_by="EvictionByEvictionAPI")

    def crash(self) -> None:
        if pod := self._any_pod():
            self.story.tell(f"pod {pod.name} crashes")
            self.counts.crashes += 1
            self.nodes.end(pod, CRASHED, FailureClass.WORKER_CRASHED)

    def fail(self) -> None:
        if pod := self._any_pod():
            self.story.tell(f"pod {pod.name} fails for good")
            self.counts.fatal_failures += 1
            self.nodes.end(pod, FATAL, FailureClass.DATA_ERROR)

    def lose_node(self) -> None:
        if pod := self._any_pod():
            self.story.tell(f"nothing is heard of {pod.node}")
            self.counts.others += 1
            self.nodes.lose(pod.node)
            self.pass_time(self.random.choice([5, 60, 200]))

    def find_node(self) -> None:
        self.story.tell("the node is back")
        self.counts.others += 1
        self.nodes.find(anew=self.random.random() < 0.5)

    def fill(self) -> None:
        self.nodes.room = self.random.randrange(PODS)
        self.story.tell(f"there is room for {self.nodes.room} pods")
        self.counts.others += 1
        self.pass_time(self.random.choice([1, 20, 100]))

    def clear(self) -> None:
        self.story.tell("there is room")
        self.nodes.room = PODS

    def lose_image(self) -> None:
        self.story.tell("the image cannot be pulled")
        self.nodes.has_image = False

    def find_image(self) -> None:
        self.nodes.has_image = True

    def use_quota(self) -> None:
        self.story.tell("the quota of the namespace is used")
        self.controller.is_over_quota = True
        self.pass_time(self.random.choice([1, 20]))

    def free_quota(self) -> None:
        self.controller.is_over_quota = False

    def set_clock(self) -> None:
        self.counts.others += 1
        self.story.ahead += self.random.choice([-20, -3, 3, 20])
        self.story.tell(f"clock of the API server is {self.story.ahead} s ahead")

    def skew_node(self) -> None:
        self.counts.others += 1
        self.nodes.skews[self.random.choice(list(self.nodes.skews))] = self.random.choice([-3, -1, 0, 1, 3])

    def _any_pod(self) -> PlayedPod | None:
        """One that serves, of this SFTJob and not of an earlier one."""
        owner, job = (self.api.find(kind) for kind in ("SFTJob", "Job"))
        owners = job["metadata"].get("ownerReferences") if job else None
        if not (owner and job and owners) or owners[0]["uid"] != owner["metadata"]["uid"]:
            return None
        uid = job["metadata"]["uid"]
        serving = [pod for pod in self.nodes.pods if pod.serving and pod.job_uid == uid and not self.nodes.is_lost(pod)]
        return self.random.choice(serving) if serving else None

    # What Kueue does

    def preempt(self) -> None:
        self.story.tell("Kueue takes the place")
        self.counts.others += 1
        self.kueue.evict()
        if self.random.random() < 0.3:
            self.kueue.is_open = False

    def open_queue(self) -> None:
        self.kueue.is_open = True

    def give_up(self) -> None:
        self.story.tell("Kueue gives it up")
        self.counts.others += 1
        self.kueue.deletes_after = self.random.choice([None, 5, 40])
        self.kueue.give_up()

    def stop(self) -> None:
        self.story.tell("administrator stops it")
        self.counts.others += 1
        self.kueue.stop()

    def let_go_on(self) -> None:
        self.story.tell("administrator lets it go on")
        self.kueue.let_go_on()

    # What becomes of the operator

    def refuse_status(self) -> None:
        self.operator.client.refuses_next_status = True

    def trouble(self) -> None:
        self.counts.absences += 1
        self.operator.client.troubles = self.random.choice([1, 3, 12])
        self.story.tell(f"API server has trouble, {self.operator.client.troubles} times")

    def kill_operator(self) -> None:
        self.counts.absences += 1
        self.operator.client.lasts = self.random.randrange(4)

    def restart_operator(self) -> None:
        self.story.tell("operator goes")
        self.counts.absences += 1
        self.operator.leave()
        self.pass_time(self.random.choice([0.2, 3, 30]))
        self.story.tell("operator comes back")
        self.operator.begin()

    def freeze_operator(self) -> None:
        """It stands still, another one takes over, and it goes on for a moment by what it knew."""
        self.story.tell("operator stands still, and another one takes over")
        self.counts.absences += 1
        old = self.operator
        old.leave()
        self.operators.append(self._new_operator())
        self.pass_time(self.random.choice([0.5, 5, 20]))
        self.story.tell("the old one wakes")
        old.wake()
        self.operators.remove(old)
        old.close()

    def run_twice(self) -> None:
        """Two work for a moment."""
        self.story.tell("two operators work")
        # Both may count what one of them has seen later than the other: that only one works is the Lease's duty.
        self.counts.others += 1
        old = self.operator
        self.operators.append(self._new_operator())
        self.pass_time(self.random.choice([0.5, 3]))
        self.operators.remove(old)
        old.close()

    def close(self) -> None:
        for operator in self.operators:
            operator.close()
