"""Taking a complete listing into the picture. No I/O."""

from collections import Counter

from .observed import Manifest
from .picture import Key, Picture, key_of, uid_of, version_of


class Listing:
    """A complete listing that is being taken in: of each object only what is kept of it stays in memory.

    One that breaks off is dropped, and another begun: what it has brought holds all the same.
    """

    def __init__(self, picture: Picture, kind: str) -> None:
        self._picture = picture
        self._kind = kind
        self._present: set[str] = set()
        self._pods: Counter[Key] = Counter()
        self._older: dict[str, tuple[Key, int]] = {}
        """Keys and versions of objects that are held in a later one, by uid."""
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
        before = self._held(key, uid)
        if (listed := version_of(manifest)) < before:
            self._older[uid] = key, listed
        else:
            self._older.pop(uid, None)
        if self._picture.take_in(self._kind, key, uid, manifest):
            self.changed.add(key)
        version = self._held(key, uid)
        if version > before:
            self.news += 1
            self.newest = max(self.newest, version)

    def is_of_the_past(self, version: int) -> bool:
        """Whether the listing, which was made at ``version``, has an object as it was before what is held of it, though
        that is no later than ``version``: what was told since has been taken back."""
        found = ((listed, self._held(key, uid)) for uid, (key, listed) in self._older.items())
        return any(listed < held <= version for listed, held in found)

    def end(self, version: int, told_from: int | None = None) -> set[Key]:
        """The listing is complete, and was made at ``version``; the keys for which it brought something new.

        ``told_from`` is the version from which the watch may tell everything again, ``version`` when there is none.
        """
        again = version if told_from is None else told_from
        return self.changed | self._picture.end_listing(self._kind, self._present, self._pods, version, again)

    def _held(self, key: Key, uid: str) -> int:
        return self._picture.held_version(self._kind, key, uid)
