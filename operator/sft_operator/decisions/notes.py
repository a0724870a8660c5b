"""What comes together during one look at one SFTJob, and what every duty of it does with that. Pure."""

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from sft_api.v1alpha1 import SFTJob, SFTJobStatus
from sft_api.v1alpha1.job import ObjectMeta

from ..config import Settings
from ..picture.memory import Memory, Patched, Shown, changed
from ..picture.observed import ChildJob, Manifest, Observed
from ..picture.picture import Key
from .changes import run_places
from .gangs import Rivals
from .pauses import doubled
from .questions import Asked
from .result import Action, ChangeJob, Delete, FindJob, Question, TellBegun
from .spec import InvalidSpec, Terms, lenient_terms, read_spec, run_terms
from .status import read_status

DELETE_AGAIN_SECONDS = 2.0
"""When nothing tells that what was deleted is going."""
_SEARCH_AGAIN_SECONDS = 30.0
"""When a Job was looked for in vain."""
_LONGEST_PATCH_PAUSE_SECONDS = 60.0
"""Between two changes of a Job that somebody undoes again and again."""


@dataclass(frozen=True)
class Snapshot:
    """All that is known of one SFTJob in one moment."""

    key: Key
    manifest: Manifest | None
    observed: Observed
    memory: Memory
    now: datetime
    """By the clock of the API server."""
    clock: float
    """Seconds of a clock that is never set."""
    followed: int = 1
    """Jobs whose trainers this operator asks."""
    rivals: Rivals = field(default_factory=Rivals)
    """Of a job that is placed in part."""


class Notes:
    """Each duty of a look adds to it what it finds."""

    def __init__(self, seen: Snapshot, manifest: Manifest, settings: Settings) -> None:
        self._key, self._manifest, self._observed = seen.key, manifest, seen.observed
        self._now, self._clock, self._followed = seen.now, seen.clock, seen.followed
        self._rivals = seen.rivals
        self._settings = settings
        self._memory = seen.memory
        self._previous = SFTJobStatus()
        self._generation: int = manifest["metadata"].get("generation", 0)
        self._actions: list[Action] = []
        self._questions: list[Question] = []
        self._again: float | None = None
        """Seconds after which to look again."""
        self._changes_wait = False
        """Nothing is changed in this look: what Kueue is about to answer may be a reason not to."""
        self._words_wait = False
        """Nothing is said in this look: an answer is about to come, or what this look changes is to be seen first."""

    # What to do

    def _act(self, action: Action) -> None:
        self._actions.append(action)
        self._words_wait = True

    def _tell_begun(self, terms: Terms) -> None:
        """Unlike other acts nothing waits for it, and nothing is said of what becomes of it."""
        self._actions.append(TellBegun(self._owner(terms)))

    def _patch(self, child: ChildJob, patch: Manifest) -> None:
        """Change the Job; what somebody else undoes again and again is made again ever more rarely."""
        made, clock = self._memory.patched, self._clock
        again = made is not None and made.patch == patch
        if made is not None and again and clock < made.next:
            self._look_in(made.next - clock)
            self._remember(refusal=None, refusals=0)
            return
        times = made.times + 1 if made is not None and again else 0
        pause = doubled(1.0, times, longest=_LONGEST_PATCH_PAUSE_SECONDS)
        self._remember(patched=Patched(patch, times, clock + pause))
        self._act(ChangeJob(child, patch))

    def _find_job(self, terms: Terms) -> None:
        """Look for a Job that is not seen, unless that was just done in vain."""
        if (wait := self._memory.next_search - self._clock) > 0:
            self._look_in(wait)
            return
        self._remember(next_search=self._clock + _SEARCH_AGAIN_SECONDS)
        self._act(FindJob(self._owner(terms)))

    def _delete(self, kind: str, name: str, uid: str, version: str | None = None) -> None:
        """Delete an object, unless that was just done."""
        before, clock = self._memory.deleted, self._clock
        again = before is not None and before[0] == uid
        if before is not None and again and clock < before[1]:
            self._look_in(before[1] - clock)
            return
        self._remember(deleted=(uid, clock + DELETE_AGAIN_SECONDS))
        self._look_in(DELETE_AGAIN_SECONDS)
        self._actions.append(Delete(kind, name, uid, version))
        # Once: what does not go is told of all the same.
        self._words_wait = self._words_wait or not again

    # What to ask

    def _asked(self, asked: Asked) -> None:
        self._memory = asked.memory
        if asked.question is not None:
            self._questions.append(asked.question)
        self._look_in(asked.wait)
        self._changes_wait = self._changes_wait or asked.holds_changes
        self._words_wait = self._words_wait or asked.holds_changes or asked.holds_words

    # What is known

    def _read_status(self) -> SFTJobStatus:
        """What is shown of the job, parsed once."""
        document, shown = self._manifest.get("status"), self._memory.shown
        if shown is None or shown.document is not document:
            shown = Shown(document, read_status(self._manifest))
            self._remember(shown=shown)
        return shown.status

    def _read_spec(self) -> tuple[SFTJob | None, Terms]:
        """The job, parsed once for what it is made of, and its terms; what can be read of them when it is None."""
        metadata, memory = self._manifest["metadata"], self._memory
        # Labels change without a new generation.
        identity = (metadata.get("uid", ""), metadata.get("generation", 0), metadata.get("labels"))
        job = memory.job
        if job is None or memory.identity != identity:
            try:
                job = read_spec(self._manifest)
            except InvalidSpec as error:
                return None, lenient_terms(self._manifest, self._observed.job, str(error))
            self._remember(job=job, identity=identity)
        return job, run_terms(job)

    def _places(self, job: SFTJob | None) -> tuple[str | None, str | None]:
        return run_places(job, self._observed.job, self._read_status(), self._settings.store)

    def _owner(self, terms: Terms) -> ObjectMeta:
        return ObjectMeta(name=self._key.name, namespace=self._key.namespace, uid=terms.uid)

    def _remember(self, **changes: Any) -> None:
        self._memory = changed(self._memory, **changes)

    def _look_in(self, seconds: float | None, *, later: float = 0.0) -> None:
        """Have the job looked at again after so many seconds, and ``later`` ones to be sure; None: no reason to."""
        if seconds is not None:
            wanted = max(0.0, seconds) + later
            self._again = wanted if self._again is None else min(wanted, self._again)
