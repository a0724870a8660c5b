"""What Argo CD is told of SFTJobs: their health, by the shipped script, run by Lua 5.1 as there, over what the operator
writes."""

from typing import Any

import pytest
import yaml
from lupa.lua51 import LuaRuntime

from sft_api.failures import FailureClass
from sft_api.generate import ROOT
from sft_api.progress import Phase
from sft_api.v1alpha1 import SFTJobStatus
from sft_operator.picture.observed import Observed, Refusal

from .make import NOW, make_child, make_pod, report, running, training, words
from .statuses import status_of

CONFIGURATION: dict[str, str] = yaml.safe_load((ROOT / "examples" / "argocd.yaml").read_text())["data"]
BAD_DATA = make_pod(1, phase="Failed", exit_code=11, words=words(FailureClass.DATA_ERROR, 0, message="no column x"))
NO_ROOM = [{"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available"}]


def health(manifest: dict[str, Any]) -> tuple[str, str]:
    """Status and message that Argo CD would show."""
    code = CONFIGURATION["resource.customizations.health.sftjob.dev_SFTJob"]
    lua = LuaRuntime()
    lua.globals().obj = lua.table_from(manifest, recursive=True)
    answer = lua.execute(code)
    return answer.status, answer.message


def sft_job(status: SFTJobStatus, generation: int) -> dict[str, Any]:
    document = status.model_dump(mode="json", by_alias=True, exclude_none=True)
    return {"metadata": {"name": "tiny", "generation": generation}, "status": document}


@pytest.mark.parametrize(
    ("observed", "spec", "state", "shown"),
    [
        (running(pods=()), {}, "Starting", "Progressing"),
        (running(report=report(training(5))), {}, "Running", "Progressing"),
        (running(report=report(training(0, attempt=2, phase=Phase.LOADING))), {}, "Starting", "Progressing"),
        (running(job=make_child(suspend=True), pods=()), {"suspend": True}, "Suspended", "Suspended"),
        (running(job=make_child(conditions={"Complete": ("", "")})), {}, "Complete", "Healthy"),
        (
            running(job=make_child(conditions={"FailureTarget": ("PodFailurePolicy", "")}), pods=(BAD_DATA,)),
            {},
            "Failed",
            "Degraded",
        ),
        (running(pods=(make_pod(0, phase="Pending", node=None, conditions=NO_ROOM),)), {}, "Queued", "Progressing"),
        (Observed(refusal=Refusal("Job", 403, "denied by policy", NOW)), {}, "Preparing", "Degraded"),
    ],
)
def test_every_state_has_a_health(observed: Observed, spec: dict[str, Any], state: str, shown: str) -> None:
    status = status_of(observed, **spec)
    assert status.state == state
    assert health(sft_job(status, status.observed_generation)) == (shown, health_message(status))


def health_message(status: SFTJobStatus) -> str:
    step = f", step {status.progress.summary}" if status.progress and status.progress.summary else ""
    return f"{status.state}{step}" + (f": {status.message}" if status.message else "")


def test_what_the_operator_has_not_seen_yet_is_on_its_way() -> None:
    done = status_of(running(job=make_child(conditions={"Complete": ("", "")})))
    assert health({"metadata": {"generation": 1}}) == ("Progressing", "waiting for the operator")
    assert health(sft_job(done, done.observed_generation + 1)) == ("Progressing", "waiting for the operator")
    deleted = sft_job(done, done.observed_generation)
    deleted["metadata"]["deletionTimestamp"] = "2026-11-21T12:00:00Z"
    assert health(deleted) == ("Progressing", "being deleted")
