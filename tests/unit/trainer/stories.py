"""A run without a group, a model or data, for tests of the order of what ``Trainer.run`` does."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sft_api.checkpoints import CheckpointId
from sft_api.v1alpha1.status import CheckpointsStatus
from sft_trainer.checkpoint.local import LocalStore
from sft_trainer.events import Listener
from sft_trainer.outage import Outage
from sft_trainer.trainer import Trainer
from tests.parity.runs import manifest, resolve


class BareRun(Trainer):
    """Its sentences before the first step, and its export, do nothing; what it does otherwise is for tests to say.

    ``told`` is theirs to write into.
    """

    def __init__(self, folder: Path, steps: int, listeners: Sequence[Listener] = (), **sections: Any) -> None:
        job = manifest(folder, folder / "store", **{"training": {"steps": steps}, **sections})
        job["spec"]["data"]["eval"] = [{"uri": f"file://{folder}/eval.jsonl", "name": "held-out"}]
        ranks = SimpleNamespace(rank=0, local_rank=0, local_world_size=1, world_size=1)
        super().__init__(resolve(job), ranks, folder, listeners)  # type: ignore[arg-type]
        self.told: list[str] = []
        self.saving = SimpleNamespace(  # type: ignore[assignment]
            failed_here=lambda: False,
            in_flight=False,
            may_have_arrived=lambda: False,
            seconds_since_save=0.0,
            outage=Outage(3600),
            look_after=lambda: False,
            settle=lambda: None,
            hurry=lambda: None,
            copied=lambda device: 0.0,
            tell=lambda: None,
            checkpoints=CheckpointsStatus(),
            checkpoint_of=lambda step: CheckpointId(1, step),
        )
        self.store = LocalStore(folder / "store")

    def _open_store(self) -> None: ...

    def _prepare(self) -> Any:
        return self.prepared

    def _compare(self) -> None: ...

    def _claim(self) -> None:
        self._watch()

    def _build(self) -> None: ...

    def _resume_or_load(self) -> None: ...

    def _export(self) -> None: ...
