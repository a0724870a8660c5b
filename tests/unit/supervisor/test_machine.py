"""What is read from the machine: control groups, the clock, lines of output, the termination message."""

import os
import select
import signal
from datetime import UTC, datetime
from pathlib import Path

import pytest

from sft_api.failures import FailureClass
from sft_api.progress import MOST_LAST_INCIDENTS, CommittedCheckpoint, Incident, Phase, TerminationMessage
from sft_api.v1alpha1 import SpentSeconds
from sft_trainer.launch import termination_json
from sft_trainer.supervisor.cgroup import Cgroup, available_cpus
from sft_trainer.supervisor.clock import AwakeClock
from sft_trainer.supervisor.output import MAX_LINE_BYTES, Forwarder, Output
from sft_trainer.supervisor.workers import Workers
from tests.waiting import PATIENCE_SECONDS, wait_until


def control_group(folder: Path, membership: str, files: dict[str, str]) -> Cgroup:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    (folder / "membership").write_text(membership)
    return Cgroup(folder, folder / "membership")


@pytest.mark.parametrize(
    ("membership", "files", "quota", "kills"),
    [
        ("0::/\n", {"cpu.max": "150000 100000\n", "memory.events": "low 0\noom 3\noom_kill 2\n"}, 1.5, 2),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/b/memory.events": "oom_kill 0\n"}, None, 0),
        (
            "4:memory:/pod\n1:cpu,cpuacct:/pod\n",
            {
                "cpu/pod/cpu.cfs_quota_us": "400000\n",
                "cpu/pod/cpu.cfs_period_us": "100000\n",
                "memory/pod/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n",
            },
            4.0,
            5,
        ),
        # Inside a container the path names a group that only the host sees.
        (
            "4:memory:/host/pod\n1:cpu:/host/pod\n",
            {
                "cpu/cpu.cfs_quota_us": "-1\n",
                "cpu/cpu.cfs_period_us": "100000\n",
                "memory/memory.oom_control": "oom_kill 1\n",
            },
            None,
            1,
        ),
        ("", {}, None, 0),
    ],
)
def test_control_groups(
    tmp_path: Path, membership: str, files: dict[str, str], quota: float | None, kills: int
) -> None:
    group = control_group(tmp_path, membership, files)

    assert group.cpu_quota() == quota
    assert group.out_of_memory_kills() == kills


def test_cpus_are_cut_by_the_quota_but_never_to_none(tmp_path: Path) -> None:
    affinity = len(os.sched_getaffinity(0))
    unlimited = control_group(tmp_path, "0::/\n", {"cpu.max": "max 100000"})
    assert available_cpus(unlimited) == affinity
    half = control_group(tmp_path, "0::/\n", {"cpu.max": "50000 100000"})
    assert available_cpus(half) == 1


def test_the_clock_does_not_count_times_asleep() -> None:
    times = iter([100.0, 101.0, 500.0, 500.5])
    clock = AwakeClock(lambda: next(times))

    assert [clock.now(), clock.now(), clock.now()] == [1.0, 3.0, 3.5]


def test_lines_arrive_whole_with_their_prefix(tmp_path: Path) -> None:
    output = Output()
    target = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    pipes = [os.pipe() for _ in range(2)]
    forwarders = [Forwarder(read, output, target, f"[{index}] ".encode()) for index, (read, _) in enumerate(pipes)]
    os.write(pipes[0][1], b"be")
    os.write(pipes[1][1], b"whole\n\nlast words\n")
    os.write(pipes[0][1], b"gin\nno newline")
    for _, write in pipes:
        os.close(write)
    for forwarder in forwarders:
        forwarder.join(60)
    output.flush(60)

    lines = (tmp_path / "log").read_text().splitlines()
    assert [line for line in lines if line.startswith("[0]")] == ["[0] begin", "[0] no newline"]
    assert [line for line in lines if line.startswith("[1]")] == ["[1] whole", "[1] ", "[1] last words"]
    assert [forwarder.last_line for forwarder in forwarders] == ["no newline", "last words"]


_WATCHDOG = "[PG ID 0 PG GUID 0(default_pg) Rank 3] Process group watchdog thread terminated with exception: "
_STACKS = "Fatal Python error: Aborted\n\nThread 0x1 (most recent call first):\n\nExtension modules: numpy (total: 1)\n"


@pytest.mark.parametrize(
    ("said", "exception"),
    [
        (
            f"[rank3]:[E1 x.cpp:1] {_WATCHDOG}CUDA error: uncorrectable ECC error\n",
            "CUDA error: uncorrectable ECC error",
        ),
        (f"terminate called after an error\n  what():  {_WATCHDOG}CUDA error: x\n", "CUDA error: x"),
        ("terminate called after an error\n  what():  no such thing\n  what():  later\n", "no such thing"),
        ("a line\n", ""),
    ],
)
def test_why_a_process_aborts_is_told_and_not_the_last_of_its_stacks(tmp_path: Path, said: str, exception: str) -> None:
    # Given a worker that aborts, and prints the stacks of its threads after the reason
    workers = Workers(1, tmp_path, Output(), expected=1)
    workers.start(lambda _, *, stdout, stderr: os.write(stderr, (said + _STACKS).encode()), {}, 3, b"")
    (pid,) = workers._workers

    # When it has ended, then the reason is told where it has said one
    workers.note({pid: -signal.SIGABRT})
    assert workers.ends[0].last_line == (exception or "Extension modules: numpy (total: 1)")


def test_nothing_is_lost_where_standard_output_does_not_block() -> None:
    # Given a pipe that some other program has set so, as it may a terminal, and a reader that is slower than a worker
    read, write = os.pipe2(os.O_NONBLOCK)
    os.set_blocking(read, True)
    output, line = Output(), b"x" * 50_000 + b"\n"
    for _ in range(10):
        output.write(write, line)

    # When it reads only once no more fits
    wait_until(lambda: not select.select([], [write], [], 0)[1])
    received = b""
    while len(received) < 10 * len(line) and select.select([read], [], [], PATIENCE_SECONDS)[0]:
        received += os.read(read, 2**16)

    # Then all has come
    assert received == 10 * line


def test_a_line_without_end_does_not_fill_the_memory(tmp_path: Path) -> None:
    output = Output()
    target = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    read, write = os.pipe()
    forwarder = Forwarder(read, output, target, b"")
    for _ in range(40):
        os.write(write, b"x" * 4096)
    os.close(write)
    forwarder.join(60)
    output.flush(60)

    lines = (tmp_path / "log").read_bytes().splitlines()
    assert sum(map(len, lines)) == 40 * 4096
    assert max(map(len, lines)) < 2 * MAX_LINE_BYTES


def test_the_termination_message_fits_whatever_it_says() -> None:
    end = TerminationMessage(
        failure=FailureClass.UNKNOWN,
        message="\N{SNOWMAN}\n" * 1000,
        checkpoints_uri="s3://" + "x" * 995,
        checkpoints=[CommittedCheckpoint(folder="step-99999999-a99999", time=datetime.now(UTC), size_bytes=10**15)]
        * 10,
        export_uri="s3://" + "x" * 495,
        spent=SpentSeconds(**dict.fromkeys(SpentSeconds.model_fields, 123456789.123)),
    )
    text = termination_json(end)

    assert len(text.encode()) <= 4096
    longest = end.model_copy(
        update={
            "curve_uri": "s3://" + "y" * 495,
            "checkpoints": [end.checkpoints[0].model_copy(update={"eval_loss": 1 / 3})] * 10,
        }
    )
    assert len(termination_json(longest).encode()) <= 4096
    for words in ("\x1b" * 500, "\N{PISTOL}" * 500):
        complete = longest.model_copy(
            update={"failure": None, "message": "", "stopped_early": words, "warning": "w" * 1000}
        )
        assert len(termination_json(complete).encode()) <= 4096
        assert words[:100] in TerminationMessage.model_validate_json(termination_json(complete)).stopped_early
    read = TerminationMessage.model_validate_json(text)
    assert read.failure is FailureClass.UNKNOWN
    assert read.message.startswith("\N{SNOWMAN}\n\N{SNOWMAN}")


def test_incidents_have_the_room_that_the_termination_message_leaves_the_newest_first() -> None:
    incidents = [
        Incident(
            id=f"0123456789ab-{number}",
            time=datetime.now(UTC),
            failure=FailureClass.WORKER_CRASHED,
            message=f"number {number} " + "\N{SNOWMAN}" * 490,
            host="node-a",
            step=100,
            attempt=2,
            phase=Phase.TRAINING,
            checkpoint_step=50,
            recovered_time=datetime.now(UTC),
            lost_steps=50,
        )
        for number in range(MOST_LAST_INCIDENTS)
    ]
    for message, room in (("the run is complete", 10), ("x" * 2000, 4), ("\x1b" * 2000, 0)):
        end = TerminationMessage(message=message, attempt=2, step=100, incidents=incidents)
        text = termination_json(end)
        read = TerminationMessage.model_validate_json(text)

        # What else is said stays as it is
        assert len(text.encode()) <= 4096
        alone = termination_json(end.model_copy(update={"incidents": []}))
        assert read.model_copy(update={"incidents": []}) == TerminationMessage.model_validate_json(alone)
        # Of what is told nothing but messages is missing
        assert len(read.incidents) >= room
        newest = incidents[len(incidents) - len(read.incidents) :]
        assert [item.model_copy(update={"message": ""}) for item in read.incidents] == [
            item.model_copy(update={"message": ""}) for item in newest
        ]
        assert [item.message[:10] for item in read.incidents[-1:]] == ["number 19 "][: len(read.incidents)]
