"""The checkpoint store as trainer, operator and CLI see it: names of objects, claims, manifests.

Layout below ``checkpoint.uri``::

    attempts/00003.json                         claimed by a conditional create at every start of the group
    checkpoints/step-00001200-a00003/*.bin      raw tensor bytes, written once, never overwritten
    checkpoints/step-00001200-a00003/manifest.json   written last: without it the folder does not count
    status.json, export/

A manifest carries its own digest, so that a damaged one is refused, and never names anything outside its
folder. The digests prove integrity, not origin.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError
from pydantic.alias_generators import to_camel

FORMAT_VERSION = 1
ATTEMPTS_PREFIX = "attempts/"
CHECKPOINTS_PREFIX = "checkpoints/"
MANIFEST_NAME = "manifest.json"
STATUS_KEY = "status.json"
BEST_METRIC = "evalLoss"
"""Of ``RunState.metrics``: the lower, the better the checkpoint."""

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


class RunState(StoredModel):
    """Everything but tensors that a resume or a reader of the manifest needs; further scalars are kept."""

    model_config = ConfigDict(extra="allow")

    cursor: Count = 0
    """Position in the data stream, as the data pipeline counts it."""
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


class StoredFile(StoredModel):
    """One object of a checkpoint folder."""

    name: FileName
    size: Count
    """Bytes."""
    sha256: Sha256


class StoredItem(StoredModel):
    """A box of one tensor, stored as raw little-endian bytes in row-major order."""

    offsets: tuple[Count, ...]
    """Where the box starts in the whole tensor."""
    sizes: tuple[Count, ...]
    """Shape of the box."""
    file: FileName
    offset: Count
    """First byte within the file."""
    length: Count
    """Bytes."""
    sha256: Sha256


class StoredTensor(StoredModel):
    """One tensor of the saved state: its whole shape, and the boxes it was saved in."""

    dtype: str
    """torch's name without the module, for example ``bfloat16``."""
    shape: tuple[Count, ...]
    items: tuple[StoredItem, ...]


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
    tensors: dict[str, StoredTensor]

    @property
    def id(self) -> CheckpointId:
        return CheckpointId(attempt=self.attempt, step=self.step)

    @property
    def bytes(self) -> int:
        """Bytes of all files, without the manifest."""
        return sum(file.size for file in self.files)


class ManifestError(ValueError):
    """A manifest that is damaged, contradicts itself, or comes from a newer version of the format."""


def _digest(document: Mapping[str, Any]) -> str:
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def encode_manifest(manifest: Manifest) -> bytes:
    """JSON of ``manifest`` with its own digest in the field ``sha256``."""
    document = json.loads(manifest.model_dump_json(by_alias=True))
    document["sha256"] = _digest(document)
    return json.dumps(document, separators=(",", ":")).encode()


def decode_manifest(raw: bytes) -> Manifest:
    """The manifest in ``raw``, checked against its digest and for contradictions.

    Raises ManifestError with one sentence that says what is wrong.
    """
    try:
        document = json.loads(raw)
    except ValueError as error:
        raise ManifestError(f"the manifest is no JSON: {error}") from error
    if not isinstance(document, dict):
        raise ManifestError(f"the manifest is a JSON {type(document).__name__}, not an object")
    version = document.get("formatVersion")
    if version != FORMAT_VERSION:
        raise ManifestError(f"the manifest has format version {version!r}, this program reads {FORMAT_VERSION}")
    stated = document.pop("sha256", None)
    if stated != _digest(document):
        raise ManifestError("the manifest does not match its own digest: it was damaged or edited")
    try:
        manifest = Manifest.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ManifestError(f"the manifest's field {place} is wrong: {first['msg']}") from error
    _check_consistency(manifest)
    return manifest


def _check_consistency(manifest: Manifest) -> None:
    """Every item lies within a listed file and within its tensor, and the items fill each tensor."""
    sizes = {file.name: file.size for file in manifest.files}
    if len(sizes) != len(manifest.files):
        raise ManifestError("the manifest lists a file twice")
    for name, tensor in manifest.tensors.items():
        volume = 0
        for item in tensor.items:
            if item.file not in sizes:
                raise ManifestError(f"tensor {name!r} lies in {item.file!r}, which the manifest does not list")
            if item.offset + item.length > sizes[item.file]:
                raise ManifestError(f"tensor {name!r} ends beyond the end of {item.file!r}")
            if not len(item.offsets) == len(item.sizes) == len(tensor.shape):
                raise ManifestError(f"an item of tensor {name!r} has another number of dimensions")
            ends = (offset + size for offset, size in zip(item.offsets, item.sizes, strict=True))
            if any(end > limit for end, limit in zip(ends, tensor.shape, strict=True)):
                raise ManifestError(f"an item of tensor {name!r} lies outside its shape {list(tensor.shape)}")
            volume += math.prod(item.sizes)
        if volume != math.prod(tensor.shape):
            raise ManifestError(
                f"tensor {name!r} of shape {list(tensor.shape)} has {math.prod(tensor.shape)} elements, "
                f"its items hold {volume}"
            )


def missing_or_wrong(manifest: Manifest, sizes: Mapping[str, int]) -> list[str]:
    """What is wrong with a checkpoint's files, one sentence each; empty when all are there.

    ``sizes`` maps the file names found in the checkpoint's folder to their bytes.
    """
    problems = []
    for file in manifest.files:
        found = sizes.get(file.name)
        if found is None:
            problems.append(f"{file.name} is missing")
        elif found != file.size:
            problems.append(f"{file.name} has {found} bytes instead of {file.size}")
    return problems
