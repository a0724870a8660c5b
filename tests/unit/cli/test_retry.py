"""What ``sft retry`` asks for, and what it says of that."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sft_cli.errors import UserError
from sft_cli.retry import retry


def answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, suspend: bool = False, **metadata: str) -> Path:
    """A ``kubectl`` that knows a job that has failed; the file with what it was called with."""
    failed = {
        "metadata": {"resourceVersion": "7", **metadata},
        "spec": {"suspend": suspend},
        "status": {"state": "Failed", "completionTime": "2026-01-01T12:00:00Z"},
    }
    kubectl, calls = tmp_path / "kubectl", tmp_path / "calls"
    kubectl.write_text(f"#!/bin/sh\necho \"$@\" >> {calls}\necho '{json.dumps(failed)}'\n")
    kubectl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return calls


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What ``kubectl`` was called with, where the job has failed."""
    return answers(tmp_path, monkeypatch)


def test_what_is_being_deleted_does_not_begin_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = answers(tmp_path, monkeypatch, deletionTimestamp="2026-01-01T12:00:00Z")

    with pytest.raises(UserError, match="tulu is being deleted: submit it again under its name once it is gone"):
        retry("tulu", None, None, take_over=False)

    assert "annotate" not in calls.read_text()


def test_who_asks_for_what_is_suspended_is_told_what_else_to_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers(tmp_path, monkeypatch, suspend=True)

    assert "its spec.suspend is true: set that to false as well" in retry("tulu", None, None, take_over=False)


def test_who_asks_is_told_how_to_follow_and_what_is_waited_for(asked: Path) -> None:
    said = retry("tulu", "team", None, take_over=False)

    assert "annotate sftjobs.sftjob.dev tulu sftjob.dev/retry=" in asked.read_text().splitlines()[-1]
    first, second = said.splitlines()
    assert first == "tulu begins again, from its newest checkpoint: kubectl get sftjob tulu --namespace=team --watch"
    assert second == "(once nothing is left of what has failed; until then status.message names what is waited for)"


def test_a_cluster_that_is_away_is_said_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kubectl = tmp_path / "kubectl"
    logged = 'E1126 13:59:38.150318   16041 memcache.go:265] "Unhandled Error" err="connection refused"'
    kubectl.write_text(f"#!/bin/sh\nfor i in 1 2 3; do echo '{logged}' >&2; done\necho 'It was refused' >&2\nexit 1\n")
    kubectl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    with pytest.raises(UserError) as refused:
        retry("tulu", None, None, take_over=False)

    assert refused.value.problems == ("It was refused",)


@pytest.mark.parametrize(("mode", "text", "reason"), [(0o644, "x", "Permission denied"), (0o755, "x", "format")])
def test_a_kubectl_that_cannot_be_started_is_said(
    mode: int, text: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that was downloaded and not made executable, or for another kind of machine."""
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(text)
    kubectl.chmod(mode)
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(UserError, match=f"kubectl cannot be started here .*{reason}"):
        retry("tulu", None, None, take_over=False)
