"""No value of any field of what tenants write stops the operator: seeded, over real objects changed at random."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from dataclasses import replace
from datetime import timedelta
from random import Random
from typing import Any, cast

import pytest

from sft_api.fitting import fit_status
from sft_operator.cluster.asking import Asking, NewestWarnings
from sft_operator.cluster.client import Cluster
from sft_operator.cluster.progress_client import UnreadableReport, parse_report
from sft_operator.decisions.result import Question
from sft_operator.metrics import OperatorMetrics
from sft_operator.picture.observed import Pod, Report
from sft_operator.picture.picture import Key, Picture
from sft_operator.reconciler import Reconciler
from tests.unit.operator import hostile
from tests.unit.operator.make import NOW, Object, child_manifest, job_manifest, pod_manifest, stamp
from tests.unit.operator.test_reconciler import KEY, SETTINGS, Api, World

SEEDS = 1200


def _merged(value: Any, patch: Any) -> Any:
    """RFC 7386."""
    if not isinstance(patch, dict):
        return patch
    merged = dict(value) if isinstance(value, dict) else {}
    merged |= {name: _merged(merged.get(name), item) for name, item in patch.items()}
    return {name: item for name, item in merged.items() if item is not None}


class NoQuestions:
    """Nothing is asked."""

    followed = 0

    def put(self, key: Key, wanted: Iterable[Question]) -> None:
        pass


class Written(Api):
    """Keeps every status that was written."""

    def __init__(self, picture: Picture) -> None:
        super().__init__()
        self.picture = picture
        self.statuses: list[Object] = []

    async def patch(self, kind: str, namespace: str, name: str, patch: Object, **_: Any) -> Object:
        if kind == "SFTJob":
            known = self.picture.manifest(Key(namespace, name)) or {}
            self.statuses.append(_merged(known.get("status"), patch["status"]))
            return {}
        return await super().patch(kind, namespace, name, patch)


def hostile_look(seed: int, before: Object) -> tuple[Reconciler, Written, Picture]:
    """One look at a job of which everything may be hostile; ``before`` is its last status."""
    random = Random(seed)
    picture = Picture()
    clock = 0.0
    api = Written(picture)
    metrics = OperatorMetrics(picture.manifests, lambda: 0)
    reconciler = Reconciler(
        cast(Cluster, api),
        picture,
        cast(Asking, NoQuestions()),
        SETTINGS,
        metrics,
        now=lambda: NOW,
        clock=lambda: clock,
    )

    def some(document: Object, often: float = 0.6) -> Object:
        changed: Object = (
            hostile.mutated(random, document, random.randint(1, 4)) if random.random() < often else document
        )
        return changed

    sft_job = some(hostile.an_sft_job(random, some(before)), 0.3)
    for kind, manifest in (
        ("SFTJob", sft_job),
        ("Job", some(hostile.a_job(random))),
        *(("Pod", some(hostile.a_pod(random, index, json.dumps(some(hostile.last_words()))))) for index in (0, 1)),
    ):
        picture.store(kind, manifest)
        if random.random() < 0.1:
            picture.remove(kind, some(manifest))
    try:
        progress = parse_report(json.dumps(some(hostile.a_report(random))).encode())
    except UnreadableReport:
        pass
    else:
        picture.remember(KEY, replace(picture.memory(KEY), report=Report(progress, NOW, "pod-0")))
    warnings = NewestWarnings(NOW)
    event = {"type": "Warning", "involvedObject": {"kind": "Pod", "name": "x"}, "lastTimestamp": stamp(0)}
    for _ in range(3):
        warnings.take(
            some({**event, "reason": "FailedMount", "message": "m", "series": {"lastObservedTime": stamp(0)}})
        )
    picture.remember(KEY, replace(picture.memory(KEY), warnings=tuple(warnings.newest)))

    async def look() -> None:
        nonlocal clock
        for key in {KEY, *picture.all_keys()}:
            for _ in range(3):
                clock += 1.0
                await reconciler.reconcile(key)
        list(metrics.registry.collect())

    asyncio.run(look())
    return reconciler, api, picture


def full_status() -> Object:
    """The status of a job that has been through a lot."""
    for seed in range(1000):
        random = Random(seed)
        world = World()
        world.api.keep("SFTJob", job_manifest())
        world.api.keep("Job", child_manifest())
        world.api.keep("Pod", pod_manifest(0))
        world.api.keep("Pod", pod_manifest(1, phase="Failed", exit_code=31))
        world.picture.store("SFTJob", world.api.objects["SFTJob", "tulu"])
        report = Report(parse_report(json.dumps(hostile.a_report(random)).encode()), NOW, "pod-0")
        world.picture.remember(KEY, replace(world.picture.memory(KEY), report=report))
        world.look()
        if {"progress", "checkpoints", "export", "restarts", "plan", "warnings"} <= set(world.status):
            return world.status
    raise AssertionError("no seed makes a full status")


def test_nothing_that_tenants_write_raises_and_every_status_fits() -> None:
    before = full_status()
    written = 0
    for seed in range(SEEDS):
        try:
            _, api, _ = hostile_look(seed, before)
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
        for status in api.statuses:
            written += 1
            assert "OperatorError" not in json.dumps(status, allow_nan=False), f"seed {seed}"
            assert fit_status(status) == status, f"seed {seed}"
    assert written > SEEDS / 3, "most of them still say something"


@pytest.mark.parametrize("value", [100_000_000_000, 10**30, -5, "x", None, 1e300, [], True])
def test_any_grace_period_can_be_read(value: Any) -> None:
    manifest = pod_manifest(0, deletion=-50)
    manifest["metadata"]["deletionGracePeriodSeconds"] = value

    pod = Pod.from_manifest(manifest)

    assert pod.deletion is not None
    assert pod.deletion_began is not None
    assert pod.deletion_began <= pod.deletion


@pytest.mark.parametrize(
    "time", ["9999-12-31T23:59-14:00", "0001-01-01T00:00:00+14:00", "5195-03-01T00:00:00Z", "soon", 7]
)
def test_a_pod_that_is_being_deleted_is_so_whenever_its_grace_period_ends(time: object) -> None:
    manifest = pod_manifest(0, deletion=-50)
    manifest["metadata"]["deletionTimestamp"] = time

    assert Pod.from_manifest(manifest).deletion is not None


def test_an_exit_code_that_cannot_be_read_is_no_success() -> None:
    manifest = pod_manifest(0, phase="Failed", exit_code=0)
    manifest["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"] = "zero"

    ended = Pod.from_manifest(manifest).terminated

    assert ended
    assert ended.exit_code != 0


def test_an_error_nobody_thought_of_is_said_on_that_job_once(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    world.api.keep("SFTJob", job_manifest())
    world.look()
    told = world.api.done("patch", "SFTJob")

    def fail(*_: Any, **__: Any) -> None:
        raise OverflowError("date value out of range")

    with monkeypatch.context() as patched:
        patched.setattr("sft_operator.decisions.look.compute_status", fail)
        for _ in range(3):
            with pytest.raises(OverflowError):
                world.look()

    stalled = world.condition("Stalled")
    assert (stalled["status"], stalled["reason"]) == ("True", "OperatorError")
    assert world.condition("Reconciling")["status"] == "False"
    assert "OverflowError: date value out of range" in world.status["message"]
    assert world.api.done("patch", "SFTJob") == told + 1
    world.look()
    assert (world.condition("Stalled")["status"], world.condition("Reconciling")["status"]) == ("False", "True")


@pytest.mark.parametrize("end", ["Complete", "Failed"])
def test_an_error_over_a_run_that_has_ended_is_taken_back_as_well(monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    world = World()
    world.api.keep("SFTJob", job_manifest())
    world.api.keep("Job", child_manifest(conditions={end: ("Why", "so it ended")}))
    world.now += timedelta(minutes=1)
    world.look()
    ended = world.status
    assert ended["state"] == end

    def fail(*_: Any, **__: Any) -> None:
        raise OverflowError("date value out of range")

    with monkeypatch.context() as patched:
        patched.setattr("sft_operator.decisions.look.completed_status", fail)
        with pytest.raises(OverflowError):
            world.look()
    assert world.condition("Stalled")["reason"] == "OperatorError"

    world.look()
    assert world.status == ended


def test_a_status_that_the_api_server_refuses_is_said_instead_of_tried_for_ever() -> None:
    from sft_operator.cluster.client import ApiError
    from sft_operator.reconciler import StatusRefusedError

    world = World()
    world.api.keep("SFTJob", job_manifest())
    world.api.keep("Job", child_manifest())
    refusals = [ApiError(422, "Invalid", "status.progress.percent: Invalid value")]
    world.api.refuses = lambda verb, kind: refusals.pop() if (verb, kind) == ("patch", "SFTJob") and refusals else None

    with pytest.raises(StatusRefusedError):
        world.look()

    assert world.condition("Stalled")["reason"] == "OperatorError"
    assert "status.progress.percent: Invalid value" in world.status["message"]
    assert set(world.status) == {"message", "conditions"}
