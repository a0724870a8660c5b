"""``sft validate``: manifests checked with the models the API server's schema is made from."""

import json
from collections.abc import Sequence
from pathlib import Path

from sft_api.failures import ExitCode

from .console import result
from .manifest import ManifestError, load_manifests


def problems_of(path: Path) -> tuple[str, ...]:
    """What is wrong with the manifests in ``path``, a line each; empty when they are valid."""
    try:
        load_manifests(path)
    except ManifestError as error:
        return error.problems
    return ()


def validate_manifests(paths: Sequence[Path], output: str) -> int:
    """Print the verdict on every manifest; returns the exit code."""
    verdicts = {path: problems_of(path) for path in paths}
    if output == "json":
        report = [
            {"file": str(path), "valid": not problems, "problems": problems} for path, problems in verdicts.items()
        ]
        result(json.dumps(report, indent=2))
    else:
        for path, problems in verdicts.items():
            for problem in problems:
                result(problem if problem.startswith(str(path)) else f"{path}: {problem}", fg="red")
            if not problems:
                result(f"{path}: valid", fg="green")
    return int(ExitCode.CONFIG_ERROR) if any(verdicts.values()) else 0
