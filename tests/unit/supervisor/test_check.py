"""What looks for errors before the imports: what it may stop, and what it may not."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from sft_api.failures import FailureClass
from sft_trainer.supervisor.check import Check
from sft_trainer.supervisor.output import Output
from sft_trainer.supervisor.workers import reap
from tests.unit.supervisor.test_environment import SETTINGS
from tests.waiting import wait_until

REPORTS = """
import sys
from pathlib import Path
from sft_api.progress import WorkerError
report = WorkerError(failure={failure!r}, message="what to change", rank=0, step=0, attempt=0, traceback="")
Path({file!r}).write_text(report.model_dump_json(by_alias=True))
sys.exit({code})
"""


@pytest.fixture
def check(tmp_path: Path) -> Check:
    (tmp_path / "errors").mkdir()
    return Check(replace(SETTINGS, check="looker", run_dir=tmp_path), Output())


def look(check: Check, folder: Path, source: str) -> bool:
    """Whether the check passes when it runs ``source``."""
    (folder / "looker.py").write_text(source)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
    assert not check.passed(environment), "it runs first"
    wait_until(lambda: check.note(reap()) or check.failure is not None)
    passed = check.failure is None
    assert check.passed(environment) is passed
    return passed


def report(folder: Path, failure: FailureClass, code: int) -> str:
    return REPORTS.format(failure=failure.value, file=str(folder / "errors" / "rank-0.json"), code=code)


def test_without_a_module_there_is_nothing_to_wait_for(tmp_path: Path) -> None:
    assert Check(replace(SETTINGS, check=None, run_dir=tmp_path), Output()).passed({})


def test_what_it_finds_is_said_until_it_looks_again(check: Check, tmp_path: Path) -> None:
    assert not look(check, tmp_path, report(tmp_path, FailureClass.STORAGE_UNAVAILABLE, 34))
    assert check.failure is not None
    assert (check.failure.failure, check.failure.message) == (FailureClass.STORAGE_UNAVAILABLE, "what to change")

    check.again()

    assert look(check, tmp_path, ""), "and what it found before counts no more"
    assert check.failure is None


@pytest.mark.parametrize("end", ["raise SystemExit(1)", "import os; os.kill(os.getpid(), 9)", "import no_such_module"])
def test_an_error_of_its_own_stops_nobody(check: Check, tmp_path: Path, end: str) -> None:
    assert look(check, tmp_path, end)


def test_what_only_the_run_may_say_stops_nobody(check: Check, tmp_path: Path) -> None:
    assert look(check, tmp_path, report(tmp_path, FailureClass.UNKNOWN, 36))
