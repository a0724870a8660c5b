"""One look at a job against an API server that is a dictionary: what is created, changed, deleted and written."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import datetime
from typing import Any, cast

import pytest

from sft_api.v1alpha1 import SFTJob, SFTJobStatus
from sft_operator.cache import Cache, Key
from sft_operator.cluster import ApiError, Cluster
from sft_operator.config import PodSettings, Settings, StoreSettings
from sft_operator.lookout import Lookout
from sft_operator.metrics import OperatorMetrics
from sft_operator.reconciler import Reconciler
from tests.unit.operator.make import NOW, Object, at, child_manifest, job_manifest, pod_manifest, stamp

KEY = Key("team", "tulu")
SETTINGS = Settings(pods=PodSettings(image="trainer:1"))


class Api:
    """Objects by kind and name, and what was asked for."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], Object] = {}
        self.calls: list[tuple[str, str, str]] = []
        self.refuses: Callable[[str, str], ApiError | None] = lambda verb, kind: None
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

    async def get(self, kind: str, namespace: str | None, name: str) -> Object:
        self._called("get", kind, name)
        return self.objects[kind, name]

    async def list(self, kind: str, namespace: str | None, **_: Any) -> tuple[list[Object], int]:
        self._called("list", kind, "")
        return [value for (held, _), value in self.objects.items() if held == kind], self._version

    async def patch(self, kind: str, namespace: str, name: str, patch: Object, **_: Any) -> Object:
        self._called("patch", kind, name)
        return self.keep(kind, _merged(self.objects.get((kind, name), {"metadata": {"name": name}}), patch))

    async def delete(self, kind: str, namespace: str, name: str, **_: Any) -> None:
        self._called("delete", kind, name)
        self.objects.pop((kind, name), None)

    def done(self, verb: str, kind: str) -> int:
        return sum(call[:2] == (verb, kind) for call in self.calls)


def _merged(value: Object, patch: Object) -> Object:
    merged = dict(value)
    for name, item in patch.items():
        merged[name] = _merged(merged.get(name) or {}, item) if isinstance(item, dict) else item
    return {name: item for name, item in merged.items() if item is not None}


class NoLookout:
    """Finds nothing, and remembers for which place it was asked to look."""

    def __init__(self) -> None:
        self.places: list[str | None] = []

    async def look(self, key: Key, job: SFTJob, previous: SFTJobStatus, uri: str | None) -> list[float]:
        self.places.append(uri)
        return []

    def reads_store(self, key: Key) -> bool:
        return False

    def forget(self, key: Key) -> None:
        pass


class World:
    """An operator with its settings, over an API server that outlives it."""

    def __init__(self, settings: Settings = SETTINGS, api: Api | None = None) -> None:
        self.api = api or Api()
        self.cache = Cache()
        self.lookout = NoLookout()
        self.now: datetime = NOW
        self.reconciler = Reconciler(
            cast(Cluster, self.api),
            self.cache,
            cast(Lookout, self.lookout),
            settings,
            OperatorMetrics(self.cache.manifests, lambda: 0),
            now=lambda: self.now,
        )

    def look(self, times: int = 1) -> list[float | None]:
        """Look so many times, each time with all that the API server holds; when the next looks are wanted."""

        async def looks() -> list[float | None]:
            wanted = []
            for _ in range(times):
                for (kind, _name), manifest in list(self.api.objects.items()):
                    if kind in ("SFTJob", "Job", "Pod"):
                        self.cache.store(kind, manifest)
                wanted.append(await self.reconciler.reconcile(KEY))
            return wanted

        return asyncio.run(looks())

    @property
    def status(self) -> Object:
        status: Object = self.api.objects["SFTJob", "tulu"].get("status", {})
        return status

    def condition(self, kind: str) -> Object:
        return next(item for item in self.status["conditions"] if item["type"] == kind)


def store(uri: str) -> Settings:
    return SETTINGS.model_copy(update={"store": StoreSettings(uri=uri)})


def test_a_run_goes_on_where_it_began_when_the_store_of_the_settings_changes_or_goes() -> None:
    # Given a run in the platform's store
    first = World(store("s3://old/place"))
    first.api.keep("SFTJob", job_manifest(checkpoint={}))
    first.look(2)
    begun = "s3://old/place/team/tulu-sft-uid"
    assert first.lookout.places[-1] == begun

    # When the operator comes back with other settings
    for settings in (SETTINGS, store("s3://new/place")):
        later = World(settings, first.api)
        later.look(2)

        # Then it follows the run as before
        assert later.lookout.places == [begun, begun]
        assert later.condition("Accepted")["status"] == "True"
        assert later.status["state"] == "Starting"


def test_a_job_that_is_made_later_is_followed_where_its_config_map_says() -> None:
    # Given a Job that was refused after its ConfigMap had been made
    first = World(store("s3://old/place"))
    first.api.keep("SFTJob", job_manifest(checkpoint={}))
    first.api.refuses = lambda verb, kind: ApiError(403, "Forbidden", "quota") if kind == "Job" else None
    first.look()
    first.api.refuses = lambda verb, kind: None

    second = World(store("s3://new/place"), first.api)
    second.look(2)

    assert second.lookout.places[-1] == "s3://old/place/team/tulu-sft-uid"


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


def test_a_stuck_pod_that_may_not_be_given_up_is_left_alone_for_a_while() -> None:
    world = World()
    world.api.keep("SFTJob", job_manifest())
    world.api.keep("Job", child_manifest())
    for index in (0, 1):
        world.api.keep("Pod", pod_manifest(index, deletion=-600))
    world.api.refuses = lambda verb, kind: (
        ApiError(403, "Forbidden", "no") if (verb, kind) == ("patch", "Pod") else None
    )

    world.look(5)

    assert world.api.done("patch", "Pod") == 2, "once for each pod"
    assert world.api.done("delete", "Pod") == 0
