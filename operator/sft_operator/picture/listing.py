"""Taking a complete listing into the picture. No I/O."""

from collections import Counter

from .observed import Manifest
from .picture import Key, Picture, key_of, uid_of


class Listing:
    """A complete listing that is being taken in: of each object only what is kept of it stays in memory.

    One that breaks off is dropped, and another begun: what it has brought holds all the same.
    """

    def __init__(self, picture: Picture, kind: str) -> None:
        self._picture = picture
        self._kind = kind
        self._present: set[str] = set()
        self._pods: Counter[Key] = Counter()
        self.changed: set[Key] = set()
        """Keys for which an object in it is new, also when it breaks off."""
        self.news = 0
        """Objects that no watch had told of, or not in that version."""
        self.newest = 0
        """The highest version among those."""

    def take(self, manifest: Manifest) -> None:
        """Take in one object."""
        key, uid = key_of(self._kind, manifest), uid_of(manifest)
        if key is None:
            return
        self._present.add(uid)
        if self._kind == "Pod":
            self._pods[key] += 1
        before = self._picture.held_version(self._kind, key, uid)
        if self._picture.take_in(self._kind, key, uid, manifest):
            self.changed.add(key)
        version = self._picture.held_version(self._kind, key, uid)
        if version > before:
            self.news += 1
            self.newest = max(self.newest, version)

    def end(self, version: int, told_from: int | None = None) -> set[Key]:
        """The listing is complete, and was made at ``version``; the keys for which it brought something new.

        ``told_from`` is the version from which the watch may tell everything again, ``version`` when there is none.
        """
        again = version if told_from is None else told_from
        return self.changed | self._picture.end_listing(self._kind, self._present, self._pods, version, again)
