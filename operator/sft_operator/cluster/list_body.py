"""Reads the body of a Kubernetes list as it arrives, object by object. Pure.

Parsed as a whole, a page of 500 pods of 46 KiB each is 150 MB of dicts; here only one of them exists at a time.
"""

import codecs
import json
import re
from collections.abc import Iterator
from typing import Any

_SPACE = re.compile(r"[\s,]*")
_COLON = re.compile(r"\s*:\s*")
_TOKEN = re.compile(r'[{}\[\]]|"(?:[^"\\]|\\.)*"', re.DOTALL)


class ListBody:
    """The body of one answer: ``feed`` it in pieces, ``close`` it at its end."""

    def __init__(self) -> None:
        self.fields: dict[str, Any] = {}
        """Everything but the items, for example ``metadata``."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._json = json.JSONDecoder()
        self._text = ""
        self._wanted = 0
        """Characters of the unfinished value after which it is worth trying again."""
        self._begun = self._in_items = self._done = False

    def feed(self, data: bytes) -> Iterator[Any]:
        """The items that are complete with ``data``; raises ``ValueError`` when this is no list."""
        self._text += self._decoder.decode(data)
        if len(self._text) < self._wanted:
            return
        position = 0
        while (step := self._next(position)) is not None:
            position, items = step
            yield from items
        self._text = self._text[position:]
        # Twice as much for every try: one large object is not parsed again for every piece of it.
        self._wanted = 2 * len(self._text)

    def close(self) -> Iterator[Any]:
        """The rest; raises ``ValueError`` when the body ends before the list does."""
        self._wanted = 0
        yield from self.feed(b"")
        if not self._done:
            raise ValueError(f"the list breaks off, or is none: {self._text[:200]!r}")

    def _next(self, position: int) -> tuple[int, list[Any]] | None:
        """The position after the next complete part, and the item that it is, if it is one; None: there is none."""
        text = self._text
        position = _SPACE.match(text, position).end()  # type: ignore[union-attr]
        if position >= len(text) or self._done:
            return None
        if not self._begun:
            if text[position] != "{":
                raise ValueError(f"no list: {text[position : position + 200]!r}")
            self._begun = True
            return position + 1, []
        if self._in_items:
            if text[position] == "]":
                self._in_items = False
                return position + 1, []
            return self._item(position)
        if text[position] == "}":
            self._done = True
            return position + 1, []
        return self._field(position)

    def _field(self, position: int) -> tuple[int, list[Any]] | None:
        if (name := self._value(position)) is None:
            return None
        colon = _COLON.match(self._text, name[1])
        if colon is None or (begin := colon.end()) >= len(self._text):
            return None
        if name[0] == "items" and self._text[begin] == "[":
            self._in_items = True
            return begin + 1, []
        value = self._value(begin)
        # A number could go on in the next piece.
        if value is None or value[1] >= len(self._text):
            return None
        self.fields[str(name[0])] = value[0]
        return value[1], []

    def _item(self, position: int) -> tuple[int, list[Any]] | None:
        try:
            value = self._value(position)
        except (RecursionError, ValueError):
            # Nested too deeply, or a number of thousands of digits: nobody's object but its own is lost.
            end = self._end(position)
            return None if end is None else (end, [])
        return None if value is None else (value[1], [value[0]])

    def _value(self, position: int) -> tuple[Any, int] | None:
        try:
            return self._json.raw_decode(self._text, position)
        except json.JSONDecodeError:
            return None

    def _end(self, position: int) -> int | None:
        """Where the object or list at ``position`` ends; None when it goes on."""
        depth = 0
        for token in _TOKEN.finditer(self._text, position):
            depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(token[0], 0)
            if depth <= 0:
                return token.end()
        return None
