"""Pure: what lies in the place of a run, as text and as a document."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sft_api.checkpoints import BEST_METRIC, CHECKPOINTS_PREFIX, FORMAT_VERSION, CheckpointId
from sft_api.place import Beat, Done, RunRecord
from sft_api.report import best_of
from sft_api.times import timestamp
from sft_trainer.checkpoint.catalog import status_of
from sft_trainer.checkpoint.inspecting import Folder

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_HEADER = ("STEP", "ATTEMPT", "SAVED", "SIZE", "LOSS", "EVAL LOSS", "STATE", "IS")


@dataclass(frozen=True)
class Place:
    """Everything that is known of the place of a run."""

    uri: str
    record: RunRecord | None
    done: Done | None
    sign: Beat | bytes | None
    """Of life, the last one."""
    attempts: int
    """Claimed so far."""
    folders: Sequence[Folder]
    """Newest first."""
    problems: Sequence[str] = ()
    """Records that are there and cannot be read."""

    def roles(self) -> Mapping[CheckpointId, list[str]]:
        """What each checkpoint is that can be gone on from: newest, best, final."""
        usable = [folder for folder in self.folders if folder.manifest is not None and not folder.problem]
        roles: dict[CheckpointId, list[str]] = {folder.id: [] for folder in usable}
        if usable:
            roles[usable[0].id].append("newest")
        best = best_of([status_of(folder.manifest, self.uri) for folder in usable if folder.manifest is not None])
        if best:
            roles[CheckpointId(best[0].attempt, best[0].step)].append("best")
        final = CheckpointId(self.done.attempt, self.done.step) if self.done else None
        if final in roles:
            roles[final].append("final")
        return roles


def state_of(folder: Folder) -> str:
    """``complete``, ``unfinished``, or ``unusable``."""
    if not folder.problem:
        return "complete"
    return "unfinished" if folder.is_unfinished else "unusable"


def size_text(size: int) -> str:
    """``size`` bytes for people: 12.3 MiB."""
    value, unit = float(size), _UNITS[0]
    for unit in _UNITS:
        if value < 1024 or unit == _UNITS[-1]:
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def lines_of(place: Place) -> list[str]:
    """The run's record, then a table of its checkpoints, then why some are none."""
    lines = [f"{label:<8}{text}" for label, text in _about(place)]
    if not place.folders:
        return [*lines, f"There is no checkpoint{_elsewhere(place)}."]
    roles = place.roles()
    lines += ["", *_table([_HEADER, *(_row(folder, roles) for folder in place.folders)])]
    problems = [f"{folder.id.folder}: {folder.problem}" for folder in place.folders if folder.problem]
    notes = [
        f"{folder.id.folder}: of format {folder.manifest.format_version}, which is read, and written no more"
        for folder in place.folders
        if folder.manifest is not None and folder.manifest.format_version < FORMAT_VERSION
    ]
    return [*lines, *([""] if problems or notes else []), *problems, *notes]


def _elsewhere(place: Place) -> str:
    """Where they are when the folder of a run that holds them was given in place of the run's own."""
    run = place.uri.removesuffix(f"/{CHECKPOINTS_PREFIX}".rstrip("/"))
    return f": those of a run in {run} are listed with that place" if run != place.uri and not place.record else ""


def _about(place: Place) -> list[tuple[str, str]]:
    lines = [("Place", place.uri)]
    record, sign = place.record, place.sign
    if record is not None:
        lines.append(
            (
                "Run",
                f"{record.name}, begun {timestamp(record.created)} in namespace {record.namespace} (uid {record.uid})",
            )
        )
        lines.append(("Numbers", record.digest[:16]))
        lines += [("Pinned", f"{field} {revision}") for field, revision in sorted(record.revisions.items())]
    elif not place.problems:
        lines.append(("Run", "there is no record (run.json): nothing was trained here, or by an older version"))
    if place.done is not None:
        early = f", stopped early {place.done.stopped_early}" if place.done.stopped_early else ""
        lines.append(("State", f"complete since step {place.done.step}{early}"))
    elif isinstance(sign, Beat):
        lines.append(("State", f"ended: {sign.ended}" if sign.ended else "did not say that it ended"))
    if isinstance(sign, Beat):
        lines.append(("Writer", str(sign)))
    return [*lines, *(("Problem", problem) for problem in place.problems)]


def _row(folder: Folder, roles: Mapping[CheckpointId, list[str]]) -> tuple[str, ...]:
    manifest = folder.manifest
    metrics = manifest.run.metrics if manifest else {}
    return (
        str(folder.id.step),
        str(folder.id.attempt),
        timestamp(manifest.created) if manifest else "-",
        size_text(folder.size),
        _loss(metrics.get("loss")),
        _loss(metrics.get(BEST_METRIC)),
        state_of(folder),
        ", ".join(roles.get(folder.id, [])),
    )


def _loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def document_of(place: Place) -> dict[str, Any]:
    """The same for programs."""
    record, sign, roles = place.record, place.sign, place.roles()
    return {
        "uri": place.uri,
        "run": record.model_dump(mode="json", by_alias=True, exclude={"numbers"}) if record else None,
        "complete": place.done.model_dump(mode="json", by_alias=True) if place.done else None,
        "writer": sign.model_dump(mode="json", by_alias=True) if isinstance(sign, Beat) else None,
        "attempts": place.attempts,
        "problems": list(place.problems),
        "checkpoints": [
            {
                "folder": folder.id.folder,
                "step": folder.id.step,
                "attempt": folder.id.attempt,
                "time": timestamp(folder.manifest.created) if folder.manifest else None,
                "sizeBytes": folder.size,
                "loss": folder.manifest.run.metrics.get("loss") if folder.manifest else None,
                "evalLoss": folder.manifest.run.metrics.get(BEST_METRIC) if folder.manifest else None,
                "formatVersion": folder.manifest.format_version if folder.manifest else None,
                "state": state_of(folder),
                "is": roles.get(folder.id, []),
                "problem": folder.problem,
            }
            for folder in place.folders
        ],
    }
