"""The generated CRD on a real API server: what it refuses, accepts, fills in and shows, and that Python agrees."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from sft_api.crd import resource_schema
from sft_api.generate import ROOT
from sft_api.openapi import without_defaults_below_lists
from sft_api.v1alpha1 import IMMUTABLE_SPEC_FIELDS, SFTJob, SFTJobSpec, SFTJobStatus
from sft_cli.kubernetes_yaml import YamlError, read_documents
from sft_cli.manifest import load_manifest
from sft_cli.problems import field_path
from tests.cluster.access import Cluster
from tests.e2e.stage import Stage
from tests.integration.bad_manifests import RULES
from tests.integration.bad_values import SCHEMA
from tests.integration.good_manifests import (
    EVERY_FIELD_PACKED,
    EVERY_OTHER_FIELD,
    EXPERTS,
    GOOD,
    LARGEST,
    MEGATRON,
    SHORTEST,
)
from tests.integration.kubernetes_api import Answer, KubernetesApi, kubernetes_api
from tests.integration.manifests import Bad, manifest
from tests.waiting import PATIENCE_SECONDS, wait_until

NAMESPACE = "sft-api-tests"
SFTJOBS = f"/apis/sftjob.dev/v1alpha1/namespaces/{NAMESPACE}/sftjobs"
MERGE_PATCH = "application/merge-patch+json"


@pytest.fixture(scope="module")
def server(api_server: Cluster) -> Iterator[Cluster]:
    """The API server with our CRD and a namespace."""
    api_server.kubectl("apply", "--server-side", "-f", str(ROOT / "crds" / "sftjob.dev_sftjobs.yaml"))
    api_server.wait_until_served("sftjobs.sftjob.dev")
    api_server.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
    yield api_server
    api_server.kubectl("delete", "namespace", NAMESPACE, "--wait=false")


@pytest.fixture(scope="module")
def api(server: Cluster) -> Iterator[KubernetesApi]:
    with kubernetes_api(server) as opened:
        yield opened


def try_to_create(api: KubernetesApi, text: str) -> Answer:
    return api.request("POST", f"{SFTJOBS}?fieldValidation=Strict&dryRun=All", text, "application/yaml")


def test_the_api_server_has_nothing_against_the_crd(server: Cluster) -> None:
    status: Any = server.get("crd", "sftjobs.sftjob.dev")["status"]

    conditions = {condition["type"]: condition["status"] for condition in status["conditions"]}
    assert conditions == {"NamesAccepted": "True", "Established": "True"}


@pytest.mark.parametrize("bad", RULES + SCHEMA, ids=lambda bad: bad.title)
def test_server_and_python_refuse_alike(api: KubernetesApi, bad: Bad) -> None:
    answer = try_to_create(api, bad.text)
    faults = _faults_by_python(bad.text)

    assert not answer.accepted
    assert _paths_named_by_server(answer) == {bad.at}
    # What it adds by itself to a wrong type has no path, and stands behind what is wrong.
    assert [field for field, _ in answer.causes][:1] != ["<nil>"] or not bad.at
    assert {path for path, _ in faults} == {bad.at}
    if bad.sentence:
        sentence = f"{bad.sentence}; {bad.hint}" if bad.hint else bad.sentence
        # The server puts the value before the sentence of a rule.
        assert [message for _, message in answer.causes if message.endswith(f": {sentence}")]
        # Python may add what to write instead.
        lines = [line for _, message in faults for line in message.splitlines()]
        assert [line for line in lines if line == sentence or line.startswith(f"{sentence}; ")]


def test_every_rule_of_the_models_is_broken_by_a_bad_manifest() -> None:
    spec = {part: schema for part, schema in resource_schema()["properties"].items() if part == "spec"}
    said = {bad.sentence for bad in RULES}

    unbroken = {rule["message"] for rule in _rules({"properties": spec}) if "oldSelf" not in rule["rule"]} - said

    assert unbroken == set()


@pytest.mark.parametrize("text", GOOD.values(), ids=GOOD)
def test_server_and_python_fill_in_the_same_defaults(api: KubernetesApi, text: str) -> None:
    answer = try_to_create(api, text)
    job = load_manifest(text)

    assert answer.accepted, answer.body
    filled_in = job.spec.model_dump(mode="json", exclude_none=True)
    given = job.spec.model_dump(mode="json", exclude_none=True, exclude_unset=True)
    assert answer.body["spec"] == _with_lists_of(given, filled_in)
    assert SFTJob.from_manifest(answer.body) == job.model_copy(
        update={"metadata": SFTJob.from_manifest(answer.body).metadata}
    )
    assert "status" not in answer.body


def _with_lists_of(given: dict[str, Any], filled_in: dict[str, Any]) -> dict[str, Any]:
    """``filled_in``, but for what stands in items of lists."""
    result = {}
    for name, value in filled_in.items():
        if isinstance(value, dict):
            result[name] = _with_lists_of(given.get(name, {}), value)
        else:
            result[name] = given.get(name, value) if isinstance(value, list) else value
    return result


@pytest.mark.parametrize("title", sorted(GOOD.keys() - {"nulls"}))
def test_what_the_server_makes_of_a_manifest_is_no_difference_to_it(api: KubernetesApi, title: str) -> None:
    """Argo CD merges a manifest into the live object as a server-side apply does, which replaces lists: an item that
    the manifest writes without a default and the live object has with it would differ, for ever."""
    text = GOOD[title]
    live = try_to_create(api, text).body["spec"]
    (document,) = read_documents(text)

    assert _merged(document["spec"], live) == live


def _merged(patch: Any, value: Any) -> Any:
    """``value`` after a merge of ``patch``, which has no nulls: objects by their fields, all else as a whole."""
    if not isinstance(patch, dict) or not isinstance(value, dict):
        return patch
    return value | {name: _merged(item, value.get(name)) for name, item in patch.items()}


def test_the_good_manifests_give_every_field_of_the_spec() -> None:
    schema = resource_schema()["properties"]["spec"]
    given = {
        path
        for text in (EVERY_FIELD_PACKED, EVERY_OTHER_FIELD, MEGATRON, EXPERTS)
        for document in read_documents(text)
        for path in _given_paths(schema, document["spec"], "spec")
    }

    assert set(_leaf_paths(schema, "spec")) - given == set()


CHANGES_REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("model", {"model": {"uri": "hf://org/other"}}),
    ("model", {"model": {"chatTemplate": "{{ added }}"}}),
    ("model", {"model": {"tokenSecretRef": None}}),
    ("lora", {"lora": {"rank": 9}}),
    ("lora", {"lora": None}),
    ("data", {"data": {"train": [{"uri": "hf://org/other"}]}}),
    ("data", {"data": {"eval": []}}),
    ("data", {"data": {"eval": [{"name": "b", "uri": "hf://org/rows"}]}}),
    ("data", {"data": {"eval": [{"name": "a", "uri": "hf://org/other"}]}}),
    ("data", {"data": {"train": [{"uri": "hf://org/rows"}, {"uri": "hf://org/rows"}]}}),
    ("data", {"data": {"maxLength": 4095}}),
    ("data", {"data": None}),
    ("training", {"training": {"steps": 1001}}),
    ("training", {"training": {"steps": None, "epochs": 1}}),
    ("training", {"training": None}),
    ("training", {"training": {"callbacks": [{"class": "team.watch:Other"}]}}),
    ("strategy", {"strategy": {"fsdp": {"shardDegree": 1}}}),
    ("strategy", {"strategy": None}),
    ("compute", {"compute": {"nodes": 2}}),
    ("compute", {"compute": {"env": [{"name": "A", "value": "b"}]}}),
    ("compute", {"compute": {"tolerations": []}}),
    ("compute", {"compute": {"image": "registry.example/trainer:2"}}),
    ("checkpoint", {"checkpoint": {"everySeconds": 601}}),
    ("checkpoint", {"checkpoint": {"uri": None}}),
    ("export", {"export": {"atEnd": False}}),
    ("monitoring", {"monitoring": {"profile": {"steps": 1}}}),
    ("runPolicy.progressDeadlineSeconds", {"runPolicy": {"progressDeadlineSeconds": 60}}),
    ("runPolicy.storageDeadlineSeconds", {"runPolicy": {"storageDeadlineSeconds": 60}}),
    ("runPolicy.terminationGracePeriodSeconds", {"runPolicy": {"terminationGracePeriodSeconds": 301}}),
    ("runPolicy.terminationGracePeriodSeconds", {"runPolicy": None}),
]
CHANGES_ALLOWED: list[dict[str, Any]] = [
    {"deletionPolicy": "Delete"},
    {"deletionPolicy": None},
    {"suspend": True},
    {"suspend": None},
    {"runPolicy": {"maxRestarts": 20, "startDeadlineSeconds": 60}},
    {"runPolicy": {"activeDeadlineSeconds": 60, "ttlSecondsAfterFinished": 60}},
    {"runPolicy": {"activeDeadlineSeconds": None, "ttlSecondsAfterFinished": None}},
    {"training": {"microBatchSize": 1}, "compute": {"nodes": 1}, "export": {"atEnd": True}},
    {"training": {"callbacks": [{"class": "team.watch:Loss", "arguments": {}}]}},
    {"compute": {"tolerations": [{"key": "a", "operator": "Equal"}]}},
]
CHANGED_JOB = """\
apiVersion: sftjob.dev/v1alpha1
kind: SFTJob
metadata: {name: changed}
spec:
  model: {uri: hf://org/name, tokenSecretRef: {name: hub}}
  lora: {rank: 8}
  data: {train: [{uri: hf://org/rows}], eval: [{name: a, uri: hf://org/rows}]}
  training: {steps: 1000, callbacks: [{class: "team.watch:Loss"}]}
  strategy: {fsdp: {}}
  compute: {tolerations: [{key: a}]}
  checkpoint: {uri: s3://bucket/runs}
  runPolicy: {terminationGracePeriodSeconds: 120}
"""


@pytest.fixture(scope="module")
def job_path(api: KubernetesApi) -> str:
    """A stored SFTJob that tests try to change."""
    created = api.request("POST", SFTJOBS, CHANGED_JOB, "application/yaml")
    assert created.accepted, created.body
    return f"{SFTJOBS}/changed"


@pytest.mark.parametrize(("field", "change"), CHANGES_REFUSED, ids=lambda value: json.dumps(value)[:60])
def test_what_a_run_depends_on_never_changes(api: KubernetesApi, job_path: str, field: str, change: Any) -> None:
    answer = api.request("PATCH", job_path, json.dumps({"spec": change}), MERGE_PATCH)

    assert not answer.accepted
    if change.get("data", ...) is not None:  # data is required: its removal is refused as that
        sentence = f"spec.{field} cannot be changed after creation: create a new SFTJob"
        # Kubernetes 1.34 says "object" before it.
        assert [message.replace('"object": ', "") for _, message in answer.causes] == [f"Invalid value: {sentence}"]


def test_every_immutable_field_is_tried_and_the_rest_is_known() -> None:
    assert {field for field, _ in CHANGES_REFUSED} == set(IMMUTABLE_SPEC_FIELDS)
    aliases = {field.alias for field in SFTJobSpec.model_fields.values()}
    assert aliases - set(IMMUTABLE_SPEC_FIELDS) == {"suspend", "runPolicy", "deletionPolicy"}


@pytest.mark.parametrize("change", CHANGES_ALLOWED, ids=lambda value: json.dumps(value)[:60])
def test_what_only_steers_the_run_may_change(api: KubernetesApi, job_path: str, change: Any) -> None:
    answer = api.request("PATCH", job_path, json.dumps({"spec": change}), MERGE_PATCH)

    assert answer.accepted, answer.body


SOURCE: dict[str, Any] = {
    "uri": "hf://org/rows",
    "split": "train[:50%]",
    "subset": "en",
    "format": "alpaca",
    "messagesKey": "chat",
    "columns": {"output": "answer"},
    "toolsKey": "functions",
    "systemKey": "prompt",
}
EVERY_ITEM: list[tuple[str, str, dict[str, Any]]] = [
    ("data", "train", SOURCE | {"weight": 2.5}),
    ("data", "eval", SOURCE | {"name": "a"}),
    ("training", "callbacks", {"class": "team.watch:Loss", "arguments": {"loss": "1.2"}}),
    ("compute", "tolerations", {"key": "a", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 60}),
    ("compute", "tolerations", {"key": "a", "value": "b"}),
]
"""Section and list, and items that have between them each field of it, with another value than its default."""


def test_every_field_of_every_item_that_has_defaults_is_tried() -> None:
    spec = resource_schema()["properties"]["spec"]["properties"]
    tried: dict[tuple[str, str], set[str]] = {}
    for section, name, item in EVERY_ITEM:
        tried.setdefault((section, name), set()).update(item)

    assert tried == {
        (section, name): set(field["items"]["properties"])
        for section, schema in spec.items()
        for name, field in schema.get("properties", {}).items()
        if field != without_defaults_below_lists(field)
    }


@pytest.mark.parametrize(("section", "name", "item"), EVERY_ITEM, ids=lambda value: str(value)[:40])
def test_no_field_of_an_item_may_go(api: KubernetesApi, section: str, name: str, item: dict[str, Any]) -> None:
    (document,) = read_documents(SHORTEST)
    document["metadata"] = {"generateName": "items-"}
    document["spec"].setdefault(section, {})[name] = [item]
    created = api.request("POST", SFTJOBS, json.dumps(document), "application/json")
    assert created.accepted, created.body
    path = f"{SFTJOBS}/{created.body['metadata']['name']}"

    for gone in item:
        without = {field: value for field, value in item.items() if field != gone}
        answer = api.request("PATCH", path, json.dumps({"spec": {section: {name: [without]}}}), MERGE_PATCH)
        assert not answer.accepted, gone
        assert (
            f"spec.{section} cannot be changed" in answer.body["message"]
            or ": Required value" in answer.body["message"]
        )


def test_optional_blocks_cannot_be_added_later(api: KubernetesApi) -> None:
    created = api.request("POST", SFTJOBS, SHORTEST.replace("name: job", "name: bare"), "application/yaml")
    assert created.accepted, created.body

    answer = api.request(
        "PATCH", f"{SFTJOBS}/bare", json.dumps({"spec": {"strategy": {"fsdp": {"shardDegree": 1}}}}), MERGE_PATCH
    )

    assert [field for field, _ in answer.causes] == ["spec"]
    assert "spec.strategy cannot be changed" in answer.body["message"]


A_NEW_RULE = "checkpoint.keep.best needs data.eval or data.heldOut"


def test_of_a_stored_job_that_a_new_rule_refuses_all_but_the_spec_may_change(
    api: KubernetesApi, server: Cluster
) -> None:
    definition: Any = server.get("crd", "sftjobs.sftjob.dev")["spec"]
    rules = definition["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["x-kubernetes-validations"]
    (place,) = (number for number, rule in enumerate(rules) if rule["message"].startswith(A_NEW_RULE))
    pointer = f"/spec/versions/0/schema/openAPIV3Schema/properties/spec/x-kubernetes-validations/{place}"
    text = manifest({"checkpoint": "{keep: {best: 1}}"}, name="stored")
    path = f"{SFTJOBS}/stored"

    # An older CRD, which does not have the rule, stores it; the newer one comes.
    _patch_definition(server, {"op": "remove", "path": pointer})
    wait_until(lambda: try_to_create(api, text).accepted)
    created = api.request("POST", SFTJOBS, text, "application/yaml")
    assert created.accepted, created.body
    _patch_definition(server, {"op": "add", "path": pointer, "value": rules[place]})
    wait_until(lambda: not try_to_create(api, text.replace("name: stored", "name: other")).accepted)

    told = api.request("PATCH", f"{path}/status", json.dumps({"status": {"state": "Running"}}), MERGE_PATCH)
    marked = api.request("PATCH", path, json.dumps({"metadata": {"annotations": {"a": "b"}}}), MERGE_PATCH)
    suspended = api.request("PATCH", path, json.dumps({"spec": {"suspend": True}}), MERGE_PATCH)
    finalized = api.request("PATCH", path, json.dumps({"metadata": {"finalizers": ["sftjob.dev/test"]}}), MERGE_PATCH)
    api.request("DELETE", path, "", "application/json")
    let_go = api.request("PATCH", path, json.dumps({"metadata": {"finalizers": None}}), MERGE_PATCH)

    assert [told.accepted, marked.accepted, finalized.accepted, let_go.accepted] == [True] * 4
    assert [field for field, _ in suspended.causes] == ["spec"]
    assert A_NEW_RULE in suspended.body["message"]


SHORT_ITEMS = manifest(
    {
        "data": "{train: [{uri: hf://org/rows}, {uri: hf://org/other, split: test}], eval: [{name: a, uri: hf://org/a}]}",
        "training": '{callbacks: [{class: "team.watch:Loss"}]}',
        "compute": "{tolerations: [{key: a, value: b}]}",
    },
    name="applied",
)


@pytest.fixture
def crd_with_all_defaults(api: KubernetesApi, server: Cluster) -> Iterator[None]:
    """The API server fills in items of lists too, as by earlier CRDs, until the test has the CRD of today served."""
    _serve(api, server, resource_schema())
    yield
    _serve(api, server, SERVED)


SERVED = without_defaults_below_lists(resource_schema())


def _serve(api: KubernetesApi, server: Cluster, schema: dict[str, Any]) -> None:
    pointer = "/spec/versions/0/schema/openAPIV3Schema"
    _patch_definition(server, {"op": "replace", "path": pointer, "value": schema})
    filled_in = schema != SERVED
    wait_until(lambda: ("format" in try_to_create(api, SHORTEST).body["spec"]["data"]["train"][0]) is filled_in)


@pytest.mark.usefixtures("crd_with_all_defaults")
def test_a_manifest_that_is_applied_again_changes_no_job_of_an_earlier_crd(api: KubernetesApi, server: Cluster) -> None:
    """`kubectl apply`, by either side, replaces lists: it takes away what an earlier CRD has filled in there."""
    jobs = {"client": "--server-side=false", "server": "--server-side"}

    def apply(split: str = "test") -> dict[str, str]:
        said = {}
        for name, how in jobs.items():
            text = SHORT_ITEMS.replace("name: applied", f"name: {name}").replace("split: test", f"split: {split}")
            done = server.kubectl("apply", how, "-n", NAMESPACE, "-f", "-", stdin=text, check=False)
            said[name] = done.stdout if done.returncode == 0 else f"not applied: {done.stderr}"
        return said

    def stored() -> dict[str, dict[str, Any]]:
        return {name: server.get("sftjob", name, "-n", NAMESPACE) for name in jobs}

    apply()
    before = stored()
    _serve(api, server, SERVED)
    refused = apply(split="train")
    again = apply()
    after = stored()
    third = apply()
    at_last = stored()
    _serve(api, server, resource_schema())
    rolled_back = apply()

    assert third["client"] == "sftjob.sftjob.dev/client unchanged\n"
    for name in jobs:
        assert before[name]["spec"]["compute"]["tolerations"] == [{"key": "a", "value": "b", "operator": "Equal"}]
        assert before[name]["spec"]["data"]["eval"][0]["format"] == "auto"
        assert "spec.data cannot be changed after creation" in refused[name]
        assert again[name].startswith(f"sftjob.sftjob.dev/{name} ")
        assert after[name]["spec"]["data"]["train"] == [
            {"uri": "hf://org/rows"},
            {"uri": "hf://org/other", "split": "test"},
        ]
        assert SFTJob.from_manifest(after[name]).spec == SFTJob.from_manifest(before[name]).spec
        assert at_last[name]["metadata"]["generation"] == after[name]["metadata"]["generation"]
        assert rolled_back[name].startswith(f"sftjob.sftjob.dev/{name} ")
    assert {name: job["spec"] for name, job in stored().items()} == {name: job["spec"] for name, job in before.items()}


def _patch_definition(server: Cluster, change: dict[str, Any]) -> None:
    # A whole schema is longer than an argument may be.
    said = json.dumps([change])
    server.kubectl("patch", "crd", "sftjobs.sftjob.dev", "--type=json", "--patch-file=/dev/stdin", stdin=said)


def test_the_largest_job_costs_less_than_the_api_server_spends_on_one(api: KubernetesApi) -> None:
    created = api.request("POST", f"{SFTJOBS}?fieldValidation=Strict", LARGEST, "application/yaml")
    assert created.accepted, created.body

    changed = api.request("PATCH", f"{SFTJOBS}/largest", json.dumps({"spec": {"suspend": True}}), MERGE_PATCH)

    assert changed.accepted, changed.body


STATUS: dict[str, Any] = {
    "state": "Running",
    "message": "Training on 8 processes.",
    "conditions": [
        {
            "type": "Running",
            "status": "True",
            "reason": "Training",
            "lastTransitionTime": "2026-01-01T00:00:00Z",
        }
    ],
    "progress": {
        "step": 1200,
        "summary": "1200/3125",
        "phase": "Training",
        "loss": 1.204,
        "tokensPerSecond": 81234,
        "remaining": "3h12m",
    },
    "checkpoints": {
        "latest": {
            "step": 1200,
            "attempt": 1,
            "uri": "s3://bucket/runs/a",
            "time": "2020-01-01T00:00:00Z",
            "sizeBytes": 5_000_000_000,
            "verified": True,
        }
    },
    "restarts": {"failures": 1, "disruptions": 2},
    "stepsAtRisk": 37,
    "podsReady": "2/2",
}


def test_status_is_written_apart_from_the_spec_and_shown_in_columns(
    api: KubernetesApi, server: Cluster, job_path: str
) -> None:
    status = SFTJobStatus.model_validate(STATUS).model_dump(mode="json", exclude_none=True)
    written = api.request(
        "PATCH", f"{job_path}/status", json.dumps({"status": status, "spec": {"suspend": True}}), MERGE_PATCH
    )

    assert written.accepted, written.body
    assert written.body["status"] == status
    assert written.body["spec"]["suspend"] is False
    header, row = server.kubectl("get", "sft", "changed", "-n", NAMESPACE).stdout.splitlines()
    assert header.split() == ["NAME", "STATE", "STEP", "LOSS", "TOK/S", "CHECKPOINT", "RESTARTS", "REMAINING", "AGE"]
    name, state, step, loss, speed, checkpoint, restarts, remaining, age = row.split()
    assert [name, state, step, loss, speed] == ["changed", "Running", "1200/3125", "1.204", "81234"]
    assert re.fullmatch(r"\d+y\d*d?", checkpoint)
    assert [restarts, remaining] == ["1", "3h12m"]
    assert re.fullmatch(r"[\dms]+", age)
    wide = server.kubectl("get", "training", "-n", NAMESPACE, "-o", "wide").stdout
    assert "2/2" in wide
    assert "Training on 8 processes." in wide


def test_what_end_to_end_tests_look_at_is_the_job_as_kubectl_has_it(
    api: KubernetesApi, server: Cluster, job_path: str
) -> None:
    store: Any = None
    stage = Stage(server, store, NAMESPACE, api)
    written = api.request("PATCH", f"{job_path}/status", json.dumps({"status": {"progress": {"step": 7}}}), MERGE_PATCH)
    assert written.accepted, written.body

    assert stage.job("changed") == server.get("sftjob", "changed", "-n", NAMESPACE, "--show-managed-fields")
    assert stage.step("changed") == 7
    with pytest.raises(RuntimeError, match='"absent" not found'):
        stage.job("absent")


@pytest.mark.parametrize(
    ("status", "path"),
    [
        ({"state": "Sleeping"}, "status.state"),
        ({"conditions": [{**STATUS["conditions"][0]}, {**STATUS["conditions"][0]}]}, "status.conditions[1]"),
        ({"progress": {"step": 1.5}}, "status.progress.step"),
        ({"checkpoints": {"best": {"step": 1}}}, "status.checkpoints.best.uri"),
    ],
    ids=["state", "condition twice", "half a step", "checkpoint without uri"],
)
def test_a_status_that_is_none_is_refused(api: KubernetesApi, job_path: str, status: Any, path: str) -> None:
    answer = api.request("PATCH", f"{job_path}/status?dryRun=All", json.dumps({"status": status}), MERGE_PATCH)

    assert not answer.accepted
    assert path in [field for field, _ in answer.causes]


def test_explain_reads_well(server: Cluster) -> None:
    shown = " ".join(_explained(server, "sftjob.spec.data").split())

    assert "The data, and which tokens of it are trained." in shown
    assert "maxLength <integer> Longest example, in tokens. Default: 4096." in shown
    assert "overlong <string> enum: drop, truncate, split, error What happens to longer examples." in shown
    assert "train <[]Object> -required- Data sets to train on." in shown
    below_a_list = " ".join(_explained(server, "sftjob.spec.data.train.messagesKey").split())
    assert "must be in the data. Default: messages." in below_a_list


def _explained(server: Cluster, field: str) -> str:
    """What `kubectl explain` says, once the API server has published the schema of a CRD that it serves already."""
    end = time.monotonic() + PATIENCE_SECONDS
    while (done := server.kubectl("explain", field, check=False)).returncode != 0:
        assert time.monotonic() < end, done.stderr
        time.sleep(0.5)
    return done.stdout


def test_examples_can_be_applied(server: Cluster) -> None:
    files = sorted((ROOT / "examples").glob("*.yaml"))
    examples = [path for path in files if "\nkind: SFTJob\n" in path.read_text(encoding="utf-8")]

    for path in examples:
        applied = server.kubectl("apply", "-n", NAMESPACE, "--dry-run=server", "-f", str(path)).stdout
        assert f"sftjob.sftjob.dev/{load_manifest(path).metadata.name} created" in applied
    assert examples


def _faults_by_python(text: str) -> list[tuple[str, str]]:
    """Field path and message of every fault that the models see."""
    try:
        (document,) = read_documents(text)
        SFTJob.from_manifest(document)
    except YamlError as error:
        # A duplicate key has no path: the line says where it is.
        return [(re.sub(r"(line \d+): duplicate key '(\w+)'", r"\1: \2", str(error)), "duplicate")]
    except ValidationError as error:
        return [(field_path(fault["loc"]), fault["msg"]) for fault in error.errors()]
    return []


def _paths_named_by_server(answer: Answer) -> set[str]:
    """Field paths in an answer; a message about strict decoding names them in its text."""
    if answer.code == 400:
        unknown = set(re.findall(r'unknown field "([^"]+)"', answer.body["message"]))
        duplicate = re.findall(r'line (\d+): key "(\w+)" already set', answer.body["message"])
        return unknown | {f"line {line}: {key}" for line, key in duplicate}
    paths = {field for field, message in answer.causes if "some validation rules were not checked" not in message}
    # Rules name keys of maps in brackets, the schema with a dot; the root has no name; anyOf has no path.
    named = {re.sub(r"\[([^\]\d][^\]]*)\]", r".\1", path).replace("<nil>", "") for path in paths}
    return named - {""} or {""}


def _rules(schema: dict[str, Any]) -> Iterator[dict[str, str]]:
    yield from schema.get("x-kubernetes-validations", ())
    for inner in [*schema.get("properties", {}).values(), schema.get("items"), schema.get("additionalProperties")]:
        if inner:
            yield from _rules(inner)


def _leaf_paths(schema: dict[str, Any], path: str) -> Iterator[str]:
    inner = schema.get("items", schema)
    if "properties" not in inner:
        yield path
    for name, field in inner.get("properties", {}).items():
        yield from _leaf_paths(field, f"{path}.{name}")


def _given_paths(schema: dict[str, Any], value: Any, path: str) -> Iterator[str]:
    if isinstance(value, list) and "properties" in schema.get("items", {}):
        for item in value:
            yield from _given_paths(schema["items"], item, path)
    elif "properties" in schema:
        for name, item in value.items():
            yield from _given_paths(schema["properties"][name], item, f"{path}.{name}")
    else:
        yield path
