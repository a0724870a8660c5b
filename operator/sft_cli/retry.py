"""``sft retry``: have an SFTJob that has failed begin again, on the cluster that ``kubectl`` reaches."""

import json
import subprocess
from datetime import UTC, datetime
from typing import Any

from sft_api.v1alpha1.job import GROUP, PLURAL, RETRY_ANNOTATION

from .errors import UserError


def retry(name: str, namespace: str | None, context: str | None) -> str:
    """Ask the operator to begin the job again; returns what to tell. Raises UserError."""
    where = [*([f"--namespace={namespace}"] if namespace else []), *([f"--context={context}"] if context else [])]
    resource = f"{PLURAL}.{GROUP}"
    job: dict[str, Any] = json.loads(_kubectl("get", resource, name, "--output=json", *where))
    _check(job, name)
    word = datetime.now(UTC).isoformat(timespec="microseconds")
    # Only if nobody has changed it since: what was seen to have failed may run again.
    unchanged = f"--resource-version={job['metadata']['resourceVersion']}"
    _kubectl("annotate", resource, name, f"{RETRY_ANNOTATION}={word}", "--overwrite", unchanged, *where)
    follow = " ".join(["kubectl get sftjob", name, *where, "--watch"])
    return f"{name} begins again, from its newest checkpoint: {follow}"


def _check(job: dict[str, Any], name: str) -> None:
    """Only what has run and failed can begin again."""
    status = job.get("status") or {}
    state = status.get("state") or "new"
    if state != "Failed":
        raise UserError(f"{name} is {state}: only a job that has failed can be retried")
    if not status.get("completionTime"):
        raise UserError(f"{name} never began, and begins by itself once this is corrected: {status.get('message', '')}")


def _kubectl(*arguments: str) -> str:
    try:
        done = subprocess.run(["kubectl", *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise UserError("kubectl is not installed here: sft retry uses it to reach the cluster") from error
    if done.returncode != 0:
        raise UserError(done.stderr.strip() or f"kubectl {arguments[0]} ended with {done.returncode}")
    return done.stdout
