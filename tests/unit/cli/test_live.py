"""What a running job shows."""

import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from typing import cast

import pytest
from rich.cells import cell_len

from sft_api.failures import FailureClass
from sft_api.progress import Incident, Phase, Progress, StorageOutage, TrainingProgress
from sft_api.v1alpha1.status import CheckpointsStatus, CheckpointStatus
from sft_cli.interruptions import Interruptions
from sft_cli.live import PlainDisplay, TerminalDisplay, incident_line, open_display, progress_line, shortened
from sft_cli.run import Follower
from sft_cli.supervisor import Supervisor

NOW = datetime(2026, 11, 21, 12, 0, 30, tzinfo=UTC)
INCIDENT = Incident(id="1", time=NOW, failure=FailureClass.HANG, message="no new step for 180 s", rank=2, step=7)
STOPPED = INCIDENT.model_copy(update={"id": "2", "failure": FailureClass.INTERRUPTED})


def training(step: int = 0, phase: Phase = Phase.TRAINING, attempt: int = 1) -> Progress:
    return Progress(training=TrainingProgress(attempt=attempt, phase=phase, step=step, total_steps=40))


def test_a_line_holds_all_that_is_known() -> None:
    latest = CheckpointStatus(
        step=1200, attempt=1, uri="file:///c", time="2026-11-21T11:59:00Z", size_bytes=1, verified=True
    )
    report = TrainingProgress(
        attempt=1,
        phase=Phase.TRAINING,
        step=1234,
        total_steps=5000,
        loss=1.23456,
        eval_loss=1.5,
        tokens_per_second=81234.5,
        remaining_seconds=11520,
        checkpoints=CheckpointsStatus(latest=latest),
    )

    line = progress_line(Progress(training=report, incidents=[INCIDENT, STOPPED]), NOW)

    assert line == (
        "step 1,234/5,000 · loss 1.2346 · eval 1.5000 · 81,234 tok/s · 3h12m left · saved 1,200, 1m30s ago · 1 restart"
    )


def test_a_line_leaves_out_what_is_not_known() -> None:
    tokenizing = TrainingProgress(phase=Phase.TOKENIZING, phase_detail="1200/5000 rows")

    assert progress_line(Progress(training=tokenizing), NOW) == "Tokenizing: 1200/5000 rows"


FIGURES = TrainingProgress(
    phase=Phase.TRAINING,
    step=1234,
    total_steps=5000,
    loss=1.23456,
    eval_loss=1.5,
    tokens_per_second=81234.5,
    remaining_seconds=11520,
)


@pytest.mark.parametrize(
    ("width", "line"),
    [
        (80, "step 1,234/5,000 · loss 1.2346 · eval 1.5000 · 81,234 tok/s · 3h12m left"),
        (60, "step 1,234/5,000 · loss 1.2346 · eval 1.5000 · 3h12m left"),
        (45, "step 1,234/5,000 · loss 1.2346 · 3h12m left"),
        (35, "step 1,234/5,000 · loss 1.2346"),
        (20, "step 1,234/5,000"),
    ],
)
def test_a_narrow_line_holds_whole_figures_the_most_wanted_first(width: int, line: str) -> None:
    assert progress_line(Progress(training=FIGURES), NOW, width) == line


def test_a_long_place_is_shown_by_its_ends() -> None:
    detail = "file:///a/very/long/place/that/fills/more/than/a/line/of/60/train.jsonl: 1200/5000 rows"
    tokenizing = TrainingProgress(phase=Phase.TOKENIZING, phase_detail=detail)

    line = progress_line(Progress(training=tokenizing), NOW, 57)

    assert len(line) == 57
    assert line.startswith("Tokenizing: file:///a/")
    assert line.endswith("train.jsonl: 1200/5000 rows")


@pytest.mark.parametrize("width", range(12))
def test_wide_characters_count_twice(width: int) -> None:
    assert cell_len(shortened("数据数据数据数据", width)) <= width


def test_what_is_done_before_the_first_report_is_said() -> None:
    assert progress_line(Progress(), NOW) == "Starting: importing torch and transformers"


def test_an_incident_says_what_where_and_when() -> None:
    assert incident_line(INCIDENT) == "Hang on rank 2 after step 7: no new step for 180 s"


def test_plain_lines_come_with_new_phases_and_with_time(capsys: pytest.CaptureFixture[str]) -> None:
    time = 0.0
    display = PlainDisplay(clock=lambda: time)

    display.show(training(1))
    display.show(training(2))
    display.show(training(2, Phase.SAVING))
    display.show(training(3))
    time = 11.0
    display.show(training(9))
    display.show(training(10))
    time = 30.0
    display.show(training(9))
    display.show(training(5, attempt=2))
    display.say("Warning: short data", fg="yellow")

    out, err = capsys.readouterr()
    assert err.splitlines() == [
        "step 1/40",
        "Saving · step 2/40",
        "step 9/40",
        "step 5/40",
        "Warning: short data",
    ]
    assert out == ""


WAITS = TrainingProgress(
    attempt=1,
    phase=Phase.WAITING,
    phase_detail="for the store",
    storage_outage=StorageOutage(
        since=NOW - timedelta(seconds=100),
        ends=NOW + timedelta(seconds=3500),
        failure=FailureClass.ACCESS_DENIED,
        message="the key was revoked",
    ),
)


def test_a_run_that_waits_for_its_store_says_since_when_and_why() -> None:
    line = "Waiting: for the store · nothing can be saved since 2026-11-21T11:58:50Z, for 1m40s"
    more = " · the key was revoked; the run waits until 2026-11-21T12:58:50Z"

    assert progress_line(Progress(training=WAITS), NOW) == line + more
    assert progress_line(Progress(training=WAITS), NOW, 100) == line
    trains = WAITS.model_copy(update={"phase": Phase.TRAINING, "phase_detail": "", "step": 3})
    assert progress_line(Progress(training=trains), NOW) == "step 3"


@pytest.mark.parametrize(
    ("phase", "then"),
    [
        (Phase.WAITING, "the run waits until 2026-11-21T12:58:50Z"),
        # Of the last save and the export it is not so that training goes on.
        *((phase, "the run ends at 2026-11-21T12:58:50Z if that lasts") for phase in (Phase.TRAINING, Phase.SAVING)),
    ],
)
def test_an_outage_of_the_store_is_warned_of_once(phase: Phase, then: str, capsys: pytest.CaptureFixture[str]) -> None:
    class Told:
        asked = 0

        def wait(self, seconds: float) -> int | None:
            return 0 if self.asked else None

        def progress(self) -> Progress:
            self.asked += 1
            return self.last_report(Progress())

        def last_report(self, heard: Progress) -> Progress:
            return Progress(training=WAITS.model_copy(update={"phase": phase}))

    follower = Follower(cast("Supervisor", Told()), PlainDisplay(), None, max_restarts=3)
    follower.follow(Interruptions())

    warnings = [line for line in capsys.readouterr().err.splitlines() if line.startswith("Warning")]
    assert warnings == [f"Warning: nothing can be saved since 2026-11-21T11:58:50Z: the key was revoked; {then}"]


def test_what_others_wrote_commands_no_terminal_from_the_line_either() -> None:
    """Places are named there, and what a store answers."""
    evil = "a\x1b]52;c;cm0=\x07b\x9b1A"
    outage = WAITS.storage_outage.model_copy(update={"message": evil}) if WAITS.storage_outage else None
    waits = Progress(training=WAITS.model_copy(update={"phase_detail": evil, "storage_outage": outage}))

    line = progress_line(waits, NOW, 500)

    assert line.count("a\\x1b]52;c;cm0=\\x07b\\x9b1A") == 2
    assert line.isprintable()
    assert cell_len(progress_line(waits, NOW, 30)) <= 30


def test_plain_lines_go_on_while_no_step_is_made(capsys: pytest.CaptureFixture[str]) -> None:
    time = 0.0
    display = PlainDisplay(clock=lambda: time)
    starts = TrainingProgress(attempt=1, phase=Phase.STARTING)

    # Both phases were there before, and a start that is refused tells nothing else.
    display.show(Progress(training=WAITS.model_copy(update={"storage_outage": None})))
    display.show(Progress(training=starts))
    for seconds in range(1, 31):
        time = float(seconds)
        since = NOW + timedelta(seconds=seconds)  # so that what is told changes, whatever the time
        outage = WAITS.storage_outage.model_copy(update={"since": since}) if WAITS.storage_outage else None
        display.show(Progress(training=WAITS.model_copy(update={"storage_outage": outage})))
    time = 45.0
    for _ in range(2):
        display.show(Progress(training=starts))
        time += 11

    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["Waiting: for the store", "Starting: importing torch and transformers"]
    assert [line.split(" · ")[0] for line in lines[2:]] == ["Waiting: for the store"] * 3 + [lines[1]]


def test_the_terminal_shows_one_line_that_is_gone_at_the_end() -> None:
    screen = io.StringIO()
    display = TerminalDisplay(screen, width=lambda: 20)

    display.show(training(3))
    display.say("Warning: data that is longer than a line", fg="yellow")
    display.close()
    display.close()

    text = screen.getvalue()
    assert re.search(r"\x1b\[33mWarning: data that is longer than a line\x1b\[0m\n. step 3/40", text)
    assert text.endswith("\r\x1b[J\x1b[?25h")


@pytest.mark.parametrize("number", [signal.SIGTSTP, signal.SIGQUIT])
def test_who_leaves_the_terminal_by_a_key_has_a_cursor_there(number: signal.Signals) -> None:
    shows = (
        "import resource, signal, sys, time; from sft_cli.live import TerminalDisplay; "
        # What started the tests may ignore them.
        "signal.signal(signal.SIGQUIT, signal.SIG_DFL); signal.signal(signal.SIGTSTP, signal.SIG_DFL); "
        "resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); TerminalDisplay(sys.stderr); time.sleep(60)"
    )
    screen, terminal = pty.openpty()
    # In a group of its own in the session of this process, as a shell starts it: else nothing would stop it.
    with subprocess.Popen([sys.executable, "-c", shows], stderr=terminal, process_group=0) as process:
        try:
            shown = os.read(screen, 4096)
            os.kill(process.pid, number)
            _, status = os.waitpid(process.pid, os.WUNTRACED)
            while b"?25h" not in shown and select.select([screen], [], [], 5)[0]:
                shown += os.read(screen, 4096)
            left = shown.endswith(b"\r\x1b[J\x1b[?25h")
            if number == signal.SIGQUIT:
                assert os.WTERMSIG(status) == number
            else:
                assert os.WSTOPSIG(status) == number
                os.kill(process.pid, signal.SIGCONT)
                assert b"Starting: the supervisor" in os.read(screen, 4096)
        finally:
            process.kill()
            os.close(terminal)
            os.close(screen)

    assert left


@pytest.mark.parametrize(
    ("live", "terminal", "environment", "kind"),
    [
        (True, True, {"TERM": "xterm"}, TerminalDisplay),
        (False, True, {"TERM": "xterm"}, PlainDisplay),
        (True, True, {"TERM": "dumb"}, PlainDisplay),
        (True, False, {"TERM": "xterm"}, PlainDisplay),
        # What CI sets, for colours: its log is no terminal, and would keep eight looks of the line a second.
        (True, False, {"TERM": "xterm", "FORCE_COLOR": "1"}, PlainDisplay),
    ],
)
def test_a_changing_line_only_where_it_is_of_use(
    live: bool, terminal: bool, environment: dict[str, str], kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stream(io.StringIO):
        def isatty(self) -> bool:
            return terminal

    monkeypatch.setattr("sys.stderr", Stream())
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    display = open_display(live=live)
    display.close()

    assert isinstance(display, kind)
