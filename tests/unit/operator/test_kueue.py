"""What is asked of Kueue and told to it, in which version, and what of that never delays a status."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sft_operator.cluster.client import ApiError
from tests.unit.operator.make import (
    Object,
    at,
    child_manifest,
    job_manifest,
    workload_manifest,
)
from tests.unit.operator.test_reconciler import KEY, World

QUEUE = {"kueue.x-k8s.io/queue-name": "gpus"}
NOT_FOUND = ApiError(404, "NotFound", "the server could not find the requested resource")
WEBHOOK = ApiError(500, "InternalError", 'failed calling webhook "mjob.kb.io": connection refused')


def queued(*, suspend: bool = False, job: Object | None = None) -> World:
    """An SFTJob in a queue, with its Job."""
    world = World()
    world.api.keep("SFTJob", job_manifest(labels=QUEUE, suspend=suspend))
    world.api.keep("Job", job or child_manifest(suspend=True, queue="gpus"))
    return world


def unserved(*versions: str) -> Any:
    return lambda verb, kind: NOT_FOUND if kind in {f"Workload/{version}" for version in versions} else None


@pytest.mark.parametrize(
    ("away", "listed", "patched"),
    [
        ((), ["v1beta2"], "v1beta2"),
        (("v1beta2",), ["v1beta2", "v1beta1"], "v1beta1"),
        (("v1beta2", "v1beta1"), ["v1beta2", "v1beta1"], None),
    ],
)
def test_v1beta2_comes_first_and_v1beta1_where_that_is_not_served(
    away: tuple[str, ...], listed: list[str], patched: str | None
) -> None:
    world = queued(suspend=True)
    world.api.refuses = unserved(*away)
    for version in ("v1beta2", "v1beta1"):
        world.api.keep(f"Workload/{version}", workload_manifest())

    world.look()

    asked = [kind for verb, kind, _ in world.api.calls if verb == "list" and kind.startswith("Workload")]
    # What is new (the state Queued) is looked at once more, and asked for again in the same order.
    assert asked == 2 * [f"Workload/{version}" for version in listed]
    told = [kind for verb, kind, _ in world.api.calls if verb == "patch" and kind.startswith("Workload")]
    assert told == ([f"Workload/{patched}"] if patched else [])


def test_a_workload_that_only_wears_the_label_is_not_ours() -> None:
    world = queued(suspend=True)
    world.api.keep("Workload/v1beta2", workload_manifest(owner="another-uid"))

    world.look()

    assert world.api.done("patch", "Workload/v1beta2") == 0


def test_a_workload_that_is_going_is_left_alone() -> None:
    going = workload_manifest(name="job-old")
    going["metadata"]["deletionTimestamp"] = "2026-01-01T12:00:00Z"
    world = queued(suspend=True)
    world.api.keep("Workload/v1beta2", going)
    world.api.keep("Workload/v1beta2", workload_manifest(name="job-new"))

    world.look()

    assert [name for verb, kind, name in world.api.calls if (verb, kind) == ("patch", "Workload/v1beta2")] == [
        "job-new"
    ]


def test_kueue_is_asked_again_ever_more_rarely_and_at_once_when_something_changes() -> None:
    world = queued()
    world.look()
    asked = world.api.done("list", "Workload/v1beta2")
    assert 1 <= asked <= 2, "a second later"

    # Nothing is due yet
    world.look(3)
    assert world.api.done("list", "Workload/v1beta2") == asked

    # The user's wish changes
    changed = job_manifest(labels=QUEUE, suspend=True)
    changed["metadata"]["generation"] = 2
    world.api.keep("SFTJob", changed)
    world.look()
    assert asked + 1 <= world.api.done("list", "Workload/v1beta2") <= asked + 2


def test_jobs_that_run_and_jobs_without_kueue_ask_nothing() -> None:
    world = queued(job=child_manifest(queue="gpus"))
    world.look(2)
    plain = World()
    plain.api.keep("SFTJob", job_manifest())
    plain.look(2)

    assert not [call for call in (*world.api.calls, *plain.api.calls) if call[1].startswith("Workload")]


@pytest.mark.parametrize("code", [403, 422, 429, 500, 503])
def test_what_kueue_refuses_is_said_and_no_status_waits_for_it(code: int) -> None:
    world = queued()
    world.api.refuses = lambda verb, kind: (
        ApiError(code, "Because", "its own words") if kind.startswith("Workload") else None
    )

    world.look()

    assert world.status["state"] == "Queued"
    assert "Kueue does not answer: its own words" in world.status["message"]


def test_a_kueue_that_hangs_delays_no_status() -> None:
    world = queued()

    async def hang(kind: str, namespace: str | None, **_: Any) -> Any:
        await asyncio.sleep(2)
        return [workload_manifest(conditions={"QuotaReserved": (False, "Pending", "no room for it")})], 1

    world.api.list = hang  # type: ignore[method-assign]

    world.look()

    assert world.status["state"] == "Queued"
    assert world.clock <= 1

    # What it says at last is shown
    world.clock += 2
    world.look()
    queueing = world.picture.observed(KEY).queueing
    assert queueing is not None
    assert queueing.workload is not None


@pytest.mark.parametrize(
    ("job", "labels", "served", "questions"),
    [
        # Suspended by its user, and nothing of Kueue's: 1 + 2 + … + 256 s, then every 300 s.
        (child_manifest(suspend=True, marked=True), {}, False, 12),
        (child_manifest(suspend=True, marked=True), {}, True, 12),
        # Held in a queue: a status that says why is no older than half a minute.
        (child_manifest(suspend=True, queue="gpus"), QUEUE, True, 3600 // 25 + 4),
    ],
)
def test_kueue_is_asked_rarely_about_what_is_none_of_its_business(
    job: Object, labels: dict[str, str], served: bool, questions: int
) -> None:
    """Of 1,000 suspended jobs, in clusters without Kueue as well."""
    world = World()
    world.api.keep("SFTJob", job_manifest(labels=labels, suspend=True))
    world.api.keep("Job", job)
    if not served:
        world.api.refuses = unserved("v1beta2", "v1beta1")

    while world.clock < 3600:
        (again,) = world.look()
        assert again is not None
        world.clock += max(again, 1.0)

    asked = sum(call[:2] == ("list", "Workload/v1beta2") for call in world.api.calls)
    assert questions - 3 <= asked <= questions + 8


def test_labels_that_change_without_a_new_generation_are_seen() -> None:
    world = queued()
    world.look()

    world.api.keep("SFTJob", job_manifest(labels={"kueue.x-k8s.io/queue-name": "cpus"}))
    world.look()

    assert world.api.objects["Job", "tulu"]["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "cpus"


def test_a_change_of_the_job_that_somebody_undoes_is_made_again_ever_more_rarely() -> None:
    """As fast as two controllers can, it was once made more than ten times a second."""
    world = World()
    world.api.keep("SFTJob", job_manifest(suspend=True))
    for _ in range(20):
        world.api.keep("Job", child_manifest(version=str(200 + len(world.api.calls))))
        world.look()

    assert world.api.done("patch", "Job") <= 6, "after 1, 2, 4, … seconds"
    assert world.picture.observed(KEY).job is not None


def test_a_job_that_others_hold_is_never_resumed() -> None:
    world = World()
    world.api.keep("SFTJob", job_manifest())
    world.api.keep("Job", child_manifest(suspend=True))

    world.look(5)

    assert world.api.done("patch", "Job") == 0
    assert "not this operator has suspended the Job" in world.status["message"]


def test_a_webhook_that_does_not_answer_is_said_at_once_and_stalls_after_a_while() -> None:
    world = World()
    world.api.keep("SFTJob", job_manifest(labels=QUEUE))
    world.api.refuses = lambda verb, kind: WEBHOOK if (verb, kind) == ("create", "Job") else None

    world.look()
    assert world.status["state"] == "Preparing"
    assert 'failed calling webhook "mjob.kb.io": connection refused; it is tried again' in world.status["message"]
    assert world.condition("Stalled")["status"] == "False"

    world.now = at(31)
    world.clock += 31
    world.look()
    assert world.condition("Stalled")["reason"] == "WebhookUnavailable"

    # It is back
    world.api.refuses = lambda verb, kind: None
    world.clock += 31
    world.look()
    world.clock += 31
    world.look()
    assert world.condition("Stalled")["status"] == "False"
    assert world.status["state"] == "Queued"


def test_an_api_server_that_hangs_over_a_child_is_said() -> None:
    world = World()
    world.api.keep("SFTJob", job_manifest(labels=QUEUE))
    create = world.api.create

    async def hang(kind: str, namespace: str, manifest: Object, *, whole: bool = False) -> Object:
        if kind == "Job":
            raise TimeoutError
        return await create(kind, namespace, manifest, whole=whole)

    world.api.create = hang  # type: ignore[method-assign]
    world.look()

    assert "a webhook of the cluster may hang" in world.status["message"]
