"""A model beside the tiny one of examples/make_inputs.py whose layers are wide enough for blocks of 64 weights."""

import shutil
from pathlib import Path

from tests.fixtures_inputs import make_inputs_script


def wider_model(model: Path, to: Path) -> Path:
    """The folder ``to`` with the tokenizer of ``model`` and another model, of width 64, in fp32."""
    from transformers import AutoTokenizer

    shutil.copytree(model, to)
    tokenizer = AutoTokenizer.from_pretrained(to)
    made = make_inputs_script.initialise_model(tokenizer, hidden=64, layers=2, heads=4, seed=0)
    made.save_pretrained(to)
    return to


def wider_inputs(inputs: Path, folder: Path) -> Path:
    """Inputs in ``folder``, which is made: those of ``inputs``, with the wider model."""
    shutil.copytree(inputs, folder, ignore=shutil.ignore_patterns("model"))
    wider_model(inputs / "model", folder / "model")
    return folder
