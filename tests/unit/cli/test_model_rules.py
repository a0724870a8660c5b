"""What `sft validate` and `sft plan` refuse of a model by its config.json alone."""

import json
from pathlib import Path
from typing import Any

import pytest

from sft_cli.plan import show_plan
from sft_cli.validate import verdict_on

from .jobs import job, manifest


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "gemma2"}, "no rules for the weights of a model of type 'gemma2': choose a model of type"),
        ({"model_type": "llama", "mlp_bias": True}, "a model with mlp_bias: true in its config.json: choose strategy"),
        ({"model_type": ["llama"]}, "of a model of type ['llama']"),
        ({"model_type": "qwen3", "mlp_bias": False}, ""),
        ({}, ""),
    ],
)
def test_a_model_without_rules_for_megatron_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: dict[str, Any], words: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    where: dict[str, Any] = {"model": {"uri": f"file://{tmp_path}"}, "compute": {"gpusPerNode": 8}}
    asked = where | {"strategy": {"megatron": {}}}

    def problems(sections: dict[str, Any]) -> str:
        path = tmp_path / "job.yaml"
        path.write_text(json.dumps(manifest(**sections)))
        return "".join(verdict_on(path).problems)

    assert words in problems(asked)
    assert bool(problems(asked)) == bool(words)
    assert problems(where) == ""
    assert show_plan(job(**asked), "text") == (10 if words else 0)
    assert words in capsys.readouterr().err
