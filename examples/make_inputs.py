"""Make real training input from what every machine has: Python's own standard library. Nothing is downloaded.

    python examples/make_inputs.py OUT                  for the demo: a model of about 5 M parameters, 3000 rows
    python examples/make_inputs.py OUT --size small     for benchmarks: about 6 M parameters, 6000 longer rows
    python examples/make_inputs.py OUT --size tiny      for tests: a few hundred rows, two small layers

Writes
    OUT/data/train.jsonl, OUT/data/eval.jsonl   {"messages": [{"role", "content"}, ...]}
    OUT/data/alpaca.jsonl                       {"instruction", "input", "output"}
    OUT/model/                                  Qwen3, random fp32 weights, with tokenizer and chat template

The demo's rows ask which module has a function; eval.jsonl asks about the same functions in words that do not occur in
train.jsonl (module_questions.py). The other sizes hold conversations about functions, classes and modules, made from
their docstrings; what eval.jsonl asks about does not occur in the other two files (conversations.py). The same seed on
the same Python gives the same bytes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from conversations import make_alpaca_rows, make_rows, split_subjects
from module_questions import TRAINED_WORDINGS, make_module_rows
from small_model import initialise_model, train_tokenizer
from standard_library import collect_facts, collect_subjects, standard_library

Row = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """How much of what to make. `modules`: top-level names to read, or none for the whole standard library."""

    rows: int
    hidden: int
    layers: int
    heads: int
    vocabulary: int
    task: Literal["modules", "conversations"] = "conversations"
    modules: tuple[str, ...] | None = None


SHAPES: dict[str, Shape] = {
    "demo": Shape(rows=125 * len(TRAINED_WORDINGS), hidden=320, layers=4, heads=8, vocabulary=2048, task="modules"),
    "small": Shape(rows=6000, hidden=320, layers=4, heads=8, vocabulary=2048),
    "tiny": Shape(
        rows=300,
        hidden=32,
        layers=2,
        heads=4,
        vocabulary=512,
        modules=("argparse", "calendar", "configparser", "json", "pathlib", "posixpath", "shutil", "statistics"),
    ),
}


@dataclass(frozen=True)
class Inputs:
    """What was made, and where."""

    model: Path
    train: Path
    eval: Path
    alpaca: Path
    train_rows: int
    eval_rows: int
    parameters: int
    vocabulary: int


def write_jsonl(path: Path, rows: Sequence[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8", newline="\n")


def make_inputs(out: Path, size: Literal["demo", "small", "tiny"] = "demo", seed: int = 0) -> Inputs:
    """Make data and model of a named size below `out`; see the module's docstring for the files."""
    return make_inputs_of_shape(out, SHAPES[size], seed)


def make_inputs_of_shape(out: Path, shape: Shape, seed: int) -> Inputs:
    """Make data and model below `out`, replacing what an earlier call left there."""
    train_rows, eval_rows, alpaca_rows = _rows(shape, seed)
    data = out / "data"
    write_jsonl(data / "train.jsonl", train_rows)
    write_jsonl(data / "eval.jsonl", eval_rows)
    write_jsonl(data / "alpaca.jsonl", alpaca_rows)

    tokenizer = train_tokenizer(train_rows, shape.vocabulary)
    model = initialise_model(tokenizer, hidden=shape.hidden, layers=shape.layers, heads=shape.heads, seed=seed)
    model.save_pretrained(out / "model")
    tokenizer.save_pretrained(out / "model")
    # The weights are saved readable by their owner alone; a training pod often runs as somebody else.
    (out / "model" / "model.safetensors").chmod(0o644)
    return Inputs(
        model=out / "model",
        train=data / "train.jsonl",
        eval=data / "eval.jsonl",
        alpaca=data / "alpaca.jsonl",
        train_rows=len(train_rows),
        eval_rows=len(eval_rows),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        vocabulary=len(tokenizer),
    )


def _rows(shape: Shape, seed: int) -> tuple[list[Row], list[Row], list[Row]]:
    """Rows to train, held-out rows, and rows in Alpaca's format."""
    if shape.task == "modules":
        training, held_out = make_module_rows(
            collect_facts(standard_library()), shape.rows // len(TRAINED_WORDINGS), seed
        )
        pairs = [[turn["content"] for turn in row["messages"]] for row in training[: shape.rows // 5]]
        return training, held_out, [{"instruction": asked, "input": "", "output": answer} for asked, answer in pairs]
    known, others = split_subjects(collect_subjects(standard_library(), shape.modules), seed)
    return (
        make_rows(known, shape.rows, seed),
        make_rows(others, max(16, shape.rows // 25), seed),
        make_alpaca_rows(known, shape.rows // 5),
    )


def _hide_progress_bars() -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write to")
    parser.add_argument("--size", choices=sorted(SHAPES), default="demo", help="defaults of the options below")
    parser.add_argument("--seed", type=int, default=0)
    numbers = [field.name for field in fields(Shape) if field.name not in ("task", "modules")]
    for number in numbers:
        of_sizes = ", ".join(f"{size} {getattr(shape, number)}" for size, shape in SHAPES.items())
        parser.add_argument(f"--{number}", type=int, help=f"instead of: {of_sizes}")
    options = parser.parse_args(arguments)

    asked_for = {number: value for number in numbers if (value := getattr(options, number)) is not None}
    _hide_progress_bars()
    try:
        made = make_inputs_of_shape(options.out, replace(SHAPES[options.size], **asked_for), options.seed)
    except (ValueError, FileNotFoundError) as error:
        parser.error(str(error))
    print(f"{made.train}: {made.train_rows} rows")
    print(f"{made.eval}: {made.eval_rows} held-out rows")
    print(f"{made.alpaca}")
    print(f"{made.model}: {made.parameters:,} parameters, {made.vocabulary} tokens")


if __name__ == "__main__":
    main()
