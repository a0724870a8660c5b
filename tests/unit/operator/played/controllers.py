"""The Job controller and the garbage collector."""

from __future__ import annotations

from sft_operator.names import TRACKING_FINALIZER
from sft_operator.picture.observed import Warning
from tests.unit.operator.make import Object, at
from tests.unit.operator.played.cluster import PODS, ApiServer, Story
from tests.unit.operator.played.nodes import FATAL, IN_USE, Nodes, PlayedPod
from tests.unit.operator.test_reconciler import KEY

_QUOTA = 'pods "tulu-0-x" is forbidden: exceeded quota: gpus, requested: requests.nvidia.com/gpu=1, used: 8, limited: 8'


class JobController:
    """Has the pods of a Job made and replaced, and says how the Job is."""

    def __init__(self, story: Story, api: ApiServer, nodes: Nodes) -> None:
        self._story = story
        self._api = api
        self._nodes = nodes
        self.is_over_quota = False
        """No pod may be made."""
        self.refused: Warning | None = None
        """Its last event of that."""

    def step(self) -> None:
        job = self._api.find("Job")
        uid = job["metadata"]["uid"] if job else None
        for pod in [pod for pod in self._nodes.pods if pod.job_uid != uid and not pod.living]:
            self._nodes.remove(pod)
        if job and not any(self._api.holds("Job", KEY.name, kind) for kind in ("Complete", "Failed")):
            self._sync(job, [pod for pod in self._nodes.pods if pod.job_uid == uid])

    def _sync(self, job: Object, pods: list[PlayedPod]) -> None:
        living, done = [pod for pod in pods if pod.living], {pod.index for pod in pods if pod.phase == "Succeeded"}
        suspended = bool(job["spec"].get("suspend"))
        if any(pod.exit_code in (FATAL, IN_USE) and pod.phase == "Failed" for pod in pods):
            self._end(living)
            self._say(FailureTarget=True, **({} if living else {"Failed": True}))
        elif len(done) == PODS:
            self._api.change("Job", KEY.name, {"status": {"succeeded": PODS, "completionTime": self._story.now()}})
            self._say(Complete=True)
        elif suspended:
            self._end(living)
            if "startTime" in job["status"]:
                self._api.change("Job", KEY.name, {"status": {"startTime": None}})
            self._say(Suspended=True)
        else:
            self._say(Suspended=False)
            if "startTime" not in job["status"]:
                self._api.change("Job", KEY.name, {"status": {"startTime": self._story.now()}})
            for index in set(range(PODS)) - done - {pod.index for pod in living}:
                self._replace(job, index, [pod for pod in pods if pod.index == index])
        for pod in pods:
            let_go = suspended or not self._tracked(pod)
            if pod.phase == "Failed" and pod.asked is not None and let_go:
                self._nodes.remove(pod)

    def _tracked(self, pod: PlayedPod) -> bool:
        manifest = self._api.find("Pod", pod.name)
        return manifest is not None and TRACKING_FINALIZER in manifest["metadata"].get("finalizers", ())

    def _end(self, pods: list[PlayedPod]) -> None:
        for pod in pods:
            if self._api.find("Pod", pod.name):
                self._api.ask_to_end(pod.name)

    def _replace(self, job: Object, index: int, before: list[PlayedPod]) -> None:
        """Make the next pod of an index, once it has waited for what its last losses ask for."""
        tracked = [pod for pod in before if self._tracked(pod)]
        replaced = max((pod.replaced + 1 for pod in tracked), default=0)
        last = max((pod.ended or 0.0 for pod in tracked), default=0.0)
        if tracked and self._story.seconds < last + min(600, 10 * 2 ** (replaced - 1)):
            return
        if self._api.is_terminating:
            return
        if self.is_over_quota:
            self.refused = Warning(f"Job/{KEY.name}", "FailedCreate", f"Error creating: {_QUOTA}", at(self._story.time))
            return
        self._nodes.make(job, index, replaced)
        for pod in tracked:
            self._api.change("Pod", pod.name, {"metadata": {"finalizers": []}})

    def _say(self, **conditions: bool) -> None:
        told = {
            kind: (holds, "PodFailurePolicy" if kind.startswith("Fail") else "", "")
            for kind, holds in conditions.items()
        }
        self._api.say("Job", KEY.name, **told)


class GarbageCollector:
    """Removes what has no owner any more, and lets go of what is to stay."""

    def __init__(self, story: Story, api: ApiServer) -> None:
        self._story = story
        self._api = api
        self._collected = 0
        """The version at which nothing was left to do."""

    def step(self) -> None:
        if self._api.version == self._collected:
            return
        self._collected = self._api.version
        self._finish_deletion()
        uids = {manifest["metadata"]["uid"] for manifest in self._api.objects.values()}
        for (kind, name), manifest in list(self._api.objects.items()):
            owners = manifest["metadata"].get("ownerReferences", ())
            if all(owner["uid"] in uids for owner in owners):
                continue
            self._api.delete(kind, name)

    def _finish_deletion(self) -> None:
        job = self._api.find("SFTJob")
        if job is None or "deletionTimestamp" not in job["metadata"]:
            return
        finalizers = job["metadata"].get("finalizers", [])
        owned = [key for key, manifest in self._api.objects.items() if self._is_owned(manifest, job)]
        if "orphan" in finalizers:
            for kind, name in owned:
                self._api.change(kind, name, {"metadata": {"ownerReferences": []}})
            finalizers = [name for name in finalizers if name != "orphan"]
        if "foregroundDeletion" in finalizers and not owned:
            finalizers = [name for name in finalizers if name != "foregroundDeletion"]
        elif "foregroundDeletion" in finalizers:
            for kind, name in owned:
                self._api.delete(kind, name)
        self._api.change("SFTJob", KEY.name, {"metadata": {"finalizers": finalizers}})

    def _is_owned(self, manifest: Object, owner: Object) -> bool:
        uid = owner["metadata"]["uid"]
        return any(reference["uid"] == uid for reference in manifest["metadata"].get("ownerReferences", ()))


class NamespaceController:
    """Empties a namespace that is to go, object by object, in no order."""

    def __init__(self, story: Story, api: ApiServer) -> None:
        self._story = story
        self._api = api

    def step(self) -> None:
        if not self._api.is_terminating or self._story.random.random() < 0.8:
            return
        left = [key for key in self._api.objects if key[0] != "Namespace"]
        if left:
            self._api.delete(*self._story.random.choice(left))
        else:
            self._story.tell("the namespace is gone")
            self._api.is_terminating = False
