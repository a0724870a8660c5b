"""The test cluster from the command line: `python -m tests.cluster up --tier api`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.cluster import binaries, lifecycle, state


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster", description=__doc__)
    parser.add_argument("command", choices=("up", "down", "status", "kubeconfig", "binaries"))
    parser.add_argument("--tier", choices=state.TIERS, default="api", help="how much of a cluster (up, binaries)")
    parser.add_argument(
        "--folder",
        type=Path,
        default=state.default_folder(),
        help="one cluster a folder (default: %(default)s)",
    )
    parser.add_argument("--force", action="store_true", help="stop a cluster that a test session uses (down)")
    arguments = parser.parse_args()
    return _COMMANDS[arguments.command](arguments)


def _up(arguments: argparse.Namespace) -> int:
    cluster = lifecycle.up(arguments.folder, arguments.tier)
    print(f"export KUBECONFIG={cluster.kubeconfig}")
    return 0


def _down(arguments: argparse.Namespace) -> int:
    if lifecycle.in_use(arguments.folder) and not arguments.force:
        print(
            f"a test session uses the cluster in {arguments.folder}: wait for it, or stop it anyway with --force",
            file=sys.stderr,
        )
        return 1
    lifecycle.down(arguments.folder)
    return 0


def _status(arguments: argparse.Namespace) -> int:
    remembered = state.load(arguments.folder)
    live = lifecycle.running(arguments.folder)
    print(f"tier: {remembered.tier if remembered and live else 'down'}")
    for name, pid in live.items():
        print(f"{name}: pid {pid}")
    return 0 if live else 1


def _kubeconfig(arguments: argparse.Namespace) -> int:
    cluster = lifecycle.connect(arguments.folder)
    if cluster is None:
        print(f"no cluster is up in {arguments.folder}: run `python -m tests.cluster up`", file=sys.stderr)
        return 1
    print(cluster.kubeconfig)
    return 0


def _binaries(arguments: argparse.Namespace) -> int:
    for path in binaries.ensure(binaries.TIER_PROGRAMS[arguments.tier]).values():
        print(path)
    return 0


_COMMANDS = {
    "up": _up,
    "down": _down,
    "status": _status,
    "kubeconfig": _kubeconfig,
    "binaries": _binaries,
}

if __name__ == "__main__":
    sys.exit(main())
