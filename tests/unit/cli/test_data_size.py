"""How much data a plan can tell of, and that it reads no large files for it."""

import json
from pathlib import Path

from sft_api.v1alpha1.job import SFTJobSpec
from sft_cli.data_size import measure
from sft_trainer.data.source_rows import SMALL_BYTES
from tests.unit.cli.jobs import job

ROW = {"messages": [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "Two."}]}


def spec(folder: Path) -> SFTJobSpec:
    return job(data={"train": [{"uri": f"file://{folder}"}]}).spec


def test_rows_and_tokens_of_files_that_are_here_are_told(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(f"{json.dumps(ROW)}\n" * 300)

    assert measure(spec(tmp_path)) == (300, 300 * len(json.dumps(ROW)) / 4)
    assert measure(job().spec) is None  # of the hub nothing is asked


def test_what_lies_in_folders_is_counted_and_large_data_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(f"{json.dumps(ROW)}\n")
    beside = tmp_path / "images" / "all.bin"
    beside.parent.mkdir()
    with beside.open("wb") as file:
        file.truncate(SMALL_BYTES - 1000)
    assert measure(spec(tmp_path))

    with beside.open("wb") as file:
        file.truncate(SMALL_BYTES)
    assert measure(spec(tmp_path)) is None


def test_rows_that_are_held_out_are_not_counted(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(f"{json.dumps(ROW)}\n" * 300)
    data = {"train": [{"uri": f"file://{tmp_path}"}], "heldOut": {"fraction": 0.1}}

    assert measure(job(data=data).spec) == (270, 270 * len(json.dumps(ROW)) / 4)
