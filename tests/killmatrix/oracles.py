"""What must hold of a run whatever is done to it; every breach is a sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sft_api.checkpoints import MANIFEST_NAME, CheckpointId, checkpoint_id
from sft_api.progress import TrainingProgress
from sft_trainer.checkpoint.catalog import Catalog
from sft_trainer.checkpoint.inspecting import damage, folders_of
from sft_trainer.checkpoint.local import LocalStore
from tests.e2e.campaign import curve_mismatch
from tests.parity.runs import step_records

from .told import Told

Records = dict[int, dict[str, Any]]


class Oracles:
    """Watches one run, whose store lies in ``folder``, beside the curve that it must have."""

    def __init__(self, folder: Path, expected: Records) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._store = LocalStore(folder)
        self._expected = expected
        self.breaches: list[str] = []
        self.attempts: list[int] = []
        """In the order in which they were claimed."""
        self.resumed: list[CheckpointId] = []
        """What was loaded."""
        self.tolerates_ruins = False
        """Whether there may be folders with a manifest and without their files, which nothing loads."""
        self._seen = {"endpoint": TrainingProgress(), "status.json": TrainingProgress()}
        self._highest_attempt = dict.fromkeys(self._seen, 0)
        self._highest_latest: dict[str, CheckpointId] = {}

    def newest(self) -> CheckpointId | None:
        """The newest checkpoint that has a manifest."""
        return max(
            (one for one, files in Catalog(self._store).folders().items() if MANIFEST_NAME in files), default=None
        )

    def committed(self) -> list[CheckpointId]:
        """Every checkpoint that has a manifest, newest first."""
        return [one for one, files in Catalog(self._store).folders().items() if MANIFEST_NAME in files]

    def hear(self, told: Told) -> None:
        """Take in what a worker tells, which waits meanwhile."""
        if told.rank != 0:
            return
        if told.event == "claimed":
            self._claimed(told.facts["attempt"])
        elif told.event == "resumed":
            self._loaded(told.facts["checkpoint"])
        elif told.event == "started" and told.facts["step"] == 0 and self.committed():
            self.breaches.append(f"attempt {self.attempts[-1]} begins anew although {self.newest()} is there")

    def _claimed(self, attempt: int) -> None:
        if self.attempts and attempt <= self.attempts[-1]:
            self.breaches.append(f"attempt {attempt} was claimed after attempt {self.attempts[-1]}")
        self.attempts.append(attempt)

    def _loaded(self, folder: str) -> None:
        """What was loaded is committed, sound to its last byte, and the newest such checkpoint."""
        identity = checkpoint_id(folder)
        found = {one.id: one for one in folders_of(self._store)}
        if identity is None or identity not in found:
            self.breaches.append(f"{folder} was loaded, which is not there")
            return
        self.resumed.append(identity)
        if problems := damage(self._store, found[identity]):
            self.breaches.append(f"{folder} was loaded, which is not sound: {problems[0]}")
        newer = [one.folder for one, entry in found.items() if one > identity and not entry.problem]
        if newer:
            self.breaches.append(f"{folder} was loaded although {newer[0]} is there")

    def report(self, who: str, now: TrainingProgress) -> None:
        """Take in what the run says of itself: neither attempt nor latest nor, within an attempt, the step go back."""
        before = self._seen[who]
        if 0 < now.attempt < self._highest_attempt[who]:
            self.breaches.append(f"{who}: attempt {self._highest_attempt[who]}, then {now.attempt}")
        self._highest_attempt[who] = max(now.attempt, self._highest_attempt[who])
        if now.attempt == before.attempt and now.step < before.step:
            self.breaches.append(f"{who}: step {before.step}, then {now.step} in attempt {now.attempt}")
        latest, highest = _latest(now), self._highest_latest.get(who)
        if latest is not None:
            if highest is not None and latest < highest:
                self.breaches.append(f"{who}: latest was {highest.folder}, then {latest.folder}")
            if highest is None or latest > highest:
                self._highest_latest[who] = latest
        started = now.resumed_from_step is not None and now.attempt > before.attempt
        if started and highest is not None and now.step < highest.step:
            self.breaches.append(f"{who}: goes on from step {now.step}, {highest.folder} was committed")
        self._seen[who] = now

    def last_report(self, who: str) -> TrainingProgress:
        return self._seen[who]

    def curve(self, up_to: int | None = None) -> None:
        """Every step up to the newest checkpoint (or ``up_to``) has the numbers of the undisturbed run."""
        newest = self.newest()
        last = up_to if up_to is not None else (newest.step if newest else 0)
        expected = {step: record for step, record in self._expected.items() if step <= last}
        found = {step: record for step, record in step_records(self.folder).items() if step <= last}
        if count := curve_mismatch(found, expected):
            self.breaches.append(f"{count} of {last} steps differ from the undisturbed run's")
        losses = [
            step for step, record in expected.items() if found.get(step, {}).get("evalLoss") != record.get("evalLoss")
        ]
        if losses:
            self.breaches.append(f"evaluations after steps {losses[:5]} differ from the undisturbed run's")

    def sound(self) -> None:
        """Every checkpoint that has a manifest is what was written."""
        for folder in folders_of(self._store):
            if folder.is_unfinished or (self.tolerates_ruins and folder.problem):
                continue
            if problems := damage(self._store, folder):
                self.breaches.append(f"{folder.id.folder} is not sound: {problems[0]}")


def _latest(progress: TrainingProgress) -> CheckpointId | None:
    latest = progress.checkpoints.latest
    return CheckpointId(latest.attempt, latest.step) if latest else None
