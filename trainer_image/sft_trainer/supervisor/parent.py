"""Processes that end with the one that started them, however that one ends."""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
# Looked up before any fork: whoever looks it up after one may wait for a lock of a thread that is not there.
_prctl = ctypes.CDLL(None).prctl


def die_with(parent: int, by: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send ``by`` to this process when ``parent`` ends; where it has ended already, end now."""
    _prctl(_PR_SET_PDEATHSIG, by, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
