"""Who has the tokenised data kept beside the checkpoints while a run goes on."""

import logging
import threading
from collections.abc import Callable, Sequence

from sft_api.v1alpha1.job import SFTJobSpec

from .checkpoint.store import Store
from .data.kept import LEAST_TOKENS, KeptTokens
from .data.tokenized import TokenizedSource
from .errors import TrainingError
from .events import Control, Ended, Listener, Outcome, Started

log = logging.getLogger("sft_trainer")

_SECONDS = 10.0
"""How long the end of a run waits for the thread, which looks at each block whether it shall end."""


def kept_tokens(spec: SFTJobSpec, store: Store) -> KeptTokens | None:
    """Those in ``store``; None where none are wanted, or the place is a folder, which other nodes do not have."""
    return KeptTokens(store) if spec.data.keep_tokenized and is_shared(store) else None


def is_shared(store: Store) -> bool:
    """Whether other nodes have what lies there."""
    return not store.uri.startswith("file://")


def remove_kept(store: Store, sources: Sequence[TokenizedSource] = ()) -> None:
    """Take away what is kept in ``store``, and what was begun of ``sources``; warns where it cannot."""
    try:
        KeptTokens(store).remove(sources)
    except TrainingError as error:
        log.warning("the tokenised data of the run was not removed: %s", error)


class KeepsTokens(Listener):
    """Writes them from the first step on, by a thread that no step waits for; removes them when the run is complete,
    and at once where none are ``wanted`` any more.

    For one process of a run.
    """

    def __init__(self, store: Store, sources: Callable[[], Sequence[TokenizedSource]], *, wanted: bool = True) -> None:
        """``sources`` are asked for when the run starts."""
        self._store = store
        self._all_sources = sources
        self._sources: list[TokenizedSource] = []
        self._wanted = wanted
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="tokens", daemon=True)

    def on_start(self, event: Started, control: Control) -> None:
        self._sources = [one for one in self._all_sources() if one.report.lengths.total >= LEAST_TOKENS]
        if self._sources:
            self._thread.start()

    def on_end(self, event: Ended, control: Control) -> None:
        self._stop.set()
        if self._thread.ident is None:
            return
        self._thread.join(_SECONDS)
        if event.outcome is Outcome.COMPLETE:
            remove_kept(self._store, self._sources)

    def _work(self) -> None:
        if not self._wanted:
            remove_kept(self._store, self._sources)
            return
        for source in self._sources:
            try:
                KeptTokens(self._store).keep(source, self._stop)
            except (TrainingError, OSError, ValueError) as error:
                # The next start tries again.
                log.warning("tokenised data is not kept, another node would tokenise it again: %s", error)
                return
