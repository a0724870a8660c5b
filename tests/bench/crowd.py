"""Many jobs of many pods, which exist as objects only.

Through the API server's front door 64,000 pods take a quarter of an hour here, and a Job controller over them the rest
of the machine. So there are no controllers: the operator makes the Jobs, the bench lets the API server complete one pod
of the template, and writes copies of it straight into etcd, a page at a time, while the API server is stopped. That
lists and watches them afterwards like any others.
"""

from __future__ import annotations

import base64
import json
import time
import urllib.request
import uuid
from collections.abc import Iterator, Sequence
from itertools import islice

from tests.bench.stage import INDEX_ANNOTATION, NAMESPACE, Stage, say, until
from tests.cluster import lifecycle
from tests.cluster.processes import Supervisor
from tests.cluster.state import load
from tests.integration.operator.scene import Object

_PODS_A_WRITE = 50
"""etcd takes 128 changes and 1.5 MiB at once."""


def make_pods(stage: Stage, names: Sequence[str], pods_each: int) -> None:
    """So many running pods for the Job of each name; their trainers begin."""
    state = load(stage.cluster_folder)
    assert state is not None
    url = f"http://127.0.0.1:{state.ports['etcd']}/v3/kv/txn"
    jobs = {job["metadata"]["name"]: job for job in stage.scene.list("jobs")}
    pattern = json.dumps(_pattern(stage, jobs[names[0]]))
    Supervisor(stage.cluster_folder).stop("kube-apiserver")
    begin = time.monotonic()
    copies = _copies(stage, pattern, [jobs[name] for name in names], pods_each)
    while batch := list(islice(copies, _PODS_A_WRITE)):
        puts = [{"requestPut": {"key": _base64(key), "value": _base64(pod)}} for key, pod in batch]
        body = json.dumps({"success": puts}).encode()
        with urllib.request.urlopen(urllib.request.Request(url, body), timeout=60) as answer:
            assert json.load(answer)["succeeded"]
    say(f"{len(names) * pods_each} pods of {len(pattern)} bytes written in {time.monotonic() - begin:.0f} s")
    lifecycle.up(stage.cluster_folder, "api", die_with_parent=True)
    # Its picture of all pods is filled at the first question.
    one = f"{stage.scene.path('pods')}?limit=1&resourceVersion=0"
    until(lambda: stage.scene.request("GET", one).accepted, "the API server serves pods", 120, pause=1.0)


def _pattern(stage: Stage, job: Object) -> Object:
    """A running pod of ``job`` with index 0, as the API server completes and shows it."""
    template = job["spec"]["template"]
    made = stage.scene.create(
        "pods",
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                **template["metadata"],
                "name": f"{job['metadata']['name']}-0-aaaaa",
                "annotations": {**template["metadata"].get("annotations", {}), INDEX_ANNOTATION: "0"},
                "finalizers": ["batch.kubernetes.io/job-tracking"],
                "ownerReferences": [_owner(job)],
            },
            "spec": template["spec"],
        },
    )
    stage.scene.run_pod(made)
    pod = stage.scene.get("pods", made["metadata"]["name"])
    assert pod is not None
    # A pod that is there twice would be one pod too many.
    stage.scene.patch("pods", made["metadata"]["name"], {"metadata": {"finalizers": None}})
    answer = stage.scene.request(
        "DELETE", stage.scene.path("pods", made["metadata"]["name"]), {"gracePeriodSeconds": 0}
    )
    assert answer.accepted, answer.body
    return pod


def _copies(stage: Stage, pattern: str, jobs: Sequence[Object], pods_each: int) -> Iterator[tuple[str, str]]:
    """Key and value in etcd of all pods, those of one job after the other."""
    for job in jobs:
        name = job["metadata"]["name"]
        for index in range(pods_each):
            pod: Object = json.loads(pattern)
            metadata = pod["metadata"]
            del metadata["resourceVersion"]
            metadata |= {
                "name": f"{name}-{index}-aaaaa",
                "generateName": f"{name}-{index}-",
                "uid": str(uuid.uuid4()),
                "labels": {
                    **metadata["labels"],
                    **job["spec"]["template"]["metadata"]["labels"],
                    INDEX_ANNOTATION: str(index),
                },
                "annotations": {**metadata["annotations"], INDEX_ANNOTATION: str(index)},
                "ownerReferences": [_owner(job)],
            }
            if index == 0:
                uid = job["metadata"]["ownerReferences"][0]["uid"]
                stage.trainers.begin(NAMESPACE, name, uid, metadata["uid"])
            yield f"/registry/pods/{NAMESPACE}/{metadata['name']}", json.dumps(pod)


def _owner(job: Object) -> Object:
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "name": job["metadata"]["name"],
        "uid": job["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }


def _base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()
