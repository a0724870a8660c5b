"""The middle of the operator does no I/O, and has no clock and no chance: it imports nothing that does, or has."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import sft_operator

CLIENTS = ("aiohttp", "kopf", "kubernetes", "boto3", "botocore", "prometheus_client", "asyncio")
IMPURE = {
    *("os", "io", "pathlib", "shutil", "tempfile", "open", "print"),
    *("socket", "http", "urllib.request", "subprocess", "threading"),
    *("time", "now", "today", "utcnow", "random", "secrets", "uuid"),
}
"""What a module imports or calls that does I/O, or has a clock or chance of its own."""
ROOT = Path(sft_operator.__file__).parent
PURE = sorted(file for folder in ("builders", "decisions", "picture") for file in (ROOT / folder).glob("*.py"))


def test_pure_modules_import_no_client() -> None:
    modules = [".".join(("sft_operator", *file.relative_to(ROOT).with_suffix("").parts)) for file in PURE]
    program = (
        "import importlib, sys\n"
        f"for module in {modules!r}:\n"
        "    importlib.import_module(module)\n"
        f"    assert not (found := set({CLIENTS!r}) & set(sys.modules)), f'{{module}} imports {{found}}'"
    )

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("file", PURE, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_pure_modules_do_no_io_and_have_no_clock_and_no_chance(file: Path) -> None:
    used = {name for node in ast.walk(ast.parse(file.read_text())) for name in imported_or_called(node)}

    assert not used & IMPURE


def imported_or_called(node: ast.AST) -> list[str]:
    match node:
        case ast.Import(names=names):
            return [alias.name for alias in names]
        case ast.ImportFrom(module=str(module), level=0):
            return [module]
        case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name)):
            return [name]
    return []
