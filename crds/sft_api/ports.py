"""A TCP port for somebody who listens in a moment."""

import random
import socket

PORTS = range(20_000, 30_000)
"""Below those that Linux gives to outgoing connections (32768 upwards) and Kubernetes to nodes (30000 upwards)."""


def free_port() -> int:
    """A port of this machine that nobody uses and that no outgoing connection takes before its listener is there."""
    for port in random.sample(PORTS, len(PORTS)):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise OSError(f"all TCP ports from {PORTS.start} to {PORTS.stop - 1} are taken")
