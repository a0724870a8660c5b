"""A job that names a profile of pods: what is made for it, and what is said where it cannot have that."""

from __future__ import annotations

from typing import Any

import pytest

from sft_api.numbers import Numbers
from sft_api.v1alpha1 import SFTJobStatus
from sft_operator.builders.config_map import default_checkpoint_uri
from sft_operator.config import PodSettings, Settings, StoreSettings
from sft_operator.decisions.changes import plan_changes
from sft_operator.decisions.gpu_memory import DoesNotFit
from sft_operator.decisions.look import look
from sft_operator.decisions.pod_profiles import PodProfileNotAllowed, pods_of
from sft_operator.decisions.problems import find_problem
from sft_operator.decisions.result import CreateChildren
from sft_operator.decisions.status import compute_status
from sft_operator.picture.observed import Observed, Refusal
from tests.unit.operator.make import NOW, Object, job_manifest, make_job, running
from tests.unit.operator.test_look import healed_lately, seen

PODS = PodSettings.model_validate(
    {
        "image": "trainer:1",
        "profiles": {
            "h100": {"gpuMemory": "80Gi", "template": {"spec": {"runtimeClassName": "nvidia"}}},
            "direct": {"namespaces": ["platform", "vision"]},
        },
    }
)


def with_profile(name: str, **others: Any) -> Object:
    return {**others, "compute": {"gpusPerNode": 1, "podProfile": name}}


def test_the_pods_of_a_job_have_the_profile_that_it_names() -> None:
    def runtime_class(spec: Object) -> str | None:
        changes = plan_changes(make_job(**spec), SFTJobStatus(), Observed(), Settings(pods=PODS))
        name: str | None = changes.create[-1]["spec"]["template"]["spec"].get("runtimeClassName")
        return name

    assert runtime_class(with_profile("h100")) == "nvidia"
    assert runtime_class({}) is None


def test_a_profile_tells_how_large_gpus_are() -> None:
    large = {"model": {"uri": "hf://meta-llama/Llama-3.1-8B"}}
    job = make_job(**with_profile("h100", **large))

    with pytest.raises(DoesNotFit, match=r"80\.0Gi would be taken"):
        plan_changes(job, SFTJobStatus(), Observed(), Settings(pods=PODS))
    plan = compute_status(job, SFTJobStatus(), running(), NOW, pods=PODS).plan
    assert plan is not None
    assert plan.memory is not None
    assert plan.memory.gpu_memory == "80.0Gi"


@pytest.mark.parametrize(
    ("profile", "reason", "words"),
    [
        ("h200", "NotConfigured", "there is no profile h200; namespace team has h100: ask the administrator to add it"),
        ("direct", "PodProfileNotAllowed", "direct is not for namespace team, which has h100: ask"),
    ],
)
def test_a_job_waits_for_a_profile_that_it_cannot_have_and_begins_once_it_can(
    profile: str, reason: str, words: str
) -> None:
    manifest = job_manifest(**with_profile(profile))

    result = look(seen(manifest=manifest), Settings(pods=PODS))

    assert result.actions == ()
    assert result.status is not None
    (accepted,) = [item for item in result.status.conditions if item.type == "Accepted"]
    assert (accepted.status, accepted.reason) == ("False", reason)
    assert words in accepted.message

    mended = PODS.model_copy(update={"profiles": {profile: PODS.profiles["h100"]}})
    (action,) = look(seen(manifest=manifest), Settings(pods=mended)).actions
    assert isinstance(action, CreateChildren)


def test_namespaces_that_a_profile_names_may_use_it_and_others_not() -> None:
    job = make_job(**with_profile("direct"))
    of = {
        name: job.model_copy(update={"metadata": job.metadata.model_copy(update={"namespace": name})})
        for name in ("platform", "vision", "team")
    }

    assert pods_of(of["platform"], PODS) == pods_of(of["vision"], PODS) == PODS.model_copy(update={"profiles": {}})
    with pytest.raises(PodProfileNotAllowed):
        pods_of(of["team"], PODS)


def test_where_there_is_no_profile_that_is_said() -> None:
    with pytest.raises(ValueError, match="namespace team has none"):
        pods_of(make_job(**with_profile("h100")), PodSettings())


def test_what_has_its_job_is_followed_when_its_profile_has_gone() -> None:
    manifest = job_manifest(**with_profile("gone"))

    result = look(seen(running(), manifest=manifest, healing=healed_lately()), Settings(pods=PODS))

    assert result.actions == ()
    assert result.status is not None
    assert result.status.state == "Starting"
    (accepted,) = [item for item in result.status.conditions if item.type == "Accepted"]
    assert accepted.status == "True"


def test_a_profile_is_no_number_of_the_run() -> None:
    store = StoreSettings(uri="s3://bucket/sft")
    with_one, without = make_job(**with_profile("h100")), make_job(compute={"gpusPerNode": 1})

    assert Numbers.of(with_one.spec).digest == Numbers.of(without.spec).digest
    assert default_checkpoint_uri(with_one, store) == default_checkpoint_uri(without, store)


@pytest.mark.parametrize(("kind", "told"), [("Job", True), ("Service", False)])
def test_what_the_api_server_refuses_of_pods_names_their_profile(kind: str, told: bool) -> None:
    observed = Observed(refusal=Refusal(kind, 422, 'unknown field "spec.template.spec.runtimeClas"', NOW))

    problem = find_problem(observed, pods_wanted=0, profile="h100")

    assert problem is not None
    assert ("its pods have the profile h100" in problem.message) is told
    plain = find_problem(observed, pods_wanted=0)
    assert plain is not None
    assert "profile" not in plain.message
