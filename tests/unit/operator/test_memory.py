"""What is remembered is never changed, only copied."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import pytest

from sft_operator.picture.memory import Memory, changed
from tests.unit.operator.make import report, running, training


def test_what_changes_is_a_copy_and_what_does_not_is_the_same() -> None:
    before = Memory("sft-uid", report=report(training(5)), overdue={"pod-0": 1.0})

    after = changed(before, written=7.0, report=None)

    assert after == replace(before, written=7.0, report=None)
    assert (before.written, before.report) == (-1e9, report(training(5)))
    assert changed(before, uid="sft-uid", report=report(training(5)), overdue={"pod-0": 1.0}) is before
    assert changed(running(), namespace_terminating=True) == replace(running(), namespace_terminating=True)


def test_a_copy_is_as_immutable_and_has_no_other_fields() -> None:
    with pytest.raises(FrozenInstanceError):
        changed(Memory(), written=7.0).written = 8.0  # type: ignore[misc]
    with pytest.raises(TypeError, match="Memory has no writen"):
        changed(Memory(), uid="another", writen=7.0)
