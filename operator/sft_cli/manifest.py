"""Manifests from files: every command of the CLI reads them here, and refuses what the API server would refuse."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sft_api.v1alpha1.job import API_VERSION, KIND, SFTJob

from .kubernetes_yaml import ForeignValueError, YamlError, read_documents
from .overrides import Override, OverrideError, overridden
from .problems import Location, field_path, placed_sentences, sentences

STANDARD_INPUT = Path("-")
_SUFFIXES = (".json", ".yaml", ".yml")
"""Of the files of a folder that are read, as kubectl does."""
_SWITCHES = (
    "lora",
    "training.evaluation.earlyStopping",
    "training.dummyRun",
    "strategy.megatron",
    "monitoring.profile",
    "monitoring.memorySnapshot",
)
"""Fields of the spec that ask for something by being there, without any field of their own too."""

_GENERATED = "xxxxx"
"""In the place of the five letters that the API server puts behind a ``metadata.generateName``."""

_NOT_MADE_UP = (
    ": of metadata.generateName the API server makes another one for each object, and this is about one run; give it "
    "there (to sft run and sft export also as --set metadata.name=NAME)"
)


class ManifestError(ValueError):
    """A manifest that cannot be used; the text has one line per problem, each says what to change."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


def _no_warning(_: str) -> None:
    pass


def load_manifest(source: Path | str, name: str | None = None) -> SFTJob:
    """The SFTJob called ``name`` of ``source`` (as for ``load_manifests``), or its only one.

    Raises ``ManifestError``, also when there are several SFTJobs and none was named.
    """
    return load_overridden(source, name, ())[0]


def load_overridden(
    source: Path | str,
    name: str | None,
    overrides: Sequence[Override],
    *,
    generated_names: bool = False,
    on_warning: Callable[[str], None] = _no_warning,
) -> tuple[SFTJob, SFTJob | None]:
    """``load_manifest`` with ``overrides``, and the job of the manifest alone, where that is another one, and valid.

    ``name`` is the one in the manifest, whatever the overrides call the job. ``generated_names``: as for
    ``load_manifests`` one that has none is read as ``kubectl create`` takes it.
    """
    documents = _ours(source, generated_names=generated_names)
    meant = [number for number, (_, document) in enumerate(documents) if name in (None, _name_of(document))]
    given = {meant[0]: overrides} if len(meant) == 1 else {}
    jobs = _jobs(documents, given, on_warning)
    names = ", ".join(job.metadata.name for job in jobs)
    if not meant:
        raise ManifestError([f"{shown(source)} holds no SFTJob {name}, found {names}"])
    if len(meant) > 1:
        alike = len({_name_of(documents[number][1]) for number in meant}) == 1
        how = "give each a metadata.name, and choose" if alike else "choose"
        raise ManifestError([f"{shown(source)} holds {len(meant)} SFTJobs ({names}): {how} one with --job"])
    job, (_, document) = jobs[meant[0]], documents[meant[0]]
    with suppress(ValidationError):
        return job, SFTJob.from_manifest(document) if overrides else None
    return job, None


def load_manifests(
    source: Path | str, overrides: Sequence[Override] = (), *, on_warning: Callable[[str], None] = _no_warning
) -> list[SFTJob]:
    """All SFTJobs of ``source`` in their order, at least one, each with ``overrides``.

    ``source`` is the path of a file or folder, ``-`` for standard input, or the text itself. Documents of other kinds
    are passed over. One with a ``metadata.generateName`` alone gets such a name. ``on_warning`` is told of what is
    valid, and says the opposite of what it looks like.
    Raises ``ManifestError`` with all problems of all.
    """
    documents = _ours(source, generated_names=True)
    return _jobs(documents, dict.fromkeys(range(len(documents)), overrides), on_warning)


def _ours(source: Path | str, *, generated_names: bool) -> list[tuple[str, Any]]:
    """The documents of ``source`` that are, or were meant to be, SFTJobs, at least one; each with its origin."""
    is_one_of_many = isinstance(source, Path) and source.is_dir()
    documents = [
        (origin, _with_a_name(document) if generated_names else document)
        for origin, document in _documents(source)
        if (_is_ours(document) if is_one_of_many else _is_meant(document))
    ]
    if not documents:
        raise ManifestError([f"{shown(source)} holds no SFTJob: give apiVersion: {API_VERSION} and kind: {KIND}"])
    return documents


def _jobs(
    documents: Sequence[tuple[str, Any]],
    overrides: Mapping[int, Sequence[Override]],
    on_warning: Callable[[str], None],
) -> list[SFTJob]:
    """The jobs of all ``documents``, with the ``overrides`` of each. Raises ``ManifestError``."""
    jobs, problems, once = list[SFTJob](), list[str](), list[SFTJob]()
    for number, (origin, document) in enumerate(documents):
        where = f"SFTJob {number + 1} of {len(documents)}: " if len(documents) > 1 and not origin else origin
        changed, brought = document, list[tuple[Override, Location]]()
        try:
            if number in overrides and isinstance(document, dict):
                changed, brought = overridden(document, overrides[number])
            jobs.append(SFTJob.from_manifest(changed))
            once += [] if _is_generated(changed) else jobs[-1:]
            for field in _left_empty(changed):
                on_warning(
                    f"{jobs[-1].metadata.name}: spec.{field} has no value, which is as if it were absent: write "
                    f"{field.rpartition('.')[2]}: {{}} for it with its defaults, or take the line out"
                )
        except OverrideError as error:
            problems.append(f"{where}{error}")
        except ValidationError as error:
            alone = _problems_of(document) if brought else []
            for place, sentence in placed_sentences(error):
                by = _by(place, sentence, brought) if brought and sentence not in alone else ""
                made = _NOT_MADE_UP if place == ("metadata", "name") and _begin_of_name(changed) else ""
                problems.append(f"{where}{by}{sentence}{made}")
    problems += _doubles(once)
    if problems:
        raise ManifestError(problems)
    return jobs


def _problems_of(document: Any) -> list[str]:
    try:
        SFTJob.from_manifest(document)
    except ValidationError as error:
        return sentences(error)
    return []


def _by(place: Location, sentence: str, brought: Sequence[tuple[Override, Location]]) -> str:
    """Which overrides, each with what it ``brought``, the problem at ``place`` is of, as the begin of its sentence.

    A rule on a block says which fields it is about: of the overrides in that block those are meant.
    """
    near = [override for override, part in brought if all(a == b for a, b in zip(part, place, strict=False))]
    named = [override for override in near if field_path(override.path).removeprefix("spec.") in sentence]
    return f"{', '.join(map(str, named or near or [override for override, _ in brought]))}: "


def _metadata_of(document: Any) -> dict[str, Any]:
    metadata = document.get("metadata") if isinstance(document, dict) else None
    return metadata if isinstance(metadata, dict) else {}


def _name_of(document: Any) -> Any:
    return _metadata_of(document).get("name")


def _begin_of_name(document: Any) -> str:
    """The ``metadata.generateName`` of one that has no name."""
    metadata = _metadata_of(document)
    begin = metadata.get("generateName")
    return begin if isinstance(begin, str) and not metadata.get("name") else ""


def _is_generated(document: Any) -> bool:
    metadata = _metadata_of(document)
    return bool(metadata.get("name") == f"{metadata.get('generateName')}{_GENERATED}")


def _with_a_name(document: Any) -> Any:
    begin = _begin_of_name(document)
    return {**document, "metadata": {**document["metadata"], "name": begin + _GENERATED}} if begin else document


def _left_empty(document: dict[str, Any]) -> Iterator[str]:
    """Which of ``_SWITCHES`` a valid document names without a value: the API server drops nulls."""
    for field in _SWITCHES:
        *parents, last = field.split(".")
        block = document["spec"]
        for parent in parents:
            block = block.get(parent) or {}
        if last in block and block[last] is None:
            yield field


def shown(source: Path | str) -> str:
    """What a message calls ``source``."""
    if isinstance(source, str):
        return "the manifest"
    return "standard input" if source == STANDARD_INPUT else str(source)


def _doubles(jobs: list[SFTJob]) -> list[str]:
    counts = Counter((job.metadata.namespace, job.metadata.name) for job in jobs)
    return [
        f"{count} SFTJobs are called {name}: only the last would remain; give each a metadata.name"
        for (_, name), count in counts.items()
        if count > 1
    ]


def _documents(source: Path | str) -> Iterator[tuple[str, Any]]:
    """Every document, with a prefix for its problems where several files are read."""
    if isinstance(source, Path) and source.is_dir():
        files = sorted(file for file in source.iterdir() if file.suffix.lower() in _SUFFIXES and file.is_file())
        if not files:
            raise ManifestError([f"{source} holds no file that ends with {', '.join(_SUFFIXES)}"])
        for file in files:
            yield from ((f"{file}: ", document) for _, document in _documents(file))
        return
    try:
        documents = read_documents(_text(source))
    except OSError as error:
        raise ManifestError([f"{shown(source)}: {error.strerror or error}"]) from error
    except ForeignValueError as error:
        raise ManifestError([f"{shown(source)} cannot be sent to Kubernetes, which takes JSON: {error}"]) from error
    except UnicodeDecodeError as error:  # PowerShell writes UTF-16
        wrong = f"byte 0x{error.object[error.start]:02x} at position {error.start}"
        raise ManifestError([f"{shown(source)} is not a YAML file: it is not UTF-8 ({wrong}): save it so"]) from error
    except YamlError as error:
        raise ManifestError([f"{shown(source)} is not a YAML file: {error}"]) from error
    yield from (("", item) for document in documents for item in _items(document))


def _text(source: Path | str) -> str:
    if isinstance(source, str):
        return source
    if source == STANDARD_INPUT:
        return sys.stdin.buffer.read().decode("utf-8-sig")
    return source.read_text(encoding="utf-8-sig")


def _items(document: Any) -> list[Any]:
    """The objects of a ``kind: List``, as kubectl takes it, or the one object."""
    if isinstance(document, dict) and document.get("kind") == "List" and isinstance(document.get("items"), list):
        return list(document["items"])
    return [document]


def _is_ours(document: Any) -> bool:
    """Whether ``document`` says that it is an SFTJob: beside it in a folder may lie anything."""
    if not isinstance(document, dict):
        return False
    is_of_our_api = str(document.get("apiVersion")).startswith(f"{API_VERSION.partition('/')[0]}/")
    return is_of_our_api or str(document.get("kind")).lower() == KIND.lower()


def _is_meant(document: Any) -> bool:
    """Whether ``document`` is, or was meant to be, an SFTJob; a Secret beside it in the same file is not."""
    if not isinstance(document, dict):
        return True
    return document.get("kind") is None or _is_ours(document)
