"""A silent watch is noticed; a quiet cluster and a slow watch are not mistaken for one."""

from __future__ import annotations

from sft_operator.picture.watchdog import PATIENCE_SECONDS, Watchdog


def test_a_watch_that_never_tells_of_what_was_listed_is_silent() -> None:
    dog = Watchdog()
    dog.heard("Pod", 5)
    dog.listed("Pod", 9, now=0.0)
    dog.listed("Pod", 20, now=100.0)

    assert dog.silence(PATIENCE_SECONDS - 1) is None
    sentence = dog.silence(PATIENCE_SECONDS + 1)
    assert sentence is not None
    assert "the watch of Pods" in sentence


def test_a_watch_that_tells_later_is_alive() -> None:
    dog = Watchdog()
    dog.listed("Pod", 9, now=0.0)
    dog.heard("Pod", 12)

    assert dog.silence(10_000.0) is None


def test_a_listing_that_brings_nothing_new_proves_nothing() -> None:
    dog = Watchdog()
    dog.heard("Pod", 9)
    dog.listed("Pod", 9, now=0.0)
    dog.listed("Job", 0, now=0.0)

    assert dog.silence(10_000.0) is None


def test_kinds_are_watched_apart() -> None:
    dog = Watchdog()
    dog.listed("Pod", 9, now=0.0)
    dog.heard("Job", 50)

    assert dog.silence(10_000.0) is not None
