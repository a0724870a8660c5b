"""The resolved configuration of a run: the trainer's only interface.

The operator writes it to a ConfigMap, ``sft run`` to a file. It holds no secrets: credentials reach the trainer
through its environment.
"""

from pydantic import Field, ValidationInfo, field_validator

from .dummy_run import FOLDER, as_dummy_run
from .numbers import Numbers
from .plan import Plan, as_asked, make_plan
from .v1alpha1.base import ReportModel
from .v1alpha1.job import SFTJob, SFTJobSpec
from .v1alpha1.places import PLACE_RULES, default_export
from .v1alpha1.runtime import MOST_RESTARTS

CONFIG_PATH = "/etc/sft/config.json"
BEGUN_FILE = "begun"
"""Beside it, with the uid of the SFTJob, once its run has made a step: what new pods cannot know from one another."""


class JobIdentity(ReportModel):
    """Which SFTJob a run belongs to."""

    name: str
    namespace: str = "default"
    uid: str
    """Of the SFTJob object; with ``sft run`` a stable word of the checkpoint folder."""


class TrainerConfig(ReportModel):
    """Everything a run needs to know."""

    job: JobIdentity
    spec: SFTJobSpec
    plan: Plan
    checkpoint_uri: str
    export_uri: str | None = Field(default=None, description="None when nothing is exported.")
    ca_bundle: str = Field(
        default="", description="Certificates of authorities, in PEM, that are trusted besides: ``trust``."
    )

    @field_validator("spec")
    @classmethod
    def _without_judgement(cls, spec: SFTJobSpec) -> SFTJobSpec:
        """``spec`` with the largest ``runPolicy.maxRestarts``, whatever it says: that may change while the run lasts.

        Who judges it keeps to what the SFTJob says then. Trainers of before this was so (images of users) count for
        themselves, up to what they read, or to 10 where it is missing.
        """
        policy = spec.run_policy.model_copy(update={"max_restarts": MOST_RESTARTS})
        return spec.model_copy(update={"run_policy": policy})

    @field_validator("plan")
    @classmethod
    def _as_asked(cls, plan: Plan, others: ValidationInfo) -> Plan:
        """``plan``, also one that an earlier version made: a run that is begun again keeps its configuration, and has
        the trainer of today."""
        spec: SFTJobSpec | None = others.data.get("spec")
        return plan if spec is None else as_asked(plan, spec)

    @classmethod
    def resolve(
        cls,
        job: SFTJob,
        *,
        uid: str,
        default_checkpoint_uri: str | None,
        processes: int | None = None,
        gpu_memory: int | None = None,
        ca_bundle: str = "",
    ) -> "TrainerConfig":
        """The configuration of ``job``; ``default_checkpoint_uri`` is used when the spec names none.

        ``processes`` is how many there are, when not as many as the spec asks for; ``gpu_memory`` the bytes of a GPU,
        where the spec does not say it. The plan is without its memory: the trainer sees model and GPU itself.
        ``ca_bundle`` holds the platform's own authorities.
        Raises ``ValueError`` when there is no place for checkpoints, or the export would go where it must not.
        """
        checkpoint_uri = job.spec.checkpoint.uri or default_checkpoint_uri
        if checkpoint_uri is None:
            raise ValueError(
                "spec.checkpoint.uri is missing and the operator has no default store: give s3://bucket/prefix or "
                "pvc://claim/path, or ask the administrator to set a default store"
            )
        checkpoint_uri = checkpoint_uri.rstrip("/")
        # Once more, now that it is known where a job saves that does not say so itself.
        placed = job.spec.model_copy(
            update={"checkpoint": job.spec.checkpoint.model_copy(update={"uri": checkpoint_uri})}
        )
        for rule in PLACE_RULES:
            if not rule.check(placed):
                raise ValueError(f"spec: {rule.message}; checkpoints go to {checkpoint_uri}")
        spec = as_dummy_run(job.spec)
        if spec.training.dummy_run:
            checkpoint_uri = f"{checkpoint_uri}/{FOLDER}"
        export = spec.export
        return cls(
            job=JobIdentity(name=job.metadata.name, namespace=job.metadata.namespace, uid=uid),
            spec=spec,
            plan=make_plan(spec, processes=processes, gpu_memory=gpu_memory).model_copy(update={"memory": None}),
            checkpoint_uri=checkpoint_uri,
            export_uri=(export.uri or default_export(checkpoint_uri)).rstrip("/") if export.at_end else None,
            ca_bundle=ca_bundle,
        )

    def numbers(self) -> Numbers:
        """What decides the losses of the run, for comparison at resume."""
        return Numbers.of(self.spec)
