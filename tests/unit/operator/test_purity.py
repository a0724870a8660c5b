"""The middle of the operator does no I/O: it cannot even, since it imports nothing that could."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import sft_operator

CLIENTS = ("aiohttp", "kopf", "kubernetes", "boto3", "botocore", "prometheus_client", "asyncio")
ROOT = Path(sft_operator.__file__).parent
PURE = sorted(file for folder in ("builders", "decisions", "picture") for file in (ROOT / folder).glob("*.py"))


@pytest.mark.parametrize("file", PURE, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_pure_modules_import_no_client(file: Path) -> None:
    module = ".".join(("sft_operator", *file.relative_to(ROOT).with_suffix("").parts))
    program = f"import sys, {module}; print(*(set({CLIENTS!r}) & set(sys.modules)))"

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert done.stdout.split() == []
