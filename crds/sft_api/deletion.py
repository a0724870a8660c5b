"""What to know about a job whose place goes with it. Pure."""

from .v1alpha1.job import SFTJobSpec

DELETES = "spec.deletionPolicy is Delete"
"""With which every sentence about that begins."""


def deletion_warnings(spec: SFTJobSpec) -> list[str]:
    """What may surprise people; nothing to refuse."""
    seconds = spec.run_policy.ttl_seconds_after_finished
    if spec.deletion_policy != "Delete" or seconds is None:
        return []
    return [
        f"{DELETES} and spec.runPolicy.ttlSecondsAfterFinished is {seconds}: so long after its end the job goes, its "
        "checkpoints go with it, and whatever applies the manifest again, as GitOps does, trains the run anew"
    ]
