"""Processes of the test cluster: clear errors, and no signal to a stranger."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.cluster.processes import Component, StartError, Supervisor


def test_a_process_that_ends_quotes_its_log(tmp_path: Path) -> None:
    broken = Component("broken", ["sh", "-c", "echo address already in use; exit 3"], lambda: "no answer")

    with pytest.raises(StartError, match=r"broken exited while starting(.|\n)*address already in use"):
        Supervisor(tmp_path).start(broken)


def test_a_process_that_never_answers_says_what_is_missing(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path)
    silent = Component("silent", ["sleep", "60"], lambda: "GET /readyz: refused", deadline_seconds=0.2)

    with pytest.raises(StartError, match="GET /readyz: refused"):
        supervisor.start(silent)

    supervisor.stop("silent")
    assert supervisor.pid("silent") is None


def test_another_command_line_replaces_the_process_and_the_same_one_does_not(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path)
    supervisor.start(Component("one", ["sleep", "60"]))
    first = supervisor.pid("one")

    assert not supervisor.start(Component("one", ["sleep", "60"]))
    assert supervisor.pid("one") == first
    assert supervisor.start(Component("one", ["sleep", "61"]))
    assert supervisor.pid("one") not in (None, first)

    supervisor.stop("one")


def test_a_recycled_pid_is_not_ours(tmp_path: Path) -> None:
    stranger = subprocess.Popen(["sleep", "60"])
    supervisor = Supervisor(tmp_path)
    (tmp_path / "pids").mkdir()
    record = {"pid": stranger.pid, "started": "1", "digest": ""}
    (tmp_path / "pids" / "old.json").write_text(json.dumps(record))

    supervisor.stop("old")

    assert stranger.poll() is None
    stranger.kill()
    stranger.wait()


def test_a_process_that_was_dead_before_it_was_recorded_is_not_running(tmp_path: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    (tmp_path / "pids").mkdir()
    (tmp_path / "pids" / "gone.json").write_text(json.dumps({"pid": gone.pid, "started": None, "digest": ""}))

    assert Supervisor(tmp_path).pid("gone") is None
