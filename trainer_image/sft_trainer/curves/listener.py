"""Who has the curve of a run drawn."""

from sft_api.checkpoints import CURVE_KEY
from sft_trainer.checkpoint.store import Store
from sft_trainer.events import Claimed, Control, Listener, Logged, SaveBegins, SaveEnded, Started
from sft_trainer.records import StepRecords
from sft_trainer.reporting import Reporter

from .writer import CurveWriter

_SECONDS = 20.0
"""How long the end of a run waits for its curve: a picture is not worth a pod's time to leave."""


class Curve(Listener):
    """Gives the curve what was logged, at every save; for one process of a run."""

    def __init__(self, store: Store, title: str, reporter: Reporter) -> None:
        self._store = store
        self._title = title
        self._reporter = reporter
        self._attempt = 0
        self._records = StepRecords()
        self._writer: CurveWriter | None = None

    def on_claim(self, event: Claimed, control: Control) -> None:
        self._attempt = event.attempt

    def on_start(self, event: Started, control: Control) -> None:
        self._writer = CurveWriter(
            self._store,
            self._title,
            attempt=self._attempt,
            resumed_at=event.step,
            written=lambda: self._reporter.update(curve_uri=f"{self._store.uri}/{CURVE_KEY}"),
        )

    def on_log(self, event: Logged, control: Control) -> None:
        self._records.add(event)

    def on_save_begins(self, event: SaveBegins, control: Control) -> None:
        if self._writer is not None and (lines := self._records.lines()):
            self._writer.add(event.step, lines)
            self._records.clear()

    def on_save(self, event: SaveEnded, control: Control) -> None:
        if self._writer is not None and event.final:
            self._writer.finish(_SECONDS)
