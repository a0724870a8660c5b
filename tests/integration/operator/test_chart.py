"""The Helm chart: what it refuses, what it renders, that the API server takes it, and that its rights suffice."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from sft_operator.config import LeaderElectionSettings, PodSettings, Settings, load_settings
from tests.certificates import self_signed
from tests.cluster.access import Cluster
from tests.integration.kubernetes_api import KubernetesApi
from tests.integration.operator.scene import (
    CHART,
    OPERATOR_NAMESPACE,
    PATIENCE_SECONDS,
    Object,
    StartOperator,
    Supervisors,
    helm,
    new_scene,
    render_chart,
)

DIGEST = f"sha256:{'0123456789abcdef' * 4}"
OUTER_NAME = f"{OPERATOR_NAMESPACE}-sft-operator"


def settings_of(objects: list[Object], folder: Path) -> Any:
    (config,) = [item for item in objects if item["kind"] == "ConfigMap"]
    path = folder / "config.yaml"
    path.write_text(config["data"]["config.yaml"])
    return load_settings(path)


def rules_of(objects: list[Object], kind: str, name: str) -> list[Object]:
    (role,) = [item for item in objects if item["kind"] == kind and item["metadata"]["name"] == name]
    rules: list[Object] = role["rules"]
    return rules


@pytest.mark.parametrize("extra", [(), ("--set=watchNamespace=team",), ("--set=metrics.serviceMonitor.enabled=true",)])
def test_helm_has_nothing_against_it(extra: tuple[str, ...]) -> None:
    done = helm("lint", "--strict", str(CHART), *extra)

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("watched", ["", "2026"])
def test_names_that_yaml_takes_for_numbers_stay_names(watched: str, tmp_path: Path) -> None:
    """Platforms call namespaces by the numbers of their tenants."""
    names = ("watchNamespace", "serviceAccount.name", "priorityClassName", "store.operatorCredentialsSecret")
    strings = [f"--set-string={name}={watched or 10421}" for name in names if watched or name != "watchNamespace"]
    monitored = [f"--set=metrics.{each}.enabled=true" for each in ("serviceMonitor", "prometheusRule")]
    store = ("--set=store.uri=s3://platform/sft", "--set=store.verify=true")
    done = helm(
        "template", "7", str(CHART), "--namespace=4711", "--set=crds.install=false", *store, *strings, *monitored
    )
    assert done.returncode == 0, done.stderr

    objects = [item for item in yaml.safe_load_all(done.stdout) if item]

    for item in objects:
        metadata = item["metadata"]
        told = [metadata["name"], metadata.get("namespace", ""), *metadata["labels"].values()]
        told += [
            item.get("roleRef", {}).get("name", ""),
            *(part for each in item.get("subjects", ()) for part in each.values()),
        ]
        assert all(isinstance(name, str) for name in told), metadata
    (deployment,) = [item for item in objects if item["kind"] == "Deployment"]
    spec = deployment["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert spec["serviceAccountName"] == spec["priorityClassName"] == container["envFrom"][0]["secretRef"]["name"]
    assert isinstance(spec["serviceAccountName"], str)
    assert spec["volumes"][0]["configMap"]["name"] == "7"
    assert deployment["spec"]["selector"]["matchLabels"]["app.kubernetes.io/instance"] == "7"
    settings = settings_of(objects, tmp_path)
    assert (settings.network_policy.operator_namespace, settings.leader_election.name) == ("4711", "7")


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("bogus=1", "bogus"),
        ("replicas=0", "/replicas"),
        ("image.digest=0123abcd", "/image/digest"),
        ("store.uri=http://x", "/store/uri"),
        ("pods.imagePullPolicy=Sometimes", "/pods/imagePullPolicy"),
        ("pods.megatronImage.tag=1", "/pods/megatronImage"),
        ("logLevel=LOUD", "/logLevel"),
        ("caBundle=ca.crt", "/caBundle"),
        ("pods.resources.perGpu.requests.memory=8GB", "/pods/resources/perGpu/requests/memory"),
        ("pods.gpuMemory=80GB", "/pods/gpuMemory"),
        ("pods.env.OFFLINE=1", "/pods/env/OFFLINE"),
        ("env.HTTPS_PROXY=1", "/env/HTTPS_PROXY"),
        ("pods.resources.perGpu.requests.gpus=1", "'gpus'"),
        ("store.s3.credentialsSecretRef=My_Secret", "/store/s3/credentialsSecretRef"),
        ("settings.store.verify=true", "store.uri is empty"),
        ("pods.resources.perNode.requests.cpu=8", "/pods/resources"),
        ("pods.template.spec.restartPolicy=Always", "/pods/template/spec/restartPolicy"),
        ("pods.template.metadata.name=mine", "/pods/template/metadata"),
        ("pods.template.containers={}", "/pods/template"),
        ("pods.profiles.H100.image=mine", "'H100'"),
        ("pods.profiles.h100.command={python}", "/pods/profiles/h100"),
        ("pods.profiles.h100.namespaces={}", "/pods/profiles/h100/namespaces"),
        ("pods.profiles.h100.template.spec.subdomain=mine", "/pods/profiles/h100/template/spec/subdomain"),
        ("settings.httpPort=9090", "/settings/httpPort"),
        ("settings.namespace=team", "/settings/namespace"),
        ("settings.pollSecond=20", "pollSecond"),
        ("settings.pollSeconds=0", "/settings/pollSeconds"),
        ("settings.pollSeconds=soon", "/settings/pollSeconds"),
        ("settings.pollsPerSecond=-1", "/settings/pollsPerSecond"),
        ("settings.concurrency=1001", "/settings/concurrency"),
        ("settings.pollConcurrency=1.5", "/settings/pollConcurrency"),
        ("settings.leaderElection.leaseSeconds=0", "/settings/leaderElection/leaseSeconds"),
        ("settings.leaderElection.leaseSecond=9", "leaseSecond"),
        ("settings.leaderElection.name=mine", "/settings/leaderElection/name"),
        ("settings.leaderElection.namespace=team", "/settings/leaderElection/namespace"),
        ("settings.logLevel=LOUD", "/settings/logLevel"),
        ("settings.networkPolicy.enabled=perhaps", "/settings/networkPolicy/enabled"),
        ("settings.networkPolicy.operatorNamespace=team", "/settings/networkPolicy/operatorNamespace"),
        ("settings.networkPolicy.operatorLabels.app=mine", "/settings/networkPolicy/operatorLabels"),
        ("settings.pods.command=python", "/settings/pods/command"),
        ("settings.pods.gpuMemory=80GB", "/settings/pods/gpuMemory"),
        ("settings.pods.resources.perGpu.limits.memory=8GB", "/settings/pods/resources/perGpu/limits/memory"),
        ("settings.store.uri=http://x", "/settings/store/uri"),
        ("settings.store.s3.endpoint=minio:9000", "/settings/store/s3/endpoint"),
        ("settings.progressUrl=null", "/settings/progressUrl"),
    ],
)
def test_wrong_values_are_refused_by_name(setting: str, words: str) -> None:
    done = helm("template", "x", str(CHART), f"--set={setting}")

    assert done.returncode != 0
    assert words in done.stderr


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["store.verify=true"], 'store.verify is "true" and store.uri is empty'),
        (["store.remove=true"], 'store.remove is "true" and store.uri is empty'),
        (["store.s3.endpoint=http://minio:9000"], 'store.s3.endpoint is "http://minio:9000" and store.uri is empty'),
        (["store.s3.forcePathStyle=true"], 'store.s3.forcePathStyle is "true" and store.uri is empty'),
        (["store.s3.checksum=whenSupported"], 'store.s3.checksum is "whenSupported" and store.uri is empty'),
        (["store.operatorCredentialsSecret=keys"], 'store.operatorCredentialsSecret is "keys" and store.uri is empty'),
        (["store.s3.credentialsSecretRef=keys"], "set store.uri to s3://bucket/prefix, or leave"),
        (["store.uri=s3://b/p", "store.remove=true"], "set store.verify to true as well, or store.remove to false"),
        (["store.uri=s3://b/p", "settings.store.remove=true"], "store.remove is true and store.verify is false"),
    ],
)
def test_what_is_said_of_a_store_and_would_do_nothing_is_refused(settings: list[str], words: str) -> None:
    done = helm("template", "x", str(CHART), *(f"--set={setting}" for setting in settings))

    assert done.returncode != 0
    assert words in done.stderr


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["leaderElection.renewSeconds=10"], "renewSeconds is 10 and leaseSeconds is 15: set renewSeconds to half of"),
        (["leaderElection.leaseSeconds=6"], "renewSeconds is 4 and leaseSeconds is 6: set renewSeconds to half of"),
        (["leaderElection.leaseSeconds=6", "leaderElection.renewSeconds=2.5"], ""),
        (["leaderElection.enabled=false"], "enabled is false and replicas is 2: all of them would work at once"),
    ],
)
def test_a_lease_by_which_no_operator_would_start_or_two_would_work_is_refused(settings: list[str], words: str) -> None:
    values = [f"--set-json=settings.{setting}" for setting in settings]
    done = helm("template", "x", str(CHART), "--set=crds.install=false", *values)

    assert (done.returncode != 0) is bool(words), done.stderr
    assert words in done.stderr
    alone = helm("template", "x", str(CHART), "--set=settings.leaderElection.enabled=false", "--set=replicas=1")
    assert alone.returncode == 0, alone.stderr


def test_without_a_lease_an_upgrade_ends_the_old_operator_before_the_new_one_begins() -> None:
    (alone,) = [
        item
        for item in render_chart("settings.leaderElection.enabled=false", "replicas=1")
        if item["kind"] == "Deployment"
    ]
    (usual,) = [item for item in render_chart() if item["kind"] == "Deployment"]

    assert alone["spec"]["strategy"] == {"rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}
    assert "strategy" not in usual["spec"]


def limits(schema: Any, whole: Any) -> Any:
    """What ``schema`` lets through, however it is written: nothing said of defaults, descriptions and absence."""
    while "$ref" in schema:
        _, part, name = schema["$ref"].split("/")
        schema = whole[part][name]
    alternatives = [option for option in schema.get("anyOf", []) if option != {"type": "null"}]
    nullable = "null" in schema.get("type", ()) or {"type": "null"} in schema.get("anyOf", [])
    if len(alternatives) == 1:
        found = limits(alternatives[0], whole)
        return {**found, "null": nullable} if "type" in found else found
    if "object" in schema.get("type", ()):
        fields = {name: field and limits(field, whole) for name, field in schema.get("properties", {}).items()}
        return fields or {"*": limits(schema["additionalProperties"], whole)}
    if schema.get("type") == "array":
        return [limits(schema["items"], whole)]
    types = [option["type"] for option in alternatives] or schema["type"]
    if isinstance(types, list):
        types = sorted({*types} - {"null"})
        types = types if len(types) > 1 else types[0]
    kept = ("minimum", "maximum", "exclusiveMinimum", "minLength", "maxLength", "pattern", "enum")
    found = {"type": types, "null": nullable, **{key: schema[key] for key in kept if key in schema}}
    if "enum" in found:
        found["enum"] = [value for value in found["enum"] if value is not None]
    for rule in schema.get("x-kubernetes-validations", []):
        if form := re.search(r"self\.matches\('(.*)'\)$", rule["rule"]):
            found["pattern"] = form.group(1)
    return found


def test_every_setting_of_the_operator_has_its_type_and_limits_in_the_chart() -> None:
    chart = json.loads((CHART / "values.schema.json").read_text())
    settings = chart["properties"]["settings"]
    model = Settings.model_json_schema(by_alias=True)
    fixed = {".httpPort", ".namespace", ".leaderElection.name", ".leaderElection.namespace"}
    fixed |= {".networkPolicy.operatorLabels", ".networkPolicy.operatorNamespace"}

    found, wanted = flat(limits(settings, chart)), flat(limits(model, model))
    refused = {name for name, leaf in wanted.items() if leaf is False}
    assert refused
    assert {name for name, leaf in found.items() if leaf is False} == fixed | refused
    found, wanted = (
        {name: leaf for name, leaf in leaves.items() if name.removesuffix(".*") not in fixed}
        for leaves in (found, wanted)
    )
    # Null also takes a default of the chart away, which the operator then does not see.
    taken, known = (
        {name for name, leaf in leaves.items() if isinstance(leaf, dict) and leaf.pop("null")}
        for leaves in (found, wanted)
    )
    assert taken >= known
    assert found == wanted


def flat(fields: Any, path: str = "") -> dict[str, Any]:
    """Leaves by their path, so that a difference is told by name."""
    if isinstance(fields, dict) and "type" not in fields:
        return {where: leaf for name, field in fields.items() for where, leaf in flat(field, f"{path}.{name}").items()}
    return {path: fields}


def test_every_setting_may_be_given(tmp_path: Path) -> None:
    store = {"uri": "s3://bucket/sft", "s3": {"endpoint": "http://minio:9000", "region": "here"}, "verify": True}
    pods: Object = {"image": "mine:2", "megatronImage": "mine:3", "imagePullPolicy": "Never", "gpuMemory": "80Gi"}
    pods["env"] = {"HTTPS_PROXY": "http://proxy:3128"}
    pods["template"] = {"metadata": {"labels": {"team": "platform"}}, "spec": {"runtimeClassName": "nvidia"}}
    profile = {**pods, "resources": {"perGpu": {"limits": {"rdma/ib": 1}}}, "namespaces": ["team"]}
    pods["profiles"] = {"h100": profile}
    settings = Settings.model_validate({"store": store, "pods": pods, "leaderElection": {"enabled": True}})
    lease, operator = {"namespace", "name"}, {"operator_labels", "operator_namespace"}
    fixed: Any = {"http_port": True, "namespace": True, "network_policy": operator, "leader_election": lease}
    values = tmp_path / "values.yaml"
    given = settings.model_dump(mode="json", by_alias=True, exclude=fixed, exclude_none=True)
    values.write_text(yaml.safe_dump({"settings": given}))

    done = helm("template", "x", str(CHART), "--set=crds.install=false", f"--values={values}")

    assert done.returncode == 0, done.stderr
    objects = [item for item in yaml.safe_load_all(done.stdout) if item]
    assert settings_of(objects, tmp_path).model_dump(exclude=fixed) == settings.model_dump(exclude=fixed)


def test_a_proxy_is_told_to_the_operator_and_to_its_pods(tmp_path: Path) -> None:
    proxy = {"HTTPS_PROXY": "http://proxy:3128", "NO_PROXY": ".svc,169.254.169.254"}
    values = tmp_path / "values.yaml"
    values.write_text(yaml.safe_dump({"pods": {"env": proxy}, "env": proxy}))

    done = helm("template", "x", str(CHART), "--set=crds.install=false", f"--values={values}")

    objects = [item for item in yaml.safe_load_all(done.stdout) if item]
    (deployment,) = [item for item in objects if item["kind"] == "Deployment"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert {each["name"]: each["value"] for each in container["env"]} == proxy
    assert settings_of(objects, tmp_path).pods.env == proxy


def test_what_is_set_to_null_is_as_if_it_had_not_been_said(tmp_path: Path) -> None:
    values = ("networkPolicy.metricsNamespaces", "networkPolicy.enabled", "logLevel", "store.verify", "store.remove")
    nulls = [f"{value}=null" for value in (*values, "settings.pods.resources.perGpu.requests.memory")]

    settings = settings_of(render_chart("store.uri=s3://bucket/sft", *nulls), tmp_path)

    assert settings.network_policy.enabled is True
    assert settings.network_policy.metrics_namespaces == []
    assert settings.log_level == "INFO"
    assert settings.store.verify is False
    assert settings.pods.resources.per_gpu.requests == {"cpu": 2}


def test_the_lease_of_the_settings_is_the_one_to_which_there_is_a_right(tmp_path: Path) -> None:
    objects = render_chart()
    election = settings_of(objects, tmp_path).leader_election
    (role,) = [item for item in objects if item["kind"] == "Role"]

    assert role["metadata"]["namespace"] == election.namespace
    assert [rule["resourceNames"] for rule in role["rules"] if "update" in rule["verbs"]] == [[election.name]]


def test_the_settings_it_writes_are_the_operators_own(tmp_path: Path) -> None:
    settings = settings_of(render_chart(), tmp_path)

    assert settings.namespace is None
    assert settings.store is None
    assert settings.pods.image == "sft-operator/trainer:0.1.0"
    assert settings.pods.megatron_image is None
    own = {"enabled": True, "namespace": OPERATOR_NAMESPACE}
    assert settings.leader_election == LeaderElectionSettings().model_copy(update=own)
    assert settings.network_policy.operator_namespace == OPERATOR_NAMESPACE


def test_values_reach_the_settings(tmp_path: Path) -> None:
    settings = settings_of(
        render_chart(
            "watchNamespace=team",
            "store.uri=s3://bucket/sft",
            "store.s3.endpoint=http://minio:9000",
            "store.s3.forcePathStyle=true",
            "store.s3.credentialsSecretRef=sft-store",
            "store.verify=true",
            "store.remove=true",
            "pods.image=mine:2",
            "pods.megatronImage=mine-megatron:2",
            "pods.imagePullSecrets={a,b}",
            "pods.gpuMemory=80Gi",
            "networkPolicy.metricsNamespaces={monitoring}",
            "settings.pollSeconds=33",
        ),
        tmp_path,
    )

    assert settings.namespace == "team"
    assert settings.store.uri == "s3://bucket/sft"
    assert settings.store.s3.endpoint == "http://minio:9000"
    assert settings.store.s3.force_path_style is True
    assert settings.store.s3.credentials_secret_ref == "sft-store"
    assert settings.store.verify is True
    assert settings.store.remove is True
    assert settings.pods.image == "mine:2"
    assert settings.pods.megatron_image == "mine-megatron:2"
    assert settings.pods.image_pull_secrets == ["a", "b"]
    assert settings.pods.gpu_bytes == 80 * 2**30
    assert settings.network_policy.metrics_namespaces == ["monitoring"]
    assert settings.poll_seconds == 33


def test_authorities_reach_the_settings_as_their_file_has_them(tmp_path: Path) -> None:
    certificate, _ = self_signed(tmp_path)
    rendered = helm("template", "x", str(CHART), "--set=crds.install=false", f"--set-file=caBundle={certificate}")

    objects = [item for item in yaml.safe_load_all(rendered.stdout) if item]

    assert settings_of(objects, tmp_path).ca_bundle == certificate.read_text()


@pytest.mark.parametrize("value", ["caBundle", "settings.caBundle"])
def test_a_private_key_beside_the_authorities_is_refused_before_anything_holds_it(tmp_path: Path, value: str) -> None:
    """The operator refuses it as well, but only once its ConfigMap has it."""
    certificate, key = self_signed(tmp_path)
    both = tmp_path / "both.pem"
    both.write_text(certificate.read_text() + key.read_text())

    done = helm("template", "x", str(CHART), f"--set-file={value}={both}")

    assert done.returncode != 0
    assert "caBundle holds a private key" in done.stderr


def test_what_pods_ask_for_is_the_same_in_the_chart_and_without_it(tmp_path: Path) -> None:
    assert settings_of(render_chart(), tmp_path).pods.resources == PodSettings().resources


def test_what_pods_ask_for_can_be_set_and_left_out(tmp_path: Path) -> None:
    values = (
        "pods.resources.perGpu.requests.memory=32Gi",
        "pods.resources.perGpu.limits.memory=64Gi",
        "pods.resources.perCpuProcess.requests=null",
    )

    resources = settings_of(render_chart(*values), tmp_path).pods.resources

    assert resources.per_gpu.requests == {"cpu": 2, "memory": "32Gi"}
    assert resources.per_gpu.limits == {"memory": "64Gi"}
    assert resources.per_cpu_process.requests == {}


@pytest.mark.parametrize(
    ("settings", "image"),
    [
        ([], "sft-operator/operator:0.1.0"),
        (["image.repository=registry.example/you/sft", "image.tag=v2"], "registry.example/you/sft:v2"),
        (["image.repository=registry.example/you/sft", f"image.digest={DIGEST}"], f"registry.example/you/sft@{DIGEST}"),
        (["image.tag=v2", f"image.digest={DIGEST}"], f"sft-operator/operator:v2@{DIGEST}"),
    ],
)
def test_the_operators_image_is_named_by_tag_or_digest(settings: list[str], image: str) -> None:
    (deployment,) = [item for item in render_chart(*settings) if item["kind"] == "Deployment"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]

    assert container["image"] == image


def test_the_trainers_image_may_be_named_by_digest(tmp_path: Path) -> None:
    name = f"registry.example/you/sft-trainer@{DIGEST}"

    assert settings_of(render_chart(f"pods.image={name}"), tmp_path).pods.image == name


def test_the_operators_own_credentials_come_from_a_secret() -> None:
    (deployment,) = [
        item
        for item in render_chart("store.uri=s3://bucket/sft", "store.operatorCredentialsSecret=mine")
        if item["kind"] == "Deployment"
    ]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]

    assert container["envFrom"] == [{"secretRef": {"name": "mine"}}]


def test_rights_are_few_and_named() -> None:
    rules = rules_of(render_chart(), "ClusterRole", OUTER_NAME)

    granted = {
        (group, resource, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert not [right for right in granted if "*" in right]
    assert not [right for right in granted if right[1] in ("secrets", "roles", "clusterroles", "pods/exec")]
    writes = {(resource, verb) for _, resource, verb in granted if verb not in ("get", "list", "watch")}
    assert writes == {
        ("sftjobs", "delete"),
        ("sftjobs", "patch"),
        ("sftjobs/status", "patch"),
        ("jobs", "create"),
        ("jobs", "patch"),
        ("jobs", "delete"),
        ("jobs/status", "patch"),
        ("configmaps", "create"),
        ("configmaps", "delete"),
        ("services", "create"),
        ("services", "delete"),
        ("networkpolicies", "create"),
        ("networkpolicies", "delete"),
        ("podgroups", "create"),
        ("podgroups", "delete"),
        ("podgroups", "patch"),
        ("events", "create"),
        ("pods", "delete"),
        ("pods/eviction", "create"),
        ("pods/status", "patch"),
        ("workloads", "patch"),
    }


def test_one_namespace_needs_no_right_beyond_it() -> None:
    objects = render_chart("watchNamespace=team")

    assert [item for item in objects if item["kind"].startswith("Cluster")] == []
    assert rules_of(objects, "Role", OUTER_NAME) == rules_of(render_chart(), "ClusterRole", OUTER_NAME)


@pytest.mark.parametrize("setting", ["replicas=2", "watchNamespace=team"])
def test_two_releases_of_one_name_do_not_meet_outside_of_their_namespaces(setting: str) -> None:
    def outside(namespace: str) -> set[tuple[str, str]]:
        done = helm(
            "template", "one", str(CHART), f"--namespace={namespace}", "--set=crds.install=false", f"--set={setting}"
        )
        assert done.returncode == 0, done.stderr
        objects = [item for item in yaml.safe_load_all(done.stdout) if item]
        return {
            (item["kind"], item["metadata"]["name"])
            for item in objects
            if item["metadata"].get("namespace") != namespace
        }

    first, second = outside("first"), outside("second")

    assert first
    assert not first & second


@pytest.mark.parametrize("enabled", [True, False])
def test_a_chart_that_has_it_among_its_dependencies_may_switch_it_on_and_off(tmp_path: Path, enabled: bool) -> None:
    """Helm gives the condition to the dependency as one of its values."""
    name = CHART.name
    dependency = {"name": name, "version": "0.1.0", "condition": f"{name}.enabled"}
    chart = {"apiVersion": "v2", "name": "platform", "version": "1.0.0", "dependencies": [dependency]}
    (tmp_path / "Chart.yaml").write_text(yaml.safe_dump(chart))
    (tmp_path / "values.yaml").write_text(yaml.safe_dump({name: {"enabled": enabled, "crds": {"install": False}}}))
    (tmp_path / "charts").mkdir()
    (tmp_path / "charts" / name).symlink_to(CHART)

    done = helm("template", "platform", str(tmp_path))
    alone = helm("template", "x", str(CHART), f"--set=enabled={str(enabled).lower()}")

    assert done.returncode == 0, done.stderr
    assert ("kind: Deployment" in done.stdout) is enabled
    assert alone.returncode != 0
    assert "enabled is for a chart of yours" in alone.stderr


def test_the_crd_is_part_of_it_unless_asked_not_to_and_outlives_it() -> None:
    with_crd = helm("template", "x", str(CHART)).stdout
    without = helm("template", "x", str(CHART), "--set=crds.install=false").stdout

    assert "kind: CustomResourceDefinition" in with_crd
    assert "helm.sh/resource-policy: keep" in with_crd
    assert "kind: CustomResourceDefinition" not in without


def test_it_installs_and_its_pods_meet_the_restricted_standard(server: Cluster) -> None:
    namespace = "chart-restricted"
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    server.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace, "labels": labels}})
    access = (f"--kubeconfig={server.kubeconfig}", f"--namespace={namespace}")
    try:
        done = helm(
            "install", "second.one", str(CHART), *access, "--set=crds.install=false", "--set=store.uri=s3://b/p"
        )
        assert done.returncode == 0, done.stderr
        server.kubectl(
            "wait",
            f"--namespace={namespace}",
            "--for=jsonpath={.status.unavailableReplicas}=2",
            "deployment/second-one",
            f"--timeout={PATIENCE_SECONDS:.0f}s",
        )
        pods: Any = server.get("pods", f"--namespace={namespace}")
        assert len(pods["items"]) == 2
    finally:
        helm("uninstall", "second.one", *access)
        server.kubectl("delete", "namespace", namespace, "--wait=false")


def test_a_crd_that_another_release_has_left_is_taken_over_where_that_is_said(server: Cluster) -> None:
    """The words that docs/platform.md names; nor is it brought by what is reused of a release that has left it."""
    namespace = "chart-taken-over"
    server.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
    access = (f"--kubeconfig={server.kubeconfig}", f"--namespace={namespace}")
    try:
        refused = helm("install", "second", str(CHART), *access)
        taken = helm("install", "second", str(CHART), *access, "--take-ownership", "--force-conflicts")
        left = helm("upgrade", "second", str(CHART), *access, "--set=crds.install=false")
        crd = server.get("crd", "sftjobs.sftjob.dev")
        reused = helm("upgrade", "second", str(CHART), *access, "--reuse-values")
        without = helm("get", "manifest", "second", *access)
        back = helm("upgrade", "second", str(CHART), *access, "--set=crds.install=true")
    finally:
        helm("uninstall", "second", *access)
        server.kubectl("delete", "namespace", namespace, "--wait=false")

    assert "invalid ownership metadata" in refused.stderr
    assert [done.returncode for done in (taken, left, reused, without, back)] == [0] * 5
    assert "CustomResourceDefinition" not in without.stdout
    assert crd["metadata"]["annotations"]["meta.helm.sh/release-name"] == "second"
    assert "deletionTimestamp" not in server.get("crd", "sftjobs.sftjob.dev")["metadata"]


def test_an_operator_of_one_namespace_serves_only_that(
    server: Cluster, api: KubernetesApi, supervisors: Supervisors, start_operator: StartOperator, tmp_path: Path
) -> None:
    """With the rights of the chart in namespaced mode, and nothing more."""
    with new_scene(api, supervisors) as scene, new_scene(api, supervisors) as elsewhere:
        objects = render_chart(f"watchNamespace={scene.namespace}", "serviceAccount.name=narrow")
        server.apply(
            *(
                item
                for item in objects
                if item["kind"] in ("ServiceAccount", "Role", "RoleBinding")
                and not item["metadata"]["name"].endswith("-leadership")
            )
        )
        token = server.kubectl("create", "token", "narrow", f"--namespace={OPERATOR_NAMESPACE}").stdout.strip()
        config = json.loads(server.kubectl("config", "view", "--raw", "--minify", "--flatten", "-o", "json").stdout)
        config["users"][0]["user"] = {"token": token}
        kubeconfig = tmp_path / "kubeconfig"
        kubeconfig.write_text(json.dumps(config))

        operator = start_operator(kubeconfig=kubeconfig, namespace=scene.namespace)
        scene.submit("near", compute={"nodes": 1, "gpusPerNode": 0})
        elsewhere.submit("far", compute={"nodes": 1, "gpusPerNode": 0})

        scene.until_pods("near", 1)
        scene.until_state("near", "Queued")
        assert "forbidden" not in operator.log.read_text()
        assert 'namespace="' + elsewhere.namespace not in operator.get("/metrics")
        operator.stop()
