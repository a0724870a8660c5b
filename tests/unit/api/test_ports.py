import socket
from pathlib import Path

import pytest

from sft_api import ports
from sft_api.ports import PORTS, free_port


def test_a_free_port_can_be_listened_on() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", free_port()))
        listener.listen()


def test_no_outgoing_connection_takes_it_first() -> None:
    first_of_outgoing = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert free_port() in PORTS
    assert PORTS.stop <= first_of_outgoing


def test_a_port_in_use_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port()))
        port = taken.getsockname()[1]
        monkeypatch.setattr(ports, "PORTS", range(port, port + 1))
        with pytest.raises(OSError, match=f"all TCP ports from {port} to {port} are taken"):
            free_port()
