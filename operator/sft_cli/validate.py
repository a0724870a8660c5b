"""``sft validate``: manifests checked with the models the API server's schema is made from."""

import json
from collections.abc import Sequence
from pathlib import Path

from sft_api.failures import ExitCode

from .console import results
from .manifest import ManifestError, load_manifest


def problems_of(path: Path) -> list[str]:
    """What is wrong with the manifest at ``path``, a line each; empty when it is valid."""
    try:
        load_manifest(path)
    except ManifestError as error:
        return str(error).splitlines()
    return []


def validate_manifests(paths: Sequence[Path], output: str) -> int:
    """Print the verdict on every manifest; returns the exit code."""
    verdicts = {path: problems_of(path) for path in paths}
    console = results()
    if output == "json":
        report = [
            {"file": str(path), "valid": not problems, "problems": problems} for path, problems in verdicts.items()
        ]
        console.print(json.dumps(report, indent=2))
    else:
        for path, problems in verdicts.items():
            for problem in problems:
                console.print(problem, style="red")
            if not problems:
                console.print(f"{path}: valid", style="green")
    return int(ExitCode.CONFIG_ERROR) if any(verdicts.values()) else 0
