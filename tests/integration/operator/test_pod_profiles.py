"""Profiles of pods on a real control plane: what its API server takes, refuses, and makes of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from tests.integration.operator.scene import CHART, Object, Scene, StartOperator, helm
from tests.integration.operator.test_avoidance import fail_twice_on, kept_off, template
from tests.integration.operator.test_gangs import FOR_EVER, end_once_asked_to

PAGE = (CHART.parents[1] / "docs/platform.md").read_text(encoding="utf-8")


def rendered(folder: Path) -> Object:
    """The settings of pods that the chart makes of the profiles in docs/platform.md."""
    written = re.search(r"^## Profiles of pods.*?^```yaml\n(pods:\n.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert written
    values = folder / "values.yaml"
    values.write_text(written[1])
    done = helm("template", "x", str(CHART), "--set=crds.install=false", f"--values={values}")
    assert done.returncode == 0, done.stderr
    (config,) = (item for item in yaml.safe_load_all(done.stdout) if item and item["kind"] == "ConfigMap")
    pods: Object = yaml.safe_load(config["data"]["config.yaml"])["pods"]
    return pods


def on(profile: str | None, **compute: Any) -> Object:
    return {"nodes": 2, "gpusPerNode": 0, **({"podProfile": profile} if profile else {}), **compute}


def test_the_api_server_takes_the_documented_profiles(
    start_operator: StartOperator, own_scene: Scene, tmp_path: Path
) -> None:
    pods = rendered(tmp_path)
    names = sorted(pods["profiles"])
    pods["profiles"]["a3-mega"]["namespaces"] = [own_scene.namespace]
    start_operator(namespace=own_scene.namespace, pods=pods)

    for name in names:
        own_scene.submit(name, compute=on(name))
    made = {name: own_scene.until_pods(name, 2)[0] for name in names}

    for pod in made.values():
        assert pod["metadata"]["annotations"]["karpenter.sh/do-not-disrupt"] == "true"
        assert pod["spec"]["containers"][0]["name"] == "trainer"
    (trainer,) = made["h100-infiniband"]["spec"]["containers"]
    assert trainer["resources"]["requests"]["rdma/ib"] == "1"
    assert made["h100-infiniband"]["spec"]["tolerations"][0]["key"] == "nvidia.com/gpu"
    (claim,) = made["gb200-nvl72"]["spec"]["containers"][0]["resources"]["claims"]
    assert claim == {"name": made["gb200-nvl72"]["spec"]["resourceClaims"][0]["name"]}
    (daemon,) = made["a3-mega"]["spec"]["initContainers"]
    assert (daemon["name"], daemon["restartPolicy"]) == ("tcpxo-daemon", "Always")
    # A group is kept in one rack by what only its own pods have.
    job = own_scene.get("jobs", "one-rack")
    assert job is not None
    affinity = made["one-rack"]["spec"]["affinity"]["podAffinity"]
    (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]
    only = {"key": "batch.kubernetes.io/controller-uid", "operator": "In", "values": [job["metadata"]["uid"]]}
    assert only in term["labelSelector"]["matchExpressions"]


def test_what_the_api_server_refuses_is_told_of_the_jobs_with_that_profile_alone(
    start_operator: StartOperator, own_scene: Scene
) -> None:
    wrong: dict[str, tuple[Object, str]] = {
        "field": ({"runtimeClas": "nvidia"}, 'unknown field "spec.template.spec.runtimeClas"'),
        "type": ({"hostNetwork": "yes"}, "hostNetwork"),
        "path": ({"volumes": [{"name": "v", "hostPath": {"path": "relative/../.."}}]}, "must not contain '..'"),
    }
    profiles = {name: {"template": {"spec": spec}} for name, (spec, _) in wrong.items()}
    start_operator(namespace=own_scene.namespace, pods={"image": "trainer:1", "profiles": profiles})

    for name in wrong:
        own_scene.submit(name, compute=on(name))
    for name in wrong:
        own_scene.until(lambda name=name: own_scene.condition(name, "Stalled").get("reason") == "Refused")
    own_scene.submit("another", compute=on(None))
    own_scene.until_pods("another", 2)

    for name, (_, words) in wrong.items():
        message = own_scene.status(name)["message"]
        assert words in message
        assert f"its pods have the profile {name}" in message
        assert own_scene.get("jobs", name) is None


def test_a_changed_profile_counts_for_the_next_job_and_touches_none_that_is_there(
    start_operator: StartOperator, own_scene: Scene
) -> None:
    def with_scheduler(name: str) -> Object:
        return {"image": "trainer:1", "profiles": {"kind": {"template": {"spec": {"schedulerName": name}}}}}

    first = start_operator(namespace=own_scene.namespace, pods=with_scheduler("first"))
    own_scene.submit("before", compute=on("kind"))
    before = own_scene.start("before")
    first.stop()

    start_operator(namespace=own_scene.namespace, pods=with_scheduler("second"))
    own_scene.submit("after", compute=on("kind"))
    own_scene.until_pods("after", 2)

    assert template(own_scene, "after")["schedulerName"] == "second"
    assert template(own_scene, "before")["schedulerName"] == "first"
    assert {pod["metadata"]["uid"] for pod in own_scene.pods("before")} == {pod["metadata"]["uid"] for pod in before}


def test_a_group_whose_template_has_an_affinity_begins_anew_off_a_node(
    start_operator: StartOperator, own_scene: Scene
) -> None:
    term = {"matchExpressions": [{"key": "kubernetes.io/os", "operator": "NotIn", "values": ["windows"]}]}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}
    racks = {"topologyKey": "rack", "labelSelector": {"matchLabels": {"app.kubernetes.io/name": "sft-trainer"}}}
    nearby = {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1, "podAffinityTerm": racks}]}
    pods = {"image": "trainer:1", "template": {"spec": {"affinity": {"nodeAffinity": required, "podAffinity": nearby}}}}
    start_operator(namespace=own_scene.namespace, pods=pods)
    bad = own_scene.namespace
    own_scene.submit("unlucky", runPolicy=FOR_EVER)
    made = own_scene.start("unlucky")

    fail_twice_on(own_scene, "unlucky", bad)
    for pod in made:
        end_once_asked_to(own_scene, pod)

    own_scene.until(lambda: kept_off(own_scene, "unlucky") == [bad])
    found = template(own_scene, "unlucky")["affinity"]
    (kept,) = found["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert kept["matchExpressions"] == term["matchExpressions"]
    assert found["podAffinity"] == nearby
