"""``ray start`` as it is wanted here: ``python -m sft_trainer.on_ray.raylet start ...``.

*Without a client server.* Ray starts one, which listens on a port of its own, wherever gRPC's package for Python is
installed, and has no option that says no. *With forked workers*: each would import Ray twice.
"""

import os
import shlex
import sys
from pathlib import Path

from . import fork_me


def main() -> None:
    """Run Ray's command line."""
    sys.modules["grpc"] = None  # type: ignore[assignment]
    python = Path(os.environ[fork_me.SOCKET_VARIABLE]).with_name("python")
    python.write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, fork_me.__file__])} "$@"\n')
    python.chmod(0o700)
    # What Ray takes for the interpreter of all that it starts.
    sys.executable = str(python)
    from ray.scripts.scripts import main as command_line

    command_line()


if __name__ == "__main__":
    main()
