"""Reading the log of a run."""

from pathlib import Path

from sft_cli.logs import LogTail, last_lines


def test_a_growing_log_is_read_by_whole_lines(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("one\ntw")
    tail = LogTail(log)

    assert tail.new_lines() == ["one"]
    assert tail.new_lines() == []
    with log.open("a") as file:
        file.write("o\nthree\n")
    assert tail.new_lines() == ["two", "three"]


def test_the_last_lines_are_those_of_the_worker_that_failed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("[rank 0] a\n[rank 1] b\n[rank 0] c\n[rank 0] d\n[supervisor] e\n")

    assert last_lines(log, 0, 2) == ["[rank 0] c", "[rank 0] d"]
    assert last_lines(log, 5, 2) == ["[rank 0] c", "[rank 0] d"]
    assert last_lines(log, None, 1) == ["[rank 0] d"]


def test_a_log_that_somebody_has_removed_ends_no_run(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("a\n")
    tail = LogTail(log)
    assert tail.new_lines() == ["a"]

    log.unlink()

    assert tail.new_lines() == []
    assert last_lines(log, 0, 20) == []
