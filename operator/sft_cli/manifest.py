"""Manifests from files: every command of the CLI reads them here, and refuses what the API server would refuse."""

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sft_api.v1alpha1.job import API_VERSION, KIND, SFTJob

from .kubernetes_yaml import YamlError, read_documents
from .problems import sentences


class ManifestError(ValueError):
    """A manifest that cannot be used; the text has one line per problem, each says what to change."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


def load_manifest(source: Path | str) -> SFTJob:
    """The one SFTJob of ``source``: a file's path, or the text itself. Documents of other kinds are passed over.

    Raises ``ManifestError``, also when there are several SFTJobs.
    """
    jobs = load_manifests(source)
    if len(jobs) > 1:
        names = ", ".join(job.metadata.name for job in jobs)
        raise ManifestError([f"{_name(source)} holds {len(jobs)} SFTJobs ({names}): give a file with one"])
    return jobs[0]


def load_manifests(source: Path | str) -> list[SFTJob]:
    """All SFTJobs of ``source`` in their order, at least one. Raises ``ManifestError`` with all problems of all."""
    documents = [document for document in _documents(source) if _is_meant(document)]
    if not documents:
        raise ManifestError([f"{_name(source)} holds no SFTJob: give apiVersion: {API_VERSION} and kind: {KIND}"])
    jobs, problems = [], []
    for number, document in enumerate(documents, start=1):
        try:
            jobs.append(SFTJob.from_manifest(document))
        except ValidationError as error:
            where = f"SFTJob {number} of {len(documents)}: " if len(documents) > 1 else ""
            problems += [f"{where}{sentence}" for sentence in sentences(error)]
    if problems:
        raise ManifestError(problems)
    return jobs


def _documents(source: Path | str) -> list[Any]:
    try:
        text = source if isinstance(source, str) else source.read_text(encoding="utf-8-sig")
        documents = read_documents(text)
    except OSError as error:
        raise ManifestError([f"{source}: {error.strerror or error}"]) from error
    except (UnicodeDecodeError, YamlError) as error:
        raise ManifestError([f"{_name(source)} is not a YAML file: {error}"]) from error
    return [item for document in documents for item in _items(document)]


def _items(document: Any) -> list[Any]:
    """The objects of a ``kind: List``, as kubectl takes it, or the one object."""
    if isinstance(document, dict) and document.get("kind") == "List" and isinstance(document.get("items"), list):
        return list(document["items"])
    return [document]


def _is_meant(document: Any) -> bool:
    """Whether ``document`` is, or was meant to be, an SFTJob; a Secret beside it in the same file is not."""
    if not isinstance(document, dict):
        return True
    kind = document.get("kind")
    return kind is None or str(kind).lower() == KIND.lower()


def _name(source: Path | str) -> str:
    return "the manifest" if isinstance(source, str) else str(source)
