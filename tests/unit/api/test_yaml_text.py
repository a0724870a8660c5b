"""What the emitter writes comes back as it was, from readers of YAML 1.1 and from Kubernetes' own reading."""

from typing import Any

import pytest
import yaml

from sft_api.yaml_text import to_yaml
from sft_cli.kubernetes_yaml import read_documents

VALUES: list[Any] = [
    {"a": 1, "b": [1, 2, {"c": None}], "d": {}, "e": [], "f": [[1, [2]], []]},
    {"truth": True, "text": "true", "no": "no", "y": "y", "empty": "", "null": "null", "tilde": "~"},
    {"number": "1", "exponent": "1e-5", "time": "12:30", "date": "2026-01-01", "infinite": ".inf", "version": "1.2.3"},
    {"small": 1e-08, "large": 1e22, "half": 0.5, "whole": 2.0, "negative": -3, "tiny": 2.5e-09},
    {"colon": "a: b", "end": "a:", "comment": "a #b", "hash": "#a", "dash": "- a", "space": " a ", "question": "? a"},
    {"quote": "it's", "both": "'\"", "braces": "{{ a }}", "list": "[a]", "star": "*a", "and": "&a", "bang": "!a"},
    {
        "lines": "a\nb\n",
        "tab": "a\tb",
        "control": "\x07",
        "umlaut": "für …",
        "percent": "%a",
        "at": "@a",
        "tick": "`a`",
    },
    {"long": "word " * 40 + "end", "long-gaps": "two  spaces " * 20, "long-rule": "self.a == 'x y' || " * 12 + "b"},
    {"/path": "/etc", ".dotted": ".status.state", "key: with colon": 1, "x-y": "self.matches('^[a-z]+$')"},
    ["plain", "- dash", {"k": ["v"]}],
    "text",
    3,
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: str(value)[:40])
def test_what_is_written_is_read_back(value: Any) -> None:
    text = to_yaml(value)

    assert yaml.safe_load(text) == value
    assert read_documents(text) == [value]


def test_layout_is_for_people() -> None:
    value = {"names": ["a", "b"], "object": {"text": "it's plain", "note": "word " * 30 + "end"}, "nothing": {}}

    assert to_yaml(value).splitlines() == [
        "names:",
        "- a",
        "- b",
        "object:",
        "  text: it's plain",
        "  note: >-",
        "    " + ("word " * 20).strip(),
        "    " + "word " * 10 + "end",
        "nothing: {}",
    ]
