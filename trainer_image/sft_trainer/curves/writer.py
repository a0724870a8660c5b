"""The run's curve beside its checkpoints: ``curve.svg``, and TensorBoard's files in ``tensorboard/``.

Made from the step records, which come at every save, by a thread of rank 0: no step waits for it, and no run ends for
what goes wrong here.
"""

import json
import logging
import queue
import re
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sft_api.checkpoints import CURVE_KEY, EVENTS_PREFIX, METRICS_PREFIX
from sft_trainer.checkpoint.store import Store
from sft_trainer.errors import AccessDeniedError

from .chart import Line, draw
from .events import event_file
from .history import History, Record, Scalar

log = logging.getLogger("sft_trainer")

_RECORDS = re.compile(r"metrics/step-(?P<step>\d+)-a(?P<attempt>\d+)\.jsonl")
_MOST_BYTES = 64 * 2**20
"""That are read of a file of records, as others may write there: some 200,000 steps between two saves."""
_EVENTS = re.compile(r"tensorboard/events\.out\.tfevents\.a(?P<attempt>\d+)-step-(?P<step>\d+)")


class Written(NamedTuple):
    """By whom a file was written, and up to which step."""

    attempt: int
    step: int


def metrics_key(step: int, attempt: int) -> str:
    """Where the records of the steps up to ``step`` are kept."""
    return f"{METRICS_PREFIX}step-{step:08d}-a{attempt:05d}.jsonl"


def events_key(step: int, attempt: int) -> str:
    """Where the same is for TensorBoard, which reads files in the order of their names."""
    return f"{EVENTS_PREFIX}events.out.tfevents.a{attempt:05d}-step-{step:08d}"


def read_records(content: bytes) -> list[Record]:
    """The records in a file of them."""
    return [json.loads(line) for line in content.splitlines()]


class CurveWriter:
    """``add`` what was recorded at every save, ``finish`` once at the end. ``written`` is called after each writing."""

    def __init__(
        self, store: Store, title: str, *, attempt: int, resumed_at: int, written: Callable[[], None] = lambda: None
    ) -> None:
        self._store = store
        self._title = title
        self._attempt = attempt
        self._resumed_at = resumed_at
        self._written = written
        self._history: History | None = None
        self._unread: list[bytes] = []
        self._unwritten: list[Scalar] = []
        """What no event file holds yet."""
        self._together: list[Scalar] = []
        """Of the attempts before, where it is in one file of this attempt's."""
        self._purge_step: int | None = resumed_at + 1
        self._saves: queue.Queue[tuple[int, bytes] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._work, name="curve", daemon=True)

    def add(self, step: int, records: bytes) -> None:
        """Take in the ``records`` (JSON lines) of the steps up to ``step``; returns at once."""
        if self._thread.ident is None:
            self._thread.start()
        self._saves.put((step, records))

    def finish(self, timeout: float) -> None:
        """Wait until all of it is written, at most ``timeout`` seconds."""
        if not self._thread.is_alive():
            return
        self._saves.put(None)
        self._thread.join(timeout)
        if self._thread.is_alive():
            log.warning("%s/%s is not up to date: the storage did not answer in time", self._store.uri, CURVE_KEY)

    def _work(self) -> None:
        behind: int | None = None
        while (save := self._saves.get()) is not None:
            behind = None if self._try(*save) else save[0]
        # What failed before the last save was through may be taken now.
        if behind is not None:
            self._try(behind, b"")

    def _try(self, step: int, records: bytes) -> bool:
        try:
            self._write(step, records)
        except Exception as error:
            log.warning("the curve of step %s was not written, it goes with the next save: %s", step, error)
            return False
        return True

    def _write(self, step: int, records: bytes) -> None:
        self._unread.append(records)
        if self._history is None:
            self._history = self._history_of_earlier_attempts(read_records(b"".join(self._unread)))
        while self._unread:
            self._unwritten += self._history.add(read_records(self._unread[0]))
            del self._unread[0]
        if self._unwritten:
            # A save at the step that was resumed has the name of the file with all before it.
            before = self._together if step == self._resumed_at else []
            content = event_file([*before, *self._unwritten], purge_step=self._purge_step)
            self._store.put(events_key(step, self._attempt), content)
            self._unwritten, self._purge_step = [], None
        self._store.put(CURVE_KEY, draw(self._title, curve_lines(self._history)))
        self._written()

    def _history_of_earlier_attempts(self, own: list[Record]) -> History:
        """What the attempts before did, as far as this one went on from it; their event files no longer hold more.

        ``own`` are this one's first records. An evaluation of the step that it went on from which gave another loss, as
        on other data, takes the place of theirs.
        """
        records = self._earlier_records()
        losses = {record["step"]: record["evalLoss"] for record in own if "evalLoss" in record}
        files = _found(self._store, EVENTS_PREFIX, _EVENTS, before=self._attempt)
        # What stays is not written anew: all of a long run would take the interpreter away from the steps for minutes.
        first = self._resumed_at if self._resumed_at in losses else self._resumed_at + 1
        going = _Going.of(files, [key for key, (_, step) in files.items() if step >= first])
        history, told = self._told(records, losses, going)
        if not told.keys() <= {*files.values()}:
            # Where an attempt's figures never came into a file those that stay may hold others of its steps.
            going = _Going.of(files, [*files])
            history, told = self._told(records, losses, going)
        if told:
            self._together = [scalar for scalars in told.values() for scalar in scalars]
            content = event_file(self._together, purge_step=None)
            self._store.put(events_key(self._resumed_at, self._attempt), content)
        try:
            self._store.delete(going.keys)
        except AccessDeniedError as error:
            # That is no reason to be without a curve: this attempt's first file says from which step on to forget them.
            log.warning("TensorBoard's files of steps that were taken back stay: %s", error)
        return history

    def _told(
        self, records: Mapping[str, Written], losses: Mapping[int, float | None], going: "_Going"
    ) -> tuple[History, dict[Written, list[Scalar]]]:
        """What counts of ``records``, and the figures that each file of them adds which are in no file that stays."""
        history, added = History(), dict[Written, list[Scalar]]()
        for key, by in records.items():
            told = read_records(_whole_lines(self._store.read(key, _MOST_BYTES)))
            told = [record if _is_told_alike(record, losses) else _without_evaluation(record) for record in told]
            known = history.add(told, up_to=self._resumed_at)
            if known and not going.leaves(*by):
                added[by] = known
        return history, added

    def _earlier_records(self) -> dict[str, Written]:
        """Files of records of earlier attempts; the newest attempt first, as its word counts."""
        found = _found(self._store, METRICS_PREFIX, _RECORDS, before=self._attempt)
        return dict(sorted(found.items(), key=lambda item: (-item[1].attempt, item[1].step)))


@dataclass(frozen=True)
class _Going:
    """Event files of earlier attempts that are to be removed."""

    keys: Sequence[str]
    reach: Mapping[int, int]
    """Of those that stay: the last step, by attempt."""

    @classmethod
    def of(cls, files: Mapping[str, Written], keys: Collection[str]) -> "_Going":
        """``keys`` of all ``files``."""
        gone, reach = frozenset(keys), dict[int, int]()
        for key, (attempt, step) in files.items():
            if key not in gone:
                reach[attempt] = max(step, reach.get(attempt, 0))
        return cls(sorted(gone), reach)

    def leaves(self, attempt: int, step: int) -> bool:
        """Whether what ``attempt`` recorded up to ``step`` is in files that stay, of its own or of a later attempt."""
        return any(later >= attempt and up_to >= step for later, up_to in self.reach.items())


def _found(store: Store, prefix: str, name: re.Pattern[str], *, before: int) -> dict[str, Written]:
    """What has such a ``name`` and was written by an attempt ``before`` that one, by key."""
    matches = (name.fullmatch(entry.key) for entry in store.list(prefix))
    found = {match[0]: Written(int(match["attempt"]), int(match["step"])) for match in matches if match}
    return {key: written for key, written in found.items() if written.attempt < before}


def _whole_lines(content: bytes) -> bytes:
    return content if len(content) < _MOST_BYTES else content[: content.rfind(b"\n") + 1]


def _is_told_alike(record: Record, losses: Mapping[int, float | None]) -> bool:
    """Whether ``losses``, of evaluations by their steps, have no other one than ``record``."""
    return "evalLoss" not in record or record["evalLoss"] == losses.get(record["step"], record["evalLoss"])


def _without_evaluation(record: Record) -> Record:
    return {name: value for name, value in record.items() if not name.startswith("eval")}


def curve_lines(history: History) -> list[Line]:
    """Training loss, and held-out loss where there was any evaluation."""
    lines = [Line("training", sorted(history.losses.items()))]
    if history.eval_losses:
        lines.append(Line("held-out", sorted(history.eval_losses.items()), dots=True))
    return lines
