"""Other places of the same name: before a run starts from nothing, what lies beside it is named."""

import re
from collections.abc import Callable

from sft_api.checkpoints import CHECKPOINTS_PREFIX, MANIFEST_NAME, checkpoint_id
from sft_api.place import folder_name
from sft_api.trainer_config import TrainerConfig

from .checkpoint.store import Store
from .errors import TrainingError

_SHOWN = 5
_UID = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
"""Before places were named by the digest, they were named by the object."""


def told_of_siblings(config: TrainerConfig, open_place: Callable[[str], Store]) -> list[str]:
    """Sentences about places beside this one that hold checkpoints under the same name.

    Only where the place was chosen for the job. ``open_place`` gives the store at a URI. What cannot be listed is
    passed over: nobody needs the right to.
    """
    parent, _, folder = config.checkpoint_uri.rpartition("/")
    if folder != folder_name(config.job.name, config.numbers()):
        return []
    beside = re.compile(rf"({re.escape(config.job.name)}-(?:[0-9a-f]{{16}}|{_UID}))/{CHECKPOINTS_PREFIX}([^/]+)/(.+)")
    steps: dict[str, int] = {}
    try:
        listed = open_place(parent).list(f"{config.job.name}-")
    except TrainingError:
        return []
    for entry in listed:
        match = beside.fullmatch(entry.key)
        identity = checkpoint_id(match[2]) if match else None
        if match and identity and match[3] == MANIFEST_NAME and match[1] != folder:
            steps[match[1]] = max(identity.step, steps.get(match[1], 0))
    if not steps:
        return []
    found = ", ".join(f"{parent}/{name} (step {step})" for name, step in sorted(steps.items())[:_SHOWN])
    more = f" and {len(steps) - _SHOWN} more" if len(steps) > _SHOWN else ""
    return [
        f"this run starts from the model; there are checkpoints of jobs of this name with other settings, or of an "
        f"earlier version, in {found}{more}: to go on as one of them, restore its settings and name it in "
        "checkpoint.uri; to begin another run from one, name it in checkpoint.resume.from.uri"
    ]
