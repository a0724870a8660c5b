"""What a process does in the place of its run before it fetches anything."""

from collections.abc import Mapping
from dataclasses import dataclass

from sft_api.place import Beat, Done, RunRecord
from sft_api.trainer_config import TrainerConfig

from .alive import watch
from .checkpoint.opening import store_at
from .checkpoint.store import Store
from .outage import of_another_place, of_the_place
from .place import look, nothing_saved, open_place, read_done, read_own_record
from .reporting import Reporter
from .revisions import changed, revisions
from .siblings import told_of_siblings
from .storage import check_storage, find_done


@dataclass(frozen=True)
class Entered:
    """What the place says of the run."""

    record: RunRecord | None
    """That of this run; None where another process is about to make it."""
    done: Done | None
    """The word that the run is complete."""
    sign: Beat | bytes | None = None
    """The sign of life that was there, of somebody who gave no other while he was watched."""

    @property
    def revisions(self) -> Mapping[str, str]:
        """What model and data are pinned to."""
        return self.record.revisions if self.record else {}


def enter(config: TrainerConfig, store: Store, reporter: Reporter, *, writes: bool, take_over: str = "") -> Entered:
    """The place, which is this run's; by the process that writes for all it is checked, watched, and made its own.

    ``take_over`` is the word by which a user asks to take it over from another holder that is alive.
    Raises what is wrong with the place or who else is in it: errors of the store, ConfigError, PlaceInUseError.
    """
    with of_the_place():
        if not writes:
            # What that of another run is pinned to, which has saved nothing and is replaced, is none of this run's.
            return Entered(read_own_record(config, store), read_done(store))
        if (done := find_done(config, store, reporter)) is not None:
            return Entered(look(config, store), done)
        conditional = check_storage(config, store, reporter)
        # First: that it is another run's must not take three minutes to find out.
        found = look(config, store)
        sign = watch(config, store, reporter, take_over=take_over)
        anew = found is None and config.spec.checkpoint.resume.origin is None and nothing_saved(store)
        record = open_place(config, store, conditional=conditional, revisions=lambda: _revisions_now(config))
    siblings = told_of_siblings(config, lambda uri: store_at(uri, config)) if anew else []
    for warning in [*siblings, *changed(config, record.revisions)]:
        reporter.warn(warning)
    return Entered(record, None, sign)


def _revisions_now(config: TrainerConfig) -> dict[str, str]:
    with of_another_place():
        return revisions(config)
