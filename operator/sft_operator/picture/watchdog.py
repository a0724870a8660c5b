"""Notices a watch that has fallen silent without an error. Pure: the time is passed in.

A listing shows objects in versions that the watch must tell of sooner or later; one that does not is dead.
"""

PATIENCE_SECONDS = 120.0


class Watchdog:
    """What the watches have told, against what listings have shown."""

    def __init__(self) -> None:
        self._heard: dict[str, int] = {}
        self._expected: dict[str, tuple[int, float]] = {}

    def heard(self, kind: str, version: int) -> None:
        """A watch told of an object of ``kind`` in that version."""
        self._heard[kind] = max(version, self._heard.get(kind, 0))
        expected = self._expected.get(kind)
        if expected and self._heard[kind] >= expected[0]:
            del self._expected[kind]

    def listed(self, kind: str, version: int, now: float) -> None:
        """A listing brought something new, in that version; its watch has still to tell of it."""
        if version > self._heard.get(kind, 0) and kind not in self._expected:
            self._expected[kind] = (version, now)

    def silence(self, now: float) -> str | None:
        """Which watch has been silent for too long, as a sentence, or None."""
        for kind, (_, since) in self._expected.items():
            if now - since > PATIENCE_SECONDS:
                return f"the watch of {kind}s has not told of a change that was listed {now - since:.0f} s ago"
        return None
