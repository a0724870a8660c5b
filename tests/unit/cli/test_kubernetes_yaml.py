"""YAML as Kubernetes reads it; tests/integration/test_kubernetes_yaml.py asks an API server about the same cases."""

import itertools
import math
from typing import Any

import pytest

from sft_cli.kubernetes_yaml import YamlError, plain_scalar, read_documents

SCALARS: dict[str, Any] = {
    "1e-5": 1e-5,
    "1E-08": 1e-8,
    "1e3": 1000,
    "100.0": 100,
    "1.": 1,
    ".5": 0.5,
    "+.5": 0.5,
    "-0.0": 0,
    "1_000": 1000,
    "0x10": 16,
    "0b101": 5,
    "0o17": 15,
    "017": 15,
    "089": 89,
    "-0x1": -1,
    "+5": 5,
    "9223372036854775807": 9223372036854775807,
    "1e400": "1e400",
    "1e21": 1e21,
    "1:30": "1:30",
    "12:30:45": "12:30:45",
    "2026-01-01": "2026-01-01",
    "2026-01-01T00:00:00Z": "2026-01-01T00:00:00Z",
    "yes": True,
    "On": True,
    "y": True,
    "N": False,
    "off": False,
    "yEs": "yEs",
    "~": None,
    "Null": None,
    "nULL": "nULL",
    "1.2.3": "1.2.3",
    "._5": "._5",
    "1e": "1e",
    "0x": "0x",
    "64Gi": "64Gi",
    "=": "=",
    "'1'": "1",
    '"yes"': "yes",
    "!!str 1": "1",
    "!!float 1": 1,
}


@pytest.mark.parametrize(("text", "value"), SCALARS.items(), ids=SCALARS)
def test_scalars(text: str, value: Any) -> None:
    ((item,),) = read_documents(f"[{text}]")

    assert item == value
    assert type(item) is type(value)


def test_not_a_number_is_known_and_refused_in_documents() -> None:
    assert math.isnan(plain_scalar(".NaN"))  # type: ignore[arg-type]
    with pytest.raises(YamlError, match=r"line 2: \.inf is not a finite number"):
        read_documents("a: 1\nb: .inf\n")


def test_keys_become_strings() -> None:
    assert read_documents("{1: a, true: b, 1.5: c, no: d, '2': e}") == [
        {"1": "a", "true": "b", "1.5": "c", "false": "d", "2": "e"}
    ]


def test_aliases_and_merges() -> None:
    text = "base: &base {a: 1, b: 2}\nother: {<<: *base, b: 3}\nboth: {<<: [*base, {a: 4, c: 5}], b: 6}\nsame: *base\n"

    assert read_documents(text) == [
        {
            "base": {"a": 1, "b": 2},
            "other": {"a": 1, "b": 3},
            "both": {"a": 1, "b": 6, "c": 5},
            "same": {"a": 1, "b": 2},
        }
    ]


def test_a_merge_overrides_what_stands_before_it() -> None:
    assert read_documents("{base: &base {a: 1}, other: {a: 2, <<: *base}}") == [{"base": {"a": 1}, "other": {"a": 1}}]


def test_documents_without_content_are_passed_over() -> None:
    assert read_documents("---\na: 1\n---\n# nothing\n---\nb: 2\n") == [{"a": 1}, {"b": 2}]
    assert read_documents("") == []


def test_json_is_read_too() -> None:
    assert read_documents('{"a": 1.0,\n\t"b": [1e-5, "yes"]}') == [{"a": 1, "b": [1e-5, "yes"]}]
    assert read_documents("{a: 1, b: yes}") == [{"a": 1, "b": True}]
    # As jq writes several, and kubectl takes them; and with YAML's line between them
    assert read_documents('{"a": 1}\n{"a": 1.0}{"b": []}\n') == [{"a": 1}, {"a": 1}, {"b": []}]
    assert read_documents('{"a": 1}\nnull\n{"b": []}\n') == [{"a": 1}, {"b": []}]
    assert read_documents('{"a": 1}\n---\n{b: yes}\n') == [{"a": 1}, {"b": True}]


def test_numbers_of_very_many_digits_are_read_as_anything_else_that_is_no_whole_number() -> None:
    digits = "1" * 5000

    assert read_documents(f"a: {digits}") == [{"a": digits}]
    assert read_documents(f'{{"a": {digits}, "b": -{digits}}}') == [{"a": math.inf, "b": -math.inf}]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: 1\nb: 2\na: 3\n", "line 3: duplicate key 'a'"),
        ("a: {b: 1, b: 2}", "line 1: duplicate key 'b'"),
        ("1: a\n'1': b\n", "line 2: duplicate key '1'"),
        ('{"a": 1, "a": 2}', "duplicate key 'a'"),
        ("a: [1", "line 1: "),
        ("a: b: c", "line 1: mapping values are not allowed here"),
        ("a:\n  b: 1\n   c: 2\n", "line 3: mapping values are not allowed here; the fields of one block "),
        ("a:\n  b: 1\n c: 2\n", "'<block mapping start>'; the fields of one block, and the dashes of one list"),
        ("a: 'don't'\n", "found '<scalar>'; a value ends with its closing quote (within '...' each ' is written "),
        ("a: |\n    b\n  c\n", "line 3: expected <block end>, but found '<scalar>'; a value ends with"),
        ("a: [b]]\n", "found ']'; take away this bracket"),
        ('a: "b", c\n', "found ','; take the comma away"),
        ("a:\n\tb: 1\n", "line 2: found character '\\t' that cannot start any token; indent with spaces"),
        ("a: @b", "line 1: found character '@' that cannot start any token; put the value between quotes"),
        ("a: {b: 1\nc: 2\n", "line 2: expected ',' or '}', but got ':'; close the bracket"),
        ('a: "b\nc: 2\n', "found unexpected end of stream; close the quote"),
        ("apiVersion: a\nkind: b\napiVersion: a\n", "line 3: duplicate key 'apiVersion'; put a line --- between"),
        ("a: *b", "line 1: found undefined alias 'b'"),
        ("a: &a [*a]", "line 1: "),
        ("~: 1", "line 1: a key must be a string"),
        ("a: !!binary YQ==", "line 1: the tag !!binary has no meaning here"),
        ("a: {<<: 1}", "line 1: << needs a map, or a list of maps"),
        ("a: {<<: [{b: 1}, c]}", "line 1: << needs a map, or a list of maps"),
        ("a: !mine b", "line 1: the tag !mine has no meaning here"),
        ("a: !!int x", "line 1: cannot read 'x' as !!int"),
        ("a: " + "[" * 2000, "too deeply"),
        ('{"a": ' + "[" * 200_000, "too deeply"),
        ('{"a": ' + "[" * 900 + "]" * 900 + "}", "too deeply"),
        ("a: \x00", "special characters are not allowed"),
    ],
)
def test_what_cannot_be_read_says_where(text: str, problem: str) -> None:
    with pytest.raises(YamlError) as caught:
        read_documents(text)

    assert problem in str(caught.value)


LAUGHS = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"{name}: &{name} [{', '.join(f'*{before}' for _ in range(9))}]\n"
    for before, name in itertools.pairwise("abcdefghijklmn")
)
MERGES = f"a: &a {{{', '.join(f'k{number}: 1' for number in range(1100))}}}\nb:\n" + "- {<<: *a}\n" * 1000


@pytest.mark.parametrize("text", [LAUGHS, MERGES], ids=["aliases", "merges"])
def test_few_lines_do_not_stand_for_billions_of_values(text: str) -> None:
    """What walks through them would never come to an end, or take all memory."""
    with pytest.raises(YamlError, match="stand for more than 1,000,000 values"):
        read_documents(text)


def test_what_is_named_some_times_is_read() -> None:
    text = f"a: &a [{', '.join('1' * 100)}]\nb: [{', '.join(['*a'] * 1000)}]\nc: [{', '.join('1' * 1000)}]\n"

    ((document),) = read_documents(text)

    assert len(document["b"]) == 1000
    assert document["b"][999] == [1] * 100
