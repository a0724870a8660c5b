"""``training.dummyRun``: what is left of a spec when only speed and memory of its steps are wanted."""

from .v1alpha1.job import SFTJobSpec
from .v1alpha1.monitoring import MonitoringSpec
from .v1alpha1.runtime import CheckpointSpec
from .v1alpha1.workload import EvaluationSpec

FOLDER = "dummy-run"
"""Below the place of the run that the manifest is of. Nothing is ever written there, or read: a dummy run has no place,
and that of the run is not its own."""


def as_dummy_run(spec: SFTJobSpec) -> SFTJobSpec:
    """``spec`` itself, or where it asks for a dummy run: its steps alone, without evaluations, saves and export."""
    dummy = spec.training.dummy_run
    if dummy is None:
        return spec
    source = spec.data.train[0].model_copy(update={"weight": None})
    training: dict[str, object] = {
        "steps": dummy.steps,
        "epochs": None,
        "evaluation": EvaluationSpec(),
        "callbacks": [],
    }
    return spec.model_copy(
        update={
            "data": spec.data.model_copy(update={"train": [source], "eval": [], "held_out": None}),
            "training": spec.training.model_copy(update=training),
            "checkpoint": CheckpointSpec(uri=spec.checkpoint.uri, s3=spec.checkpoint.s3),
            "monitoring": MonitoringSpec(),
            "export": spec.export.model_copy(
                update={"at_end": False, "checkpoint": "last", "every_steps": None, "hub": None}
            ),
        }
    )
