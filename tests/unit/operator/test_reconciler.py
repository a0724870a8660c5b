"""One look at a job against an API server that is a dictionary: what is created, changed, deleted and written."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import datetime
from typing import Any, cast

import aiohttp
import pytest

from sft_api.progress import Progress
from sft_api.v1alpha1.job import RETRY_ANNOTATION
from sft_operator.cluster.asking import Asking
from sft_operator.cluster.client import ApiError, Cluster
from sft_operator.cluster.progress_client import ProgressClient, UnusableReport
from sft_operator.config import PodSettings, Settings, StoreSettings
from sft_operator.decisions.result import Question, ReadStore
from sft_operator.decisions.situation import LAST_WORDS
from sft_operator.metrics import OperatorMetrics
from sft_operator.names import CHECKPOINT_URI_ANNOTATION, CONFIG_DIGEST_ANNOTATION, config_map_name
from sft_operator.picture.picture import Key, Picture
from sft_operator.reconciler import Reconciler
from sft_operator.workqueue import RetryLater
from tests.unit.operator.make import NOW, Object, at, child_manifest, job_manifest, pod_manifest, stamp

KEY = Key("team", "tulu")
SETTINGS = Settings(pods=PodSettings(image="trainer:1"))


class Api:
    """Objects by kind and name, and what was asked for."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], Object] = {}
        self.calls: list[tuple[str, str, str]] = []
        self.refuses: Callable[[str, str], Exception | None] = lambda verb, kind: None
        self.keeps_labels = self.keeps_owners = True
        self._version = 100

    def keep(self, kind: str, manifest: Object) -> Object:
        self._version += 1
        metadata = {"uid": f"{kind}-uid", **manifest["metadata"], "resourceVersion": str(self._version)}
        self.objects[kind, metadata["name"]] = {**manifest, "metadata": metadata}
        return self.objects[kind, metadata["name"]]

    def _called(self, verb: str, kind: str, name: str) -> None:
        self.calls.append((verb, kind, name))
        if error := self.refuses(verb, kind):
            raise error

    async def create(self, kind: str, namespace: str, manifest: Object, *, whole: bool = False) -> Object:
        name = manifest["metadata"]["name"]
        self._called("create", kind, name)
        if (kind, name) in self.objects:
            raise ApiError(409, "AlreadyExists", f"{name} exists")
        return self.keep(kind, manifest)

    async def get(self, kind: str, namespace: str | None, name: str, **_: Any) -> Object:
        self._called("get", kind, name)
        if (kind, name) not in self.objects:
            raise ApiError(404, "NotFound", f"{name} not found")
        return self.objects[kind, name]

    async def list(self, kind: str, namespace: str | None, **_: Any) -> tuple[list[Object], int]:
        self._called("list", kind, "")
        return [value for (held, _), value in self.objects.items() if held == kind], self._version

    async def scan(self, kind: str, namespace: str | None, take: Callable[[Object], None], **_: Any) -> int:
        for manifest in (await self.list(kind, namespace))[0]:
            take(manifest)
        return self._version

    async def patch(self, kind: str, namespace: str, name: str, patch: Object, **_: Any) -> Object:
        self._called("patch", kind, name)
        if not self.keeps_labels and "labels" in patch.get("metadata", {}):
            return self.objects[kind, name]
        if not self.keeps_owners and "ownerReferences" in patch.get("metadata", {}):
            return self.objects[kind, name]
        return self.keep(kind, merged(self.objects.get((kind, name), {"metadata": {"name": name}}), patch))

    async def delete(self, kind: str, namespace: str, name: str, *, version: str | None = None, **_: Any) -> None:
        self._called("delete", kind, name)
        if version in (None, self.objects.get((kind, name), {}).get("metadata", {}).get("resourceVersion")):
            self.objects.pop((kind, name), None)

    def done(self, verb: str, kind: str) -> int:
        return sum(call[:2] == (verb, kind) for call in self.calls)


def merged(value: Object, patch: Object) -> Object:
    result = dict(value)
    for name, item in patch.items():
        result[name] = merged(result.get(name) or {}, item) if isinstance(item, dict) else item
    return {name: item for name, item in result.items() if item is not None}


class NoTrainers:
    """No supervisor answers."""

    async def read(self, **_: Any) -> Progress:
        raise UnusableReport("nobody is there")


class RecordedAsking(Asking):
    """Remembers what was asked."""

    questions: tuple[Question, ...] = ()

    def put(self, key: Key, wanted: Iterable[Question]) -> None:
        self.questions = (*self.questions, *(asked := tuple(wanted)))
        super().put(key, asked)


class World:
    """An operator with its settings, over an API server that outlives it."""

    def __init__(self, settings: Settings = SETTINGS, api: Api | None = None) -> None:
        self.api = api or Api()
        self.picture = Picture()
        self.now: datetime = NOW
        self.clock = 0.0
        self.watched: tuple[str, ...] = ("SFTJob", "Job", "Pod")
        self.wanted: set[Key] = set()
        metrics = OperatorMetrics(self.picture.manifests, lambda: 0)
        self.asking = RecordedAsking(
            cast(Cluster, self.api),
            self.picture,
            cast(ProgressClient, NoTrainers()),
            None,
            None,
            metrics,
            look_again=self.wanted.add,
            now=lambda: self.now,
        )
        self.reconciler = Reconciler(
            cast(Cluster, self.api),
            self.picture,
            self.asking,
            settings,
            metrics,
            now=lambda: self.now,
            clock=lambda: self.clock,
        )
        self._loop = asyncio.new_event_loop()
        self._loop.time = lambda: self.clock  # type: ignore[method-assign]

    def look(self, times: int = 1) -> list[float | None]:
        """Look so many times with all that the API server holds, each time until nothing is wanted for a second; when
        the next looks are wanted."""
        return self._loop.run_until_complete(self._looks(times))

    async def _looks(self, times: int) -> list[float | None]:
        wanted = []
        for _ in range(times):
            for _ in range(20):
                self.wanted.clear()
                for (kind, _name), manifest in list(self.api.objects.items()):
                    if kind in self.watched:
                        self.picture.store(kind, manifest)
                again = await self.reconciler.reconcile(KEY)
                for _ in range(20):
                    if len(asyncio.all_tasks()) > 1:
                        await asyncio.sleep(0)
                if self.wanted:
                    continue
                if again is None or again >= 1.0:
                    break
                self.clock += again
            wanted.append(again)
        return wanted

    @property
    def status(self) -> Object:
        status: Object = self.api.objects["SFTJob", "tulu"].get("status", {})
        return status

    def condition(self, kind: str) -> Object:
        return next(item for item in self.status["conditions"] if item["type"] == kind)


def store(uri: str) -> Settings:
    return SETTINGS.model_copy(update={"store": StoreSettings(uri=uri)})


def export_of_the_complete_run(world: World) -> str:
    """Where the status says that the run has exported, once its Job is complete."""
    job = world.api.objects["Job", "tulu"]
    done = child_manifest(conditions={"Complete": ("", "")})
    world.api.keep("Job", {**job, "status": done["status"]})
    # Its pods, whose last words are waited for, are gone.
    world.now += 2 * LAST_WORDS
    world.look()
    assert world.status["state"] == "Complete"
    uri: str = world.status["export"]["uri"]
    return uri


@pytest.mark.parametrize("later", [SETTINGS, store("s3://new/place")], ids=["gone", "another"])
def test_a_run_goes_on_where_it_began_when_the_store_of_the_settings_changes_or_goes(later: Settings) -> None:
    # Given a run in the platform's store
    first = World(store("s3://old/place"))
    first.api.keep("SFTJob", job_manifest(checkpoint={}, export={"atEnd": True}))
    first.look()

    # When the operator comes back with other settings
    world = World(later, first.api)
    world.look(2)

    # Then it follows the run as before
    assert world.condition("Accepted")["status"] == "True"
    assert world.status["state"] == "Starting"
    assert export_of_the_complete_run(world).startswith("s3://old/place/team/tulu-8b53e93a77567bc0/")


def test_a_job_that_is_made_later_is_followed_where_its_config_map_says() -> None:
    # Given a Job that was refused after its ConfigMap had been made
    first = World(store("s3://old/place"))
    first.api.keep("SFTJob", job_manifest(checkpoint={}, export={"atEnd": True}))
    first.api.refuses = lambda verb, kind: ApiError(403, "Forbidden", "quota") if kind == "Job" else None
    first.look()
    first.api.refuses = lambda verb, kind: None

    second = World(store("s3://new/place"), first.api)
    second.look()

    assert export_of_the_complete_run(second).startswith("s3://old/place/team/tulu-8b53e93a77567bc0/")


def test_the_store_is_read_once_for_a_run_whose_pods_have_ended_in_its_own_folder() -> None:
    verify = SETTINGS.model_copy(update={"store": StoreSettings(uri="s3://platform/sft", verify=True)})
    world = World(verify)
    world.api.keep("SFTJob", {**job_manifest(checkpoint={}), "status": {"attempt": 1}})
    world.look()
    (question,) = {asked for asked in world.asking.questions if isinstance(asked, ReadStore)}

    world.asking.questions = ()
    world.look()

    assert question.uri == "s3://platform/sft/team/tulu-8b53e93a77567bc0"
    assert not world.asking.questions


def test_a_config_map_of_our_name_and_owner_that_holds_no_configuration_stops_nothing() -> None:
    # Given one that somebody made beforehand, with an owner reference that anybody can write
    world = World(store("s3://models/sft"))
    manifest = world.api.keep("SFTJob", job_manifest(checkpoint={}))
    owner = {"apiVersion": manifest["apiVersion"], "kind": "SFTJob", "controller": True, "name": "tulu"}
    owner["uid"] = manifest["metadata"]["uid"]
    forged = {"metadata": {"name": config_map_name("tulu"), "ownerReferences": [owner]}, "data": {"other": "{}"}}
    world.api.keep("ConfigMap", forged)

    # When the operator looks
    world.look()

    # Then the Job is made, with the copy that the ConfigMap is healed from
    annotations = world.api.objects["Job", "tulu"]["metadata"]["annotations"]
    assert annotations[CONFIG_DIGEST_ANNOTATION]
    assert annotations[CHECKPOINT_URI_ANNOTATION].startswith("s3://models/sft/team/")


def test_without_a_job_and_a_place_for_checkpoints_nothing_runs() -> None:
    world = World()
    world.api.keep("SFTJob", job_manifest(checkpoint={}))

    world.look()

    assert world.condition("Accepted")["reason"] == "NotConfigured"
    assert world.api.done("create", "Job") == 0


@pytest.mark.parametrize("field", ["checkpoint", "export"])
def test_a_folder_in_the_pod_is_no_place_to_keep_anything(field: str) -> None:
    world = World()
    world.api.keep("SFTJob", job_manifest(**{field: {"uri": "file:///tmp/run"}}))

    world.look()

    assert world.condition("Accepted")["reason"] == "NotConfigured"
    assert f"spec.{field}.uri file:///tmp/run" in world.status["message"]
    assert "use s3://bucket/prefix or pvc://claim/path" in world.status["message"]
    assert world.api.done("create", "ConfigMap") == 0


@pytest.mark.parametrize("field", ["checkpoint", "export"])
def test_another_namespaces_folder_of_the_platforms_store_is_refused(field: str) -> None:
    world = World(store("s3://platform/sft"))
    world.api.keep("SFTJob", job_manifest(**{field: {"uri": "s3://platform/sft/other/run"}}))

    world.look()

    for kind in ("Accepted", "Stalled"):
        assert world.condition(kind)["reason"] == "PlaceNotAllowed"
    assert f"spec.{field}.uri s3://platform/sft/other/run" in world.status["message"]
    assert "below s3://platform/sft/team/" in world.status["message"]
    assert world.api.done("create", "ConfigMap") == 0


def test_what_has_ended_stays_so_when_its_spec_is_no_longer_understood() -> None:
    # Given a run that was complete before the operator was changed, and whose Job still runs
    world = World()
    manifest = job_manifest(invented={"field": 1}, runPolicy={"ttlSecondsAfterFinished": 60})
    manifest["status"] = {"state": "Complete", "completionTime": stamp(0)}
    world.api.keep("SFTJob", manifest)
    world.api.keep("Job", child_manifest())

    (wanted,) = world.look()

    assert world.status["state"] == "Complete"
    assert "conditions" not in world.status
    assert world.api.done("delete", "Job") == 1
    assert wanted is not None

    # Then it is removed after its time, like any other
    world.now = at(61)
    world.look()
    assert world.api.done("delete", "SFTJob") == 1


def test_a_run_whose_spec_is_no_longer_understood_is_suspended_ends_and_is_removed_after_its_time() -> None:
    # Given a run that another version of the operator began
    world = World()
    spec: Object = {"invented": {"field": 1}, "runPolicy": {"ttlSecondsAfterFinished": 60}}
    manifest = world.api.keep("SFTJob", job_manifest(**spec))
    world.api.keep("Job", child_manifest())
    for index in (0, 1):
        world.api.keep("Pod", pod_manifest(index))
    world.look(2)
    assert world.condition("Accepted")["reason"] == "InvalidSpec"
    assert "spec.invented" in world.status["message"]

    # When it is suspended, and resumed, and complete
    for suspend in (True, False):
        world.api.keep("SFTJob", {**manifest, "spec": {**manifest["spec"], "suspend": suspend}})
        world.look()
        assert world.api.objects["Job", "tulu"]["spec"]["suspend"] is suspend
    world.api.keep("Job", child_manifest(conditions={"Complete": ("", "")}))
    for index in (0, 1):
        world.api.keep("Pod", pod_manifest(index, phase="Succeeded", exit_code=0))
    world.look(2)

    # Then it is so, and goes after its time
    assert world.status["state"] == "Complete"
    assert world.condition("Accepted")["status"] == "False"
    world.now = at(61)
    world.look()
    assert world.api.done("delete", "SFTJob") == 1


@pytest.mark.parametrize(
    "error",
    [
        ApiError(403, "Forbidden", "no"),
        ApiError(500, "InternalError", 'failed calling webhook "validate.kyverno.svc": connection refused'),
    ],
)
def test_a_stuck_pod_that_may_not_be_given_up_is_left_alone_for_a_while(
    error: ApiError,
) -> None:
    world = World()
    world.api.keep("SFTJob", job_manifest())
    world.api.keep("Job", child_manifest())
    for index in (0, 1):
        world.api.keep("Pod", pod_manifest(index, deletion=-600))
    world.api.refuses = lambda verb, kind: error if (verb, kind) == ("patch", "Pod") else None

    world.look(5)
    assert world.api.done("patch", "Pod") == 0, "they have only just been seen"
    world.clock += 31
    world.look(5)

    assert world.api.done("patch", "Pod") == 2, "once for each pod"
    assert world.api.done("delete", "Pod") == 0


def test_a_job_that_was_left_behind_just_now_is_not_deleted() -> None:
    """With ``--cascade=orphan``: that its SFTJob may go can be seen before that it is owned no more."""
    world = World()
    manifest = world.api.keep("SFTJob", job_manifest())
    world.api.keep("Job", child_manifest())
    world.look()
    world.watched = ("SFTJob", "Pod")
    left = child_manifest()
    del left["metadata"]["ownerReferences"]

    world.api.keep("Job", left)
    world.api.keep("SFTJob", merged(manifest, {"metadata": {"deletionTimestamp": stamp(0)}}))
    world.look()
    assert world.api.done("delete", "Job") == 0

    world.api.keep("Job", child_manifest())
    world.clock += 3
    world.look()
    assert world.api.done("delete", "Job") == 1


@pytest.mark.parametrize(
    "error",
    [ApiError(403, "Forbidden", "no"), TimeoutError(), aiohttp.ServerDisconnectedError()],
    ids=["refused", "no answer", "reset"],
)
@pytest.mark.parametrize("past_its_time", [False, True])
def test_what_cannot_be_done_keeps_nothing_else_from_being_done_and_said(error: Exception, past_its_time: bool) -> None:
    # Given a run that has ended, and whose Job, which runs still, may not be deleted
    world = World()
    manifest = job_manifest(runPolicy={"ttlSecondsAfterFinished": 60 if past_its_time else 3600})
    world.api.keep("SFTJob", {**manifest, "status": {"state": "Complete", "completionTime": stamp(-61)}})
    world.api.keep("Job", child_manifest())
    world.api.refuses = lambda verb, kind: error if (verb, kind) == ("delete", "Job") else None

    # When the operator looks
    with pytest.raises(RetryLater):  # it tries that again
        world.look()

    # Then the rest was done, and said; and its pods end where that is for good
    assert world.api.objects["Job", "tulu"]["spec"]["suspend"] is isinstance(error, ApiError)
    assert world.api.done("delete", "SFTJob") == past_its_time
    assert world.api.done("patch", "SFTJob") == 1


@pytest.mark.parametrize(
    "asked",
    [
        {"metadata": {"annotations": {RETRY_ANNOTATION: "again"}}},
        {"spec": {"deletionPolicy": "Delete"}},
        {"spec": {"runPolicy": {"ttlSecondsAfterFinished": None}}},
    ],
    ids=["another try", "its place", "no time to live"],
)
def test_a_time_to_live_deletes_nothing_of_which_its_user_has_just_asked_something_else(asked: Object) -> None:
    """Its checkpoints would go with it, or stay for ever, against what the API server has taken."""
    world = World()
    ended = {"state": "Failed", "completionTime": stamp(-61)}
    manifest = {**job_manifest(runPolicy={"ttlSecondsAfterFinished": 60}), "status": ended}

    # Given that the watch has not told yet what was asked for
    world.picture.store("SFTJob", world.api.keep("SFTJob", manifest))
    world.watched = ()
    kept = world.api.keep("SFTJob", merged(manifest, asked))

    world.look()

    assert world.api.done("delete", "SFTJob") == 1
    assert world.api.objects["SFTJob", "tulu"].get("spec") == kept["spec"]


@pytest.mark.parametrize(
    "error",
    [
        ApiError(403, "Forbidden", "exceeded quota"),
        ApiError(500, "InternalError", 'failed calling webhook "mjob.kb.io": connection refused'),
    ],
    ids=["refused", "webhook"],
)
def test_a_refusal_that_lasts_for_weeks_is_tried_again_at_the_longest_pace(
    error: ApiError,
) -> None:
    # Given a Job that is refused whenever it is tried
    world = World(store("s3://models/sft"))
    world.api.keep("SFTJob", job_manifest(checkpoint={}))
    world.api.refuses = lambda verb, kind: error if (verb, kind) == ("create", "Job") else None

    world.look()
    world.picture.remember(KEY, replace(world.picture.memory(KEY), refusals=1100))
    tried = world.api.done("create", "Job")

    # When that goes on for longer than pauses could be doubled
    for _ in range(3):
        world.clock += 1000.0
        wanted = world.look()[0]

    # Then it is told still, and tried again within minutes
    assert world.api.done("create", "Job") == tried + 3
    assert error.message in world.status["message"]
    assert wanted is not None
    assert wanted <= 300.0


@pytest.mark.parametrize(
    ("message", "made"),
    [
        ('admission webhook "quota.corp" denied the request: cluster g7 is being terminated, use g8', True),
        ('jobs.batch "tulu" is forbidden: unable to create new content in namespace team because it is being '
         "terminated", False),
    ],
)  # fmt: skip
def test_only_the_api_servers_own_word_that_the_namespace_is_going_ends_all_tries(message: str, made: bool) -> None:
    world = World()
    world.api.keep("SFTJob", job_manifest())
    world.api.refuses = lambda verb, kind: (
        ApiError(403, "Forbidden", message) if (verb, kind) == ("create", "Job") else None
    )
    world.look()
    world.api.refuses = lambda verb, kind: None

    world.clock += 10
    world.look(2)

    assert (("Job", "tulu") in world.api.objects) == made


def test_a_change_that_somebody_undoes_for_weeks_is_made_again_ever_more_rarely_but_always() -> None:
    # Given a Job that somebody changes back whenever it was given its deadline, a thousand times
    world = World(store("s3://models/sft"))
    world.api.keep("SFTJob", job_manifest(checkpoint={}, runPolicy={"activeDeadlineSeconds": 900}))
    world.look()

    def undo() -> None:
        job = world.api.objects["Job", "tulu"]
        world.api.keep("Job", {**job, "spec": {**job["spec"], "activeDeadlineSeconds": 5}})
        world.clock += 1000.0
        world.look()

    undo()
    memory = world.picture.memory(KEY)
    assert memory.patched is not None
    world.picture.remember(KEY, replace(memory, patched=replace(memory.patched, times=1100)))

    for _ in range(3):
        undo()

    assert world.api.done("patch", "Job") == 4


def test_a_job_whose_owner_has_another_name_is_not_ours_and_not_made_again_and_again() -> None:
    # Given a Job of our name, by whoever may write one, that names its owner wrongly
    world = World(store("s3://models/sft"))
    manifest = world.api.keep("SFTJob", job_manifest(checkpoint={}))
    owner = {"apiVersion": manifest["apiVersion"], "kind": "SFTJob", "controller": True, "name": "other"}
    owner["uid"] = manifest["metadata"]["uid"]
    child = child_manifest()
    child["metadata"]["ownerReferences"] = [owner]
    world.api.keep("Job", child)

    # When it is in the way
    world.look()

    # Then that is said, and not tried without a pause
    assert world.condition("Stalled")["reason"] == "NameTaken"
    assert world.api.done("create", "Job") == 1


def test_a_job_that_was_made_but_is_not_in_the_picture_is_waited_for() -> None:
    """It is gone already, or cannot be read."""
    world = World(store("s3://models/sft"))
    world.api.keep("SFTJob", job_manifest(checkpoint={}))
    taken = world.picture.store
    world.picture.store = lambda kind, manifest: None if kind == "Job" else taken(kind, manifest)  # type: ignore[method-assign]

    (wanted,) = world.look()

    assert world.api.done("create", "Job") == 1
    assert wanted is not None
    assert wanted >= 1.0
    assert world.status["state"] == "Preparing"


def test_of_many_that_are_placed_in_part_not_each_looks_through_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given two groups of which one pod found room and the other none
    world = World()
    theirs = Key("team", "other")
    for name in (KEY.name, theirs.name):
        named(world, "SFTJob", job_manifest(uid=f"uid-{name}"), name)
        named(world, "Job", child_manifest(owner=f"uid-{name}"), name, uid=f"job-{name}")
        unplaced = {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "lastTransitionTime": stamp(-9),
        }
        pods = (pod_manifest(0, ready=False), pod_manifest(1, phase="Pending", node=None, conditions=[unplaced]))
        for index, pod in enumerate(pods):
            named(world, "Pod", pod, f"{name}-{index}", uid=f"pod-{name}-{index}", job=name)
    looks, jobs = list[float](), world.picture.jobs

    def looked_through() -> Iterable[Any]:
        looks.append(world.clock)
        return jobs()

    monkeypatch.setattr(world.picture, "jobs", looked_through)

    # When each is looked at again and again
    for world.clock in (10.0, 10.5, 11.0):
        mine, others = (world.reconciler._snapshot(key).rivals.half_placed for key in (KEY, theirs))

        # Then each knows of the other
        assert ([rival.key for rival in mine], [rival.key for rival in others]) == ([theirs], [KEY])

    # And all jobs were looked through once a second, for both
    assert looks == [10.0, 11.0]


def named(world: World, kind: str, manifest: Object, name: str, *, uid: str = "", job: str = "") -> None:
    """Put ``manifest`` into the picture under another name; a pod as one of the Job ``job``."""
    metadata = {**manifest["metadata"], "name": name, **({"uid": uid} if uid else {})}
    for owner in metadata.get("ownerReferences", []):
        owner["name"] = job or name
        owner["uid"] = f"job-{job}" if job else owner["uid"]
    world.picture.store(kind, {**manifest, "metadata": metadata})
