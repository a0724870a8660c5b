"""Groups that the scheduler places whole, where it can; it binds the pods itself here, and the test only runs them."""

from __future__ import annotations

from typing import Any

from sft_api.progress import Progress
from tests.cluster.control_plane import HAS_POD_GROUPS
from tests.integration.operator.scene import Object, Scene, training
from tests.integration.operator.test_gangs import FOR_EVER, allow, finds_no_room, released


def open_node(scene: Scene, processors: int) -> None:
    """Let the scheduler place pods on the node of the scene."""
    path = f"/api/v1/nodes/{scene.namespace}"
    room = {"cpu": str(processors), "memory": "64Gi", "pods": "20"}
    patches: list[tuple[str, Object]] = [
        ("", {"metadata": {"labels": {"room": scene.namespace}}, "spec": {"unschedulable": False}}),
        ("/status", {"status": {"capacity": room, "allocatable": room}}),
    ]
    for subresource, patch in patches:
        answer = scene.request("PATCH", f"{path}{subresource}", patch, "application/merge-patch+json")
        assert answer.accepted, answer.body


def add_node(scene: Scene, processors: int) -> None:
    """Another node, for pods that are bound and never run."""
    name = f"{scene.namespace}-second"
    room = {"cpu": str(processors), "memory": "64Gi", "pods": "20"}
    metadata = {"name": name, "labels": {"room": scene.namespace}}
    node = {"apiVersion": "v1", "kind": "Node", "metadata": metadata, "status": {"capacity": room, "allocatable": room}}
    assert scene.request("POST", "/api/v1/nodes", node).accepted


def make_class(scene: Scene, name: str, value: int) -> None:
    manifest = {
        "apiVersion": "scheduling.k8s.io/v1",
        "kind": "PriorityClass",
        "metadata": {"name": name},
        "value": value,
    }
    assert scene.request("POST", "/apis/scheduling.k8s.io/v1/priorityclasses", manifest).accepted


def submit(scene: Scene, name: str, *, nodes: int = 2, **spec: Any) -> None:
    """A job of pods of one processor each, for the node of the scene, whose kubelet nobody has heard of."""
    compute = {
        "nodes": nodes,
        "gpusPerNode": 0,
        "resources": {"requests": {"cpu": "1", "memory": "1Gi"}},
        "nodeSelector": {"room": scene.namespace},
        "tolerations": [{"operator": "Exists"}],
        **spec.pop("compute", {}),
    }
    scene.submit(name, **{"compute": compute, "runPolicy": FOR_EVER, **spec})
    scene.supervisors.report(scene.namespace, name, Progress(training=training(3)))


def placed(scene: Scene, name: str) -> list[Object]:
    return [pod for pod in scene.pods(name) if pod["spec"].get("nodeName")]


def run(scene: Scene, name: str, count: int = 2) -> list[Object]:
    """Run the pods of a job once the scheduler has placed them."""
    pods: list[Object] = scene.until(lambda: found if len(found := placed(scene, name)) == count else None)
    for pod in pods:
        scene.run_pod(pod)
    scene.until_state(name, "Running")
    return pods


def group_of(scene: Scene, name: str) -> Object | None:
    """The PodGroup that the Job of ``name`` asks for."""
    job = scene.get("jobs", name)
    named = job and job["spec"]["template"]["spec"].get("schedulingGroup")
    return scene.get("podgroups", named["podGroupName"]) if named else None


def test_a_group_that_does_not_fit_takes_no_place_where_the_scheduler_knows_groups(scene: Scene) -> None:
    open_node(scene, 3)
    submit(scene, "first")
    run(scene, "first")
    submit(scene, "second")
    pods = scene.until_pods("second", 2)

    if HAS_POD_GROUPS:
        scene.until(lambda: all(map(finds_no_room, scene.pods("second"))))
        assert not placed(scene, "second")
    else:
        scene.until(lambda: len(placed(scene, "second")) == 1 and any(map(finds_no_room, scene.pods("second"))))
        assert all("schedulingGroup" not in pod["spec"] for pod in pods)
    scene.until(lambda: "nsufficient cpu" in scene.status("second").get("message", ""))

    scene.delete("sftjobs", "first")
    for pod in scene.pods("first"):
        scene.until(
            lambda pod=pod: (
                (scene.get("pods", pod["metadata"]["name"]) or {}).get("metadata", {}).get("deletionTimestamp")
            )
        )
        scene.end_pod(pod, 30)
    run(scene, "second")


def test_a_job_of_one_pod_has_no_group(scene: Scene) -> None:
    open_node(scene, 1)
    submit(scene, "alone", nodes=1)
    (pod,) = run(scene, "alone", 1)
    assert "schedulingGroup" not in pod["spec"]


def lose(scene: Scene, pod: Object, *, code: int = 143) -> None:
    """Play a kubelet that ends a pod which somebody deletes."""
    name = pod["metadata"]["name"]
    if not (scene.get("pods", name) or {}).get("metadata", {}).get("deletionTimestamp"):
        scene.delete("pods", name)
    scene.end_pod(pod, code)


if HAS_POD_GROUPS:

    def test_one_lost_pod_comes_back_beside_the_others(scene: Scene) -> None:
        open_node(scene, 2)
        submit(scene, "trains")
        first, second = run(scene, "trains")

        lose(scene, second)
        scene.until(lambda: len(placed(scene, "trains")) == 2)

        again = run(scene, "trains")
        assert first["metadata"]["uid"] in {pod["metadata"]["uid"] for pod in again}

    def test_a_group_that_is_gone_while_its_job_is_suspended_is_there_when_it_goes_on(scene: Scene) -> None:
        open_node(scene, 2)
        submit(scene, "rests")
        pods = run(scene, "rests")
        scene.patch("sftjobs", "rests", {"spec": {"suspend": True}})
        for pod in pods:
            name = pod["metadata"]["name"]
            scene.until(lambda name=name: (scene.get("pods", name) or {}).get("metadata", {}).get("deletionTimestamp"))
            scene.end_pod(pod, 30)
        scene.until_state("rests", "Suspended")
        group = group_of(scene, "rests")
        assert group
        scene.delete("podgroups", group["metadata"]["name"])
        scene.until(lambda: group_of(scene, "rests") is None)

        scene.patch("sftjobs", "rests", {"spec": {"suspend": False}})

        run(scene, "rests")
        found = group_of(scene, "rests")
        assert found
        assert found["metadata"]["uid"] != group["metadata"]["uid"]

    def test_a_group_is_preempted_as_a_whole_and_comes_back_as_one(scene: Scene) -> None:
        urgent = f"urgent-{scene.namespace}"
        make_class(scene, urgent, 1000)
        open_node(scene, 2)
        submit(scene, "patient")
        pods = run(scene, "patient")

        submit(scene, "urgent", nodes=1, compute={"priorityClassName": urgent})

        for pod in pods:
            name = pod["metadata"]["name"]
            scene.until(lambda name=name: (scene.get("pods", name) or {}).get("metadata", {}).get("deletionTimestamp"))
            scene.end_pod(pod, 30)
        run(scene, "urgent", 1)
        scene.until(lambda: all(map(finds_no_room, scene.until_pods("patient", 2))))
        assert not placed(scene, "patient")
        status = scene.status("patient")
        assert status["restarts"].get("failures", 0) == 0
        scene.delete("sftjobs", "urgent")
        for pod in scene.pods("urgent"):
            lose(scene, pod)
        run(scene, "patient")

    def test_a_class_that_is_made_anew_with_another_value_stops_no_run(scene: Scene) -> None:
        """The pod that comes back has the new one, and the scheduler wants one priority in a group."""
        name = f"class-{scene.namespace}"
        make_class(scene, name, 10)
        open_node(scene, 2)
        submit(scene, "ranked", compute={"priorityClassName": name}, runPolicy={"startDeadlineSeconds": 1})
        first, second = run(scene, "ranked")
        assert scene.request("DELETE", f"/apis/scheduling.k8s.io/v1/priorityclasses/{name}").accepted
        make_class(scene, name, 20)

        lose(scene, second)

        scene.until(lambda: released(scene, "ranked"))
        scene.until(
            lambda: (scene.get("pods", first["metadata"]["name"]) or {}).get("metadata", {}).get("deletionTimestamp")
        )
        scene.end_pod(first, 30)
        again = run(scene, "ranked")
        assert [pod["spec"]["priority"] for pod in again] == [20, 20]
        group = group_of(scene, "ranked")
        assert group
        assert group["spec"]["priority"] == 20

    def test_a_claim_that_is_bound_where_its_first_pod_goes_stops_no_group(scene: Scene) -> None:
        """Within one round the scheduler sees it bound to one node, and no place for a pod on another."""
        name, spec = scene.namespace, {"accessModes": ["ReadWriteMany"], "storageClassName": scene.namespace}
        storage = {"provisioner": "none.example.com", "volumeBindingMode": "WaitForFirstConsumer"}
        whole = {"apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": {"name": name}, **storage}
        assert scene.request("POST", "/apis/storage.k8s.io/v1/storageclasses", whole).accepted
        claim = {"metadata": {"name": "runs"}, "spec": {**spec, "resources": {"requests": {"storage": "1Gi"}}}}
        scene.create("persistentvolumeclaims", claim)
        open_node(scene, 1)
        add_node(scene, 1)

        submit(scene, "saves", checkpoint={"uri": "pvc://runs/here"})

        def chosen() -> Object | None:
            found = scene.get("persistentvolumeclaims", "runs")
            asked = found and found["metadata"].get("annotations", {}).get("volume.kubernetes.io/selected-node")
            return found if asked else None

        metadata = scene.until(chosen)["metadata"]
        volume = {
            "capacity": {"storage": "1Gi"},
            "csi": {"driver": "none.example.com", "volumeHandle": name},
            "claimRef": {"namespace": scene.namespace, "name": "runs", "uid": metadata["uid"]},
        }
        whole = {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": {**spec, **volume}}
        assert scene.request("POST", "/api/v1/persistentvolumes", whole).accepted

        pods: list[Object] = scene.until(lambda: found if len(found := placed(scene, "saves")) == 2 else None)
        assert len({pod["spec"]["nodeName"] for pod in pods}) == 2
        scene.delete("sftjobs", "saves")
        for path in (f"/api/v1/nodes/{name}-second", f"/api/v1/persistentvolumes/{name}"):
            scene.request("DELETE", path)

    def test_two_groups_that_each_hold_quota_which_the_other_waits_for_come_apart(scene: Scene) -> None:
        """Neither has a place: pods that the scheduler places together wait for those that are not made."""

        def of(processors: int) -> Object:
            return {"resources": {"requests": {"cpu": str(processors), "memory": "1Gi"}}}

        open_node(scene, 8)
        allow(scene, 3)
        submit(scene, "older", compute=of(2))
        scene.until_pods("older", 1)
        submit(scene, "younger", compute=of(1), runPolicy={"startDeadlineSeconds": 1})

        scene.until_pods("younger", 1)
        scene.until(lambda: released(scene, "younger"))
        scene.until(lambda: "only 1 of 2 pods had quota" in scene.status("younger")["message"])
        scene.patch(
            "sftjobs", "younger", {"spec": {"suspend": True}}
        )  # it would try again, and take its part once more
        allow(scene, 4)
        run(scene, "older")

    def test_gpus_of_a_dra_driver_are_asked_for_by_the_name_that_its_class_has(scene: Scene) -> None:
        """What docs/platform.md says; the devices are made up, and the scheduler allocates them."""
        driver, api = f"{scene.namespace}.example.com", "resource.k8s.io/v1"
        device_class = {
            "kind": "DeviceClass",
            "spec": {
                "extendedResourceName": "nvidia.com/gpu",
                "selectors": [{"cel": {"expression": f'device.driver == "{driver}"'}}],
            },
        }
        devices = {
            "kind": "ResourceSlice",
            "spec": {
                "driver": driver,
                "nodeName": scene.namespace,
                "pool": {"name": scene.namespace, "generation": 1, "resourceSliceCount": 1},
                "devices": [{"name": f"gpu-{number}"} for number in range(2)],
            },
        }
        open_node(scene, 8)
        for resource, manifest in (("deviceclasses", device_class), ("resourceslices", devices)):
            whole = {"apiVersion": api, "metadata": {"name": scene.namespace}, **manifest}
            answer = scene.request("POST", f"/apis/{api}/{resource}", whole)
            assert answer.accepted, answer.body

        submit(scene, "gpus", compute={"gpusPerNode": 1})

        pods = run(scene, "gpus")
        claims = [pod["status"]["extendedResourceClaimStatus"]["resourceClaimName"] for pod in pods]
        assert len(set(claims)) == 2
        scene.request("DELETE", f"/apis/{api}/deviceclasses/{scene.namespace}")
