"""What a profile of pods gives those of jobs that name it, and what a changed one does to those that are there."""

from __future__ import annotations

import json
from typing import Any

from tests.cluster import images

from .disturbances import pod_name, pod_uids
from .stage import Stage, merge

_KIND = "PLATFORM_KIND"
_BESIDE = "beside"
_TOLERATION = {"key": "sft.test/kind", "operator": "Exists", "effect": "NoSchedule"}
_ON_LINUX = {"matchExpressions": [{"key": "kubernetes.io/os", "operator": "In", "values": ["linux"]}]}
_AFFINITY = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [_ON_LINUX]}}}


def begin(stage: Stage, job: dict[str, Any]) -> None:
    """One job trains with a profile; the next one names a profile that there is only once the first one has changed."""
    stage.install_operator(profiles={"kind": _profile("old")})
    name = job["metadata"]["name"]
    small = {"nodes": 1, "resources": {"requests": {"cpu": "200m"}}, "podProfile": "kind"}
    first = _first(name)
    stage.apply(stage.manifest(first, training={"steps": 100_000}, compute=small))
    stage.wait_for(first, "first steps", lambda: stage.step(first) > 0)
    stage.apply(merge(job, {"spec": {"compute": {"podProfile": "another"}}}))
    stage.wait_for(name, "word that it waits", lambda: _is_unknown(stage, name))
    assert pod_uids(stage, name) == set(), stage.explain(name)
    stage.install_operator(profiles={"kind": _profile("new"), "another": _profile("new")})


def compare(stage: Stage, name: str) -> None:
    """The next job has what its profile says; the first one keeps what that said before, and its pod."""
    first = _first(name)
    for index in (0, 1):
        _assert_has(stage, name, index, "new")
    _assert_has(stage, first, 0, "old")
    (uid,) = pod_uids(stage, first)
    step = stage.step(first)
    stage.wait_for(first, f"step after {step}", lambda: stage.step(first) > step)
    assert pod_uids(stage, first) == {uid}, stage.explain(first)
    assert not (stage.status(first).get("restarts") or {}).get("disruptions"), stage.explain(first)
    assert len(list((stage.folder(first) / "attempts").glob("*.json"))) == 1, stage.explain(first)
    stage.delete(first)


def _first(name: str) -> str:
    return f"{name}-first"


def _profile(kind: str) -> dict[str, Any]:
    beside = {
        "name": _BESIDE,
        "image": images.TRAINER_IMAGE,
        "imagePullPolicy": "IfNotPresent",
        "restartPolicy": "Always",
        # The first process of a container hears no signal that it does not wait for.
        "command": ["sh", "-c", "trap 'exit 0' TERM; sleep infinity & wait"],
        "env": [{"name": _KIND, "value": kind}],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    spec = {"initContainers": [beside], "tolerations": [_TOLERATION], "affinity": _AFFINITY}
    return {"env": {_KIND: kind}, "template": {"spec": spec}}


def _is_unknown(stage: Stage, name: str) -> bool:
    accepted = stage.condition(name, "Accepted")
    said = accepted.get("message") or ""
    words = f"there is no profile another; namespace {stage.namespace} has kind"
    return (accepted.get("status"), accepted.get("reason")) == ("False", "NotConfigured") and words in said


def _assert_has(stage: Stage, name: str, index: int, kind: str) -> None:
    """The live pod of a completion index was placed by the profile, and runs with all of it."""
    pod = pod_name(stage, name, index)
    found = json.loads(stage.kubectl("get", "pod", pod, "-o", "json"))
    assert _TOLERATION in found["spec"]["tolerations"], found["spec"]
    assert found["spec"]["affinity"] == _AFFINITY, found["spec"]
    (beside,) = found["status"]["initContainerStatuses"]
    assert (beside["name"], [*beside["state"]]) == (_BESIDE, ["running"]), beside
    for container in ("trainer", _BESIDE):
        said = stage.kubectl("exec", pod, f"--container={container}", "--", "printenv", _KIND)
        assert said == f"{kind}\n", (container, said)
