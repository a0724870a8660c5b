"""Write what is made from the models: the CRD, the chart's copy of it, and the API reference.

python -m sft_api.generate            write the files
python -m sft_api.generate --check    fail when a file differs from what would be written
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from .crd import custom_resource_definition, resource_schema
from .reference import reference_page
from .yaml_text import to_yaml

ROOT = Path(__file__).resolve().parents[2]
"""The checkout: the files lie beside the package, not in an installed copy."""

KEPT = {"helm.sh/resource-policy": "keep", "argocd.argoproj.io/sync-options": "Prune=false"}
"""Annotations by which Helm and Argo CD leave an object that is no longer among those they apply."""

_HEADER = "# Generated from the models by `make generate`; do not edit.\n"


def generated_files() -> dict[str, str]:
    """Every generated file: path within the checkout, and its text."""
    definition = custom_resource_definition()
    return {
        "crds/sftjob.dev_sftjobs.yaml": _HEADER + to_yaml(definition),
        "charts/sft-operator/templates/crd.yaml": chart_template(definition),
        "docs/reference/sftjob.md": reference_page(resource_schema()),
    }


def chart_template(definition: dict[str, Any]) -> str:
    """The CRD as a Helm template: a template, so that upgrades reach it; kept when the release is removed.

    Removing a CRD removes every SFTJob, so uninstalling the operator must not, nor a sync that no longer finds it.
    """
    metadata = {**definition["metadata"], "annotations": KEPT}
    # Helm would read double braces in a description as its own.
    text = to_yaml({**definition, "metadata": metadata}).replace("{{", '{{ "{{" }}')
    return f"{{{{- if .Values.crds.install }}}}\n{_HEADER}{text}{{{{- end }}}}\n"


def differing_files(root: Path) -> list[str]:
    """Paths of the generated files that are missing or differ under ``root``."""
    return [
        path
        for path, text in generated_files().items()
        if not (root / path).is_file() or (root / path).read_text(encoding="utf-8") != text
    ]


def write_files(root: Path) -> None:
    """Write every generated file under ``root``."""
    for path, text in generated_files().items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text, encoding="utf-8")


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m sft_api.generate", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, fail when a file is out of date")
    if not parser.parse_args(arguments).check:
        write_files(root)
        return 0
    differing = differing_files(root)
    for path in differing:
        print(f"{path} is not what the models say: run `make generate` and commit the result", file=sys.stderr)
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
