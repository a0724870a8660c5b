"""docs/migrating.md: its scripts do what they are for, and its numbers are those of a run."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from sft_api.generate import ROOT
from sft_api.plan import warmup_steps
from sft_api.v1alpha1 import DataSpec, SFTJobSpec, TrainSource
from sft_cli.problems import unknown_field
from sft_trainer.data.batches import ExampleBatches
from sft_trainer.data.stream import ExampleStream
from sft_trainer.data.tokenizer import load_tokenizer
from sft_trainer.optim import learning_rate
from tests.unit.data.examples import FakeExamples
from tests.unit.data.previews import preview_source

PAGE = (ROOT / "docs" / "migrating.md").read_text()
SCRIPTS = dict(re.findall(r"^### ([^\n]*)\n[^#]*?^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))


def row(begin: str) -> str:
    (found,) = [line for line in PAGE.splitlines() if line.startswith(f"| {begin}")]
    return found


def spec(steps: int, **schedule: Any) -> SFTJobSpec:
    written = {
        "model": {"uri": "file:///model"},
        "data": {"train": [{"uri": "file:///data"}]},
        "compute": {"gpusPerNode": 0},
        "training": {"steps": steps, "schedule": schedule},
    }
    return SFTJobSpec.model_validate(written)


_NAME, _FIELD = re.compile(r"`(\w+)[^`]*`"), re.compile(r"`((?:model|data|lora|training|strategy|export)\.[\w.]+)")
_OTHERWISE = """
EarlyStoppingCallback PagedAdamW8bit adamw_bnb_8bit paged_adamw_8bit optimizers torch PeftModel BitsAndBytesConfig
get_cosine_schedule_with_warmup chat_dataset sharegpt openai instruct_dataset text_completion_dataset column tokenizer
checkpointer dataset_info llamafactory
adapter dtype finetuning_type lora_target optim type field micro_batch_size gradient_accumulation_steps sample_packing
r field_messages message_property_mappings
"""
"""What nobody would give as a field, what means another one by its value or in a row of its own, and what is known in
its block alone."""


def test_a_name_that_the_page_has_a_field_for_is_answered_with_that_field() -> None:
    asked = 0
    for line in PAGE.partition("## TRL")[2].partition("## What is not there")[0].splitlines():
        theirs, _, ours = line.removeprefix("| ").partition(" | ")
        blocks = tuple(_FIELD.findall(ours))
        for name in {*_NAME.findall(theirs)}.difference(_OTHERWISE.split()) if blocks else ():
            told = unknown_field(("spec", name))
            fields = re.findall(r"spec\.([\w.\[\]]+)", told.partition("; ")[2])
            assert any(f.startswith(blocks) or f in ours or f"`{f.split('.')[-1]}`" in ours for f in fields), (
                line,
                told,
            )
            asked += 1
    assert asked > 60


@pytest.fixture
def folder(tiny_inputs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(tiny_inputs.model, tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_segments_become_tokens_of_which_those_with_the_label_are_trained(folder: Path) -> None:
    pieces = [(True, "<|im_start|>Hello\n"), (False, "goodbye "), (True, "farewell<|im_end|>")]
    segments = [{"label": label, "text": text} for label, text in pieces]
    (folder / "segments.jsonl").write_text(json.dumps({"segments": segments}) + "\n")
    exec(SCRIPTS["Segments"], {})
    source = TrainSource(uri=f"file://{folder}/tokens.jsonl")
    tokenizer = load_tokenizer(folder / "model", None)
    (shown,) = preview_source(source, DataSpec(train=[source]), tokenizer, 1, cache_dir=folder / "cache")
    assert "".join(segment.text for segment in shown.segments) == "".join(text for _, text in pieces)
    assert [s.text for s in shown.segments if s.trained] == ["Hello\n", "farewell<|im_end|>"]


def test_the_rates_of_a_warm_up_are_those_of_the_page() -> None:
    told = re.findall(r"0\.\d+|\b1\b", row("warm-up of n steps").rpartition("there, and")[2])
    rates = [learning_rate(spec(12, type="cosine", warmupSteps=4), 1.0, step, 12) for step in range(6)]
    assert [float(rate) for rate in told] == [round(rate, 3) for rate in rates]
    assert row("`warmup_ratio`").endswith("0.03 of 150 steps are 5, 4 and 4 |")
    assert warmup_steps(spec(150, warmupRatio=0.03), 150) == 4


def test_steps_go_on_over_the_end_of_a_pass_as_the_page_says() -> None:
    schedule = ExampleBatches(
        [FakeExamples([4] * 300)],
        ExampleStream([300], weights=None, seed=1, shuffle=True),
        global_batch_size=32,
        epochs=3,
        micro_batch_size=1,
        bin_tokens=None,
    )
    assert f"{schedule.total_steps} in three passes" in row("the end of a pass")
