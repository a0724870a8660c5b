"""The resolved configuration of a run: the trainer's only interface.

The operator writes it to a ConfigMap, ``sft run`` to a file. It holds no secrets: credentials reach the trainer
through its environment.
"""

import hashlib
import json
from typing import Any

from pydantic import Field

from .plan import Plan, make_plan
from .v1alpha1.base import ReportModel
from .v1alpha1.job import SFTJob, SFTJobSpec

CONFIG_PATH = "/etc/sft/config.json"

# What may differ between two attempts of one run without changing its numbers.
_NOT_NUMBERS: tuple[tuple[str, ...], ...] = (
    ("data", "workers"),
    ("data", "eval"),
    ("compute",),
    ("checkpoint",),
    ("export",),
    ("suspend",),
    ("runPolicy",),
    ("strategy",),
    ("model", "tokenSecretRef"),
    ("training", "evaluation"),
    ("training", "activationCheckpointing"),
)


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

    @classmethod
    def resolve(
        cls, job: SFTJob, *, uid: str, default_checkpoint_uri: str | None, processes: int | None = None
    ) -> "TrainerConfig":
        """The configuration of ``job``; ``default_checkpoint_uri`` is used when the spec names none.

        ``processes`` is how many there are, when not as many as the spec asks for.
        Raises ``ValueError`` when there is no place for checkpoints.
        """
        checkpoint_uri = job.spec.checkpoint.uri or default_checkpoint_uri
        if checkpoint_uri is None:
            raise ValueError(
                "spec.checkpoint.uri is missing and the operator has no default store: give s3://bucket/prefix or "
                "pvc://claim/path, or ask the administrator to set a default store"
            )
        checkpoint_uri = checkpoint_uri.rstrip("/")
        export = job.spec.export
        return cls(
            job=JobIdentity(name=job.metadata.name, namespace=job.metadata.namespace, uid=uid),
            spec=job.spec,
            plan=make_plan(job.spec, processes=processes),
            checkpoint_uri=checkpoint_uri,
            export_uri=((export.uri or f"{checkpoint_uri}/export").rstrip("/") if export.at_end else None),
        )

    def numbers(self) -> dict[str, Any]:
        """The part of the configuration that decides the numbers of the run, for comparison at resume."""
        spec = self.spec.model_dump(mode="json", exclude_none=True)
        for path in _NOT_NUMBERS:
            parent: Any = spec
            for key in path[:-1]:
                parent = parent.get(key, {})
            parent.pop(path[-1], None)
        plan = self.plan.model_dump(mode="json", exclude_none=True)
        fixed = (
            "globalBatchSize",
            "globalBatchTokens",
            "maxTokensPerMicroBatch",
            "precision",
            "learningRate",
        )
        return {"spec": spec, "plan": {key: plan[key] for key in fixed if key in plan}}

    def numbers_digest(self) -> str:
        """SHA-256 of ``numbers()``."""
        return hashlib.sha256(json.dumps(self.numbers(), sort_keys=True).encode()).hexdigest()
