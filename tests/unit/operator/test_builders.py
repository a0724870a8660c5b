"""The children of an SFTJob, field by field."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from sft_api.trainer_config import TrainerConfig
from sft_api.v1alpha1.compute import ComputeSpec
from sft_api.v1alpha1.job import ObjectMeta
from sft_api.v1alpha1.quantities import times
from sft_operator.builders import (
    begun_map,
    build_config_map,
    build_job,
    build_network_policy,
    build_service,
    trainer_config,
)
from sft_operator.builders.config_map import default_checkpoint_uri
from sft_operator.config import NetworkPolicySettings, PodSettings, Settings, StoreSettings
from sft_operator.decisions.changes import desired_children
from tests.unit.operator.make import make_job

SETTINGS = Settings(pods=PodSettings(image="trainer:1"))
STORE = StoreSettings.model_validate(
    {
        "uri": "s3://platform/sft/",
        "s3": {"endpoint": "http://minio:9000", "forcePathStyle": True, "credentialsSecretRef": "sft-store"},
    }
)


def pod_spec(settings: Settings = SETTINGS, **spec: Any) -> dict[str, Any]:
    found: dict[str, Any] = build_job(make_job(**spec), settings)["spec"]["template"]["spec"]
    return found


def container(settings: Settings = SETTINGS, **spec: Any) -> dict[str, Any]:
    found: dict[str, Any] = pod_spec(settings, **spec)["containers"][0]
    return found


def environment(settings: Settings = SETTINGS, **spec: Any) -> dict[str, Any]:
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in container(settings, **spec)["env"]}


def compute(**fields: Any) -> dict[str, Any]:
    return {"nodes": 2, "gpusPerNode": 8, **fields}


def test_the_job_keeps_one_pod_a_node_and_leaves_counting_to_us() -> None:
    spec = build_job(make_job(), SETTINGS)["spec"]

    assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (2, 2, "Indexed")
    assert (spec["backoffLimitPerIndex"], spec["maxFailedIndexes"]) == (2**31 - 1, 0)
    assert spec["podReplacementPolicy"] == "Failed"
    fail, ignore = spec["podFailurePolicy"]["rules"]
    assert fail["action"] == "FailJob"
    assert fail["onExitCodes"] == {"containerName": "trainer", "operator": "In", "values": list(range(10, 30))}
    assert ignore == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]}
    assert spec["suspend"] is False
    assert "activeDeadlineSeconds" not in spec
    assert "backoffLimit" not in spec


@pytest.mark.parametrize("queue", ["", "gpus"])
def test_a_job_in_a_queue_starts_suspended_with_all_that_kueue_reads(queue: str) -> None:
    others = {"kueue.x-k8s.io/priority-class": "high", "kueue.x-k8s.io/max-exec-time-seconds": "60", "team": "nlp"}
    labels = {**others, **({"kueue.x-k8s.io/queue-name": queue} if queue else {})}

    manifest = build_job(make_job(labels=labels), SETTINGS)

    assert manifest["spec"]["suspend"] is bool(queue)
    passed = {name: value for name, value in manifest["metadata"]["labels"].items() if "kueue" in name}
    assert passed == {name: value for name, value in labels.items() if "kueue" in name}
    assert "team" not in manifest["metadata"]["labels"]


def test_children_belong_to_the_sftjob() -> None:
    job = make_job()
    for child in (
        build_job(job, SETTINGS),
        build_config_map(job, None),
        build_service(job.metadata),
        build_network_policy(job.metadata, NetworkPolicySettings()),
    ):
        (owner,) = child["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["uid"], owner["controller"]) == ("SFTJob", "sft-uid", True)
        assert child["metadata"]["namespace"] == "team"
        assert child["metadata"]["labels"]["sftjob.dev/job"] == "tulu"
        assert child["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "sft-operator"


def test_pods_meet_the_restricted_standard_and_get_no_token() -> None:
    spec = pod_spec()
    (trainer,) = spec["containers"]

    assert spec["automountServiceAccountToken"] is False
    assert spec["enableServiceLinks"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] == 1000
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert trainer["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }
    assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
    assert all("hostPath" not in volume for volume in spec["volumes"])


def test_everything_written_to_is_a_volume() -> None:
    spec = pod_spec(compute=compute(cacheSize="7Gi", sharedMemorySize="2Gi"))
    mounts = {mount["mountPath"]: mount["name"] for mount in spec["containers"][0]["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in spec["volumes"]}

    assert volumes[mounts["/var/cache/sft"]]["emptyDir"] == {"sizeLimit": "7Gi"}
    assert volumes[mounts["/dev/shm"]]["emptyDir"] == {"medium": "Memory", "sizeLimit": str(2 * 2**30)}
    assert volumes[mounts["/tmp"]]["emptyDir"] == {}
    assert volumes[mounts["/run/sft"]]["emptyDir"] == {}
    config, begun = (source["configMap"] for source in volumes[mounts["/etc/sft"]]["projected"]["sources"])
    assert (config["name"], config["optional"]) == ("tulu-config", False)
    assert config["items"] == [{"key": "config.json", "path": "config.json"}]
    # Pods of a run that has made no step start without it.
    assert (begun["name"], begun["optional"]) == ("tulu-begun", True)
    assert begun["items"] == [{"key": "begun", "path": "begun"}]


def test_new_pods_are_told_that_the_run_has_begun_by_a_child_of_the_sftjob() -> None:
    told = begun_map(ObjectMeta(name="tulu", namespace="team", uid="sft-uid"))

    assert (told["metadata"]["name"], told["immutable"], told["data"]) == ("tulu-begun", True, {"begun": "sft-uid"})
    assert told["metadata"]["ownerReferences"][0]["uid"] == "sft-uid"


def test_pods_find_one_another() -> None:
    spec = pod_spec()
    variables = environment()

    assert spec["subdomain"] == "tulu"
    assert variables["SFT_COORDINATOR"] == "tulu-0.tulu"
    assert variables["SFT_NODES"] == "2"
    # By these a group knows its own, and the operator who answers.
    assert variables["SFT_POD_UID"] == {"fieldRef": {"fieldPath": "metadata.uid"}}
    assert variables["SFT_NODE_NAME"] == {"fieldRef": {"fieldPath": "spec.nodeName"}}
    assert variables["SFT_GROUP_UID"] == {
        "fieldRef": {"fieldPath": "metadata.labels['batch.kubernetes.io/controller-uid']"}
    }
    service = build_service(make_job().metadata)["spec"]
    assert service["clusterIP"] == "None"
    assert service["publishNotReadyAddresses"] is True
    assert (
        service["selector"].items() <= build_job(make_job(), SETTINGS)["spec"]["template"]["metadata"]["labels"].items()
    )


def test_the_supervisor_is_probed_and_its_last_words_are_read() -> None:
    trainer = container()

    assert trainer["command"] == ["python", "-m", "sft_trainer.launch"]
    assert trainer["readinessProbe"]["httpGet"] == {"path": "/healthz", "port": "progress"}
    assert trainer["ports"] == [{"name": "progress", "containerPort": 8471, "protocol": "TCP"}]
    assert trainer["terminationMessagePolicy"] == "FallbackToLogsOnError"
    for kind, patience in (("startupProbe", 600), ("livenessProbe", 120)):
        probe = trainer[kind]
        assert probe["httpGet"] == {"path": "/healthz", "port": "progress"}
        assert probe["periodSeconds"] * probe["failureThreshold"] == patience


def test_gpus_and_extended_resources_are_asked_for_as_limits_and_requests() -> None:
    resources = container(
        compute=compute(
            resources={"requests": {"cpu": "8", "memory": "64Gi", "rdma/hca": 1}, "limits": {"memory": "128Gi"}}
        )
    )["resources"]

    assert resources["limits"] == {"memory": "128Gi", "nvidia.com/gpu": 8, "rdma/hca": 1}
    assert resources["requests"] == {"cpu": "8", "memory": "64Gi", "nvidia.com/gpu": 8, "rdma/hca": 1}


def test_fast_networks_are_asked_for_as_the_platform_page_says() -> None:
    page = (Path(__file__).parents[3] / "docs/platform.md").read_text(encoding="utf-8")
    written = re.search(r"^## Fast networks.*?^```yaml\n(compute:\n.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert written
    infiniband = yaml.safe_load(written[1])["compute"]
    efa = {"vpc.amazonaws.com/efa": 32, "hugepages-2Mi": "5120Mi"}
    networks = {"k8s.v1.cni.cncf.io/networks": ", ".join(f"fabric/net-{card}" for card in range(8))}

    for given, asked in ((infiniband, {"rdma/ib": 1}), ({"gpusPerNode": 8, "resources": {"limits": efa}}, efa)):
        resources = container(compute=given)["resources"]
        assert resources["limits"] == resources["limits"] | asked
        assert resources["requests"] == resources["requests"] | asked
    assert environment(compute=infiniband)["NCCL_IB_HCA"] == "ibp"
    template = build_job(make_job(compute={"gpusPerNode": 8, "annotations": networks}), SETTINGS)["spec"]["template"]
    assert template["metadata"]["annotations"] == networks


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"gpusPerNode": 8}, {"requests": {"cpu": "16", "memory": "64Gi"}}),
        ({"gpusPerNode": 0}, {"requests": {"cpu": "1", "memory": "2Gi"}}),
        ({"gpusPerNode": 0, "processesPerNode": 3}, {"requests": {"cpu": "3", "memory": "6Gi"}}),
        (
            {"gpusPerNode": 0, "resources": {"requests": {"memory": "5Gi"}}},
            {"requests": {"cpu": "1", "memory": "5Gi"}},
        ),
        # Kubernetes itself asks for as much as the limit.
        (
            {"gpusPerNode": 0, "resources": {"limits": {"cpu": "500m", "memory": "1Gi"}}},
            {"limits": {"cpu": "500m", "memory": "1Gi"}},
        ),
    ],
)
def test_what_a_job_does_not_name_is_asked_for_by_gpus_or_processes(
    given: dict[str, Any], expected: dict[str, Any]
) -> None:
    resources = container(compute=given)["resources"]

    gpus = {"nvidia.com/gpu": given["gpusPerNode"]} if given["gpusPerNode"] else {}
    assert resources.get("requests", {}) == {**expected.get("requests", {}), **gpus}
    assert resources.get("limits", {}) == {**expected.get("limits", {}), **gpus}


def test_a_pod_with_ray_has_room_for_it_and_knows_its_address() -> None:
    ray = {"nodes": 2, "gpusPerNode": 0, "launcher": "ray"}

    assert container(compute=ray)["resources"]["requests"] == {"cpu": "1", "memory": "3072Mi"}
    named = {**ray, "resources": {"requests": {"memory": "5Gi"}}}
    assert container(compute=named)["resources"]["requests"] == {"cpu": "1", "memory": "5Gi"}
    assert environment(compute=ray)["SFT_POD_IP"] == {"fieldRef": {"fieldPath": "status.podIP"}}
    assert "SFT_POD_IP" not in environment(compute={**ray, "launcher": "supervisor"})


def test_the_administrator_sets_what_is_asked_for() -> None:
    resources = {
        "perGpu": {"requests": {"cpu": "1500m"}, "limits": {"memory": "128Gi", "rdma/hca": 1}},
        "perCpuProcess": {},
    }
    settings = Settings(pods=PodSettings.model_validate({"image": "trainer:1", "resources": resources}))

    assert container(settings, compute=compute(gpusPerNode=3))["resources"] == {
        "requests": {"cpu": "4500m", "nvidia.com/gpu": 3, "rdma/hca": "3"},
        "limits": {"memory": "384Gi", "nvidia.com/gpu": 3, "rdma/hca": "3"},
    }
    assert container(settings, compute={"gpusPerNode": 0})["resources"] == {}
    volumes = {volume["name"]: volume for volume in pod_spec(settings, compute=compute(gpusPerNode=1))["volumes"]}
    assert volumes["shared-memory"]["emptyDir"]["sizeLimit"] == str(2**30)


@pytest.mark.parametrize(
    ("quantity", "count", "product"),
    [
        ("8Gi", 8, "64Gi"),
        (2, 4, "8"),
        ("500m", 3, "1500m"),
        ("0.5", 3, "1500m"),
        ("1.5Gi", 2, "3Gi"),
        ("1.5Gi", 1, "1610612736"),
    ],
)
def test_quantities_are_multiplied_in_their_own_unit(quantity: int | str, count: int, product: str) -> None:
    assert times(quantity, count) == product


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, 8 * 2**30),
        ({"sharedMemorySize": "3Gi"}, 3 * 2**30),
        ({"resources": {"limits": {"memory": "8Gi"}}}, 4 * 2**30),
        ({"sharedMemorySize": "64Gi", "resources": {"limits": {"memory": "10Gi"}}}, 5 * 2**30),
    ],
)
def test_shared_memory_is_one_gibibyte_a_process_and_at_most_half(fields: dict[str, Any], expected: int) -> None:
    volumes = {volume["name"]: volume for volume in pod_spec(compute=compute(**fields))["volumes"]}

    assert volumes["shared-memory"]["emptyDir"]["sizeLimit"] == str(expected)


def test_who_asks_for_more_shared_memory_is_told_what_it_is_cut_to() -> None:
    assert "At most half of the memory limit" in str(ComputeSpec.model_fields["shared_memory_size"].description)


def test_secrets_are_referred_to_and_never_copied() -> None:
    variables = environment(
        model={"uri": "hf://org/model", "tokenSecretRef": {"name": "hub"}},
        checkpoint={"uri": "s3://bucket/runs", "s3": {"credentialsSecretRef": "keys"}},
    )

    assert variables["HF_TOKEN"] == {"secretKeyRef": {"name": "hub", "key": "token"}}
    assert variables["AWS_ACCESS_KEY_ID"] == {"secretKeyRef": {"name": "keys", "key": "AWS_ACCESS_KEY_ID"}}
    assert variables["AWS_SECRET_ACCESS_KEY"]["secretKeyRef"]["name"] == "keys"
    assert variables["AWS_SESSION_TOKEN"]["secretKeyRef"]["optional"] is True


def test_without_credentials_none_are_asked_for() -> None:
    assert not {"HF_TOKEN", "AWS_ACCESS_KEY_ID", "AWS_SESSION_TOKEN"} & environment().keys()


def test_the_platforms_environment_wins_over_ours_and_the_users_over_both() -> None:
    given = {"HTTPS_PROXY": "http://proxy:3128", "HF_ENDPOINT": "http://mirror", "HF_HOME": "/mnt/hub", "HF_TOKEN": "x"}
    settings = Settings(pods=PodSettings(image="trainer:1", env=given))
    token = {"uri": "hf://org/model", "tokenSecretRef": {"name": "hub", "key": "token"}}

    found = environment(settings, model=token, compute=compute(env=[{"name": "HF_ENDPOINT", "value": "http://mine"}]))

    assert (found["HTTPS_PROXY"], found["HF_HOME"]) == ("http://proxy:3128", "/mnt/hub")
    assert found["HF_ENDPOINT"] == "http://mine"
    assert found["HF_TOKEN"]["secretKeyRef"]["name"] == "hub"


@pytest.mark.parametrize(
    ("name", "why"), [("MASTER_ADDR", "set by the supervisor"), ("PATH", "belongs to the image"), ("A-B", "must be")]
)
def test_the_platform_gives_no_variable_that_a_job_could_not(name: str, why: str) -> None:
    with pytest.raises(ValidationError, match=f"{name}: .*{why}"):
        PodSettings(env={name: "x"})


def test_the_users_environment_wins_over_ours() -> None:
    variables = environment(
        compute=compute(
            env=[
                {"name": "HF_HOME", "value": "/elsewhere"},
                {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
            ]
        )
    )

    assert variables["HF_HOME"] == "/elsewhere"
    assert variables["KEY"] == {"secretKeyRef": {"name": "s", "key": "k"}}
    assert [entry["name"] for entry in container()["env"]].count("HF_HOME") == 1


def test_claims_of_all_uris_are_mounted_once_each() -> None:
    spec = pod_spec(
        model={"uri": "pvc://models.v1/qwen"},
        data={
            "train": [{"uri": "pvc://data/a"}, {"uri": "pvc://data/b"}],
            "eval": [{"uri": "pvc://eval/x", "name": "e"}],
        },
        checkpoint={"uri": "pvc://models-v1/runs", "resume": {"from": {"uri": "pvc://other/run"}}},
    )
    begun = pod_spec(lora={"adapterUri": "pvc://adapters/of/q"})
    assert [
        each["persistentVolumeClaim"]["claimName"] for each in begun["volumes"] if "persistentVolumeClaim" in each
    ] == ["adapters"]
    claims = {
        volume["name"]: volume["persistentVolumeClaim"]["claimName"]
        for volume in spec["volumes"]
        if "persistentVolumeClaim" in volume
    }
    mounts = {
        claims[mount["name"]]: mount["mountPath"]
        for mount in spec["containers"][0]["volumeMounts"]
        if mount["name"] in claims
    }

    assert mounts == {name: f"/mnt/pvc/{name}" for name in ("models.v1", "models-v1", "data", "eval", "other")}


def test_scheduling_fields_pass_through_and_absent_ones_are_left_out() -> None:
    spec = pod_spec(
        compute=compute(
            nodeSelector={"gpu": "h100"},
            tolerations=[{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
            priorityClassName="high",
            runtimeClassName="nvidia",
            serviceAccountName="trainer",
            imagePullSecrets=["mine"],
        ),
        runPolicy={"terminationGracePeriodSeconds": 77},
    )

    assert spec["nodeSelector"] == {"gpu": "h100"}
    assert spec["tolerations"][0] == {"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}
    assert spec["priorityClassName"] == "high"
    assert spec["runtimeClassName"] == "nvidia"
    assert spec["serviceAccountName"] == "trainer"
    assert spec["imagePullSecrets"] == [{"name": "mine"}]
    assert spec["terminationGracePeriodSeconds"] == 77
    assert not {"nodeSelector", "priorityClassName", "serviceAccountName"} & pod_spec().keys()


def test_nothing_keeps_two_pods_of_a_job_off_one_node_and_the_field_says_so() -> None:
    assert not {"affinity", "topologySpreadConstraints"} & pod_spec(compute=compute()).keys()
    assert "several may run" in str(ComputeSpec.model_fields["nodes"].description)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], {"node.kubernetes.io/not-ready": 60, "node.kubernetes.io/unreachable": 60}),
        (
            [
                {
                    "key": "node.kubernetes.io/unreachable",
                    "operator": "Exists",
                    "effect": "NoExecute",
                    "tolerationSeconds": 900,
                }
            ],
            {"node.kubernetes.io/unreachable": 900, "node.kubernetes.io/not-ready": 60},
        ),
        ([{"operator": "Exists"}], {None: None}),
        ([{"key": "", "operator": "Exists"}], {"": None}),
        ([{"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 5}], {None: 5}),
        (
            [{"operator": "Exists", "effect": "NoSchedule"}],
            {None: None, "node.kubernetes.io/not-ready": 60, "node.kubernetes.io/unreachable": 60},
        ),
    ],
)
def test_lost_nodes_are_not_waited_for_unless_asked(
    given: list[dict[str, Any]], expected: dict[str | None, int | None]
) -> None:
    found = pod_spec(compute=compute(tolerations=given))["tolerations"]

    assert {item.get("key"): item.get("tolerationSeconds") for item in found} == expected


def test_the_spec_wins_over_the_settings() -> None:
    settings = Settings(pods=PodSettings(image="default:1", image_pull_policy="Always", image_pull_secrets=["shared"]))

    assert container(settings)["image"] == "default:1"
    assert container(settings)["imagePullPolicy"] == "Always"
    own = container(settings, compute=compute(image="own:2", imagePullPolicy="Never"))
    assert (own["image"], own["imagePullPolicy"]) == ("own:2", "Never")
    assert pod_spec(settings, compute=compute(imagePullSecrets=["mine"]))["imagePullSecrets"] == [
        {"name": "mine"},
        {"name": "shared"},
    ]


def test_our_labels_cannot_be_taken_over() -> None:
    job = make_job(compute=compute(labels={"sftjob.dev/job": "other", "team": "a"}, annotations={"a/b": "c"}))
    metadata = build_job(job, SETTINGS)["spec"]["template"]["metadata"]

    assert metadata["labels"]["sftjob.dev/job"] == "tulu"
    assert metadata["labels"]["team"] == "a"
    assert metadata["annotations"] == {"a/b": "c"}


def test_no_image_at_all_is_an_error_that_says_what_to_change() -> None:
    with pytest.raises(ValueError, match=r"spec\.compute\.image is missing"):
        build_job(make_job(), Settings())


MEGATRON = {"strategy": {"megatron": {"tensorParallelDegree": 8}}}


def test_jobs_that_need_megatron_get_the_image_that_has_it() -> None:
    settings = Settings(pods=PodSettings(image="trainer:1", megatron_image="megatron:1"))

    assert container(settings, **MEGATRON)["image"] == "megatron:1"
    assert container(settings, **MEGATRON, compute=compute(image="own:2"))["image"] == "own:2"
    assert container(settings)["image"] == "trainer:1"
    assert container(settings, strategy={"fsdp": {}})["image"] == "trainer:1"


def test_an_image_without_megatron_is_never_the_default_of_jobs_that_need_it() -> None:
    with pytest.raises(ValueError, match=r"spec\.strategy\.megatron needs an image.*set pods\.megatronImage"):
        build_job(make_job(**MEGATRON), SETTINGS)


def test_a_job_with_megatron_has_pods_and_processes_as_any_other() -> None:
    settings = Settings(pods=PodSettings(image="trainer:1", megatron_image="megatron:1"))
    given = build_job(make_job(**MEGATRON), settings)
    given["spec"]["template"]["spec"]["containers"][0]["image"] = "trainer:1"

    assert given == build_job(make_job(), settings)
    config = TrainerConfig.model_validate_json(build_config_map(make_job(**MEGATRON), None)["data"]["config.json"])
    assert config.spec.strategy is not None
    assert config.spec.strategy.megatron is not None
    plan = config.plan
    assert (plan.processes, plan.data_parallel, plan.tensor_parallel, plan.pipeline_parallel) == (16, 2, 8, 1)


def test_the_configuration_is_complete_and_holds_no_defaults_to_fill_in() -> None:
    config_map = build_config_map(make_job(), None)
    config = TrainerConfig.model_validate_json(config_map["data"]["config.json"])

    assert config.job.uid == "sft-uid"
    assert config.checkpoint_uri == "s3://bucket/runs"
    assert config.export_uri == "s3://bucket/runs/export"
    assert config.plan.processes == 16
    assert json.loads(config_map["data"]["config.json"])["spec"]["data"]["maxLength"] == 4096


def test_the_configuration_holds_the_platforms_authorities() -> None:
    settings = SETTINGS.model_copy(update={"ca_bundle": "-----BEGIN CERTIFICATE-----"})
    config_map = next(child for child in desired_children(make_job(), settings) if child["kind"] == "ConfigMap")

    assert json.loads(config_map["data"]["config.json"])["caBundle"] == settings.ca_bundle


def test_the_platforms_store_is_used_when_the_spec_names_none() -> None:
    config_map = build_config_map(make_job(checkpoint={}), STORE)
    config = TrainerConfig.model_validate_json(config_map["data"]["config.json"])

    assert config.checkpoint_uri == f"s3://platform/sft/team/tulu-{config.numbers().digest[:16]}"
    # Of another object with the same name and settings too; of other settings not
    again = make_job(checkpoint={})
    again = again.model_copy(update={"metadata": again.metadata.model_copy(update={"uid": "another"})})
    assert default_checkpoint_uri(again, STORE) == config.checkpoint_uri
    assert default_checkpoint_uri(make_job(checkpoint={}, training={"seed": 9}), STORE) != config.checkpoint_uri
    assert config.spec.checkpoint.s3.endpoint == "http://minio:9000"
    variables = environment(SETTINGS.model_copy(update={"store": STORE}), checkpoint={})
    assert variables["AWS_ACCESS_KEY_ID"]["secretKeyRef"]["name"] == "sft-store"


def test_the_export_is_not_written_over_the_model_in_the_platforms_store_either() -> None:
    model = {"uri": "s3://platform/sft/team"}

    with pytest.raises(
        ValueError, match=r"export\.uri .* must be neither model\.uri, .*; checkpoints go to s3://platform/"
    ):
        build_config_map(make_job(checkpoint={}, model=model), STORE)


def test_settings_of_the_spec_win_over_the_platforms_store() -> None:
    job = make_job(checkpoint={"uri": "s3://own/x", "s3": {"region": "eu-1"}})
    config = TrainerConfig.model_validate_json(build_config_map(job, STORE)["data"]["config.json"])

    assert config.checkpoint_uri == "s3://own/x"
    assert config.spec.checkpoint.s3.endpoint is None
    assert config.spec.checkpoint.s3.region == "eu-1"


@pytest.mark.parametrize(
    ("uri", "sentence"),
    [
        (
            "s3://platform/sft/another/run",
            r"resume\.from\.uri .* lies in the platform's store, outside of this namespace",
        ),
        ("file:///runs/a", r"resume\.from\.uri file:///runs/a is a folder in the pod"),
    ],
)
def test_a_run_begins_from_no_place_that_it_could_not_name_for_itself(uri: str, sentence: str) -> None:
    store = StoreSettings(uri="s3://platform/sft")
    job = make_job(checkpoint={"resume": {"from": {"uri": uri}}})
    with pytest.raises(ValueError, match=sentence):
        trainer_config(job, store)
    own = make_job(checkpoint={"resume": {"from": {"uri": f"s3://platform/sft/{job.metadata.namespace}/run"}}})
    assert trainer_config(own, store).spec.checkpoint.resume.origin


def test_no_place_for_checkpoints_is_an_error_that_says_what_to_change() -> None:
    with pytest.raises(ValueError, match=r"spec\.checkpoint\.uri is missing"):
        build_config_map(make_job(checkpoint={}), None)


def test_only_the_group_the_operator_and_prometheus_reach_the_pods() -> None:
    settings = NetworkPolicySettings(operator_namespace="sys", metrics_namespaces=["monitoring"])
    spec = build_network_policy(make_job().metadata, settings)["spec"]
    group, others = spec["ingress"]

    assert spec["policyTypes"] == ["Ingress"]
    assert spec["podSelector"]["matchLabels"] == {"sftjob.dev/job": "tulu"}
    assert group == {"from": [{"podSelector": {"matchLabels": {"sftjob.dev/job": "tulu"}}}]}
    assert others["ports"] == [{"protocol": "TCP", "port": 8471}]
    names = [peer["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"] for peer in others["from"]]
    assert names == ["sys", "monitoring"]
    assert others["from"][0]["podSelector"]["matchLabels"] == {"app.kubernetes.io/name": "sft-operator"}


def test_what_is_no_quantity_is_not_multiplied() -> None:
    with pytest.raises(ValueError, match="'1Zi' is no quantity"):
        times("1Zi", 2)


def test_the_budget_of_restarts_is_not_frozen_in_the_supervisors_configuration() -> None:
    """It may be raised while the run lasts, and the operator alone keeps to it; older images would count for themselves
    up to what they read, or to 10 when they read nothing."""
    manifest = build_config_map(make_job(runPolicy={"maxRestarts": 20, "progressDeadlineSeconds": 77}), None)
    policy = json.loads(manifest["data"]["config.json"])["spec"]["runPolicy"]

    assert policy["maxRestarts"] == 1000
    assert policy["progressDeadlineSeconds"] == 77
