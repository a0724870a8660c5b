"""Kueue played by a test: its kind of object as different releases serve it, and what it does to Jobs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tests.cluster.access import Cluster
from tests.integration.operator.scene import MERGE_PATCH, Object, Scene

GROUP = "kueue.x-k8s.io"
QUEUE_LABEL, PRIORITY_LABEL = f"{GROUP}/queue-name", f"{GROUP}/priority-class"
MARK = "sftjob.dev/suspended"

OLD_RULE = (
    "(has(oldSelf.status) && has(oldSelf.status.conditions) && oldSelf.status.conditions.exists(c, "
    "c.type == 'QuotaReserved' && c.status == 'True')) ? "
    "oldSelf.spec.priorityClassSource == self.spec.priorityClassSource : true"
)
"""What 0.16.0 to 0.17.1 ask of v1beta1: it cannot be computed for a Workload without a priority class, which hence
cannot be changed through v1beta1 once it has its quota."""

FORMS: dict[str, tuple[str, ...]] = {
    "v1beta1 only": ("v1beta1",),
    "both, v1beta1 refuses changes": ("v1beta2", "v1beta1"),
    "v1beta2 only": ("v1beta2",),
}
"""Versions that are served, the stored one first."""


def _version(name: str, *, stored: bool, rules: list[str]) -> Object:
    text = {"type": "string"}
    condition = {"type": "object", "properties": dict.fromkeys(("type", "status", "reason", "message"), text)}
    spec = {"active": {"type": "boolean"}, "queueName": text, "priorityClassSource": text}
    schema = {
        "type": "object",
        "properties": {
            "spec": {"type": "object", "properties": spec},
            "status": {
                "type": "object",
                "properties": {"conditions": {"type": "array", "maxItems": 16, "items": condition}},
            },
        },
        "x-kubernetes-validations": [{"rule": rule, "message": "field is immutable"} for rule in rules],
    }
    if not rules:
        del schema["x-kubernetes-validations"]
    return {
        "name": name,
        "served": True,
        "storage": stored,
        "subresources": {"status": {}},
        "schema": {"openAPIV3Schema": schema},
    }


@contextmanager
def serve_workloads(server: Cluster, *versions: str, conversion: Object | None = None) -> Iterator[None]:
    """Workloads in these versions, the first of them stored; v1beta1 beside v1beta2 has the rule of its time."""
    crd: Object = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"workloads.{GROUP}",
            "annotations": {"api-approved.kubernetes.io": "unapproved, played by a test"},
        },
        "spec": {
            "group": GROUP,
            "names": {"kind": "Workload", "plural": "workloads"},
            "scope": "Namespaced",
            **({"conversion": conversion} if conversion else {}),
            "versions": [
                _version(
                    name,
                    stored=name == versions[0],
                    rules=[OLD_RULE] if name == "v1beta1" and len(versions) > 1 and not conversion else [],
                )
                for name in versions
            ],
        },
    }
    server.apply(crd)
    try:
        for name in versions:
            _wait_served(server, name)
        yield
    finally:
        server.kubectl("delete", "crd", f"workloads.{GROUP}")


def _wait_served(server: Cluster, version: str) -> None:
    deadline = time.monotonic() + 60
    while server.kubectl("get", "--raw", f"/apis/{GROUP}/{version}/workloads", check=False).returncode != 0:
        assert time.monotonic() < deadline, f"Workloads {version} are not served"
        time.sleep(0.1)


@dataclass
class Kueue:
    """Kueue's hands in one namespace; it stores and reads Workloads in ``version``."""

    scene: Scene
    version: str = "v1beta2"

    def _path(self, name: str = "", subresource: str = "", version: str = "") -> str:
        base = f"/apis/{GROUP}/{version or self.version}/namespaces/{self.scene.namespace}/workloads"
        return "/".join(part for part in (base, name, subresource) if part)

    def make_workload(self, name: str, *, suffix: str = "") -> None:
        """The Workload of a Job."""
        job = self.scene.get("jobs", name)
        assert job
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": job["metadata"]["uid"]}
        metadata = {
            "name": f"job-{name}{suffix}",
            "labels": {f"{GROUP}/job-uid": job["metadata"]["uid"]},
            "ownerReferences": [{**owner, "controller": True}],
        }
        manifest = {"apiVersion": f"{GROUP}/{self.version}", "kind": "Workload", "metadata": metadata, "spec": {}}
        answer = self.scene.request("POST", self._path(), manifest)
        assert answer.accepted, answer.body

    def delete_workload(self, name: str) -> None:
        answer = self.scene.request("DELETE", self._path(f"job-{name}"))
        assert answer.accepted, answer.body

    def say(self, name: str, kind: str, status: bool, reason: str, message: str) -> None:
        """The condition ``kind`` of a Workload."""
        condition = {"type": kind, "status": str(status), "reason": reason, "message": message}
        patch = {"status": {"conditions": [condition]}}
        answer = self.scene.request("PATCH", self._path(f"job-{name}", "status"), patch, MERGE_PATCH)
        assert answer.accepted, answer.body

    def admit(self, name: str) -> None:
        """It has its quota, and its Job is resumed."""
        self.say(name, "QuotaReserved", True, "QuotaReserved", "Quota reserved in ClusterQueue gpus")
        self.hold(name, False)

    def hold(self, name: str, suspend: bool) -> None:
        self.scene.patch("jobs", name, {"spec": {"suspend": suspend}})

    def patch(self, name: str, patch: Object, version: str = "") -> int:
        """Change a Workload as an administrator would; the code of the answer."""
        path = self._path(f"job-{name}", version=version)
        return self.scene.request("PATCH", path, patch, MERGE_PATCH).code

    def get(self, name: str, *, suffix: str = "") -> Object:
        answer = self.scene.request("GET", self._path(f"job-{name}{suffix}"))
        assert answer.accepted, answer.body
        return answer.body

    def active(self, name: str, *, suffix: str = "") -> bool:
        found: bool = self.get(name, suffix=suffix)["spec"].get("active", True)
        return found

    def marked(self, name: str) -> bool:
        return MARK in self.get(name)["metadata"].get("annotations", {})


def stalled(scene: Scene, name: str) -> Any:
    """Reason of the condition Stalled while it holds."""
    condition = scene.condition(name, "Stalled")
    return condition["reason"] if condition["status"] == "True" else None
