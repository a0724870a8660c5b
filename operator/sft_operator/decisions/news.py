"""Pure: the events (``kubectl describe``) that a change of status deserves."""

from datetime import datetime
from typing import Literal, NamedTuple

from sft_api.slow_gpus import slow_gpu
from sft_api.v1alpha1 import API_VERSION, KIND, CheckpointStatus, RestartsStatus, SFTJobStatus

from ..names import MANAGER
from ..picture.observed import Manifest
from .suspects import SUSPECT_AFTER, in_words

_SENTENCES = {"Running": "training goes on", "Complete": "training is complete"}
_ON_THE_WAY = ("Preparing", "Queued", "Starting", "Suspending")
"""States that every job passes, as it does the first time that it runs: the status shows them, events would only be
noise."""

_LONGEST_NOTE_BYTES = 1000


class News(NamedTuple):
    """One thing worth telling."""

    type: Literal["Normal", "Warning"]
    reason: str
    note: str


def news(before: SFTJobStatus, after: SFTJobStatus) -> list[News]:
    """What changed between two statuses, oldest first."""
    told: list[News] = []
    old, new = before.restarts or RestartsStatus(), after.restarts or RestartsStatus()
    if new.failures > old.failures:
        # Nothing restarts after the failure that ends the run: what was the last is in the words of Failed.
        if after.state != "Failed":
            # Not what happened last: that may be a pod that was lost in the same moment.
            told.append(News("Warning", "Restarting", new.last_failure))
    elif new.disruptions > old.disruptions:
        told.append(News("Normal", "Disrupted", f"{new.last_reason}: {new.last_message}"))
    told += _of_nodes(before, after)
    if before.state == "Failed" and after.retried != before.retried:
        told.append(News("Normal", "Retried", after.message))
    if (start := _goes_on_from(before, after)) is not None:
        note = f"continues from step {start.step}, which attempt {start.attempt} saved in {start.uri}"
        told.append(News("Normal", "Continues", note))
    exported = {each.step for each in before.exports}
    told += [
        News("Normal", "Exported", f"the model of step {each.step} is in {each.uri}")
        for each in reversed(after.exports)
        if each.step not in exported
    ]
    copied, copy = (status.export.hub if status.export else None for status in (before, after))
    if copy is not None and copy != copied:
        where = f"{copy.url}, branch {copy.revision}, commit {copy.commit}"
        told.append(News("Normal", "Uploaded", f"the model is in {where}"))
    known_as_slow = {(each.uuid, each.since) for each in before.slow_gpus}
    told += [
        News("Warning", "SlowGPU", slow_gpu(each))
        for each in after.slow_gpus
        if (each.uuid, each.since) not in known_as_slow
    ]
    told += [News("Warning", "TrainerWarning", text) for text in after.warnings if text not in before.warnings]
    known, problem = (status.condition("Stalled", "True") for status in (before, after))
    if after.state and after.state != before.state and not _is_passed(before, after):
        kind: Literal["Normal", "Warning"] = "Warning" if problem else "Normal"
        told.append(News(kind, after.state, after.message or _SENTENCES.get(after.state, after.state)))
    # Also what came together with a change of state, by its own name. What has failed is told by Failed.
    failed = after.state == "Failed" != before.state
    if problem and not failed and (known is None or known.reason != problem.reason):
        told.append(News("Warning", problem.reason, problem.message))
    return told


def _of_nodes(before: SFTJobStatus, after: SFTJobStatus) -> list[News]:
    """Nodes on which the run has failed, and whether it is kept off them."""
    old, new = before.restarts or RestartsStatus(), after.restarts or RestartsStatus()
    known = {item.node for item in old.nodes if item.failures >= SUSPECT_AFTER}
    suspected = [item for item in new.nodes if item.failures >= SUSPECT_AFTER]
    told = [
        News("Warning", "NodeSuspected", f"{in_words(item)}: have it checked")
        for item in suspected
        if item.node not in known
    ]
    added = [node for node in after.avoided_nodes if node not in before.avoided_nodes]
    if added:
        told.append(News("Warning", "NodeAvoided", f"the pods of the run are kept off {', '.join(added)} for a day"))
    if before.avoided_nodes and not after.avoided_nodes and after.job_ref and after.completion_time is None:
        kept = ", ".join(before.avoided_nodes)
        told.append(News("Normal", "NodeAvoidanceLifted", f"the pods of the run are kept off {kept} no longer"))
    return told


def _is_passed(before: SFTJobStatus, after: SFTJobStatus) -> bool:
    """Whether every job comes to where it is now."""
    return after.state in _ON_THE_WAY or (after.state == "Running" and before.first_step_time is None)


def _goes_on_from(before: SFTJobStatus, after: SFTJobStatus) -> CheckpointStatus | None:
    """The checkpoint of an earlier attempt that a job begins with: the first one that is known of it."""
    known, latest = before.latest_checkpoint, after.latest_checkpoint
    return latest if known is None and latest is not None and latest.attempt < after.attempt else None


def build_event(job: Manifest, item: News, *, instance: str, unique: str, now: datetime) -> Manifest:
    """The event for ``item`` about the SFTJob in the manifest ``job``.

    ``instance`` names this operator's pod; ``unique`` makes the name of the event, and is never used twice.
    """
    metadata = job["metadata"]
    return {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"name": f"{metadata['name']}.{unique}", "namespace": metadata["namespace"]},
        "eventTime": now.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        "type": item.type,
        "reason": item.reason[:128],
        # The API server's limit of 1024 counts bytes.
        "note": item.note.encode()[:_LONGEST_NOTE_BYTES].decode(errors="ignore"),
        "action": "Reconcile",
        "reportingController": MANAGER,
        "reportingInstance": instance[:128],
        "regarding": {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "namespace": metadata["namespace"],
            "name": metadata["name"],
            "uid": metadata["uid"],
        },
    }
