"""The middle of the operator does no I/O: it cannot even, since it imports nothing that could."""

from __future__ import annotations

import subprocess
import sys

import pytest

CLIENTS = ("aiohttp", "kopf", "kubernetes", "boto3", "botocore", "prometheus_client", "asyncio")


@pytest.mark.parametrize(
    "module",
    [
        "builders",
        "policies.children",
        "policies.situation",
        "policies.stuck",
        "policies.troubles",
        "report_merge",
        "status",
        "events",
        "spec",
        "cache",
        "watchdog",
    ],
)
def test_pure_modules_import_no_client(module: str) -> None:
    program = f"import sys, sft_operator.{module}; print(*(set({CLIENTS!r}) & set(sys.modules)))"

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert done.stdout.split() == []
