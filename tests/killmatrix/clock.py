"""Processes whose clock is wrong: a library that is loaded before all others shifts what it says."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

# The kernel has no namespace for the real clock. Waiting is by the monotonic one, which stays.
_SOURCE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>

static long shift(void) {
    const char *text = getenv("SFT_CLOCK_SHIFT");
    return text ? atol(text) : 0;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(clock, now);
    if (!result && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += shift();
    return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *result) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (result) *result = exact.tv_sec;
    return exact.tv_sec;
}
"""


def wrong_clock(folder: Path, seconds: int) -> dict[str, str]:
    """The environment of processes whose clock is so many ``seconds`` ahead; the library is made in ``folder``."""
    library = folder / "clock.so"
    if not library.exists():
        compiler = shutil.which("cc")
        if compiler is None:
            raise AssertionError("a wrong clock needs a C compiler: install cc, or leave the clock- cases out")
        command = [compiler, "-shared", "-fPIC", "-O1", "-x", "c", "-", "-o", str(library), "-ldl"]
        subprocess.run(command, input=_SOURCE, text=True, check=True)
    return {"LD_PRELOAD": str(library), "SFT_CLOCK_SHIFT": str(seconds)}
