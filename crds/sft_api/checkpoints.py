"""The checkpoint store as trainer, operator and CLI see it: names of objects, claims, manifests.

Layout below ``checkpoint.uri``::

    run.json                                    whose place it is (``place``)
    alive.json                                  put each minute by who trains there (``place``)
    done.json                                   the run is complete (``place``)
    attempts/00003.json                         claimed by a conditional create at every start of the group; says how
                                                the attempts before it ended
    checkpoints/step-00001200-a00003/*.bin      raw tensor bytes, written once, never overwritten
    checkpoints/step-00001200-a00003/*.idx      which tensor's bytes lie where, with the digest of every piece
    checkpoints/step-00001200-a00003/manifest.json   written last: without it the folder does not count
    metrics/, tensorboard/, curve.svg           the losses of the run
    profile/                                    traces of some of its steps, and of their memory
    hangs/step-00001200-a00003/                 what the processes of a group that hung were doing
    tokenized/                                  the data as tokens, until the run is complete
    status.json, export/

A manifest carries its own digest and that of the index, so that damaged ones are refused, and never names anything
outside its folder. The digests prove integrity, not origin. Whoever wants no tensors needs no index.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError
from pydantic.alias_generators import to_camel

from .progress import MOST_LAST_INCIDENTS, Incident

FORMAT_VERSION = 3
"""Those before are still read. The digests of format 2 were SHA-256, and format 1 had the index in the manifest."""
ATTEMPTS_PREFIX = "attempts/"
CHECKPOINTS_PREFIX = "checkpoints/"
MANIFEST_NAME = "manifest.json"
INDEX_SUFFIX = ".idx"
METRICS_PREFIX = "metrics/"
EVENTS_PREFIX = "tensorboard/"
PROFILE_PREFIX = "profile/"
HANGS_PREFIX = "hangs/"
TOKENIZED_PREFIX = "tokenized/"
TOKENIZED_KEY = re.compile(rf"{TOKENIZED_PREFIX}[0-9a-f]{{64}}\.(arrow|json)")
"""What a run keeps there; data of others may lie in a folder of that name."""
CURVE_KEY = "curve.svg"
STATUS_KEY = "status.json"
BEST_METRIC = "evalLoss"
"""Of ``RunState.metrics``: the lower, the better the checkpoint."""

_CARRIED_CHARACTERS = 500

_ATTEMPT_KEY = re.compile(r"attempts/(\d{5,})\.json")
_FOLDER = re.compile(r"step-(\d{8,})-a(\d{5,})")

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
Count = Annotated[int, Field(ge=0)]


class CheckpointId(NamedTuple):
    """Orders checkpoints: the newest has the highest (attempt, step), so a stale attempt never wins."""

    attempt: int
    step: int

    @property
    def folder(self) -> str:
        """Folder name below ``checkpoints/``."""
        return f"step-{self.step:08d}-a{self.attempt:05d}"

    @property
    def prefix(self) -> str:
        """Key prefix of everything that belongs to the checkpoint, with a slash at its end."""
        return f"{CHECKPOINTS_PREFIX}{self.folder}/"

    @property
    def manifest_key(self) -> str:
        return f"{self.prefix}{MANIFEST_NAME}"


def checkpoint_id(folder: str) -> CheckpointId | None:
    """The checkpoint a folder name stands for, or None when it is no checkpoint's name."""
    match = _FOLDER.fullmatch(folder)
    return CheckpointId(attempt=int(match[2]), step=int(match[1])) if match else None


def run_place(uri: str) -> str | None:
    """The place of the run of which the folder ``uri`` is a checkpoint; None when it is no such folder."""
    parent, _, folder = uri.rpartition("/")
    inside = f"/{CHECKPOINTS_PREFIX}".rstrip("/")
    return parent.removesuffix(inside) if checkpoint_id(folder) and parent.endswith(inside) else None


def attempt_key(attempt: int) -> str:
    """Key of the claim of attempt number ``attempt``."""
    return f"{ATTEMPTS_PREFIX}{attempt:05d}.json"


def newest_attempt(keys: Iterable[str]) -> int:
    """Highest attempt number among ``keys``; 0 when nothing was claimed yet."""
    return max((int(match[1]) for key in keys if (match := _ATTEMPT_KEY.fullmatch(key))), default=0)


class StoredModel(BaseModel):
    """Base of what is written to the store: camelCase JSON, unknown fields of newer versions ignored."""

    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, extra="ignore", frozen=True, protected_namespaces=()
    )


class AttemptClaim(StoredModel):
    """Who claimed an attempt. The claim id tells one's own claim from another's after a lost answer."""

    attempt: Annotated[int, Field(ge=1)]
    job_uid: str
    claim_id: str
    host: str
    time: datetime
    incidents: tuple[Incident, ...] = ()
    """How the attempts of the same object before this one ended: nobody may have asked the pods while they lived."""
    took_over: str = ""
    """The word by which somebody asked that this object takes the place over from whoever trains there."""


def carried(*told: Iterable[Incident]) -> tuple[Incident, ...]:
    """The incidents that claims and last words carry: the newest that were ``told``, each once, as it was told last."""
    known = {incident.id: incident for incidents in told for incident in incidents}
    newest = sorted(known.values(), key=lambda incident: incident.time)[-MOST_LAST_INCIDENTS:]
    return tuple(incident.model_copy(update={"message": incident.message[:_CARRIED_CHARACTERS]}) for incident in newest)


class RunState(StoredModel):
    """Everything but tensors that a resume or a reader of the manifest needs; further scalars are kept."""

    model_config = ConfigDict(extra="allow")

    cursor: Count = 0
    """Position in the data stream, as the data pipeline counts it."""
    updates: Count = 0
    """Updates that the optimizer made: steps less those that were skipped. Format 1 kept them beside the moments."""
    metrics: dict[str, float | None] = {}
    """Metrics at this step (``evalLoss`` decides what is best); NaN and infinities become null."""
    schedule: dict[str, JsonValue] = {}
    """State of the learning-rate schedule and other scalar state of the optimizer."""
    plan: dict[str, JsonValue] = {}
    """The plan of the run, as given to the trainer."""
    environment: dict[str, JsonValue] = {}
    """Versions, thread counts, CPU capability: what bit-equal resume depends on."""
    config_digest: str = ""
    """Digest of the numbers of the run."""
    numbers: dict[str, JsonValue] = {}
    """The numbers themselves (``Numbers.as_record``), so that a resume with others can say which."""
    base_digest: str = ""
    """Of the model that the run started from, as the trainer computes it; empty where it was not recorded.

    A checkpoint that lacks tensors of the model, because they are not trained, means nothing without that base."""
    eval_data: dict[str, str] = {}
    """Digest of the tokenised examples of every evaluation set, by its name; empty where it was not recorded."""

    @property
    def evaluated_on(self) -> str:
        """What ``evalLoss`` is of: only losses of the same can be compared. Empty where it was not recorded."""
        # Names of sets and their order change no loss over all of them.
        return digest_of({"sets": sorted(self.eval_data.values())})[:16] if self.eval_data else ""


class StoredFile(StoredModel):
    """One object of a checkpoint folder. What its bytes must be, the index says piece by piece."""

    name: FileName
    size: Count
    """Bytes."""


class StoredIndex(StoredModel):
    """The object that says where the bytes of every tensor lie."""

    name: FileName
    size: Count
    """Bytes."""
    sha256: Sha256
    tensors: Count
    """How many it names."""


class Manifest(StoredModel):
    """What a committed checkpoint holds. Written last, by a conditional create."""

    format_version: int = FORMAT_VERSION
    step: Count
    """Optimizer steps taken."""
    attempt: Annotated[int, Field(ge=1)]
    job_uid: str
    world_size: Annotated[int, Field(ge=1)]
    """Ranks that wrote it; any number may read it."""
    created: datetime
    run: RunState
    files: tuple[StoredFile, ...]
    """Raw bytes of tensors; the index names them by their place in this list."""
    index: StoredIndex | None = None
    """None in format 1."""
    names_version: Annotated[int, Field(ge=1)] = 1
    """Of the canonical names of tensors. Format 1 had the names of modules."""
    kinds: dict[str, Count] = {}
    """Bytes of each kind of tensor: ``weight``, and the moments of the optimizer. Empty in format 1."""

    @property
    def id(self) -> CheckpointId:
        return CheckpointId(attempt=self.attempt, step=self.step)

    @property
    def bytes(self) -> int:
        """Of all tensors."""
        return sum(file.size for file in self.files)


class ManifestError(ValueError):
    """A manifest that is damaged, contradicts itself, or comes from a newer version of the format."""


def digest_of(document: Mapping[str, Any]) -> str:
    """SHA-256 of a JSON object, however it is written."""
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def encode_manifest(manifest: Manifest) -> bytes:
    """JSON of ``manifest`` with its own digest in the field ``sha256``."""
    document = json.loads(manifest.model_dump_json(by_alias=True))
    document["sha256"] = digest_of(document)
    return json.dumps(document, separators=(",", ":")).encode()


def decode_document(raw: bytes) -> dict[str, Any]:
    """The JSON of a manifest of any format that is read, checked against its digest.

    Raises ManifestError with one sentence that says what is wrong.
    """
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"the manifest is no JSON: {error}") from error
    if not isinstance(document, dict):
        raise ManifestError(f"the manifest is a JSON {type(document).__name__}, not an object")
    version = document.get("formatVersion")
    if version not in range(1, FORMAT_VERSION + 1):
        raise ManifestError(f"the manifest has format version {version!r}, this program reads 1 to {FORMAT_VERSION}")
    stated = document.pop("sha256", None)
    if stated != digest_of(document):
        raise ManifestError("the manifest does not match its own digest: it was damaged or edited")
    return document


def decode_manifest(raw: bytes) -> Manifest:
    """The manifest in ``raw``, checked against its digest and for contradictions.

    Of a manifest of format 1 that is all but the places of its tensors, which ``decode_document`` has. Raises
    ManifestError with one sentence that says what is wrong.
    """
    document = decode_document(raw)
    try:
        manifest = Manifest.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ManifestError(f"the manifest's field {place} is wrong: {first['msg']}") from error
    _check_consistency(manifest)
    return manifest


def _check_consistency(manifest: Manifest) -> None:
    """No file is listed twice, and all bytes are those of some kind of tensor."""
    objects = _objects(manifest)
    if len({name for name, _ in objects}) != len(objects):
        raise ManifestError("the manifest lists a file twice")
    if manifest.format_version == 1:
        return
    if manifest.index is None:
        raise ManifestError("the manifest names no index of its tensors")
    if sum(manifest.kinds.values()) != manifest.bytes:
        raise ManifestError(
            f"the manifest's files have {manifest.bytes} bytes, its tensors {sum(manifest.kinds.values())}"
        )


def _objects(manifest: Manifest) -> list[tuple[str, int]]:
    """Name and bytes of everything that the manifest counts on."""
    index = [] if manifest.index is None else [(manifest.index.name, manifest.index.size)]
    return [*((file.name, file.size) for file in manifest.files), *index]


def missing_or_wrong(manifest: Manifest, sizes: Mapping[str, int]) -> list[str]:
    """What is wrong with a checkpoint's files, one sentence each; empty when all are there.

    ``sizes`` maps the file names found in the checkpoint's folder to their bytes.
    """
    problems = []
    for name, size in _objects(manifest):
        found = sizes.get(name)
        if found is None:
            problems.append(f"{name} is missing")
        elif found != size:
            problems.append(f"{name} has {found} bytes instead of {size}")
    return problems
