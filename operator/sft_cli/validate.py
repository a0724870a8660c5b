"""``sft validate``: manifests checked with the models the API server's schema is made from."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sft_api.failures import ExitCode
from sft_api.plan import make_plan

from .console import document, result
from .local_model import fit_of, model_shape, warnings_of
from .manifest import ManifestError, load_manifests, shown
from .overrides import Override, in_words
from .trained import measure_trained, names_warning


@dataclass(frozen=True)
class Verdict:
    """On what one argument names: the problems, a line each, or the names of its SFTJobs."""

    problems: tuple[str, ...]
    jobs: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    """What is valid, and may surprise."""


def verdict_on(path: Path, overrides: Sequence[Override] = ()) -> Verdict:
    """The verdict on all SFTJobs of the file or folder ``path``, or of standard input (``-``), with ``overrides``."""
    problems: list[str] = []
    warnings: list[str] = []
    try:
        jobs = load_manifests(path, overrides, on_warning=warnings.append)
    except ManifestError as error:
        return Verdict(error.problems)
    for job in jobs:
        shape = model_shape(job.spec)
        fit = fit_of(job.spec, make_plan(job.spec, shape=shape), shape)
        told = [names_warning(measure_trained(job.spec), fit.refused), *warnings_of(job.spec, shape, fit)]
        warnings += [f"{job.metadata.name}: {text}" for text in told if text]
        problems += [f"{job.metadata.name}: {fit.refused}"] if fit.refused else []
    return Verdict(tuple(problems), tuple(job.metadata.name for job in jobs), tuple(warnings))


def validate_manifests(paths: Sequence[Path], output: str, overrides: Sequence[Override] = ()) -> int:
    """Print the verdict on every manifest, with ``overrides``; returns the exit code."""
    verdicts = {path: verdict_on(path, overrides) for path in paths}
    if output == "json":
        report = [
            {
                "file": str(path),
                "valid": not verdict.problems,
                "jobs": verdict.jobs,
                "problems": verdict.problems,
                "warnings": verdict.warnings,
            }
            for path, verdict in verdicts.items()
        ]
        document(report, output)
    else:
        for path, verdict in verdicts.items():
            name = shown(path)
            for problem in verdict.problems:
                result(problem if problem.startswith(name) else f"{name}: {problem}", fg="red")
            if not verdict.problems:
                several = f", {len(verdict.jobs)} SFTJobs ({', '.join(verdict.jobs)})" if len(verdict.jobs) > 1 else ""
                given = f" with {in_words(override.text for override in overrides)}" if overrides else ""
                result(f"{name}: valid{given}{several}", fg="green")
            for warning in verdict.warnings:
                result(f"{name}: warning: {warning}", fg="yellow")
    return int(ExitCode.CONFIG_ERROR) if any(verdict.problems for verdict in verdicts.values()) else 0
