"""The commands that start nothing: help, validate, plan, and how errors look."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from sft_api.v1alpha1.status import PlanStatus
from sft_cli.console import coloured
from sft_cli.main import cli

from .jobs import manifest


def sft(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


def written(folder: Path, document: Any, name: str = "job.yaml") -> Path:
    path = folder / name
    path.write_text(document if isinstance(document, str) else yaml.safe_dump(document))
    return path


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return written(tmp_path, manifest(), "good.yaml")


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    return written(tmp_path, manifest(training={"steps": 5, "epochs": 2}, compute={"nodes": 0}), "bad.yaml")


def test_a_reader_that_has_seen_enough_is_no_error(good: Path) -> None:
    command = [sys.executable, "-m", "sft_cli.main", "plan", str(good)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert (process.stderr.read(), process.wait(timeout=60)) == ("", 0)


def test_valid_manifests_are_said_to_be_valid(good: Path) -> None:
    result = sft("validate", good)

    assert (result.exit_code, result.stdout) == (0, f"{good}: valid\n")


def test_every_problem_of_every_file_is_shown(good: Path, bad: Path) -> None:
    result = sft("validate", bad, good)

    assert result.exit_code == 10
    first, second, verdict = result.stdout.splitlines()
    assert first.startswith(f"{bad}: ")
    assert "training.steps or training.epochs" in first
    assert second == f"{bad}: spec.compute.nodes: must be at least 1, got 0"
    assert verdict == f"{good}: valid"


def test_verdicts_for_machines(good: Path, bad: Path) -> None:
    result = sft("validate", "--output", "json", good, bad)

    first, second = json.loads(result.stdout)
    assert result.exit_code == 10
    assert first == {"file": str(good), "valid": True, "problems": []}
    assert second["valid"] is False
    assert len(second["problems"]) == 2


def test_plan_as_table_and_as_status(good: Path) -> None:
    table = sft("plan", good).stdout
    documents = [
        yaml.safe_load(sft("plan", "-o", "yaml", good).stdout),
        json.loads(sft("plan", "-o", "json", good).stdout),
    ]

    assert table.splitlines()[0] == "tiny"
    assert "tokens a step" in table
    assert "\x1b" not in table
    assert documents[0] == documents[1]
    assert PlanStatus.model_validate(documents[0]).global_batch_tokens == 65_536


def test_a_manifest_that_is_not_valid_is_an_error_of_sentences(bad: Path) -> None:
    for command in ("plan", "run", "data"):
        result = sft(command, bad)

        assert result.exit_code == 10
        assert result.stdout == ""
        assert "training.steps or training.epochs" in result.stderr
        assert "Traceback" not in result.stderr


def test_a_file_that_is_not_there_is_a_usage_error(tmp_path: Path) -> None:
    result = sft("plan", tmp_path / "none.yaml")

    assert result.exit_code == 2
    assert "none.yaml" in result.stderr


@pytest.mark.parametrize("arguments", [["--debug", "plan"], ["plan", "--debug"]])
def test_debug_shows_where_an_error_comes_from(arguments: list[str], bad: Path) -> None:
    result = sft(*arguments, bad)

    assert result.exit_code == 1
    assert type(result.exception).__name__ == "UserError"


def test_our_own_mistakes_are_said_to_be_ours(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr("sft_cli.plan.show_plan", broken)

    result = sft("plan", good)

    assert result.exit_code == 1
    assert "ZeroDivisionError: oops" in result.stderr
    assert "report it" in result.stderr


@pytest.mark.parametrize(
    ("terminal", "environment", "expected"),
    [
        (True, {"TERM": "xterm"}, True),
        (True, {"TERM": "xterm", "NO_COLOR": "1"}, False),
        (True, {"TERM": "dumb"}, False),
        (False, {"TERM": "xterm"}, False),
    ],
)
def test_colour_only_where_it_is_wanted(
    terminal: bool, environment: dict[str, str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stream:
        def isatty(self) -> bool:
            return terminal

    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    assert coloured(Stream()) is expected  # type: ignore[arg-type]


def test_short_commands_import_nothing_heavy(good: Path) -> None:
    program = (
        "import sys; from sft_cli.main import cli\n"
        "for arguments in (['--help'], ['validate', sys.argv[1]], ['plan', sys.argv[1]]):\n"
        "    try:\n        cli.main(arguments)\n    except SystemExit:\n        pass\n"
        "heavy = {'torch', 'transformers', 'datasets', 'numpy', 'rich', 'boto3', 'sft_trainer'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )

    done = subprocess.run([sys.executable, "-c", program, str(good)], capture_output=True, text=True, check=True)

    assert done.stderr.strip() == "[]"
    assert "tokens a step" in done.stdout
