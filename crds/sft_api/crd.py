"""The CustomResourceDefinition of SFTJob, made from the models."""

import json
from typing import Any

from .openapi import Schema, structural_schema, without_defaults, without_defaults_below_lists
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
                    "schema": {"openAPIV3Schema": without_defaults_below_lists(resource_schema())},
                }
            ],
        },
    }


def resource_schema() -> Schema:
    """The schema of a whole SFTJob, with all defaults: the API server gets no defaults below lists."""
    schema = structural_schema(SFTJob)
    spec = schema["properties"]["spec"]
    status = without_defaults(schema["properties"]["status"])
    spec["x-kubernetes-validations"] = [
        *spec.get("x-kubernetes-validations", []),
        *(_immutable(field, spec) for field in IMMUTABLE_SPEC_FIELDS),
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


def _immutable(field: str, spec: Schema) -> dict[str, str]:
    """The transition rule of one dotted ``field`` of the spec.

    It stands at the spec, not at the field: a rule at an optional field is not evaluated when the field is added or
    removed.
    """
    schema = spec
    for name in field.split("."):
        schema = schema["properties"][name]
    return {
        "rule": _unchanged(field, schema),
        "message": f"spec.{field} cannot be changed after creation: create a new SFTJob",
    }


def _unchanged(path: str, schema: Schema, known: int = 0) -> str:
    """CEL that is true when what lies at ``path`` of the spec, whose first ``known`` parts are there, is as it was.

    Earlier CRDs had defaults in items of lists, and stored jobs have them written out: whoever applies the same
    manifest again takes them away, which changes nothing. Lists of such items, and what these lie in, are always there.
    """
    parts = path.split(".")
    if schema == without_defaults_below_lists(schema):
        guarded = [".".join(parts[:count]) for count in range(known + 1, len(parts) + 1)]
        return _equal(path, guarded)
    if "items" in schema:
        items = f"map(item, [{', '.join(_filled_in(*field) for field in schema['items']['properties'].items())}])"
        return f"self.{path}.{items} == oldSelf.{path}.{items}"
    given = {
        name for name, field in schema["properties"].items() if name in schema.get("required", ()) or "default" in field
    }
    return " && ".join(
        _unchanged(f"{path}.{name}", field, len(parts) + (name in given))
        for name, field in schema["properties"].items()
    )


def _equal(path: str, guarded: list[str]) -> str:
    """CEL that compares ``path`` on both sides; each of ``guarded`` may be absent, and reading that is an error."""
    equal = f"self.{path} == oldSelf.{path}"
    if not guarded:
        return equal
    now, before = (" && ".join(f"has({root}.{part})" for part in guarded) for root in ("self", "oldSelf"))
    return f"({now}) == ({before}) && (!({now}) || {equal})"


def _filled_in(name: str, field: Schema) -> str:
    """CEL for a field of ``item``: its default where it is absent, or null."""
    return f"has(item.{name}) ? dyn(item.{name}) : dyn({json.dumps(field.get('default'))})"


def _column(name: str, kind: str, path: str, always: bool) -> dict[str, Any]:
    return {"name": name, "type": kind, "jsonPath": path, **({} if always else {"priority": 1})}
