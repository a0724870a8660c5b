"""Rows of local files, folders, prefixes and saved data sets; splits, slices, identity and errors."""

import errno
import json
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest
from pyarrow import parquet

from sft_api.v1alpha1 import DataSource
from sft_trainer.data.source_rows import SourceRows, bytes_below, open_path
from sft_trainer.data.text_rows import open_lines
from sft_trainer.errors import DataError
from tests.git_lfs import GIT_LFS_POINTER

ROWS = [{"n": i, "text": f"é{i}"} for i in range(10)]


def open_rows(path: Path, **fields: Any) -> SourceRows:
    return open_path(path, DataSource(uri=f"file://{path}", **fields))


def numbers(rows: SourceRows) -> list[int]:
    return [row["n"] for _, row in rows.read(0, len(rows))]


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=3)
    return path


def write_arrow(path: Path, rows: list[dict[str, Any]], stream: bool) -> Path:
    table = pa.Table.from_pylist(rows)
    new = pa.ipc.new_stream if stream else pa.ipc.new_file
    with new(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)
    return path


@pytest.fixture(params=["jsonl", "json lines", "json array", "parquet", "arrow file", "arrow stream"])
def one_file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    match request.param:
        case "jsonl":
            return write_jsonl(tmp_path / "rows.jsonl", ROWS)
        case "json lines":
            return write_jsonl(tmp_path / "rows.json", ROWS)
        case "json array":
            (tmp_path / "rows.json").write_text(json.dumps(ROWS, indent=1))
            return tmp_path / "rows.json"
        case "parquet":
            return write_parquet(tmp_path / "rows.parquet", ROWS)
        case kind:
            return write_arrow(tmp_path / "rows.arrow", ROWS, stream=kind == "arrow stream")


def test_every_kind_of_file_gives_its_rows_in_order(one_file: Path) -> None:
    rows = open_rows(one_file)
    assert [row for _, row in rows.read(0, 10)] == ROWS
    # also from the middle on, across the pieces that the file is stored in, and in another process
    copy: SourceRows = pickle.loads(pickle.dumps(rows))
    for start, stop in [(0, 0), (1, 2), (2, 8), (9, 10)]:
        assert [row for _, row in copy.read(start, stop)] == ROWS[start:stop]


def test_places_count_from_one_and_lines_count_empty_ones(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('\n{"n": 0}\n  \n\n{"n": 1}')
    rows = open_rows(path)
    assert [place for place, _ in rows.read(0, 2)] == [f"{path} line 2", f"{path} line 5"]
    table = open_rows(write_parquet(tmp_path / "rows.parquet", ROWS))
    assert [place for place, _ in table.read(4, 5)] == [f"{tmp_path}/rows.parquet row 5"]


def test_reading_starts_at_any_line_of_a_long_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"n": {i}}}\n' + "\n" * (i % 3) for i in range(2000)))
    reader = open_lines(path)
    lines = path.read_text().split("\n")
    for start in (0, 511, 512, 513, 1023, 1999):
        place, row = next(reader.read(start, start + 1))
        assert row == {"n": start}
        assert json.loads(lines[int(place.rsplit(" ", 1)[1]) - 1]) == row


def test_nulls_of_struct_columns_are_left_out(tmp_path: Path) -> None:
    rows = [{"n": 0, "m": [{"role": "user", "content": "a"}]}, {"n": 1, "m": [{"role": "tool", "name": "b"}]}]
    read = open_rows(write_parquet(tmp_path / "rows.parquet", rows))
    assert [row for _, row in read.read(0, 2)] == rows


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        ("train", "0123456789"),
        ("train[:3]", "012"),
        ("train[-3:]", "789"),
        ("train[10%:20%]", "1"),
        ("train[:25%]", "01"),
        ("train[:35%]", "0123"),
        ("train[-25%:]", "89"),
        ("train[2:-2]", "234567"),
        ("train[:500]", "0123456789"),
        ("train[:2]+train[8:]", "0189"),
        ("train[5:2]", ""),
        ("train[:1_0]", "0123456789"),
    ],
)
def test_slices_are_those_of_the_hub_library(tmp_path: Path, split: str, expected: str) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    assert "".join(map(str, numbers(open_rows(path, split=split)))) == expected
    absolute = datasets.ReadInstruction.from_spec(split).to_absolute({"train": 10})
    assert expected == "".join(str(n) for part in absolute for n in range(part.from_, part.to))


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "b.jsonl", ROWS[5:])
    write_jsonl(tmp_path / "a" / "x.jsonl", ROWS[:5])
    write_jsonl(tmp_path / ".cache" / "y.jsonl", ROWS)
    (tmp_path / "README.md").write_text("# rows")
    (tmp_path / "dataset_info.json").write_text("{}")
    assert numbers(open_rows(tmp_path)) == list(range(10))
    # slices go across files
    assert numbers(open_rows(tmp_path, split="train[4:6]")) == [4, 5]


@pytest.mark.parametrize(
    ("names", "split", "expected"),
    [
        (("train.jsonl", "test.jsonl"), None, ["train.jsonl"]),
        (("train.jsonl", "test.jsonl"), "test", ["test.jsonl"]),
        (("train/1.jsonl", "dev/1.jsonl"), "validation", ["dev/1.jsonl"]),
        (
            ("train_sft-00000-of-00001.jsonl", "test_sft-00000-of-00001.jsonl"),
            "test_sft",
            ["test_sft-00000-of-00001.jsonl"],
        ),
        (
            ("train/part-00000-of-00001.jsonl", "test/part-00000-of-00001.jsonl"),
            None,
            ["train/part-00000-of-00001.jsonl"],
        ),
        (("chats-00000-of-00001.jsonl",), None, ["chats-00000-of-00001.jsonl"]),
        (("1.jsonl", "2.jsonl"), "train", ["1.jsonl", "2.jsonl"]),
        (("only-test.jsonl",), None, ["only-test.jsonl"]),
    ],
)
def test_splits_of_a_folder(tmp_path: Path, names: tuple[str, ...], split: str | None, expected: list[str]) -> None:
    for name in names:
        write_jsonl(tmp_path / name, [{"name": name}])
    rows = open_rows(tmp_path, split=split)
    assert [row["name"] for _, row in rows.read(0, len(rows))] == expected


def test_a_folder_is_read_with_the_folders_that_are_linked_there(tmp_path: Path) -> None:
    # Given a folder with data of its own, a link to a folder elsewhere, and one that leads back
    write_jsonl(tmp_path / "data" / "a.jsonl", ROWS[:2])
    write_jsonl(tmp_path / "elsewhere" / "b.jsonl", ROWS[5:7])
    (tmp_path / "data" / "more").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "back").symlink_to(tmp_path / "data")

    # Then all rows are read, each once
    assert numbers(open_rows(tmp_path / "data")) == [0, 1, 5, 6]
    sizes = [file.stat().st_size for file in (tmp_path / "data" / "a.jsonl", tmp_path / "elsewhere" / "b.jsonl")]
    assert bytes_below(tmp_path / "data") == sum(sizes)

    # When what is linked has gone, then nothing is read in place of all
    (tmp_path / "data" / "c.jsonl").symlink_to("gone.jsonl")
    with pytest.raises(DataError, match=r"c\.jsonl is a link to gone\.jsonl, which is not there"):
        open_rows(tmp_path / "data")


def test_what_is_linked_within_a_folder_is_read_once(tmp_path: Path) -> None:
    # Given links beside what they lead to, in the folder and in one that is linked there, and one to what is hidden
    data, elsewhere = tmp_path / "data", tmp_path / "elsewhere"
    write_jsonl(data / "2024-02" / "a.jsonl", ROWS[:2])
    write_jsonl(data / ".kept" / "b.jsonl", ROWS[2:4])
    write_jsonl(elsewhere / "v1" / "c.jsonl", ROWS[5:7])
    (data / "latest").symlink_to("2024-02")
    (data / "older").symlink_to(".kept")
    (data / "more").symlink_to(elsewhere)
    (elsewhere / "newest").symlink_to("v1")

    # Then no row comes twice, and none is left out
    assert sorted(numbers(open_rows(data))) == [0, 1, 2, 3, 5, 6]


def test_a_link_that_says_a_split_is_what_that_split_is_read_by(tmp_path: Path) -> None:
    # Given parts of one folder that links make the splits, and what is shared by two
    data = tmp_path / "data"
    write_jsonl(data / "all" / "1" / "a.jsonl", ROWS[:2])
    write_jsonl(data / "all" / "2" / "b.jsonl", ROWS[2:4])
    (data / "train").symlink_to("all/1")
    (data / "test").symlink_to("all/2")

    # Then nobody trains what is held back, not even without a split
    assert [numbers(open_rows(data, split=split)) for split in ("train", "test")] == [[0, 1], [2, 3]]
    with pytest.raises(DataError, match="only the names of others say a split"):
        open_rows(data)

    shared = tmp_path / "shared"
    write_jsonl(shared / "both" / "c.jsonl", ROWS[:1])
    for number, split in enumerate(("train", "test"), start=1):
        write_jsonl(shared / split / "own.jsonl", ROWS[number : number + 1])
        (shared / split / "more").symlink_to("../both")
    assert [numbers(open_rows(shared, split=split)) for split in ("train", "test")] == [[0, 1], [0, 2]]


@pytest.mark.parametrize("name", ["rows", "train", "train-00000-of-00001"])
def test_a_link_without_a_split_to_a_folder_of_one_gives_no_row_twice(tmp_path: Path, name: str) -> None:
    write_jsonl(tmp_path / "train" / f"{name}.jsonl", ROWS[:2])
    (tmp_path / "latest").symlink_to("train")

    assert numbers(open_rows(tmp_path)) == [0, 1]


@pytest.mark.parametrize("name", ["{}", "{}-00000-of-00001"])
def test_what_says_its_split_is_read_once_whatever_links_to_its_folder_say(tmp_path: Path, name: str) -> None:
    for split, rows in (("train", ROWS[:2]), ("test", ROWS[2:3])):
        write_jsonl(tmp_path / "v1" / f"{name.format(split)}.jsonl", rows)
    (tmp_path / "train").symlink_to("v1")

    assert [numbers(open_rows(tmp_path, split=split)) for split in ("train", "test")] == [[0, 1], [2]]


def test_a_link_to_what_the_folder_lies_in_gives_no_row_twice(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "data" / "a.jsonl", ROWS[:2])
    (tmp_path / "data" / "up").symlink_to("..")

    assert numbers(open_rows(tmp_path / "data")) == [0, 1]


def test_a_folder_that_may_not_be_read_is_no_empty_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_jsonl(tmp_path / "a.jsonl", ROWS)
    listed = Path.iterdir
    closed = ["lost+found", ".trash"]

    def iterdir(path: Path) -> Iterator[Path]:
        if path.name in closed:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    for name in (*closed, "more", ".hidden/below"):
        (tmp_path / name).mkdir(parents=True)
    closed.append("below")
    assert numbers(open_rows(tmp_path)) == [*range(10)]
    closed.append("more")
    with pytest.raises(DataError, match=r"more cannot be read \(Permission denied\): give user \d+ access"):
        open_rows(tmp_path)


def test_files_that_would_be_left_out_because_others_name_a_split_are_refused(tmp_path: Path) -> None:
    # Given a file whose name happens to hold the word of a split
    for name in ("chat.jsonl", "dev-tools.jsonl"):
        write_jsonl(tmp_path / name, [{"name": name}])
    # Then it is not taken for all of the data
    with pytest.raises(
        DataError, match=r"1 file \(chat\.jsonl\) would be left out, as only .* \(validation\): set split"
    ):
        open_rows(tmp_path)
    # but whoever asks for a split gets it, and is told
    rows = open_rows(tmp_path, split="validation")
    assert [row["name"] for _, row in rows.read(0, 9)] == ["dev-tools.jsonl"]
    assert rows.warnings == (
        f"data source file://{tmp_path}: 1 file (chat.jsonl) left out: only the names of others say a split",
    )


def test_packed_files_and_tables_beside_the_data_are_told(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", ROWS)
    assert open_rows(tmp_path).warnings == ()
    for name in ("README.md", "_old.jsonl.xz", ".cache/x.csv", *(f"b{i}.jsonl.xz" for i in range(6)), "c.csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    (warning,) = open_rows(tmp_path).warnings
    names = "b0.jsonl.xz, b1.jsonl.xz, b2.jsonl.xz, b3.jsonl.xz, b4.jsonl.xz, … 2 more"
    assert warning == (
        f"data source file://{tmp_path}: 7 files ({names}) left out: only those of kind .jsonl are read: unpack or "
        "convert the others if they belong to the data"
    )


def test_one_file_is_read_whatever_its_name_says(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "test.jsonl", ROWS)
    for split in (None, "train", "test"):
        assert len(open_rows(path, split=split)) == 10
    with pytest.raises(DataError, match="no split 'validation', found test"):
        open_rows(path, split="validation")
    # A name of which train is a part is that of another split, which the file may have.
    shard = write_jsonl(tmp_path / "train_sft-00000-of-00001.jsonl", ROWS)
    for split, count in ((None, 10), ("train", 10), ("train_sft", 10), ("train_sft[:3]", 3)):
        assert len(open_rows(shard, split=split)) == count


def test_saved_data_sets(tmp_path: Path) -> None:
    saved = datasets.Dataset.from_list(ROWS)
    saved.save_to_disk(tmp_path / "one", num_shards=3)
    (tmp_path / "one" / "cache-1.arrow").write_bytes(b"not a part of it")
    assert numbers(open_rows(tmp_path / "one")) == list(range(10))
    datasets.DatasetDict(train=saved, test=saved.select([7])).save_to_disk(tmp_path / "both")
    assert numbers(open_rows(tmp_path / "both", split="test")) == [7]
    assert numbers(open_rows(tmp_path / "both", split="train[:1]+test")) == [0, 7]


def test_identity_is_content_and_slice_not_place(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ROWS)
    copy = write_jsonl(tmp_path / "copy" / "b.jsonl", ROWS)
    digest = open_rows(path).digest
    assert open_rows(copy).digest == digest
    assert open_rows(path, split="train[:10]").digest == digest
    assert open_rows(path, split="train[:9]").digest != digest
    write_jsonl(path, [*ROWS[:9], {"n": 9, "text": "changed"}])
    assert open_rows(path).digest != digest


def test_what_is_wrong_in_a_line_is_quoted_with_where_it_stands_in_it(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"n": 0}\n{"n": 1,}\n')
    with pytest.raises(DataError, match=r"line 2 is not valid JSON \(.* at character \d+\): '\{\"n\": 1,\}'; correct"):
        list(open_rows(path).read(0, 2))
    # Of a long line the part that is wrong
    path.write_text(f'{{"text": "{"a" * 5000}", wrong, "more": "{"b" * 5000}"}}\n')
    with pytest.raises(DataError, match=r"at character 5014\): 'a+\", wrong, \"more\": \"b+'; correct"):
        list(open_rows(path).read(0, 1))
    path.write_text('{\n"n": 0\n}\n')
    with pytest.raises(DataError, match=r"line 1 is not valid JSON .*'\{'; .*; an object stands on one line$"):
        list(open_rows(path).read(0, 1))


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"n": 0}\n\n{"n": 1\n')
    with pytest.raises(DataError, match=r"rows.jsonl line 3 is not valid JSON .*'\{\"n\": 1'; correct or remove"):
        list(open_rows(path).read(0, 2))
    path.write_text("[1]\n")
    with pytest.raises(DataError, match="line 1 is not a JSON object but list"):
        list(open_rows(path).read(0, 1))
    path.write_bytes(b'{"n": "\xff"}\n')
    with pytest.raises(DataError, match=r"line 1 is not UTF-8 \(byte 0xff at position 7\): .*; save the file as UTF-8"):
        list(open_rows(path).read(0, 1))
    path = tmp_path / "rows.json"
    path.write_bytes(b'[{"n": "\xff"}]')
    with pytest.raises(DataError, match=r"rows\.json is not UTF-8 \(byte 0xff at position 8\): save it as UTF-8"):
        open_rows(path)


@pytest.mark.parametrize(("uri", "named"), [("s3://b/rows/", "s3://b/rows"), ("s3://b/rows", "s3://b/rows")])
def test_what_is_read_from_a_copy_of_a_bucket_is_named_by_the_bucket(tmp_path: Path, uri: str, named: str) -> None:
    """In a pod the copy lies in a cache: by its name nobody can tell which of two ``train.jsonl`` is meant."""
    (tmp_path / "b-1f" / "rows").mkdir(parents=True)
    lines = tmp_path / "b-1f" / "rows" / "train.jsonl"
    lines.write_text('{"text": "a"}\n{"text": "b"\n')

    rows = open_path(lines.parent, DataSource(uri=uri))

    assert [place for place, _ in rows.read(0, 1)] == [f"{named}/train.jsonl line 1"]
    for read in (lambda: list(rows.read(1, 2)), lambda: rows.columns(["c"])):
        with pytest.raises(DataError) as caught:
            read()
        assert str(caught.value).startswith(f"{named}/train.jsonl line 2 is not valid JSON")
    lines.with_suffix(".parquet").write_text("none")
    lines.unlink()
    with pytest.raises(DataError) as caught:
        open_path(lines.parent, DataSource(uri=uri))
    assert f"{named}/train.parquet" in str(caught.value)
    assert str(tmp_path) not in str(caught.value)


@pytest.mark.parametrize("written", ["array", "lines", "jsonl"])
def test_a_byte_order_mark_is_passed_over(tmp_path: Path, written: str) -> None:
    path = tmp_path / ("rows.jsonl" if written == "jsonl" else "rows.json")
    text = json.dumps(ROWS) if written == "array" else "".join(json.dumps(row) + "\n" for row in ROWS)
    path.write_text(text, encoding="utf-8-sig")
    assert [row for _, row in open_rows(path).read(0, 10)] == ROWS
    assert numbers(open_rows(path, split="train[3:5]")) == [3, 4]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
@pytest.mark.parametrize("text", [json.dumps(ROWS[:1]), json.dumps(ROWS[0])])
def test_another_encoding_is_told_by_its_mark(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-16")
    with pytest.raises(DataError, match=rf"{name} is written in UTF-16: save it as UTF-8"):
        open_rows(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "content"), [("a.jsonl", "\n \n"), ("a.json", ""), ("a.json", "[]"), ("a.json", "\n")]
)
def test_a_file_without_rows_has_none(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    rows = open_rows(tmp_path / name)
    assert len(rows) == 0
    assert list(rows.read(0, 1)) == []


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ({"data": ROWS}, "line: write only the array in 'data', and nothing around it"),
        ({"data": ROWS, "version": 1}, "line: write only the array in 'data', and nothing around it"),
        ({"data": ["a"]}, "line"),
        (ROWS[0], "line"),
    ],
)
def test_one_object_over_several_lines_is_told_what_a_file_must_hold(tmp_path: Path, content: Any, told: str) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(content, indent=2))
    with pytest.raises(DataError) as refused:
        open_rows(path)
    said = str(refused.value)
    assert "rows.json line 1 is not valid JSON" in said
    assert said.endswith(f"a .json file must hold an array of objects or one object per {told}")


@pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow", "rows.json"])
def test_a_broken_file_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"[broken")
    with pytest.raises(DataError, match=name):
        open_rows(tmp_path / name)


def test_maps_of_a_table_are_objects_and_no_pairs(tmp_path: Path) -> None:
    call = pa.struct([("name", pa.string()), ("arguments", pa.map_(pa.string(), pa.string()))])
    table = pa.table({"calls": pa.array([[{"name": "sky", "arguments": [("city", "Rome")]}]], pa.list_(call))})
    parquet.write_table(table, tmp_path / "rows.parquet")
    ((_, row),) = open_rows(tmp_path / "rows.parquet").read(0, 1)
    assert row == {"calls": [{"name": "sky", "arguments": {"city": "Rome"}}]}


def test_a_map_with_a_key_twice_is_refused_with_its_row(tmp_path: Path) -> None:
    table = pa.table({"said": pa.array([[("role", "user"), ("role", "tool")]], pa.map_(pa.string(), pa.string()))})
    parquet.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"rows.parquet rows 1 to 1 cannot be read: .*role"):
        list(open_rows(tmp_path / "rows.parquet").read(0, 1))


def test_a_parquet_file_damaged_inside_is_named_with_its_rows(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "rows.parquet", ROWS)
    content = bytearray(path.read_bytes())
    content[4:40] = b"\0" * 36
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"rows.parquet rows 1 to 3 cannot be read"):
        list(open_rows(path).read(0, 10))


@pytest.mark.parametrize(
    ("files", "fields", "sentence"),
    [
        ([], {}, "no data files, found nothing; known are .jsonl"),
        (["notes.txt"], {}, "no data files, found notes.txt"),
        (["_a.jsonl"], {}, "; what begins with . or _ is passed over: give it another name"),
        (["a.jsonl", "b.parquet"], {}, "files of several kinds (.jsonl, .parquet)"),
        (["dev.jsonl", "test.jsonl"], {}, "several splits (test, validation) and none called train; set split"),
        (["a.jsonl"], {"split": "test"}, "no split 'test', found train"),
        (["a.jsonl"], {"subset": "x"}, "subset 'x' is for hf:// only"),
    ],
)
def test_what_cannot_be_read_is_refused(
    tmp_path: Path, files: list[str], fields: dict[str, Any], sentence: str
) -> None:
    for name in files:
        write_jsonl(tmp_path / name, ROWS)
    with pytest.raises(DataError) as caught:
        open_rows(tmp_path, **fields)
    assert sentence in str(caught.value)


def test_what_python_cannot_read_is_a_bad_row_too(tmp_path: Path) -> None:
    deep = '{"n": ' + "[" * 20000 + "]" * 20000 + "}"
    words = "is nested too deeply to be read; flatten or remove the row$"
    (tmp_path / "rows.jsonl").write_text(f'{{"n": 0}}\n{deep}\n')
    with pytest.raises(DataError, match=rf"rows\.jsonl line 2 {words}"):
        list(open_rows(tmp_path / "rows.jsonl").read(0, 2))
    (tmp_path / "rows.json").write_text(f"[{deep}]")
    with pytest.raises(DataError, match=rf"rows\.json row 1 {words}"):
        open_rows(tmp_path / "rows.json")


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"splits": null}', pytest.param("[" * 100_000, id="deep")])
def test_a_broken_index_of_saved_splits_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "dataset_dict.json").write_text(content)
    with pytest.raises(
        DataError, match=r"dataset_dict\.json is not what save_to_disk writes: .* save the data set again"
    ):
        open_rows(tmp_path)


@pytest.mark.parametrize("split", ["", "train"])
@pytest.mark.parametrize("absolute", [False, True])
def test_a_saved_data_set_names_no_file_of_another(tmp_path: Path, split: str, absolute: bool) -> None:
    """What its author may not read would be trained: the data of others below one claim, or in one cache."""
    private = write_arrow(tmp_path / "private.arrow", ROWS, stream=True)
    folder = tmp_path / "theirs" / split
    folder.mkdir(parents=True)
    named = str(private) if absolute else os.path.relpath(private, folder)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": named}]}))
    if split:
        (tmp_path / "theirs" / "dataset_dict.json").write_text(json.dumps({"splits": [split]}))

    with pytest.raises(DataError, match="which is not in the folder of the data set"):
        open_rows(tmp_path / "theirs")


def test_a_saved_data_set_names_no_split_of_another(tmp_path: Path) -> None:
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "private")
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "dataset_dict.json").write_text('{"splits": ["../private"]}')

    with pytest.raises(DataError, match="which is not in the folder of the data set"):
        open_rows(tmp_path / "theirs")


def test_a_saved_data_set_with_a_file_of_no_known_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "data.feather"}]}')
    (tmp_path / "data.feather").write_bytes(b"")
    with pytest.raises(DataError, match=r"data\.feather is of no known kind; known are \.jsonl"):
        open_rows(tmp_path)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.parquet", "rows.csv"])
def test_what_git_lfs_has_not_brought_is_told_as_that(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(GIT_LFS_POINTER)
    with pytest.raises(DataError, match=rf"{name} is a pointer of Git LFS and not the file itself: .* git lfs pull"):
        open_rows(tmp_path)
