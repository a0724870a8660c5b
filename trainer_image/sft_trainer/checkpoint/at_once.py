"""The same work on many things, several of them at a time."""

from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def at_once(work: Callable[[T], R], things: Iterable[T], *, most: int, what: str) -> list[R]:
    """What ``work`` gives for each of ``things``, ``most`` of them at a time, by threads named ``what``.

    An error of one is raised, the first in their order, when no more are begun and those that were have ended. Left to
    themselves they would go on for minutes, and remove, say, what the caller writes once it believes that it is over.
    """
    with ThreadPoolExecutor(most, thread_name_prefix=what) as pool:
        begun = [pool.submit(work, thing) for thing in things]
        try:
            wait(begun, return_when=FIRST_EXCEPTION)  # whichever that is: those before it may take long
        finally:
            pool.shutdown(cancel_futures=True)
        return [one.result() for one in begun]
