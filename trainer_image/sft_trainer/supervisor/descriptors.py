"""How many files and connections a process of this pod may have open."""

import resource

MOST = 65_536
"""Of 2,048 processes each has a connection to every other one in each of its groups on the CPU, and the first one
besides to all of them: some thousands. Not without end: some programs close all that there may be, one by one."""


def raise_limit() -> None:
    """Let this process, and those that it starts, have as many open as the machine allows, or ``MOST``.

    Container runtimes give 1,024 where nobody asks for more, and let a process ask; of 512 processes the first one
    needs that many before the first step.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
