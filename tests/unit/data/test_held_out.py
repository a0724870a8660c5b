"""Rows held out for evaluation: as many as asked for, the same everywhere, and each row on one side."""

import gzip
import json
import pickle
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from string import ascii_uppercase
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from sft_api.v1alpha1 import DataSpec, EvalSource, TrainSource
from sft_trainer.data import held_out as held_out_rows
from sft_trainer.data import tokenize
from sft_trainer.data.evaluation_set import EvaluationSet
from sft_trainer.data.held_out import Draw, Rows, held_out_part, trained_part
from sft_trainer.data.source_rows import open_path
from sft_trainer.data.tokenized import TokenizedSource
from sft_trainer.errors import DataError
from tests.parity.mask_tokenizers import chat_tokenizer
from tests.unit.data.tokenizing import tokenize_source

ROWS = [{"text": f"row {i}"} for i in range(103)]


def lines(rows: list[dict[str, Any]]) -> str:
    return "".join(f"{json.dumps(row)}\n" for row in rows)


def data_of(path: Path, fraction: float, **more: Any) -> DataSpec:
    source = TrainSource(uri=f"file://{path}", format="text", **more.pop("source", {}))
    return DataSpec.model_validate({"train": [source], "heldOut": {"fraction": fraction}, **more})


def parts(path: Path, fraction: float, **source: Any) -> tuple[Rows, Rows]:
    """The rows of a source that are trained, and those held out."""
    data = data_of(path, fraction, source=source)
    opened, held_out = open_path(path, data.train[0]), held_out_part(data)
    assert held_out is not None
    return trained_part(data)(opened), held_out(opened)


def texts(rows: Rows, chunk: int = 1024) -> list[str]:
    starts = range(0, len(rows), chunk)
    return [row["text"] for start in starts for _, row in rows.read(start, min(start + chunk, len(rows)))]


# The draw


@pytest.mark.parametrize("fraction", [0.5, 0.4, 0.3333, 0.05, 0.07])
def test_of_every_block_one_row_is_drawn(fraction: float) -> None:
    draw, exact = Draw.of(fraction), Fraction(str(fraction))
    for rows in (1, 2, 19, 20, 21, 59, 60, 1000):
        assert draw.count(rows) == int(rows * exact)
    for block in range(1000):
        assert int(draw.row(block) * exact) == block


def test_which_rows_are_drawn_never_changes() -> None:
    # Another draw would train a run that goes on with a later version on what it was evaluated on.
    assert [Draw.of(0.05).row(block) for block in range(8)] == [6, 38, 46, 65, 96, 108, 127, 157]


def test_rows_are_drawn_alike_at_each_place_of_a_block() -> None:
    places = [Draw.of(0.25).row(block) % 4 for block in range(4000)]
    assert all(900 < places.count(place) < 1100 for place in range(4))


# The rows


def write_jsonl(folder: Path) -> Path:
    path = folder / "rows.jsonl"
    path.write_text(lines(ROWS[:40]) + "\n  \n" + lines(ROWS[40:]))
    return path


def write_array(folder: Path) -> Path:
    path = folder / "rows.json"
    path.write_text(json.dumps(ROWS))
    return path


def write_packed(folder: Path) -> Path:
    path = folder / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(lines(ROWS).encode()))
    return path


def write_csv(folder: Path) -> Path:
    path = folder / "rows.csv"
    path.write_text("text\n" + "".join(f"{row['text']}\n" for row in ROWS))
    return path


def write_parquet(folder: Path) -> Path:
    path = folder / "rows.parquet"
    parquet.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=10)
    return path


def write_folder(folder: Path) -> Path:
    path = folder / "several"
    path.mkdir()
    for number, (start, stop) in enumerate([(0, 1), (1, 33), (33, 34), (34, 103)]):
        (path / f"{number}.jsonl").write_text(lines(ROWS[start:stop]))
    return path


@pytest.mark.parametrize("write", [write_jsonl, write_array, write_packed, write_csv, write_parquet, write_folder])
@pytest.mark.parametrize("fraction", [0.5, 0.3, 0.05])
def test_each_row_is_trained_or_held_out(
    write: Callable[[Path], Path], fraction: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained, held_out = parts(write(tmp_path), fraction)
    rows = [row["text"] for row in ROWS]

    assert len(held_out) == int(103 * Fraction(str(fraction)))
    evaluated = texts(held_out)
    # Which ones the places alone say, in whatever they lie.
    assert evaluated == [rows[Draw.of(fraction).row(block)] for block in range(len(held_out))]
    assert texts(trained) == [text for text in rows if text not in evaluated]
    assert len(trained) == 103 - len(evaluated)
    # However many are read at once, and by whom.
    monkeypatch.setattr(held_out_rows, "_ROWS_AT_ONCE", 8)
    for chunk in (1, 7, 50):
        assert texts(pickle.loads(pickle.dumps(trained)), chunk) == texts(trained)
        assert texts(pickle.loads(pickle.dumps(held_out)), chunk) == evaluated


def test_rows_are_counted_within_the_slice_and_have_their_places(tmp_path: Path) -> None:
    trained, held_out = parts(write_jsonl(tmp_path), 0.25, split="train[40:60]")
    draw = Draw.of(0.25)
    assert texts(held_out) == [f"row {40 + draw.row(block)}" for block in range(5)]
    assert sorted([*texts(trained), *texts(held_out)]) == [f"row {i}" for i in range(40, 60)]
    # Lines 41 and 42 are empty.
    assert [place for place, _ in held_out.read(0, 1)] == [f"{tmp_path}/rows.jsonl line {43 + draw.row(0)}"]


@pytest.mark.parametrize("rows", [1, 19])
def test_a_source_of_which_nothing_would_be_held_out_is_refused(rows: int, tmp_path: Path) -> None:
    path = tmp_path / "few.jsonl"
    path.write_text(lines(ROWS[:rows]))
    data = data_of(path, 0.05)
    said = (
        rf"data source file://{path}: of its {rows} rows data.heldOut.fraction 0.05 holds out none, it takes 20 for "
        "one: raise it, put these rows into a source with others, or evaluate on rows of data.eval instead"
    )
    for part in (trained_part(data), held_out_part(data)):
        assert part is not None
        with pytest.raises(DataError, match=said):
            part(open_path(path, data.train[0]))


# Tokenised


def tokenized(data: DataSpec, cache: Path) -> tuple[TokenizedSource, TokenizedSource]:
    (source,), held_out = data.train, held_out_part(data)
    assert held_out is not None
    tokenizer = chat_tokenizer("chatml")
    return (
        tokenize_source(source, data, tokenizer, cache_dir=cache, part=trained_part(data)),
        tokenize_source(source, data, tokenizer, cache_dir=cache, part=held_out),
    )


def examples(source: TokenizedSource | EvaluationSet) -> list[str]:
    decode = chat_tokenizer("chatml").decode
    return [str(decode(source.example(i)[0])) for i in range(len(source.lengths))]


def test_the_examples_do_not_depend_on_how_many_rows_are_tokenised_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = data_of(write_packed(tmp_path), 0.3)
    at_once = [part.digest for part in tokenized(data, tmp_path / "one")]
    monkeypatch.setattr(tokenize, "_ROWS_PER_CHUNK", 9)
    assert [part.digest for part in tokenized(data, tmp_path / "two")] == at_once


def test_pieces_of_a_row_stay_on_one_side(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    path.write_text(lines([{"text": letter * 60} for letter in ascii_uppercase[:20]]))
    trained, held_out = tokenized(data_of(path, 0.25, maxLength=16, overlong="split"), tmp_path / "cache")
    letters = [
        {letter for text in examples(part) for letter in text if letter.isupper()} for part in (trained, held_out)
    ]
    assert len(trained) > 15
    assert (held_out.report.rows, held_out.report.split) == (5, 5)
    assert [len(found) for found in letters] == [15, 5]
    assert letters[0].isdisjoint(letters[1])


def test_another_fraction_is_not_what_is_in_the_cache(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path)
    for fraction, trained, held_out in ((0.05, 98, 5), (0.2, 83, 20)):
        assert [len(part) for part in tokenized(data_of(path, fraction), tmp_path / "cache")] == [trained, held_out]
    data = data_of(path, 0.2)
    whole = tokenize_source(data.train[0], data, chat_tokenizer("chatml"), cache_dir=tmp_path / "cache")
    assert len(whole) == 103


def test_of_tokens_rows_are_held_out_too(tmp_path: Path) -> None:
    path = tmp_path / "tokens.jsonl"
    path.write_text(lines([{"input_ids": [1, 2 + i], "loss_mask": [0, 1]} for i in range(10)]))
    data = data_of(path, 0.2, source={}).model_copy(update={"train": [TrainSource(uri=f"file://{path}")]})
    parts = tokenized(data, tmp_path / "cache")
    last = [[int(part.example(i)[0][1]) for i in range(len(part))] for part in parts]
    assert [len(found) for found in last] == [8, 2]
    assert sorted(last[0] + last[1]) == [2 + i for i in range(10)]


def test_a_row_held_out_that_is_wrong_is_told_with_its_source(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    path.write_text(lines([{"text": "long " * 60 if i == Draw.of(0.05).row(0) else "short"} for i in range(20)]))
    said = rf"source file://{path}, held out: none of 1 rows is left: 1 are longer .*; raise data.maxLength, or raise "
    with pytest.raises(DataError, match=said + "data.heldOut.fraction"):
        tokenized(data_of(path, 0.05, maxLength=32), tmp_path / "cache")


def test_a_set_of_several_sources_has_the_examples_of_all(tmp_path: Path) -> None:
    sources = []
    for name, rows in (("a", ROWS[:3]), ("b", ROWS[3:4]), ("c", ROWS[4:9])):
        path = tmp_path / f"{name}.jsonl"
        path.write_text(lines(rows))
        source = EvalSource(name=name, uri=f"file://{path}", format="text")
        data = DataSpec(train=[TrainSource(uri=source.uri)], eval=[source])
        sources.append(tokenize_source(source, data, chat_tokenizer("chatml"), cache_dir=tmp_path / "cache"))
    joined = EvaluationSet(sources)
    assert examples(joined) == [text for source in sources for text in examples(source)]
    assert [*joined.trained] == [int(joined.example(i)[1].sum()) for i in range(9)]
    # What checkpoints say of a set of one source is what they have always said.
    assert EvaluationSet(sources[:1]).digest == sources[0].digest
    assert len({joined.digest, EvaluationSet(sources[:2]).digest, *(source.digest for source in sources)}) == 5
