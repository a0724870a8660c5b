"""Whether this machine has IPv6."""

import socket

import pytest


def _has_loopback() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


NEEDS_IPV6 = pytest.mark.skipif(not _has_loopback(), reason="this machine has no IPv6")
