"""Of a watch's lines only what is read becomes an object, and nothing that is read is missing."""

from __future__ import annotations

import json
from typing import Any, get_type_hints

import pytest

from sft_operator.cluster import json_text
from sft_operator.cluster.json_text import read, read_event, read_object, written
from sft_operator.picture.observed import ChildJob, Pod
from sft_operator.picture.picture import key_of, version_of
from sft_operator.picture.sft_job import sft_job
from tests.unit.operator.make import Object, child_manifest, job_manifest, pod_manifest, stamp

READERS: dict[str, Any] = {"Pod": Pod.from_manifest, "Job": ChildJob.from_manifest}
DECLARED: dict[str, dict[str, type]] = {
    "Pod": {"metadata": json_text._Metadata, "spec": json_text._PodSpec, "status": json_text._PodStatus},
    "Job": {"metadata": json_text._Metadata, "spec": json_text._JobSpec, "status": json_text._JobStatus},
}


class Asked(dict[str, Any]):
    """A part of an object that remembers what it was asked for."""

    def __init__(self, names: set[str]) -> None:
        super().__init__()
        self._names = names

    def get(self, name: str, default: Any = None) -> Any:
        self._names.add(name)
        return default


@pytest.mark.parametrize("kind", ["Pod", "Job"])
def test_all_that_is_read_of_an_object_is_declared(kind: str) -> None:
    asked: dict[str, set[str]] = {"metadata": set(), "spec": set(), "status": set()}
    manifest = {name: Asked(names) for name, names in asked.items()}

    READERS[kind](manifest)
    key_of(kind, manifest)
    version_of(manifest)

    assert all(asked.values())
    for part, names in asked.items():
        assert names <= get_type_hints(DECLARED[kind][part]).keys(), part


@pytest.mark.parametrize(("kind", "manifest"), [("Pod", pod_manifest()), ("Job", child_manifest())])
def test_what_is_read_of_a_line_is_what_is_read_of_the_whole_object(kind: str, manifest: Object) -> None:
    manifest["metadata"]["managedFields"] = [{"fieldsV1": {"f:spec": {}}}]
    manifest["spec"] = {**manifest.get("spec", {}), "containers": [{"name": "trainer"}], "nodeName": "a"}
    line = json.dumps({"type": "MODIFIED", "object": manifest}).encode()

    found = read_event(kind, line)["object"]

    assert "managedFields" not in found["metadata"]
    assert "containers" not in found["spec"]
    assert READERS[kind](found) == READERS[kind](manifest)
    assert key_of(kind, found) == key_of(kind, manifest)
    assert version_of(found) == version_of(manifest)


@pytest.mark.parametrize(
    "document",
    [
        {"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old", "details": {}}},
        {"type": "BOOKMARK", "object": {"kind": "Pod", "metadata": {"resourceVersion": "7"}}},
        {"kind": "Status", "code": 500},
        {"type": "ADDED", "object": {"metadata": "none", "spec": [], "status": 7}},
        {"type": "ADDED", "object": "none"},
        [],
    ],
)
def test_a_line_of_another_shape_is_read_as_a_whole(document: Any) -> None:
    assert read_event("Pod", json.dumps(document).encode()) == document


def test_of_an_sftjob_only_that_is_not_read_which_nobody_reads() -> None:
    manifest = job_manifest(labels={"team": "a"}, newer={"field": [1, None]})
    manifest["status"] = {"state": "Running", "newer": 1}
    manifest["metadata"] |= {
        "creationTimestamp": stamp(0),
        "deletionTimestamp": stamp(1),
        "finalizers": ["orphan"],
        "annotations": {"a": "b", "sftjob.dev/retry": "now"},
        "managedFields": [{"fieldsV1": {"f:spec": {}}}],
    }

    event = read_event("SFTJob", json.dumps({"type": "MODIFIED", "object": manifest}).encode())
    answer = read_object("SFTJob", json.dumps(manifest).encode())

    for found in (event["object"], answer):
        assert found.keys() == manifest.keys()
        assert manifest["metadata"].keys() - found["metadata"].keys() == {"managedFields"}
        assert found["metadata"]["annotations"] == {"sftjob.dev/retry": "now"}
        assert sft_job(found) == sft_job(manifest)


@pytest.mark.parametrize("document", [{"metadata": [], "spec": 1}, [], "text", {"kind": "Status", "code": 500}])
@pytest.mark.parametrize("kind", ["SFTJob", "Job", "Service"])
def test_an_answer_of_another_shape_is_read_all_the_same(kind: str, document: Any) -> None:
    found = read_object(kind, json.dumps(document).encode())

    assert found == document or (isinstance(document, dict) and found.items() <= document.items())


def test_of_a_job_that_was_made_all_is_read_that_its_children_are_healed_from() -> None:
    manifest = child_manifest()

    found = read_object("Job", json.dumps(manifest).encode())

    assert ChildJob.from_manifest(found) == ChildJob.from_manifest(manifest)
    for name in ("name", "namespace", "uid", "labels", "annotations", "ownerReferences"):
        assert found["metadata"][name] == manifest["metadata"][name]


@pytest.mark.parametrize("document", [{"n": 2**80}, {"text": "\ud800"}, {"n": 1.5}, {"text": "ü\U0001f600"}])
def test_what_is_written_is_read_again(document: Object) -> None:
    assert read(written(document)) == document
    assert read(json.dumps(document).encode()) == document
