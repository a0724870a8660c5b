"""What the platform adds to pods, in a template and in profiles: what of it is refused, and what pods become."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import pytest
from pydantic import ValidationError

from sft_operator.builders import build_job, kept_off
from sft_operator.config import PodProfile, PodSettings, Settings
from sft_operator.decisions.gpu_memory import memory_warnings
from sft_operator.pod_template import OURS_IN_POD, merged
from tests.unit.operator.make import Object, make_job

PLAIN = PodSettings(image="trainer:1")


def settings_of(spec: Object, **others: Any) -> PodSettings:
    return PodSettings.model_validate({"image": "trainer:1", "template": {"spec": spec}, **others})


def of_trainer(**fields: Any) -> Object:
    return {"containers": [{"name": "trainer", **fields}]}


def template_of(pods: PodSettings, **spec: Any) -> Object:
    template: Object = build_job(make_job(**spec), Settings(pods=pods))["spec"]["template"]
    return template


def pod_of(pods: PodSettings, **spec: Any) -> Object:
    pod: Object = template_of(pods, **spec)["spec"]
    return pod


def environment(pod: Object) -> Object:
    return {item["name"]: item.get("value", item.get("valueFrom")) for item in pod["containers"][0]["env"]}


def without(pod: Object, other: Object) -> Object:
    """The fields of ``pod`` that ``other`` has not, or has otherwise."""
    return {name: value for name, value in pod.items() if other.get(name) != value}


def test_what_has_a_merge_key_is_merged_by_it_and_all_else_replaced() -> None:
    beneath = {
        "nodeSelector": {"a": "1", "b": "1"},
        "tolerations": [{"key": "a"}],
        "containers": [{"name": "trainer", "env": [{"name": "A", "value": "1"}]}, {"name": "beside", "image": "x"}],
        "volumes": [{"name": "v", "hostPath": {"path": "/a"}}],
        "topologySpreadConstraints": [{"topologyKey": "rack", "whenUnsatisfiable": "DoNotSchedule", "maxSkew": 1}],
    }
    upper = {
        "nodeSelector": {"b": "2"},
        "tolerations": [{"key": "b"}],
        "containers": [
            {"name": "before", "image": "y"},
            {"name": "trainer", "env": [{"name": "B", "value": "2"}, {"name": "A", "valueFrom": {}}]},
        ],
        "volumes": [{"name": "v", "emptyDir": {}}],
        "topologySpreadConstraints": [{"topologyKey": "rack", "whenUnsatisfiable": "ScheduleAnyway", "maxSkew": 2}],
    }

    assert merged(beneath, upper) == {
        "nodeSelector": {"a": "1", "b": "2"},
        "tolerations": [{"key": "b"}],
        "containers": [
            {"name": "trainer", "env": [{"name": "A", "valueFrom": {}}, {"name": "B", "value": "2"}]},
            {"name": "beside", "image": "x"},
            {"name": "before", "image": "y"},
        ],
        "volumes": [{"name": "v", "emptyDir": {}}],
        "topologySpreadConstraints": [
            {"topologyKey": "rack", "whenUnsatisfiable": "DoNotSchedule", "maxSkew": 1},
            {"topologyKey": "rack", "whenUnsatisfiable": "ScheduleAnyway", "maxSkew": 2},
        ],
    }


ADDED: Object = {
    "hostNetwork": True,
    "dnsPolicy": "ClusterFirstWithHostNet",
    "schedulerName": "other",
    "runtimeClassName": "nvidia",
    "serviceAccountName": "trainers",
    "resourceClaims": [{"name": "imex", "resourceClaimTemplateName": "imex"}],
    "affinity": {"podAffinity": {}},
    "nodeSelector": {"rack": "1"},
}
FULL: Object = {
    **ADDED,
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
    "securityContext": {"supplementalGroups": [44]},
    "initContainers": [{"name": "daemon", "image": "daemon:1", "restartPolicy": "Always"}],
    "containers": [
        {"name": "beside", "image": "beside:1", "securityContext": {"privileged": True}},
        {
            "name": "trainer",
            "env": [{"name": "A", "value": "1"}],
            "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
            "resources": {"claims": [{"name": "imex"}], "limits": {"rdma/ib": 1}},
            "volumeMounts": [{"name": "libraries", "mountPath": "/usr/local/gpudirect"}],
        },
    ],
    "volumes": [{"name": "libraries", "hostPath": {"path": "/opt/gpudirect"}}],
}


def test_a_template_adds_to_the_pods_and_changes_nothing_of_ours() -> None:
    pod, plain = pod_of(settings_of(FULL)), pod_of(PLAIN)

    trainer, beside = pod["containers"]
    ours = plain["containers"][0]
    assert without(pod, plain) == {
        **ADDED,
        "tolerations": [*FULL["tolerations"], *plain["tolerations"]],
        "securityContext": {**plain["securityContext"], "supplementalGroups": [44]},
        "initContainers": FULL["initContainers"],
        "containers": [trainer, beside],
        "volumes": [*FULL["volumes"], *plain["volumes"]],
    }
    given, ib = FULL["containers"][1], {"rdma/ib": 1}
    asked = {kind: {**ours["resources"][kind], **ib} for kind in ("requests", "limits")}
    assert beside == FULL["containers"][0]
    assert without(trainer, ours) == {
        "env": [*ours["env"], *given["env"]],
        "securityContext": {**ours["securityContext"], "capabilities": {"add": ["IPC_LOCK"], "drop": ["ALL"]}},
        "resources": {**asked, "claims": [{"name": "imex"}]},
        "volumeMounts": [*given["volumeMounts"], *ours["volumeMounts"]],
    }
    assert not without(plain, pod).keys() - without(pod, plain).keys()


def test_labels_and_annotations_of_the_job_win_over_the_templates_and_ours_over_both() -> None:
    pods = PodSettings.model_validate(
        {
            "image": "trainer:1",
            "template": {"metadata": {"labels": {"team": "platform", "tier": "gpu"}, "annotations": {"a/b": "1"}}},
        }
    )

    given = template_of(pods, compute={"gpusPerNode": 1, "labels": {"team": "nlp"}, "annotations": {"c": "2"}})

    assert given["metadata"]["labels"].items() >= {"team": "nlp", "tier": "gpu", "sftjob.dev/job": "tulu"}.items()
    assert given["metadata"]["annotations"] == {"a/b": "1", "c": "2"}


def test_the_job_wins_over_the_template_or_adds_to_it() -> None:
    spec = {
        "nodeSelector": {"gpu": "h100", "rack": "1"},
        "priorityClassName": "low",
        "runtimeClassName": "nvidia",
        "serviceAccountName": "trainers",
        "imagePullSecrets": [{"name": "theirs"}],
        "tolerations": [{"key": "gpu", "operator": "Exists"}, {"operator": "Exists", "effect": "NoExecute"}],
    }
    compute = {
        "gpusPerNode": 1,
        "nodeSelector": {"rack": "2"},
        "priorityClassName": "high",
        "serviceAccountName": "mine",
        "imagePullSecrets": ["mine"],
        "tolerations": [{"key": "spot", "operator": "Exists"}, {"key": "gpu", "operator": "Exists"}],
    }

    pod = pod_of(settings_of(spec), compute=compute)

    assert pod["nodeSelector"] == {"gpu": "h100", "rack": "2"}
    assert (pod["priorityClassName"], pod["runtimeClassName"], pod["serviceAccountName"]) == ("high", "nvidia", "mine")
    assert sorted(item["name"] for item in pod["imagePullSecrets"]) == ["mine", "theirs"]
    # One that tolerates all lost nodes leaves nothing to our patience with them.
    assert [item.get("key") for item in pod["tolerations"]] == ["spot", "gpu", None]


def test_variables_go_from_ours_over_the_platforms_to_the_jobs() -> None:
    spec = of_trainer(
        env=[
            {"name": "HF_HOME", "value": "/template"},
            {"name": "NCCL_IB_HCA", "value": "template"},
            {"name": "HOST_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.hostIP"}}},
            {"name": "NCCL_DEBUG_FILE", "value": "/tmp/nccl.$(SFT_NODE_NAME)"},
            {"name": "HF_TOKEN", "value": "template"},
            {"name": "MINE", "value": "template"},
        ]
    )
    pods = settings_of(spec, env={"NCCL_IB_HCA": "settings", "HF_ENDPOINT": "http://mirror"})
    token = {"uri": "hf://org/model", "tokenSecretRef": {"name": "hub", "key": "token"}}

    pod = pod_of(pods, model=token, compute={"gpusPerNode": 1, "env": [{"name": "MINE", "value": "mine"}]})
    found = environment(pod)

    assert (found["HF_HOME"], found["NCCL_IB_HCA"], found["HF_ENDPOINT"]) == ("/template", "template", "http://mirror")
    assert found["HOST_IP"] == {"fieldRef": {"fieldPath": "status.hostIP"}}
    assert found["MINE"] == "mine"
    assert "secretKeyRef" in found["HF_TOKEN"]
    names = [item["name"] for item in pod["containers"][0]["env"]]
    assert len(names) == len({*names})
    assert names.index("SFT_NODE_NAME") < names.index("NCCL_DEBUG_FILE")  # what comes later cannot be named


@pytest.mark.parametrize(
    ("given", "requests", "limits"),
    [
        ({}, {"cpu": "4", "memory": "1Ti"}, {"memory": "1Ti"}),
        ({"requests": {"memory": "5Gi"}}, {"cpu": "4", "memory": "5Gi"}, {}),
        ({"limits": {"cpu": 9}}, {"memory": "1Ti"}, {"cpu": 9, "memory": "1Ti"}),
    ],
)
def test_a_resource_that_the_job_names_is_its_own_and_others_are_the_templates_for_each_pod(
    given: Object, requests: Object, limits: Object
) -> None:
    resources = {"requests": {"memory": "1Ti"}, "limits": {"memory": "1Ti", "rdma/ib": 1}}

    compute = {"gpusPerNode": 2, "resources": given, "launcher": "ray"}
    (trainer,) = pod_of(settings_of(of_trainer(resources=resources)), compute=compute)["containers"]

    both = {"rdma/ib": 1, "nvidia.com/gpu": 2}
    assert trainer["resources"] == {"requests": {**requests, **both}, "limits": {**limits, **both}}


def test_shared_memory_and_warnings_go_by_the_templates_limit() -> None:
    pods = settings_of(of_trainer(resources={"limits": {"memory": "6Gi"}}))
    spec = {"model": {"uri": "hf://meta-llama/Llama-3.1-8B"}, "compute": {"gpusPerNode": 8}}

    volumes = {volume["name"]: volume for volume in pod_of(pods, **spec)["volumes"]}

    assert volumes["shared-memory"]["emptyDir"]["sizeLimit"] == str(3 * 2**30)
    assert "6.0Gi" in " ".join(memory_warnings(make_job(**spec).spec, pods))


def test_labels_of_nodes_and_pods_may_be_called_as_lists_are() -> None:
    selector = {"env": "prod", "volumes": "fast"}
    term = {"topologyKey": "rack", "labelSelector": {"matchLabels": selector}}
    affinity = {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}

    pods = settings_of({"nodeSelector": selector, "affinity": affinity}, profiles={"a": {"template": {"spec": {}}}})

    assert pod_of(pods)["nodeSelector"] == selector
    assert pods.with_profile("a").template == pods.template


def test_pods_with_ray_have_the_same_template() -> None:
    spec = {"runtimeClassName": "nvidia", "volumes": [{"name": "v", "hostPath": {"path": "/v"}}]}

    pod = pod_of(settings_of(spec), compute={"gpusPerNode": 1, "launcher": "ray"})

    assert pod["runtimeClassName"] == "nvidia"
    assert spec["volumes"][0] in pod["volumes"]


def test_a_group_is_kept_off_nodes_beside_the_templates_affinity_and_let_go_of_again() -> None:
    term = {"matchExpressions": [{"key": "rack", "operator": "In", "values": ["1"]}]}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}
    racks = {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "rack"}]}
    before = pod_of(settings_of({"affinity": {"nodeAffinity": required, "podAffinity": racks}}))["affinity"]

    off = merged(before, kept_off(before, [], ["node-1"]))
    again = merged(off, kept_off(off, ["node-1"], []))

    (kept,) = off["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert kept["matchFields"] == [{"key": "metadata.name", "operator": "NotIn", "values": ["node-1"]}]
    assert off["podAffinity"] == racks
    assert again == before


OURS = pod_of(PLAIN)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        *(({name: "x"}, f"{name}: ") for name in OURS_IN_POD),
        *(({"securityContext": {name: 0}}, f"securityContext.{name}: the tr") for name in OURS["securityContext"]),
        *(({"volumes": [{"name": volume["name"]}]}, "a volume of the trainer's") for volume in OURS["volumes"]),
        ({"volumes": [{"name": "claim-3"}]}, "a volume of the trainer's"),
        *(
            (
                of_trainer(volumeMounts=[{"name": "v", "mountPath": f"{mount['mountPath']}/"}]),
                "a volume of its own there",
            )
            for mount in OURS["containers"][0]["volumeMounts"]
        ),
        *(
            (of_trainer(volumeMounts=[{"name": "v", "mountPath": path}]), "a volume of its own there")
            for path in ("/mnt/pvc/data", "//run/sft", "/run/./sft", "run/sft", "/run//sft")
        ),
        *(
            (of_trainer(**{name: "x"}), rf"containers\[trainer\]\.{name}: ")
            for name in OURS["containers"][0]
            if name not in ("name", "env", "resources", "securityContext", "volumeMounts")
        ),
        (of_trainer(image="mine"), "give image beside the template"),
        *(
            (of_trainer(securityContext={name: True}), rf"securityContext\.{name}: the trainer runs as user 1000")
            for name in ("privileged", "allowPrivilegeEscalation", "readOnlyRootFilesystem", "runAsUser")
        ),
        (of_trainer(securityContext={"capabilities": {"drop": []}}), r"capabilities\.drop: all are dropped"),
        (of_trainer(env=[{"name": "RANK", "value": "0"}]), r"env\[RANK\]: .*set by the supervisor"),
        (of_trainer(env=[{"name": "PYTHONPATH", "value": "0"}]), r"env\[PYTHONPATH\]: .*belongs to the image"),
        (of_trainer(env=[{"name": "A", "value": 1}]), r"env\[A\]\.value: it is 1 and must be a string"),
        (of_trainer(env=[{"name": "A"}, {"name": "A"}]), r"containers\[trainer\]\.env: A stands there more than once"),
        (of_trainer(env={"A": "1"}), r"containers\[trainer\]\.env: it must be a list of objects, each with name"),
        (of_trainer(resources={"limits": {"nvidia.com/gpu": 1}}), "asked for by compute.gpusPerNode"),
        (of_trainer(resources={"limits": {"memory": "64GB"}}), "resources.limits.memory"),
        (of_trainer(resources={"requests": {"cpu": 2}, "limits": {"cpu": 1}}), "must not exceed"),
        (of_trainer(resources=[]), r"containers\[trainer\]\.resources: it must be an object"),
        ({"initContainers": [{"name": "trainer"}]}, "the trainer has this name"),
        ({"containers": {"name": "trainer"}}, "containers: it must be a list of objects, each with name"),
        ({"containers": None}, "containers: it must be a list of objects, each with name"),
        ({"containers": [{"image": "x"}]}, "containers: it must be a list of objects, each with name"),
        ({"containers": [{"name": "a", "volumeMounts": ["/x"]}]}, r"containers\[a\]\.volumeMounts: it must be a list"),
        ({"tolerations": {"key": "a"}}, "tolerations: it must be a list"),
        ({"tolerations": [{"key": ["a"]}]}, "tolerations: each item must be an object with strings"),
        ({"nodeSelector": {"gpu": True}}, "nodeSelector: values must be strings"),
        ({"nodeSelector": ["gpu"]}, "nodeSelector: it must be an object"),
        ({"securityContext": None}, "securityContext: it must be an object"),
        ({"initContainers": [{"name": "a", "env": ["A"]}]}, r"initContainers\[a\]\.env: it must be a list"),
    ],
)
def test_what_is_ours_or_cannot_be_merged_is_refused_with_its_path_and_why(spec: Object, words: str) -> None:
    with pytest.raises(ValidationError, match=words) as caught:
        settings_of(spec)

    assert caught.value.errors()[0]["loc"] == ("template", "spec")


@pytest.mark.parametrize(
    "name", ["sftjob.dev/job", "app.kubernetes.io/managed-by", "job-name", "batch.kubernetes.io/controller-uid"]
)
def test_labels_by_which_pods_are_known_are_refused(name: str) -> None:
    with pytest.raises(ValidationError, match=f"{name}: .*known by it"):
        PodSettings.model_validate({"template": {"metadata": {"labels": {name: "x"}}}})


JUNK = (None, True, 7, "x", [], {}, [None], ["x"], [{}], [{"name": 1}], {"x": None}, {"name": []})


@pytest.mark.parametrize("seed", range(200))
def test_whatever_a_template_holds_is_refused_when_it_is_read_or_makes_pods(seed: int) -> None:
    chance = random.Random(seed)
    spec = copy.deepcopy(FULL)
    for _ in range(chance.randint(1, 3)):
        parent: Any = spec
        while True:
            key = chance.choice(list(parent) if isinstance(parent, dict) else range(len(parent)))
            if not (isinstance(parent[key], dict | list) and parent[key]) or chance.random() < 0.3:
                break
            parent = parent[key]
        parent[key] = chance.choice(JUNK)

    try:
        pods = settings_of(spec, profiles={"other": {"template": {"spec": FULL}}})
    except ValidationError:
        return
    for each in (pods, pods.with_profile("other")):
        assert json.loads(json.dumps(pod_of(each)))["containers"][0]["name"] == "trainer"


PROFILES: Object = {
    "image": "trainer:1",
    "gpuMemory": "40Gi",
    "env": {"A": "all", "B": "all"},
    "imagePullSecrets": ["all"],
    "resources": {"perGpu": {"requests": {"cpu": 2, "memory": "8Gi"}, "limits": {"memory": "16Gi"}}},
    "template": {"metadata": {"labels": {"a": "all"}}, "spec": {"runtimeClassName": "all", "hostIPC": True}},
    "profiles": {
        "h100": {
            "image": "trainer:h100",
            "gpuMemory": "80Gi",
            "env": {"B": "h100"},
            "imagePullSecrets": ["h100"],
            "resources": {"perGpu": {"requests": {"cpu": 10}, "limits": {"rdma/ib": 1}}},
            "template": {"metadata": {"labels": {"b": "h100"}}, "spec": {"runtimeClassName": "h100"}},
        },
        "plain": {},
        "h200": {"template": {"spec": {"nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-H200"}}}},
    },
}


def test_what_a_profile_says_goes_before_the_default_of_the_same_name() -> None:
    pods = PodSettings.model_validate(PROFILES)

    found = pods.with_profile("h100")

    assert (found.image, found.gpu_bytes, found.image_pull_secrets) == ("trainer:h100", 80 * 2**30, ["h100"])
    assert found.env == {"A": "all", "B": "h100"}
    assert found.resources.per_gpu.requests == {"cpu": 10, "memory": "8Gi"}
    assert found.resources.per_gpu.limits == {"memory": "16Gi", "rdma/ib": 1}
    assert found.resources.per_cpu_process == pods.resources.per_cpu_process
    assert found.template.metadata.labels == {"a": "all", "b": "h100"}
    assert found.template.spec == {"runtimeClassName": "h100", "hostIPC": True}
    assert found.command == pods.command


def test_a_profile_without_a_word_is_the_defaults() -> None:
    pods = PodSettings.model_validate(PROFILES)

    assert pods.with_profile("plain") == pods.model_copy(update={"profiles": {}})


def test_nodes_that_a_profile_asks_for_tell_the_memory_of_their_gpus() -> None:
    assert PodSettings.model_validate(PROFILES).with_profile("h200").gpu_bytes == 140 * 2**30
    assert PodProfile.model_validate(PROFILES["profiles"]["h200"]).gpu_memory is None


@pytest.mark.parametrize(
    ("profile", "words"),
    [
        ({"resources": {"perGpu": {"requests": {"memory": "64Gi"}}}}, r"h100\.resources\.perGpu: .*must not exceed"),
        ({"template": {"spec": {"restartPolicy": "Always"}}}, "restartPolicy: the Job replaces pods"),
        ({"command": ["python"]}, "Extra inputs are not permitted"),
        ({"namespaces": []}, "at least 1 item"),
    ],
)
def test_a_profile_that_does_not_go_with_the_defaults_is_refused(profile: Object, words: str) -> None:
    with pytest.raises(ValidationError, match=f"(?s)profiles.*{words}"):
        PodSettings.model_validate({**PROFILES, "profiles": {"h100": profile}})
