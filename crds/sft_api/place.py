"""The place of a run: what lies at its root and says whose it is, as trainer, operator and CLI see it.

``run.json`` says which run a place belongs to. It is created once, before anything is trained, and never written over
while anything is saved there. Only name and numbers are compared: whoever has the same ones is the same run, whichever
object, cluster or machine starts it.
"""

import hashlib
import json
from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Literal, NamedTuple, Self, TypeVar

from pydantic import Field, JsonValue, ValidationError

from .checkpoints import (
    BEST_METRIC,
    CURVE_KEY,
    EVENTS_PREFIX,
    METRICS_PREFIX,
    PROFILE_PREFIX,
    STATUS_KEY,
    CheckpointId,
    Count,
    Manifest,
    Sha256,
    StoredModel,
    checkpoint_id,
    digest_of,
)
from .numbers import Numbers, NumbersError
from .progress import STOPPED_EARLY_CHARACTERS, Phase, TrainingProgress
from .report import checkpoint_status, checkpoints_status, finite
from .v1alpha1 import HELD_OUT, ExportStatus, HubSpec, HubStatus, SFTJobSpec

RUN_KEY = "run.json"
ALIVE_KEY = "alive.json"
DONE_KEY = "done.json"
RUN_FOLDERS = (METRICS_PREFIX, EVENTS_PREFIX, PROFILE_PREFIX)
RUN_FILES = (STATUS_KEY, CURVE_KEY)
"""With checkpoints, hangs, tokens, claims of attempts and what says whose place it is, all that a run writes there but
its export."""
EXPORT_CONFIG = "config.json"
"""The last file of an export: a folder without it is not a model yet."""
EXPORT_ADAPTER_CONFIG = "adapter_config.json"
"""The last file of an export of adapters, in its place."""
EXPORT_RECORD = "training-run.json"
"""Lies beside ``config.json``, from before the first file of weights on."""
HUB_RECORD = "hub-copy.json"
"""Lies beside it once a copy of the model is on the hub."""
EXPORT_MARK = "unfinished-export.json"
"""Lies in the folder while an export goes on, and says of what."""
EXPORT_WEIGHTS = "model"
"""With which the names of all files of weights begin."""
EXPORT_ADAPTER = "adapter_model.safetensors"
"""The file of adapters, in their place."""
ExportForm = Literal["model", "adapter"]
"""What an export holds: a whole model, or the adapters of one."""
ExportChoice = Literal["last", "best"]
"""Which checkpoint a complete run exports."""
ORIGIN_FIELD = "checkpoint.resume.from"
VERSION = 1
LONGEST_RECORD = 16 * 2**20
"""Bytes, so many of which are read at most: a record, the claim of an attempt, a report or a sign of life takes some
kB, and others may write there."""
_OWN_DIGEST = "sha256"
"""Of all else in a record. Those of older versions have none."""
TAKE_OVER_VARIABLE = "SFT_TAKE_OVER"
"""Of the environment of a trainer: the word by which a user asks that it takes its place over, whoever is alive there.
A word counts for one claim of an attempt."""


Stored = TypeVar("Stored", bound=StoredModel)


class RecordError(ValueError):
    """A record that cannot be read: half of one, damaged, or of a later version; the text says what."""


class RunRecord(StoredModel):
    """Which run a place belongs to."""

    version: Annotated[int, Field(ge=1)] = VERSION
    name: str
    digest: Sha256
    """Of the numbers."""
    numbers: dict[str, JsonValue]
    """The numbers themselves (``Numbers.as_record``), so that another run can be told what differs."""
    revisions: dict[str, str] = Field(default_factory=dict)
    """By field below ``spec``: the commit of what lies on the hub, the digest of a bucket's listing for the rest; for
    ``checkpoint.resume.from`` a ``Pin``."""
    namespace: str
    """Of who made it: told, not compared, like all that follows."""
    uid: str
    created: datetime
    record_id: str
    """Tells a record from another one of the same run."""

    def differences(self, name: str, numbers: Numbers) -> list[str]:
        """Every field in which another run differs, with both values: that of the record, then the other's.

        Raises ``NumbersError`` when this program cannot read the record's numbers.
        """
        named = [] if name == self.name else [f"metadata.name: {json.dumps(self.name)} -> {json.dumps(name)}"]
        return [*named, *Numbers.read(self.numbers).differences(numbers)]


class Beat(StoredModel):
    """A sign of life of who trains in a place: written again and again, each time with another count."""

    attempt: Annotated[int, Field(ge=1)]
    name: str
    namespace: str
    uid: str
    host: str
    count: int = 0
    ended: str = ""
    """How it ended, when it could still say so: nobody has to wait for another sign then."""

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name} (uid {self.uid}, attempt {self.attempt}, on {self.host})"


class Done(StoredModel):
    """The run is complete, and its last checkpoint was found whole."""

    version: Annotated[int, Field(ge=1)] = VERSION
    step: Count
    attempt: Annotated[int, Field(ge=1)]
    """With the step, its last checkpoint."""
    stopped_early: str = ""
    """Why it made no more steps; empty where it made all of them."""
    best: str = ""
    """Folder of the checkpoint that had the lowest evaluation loss then; empty where none was evaluated, and in what
    was written before there was a choice: then only the checkpoints tell."""

    def exported(self, choice: ExportChoice) -> CheckpointId:
        """The checkpoint that is exported."""
        best = checkpoint_id(self.best) if choice == "best" else None
        return best or CheckpointId(self.attempt, self.step)


def form_of(spec: SFTJobSpec) -> ExportForm:
    """What a run of ``spec`` exports."""
    return "adapter" if spec.lora is not None and not spec.export.merge_adapter else "model"


class ExportRecord(StoredModel):
    """Of which run and checkpoint the model in a folder is. Equal for equal models."""

    name: str
    digest: str
    """Of the numbers of the run."""
    checkpoint: str
    """Its folder."""
    index: str = ""
    """SHA-256 of its index, which has a digest of every piece; empty where it has none, or is gone."""
    form: ExportForm = "model"
    files: dict[str, Annotated[int, Field(ge=0)]] = Field(default_factory=dict)
    """Bytes of each file of weights, once all are there."""
    beside: list[str] = Field(default_factory=list)
    """The names of all other files of the model, with those; none in what was written before they were told."""

    @property
    def config(self) -> str:
        """Name of the file that comes last."""
        return EXPORT_ADAPTER_CONFIG if self.form == "adapter" else EXPORT_CONFIG

    @property
    def weights(self) -> str:
        """With which the names of the files of weights begin."""
        return EXPORT_ADAPTER if self.form == "adapter" else EXPORT_WEIGHTS

    @classmethod
    def of(cls, name: str, manifest: Manifest, form: ExportForm = "model") -> Self:
        """The record of an export of the checkpoint of ``manifest`` that begins."""
        try:
            digest = Numbers.read(manifest.run.numbers).digest
        except NumbersError:
            digest = manifest.run.config_digest
        return cls(name=name, digest=digest, checkpoint=manifest.id.folder, index=_index_of(manifest), form=form)

    @classmethod
    def of_done(
        cls,
        name: str,
        numbers: Numbers,
        done: Done,
        found: Manifest | None,
        form: ExportForm = "model",
        choice: ExportChoice = "last",
    ) -> Self:
        """The record of the export that belongs to a complete run; ``found`` is its checkpoint, if that is there.

        Without its checkpoint a model that is there is taken for its own.
        """
        folder = done.exported(choice).folder
        index = _index_of(found) if found else ""
        return cls(name=name, digest=numbers.digest, checkpoint=folder, index=index, form=form)

    def encoded(self) -> bytes:
        """As JSON, for people too."""
        return json.dumps(self.model_dump(mode="json", by_alias=True), indent=1).encode() + b"\n"

    def is_whole(self, found: "ExportRecord | None", sizes: Mapping[str, int]) -> bool:
        """Whether the model of this record lies in a folder, whole as far as sizes tell.

        ``found`` is the record there, ``sizes`` the bytes of its weights, its ``config`` and ``EXPORT_MARK`` by
        name. A run that was removed and trained again has checkpoints of the same names: they are told apart by their
        indices, where this one has one.
        """
        if found is None or not found.files:
            return False
        wanted = self.model_copy(update={"index": self.index or found.index})
        if found.model_copy(update={"files": {}, "beside": []}) != wanted:
            return False
        if self.config not in sizes or EXPORT_MARK in sizes:
            return False
        return all(sizes.get(name) == size for name, size in found.files.items())


class HubRecord(StoredModel):
    """Which copy of an export is on the hub."""

    repository: str
    url: str
    """Of the repository, with the hub that it is on: told, not compared."""
    revision: str
    commit: str
    export: Sha256
    """Of the bytes of ``EXPORT_RECORD``, when it was copied."""

    @classmethod
    def of(cls, hub: HubSpec, export: bytes, copy: HubStatus) -> Self:
        """That of ``copy``, which ``hub`` asked for while ``export`` was in ``EXPORT_RECORD``."""
        digest = hashlib.sha256(export).hexdigest()
        return cls(repository=hub.repository, export=digest, **copy.model_dump())

    def copy_of(self, hub: HubSpec, export: bytes) -> HubStatus | None:
        """The copy, where ``hub`` asks for it, of the export with ``export`` in ``EXPORT_RECORD``."""
        wanted = (hub.repository, hub.branch, hashlib.sha256(export).hexdigest())
        if (self.repository, self.revision, self.export) != wanted:
            return None
        return HubStatus(url=self.url, revision=self.revision, commit=self.commit)

    def encoded(self) -> bytes:
        """As JSON, for people too."""
        return json.dumps(self.model_dump(mode="json", by_alias=True), indent=1).encode() + b"\n"


def _index_of(manifest: Manifest) -> str:
    """The digest of the index of a checkpoint; empty where its format has none."""
    return manifest.index.sha256 if manifest.index else ""


def complete_progress(
    uri: str, done: Done, last: Manifest | None, reported: TrainingProgress | None, export: ExportStatus | None
) -> TrainingProgress:
    """What is told of a run in ``uri`` that was complete before this start: what it ``reported`` last, or no more
    than its last checkpoint says."""
    if reported is None or reported.step != done.step:
        kept, metrics = [], last.run.metrics if last else {}
        eval_loss = finite(metrics.get(BEST_METRIC))
        if last is not None:
            folder = f"{uri}/{last.id.prefix}".rstrip("/")
            kept = [checkpoint_status(last.id, folder, last.created, last.bytes, eval_loss, last.run.evaluated_on)]
        reported = TrainingProgress(
            attempt=done.attempt,
            step=done.step,
            total_steps=None if done.stopped_early else done.step,
            checkpoints=checkpoints_status(kept),
            loss=finite(metrics.get("loss")),
            eval_loss=eval_loss,
            eval_accuracy=finite(metrics.get("evalAccuracy")),
        )
    update = {"resumed_from_step": done.step, "export": export, "remaining_seconds": None}
    ended = {"phase": Phase.COMPLETE, "stopped_early": done.stopped_early[:STOPPED_EARLY_CHARACTERS]}
    return reported.model_copy(update={**update, **ended, "phase_detail": "", "storage_outage": None})


class Pin(NamedTuple):
    """Which checkpoint of another run this one began from, by its content."""

    checkpoint: CheckpointId
    sha256: str
    """Of the bytes of its manifest, which has the digests of all the rest."""

    def __str__(self) -> str:
        return f"{self.checkpoint.folder}@{self.sha256}"

    @classmethod
    def read(cls, text: str) -> Self:
        """What ``str`` gave; raises RecordError."""
        folder, _, sha256 = text.partition("@")
        identity = checkpoint_id(folder)
        if identity is None or not sha256:
            raise RecordError(f"its revision of {ORIGIN_FIELD} is no checkpoint: {text[:100]}")
        return cls(identity, sha256)


def continued_from(uri: str, step: int, theirs: Numbers, mine: Numbers) -> str:
    """What to write into the manifest of a run with the numbers ``mine`` that goes on where another one, ``theirs``,
    saved ``step`` in ``uri``: as YAML below ``spec``, in one line. Empty where it cannot: with other adapters or
    trained modules, or with them beside another model."""
    other_base = mine.has_base and mine.values["model.uri"] != theirs.values["model.uri"]
    if other_base or theirs.trained_differences(mine):
        return ""
    last = mine.values.get("training.steps")
    is_over = isinstance(last, int) and last <= step
    at_step_0 = is_over or theirs.position_differences(mine) or not theirs.has_moments_for(mine)
    what = "weights" if at_step_0 else "everything"
    return f"checkpoint: {{resume: {{from: {{uri: {json.dumps(uri)}, step: {step}, what: {what}}}}}}}"


def doubts_of_weights(theirs: Numbers, mine: Numbers) -> str:
    """What to say of weights that a run with the numbers ``theirs`` trained, where one with ``mine`` begins with them:
    the same weights give other values with another config, and know rows that only ``mine`` holds out. Empty where
    there is nothing to say."""
    config, rows = (", ".join(changes) for changes in (theirs.override_differences(mine), theirs.rows_shown(mine)))
    told = [f"its weights were trained with another config of the model ({config})"] if config else []
    if rows:
        told.append(
            f"its weights were trained on rows that are held out here ({rows}): the loss of {HELD_OUT} is no measure "
            "for what they have not seen"
        )
    return "; ".join(told)


def folder_name(name: str, numbers: Numbers) -> str:
    """The folder of a run below its namespace's, where nobody says where it saves: another run gets another one."""
    return f"{name}-{numbers.digest[:16]}"


def encode_record(record: RunRecord) -> bytes:
    """``record`` as JSON with its own digest, for people too."""
    return _encoded(record)


def encode_done(done: Done) -> bytes:
    """``done`` as JSON with its own digest."""
    return _encoded(done)


def _encoded(stored: StoredModel) -> bytes:
    document = json.loads(stored.model_dump_json(by_alias=True))
    document[_OWN_DIGEST] = digest_of(document)
    return json.dumps(document, indent=1).encode() + b"\n"


def decode_record(raw: bytes) -> RunRecord:
    """The record in ``raw``; raises RecordError."""
    record = _decoded(raw, RunRecord)
    try:
        if Numbers.read(record.numbers).digest != record.digest:
            raise RecordError("its numbers do not match their digest: it was damaged or edited")
    except NumbersError as error:
        raise RecordError(str(error)) from error
    return record


def decode_done(raw: bytes) -> Done:
    """The word in ``raw``; raises RecordError."""
    return _decoded(raw, Done)


def _decoded(raw: bytes, model: type[Stored]) -> Stored:
    if len(raw) >= LONGEST_RECORD:
        raise RecordError(f"it has {LONGEST_RECORD} bytes or more, which no record needs")
    try:
        document = json.loads(raw)
        # An escape may be half of a character, of which no status, and no terminal, can be told.
        json.dumps(document, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise RecordError(f"it is no whole record ({error})") from error
    version = document.get("version") if isinstance(document, dict) else None
    if isinstance(version, int) and version > VERSION:
        raise RecordError(f"it is of version {version}, this program reads version {VERSION}")
    if isinstance(document, dict) and document.pop(_OWN_DIGEST, None) not in (None, digest_of(document)):
        raise RecordError("it does not match its own digest: it was damaged or edited")
    try:
        return model.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise RecordError(f"it is no whole record ({place or 'it'}: {first['msg']})") from error
