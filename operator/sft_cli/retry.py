"""``sft retry``: have an SFTJob that has failed begin again, on the cluster that ``kubectl`` reaches."""

import json
import re
import subprocess
from datetime import UTC, datetime
from typing import Any

from sft_api.failures import FailureClass
from sft_api.v1alpha1.job import GROUP, PLURAL, RETRY_ANNOTATION, TAKE_OVER_ENDING

from .errors import UserError

_LOGGED = re.compile(r"[EWI]\d{4} \d\d:")
"""How lines of kubectl's log begin: each try to reach a server that is away, before the sentence that says so."""


def retry(name: str, namespace: str | None, context: str | None, *, take_over: bool) -> str:
    """Ask the operator to begin the job again; returns what to tell. Raises UserError.

    ``take_over``: also from another holder of its place that is alive, which ends then.
    """
    where = [*([f"--namespace={namespace}"] if namespace else []), *([f"--context={context}"] if context else [])]
    resource = f"{PLURAL}.{GROUP}"
    job: dict[str, Any] = json.loads(_kubectl("get", resource, name, "--output=json", *where))
    _check(job, name)
    word = datetime.now(UTC).isoformat(timespec="microseconds")
    if take_over:
        _check_place_in_use(job, name)
        word += TAKE_OVER_ENDING
    # Only if nobody has changed it since: what was seen to have failed may run again.
    unchanged = f"--resource-version={job['metadata']['resourceVersion']}"
    _kubectl("annotate", resource, name, f"{RETRY_ANNOTATION}={word}", "--overwrite", unchanged, *where)
    follow = " ".join(["kubectl get sftjob", name, *where, "--watch"])
    waits = "once nothing is left of what has failed; until then status.message names what is waited for"
    if (job.get("spec") or {}).get("suspend") is True:
        waits += "; its spec.suspend is true: set that to false as well"
    return f"{name} begins again, from its newest checkpoint: {follow}\n({waits})"


def _check(job: dict[str, Any], name: str) -> None:
    """Only what has run and failed can begin again, and stays."""
    if job["metadata"].get("deletionTimestamp"):
        raise UserError(f"{name} is being deleted: submit it again under its name once it is gone")
    status = job.get("status") or {}
    state = status.get("state") or "new"
    if state != "Failed":
        raise UserError(f"{name} is {state}: only a job that has failed can be retried")
    if not status.get("completionTime"):
        raise UserError(f"{name} never began, and begins by itself once this is corrected: {status.get('message', '')}")


def _check_place_in_use(job: dict[str, Any], name: str) -> None:
    """Nobody is fenced for a job that failed for another reason."""
    conditions = (job.get("status") or {}).get("conditions") or []
    reason = next((item.get("reason") for item in conditions if item.get("type") == "Failed"), None)
    if reason != FailureClass.PLACE_IN_USE.value:
        raise UserError(f"{name} failed with {reason}: nobody kept it from its place, leave out --take-over")


def _kubectl(*arguments: str) -> str:
    try:
        done = subprocess.run(["kubectl", *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise UserError("kubectl is not installed here: sft retry uses it to reach the cluster") from error
    except OSError as error:
        raise UserError(
            f"kubectl cannot be started here ({error.strerror}): sft retry uses it to reach the cluster; see which "
            "kubectl the PATH names first, whether it may be executed, and whether it is one of this machine's kind"
        ) from error
    if done.returncode != 0:
        said = [line for line in done.stderr.strip().splitlines() if not _LOGGED.match(line)]
        raise UserError(*(said or [f"kubectl {arguments[0]} ended with {done.returncode}"]))
    return done.stdout
