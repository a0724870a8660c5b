"""What a run leaves beside its checkpoints for whoever comes later: the records of its steps, and ``status.json``."""

import json
import logging
from collections.abc import Mapping
from typing import Any

from sft_api.checkpoints import STATUS_KEY
from sft_api.report import finite

from .checkpoint.store import Store
from .curves.writer import metrics_key
from .events import Claimed, Committed, Control, Ended, Listener, Logged, Outcome, SaveBegins, SaveEnded, Started
from .newest import Newest
from .reporting import Reporter

log = logging.getLogger("sft_trainer")

_SECONDS = 20.0
"""How long the end of a run waits for its last words, which the supervisor tells as well."""


class StepRecords:
    """What was logged of steps, one record each, in their order."""

    def __init__(self) -> None:
        self._records: list[dict[str, Any]] = []

    def add(self, event: Logged) -> None:
        """Take in values of a step, perhaps more of the one before."""
        if self._records and self._records[-1]["step"] == event.step:
            self._records[-1].update(event.values)
        else:
            self._records.append({"step": event.step, **event.values})

    def lines(self) -> bytes:
        """One JSON line a record; numbers as exactly as Python prints them."""
        lines = [json.dumps({key: _as_json(value) for key, value in record.items()}) for record in self._records]
        return "".join(f"{line}\n" for line in lines).encode()

    def copy(self) -> "StepRecords":
        """The same, which what is added from now on changes no more."""
        copied = StepRecords()
        copied._records = [{**record} for record in self._records]
        return copied

    def clear(self) -> None:
        """Forget them: they are where they shall be."""
        self._records.clear()

    def forget(self, *, up_to: int) -> None:
        """Forget those of the steps up to that one."""
        self._records = [record for record in self._records if record["step"] > up_to]


def _as_json(value: Any) -> Any:
    """``value`` of a record, or those of each set, without numbers that JSON has no word for."""
    if isinstance(value, Mapping):
        return {name: _as_json(each) for name, each in value.items()}
    return finite(value) if isinstance(value, float) else value


class RecordsFile(Listener):
    """Has what was logged since the last save written before the next one counts; for one process of a run."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.records = StepRecords()
        """Not known to be written."""
        self._attempt = 0
        self._written = -1
        """Step up to which they are: before training is one, too."""

    def on_claim(self, event: Claimed, control: Control) -> None:
        self._attempt = event.attempt

    def on_log(self, event: Logged, control: Control) -> None:
        self.records.add(event)

    def on_save_begins(self, event: SaveBegins, control: Control) -> None:
        self.records.forget(up_to=self._written)
        records = self.records.copy()
        if not records.lines():
            return

        def write() -> None:
            # The save before may have been on its way when this one began, and is over now.
            records.forget(up_to=self._written)
            if lines := records.lines():
                self._store.put(metrics_key(event.step, self._attempt), lines)
            self._written = event.step

        event.beside.append(write)


class StatusFile(Listener):
    """Writes ``status.json``, the durable copy of the progress, at commits and at the end; for one process of a run."""

    def __init__(self, store: Store, reporter: Reporter) -> None:
        self._store = store
        self._reporter = reporter
        self._writer = Newest(self._put)
        self._published = 0
        """Steps done when it was written last."""

    def on_start(self, event: Started, control: Control) -> None:
        self._published = event.step

    def on_commit(self, event: Committed, control: Control) -> None:
        self._publish(event.step)

    def on_save(self, event: SaveEnded, control: Control) -> None:
        if event.final:
            self._writer.finish(_SECONDS)

    def on_end(self, event: Ended, control: Control) -> None:
        if event.outcome is Outcome.FAILED:
            return
        self._writer.finish(_SECONDS)
        stopped_since = event.outcome is Outcome.STOPPED and event.step != self._published
        if event.outcome is Outcome.COMPLETE or stopped_since:
            self._publish(event.step)
            self._writer.finish(_SECONDS)

    def _publish(self, step: int) -> None:
        self._writer.write((step, self._reporter.progress.model_dump_json(by_alias=True).encode()))

    def _put(self, status: tuple[int, bytes]) -> None:
        step, content = status
        try:
            self._store.put(STATUS_KEY, content)
        except Exception as error:
            # The next save writes it again; no run ends for it.
            log.warning("status.json was not written: %s", error)
        else:
            self._published = step
