"""The same work on many things."""

import threading
import time

import pytest

from sft_trainer.checkpoint.at_once import at_once


def test_it_gives_what_comes_of_each_in_their_order() -> None:
    assert at_once(lambda number: 2 * number, range(50), most=4, what="test") == [*range(0, 100, 2)]
    assert at_once(lambda number: 2 * number, [], most=4, what="test") == []


def test_after_an_error_no_more_are_begun_however_long_one_before_it_takes() -> None:
    begun, released = list[int](), threading.Event()

    def work(number: int) -> None:
        begun.append(number)
        if number == 0:
            released.wait(1.0)  # as a request that is tried again and again
        elif number == 1:
            raise ValueError("the second")
        elif number == 50:
            released.set()
        time.sleep(0.01)

    with pytest.raises(ValueError, match="the second"):
        at_once(work, range(1000), most=2, what="test")
    assert len(begun) < 50
