"""The CustomResourceDefinition of SFTJob, made from the models."""

from typing import Any

from .openapi import Schema, structural_schema, without_defaults
from .v1alpha1.job import GROUP, IMMUTABLE_SPEC_FIELDS, KIND, PLURAL, VERSION, SFTJob

SINGULAR = "sftjob"
SHORT_NAMES = ("sft",)
CATEGORIES = ("training",)

# Name, type, path, shown by `kubectl get` without -o wide. Every path ends at a scalar: composite ones print JSON.
_COLUMNS = (
    ("State", "string", ".status.state", True),
    ("Step", "string", ".status.progress.summary", True),
    ("Loss", "number", ".status.progress.loss", True),
    ("Tok/s", "number", ".status.progress.tokensPerSecond", True),
    ("Checkpoint", "date", ".status.checkpoints.latest.time", True),
    ("Restarts", "integer", ".status.restarts.failures", True),
    ("Remaining", "string", ".status.progress.remaining", True),
    ("Age", "date", ".metadata.creationTimestamp", True),
    ("Pods", "string", ".status.podsReady", False),
    ("Phase", "string", ".status.progress.phase", False),
    ("At-Risk", "integer", ".status.stepsAtRisk", False),
    ("Disruptions", "integer", ".status.restarts.disruptions", False),
    ("Eval-Loss", "number", ".status.progress.evalLoss", False),
    ("Goodput", "integer", ".status.goodput.percent", False),
    ("Message", "string", ".status.message", False),
)


def custom_resource_definition() -> dict[str, Any]:
    """The CRD as the API server takes it (apiextensions.k8s.io/v1)."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": SINGULAR,
                "shortNames": list(SHORT_NAMES),
                "categories": list(CATEGORIES),
            },
            "scope": "Namespaced",
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": {"status": {}},
                    "additionalPrinterColumns": [_column(*column) for column in _COLUMNS],
                    "schema": {"openAPIV3Schema": resource_schema()},
                }
            ],
        },
    }


def resource_schema() -> Schema:
    """The schema of a whole SFTJob."""
    schema = structural_schema(SFTJob)
    spec = schema["properties"]["spec"]
    status = without_defaults(schema["properties"]["status"])
    spec["x-kubernetes-validations"] = [
        *spec.get("x-kubernetes-validations", []),
        *(_immutable(field) for field in IMMUTABLE_SPEC_FIELDS),
    ]
    return {
        "description": schema["description"],
        "type": "object",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"description": f"Group and version: {GROUP}/{VERSION}.", "type": "string"},
            "kind": {"description": f"{KIND}.", "type": "string"},
            # The API server brings the schema of metadata itself and refuses any other.
            "metadata": {"type": "object"},
            "spec": spec,
            "status": status,
        },
        "x-kubernetes-validations": schema["x-kubernetes-validations"],
    }


def _immutable(field: str) -> dict[str, str]:
    """The transition rule of one dotted ``field`` of the spec.

    It stands at the spec, not at the field: a rule at an optional field is not evaluated when the field is added or
    removed. ``has()`` guards every part of the path on both sides, because reading what is absent is an error.
    """
    self_has, old_has = _has(f"self.{field}"), _has(f"oldSelf.{field}")
    return {
        "rule": f"({self_has}) == ({old_has}) && (!({self_has}) || self.{field} == oldSelf.{field})",
        "message": f"spec.{field} cannot be changed after creation: create a new SFTJob",
    }


def _has(path: str) -> str:
    root, *names = path.split(".")
    prefixes = [".".join([root, *names[:count]]) for count in range(1, len(names) + 1)]
    return " && ".join(f"has({prefix})" for prefix in prefixes)


def _column(name: str, kind: str, path: str, always: bool) -> dict[str, Any]:
    return {"name": name, "type": kind, "jsonPath": path, **({} if always else {"priority": 1})}
