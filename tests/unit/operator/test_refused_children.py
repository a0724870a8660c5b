"""Children that the API server refuses, or that are others': what one lacks neither hides nor hinders the rest."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import aiohttp
import pytest

from sft_api.deletion import DELETES
from sft_operator.cluster.client import ApiError
from sft_operator.config import StoreSettings
from sft_operator.names import PLACE_FINALIZER, QUEUE_LABEL
from sft_operator.workqueue import RetryLater
from tests.unit.operator.make import Object, job_manifest, stamp
from tests.unit.operator.test_reconciler import KEY, SETTINGS, World

DENIES = 'admission webhook "vjob.kb.io" denied the request'
AWAY = {
    "500": ApiError(500, "InternalError", "etcdserver: leader changed"),
    "503": ApiError(503, "", "the server is currently unable to handle the request"),
    "overload": ApiError(429, "TooManyRequests", "too many requests, please try again later", retry_after=1.0),
    "conflict": ApiError(409, "Conflict", "the object has been modified; please apply your changes to the latest"),
    "token": ApiError(401, "Unauthorized", "Unauthorized"),
    "connection": aiohttp.ServerDisconnectedError("Server disconnected"),
}
"""What may pass by itself, and is no webhook's."""
transient = pytest.mark.parametrize("error", AWAY.values(), ids=AWAY.keys())


def pass_time(world: World, seconds: float) -> None:
    """So many seconds, with a look in each."""
    for _ in range(round(seconds)):
        world.clock += 1.0
        world.now += timedelta(seconds=1)
        world.look()


def answer(verb: str, kind: str, error: Exception) -> Callable[[str, str], Exception | None]:
    """Answers one kind of request with an error."""
    return lambda asked, of: error if (asked, of) == (verb, kind) else None


def refused_world(**errors: ApiError) -> World:
    """A job, and an API server that answers with these errors when children of these kinds are to be created."""
    world = World()
    world.api.keep("SFTJob", job_manifest())
    world.api.refuses = lambda verb, kind: errors.get(kind) if verb == "create" else None
    return world


def test_a_child_that_is_refused_for_good_is_told_while_another_may_still_pass() -> None:
    world = refused_world(
        ConfigMap=ApiError(500, "InternalError", "try later"),
        NetworkPolicy=ApiError(403, "Forbidden", "exceeded quota: none of these"),
    )

    world.look()

    assert "the API server refused the NetworkPolicy: exceeded quota" in world.status["message"]
    assert world.api.done("create", "Job") == 0


def test_a_job_that_was_deleted_just_now_is_no_refusal() -> None:
    """Whoever suspends a run and deletes its Job: the second is told a moment later."""
    world = World()
    world.api.keep("SFTJob", job_manifest())
    world.look()
    world.look()
    suspended = job_manifest(suspend=True) | {"status": world.status}
    suspended["metadata"]["generation"] = 2
    world.api.keep("SFTJob", suspended)
    world.api.refuses = answer("patch", "Job", ApiError(404, "NotFound", 'jobs.batch "tulu" not found'))

    pass_time(world, 3)

    assert 1 <= world.api.done("patch", "Job") <= 3, "ever more rarely, if nothing tells of it"
    assert world.condition("Stalled")["status"] == "False"


@pytest.mark.parametrize(("resumed", "stalled"), [(True, "False"), (False, "True")])
def test_a_job_that_was_resumed_just_now_and_keeps_its_queue_is_no_refusal(resumed: bool, stalled: str) -> None:
    """Kueue's webhook lets no Job that runs change its queue, and that it runs is told a moment later."""
    world = World()
    world.api.keep("SFTJob", job_manifest(labels={QUEUE_LABEL: "gpus"}))
    world.look(2)
    world.watched = ("SFTJob", "Pod")
    job = world.api.objects["Job", "tulu"]
    world.api.keep("Job", {**job, "spec": {**job["spec"], "suspend": not resumed}})
    moved = job_manifest(labels={QUEUE_LABEL: "others"}) | {"status": world.status}
    world.api.keep("SFTJob", moved)
    world.api.refuses = answer("patch", "Job", ApiError(403, "Forbidden", f"{DENIES}: {QUEUE_LABEL}: immutable"))

    world.look()

    assert world.api.done("patch", "Job") == 1
    assert world.condition("Stalled")["status"] == stalled


@pytest.mark.parametrize("kind", ["NetworkPolicy", "Job"])
@pytest.mark.parametrize("code", [401, 409, 410, 429])
def test_a_webhook_that_says_no_is_quoted_whatever_code_it_says_it_with(kind: str, code: int) -> None:
    words = 'admission webhook "no.example.org" denied the request: not on Sundays'
    world = refused_world(**{kind: ApiError(code, "", words)})

    world.look()

    stalled = world.condition("Stalled")
    assert (stalled["status"], stalled["reason"]) == ("True", "Refused")
    assert f"the API server refused the {kind}: {words}" in world.status["message"]


def test_a_child_that_is_anothers_keeps_nobody_from_making_the_others_again() -> None:
    # Given a Job whose Service was replaced by somebody's, and which has lost its other children
    world = World()
    world.api.keep("SFTJob", job_manifest())
    world.look()
    world.api.keep("Service", {"metadata": {"name": "tulu"}, "spec": {}})
    lost = [("NetworkPolicy", "tulu"), ("ConfigMap", "tulu-config")]
    for child in lost:
        del world.api.objects[child]

    # When its children are looked at
    world.clock += 60.0
    world.look()

    # Then those are there again, and the Service is named
    assert all(child in world.api.objects for child in lost)
    assert world.condition("Stalled")["reason"] == "NameTaken"
    assert "a Service tulu exists that does not belong to this SFTJob" in world.status["message"]


@pytest.mark.parametrize(
    ("change", "again"),
    [({"appProtocol": "http"}, 0), ({"port": 80}, 1), ({"targetPort": None}, 1)],
    ids=["added", "another-port", "taken-away"],
)
def test_what_a_webhook_adds_to_the_port_of_a_service_stays(change: Object, again: int) -> None:
    """It would add that to the next one as well: names of pods that begin were away every half minute."""
    world = World()
    world.api.keep("SFTJob", job_manifest())
    world.look()
    service = world.api.objects["Service", "tulu"]
    [port] = service["spec"]["ports"]
    world.api.keep("Service", {**service, "spec": {**service["spec"], "ports": [{**port, **change}]}})

    world.clock += 60.0
    world.look()

    assert world.api.done("delete", "Service") == again


@transient
def test_what_passes_at_once_is_not_told(error: Exception) -> None:
    # Given an API server that cannot take a Job in this moment
    world = World()
    world.api.keep("SFTJob", job_manifest())
    world.api.refuses = answer("create", "Job", error)
    world.look()
    assert world.status == {}

    # When it can again
    world.api.refuses = lambda verb, kind: None
    pass_time(world, 2)

    # Then the job has started, and nobody has read of anything else
    assert (world.status["state"], world.api.done("patch", "SFTJob")) == ("Starting", 1)


@transient
@pytest.mark.parametrize("kind", ["ConfigMap", "Job"])
def test_what_lasts_for_some_seconds_is_told_once_and_stalls_later(kind: str, error: Exception) -> None:
    # Given an API server that cannot take a child
    world = World()
    world.api.keep("SFTJob", job_manifest())
    world.api.refuses = answer("create", kind, error)

    # When that lasts for some seconds
    world.look()
    pass_time(world, 20)

    # Then it is told, and each further try is not
    assert world.status["state"] == "Preparing"
    assert f"the API server could not take the {kind}: " in world.status["message"]
    assert str(getattr(error, "message", error)) in world.status["message"]
    assert world.condition("Stalled")["status"] == "False"
    tried, told = world.api.done("create", kind), world.api.done("patch", "SFTJob")
    assert (tried >= 4, told) == (True, 1)

    # When it lasts for longer, somebody is needed
    pass_time(world, 40)
    assert world.condition("Stalled")["reason"] == "ServerUnavailable"
    assert world.api.done("create", kind) > tried
    assert world.api.done("patch", "SFTJob") == 2

    # When it is over, all goes on within half a minute
    world.api.refuses = lambda verb, kind: None
    pass_time(world, 32)
    assert world.status["state"] == "Starting"
    assert world.condition("Stalled")["status"] == "False"


def test_a_server_that_asks_for_a_pause_gets_it() -> None:
    world = World()
    world.api.keep("SFTJob", job_manifest())
    world.api.refuses = answer("create", "Job", ApiError(429, "TooManyRequests", "too many", retry_after=20.0))

    world.look()
    pass_time(world, 18)

    assert world.api.done("create", "Job") == 1
    assert "the API server could not take the Job: too many" in world.status["message"]


@pytest.mark.parametrize("seconds", [3600.0, float("inf")])
def test_a_proxy_that_asks_to_be_left_alone_for_hours_is_asked_again_in_minutes(seconds: float) -> None:
    world = World()
    world.api.keep("SFTJob", job_manifest())
    away = ApiError(503, "", "<html>down for maintenance</html>", retry_after=seconds)
    world.api.refuses = answer("create", "Job", away)
    world.look()
    world.api.refuses = lambda verb, kind: None

    pass_time(world, 125)

    assert ("Job", "tulu") in world.api.objects


@transient
@pytest.mark.parametrize("verb", ["get", "create"])
def test_children_that_could_not_be_healed_just_now_are_healed_within_seconds(verb: str, error: Exception) -> None:
    # Given a Job without its Service, and an API server that is away when its children are looked at
    world = World()
    world.api.keep("SFTJob", job_manifest())
    world.look()
    del world.api.objects["Service", "tulu"]
    world.api.refuses = answer(verb, "Service", error)
    pass_time(world, 31)
    tried = world.api.done(verb, "Service")
    assert ("Service", "tulu") not in world.api.objects

    # When it is back after a moment
    world.api.refuses = lambda verb, kind: None
    pass_time(world, 3)

    # Then the child is there again, long before all children are looked at once more
    assert ("Service", "tulu") in world.api.objects
    assert tried >= 1
    healing = world.picture.memory(KEY).healing
    assert healing is not None
    assert healing.refusals == 0


def test_children_that_cannot_be_healed_for_long_are_tried_ever_more_rarely() -> None:
    world = World()
    world.api.keep("SFTJob", job_manifest())
    world.look()
    world.api.refuses = answer("get", "Service", AWAY["500"])

    pass_time(world, 30)
    before = world.api.done("get", "Service")
    pass_time(world, 90)

    assert 6 <= world.api.done("get", "Service") - before <= 9
    assert world.condition("Stalled")["reason"] == "ServerUnavailable"


def stopped_world() -> World:
    """A run that has made a step, and comes to a stop."""
    world = World()
    world.api.keep("SFTJob", job_manifest())
    world.look()
    job = world.api.objects["SFTJob", "tulu"]
    world.api.keep("SFTJob", {**job, "status": {**job["status"], "state": "Recovering", "firstStepTime": stamp(-100)}})
    return world


def test_a_run_that_stops_has_new_pods_told_that_it_has_begun() -> None:
    world = stopped_world()

    pass_time(world, 90)

    told = world.api.objects["ConfigMap", "tulu-begun"]
    assert told["data"] == {"begun": job_manifest()["metadata"]["uid"]}
    assert world.api.done("create", "ConfigMap") == 2  # and that of its configuration


@pytest.mark.parametrize("refused", [True, False], ids=["quota", "a stranger's"])
def test_what_keeps_new_pods_from_being_told_is_not_said_of_the_run(refused: bool) -> None:
    world = stopped_world()
    if refused:
        world.api.refuses = answer("create", "ConfigMap", ApiError(403, "Forbidden", "exceeded quota: none of these"))
    else:
        world.api.keep("ConfigMap", {"metadata": {"name": "tulu-begun"}, "data": {}})

    pass_time(world, 90)

    assert world.condition("Stalled")["status"] == "False"
    # The others are looked after all the same.
    del world.api.objects["Service", "tulu"]
    pass_time(world, 60)
    assert ("Service", "tulu") in world.api.objects


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ApiError(400, "", f"{DENIES}: only people change these"), "Refused"),
        (ApiError(409, "", f"{DENIES}: only people change these"), "Refused"),
        (ApiError(422, "Invalid", "spec.compute cannot be changed"), "Refused"),
        (ApiError(500, "InternalError", 'failed calling webhook "vjob.kb.io": connection refused'), ""),
    ],
    ids=["denied", "denied-as-a-conflict", "changed-by-a-webhook", "webhook-away"],
)
def test_what_keeps_the_finalizer_off_a_job_is_told_for_nothing_is_made_before(
    error: ApiError, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A policy may let nobody but people change SFTJobs, or a webhook change in each of them what cannot be changed."""
    removes = SETTINGS.model_copy(update={"store": StoreSettings(uri="s3://bucket/runs", verify=True, remove=True)})
    world = World(removes)
    world.api.keep("SFTJob", job_manifest(deletionPolicy="Delete", checkpoint={}))
    patch = world.api.patch

    async def status_alone(kind: str, namespace: str, name: str, body: Object, **how: Any) -> Object:
        if kind == "SFTJob" and not how.get("subresource"):
            raise error
        return await patch(kind, namespace, name, body, **how)

    monkeypatch.setattr(world.api, "patch", status_alone)
    for _ in range(10):
        with pytest.raises(RetryLater):  # it tries that again
            world.look()
        world.clock += 4.0

    assert f"the finalizers of the SFTJob (spec.deletionPolicy is Delete): {error.message}" in world.status["message"]
    stalled = world.condition("Stalled")
    assert (stalled["reason"] if stalled["status"] == "True" else "") == reason
    assert world.api.done("create", "Job") == 0

    monkeypatch.undo()
    world.look(2)
    assert world.api.done("create", "Job") == 1
    assert world.condition("Stalled")["status"] == "False"


@pytest.mark.parametrize(
    "error",
    [
        ApiError(403, "Forbidden", 'sftjobs.sftjob.dev "tulu" is forbidden: User "operator" cannot patch resource'),
        ApiError(422, "Invalid", 'SFTJob "tulu" is invalid: spec: a rule that a later CRD has'),
    ],
    ids=["right-taken-away", "rule-of-a-later-crd"],
)
def test_what_keeps_an_object_that_is_going_from_going_is_told(
    error: ApiError, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else ``kubectl delete`` waits for ever, and nothing says for what."""
    # Given an object whose place is to stay after all, which carries our finalizer and may not be changed
    world = World()
    going = job_manifest()
    going["metadata"] |= {"finalizers": [PLACE_FINALIZER], "deletionTimestamp": stamp(0)}
    world.api.keep("SFTJob", going)
    patch = world.api.patch

    async def status_alone(kind: str, namespace: str, name: str, body: Object, **how: Any) -> Object:
        if not how.get("subresource"):
            raise error
        return await patch(kind, namespace, name, body, **how)

    monkeypatch.setattr(world.api, "patch", status_alone)
    for _ in range(3):
        with pytest.raises(RetryLater):
            world.look()
        world.clock += 4.0

    words = f"its finalizer {PLACE_FINALIZER} cannot be taken away: {error.message}"
    assert world.status["message"] == words
    monkeypatch.undo()
    world.look()
    assert world.api.objects["SFTJob", "tulu"]["metadata"]["finalizers"] == []


@pytest.mark.parametrize("words", [f"its finalizer {PLACE_FINALIZER} cannot be taken away: no", f"{DELETES}: it waits"])
def test_what_was_said_of_our_finalizer_does_not_stay_while_anothers_holds_the_object(words: str) -> None:
    world = World()
    going = job_manifest() | {"status": {"state": "Running", "message": words}}
    going["metadata"] |= {"finalizers": ["example.org/a", "example.org/b"], "deletionTimestamp": stamp(0)}
    world.api.keep("SFTJob", going)

    pass_time(world, 30)

    told = "it goes once its finalizers are taken away by those who put them there: "
    assert (world.status["state"], world.status["message"]) == ("Running", f"{told}example.org/a, example.org/b")
    assert world.api.done("patch", "SFTJob") == 1

    world.api.keep("SFTJob", going | {"status": world.status, "metadata": going["metadata"] | {"finalizers": ["b"]}})
    pass_time(world, 30)
    assert world.status["message"] == f"{told}b"


def test_words_about_a_finalizer_that_are_others_each_time_bring_on_no_try_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a look follows each change of the status, it would be tried without a pause."""
    world = World()
    going = {**job_manifest(), "status": {"state": "Complete", "completionTime": stamp(-60)}}
    going["metadata"] |= {"finalizers": [PLACE_FINALIZER], "deletionTimestamp": stamp(0)}
    world.api.keep("SFTJob", going)
    patch, ports = world.api.patch, itertools.count(40_000)

    async def status_alone(kind: str, namespace: str, name: str, body: Object, **how: Any) -> Object:
        if how.get("subresource"):
            return await patch(kind, namespace, name, body, **how)
        words = f"failed calling webhook: read tcp 10.0.0.1:{next(ports)}->10.0.0.2:443: connection reset by peer"
        raise ApiError(500, "InternalError", words)

    monkeypatch.setattr(world.api, "patch", status_alone)
    for _ in range(10):
        with pytest.raises(RetryLater):
            world.look()
        world.clock += 0.1

    assert "its finalizer" in world.status["message"]
    assert world.api.done("patch", "SFTJob") == 1
