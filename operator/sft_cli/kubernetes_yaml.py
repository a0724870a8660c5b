"""YAML read as Kubernetes reads it: sigs.k8s.io/yaml, which is go-yaml 2 followed by JSON.

It differs from PyYAML where it matters: ``1e-5`` and ``1e3`` are numbers, ``1:30`` and ``2026-01-01`` are strings,
``y`` and ``n`` are booleans like ``yes`` and ``no``, ``100.0`` is the integer 100 (it goes through JSON), and keys
that are not strings become strings. Duplicate keys are refused, as the API server does with strict validation.
"""

import json
import math
import re
from collections import Counter
from typing import Any

import yaml

_TAG = "tag:yaml.org,2002:"
_WORDS: dict[str, bool | float | None] = {
    **dict.fromkeys(("y", "Y", "yes", "Yes", "YES", "true", "True", "TRUE", "on", "On", "ON"), True),
    **dict.fromkeys(("n", "N", "no", "No", "NO", "false", "False", "FALSE", "off", "Off", "OFF"), False),
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), math.nan),
    **dict.fromkeys((".inf", ".Inf", ".INF", "+.inf", "+.Inf", "+.INF"), math.inf),
    **dict.fromkeys(("-.inf", "-.Inf", "-.INF"), -math.inf),
}
_INTEGER = re.compile(r"([-+]?)(?:0[xX]([0-9a-fA-F]+)|0[bB]([01]+)|0[oO]?([0-7]+)|(0|[1-9][0-9]*))", re.ASCII)
_BASES = (16, 2, 8, 10)
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", re.ASCII)
_MOST_DIGITS = 1000
"""Of numbers that are read as whole ones."""
_MOST_LEVELS = 250
"""Of JSON, which is read to any depth almost, and then walked by functions that call themselves."""
_MOST_REPEATED = 1_000_000
"""Values that aliases and merges stand for: a few lines of YAML make billions of them, through which nothing walks in
any time. No object that a cluster takes has as many."""
_SPACE = re.compile(r"\s*")
_LARGEST_WRITTEN_OUT = 1e21
"""Go's JSON writes whole floats below this without a point or exponent: they come back as integers."""
_TOO_MANY = (
    f"its aliases (*name) and merges (<<) stand for more than {_MOST_REPEATED:,} values, as which no cluster takes an "
    "object: write out what is meant"
)


_REMEDIES = {
    "mapping values are not allowed": "the fields of one block begin in the same column, the colon behind a name has a "
    "space behind it, and a value with such a colon stands between quotes",
    "expected <block end>, but found '<scalar>'": "a value ends with its closing quote (within '...' each ' is written "
    "twice), and a text behind | with the first line that is indented less",
    **dict.fromkeys(
        ("expected <block end>, but found ']'", "expected <block end>, but found '}'"),
        "take away this bracket, which closes none",
    ),
    "expected <block end>, but found ','": "take the comma away, or put the whole value between quotes",
    "expected <block end>": "the fields of one block, and the dashes of one list, begin in the same column",
    "found character '\\t'": "indent with spaces, as YAML takes no tabs",
    "found character": "put the value between quotes",
    "expected ',' or": "close the bracket that was opened before, or put a comma between two of its entries",
    "found unexpected end of stream": "close the quote that was opened before",
    "duplicate key 'apiVersion'": "put a line --- between two objects",
}
"""What to change, by how the words of the parser begin; the first that fits counts."""


class YamlError(ValueError):
    """The text cannot be read; the message says where and why."""


class ForeignValueError(YamlError):
    """The text is YAML, with a number that JSON does not have; the message says where and which."""


def read_documents(text: str) -> list[Any]:
    """Every document of ``text`` (YAML or JSON) that is not empty, as JSON-like values.

    Raises ``YamlError``.
    """
    try:
        return _documents(text)
    except RecursionError as error:
        raise YamlError("lists or maps stand in one another too deeply") from error


def _documents(text: str) -> list[Any]:
    if text.lstrip().startswith("{"):
        try:
            return _json_documents(text)
        except json.JSONDecodeError:
            pass  # YAML in flow style looks like JSON at its start
    try:
        documents = [document for document in yaml.load_all(text, Loader=_Loader) if document is not None]
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        kind = ForeignValueError if isinstance(error, _NotFiniteError) else YamlError
        said = f"{error.problem}{_remedy(str(error.problem))}"
        raise kind(f"line {mark.line + 1}: {said}" if mark else str(error)) from error
    except yaml.YAMLError as error:
        raise YamlError(" ".join(str(error).split())) from error
    _check_repeated(documents)
    return documents


def _json_documents(text: str) -> list[Any]:
    """Every document of ``text``, which may be several behind one another: jq writes them so, and kubectl takes them,
    but for ``null``, which jq writes of what is not there.

    Raises ``json.JSONDecodeError``.
    """
    decoder = json.JSONDecoder(object_pairs_hook=_object, parse_float=_json_number, parse_int=_json_number)
    documents, at = list[Any](), _behind_space(text, 0)
    while at < len(text):
        document, end = decoder.raw_decode(text, at)
        _check_levels(document)
        documents += [] if document is None else [document]
        at = _behind_space(text, end)
    return documents


def _behind_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at


def _remedy(problem: str) -> str:
    """What to change about what the parser said in words of its grammar, as the end of a sentence."""
    return next((f"; {remedy}" for words, remedy in _REMEDIES.items() if problem.startswith(words)), "")


def plain_scalar(text: str) -> bool | int | float | str | None:
    """The value of a scalar without quotes."""
    if text in _WORDS:
        return _WORDS[text]
    if not text or text[0] not in "+-.0123456789":
        return text
    digits = text if text[0] == "." else text.replace("_", "")
    if match := _INTEGER.fullmatch(digits):
        sign, *groups = match.groups()
        base, magnitude = next((base, group) for base, group in zip(_BASES, groups, strict=True) if group)
        # Longer ones are floats to go-yaml, and Python refuses to read them.
        value = int(sign + magnitude, base) if len(magnitude) < _MOST_DIGITS else 2**64
        if -(2**63) <= value < 2**64:
            return value
    if _FLOAT.fullmatch(digits) and math.isfinite(number := float(digits)):
        return number
    return text


def _check_levels(document: Any) -> None:
    level = [document]
    for _ in range(_MOST_LEVELS):
        if not level:
            return
        level = [
            item
            for each in level
            if isinstance(each, dict | list)
            for item in (each.values() if isinstance(each, dict) else each)
        ]
    if level:
        raise RecursionError


def _check_repeated(document: Any) -> None:
    """Raise ``YamlError`` where aliases make too much of what was written: one object stands in many places then."""
    sizes: dict[int, int] = {}
    written = 0

    def size(value: Any) -> int:
        nonlocal written
        if not isinstance(value, dict | list):
            return 1
        if (known := sizes.get(id(value))) is None:
            inside = value.values() if isinstance(value, dict) else value
            written += len(inside)
            known = sizes[id(value)] = 1 + sum(map(size, inside))
        return known

    if size(document) - written > _MOST_REPEATED:
        raise YamlError(_TOO_MANY)


def _json_number(text: str) -> int | float:
    """A number of JSON; whole ones of more digits than Python reads are no more exact than floats are."""
    is_whole = text.lstrip("-").isdecimal() and len(text) < _MOST_DIGITS
    return int(text) if is_whole else _as_json(float(text))


def _as_json(number: float) -> int | float:
    if number.is_integer() and abs(number) < _LARGEST_WRITTEN_OUT:
        return int(number)
    return number


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise YamlError(f"duplicate key {name!r}")
    return result


class _NotFiniteError(yaml.constructor.ConstructorError):
    """A value that YAML has and JSON has not."""


class _Loader(yaml.SafeLoader):
    """PyYAML's parser with go-yaml's meaning of scalars and keys."""

    # Only the tags below have a meaning in JSON; without this PyYAML's own (dates, sets, binary) would apply.
    yaml_constructors = {}  # noqa: RUF012
    merged_values = 0
    """Copied so far out of what ``<<`` names."""

    def resolve(self, kind: Any, value: Any, implicit: Any) -> str:
        if kind is not yaml.ScalarNode:
            return _TAG + ("map" if kind is yaml.MappingNode else "seq")
        if not implicit[0]:
            return f"{_TAG}str"
        if value == "<<":
            return f"{_TAG}merge"
        return _TAG + _tag_name(plain_scalar(value))

    def scalar(self, node: yaml.ScalarNode) -> Any:
        value = plain_scalar(node.value)
        wanted, found = node.tag.removeprefix(_TAG), _tag_name(value)
        if found == "int" and wanted == "float":
            found = "float"
        if found != wanted:
            self.fail(f"cannot read {node.value!r} as !!{wanted}", node)
        if isinstance(value, float):
            if not math.isfinite(value):
                raise _NotFiniteError(None, None, f"{node.value} is not a finite number", node.start_mark)
            return _as_json(value)
        return value

    def text(self, node: yaml.ScalarNode) -> str:
        return str(node.value)

    def sequence(self, node: yaml.SequenceNode) -> list[Any]:
        return [self.construct_object(item, deep=True) for item in node.value]

    def mapping(self, node: yaml.MappingNode) -> dict[str, Any]:
        own: set[str] = set()
        result: dict[str, Any] = {}
        for key_node, item_node in node.value:
            if key_node.tag == f"{_TAG}merge":
                # go-yaml goes through the entries in order: a merge overrides what stands before it.
                result.update(self.merged(item_node))
                continue
            name = self.key(key_node)
            if name in own:
                self.fail(f"duplicate key {name!r}", key_node)
            own.add(name)
            result[name] = self.construct_object(item_node, deep=True)
        return result

    def merged(self, node: yaml.Node) -> dict[str, Any]:
        value = self.construct_object(node, deep=True)
        sources = value if isinstance(value, list) else [value]
        if not all(isinstance(source, dict) for source in sources):
            self.fail("<< needs a map, or a list of maps", node)
        self.merged_values += sum(map(len, sources))
        if self.merged_values > _MOST_REPEATED:
            raise YamlError(_TOO_MANY)
        return {name: item for source in reversed(sources) for name, item in source.items()}

    def key(self, node: yaml.Node) -> str:
        value = self.construct_object(node, deep=True)
        if isinstance(value, str):
            return value
        if isinstance(value, bool):
            return "true" if value else "false"
        if not isinstance(value, int | float):
            self.fail("a key must be a string", node)
        return str(value)

    def other(self, node: yaml.Node) -> Any:
        self.fail(f"the tag {node.tag.replace(_TAG, '!!')} has no meaning here", node)

    def fail(self, problem: str, node: yaml.Node) -> None:
        raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


def _tag_name(value: object) -> str:
    return {bool: "bool", int: "int", float: "float", str: "str", type(None): "null"}[type(value)]


for _name in ("bool", "int", "float", "null"):
    _Loader.add_constructor(_TAG + _name, _Loader.scalar)
_Loader.add_constructor(f"{_TAG}str", _Loader.text)
_Loader.add_constructor(f"{_TAG}seq", _Loader.sequence)
_Loader.add_constructor(f"{_TAG}map", _Loader.mapping)
_Loader.add_constructor(None, _Loader.other)
