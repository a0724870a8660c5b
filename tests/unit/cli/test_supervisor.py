"""What ``sft run`` starts its supervisor with."""

from pathlib import Path

from sft_cli.supervisor import supervisor_environment


def test_processes_of_one_machine_meet_by_the_loopback_unless_the_user_says_otherwise() -> None:
    """An address of the network may change while they train, and they would wait for one another by the old one."""
    words = Path("/run/termination.json")

    assert supervisor_environment({"A": "b"}, words)["GLOO_SOCKET_IFNAME"] == "lo"
    assert supervisor_environment({"GLOO_SOCKET_IFNAME": "eth0"}, words)["GLOO_SOCKET_IFNAME"] == "eth0"
