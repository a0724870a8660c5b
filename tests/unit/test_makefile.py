"""What `make` runs for a demo, and when, with programs in the place of the real ones that only say when they ran."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from sft_api.generate import ROOT


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The Makefile, beside a setup that takes more than a second and a Python that shows what it was given."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name, script in {
        "tests/setup.sh": "date +%s > set-up; sleep 1.1; touch .venv/.installed",
        ".venv/bin/python": 'echo "$SFT_DEMO_BEGAN $*" > demo',
        "requirements/dev.txt": "",
        "pyproject.toml": "",
    }.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)
    return tmp_path


def make(checkout: Path, *arguments: str) -> str:
    # A make above this one would hand down its own flags.
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "SFT_DEMO"))}
    return subprocess.run(
        ["make", *arguments], cwd=checkout, env=clean, capture_output=True, text=True, check=True
    ).stdout


def test_tests_run_two_at_a_time_unless_told_otherwise(checkout: Path) -> None:
    for target, processes in (("test", 4), ("quick", 2)):  # two of the four mostly wait
        assert f" -n {processes} " in make(checkout, "-n", target).splitlines()[-1]
        assert " -n" not in make(checkout, "-n", target, "TWO_AT_A_TIME=").splitlines()[-1]


def test_wrong_types_hide_no_test_and_are_an_error(checkout: Path) -> None:
    for name, script in {"ruff": "", "lint-imports": "", "python": 'echo "$*" >> said', "mypy": "exit 1"}.items():
        program = checkout / ".venv" / "bin" / name
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)

    with pytest.raises(subprocess.CalledProcessError):
        make(checkout, "test")

    assert (checkout / "said").read_text().splitlines()[-1].startswith("-m pytest -n 4 ")


def test_a_dry_run_of_the_demo_only_prints(checkout: Path) -> None:
    printed = make(checkout, "-n", "demo", "SEED=3")

    assert printed.splitlines()[0] == "tests/setup.sh"
    assert printed.splitlines()[-1] == ".venv/bin/python examples/demo.py --seed 3"
    assert not (checkout / "set-up").exists()
    assert not (checkout / "demo").exists()


def test_the_demo_counts_from_before_its_setup(checkout: Path) -> None:
    make(checkout, "demo", "SEED=3")

    began, *command = (checkout / "demo").read_text().split()
    assert command == ["examples/demo.py", "--seed", "3"]
    assert int(began) <= int((checkout / "set-up").read_text())
