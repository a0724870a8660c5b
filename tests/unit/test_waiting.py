"""How long tests wait for what others do."""

import pytest

from tests import waiting


def test_patience_begins_anew_with_every_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(waiting.time, "monotonic", lambda: now)
    patience = waiting.Patience(10)

    for step in range(5):
        assert patience.lasts(step)
        now += 9
        assert patience.lasts(step)
    now += 2
    assert not patience.lasts(4)
    # Also with one of an earlier step: a run that was begun anew
    assert patience.lasts(0)
