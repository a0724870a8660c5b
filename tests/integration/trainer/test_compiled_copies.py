"""Compiled layers of one process with copies of its own: compiling takes longer than all unit tests of a strategy."""

from pathlib import Path

import pytest

from tests.unit.trainer.test_fsdp_strategy import with_copies_and_without

pytestmark = pytest.mark.usefixtures("process_group")


def test_compiled_layers_with_copies_compute_what_those_of_fsdp_do_to_the_last_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_copies_and_without(tmp_path, monkeypatch, "qwen3", {"compile": True})
