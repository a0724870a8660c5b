"""Runs that add tokens: what they train and export, and runs that begin from that."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.integration.run.runs import Place, assert_failed
from tests.integration.run.test_good_runs import evaluation_of

TOKENS = {"addedTokens": ["<ticket>", "<ticket>s"], "addedSpecialTokens": ["<|note|>"]}


def with_tickets(file: Path, folder: Path) -> tuple[Path, list[dict[str, Any]]]:
    """The rows in ``file``, whose answers have added tokens in them, and where they are now."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in rows:
        row["messages"][-1]["content"] = f"<ticket> {row['messages'][-1]['content']}<ticket>s"
    written = folder / file.name
    written.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return written, rows


def sections(place: Place, model: Path, **added: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Of a run on rows with added tokens, and those that it is evaluated on."""
    train, _ = with_tickets(place.inputs.train, place.folder)
    evaluated, rows = with_tickets(place.inputs.eval, place.folder)
    given = {
        "model": {"uri": f"file://{model}", **added},
        "data": {
            "train": [{"uri": f"file://{train}", "split": "train[:60]"}],
            "eval": [{"uri": f"file://{evaluated}", "name": "held-out"}],
        },
        "export": {"atEnd": True},
    }
    return given, rows


def log_of(store: Path) -> str:
    return "".join(file.read_text() for file in (store / "logs").iterdir())


def test_a_run_that_adds_tokens_exports_a_model_with_them(place: Place) -> None:
    # Given a run of two processes whose rows have tokens that the tokenizer and the model lack
    published = json.loads((place.inputs.model / "config.json").read_text())["vocab_size"]
    given, rows = sections(place, place.inputs.model, **TOKENS)
    ended = place.run(place.job(**given), "--processes", "2")
    assert ended.code == 0, ended.said
    said = (
        f"added tokens: 3 ({published} to {published + 2}); in {published + 64} rows, of which files have {published}"
    )
    assert said in log_of(place.store())

    # Then plain transformers finds in the export the loss that the run has measured, and the tokens by their names
    export = place.store() / "export"
    assert json.loads((export / "config.json").read_text())["vocab_size"] == published + 64
    assert "| added tokens | 3 |" in (export / "README.md").read_text()
    loss, _ = evaluation_of(export, rows, 256)
    assert loss == pytest.approx(ended.status["progress"]["evalLoss"], rel=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(export)
    ids = tokenizer("<ticket>a<ticket>s<|note|>", add_special_tokens=False)["input_ids"]
    assert [token for token in ids if token >= published] == [published, published + 1, published + 2]
    assert "<|note|>" not in tokenizer.decode(ids, skip_special_tokens=True)

    # And the run does not go on with other tokens
    other, _ = sections(place, place.inputs.model, addedTokens=["<ticket>"])
    assert_failed(place.run(place.job(**other)), 10, "ConfigError", "model.addedTokens")

    # And one that begins from the export has them already
    again, _ = sections(place, export, **TOKENS)
    ended = place.run(place.job("again", **again))
    assert ended.code == 0, ended.said
    assert "added tokens" not in log_of(place.store("again"))
    beside = place.store("again") / "export"
    assert json.loads((beside / "config.json").read_text())["vocab_size"] == published + 64
    assert AutoTokenizer.from_pretrained(beside).get_vocab() == tokenizer.get_vocab()


def test_beside_adapters_their_rows_alone_are_trained_by_any_number_of_processes(place: Place) -> None:
    published = json.loads((place.inputs.model / "config.json").read_text())["vocab_size"]
    given, _ = sections(place, place.inputs.model, **TOKENS)
    given |= {"lora": {"rank": 4}, "training": {"steps": 4, "optimizer": {"learningRate": 1e-2}}}

    # Given a run of one process, and one of two
    alone = place.run(place.job("alone", **given))
    assert alone.code == 0, alone.said
    assert "and rows of 3 tokens in model.embed_tokens" in log_of(place.store("alone"))
    shared = place.run(place.job("shared", **given), "--processes", "2")
    assert shared.code == 0, shared.said

    # Then both have learnt the same
    loss = alone.status["progress"]["evalLoss"]
    assert shared.status["progress"]["evalLoss"] == pytest.approx(loss, rel=1e-5)
    for name in ("alone", "shared"):
        export = place.store(name) / "export"
        settings = json.loads((export / "adapter_config.json").read_text())
        assert next(iter(settings["trainable_token_indices"].values())) == [*range(published, published + 3)]
        assert (export / "adapter_model.safetensors").stat().st_size < 2**18
