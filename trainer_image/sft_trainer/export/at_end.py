"""The export at the end of a run: of its last checkpoint or the best, by all processes that see the same place."""

import threading
from collections.abc import Callable
from datetime import timedelta

from sft_api.checkpoints import CheckpointId, Manifest
from sft_api.progress import Phase
from sft_api.trainer_config import TrainerConfig
from sft_trainer.checkpoint.catalog import Catalog, Skipped
from sft_trainer.checkpoint.errors import CheckpointCorruptError
from sft_trainer.checkpoint.group import CheckpointGroup
from sft_trainer.checkpoint.store import Store
from sft_trainer.errors import ConfigError
from sft_trainer.models.causal_lm import build_on_meta
from sft_trainer.prepared import Prepared
from sft_trainer.reporting import Reporter
from sft_trainer.topology import Topology

from .companions import model_card
from .exporting import Exported, export_checkpoint
from .forms import Adapters
from .values import Base

_TIMEOUT = timedelta(hours=24)
"""How long a process waits for the others: liveness finds one that hangs much earlier."""


class AtEnd:
    """Collective: every process of the run makes one."""

    def __init__(
        self,
        config: TrainerConfig,
        prepared: Prepared,
        store: Store,
        reporter: Reporter,
        topology: Topology,
        first: Callable[[], None] = lambda: None,
    ) -> None:
        """``store`` is that of the checkpoints; ``first`` is done before anything else, on the leader."""
        self._first = first
        self._config = config
        self._prepared = prepared
        self._store = store
        self._reporter = reporter
        # One for all tries: none is ever taken down, and each takes connections and threads of every process.
        self._group = CheckpointGroup(topology, _TIMEOUT, self._note_wait)
        self._uri = ""
        self._bytes = 0
        self._lock = threading.Lock()

    def run(self, last: CheckpointId, uri: str, target: Store) -> int:
        """Export the checkpoint ``last``, or the best one where that is asked for, to ``target``, which is at ``uri``.

        Returns its step. Errors are those of ``export_checkpoint``; ``ConfigError`` where the bytes of the best one are
        damaged: whoever starts the run again goes on from the last one, and meets them again.
        """
        self._uri = uri
        found = self._group.on_leader(lambda: self._chosen(last))
        if isinstance(found, Skipped):
            raise CheckpointCorruptError(
                f"the checkpoint {found.folder} in {self._store.uri} cannot be exported: {found.reason}"
            )
        # Of the model only names, shapes and config are asked, and the one that was trained is wrapped and sharded.
        of_run = self._prepared.model
        model = build_on_meta(of_run.path, self._config.spec.model.config_overrides, of_run.new_tokens)
        exported = Exported(
            store=self._store,
            manifest=found,
            model=model,
            folder=self._prepared.model.path,
            tokenizer=self._prepared.tokenizer,
            card=model_card(self._config, found, model),
            name=self._config.job.name,
            base=lambda: Base(self._prepared.model.path, self._prepared.model.digest),
            adapters=Adapters.of(self._config, self._prepared.model.uri),
        )
        try:
            export_checkpoint(exported, target, self._group, on_bytes=self._count)
        except CheckpointCorruptError as error:
            if found.id == last:
                raise
            raise ConfigError(
                f"the run has made its steps, and its best checkpoint cannot be exported: {error}; restore it, or have "
                f"the last one exported, of step {last.step} (export.checkpoint: last, which changes no number)"
            ) from error
        return found.step

    def _chosen(self, last: CheckpointId) -> Manifest | Skipped:
        self._first()
        catalog = Catalog(self._store)
        best = catalog.best() if self._config.spec.export.checkpoint == "best" else None
        return best or catalog.find(last)

    def _count(self, count: int) -> None:
        with self._lock:
            self._bytes += count
        self._reporter.alive(Phase.EXPORTING, f"{self._uri}: {self._bytes / 2**20:.0f} MiB read and written")

    def _note_wait(self, waits: bool) -> None:
        if waits:
            self._reporter.waits(f"for the other processes, {Phase.EXPORTING.value}: {self._uri}")
        else:
            self._reporter.works()
