"""Two groups, each with a place that the other waits for. The scheduler is real; the test places and plays pods."""

from __future__ import annotations

from sft_api.progress import Progress
from tests.integration.operator.scene import Object, Scene, training
from tests.integration.operator.test_problems import quota

FOR_EVER = {"startDeadlineSeconds": 86_400}


def finds_no_room(pod: Object) -> bool:
    conditions = {item["type"]: item for item in pod["status"].get("conditions", [])}
    return bool(conditions.get("PodScheduled", {}).get("reason") == "Unschedulable")


def released(scene: Scene, name: str) -> str:
    job = scene.get("jobs", name)
    assert job is not None
    return str(job["metadata"]["annotations"].get("sftjob.dev/released", ""))


def end_once_asked_to(scene: Scene, pod: Object) -> None:
    """Play a pod that saves and leaves when its Job is suspended."""
    name = pod["metadata"]["name"]
    scene.until(lambda: ((scene.get("pods", name) or {}).get("metadata") or {}).get("deletionTimestamp"))
    scene.end_pod(pod, 30)


def wait_for_ever(scene: Scene, name: str) -> None:
    """From now on: the test places one pod after the other, however long that takes."""
    changed = scene.patch("sftjobs", name, {"spec": {"runPolicy": FOR_EVER}})
    generation = changed["metadata"]["generation"]
    scene.until(lambda: scene.status(name).get("observedGeneration") == generation)


def test_a_group_that_is_placed_in_part_gives_its_places_back_and_tries_again(scene: Scene) -> None:
    scene.submit("older", runPolicy=FOR_EVER)
    scene.submit("younger", runPolicy={"startDeadlineSeconds": 1})
    older, younger = scene.until_pods("older", 2), scene.until_pods("younger", 2)
    scene.run_pod(older[0])

    scene.until(lambda: all(map(finds_no_room, (scene.pods("older")[1], *scene.pods("younger")))))
    scene.until(lambda: "Unschedulable" in scene.condition("older", "Running").get("reason", ""))
    scene.run_pod(younger[0])

    scene.until(lambda: scene.condition("younger", "Running").get("reason") == "HalfPlaced")
    end_once_asked_to(scene, younger[0])
    scene.until(lambda: not scene.pods("younger"))
    status = scene.until_state("younger", "Queued")
    assert "only 1 of 2 pods had found room within 1 s" in status["message"]
    assert not released(scene, "older")

    # The older one takes what was given back; the younger one comes again, and finds room at last.
    scene.run_pod(scene.pods("older")[1])
    scene.supervisors.report(scene.namespace, "older", Progress(training=training(3)))
    scene.until_state("older", "Running")
    pods = scene.until_pods("younger", 2)
    assert not {pod["metadata"]["uid"] for pod in pods} & {pod["metadata"]["uid"] for pod in younger}
    wait_for_ever(scene, "younger")
    for pod in pods:
        scene.run_pod(pod)
    scene.supervisors.report(scene.namespace, "younger", Progress(training=training(3)))
    status = scene.until_state("younger", "Running")
    assert status.get("restarts", {}).get("disruptions", 0) == status.get("restarts", {}).get("failures", 0) == 0
    scene.until(lambda: not released(scene, "younger"))


def test_what_was_released_is_the_users_to_suspend_and_to_resume(scene: Scene) -> None:
    scene.submit("paused", runPolicy={"startDeadlineSeconds": 1})
    pods = scene.until_pods("paused", 2)
    scene.until(lambda: finds_no_room(scene.pods("paused")[1]))
    scene.run_pod(pods[0])
    scene.until(lambda: released(scene, "paused"))
    scene.patch("sftjobs", "paused", {"spec": {"suspend": True}})
    end_once_asked_to(scene, pods[0])

    scene.until_state("paused", "Suspended")
    scene.patch("sftjobs", "paused", {"spec": {"suspend": False}})

    wait_for_ever(scene, "paused")
    for pod in scene.until_pods("paused", 2):
        scene.run_pod(pod)
    scene.supervisors.report(scene.namespace, "paused", Progress(training=training(3)))
    scene.until_state("paused", "Running")


def allow(scene: Scene, processors: int) -> None:
    """Let the namespace have so many processors, from now on."""
    hard = {"requests.cpu": str(processors)}
    if scene.get("resourcequotas", "small") is None:
        scene.create("resourcequotas", quota(hard))
    else:
        scene.patch("resourcequotas", "small", {"spec": {"hard": hard}})
    scene.until(lambda: (scene.get("resourcequotas", "small") or {}).get("status", {}).get("hard") == hard)


def test_two_groups_that_each_hold_quota_which_the_other_waits_for_come_apart(scene: Scene) -> None:
    def of(processors: int) -> Object:
        return {"nodes": 2, "gpusPerNode": 0, "resources": {"requests": {"cpu": str(processors)}}}

    # Each has one pod of two: what is left is too little for another one of the older one, and for two of the younger.
    allow(scene, 3)
    scene.submit("older", runPolicy=FOR_EVER, compute=of(2))
    scene.run_pod(scene.until_pods("older", 1)[0])
    scene.submit("younger", runPolicy={"startDeadlineSeconds": 1}, compute=of(1))
    younger = scene.until_pods("younger", 1)
    scene.run_pod(younger[0])

    scene.until(lambda: released(scene, "younger"))
    end_once_asked_to(scene, younger[0])
    scene.until(lambda: "had quota in their namespace" in scene.status("younger")["message"])
    scene.patch("sftjobs", "younger", {"spec": {"suspend": True}})  # it would try again, and take its part once more
    allow(scene, 4)

    scene.until_pods("older", 2)
    assert not released(scene, "older")
