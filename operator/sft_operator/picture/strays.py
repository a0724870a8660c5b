"""Jobs that may have pods which the picture does not hold. Pure.

Tenants can make any number of pods that are nobody's, so of those only the name of the job is kept. Of a job that has
gone the pods may not have been told of yet: Jobs, pods and SFTJobs are watched apart.
"""

from collections.abc import Hashable
from typing import Generic, TypeVar

KeyType = TypeVar("KeyType", bound=Hashable)

MOST = 10_000


class Strays(Generic[KeyType]):
    """Names, until two complete listings of pods have ended, of which one began after the name was noted."""

    def __init__(self) -> None:
        self._before: set[KeyType] = set()
        """Noted before the last listing ended."""
        self._since: set[KeyType] = set()
        self._any: int = 0
        """Listings for which every name counts, for there were too many."""

    def __contains__(self, name: KeyType) -> bool:
        """Whether there may be pods of an earlier Job of this name."""
        return self._any > 0 or name in self._since or name in self._before

    def note(self, name: KeyType) -> None:
        """A pod of it was seen and not kept, or it has gone."""
        if len(self._since) < MOST:
            self._since.add(name)
        else:
            self._any = 2

    def listed(self) -> None:
        """A complete listing of pods has ended."""
        self._before, self._since = self._since, set()
        self._any = max(0, self._any - 1)
