"""``python fork_me.py ARGUMENTS…`` is ``python ARGUMENTS…``, as a fork of ``forks.py`` where there is one.

Imports nothing but the standard library: it is to be up at once. Lives for as long as the fork does, and ends with its
exit code; a signal that ends it ends the fork.
"""

import contextlib
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

SOCKET_VARIABLE = "SFT_RAY_FORKS"
FORKED = b"+"
"""The first word of who forks: from here on there is a fork, and nobody else may do its work."""
JOB_VARIABLE = "RAY_JOB_ID"
FIRST_JOB = "01000000"
"""The job of a cluster's first driver, which is ours. Callbacks that join make others."""
SETUP_WORKER = "setup_worker.py"
"""Ray's own way to a worker: Python that imports Ray, looks at its runtime environment, and starts Python again."""
_CONTEXT = "--serialized-runtime-env-context="
_LANGUAGE = "--language="


def to_fork(arguments: list[str], environment: dict[str, str]) -> tuple[list[str], dict[str, str]] | None:
    """Arguments and environment of the fork that does what ``python *arguments`` does; None when none can."""
    if arguments[0] == "-m":
        return arguments, environment
    # Not Ray's agents: their raylet is to be their parent.
    return _worker(arguments[1:], environment) if Path(arguments[0]).name == SETUP_WORKER else None


def _worker(words: list[str], environment: dict[str, str]) -> tuple[list[str], dict[str, str]] | None:
    """The worker that ``setup_worker.py`` would start.

    None when that does more (another language, interpreter, prefix or entry), or when it is not one of our driver's.
    """
    context: dict[str, Any] = next(
        (json.loads(word.removeprefix(_CONTEXT)) for word in words if word.startswith(_CONTEXT)), {}
    )
    others = (context.get("command_prefix"), context.get("override_worker_entrypoint"), context.get("java_jars"))
    if any(others) or context.get("py_executable", sys.executable) != sys.executable:
        return None
    if f"{_LANGUAGE}PYTHON" not in words or environment.get(JOB_VARIABLE) != FIRST_JOB:
        return None
    rest = [word for word in words if not word.startswith((_CONTEXT, _LANGUAGE))]
    variables = {name: os.path.expandvars(value) for name, value in (context.get("env_vars") or {}).items()}
    return rest, {**environment, **variables}


def _fork(arguments: list[str], environment: dict[str, str]) -> int | None:
    """The exit code of the fork; None when nobody forks."""
    request = json.dumps({"argv": arguments, "env": environment, "cwd": os.getcwd()}).encode()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        try:
            connection.connect(environment[SOCKET_VARIABLE])
            socket.send_fds(connection, [request], [0, 1, 2])
            forked = connection.recv(len(FORKED))
        except (KeyError, OSError):
            return None
        if not forked:
            # Who forks has ended over its imports, or can make no process: there is no fork.
            return None
        with contextlib.suppress(OSError):
            if answer := connection.recv(64):
                return int(answer)
    # Who forks has ended, and its forks with it.
    return 1


def main(arguments: list[str]) -> int:
    """Returns the exit code; or becomes the process itself where nobody forks it."""
    wanted = to_fork(arguments, dict(os.environ))
    code = None if wanted is None else _fork(*wanted)
    if code is None:
        os.execv(sys.executable, [sys.executable, *arguments])  # noqa: S606
    if code < 0:
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
