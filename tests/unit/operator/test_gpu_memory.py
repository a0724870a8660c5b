"""A run that does not fit its GPUs gets no pod: what is said, and whom it does not concern."""

from __future__ import annotations

from typing import Any

import pytest

from sft_api.v1alpha1 import SFTJobStatus
from sft_operator.config import PodSettings, Settings
from sft_operator.decisions.changes import plan_changes
from sft_operator.decisions.gpu_memory import DoesNotFit, memory_warnings
from sft_operator.decisions.status import compute_status
from sft_operator.picture.observed import Observed
from tests.unit.operator.make import NOW, Object, job_manifest, make_job, running, stamp
from tests.unit.operator.test_look import decided, seen

EIGHT_BILLION = {"uri": "hf://meta-llama/Llama-3.1-8B"}
PODS = PodSettings(image="trainer:1")
CLUSTER = PODS.model_copy(update={"gpu_memory": "80Gi"})


def on_one(**compute: Any) -> Object:
    return {"model": EIGHT_BILLION, "compute": {"gpusPerNode": 1, **compute}}


def create(spec: Object, status: SFTJobStatus | None = None, pods: PodSettings = PODS) -> int:
    changes = plan_changes(make_job(**spec), status or SFTJobStatus(), Observed(), Settings(pods=pods))
    return len(changes.create)


def test_what_does_not_fit_is_refused_before_anything_is_made() -> None:
    result = decided(seen(manifest=job_manifest(**on_one(gpuMemory="80Gi"))))

    assert result.actions == ()
    assert result.status is not None
    assert result.status.state == "Failed"
    (accepted,) = [item for item in result.status.conditions if item.type == "Accepted"]
    assert (accepted.status, accepted.reason) == ("False", "DoesNotFit")
    assert "training.activationCheckpointing: full (" in accepted.message
    assert accepted.message.endswith("Delete the SFTJob and apply it changed: it stays as it was created")


def test_it_is_tried_where_the_user_knows_better_and_where_nobody_knows_the_gpu() -> None:
    assert create(on_one(gpuMemory="80Gi", memoryCheck="Warn")) == 4
    assert create(on_one()) == 4


def test_the_clusters_gpus_count_where_the_job_names_none() -> None:
    with pytest.raises(DoesNotFit, match=r"80\.0Gi would be taken"):
        create(on_one(), pods=CLUSTER)
    assert create(on_one(gpuMemory="192Gi"), pods=CLUSTER) == 4


def test_what_has_trained_is_not_refused_any_more() -> None:
    trained = SFTJobStatus(state="Recovering", first_step_time=stamp(-60))

    assert create(on_one(), trained, CLUSTER) == 4


def test_the_status_shows_the_parts_and_warns_once() -> None:
    job = make_job(model=EIGHT_BILLION, compute={"gpusPerNode": 8})

    status = compute_status(job, SFTJobStatus(), running(), NOW, pods=CLUSTER)

    assert status.plan is not None
    assert status.plan.memory is not None
    assert (status.plan.memory.gpu_memory, status.plan.memory.optimizer) == ("80.0Gi", "7.5Gi")
    # 8 x 8Gi of the operator's defaults do not hold 12 bytes for each of 8 billion parameters
    (warning,) = status.warnings
    assert "its pod asks for 64.0Gi" in warning
    assert compute_status(job, status, running(), NOW, pods=CLUSTER).warnings == [warning]
    assert memory_warnings(make_job(compute={"gpusPerNode": 0}, model=EIGHT_BILLION).spec, CLUSTER) == []


def test_the_status_warns_of_what_may_surprise() -> None:
    data = {"train": [{"uri": "hf://a/b"}], "maxLength": 65536}
    job = make_job(model={"uri": "hf://Qwen/Qwen3-0.6B"}, data=data, compute={"gpusPerNode": 0})

    (warning,) = compute_status(job, SFTJobStatus(), running(), NOW, pods=CLUSTER).warnings
    assert warning.startswith("data.maxLength is 65536, and the model has 40960 positions")
