"""The life of one job, played: a small cluster, in which a user, nodes and the operator act at random. Seeded.

The operator is the real one, but for its requests. What it sees of the cluster is played: an API server whose watches
tell late, a Job controller, kubelets, a training run that saves and goes on, and somebody who changes his mind.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Any, cast

from sft_api.failures import FailureClass
from sft_api.progress import Phase, Progress, TerminationMessage, TrainingProgress
from sft_api.v1alpha1.job import RETRY_ANNOTATION
from sft_operator.cluster.asking import Asking
from sft_operator.cluster.client import ApiError, Cluster
from sft_operator.decisions import questions
from sft_operator.decisions.result import AskKueue, AskTrainer, Question, ReadEvents, ReadNamespace
from sft_operator.metrics import OperatorMetrics
from sft_operator.names import TRACKING_FINALIZER
from sft_operator.picture.listing import Listing
from sft_operator.picture.memory import Memory
from sft_operator.picture.picture import KINDS, Key, Picture
from sft_operator.picture.workload import Queueing
from sft_operator.reconciler import Reconciler, StatusRefusedError
from sft_operator.workqueue import RetryLater
from tests.unit.operator.make import Object, at, job_manifest, pod_manifest, stamp
from tests.unit.operator.test_reconciler import KEY, SETTINGS, merged

PODS = 2
TOTAL_STEPS = 60
_TICK = 0.1
"""Seconds; whatever happens, happens at such a moment."""
_STEPS_A_SECOND = 0.75
_SAVED_EVERY = 10
_START_SECONDS = 3.0
"""Until the group of an attempt does its first step."""
_GRACE_SECONDS = 30
_INTERRUPTED, _CRASHED, _FATAL, _KILLED = 30, 31, 11, 143
"""Exit codes."""
_BREATH_SECONDS = 0.4
"""After news of Jobs and pods, which come in numbers."""
_BACKOFF_SECONDS = 1.0
_LAST_SECONDS = 900
"""In which a job that is left alone is complete."""


class Violation(AssertionError):
    """Something happened that never may."""


class Story:
    """What happens in a life, by chance and one thing after the other, and when."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.seconds = 0.0
        self.lines: list[str] = []

    def tell(self, words: str) -> None:
        self.lines.append(f"{self.seconds:7.1f} s  {words}")


class ApiServer:
    """All objects; whatever happens to one is told to ``watcher``. Its coroutines are what the operator asks for."""

    def __init__(self, story: Story) -> None:
        self.objects: dict[tuple[str, str], Object] = {}
        self.watcher: Callable[[str, str, Object], None] = lambda kind, event, manifest: None
        self.statuses: list[tuple[Object, Object]] = []
        """Those that the operator wrote of the SFTJob: what stood there, and what does now."""
        self.events: Counter[str] = Counter()
        self.writes = 0
        """Of the operator."""
        self.refuses_next_status = False
        self.version = 100
        self._story = story
        self._made = 0

    def find(self, kind: str, name: str = KEY.name) -> Object | None:
        return self.objects.get((kind, name))

    def all_of(self, kind: str) -> list[Object]:
        return [manifest for (held, _), manifest in self.objects.items() if held == kind]

    def add(self, kind: str, manifest: Object) -> Object:
        self._made += 1
        given = {"uid": f"{kind.lower()}-{self._made}", "creationTimestamp": stamp(self._story.seconds)}
        metadata = {"namespace": KEY.namespace, "generation": 1, **manifest["metadata"], **given}
        return self._keep(kind, "ADDED", {"status": {}, **manifest, "metadata": metadata})

    def change(self, kind: str, name: str, patch: Object) -> Object:
        """The object after a merge patch, by which nothing happens when it says nothing new."""
        before = self.objects[kind, name]
        after = merged(before, patch)
        if after == before:
            return before
        if after["spec"] != before["spec"]:
            after["metadata"] = {**after["metadata"], "generation": before["metadata"]["generation"] + 1}
        return self._keep(kind, "MODIFIED", after)

    def remove(self, kind: str, name: str = KEY.name) -> None:
        self._keep(kind, "DELETED", self.objects[kind, name])
        del self.objects[kind, name]

    def _keep(self, kind: str, event: str, manifest: Object) -> Object:
        self.version += 1
        metadata = {**manifest["metadata"], "resourceVersion": str(self.version)}
        kept = self.objects[kind, metadata["name"]] = {**manifest, "metadata": metadata}
        self.watcher(kind, event, kept)
        return kept

    # What the operator asks for

    async def get(self, kind: str, namespace: str | None, name: str, **_: Any) -> Object:
        return self._present(kind, name)

    async def scan(self, kind: str, namespace: str | None, take: Callable[[Object], None], **_: Any) -> int:
        for manifest in self.all_of(kind):
            take(manifest)
        return self.version

    async def create(self, kind: str, namespace: str, manifest: Object, **_: Any) -> Object:
        if kind == "Event":
            self.events[manifest["reason"]] += 1
            self._story.tell(f"event {manifest['reason']}")
            return manifest
        if self.find(kind, manifest["metadata"]["name"]):
            raise ApiError(409, "AlreadyExists", f"{kind} {manifest['metadata']['name']} exists")
        self._written(f"creates {kind}")
        return self.add(kind, manifest)

    async def patch(
        self, kind: str, namespace: str, name: str, patch: Object, *, subresource: str = "", strategic: bool = False
    ) -> Object:
        before = self._present(kind, name)
        wanted = patch.get("metadata", {})
        if any(name in wanted and wanted[name] != before["metadata"][name] for name in ("uid", "resourceVersion")):
            raise ApiError(409, "Conflict", f"{kind} {name} has changed, or is another one")
        if subresource == "status" and self.refuses_next_status:
            self.refuses_next_status = False
            self._story.tell("API server refuses a status")
            raise ApiError(422, "Invalid", "status.message: Too long")
        unsent = {"metadata": {name: item for name, item in wanted.items() if name != "resourceVersion"}}
        patch = {**patch, **unsent}
        if strategic:
            assert kind == "Pod"
            assert set(patch["metadata"]) == {"uid", "$deleteFromPrimitiveList/finalizers"}, "nothing else is played"
            patch = {"metadata": {"finalizers": []}}
        after = self.change(kind, name, patch)
        if (kind, subresource) == ("SFTJob", "status"):
            self.writes += 1
            self.statuses.append((before["status"], after["status"]))
        else:
            self._written(f"changes {kind} {name}: {patch}")
        return after

    async def delete(self, kind: str, namespace: str, name: str, *, uid: str, **_: Any) -> None:
        found = self.find(kind, name)
        if found is None or found["metadata"]["uid"] != uid:
            return
        self._written(f"deletes {kind} {name}")
        if kind == "Pod":
            ask_to_end(self, self._story, name)
        else:
            self.remove(kind, name)

    def _present(self, kind: str, name: str) -> Object:
        if (kind, name) not in self.objects:
            raise ApiError(404, "NotFound", f"{kind} {name} not found")
        return self.objects[kind, name]

    def _written(self, words: str) -> None:
        self.writes += 1
        self._story.tell(f"operator {words[:160]}")


def ask_to_end(api: ApiServer, story: Story, name: str, disrupted_by: str = "") -> None:
    """Have a pod asked to end, as a deletion does, or whatever is named."""
    pod = api.objects["Pod", name]
    if "deletionTimestamp" in pod["metadata"]:
        return
    ends = stamp(story.seconds + _GRACE_SECONDS)
    conditions = pod["status"]["conditions"]
    if disrupted_by:
        conditions = [*conditions, _condition("DisruptionTarget", True, story.seconds, reason=disrupted_by)]
    metadata = {"deletionTimestamp": ends, "deletionGracePeriodSeconds": _GRACE_SECONDS}
    api.change("Pod", name, {"metadata": metadata, "status": {"conditions": conditions}})


def _condition(kind: str, holds: bool, seconds: float, *, reason: str = "") -> Object:
    said = {"reason": reason, "message": reason, "lastTransitionTime": stamp(seconds)}
    return {"type": kind, "status": str(holds), **said}


@dataclass
class PlayedPod:
    """What is known of a pod on its node."""

    name: str
    uid: str
    index: int
    job_uid: str
    replaced: int
    born: float
    starts: float
    """When its image is there."""
    saves_for: float
    """Seconds from being asked to end to its end."""
    phase: str = "Pending"
    asked: float | None = None
    """When it was asked to end."""
    began: float | None = None
    ended: float | None = None
    exit_code: int | None = None
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
        return self.phase == "Running" and self.asked is None


class Nodes:
    """All pods, which their kubelets start and end."""

    def __init__(self, story: Story, api: ApiServer) -> None:
        self._story = story
        self._api = api
        self.pods: list[PlayedPod] = []
        self._made = 0

    def make(self, job: Object, index: int, replaced: int) -> None:
        story, random, uid = self._story, self._story.random, job["metadata"]["uid"]
        self._made += 1
        name = f"tulu-{index}-{self._made}"
        manifest = pod_manifest(
            index,
            job_uid=uid,
            phase="Pending",
            replaced=(replaced, 0),
            conditions=[_condition("PodScheduled", True, story.seconds)],
            ready_since=story.seconds,
            node=f"node-{random.randrange(4)}",
        )
        manifest["metadata"]["name"] = name
        made = self._api.add("Pod", manifest)["metadata"]["uid"]
        starts, saves_for = story.seconds + random.uniform(0.5, 4), random.uniform(0.5, 12)
        self.pods.append(PlayedPod(name, made, index, uid, replaced, story.seconds, starts, saves_for))
        if len({pod.job_uid for pod in self.pods if pod.living}) > 1:
            raise Violation("Pods of two Jobs never live at the same time.")

    def step(self, training: Training) -> None:
        now = self._story.seconds
        for pod in self.pods:
            if pod.asked is None and "deletionTimestamp" in self.manifest(pod)["metadata"]:
                pod.asked = now
            asked_long_ago = pod.asked is not None and now >= pod.asked + pod.saves_for
            if pod.phase == "Pending" and asked_long_ago:
                self.end(pod, _KILLED)
            elif pod.phase == "Pending" and now >= pod.starts:
                self._start(pod)
            elif pod.phase == "Running" and asked_long_ago:
                training.save(pod)
                self.end(pod, _INTERRUPTED, FailureClass.INTERRUPTED)

    def manifest(self, pod: PlayedPod) -> Object:
        return self._api.objects["Pod", pod.name]

    def _start(self, pod: PlayedPod) -> None:
        pod.phase, pod.began = "Running", self._story.seconds
        state = {"running": {"startedAt": stamp(pod.began)}}
        heard = [_condition(kind, True, pod.began) for kind in ("Ready", "ContainersReady")]
        self._tell(pod, heard, {"name": "trainer", "state": state, "started": True, "ready": True})

    def end(self, pod: PlayedPod, exit_code: int, failure: FailureClass | None = None) -> None:
        pod.phase, pod.ended, pod.exit_code = "Failed" if exit_code else "Succeeded", self._story.seconds, exit_code
        message = ""
        if pod.attempt and exit_code != _KILLED:
            said = TerminationMessage(failure=failure, attempt=pod.attempt, step=int(pod.step), total_steps=TOTAL_STEPS)
            message = said.model_dump_json(by_alias=True)
        began, ended = stamp(pod.began or pod.ended), stamp(pod.ended)
        state = {"exitCode": exit_code, "reason": "Error", "message": message}
        state |= {"startedAt": began, "finishedAt": ended}
        self._tell(pod, [_condition("Ready", False, pod.ended)], {"name": "trainer", "state": {"terminated": state}})

    def _tell(self, pod: PlayedPod, conditions: list[Object], trainer: Object) -> None:
        told = {item["type"]: item for item in [*self.manifest(pod)["status"]["conditions"], *conditions]}
        status = {"phase": pod.phase, "conditions": list(told.values()), "containerStatuses": [trainer]}
        self._api.change("Pod", pod.name, {"status": status})

    def remove(self, pod: PlayedPod) -> None:
        self._api.remove("Pod", pod.name)
        self.pods.remove(pod)


class JobController:
    """Has the pods of a Job made and replaced, and says how the Job is; and collects what has no owner any more."""

    def __init__(self, story: Story, api: ApiServer, nodes: Nodes) -> None:
        self._story = story
        self._api = api
        self._nodes = nodes
        self._collected = 0
        """The version at which nothing was left that has no owner."""

    def step(self) -> None:
        job = self._api.find("Job")
        uid = job["metadata"]["uid"] if job else None
        for pod in [pod for pod in self._nodes.pods if pod.job_uid != uid and not pod.living]:
            self._nodes.remove(pod)
        if job and not any(self._holds(job, kind) for kind in ("Complete", "Failed")):
            self._sync(job, [pod for pod in self._nodes.pods if pod.job_uid == uid])
        self._collect()

    def _sync(self, job: Object, pods: list[PlayedPod]) -> None:
        living, done = [pod for pod in pods if pod.living], {pod.index for pod in pods if pod.phase == "Succeeded"}
        suspended = bool(job["spec"].get("suspend"))
        if any(pod.exit_code == _FATAL for pod in pods):
            self._end(living)
            self._say(job, FailureTarget=True, **({} if living else {"Failed": True}))
        elif len(done) == PODS:
            self._api.change("Job", KEY.name, {"status": {"succeeded": PODS, "completionTime": self._now()}})
            self._say(job, Complete=True)
        elif suspended:
            self._end(living)
            if "startTime" in job["status"]:
                self._api.change("Job", KEY.name, {"status": {"startTime": None}})
            self._say(job, Suspended=True)
        else:
            self._say(job, Suspended=False)
            if "startTime" not in job["status"]:
                self._api.change("Job", KEY.name, {"status": {"startTime": self._now()}})
            for index in set(range(PODS)) - done - {pod.index for pod in living}:
                self._replace(job, index, [pod for pod in pods if pod.index == index])
        for pod in pods:
            let_go = suspended or not self._tracked(pod)
            if pod.phase == "Failed" and pod.asked is not None and let_go:
                self._nodes.remove(pod)

    def _now(self) -> str:
        return stamp(self._story.seconds)

    def _tracked(self, pod: PlayedPod) -> bool:
        return TRACKING_FINALIZER in self._nodes.manifest(pod)["metadata"].get("finalizers", ())

    def _end(self, pods: list[PlayedPod]) -> None:
        for pod in pods:
            ask_to_end(self._api, self._story, pod.name)

    def _replace(self, job: Object, index: int, before: list[PlayedPod]) -> None:
        """Make the next pod of an index, once it has waited for what its last losses ask for."""
        tracked = [pod for pod in before if self._tracked(pod)]
        replaced = max((pod.replaced + 1 for pod in tracked), default=0)
        last = max((pod.ended or 0.0 for pod in tracked), default=0.0)
        if tracked and self._story.seconds < last + min(600, 10 * 2 ** (replaced - 1)):
            return
        self._nodes.make(job, index, replaced)
        for pod in tracked:
            self._api.change("Pod", pod.name, {"metadata": {"finalizers": []}})

    def _holds(self, job: Object, kind: str) -> bool:
        return any(item["type"] == kind and item["status"] == "True" for item in job["status"].get("conditions", ()))

    def _say(self, job: Object, **conditions: bool) -> None:
        told = {item["type"]: item for item in job["status"].get("conditions", ())}
        news = [kind for kind, holds in conditions.items() if told.get(kind, {}).get("status") != str(holds)]
        for kind in news:
            reason = "PodFailurePolicy" if kind.startswith("Fail") else ""
            told[kind] = _condition(kind, conditions[kind], self._story.seconds, reason=reason)
        if news:
            self._api.change("Job", KEY.name, {"status": {"conditions": list(told.values())}})

    def _collect(self) -> None:
        if self._api.version == self._collected:
            return
        self._collected = self._api.version
        uids = {manifest["metadata"]["uid"] for manifest in self._api.objects.values()}
        for (kind, name), manifest in list(self._api.objects.items()):
            owners = manifest["metadata"].get("ownerReferences", ())
            if all(owner["uid"] in uids for owner in owners):
                continue
            if kind == "Pod":
                ask_to_end(self._api, self._story, name)
            else:
                self._api.remove(kind, name)


class Training:
    """The run, which goes on from what it has saved whenever all its pods serve."""

    def __init__(self, story: Story, nodes: Nodes) -> None:
        self._story = story
        self._nodes = nodes
        self.saved = self._attempts = 0

    def begin_anew(self) -> None:
        self.saved = self._attempts = 0

    def step(self) -> None:
        group = {pod.index: pod for pod in self._nodes.pods if pod.serving}
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
        leader.step = min(TOTAL_STEPS, leader.step + _TICK * _STEPS_A_SECOND)
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
        if pod is None:
            return None
        trains = pod.attempt and self._story.seconds >= pod.trains_from
        progress = TrainingProgress(
            attempt=pod.attempt,
            step=int(pod.step),
            total_steps=TOTAL_STEPS,
            phase=Phase.TRAINING if trains else Phase.LOADING,
            update_time=at(self._story.seconds),
            resumed_from_step=pod.resumed_from or None,
        )
        return Progress(job_uid=job_uid, training=progress)


class Questions:
    """Those that looks have, each of which is answered a little later: by the trainer; Kueue has nothing to say."""

    followed = 1

    def __init__(self, story: Story, picture: Picture, training: Training, clock: Callable[[], float]) -> None:
        self._story = story
        self._picture = picture
        self._training = training
        self._clock = clock
        self._open: dict[type, tuple[Question, float]] = {}

    def put(self, key: Key, wanted: Iterable[Question]) -> None:
        by_kind = {type(question): question for question in wanted}
        self._open = {kind: item for kind, item in self._open.items() if by_kind.get(kind) == item[0]}
        for kind, question in by_kind.items():
            asked = max(self._clock(), question.due if isinstance(question, AskTrainer) else 0.0)
            self._open.setdefault(kind, (question, asked + self._story.random.choice([0.02, 0.3])))

    def answer(self) -> bool:
        """Answer what it is time for; whether there was any."""
        due = [question for question, when in self._open.values() if when <= self._clock()]
        for question in due:
            del self._open[type(question)]
            memory = self._picture.memory(KEY)
            if memory.uid == question.uid:
                self._picture.remember(KEY, self._answered(memory, question))
        return bool(due)

    def _answered(self, memory: Memory, question: Question) -> Memory:
        now, clock = at(self._story.seconds), self._clock()
        match question:
            case AskTrainer():
                said = self._training.report(question.pod_uid, question.uid)
                return questions.trainer_answered(memory, question, said, now, clock=clock)
            case ReadEvents():
                return questions.events_read(memory, ())
            case ReadNamespace():
                return questions.namespace_read(memory, terminating=False)
            case AskKueue():
                job, nothing = self._picture.observed(KEY).job, Queueing(now, now, None, False)
                return questions.kueue_answered(memory, question, nothing, job, clock=clock)
        raise Violation(f"Nobody asks for what is not there: {question}")


class Operator:
    """Hears of the cluster late, looks when it is time to, and may be away."""

    def __init__(self, story: Story, api: ApiServer, training: Training) -> None:
        self._story = story
        self._api = api
        self._training = training
        self._loop = asyncio.new_event_loop()
        self.looks = 0
        api.watcher = self._hear
        self.begin()

    def begin(self) -> None:
        """As a new process, which lists all there is."""
        self.picture = Picture()
        self._questions = Questions(self._story, self.picture, self._training, self._clock)
        self._reconciler = Reconciler(
            cast(Cluster, self._api),
            self.picture,
            cast(Asking, self._questions),
            SETTINGS,
            OperatorMetrics(self.picture.manifests, lambda: 0),
            now=lambda: at(self._story.seconds),
            clock=self._clock,
        )
        self._coming: dict[str, list[tuple[float, str, Object]]] = {kind: [] for kind in KINDS}
        for kind in KINDS:
            listing = Listing(self.picture, kind)
            for manifest in self._api.all_of(kind):
                listing.take(manifest)
            listing.end(self._api.version)
        self.is_there, self._due = True, self._story.seconds

    def leave(self) -> None:
        self.is_there = False

    def close(self) -> None:
        self._loop.close()

    def _clock(self) -> float:
        return 5000.0 + self._story.seconds

    def _hear(self, kind: str, event: str, manifest: Object) -> None:
        if kind in KINDS:
            late = self._story.random.choice([0.01, 0.05, 0.2, 1.0])
            self._coming[kind].append((self._story.seconds + late, event, manifest))

    def _take_in(self) -> None:
        for kind, coming in self._coming.items():
            # Each watch in its order; one may be behind the others.
            while coming and coming[0][0] <= self._story.seconds:
                _, event, manifest = coming.pop(0)
                take = self.picture.remove if event == "DELETED" else self.picture.store
                if take(kind, manifest):
                    self._look_in(0.0 if kind == "SFTJob" else _BREATH_SECONDS)

    def _look_in(self, seconds: float) -> None:
        self._due = min(self._due, self._story.seconds + seconds)

    def step(self) -> None:
        if not self.is_there:
            return
        self._take_in()
        if self._questions.answer():
            self._look_in(0.0)
        if self._story.seconds < self._due:
            return
        self._due = float("inf")
        self.looks += 1
        try:
            again = self._loop.run_until_complete(self._reconciler.reconcile(KEY))
        except (RetryLater, StatusRefusedError):
            again = _BACKOFF_SECONDS
        if again is not None:
            self._look_in(again)


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


@dataclass
class Life:
    """One cluster, in which a job is made and then happens to it what ``happenings`` are, by their weights."""

    seed: int
    happenings: dict[str, float]
    on_status: Callable[[Life, Object, Object], None] = lambda life, before, after: None
    """Called with each status that the operator has written, after the one before."""
    counts: Counts = field(default_factory=Counts)

    def __post_init__(self) -> None:
        self.story = Story(self.seed)
        self.api = ApiServer(self.story)
        self.nodes = Nodes(self.story, self.api)
        self.controller = JobController(self.story, self.api, self.nodes)
        self.training = Training(self.story, self.nodes)
        self.operator = Operator(self.story, self.api, self.training)

    @property
    def random(self) -> Random:
        return self.story.random

    @property
    def status(self) -> Object:
        found = self.api.find("SFTJob")
        return found["status"] if found else {}

    def pass_time(self, seconds: float) -> None:
        end = self.story.seconds + seconds
        while self.story.seconds < end:
            self.story.seconds += _TICK
            self.training.step()
            self.nodes.step(self.training)
            if self.random.random() < 0.5:
                self.controller.step()
            self.operator.step()
            written, self.api.statuses = self.api.statuses, []
            for before, after in written:
                self.on_status(self, before, after)

    def play(self, times: int) -> None:
        """Have so many things happen, and then nothing any more until the job has ended."""
        self.make(suspend=self.random.random() < 0.3)
        names, weights = list(self.happenings), list(self.happenings.values())
        for _ in range(times):
            self.pass_time(self.random.choice([0.1, 0.4, 1, 4, 12]))
            getattr(self, self.random.choices(names, weights)[0])()
        self.resume()
        if self.status.get("state") == "Failed":
            self.retry()
        self.story.tell("from now on nothing happens any more")
        end = self.story.seconds + _LAST_SECONDS
        while self.story.seconds < end and not self._has_ended():
            self.pass_time(5)

    def _has_ended(self) -> bool:
        """Whether the operator says so, and has not begun again since, as it is about to where it was asked to."""
        asked = (self.api.find("SFTJob") or {})["metadata"].get("annotations", {}).get(RETRY_ANNOTATION)
        failed_anew = self.status.get("state") == "Failed" and self.status.get("retried") != asked
        return "completionTime" in self.status and not failed_anew

    # What may happen

    def make(self, suspend: bool = False) -> None:
        self.story.tell(f"SFTJob is made, suspend: {suspend}")
        self.counts, self.api.events = Counts(), Counter()
        compute, policy = {"nodes": PODS, "gpusPerNode": 1}, {"maxRestarts": 50}
        self.api.add("SFTJob", job_manifest(compute=compute, runPolicy=policy, suspend=suspend))
        self.training.begin_anew()

    def make_again(self) -> None:
        self.story.tell("SFTJob is deleted")
        self.api.remove("SFTJob")
        self.pass_time(self.random.choice([0, 0.3, 5]))
        self.make()

    def suspend(self) -> None:
        self.story.tell("user suspends")
        self.counts.suspensions += 1
        self._edit(suspend=True)

    def resume(self) -> None:
        self.story.tell("user resumes")
        self._edit(suspend=False)

    def edit(self) -> None:
        deadline, restarts = self.random.choice([None, 100_000, 200_000]), self.random.choice([50, 60])
        self._edit(runPolicy={"activeDeadlineSeconds": deadline, "maxRestarts": restarts})

    def _edit(self, **spec: Any) -> None:
        self.api.change("SFTJob", KEY.name, {"spec": spec})

    def retry(self) -> None:
        self.story.tell("user asks for another try")
        self.counts.retries += 1
        annotations = {RETRY_ANNOTATION: str(self.counts.retries)}
        self.api.change("SFTJob", KEY.name, {"metadata": {"annotations": annotations}})

    def delete_job(self) -> None:
        if self.api.find("Job"):
            self.story.tell("user deletes the Job")
            self.counts.deleted_jobs += 1
            self.api.remove("Job")

    def delete_job_and_suspend(self) -> None:
        self.delete_job()
        self.suspend()

    def evict(self) -> None:
        job = self.api.find("Job")
        if job and not job["spec"].get("suspend") and (pod := self._any_pod()):
            self.story.tell(f"pod {pod.name} is evicted")
            self.counts.evictions += 1
            ask_to_end(self.api, self.story, pod.name, disrupted_by="EvictionByEvictionAPI")

    def crash(self) -> None:
        if pod := self._any_pod():
            self.story.tell(f"pod {pod.name} crashes")
            self.counts.crashes += 1
            self.nodes.end(pod, _CRASHED, FailureClass.WORKER_CRASHED)

    def fail(self) -> None:
        if pod := self._any_pod():
            self.story.tell(f"pod {pod.name} fails for good")
            self.counts.fatal_failures += 1
            self.nodes.end(pod, _FATAL, FailureClass.DATA_ERROR)

    def _any_pod(self) -> PlayedPod | None:
        """One that serves, of this SFTJob and not of an earlier one."""
        owner, job = (self.api.find(kind) for kind in ("SFTJob", "Job"))
        if not (owner and job) or job["metadata"]["ownerReferences"][0]["uid"] != owner["metadata"]["uid"]:
            return None
        serving = [pod for pod in self.nodes.pods if pod.serving and pod.job_uid == job["metadata"]["uid"]]
        return self.random.choice(serving) if serving else None

    def refuse_status(self) -> None:
        self.api.refuses_next_status = True

    def restart_operator(self) -> None:
        self.story.tell("operator goes")
        self.counts.absences += 1
        self.operator.leave()
        self.pass_time(self.random.choice([0.2, 3, 30]))
        self.story.tell("operator comes back")
        self.operator.begin()
