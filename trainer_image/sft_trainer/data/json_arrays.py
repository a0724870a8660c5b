"""``.json`` files: one array of objects, of which one at a time is in memory, or one object per line."""

import io
import json
import re
from codecs import getincrementaldecoder
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sft_trainer.errors import DataError

from .packed import opened
from .readers import Reader, Row
from .text_rows import Mark, TextRows, checked_object, find, open_lines, pass_mark, too_deep, undecoded, what_is_wrong

_BLOCK = 2**18
_SPACE = re.compile(r"[ \t\n\r]*")
_LONGEST_CUT = 16
"""Characters before the end of a text in which what is cut off there may be taken for the whole, or for an error: a
part of a number, a word or an escape."""
_QUOTED = 60
_scan = json.JSONDecoder().raw_decode


@dataclass(frozen=True)
class Array:
    """One array of objects."""

    unit: str = "row"
    columns: None = None

    def items(self, file: io.BufferedReader, name: str, mark: Mark | None = None) -> Iterator[tuple[Mark, Any]]:
        offset, number = find(file, name, mark)
        text = _Text(file, name, offset)
        if mark is None:
            if text.next() != "[":
                raise DataError(f"{name} must hold an array of objects or one object per line")
            text.pass_over(1)
            if text.next() == "]":
                text.check_end()
                return
        while True:
            text.next()
            begin = Mark(text.offset, number)
            yield begin, text.value(f"{name} row {number}")
            match text.next():
                case ",":
                    text.pass_over(1)
                case "]":
                    text.check_end()
                    return
                case "":
                    raise DataError(f"{name} ends in the middle of the array, behind row {number}: it was cut off")
                case _:
                    raise DataError(
                        f"{name} row {number} is followed by {text.quoted()}: rows of an array have commas between "
                        "them, and ] behind the last one"
                    )
            number += 1

    def row(self, item: Any, place: str) -> Row:
        return checked_object(item, place)


class _Text:
    """What a file holds from some byte on, block by block."""

    def __init__(self, file: io.BufferedReader, name: str, offset: int) -> None:
        self.offset = offset
        """Bytes before what comes next."""
        self._file, self._name = file, name
        self._decode = getincrementaldecoder("utf-8")().decode
        self._text = ""
        self._at = 0
        """What of ``_text`` was passed over."""

    def _more(self) -> bool:
        """Read on: as much again as there is, so that a long row is not tried for every block.

        False at the end of the file: nothing has changed then.
        """
        rest = self._text[self._at :]
        data = self._file.read(max(_BLOCK, len(rest)))
        try:
            decoded = self._decode(data, final=not data)
        except UnicodeDecodeError as error:
            wrong = undecoded(error, self.offset + len(rest.encode()))
            raise DataError(f"{self._name} is not UTF-8 ({wrong}): save it as UTF-8") from error
        if data:
            self._text, self._at = rest + decoded, 0
        return bool(data)

    def pass_over(self, characters: int) -> None:
        end = self._at + characters
        self.offset += len(self._text[self._at : end].encode())
        self._at = end

    def next(self) -> str:
        """The character behind what is passed over, white space too; "" at the end."""
        while True:
            match = _SPACE.match(self._text, self._at)
            self.pass_over(match.end() - self._at if match else 0)
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return ""

    def value(self, place: str) -> Any:
        """What is written next."""
        while True:
            try:
                value, end = _scan(self._text, self._at)
                if end + _LONGEST_CUT < len(self._text) or not self._more():
                    self.pass_over(end - self._at)
                    return value
            except RecursionError as error:
                raise too_deep(place) from error
            except ValueError as error:
                if not (self._is_cut_off(error) and self._more()):
                    wrong = what_is_wrong(error, self._text, self._at)
                    raise DataError(f"{place} is not valid JSON {wrong}; correct or remove the row") from error

    def _is_cut_off(self, error: ValueError) -> bool:
        """Whether there may be nothing wrong but that the text ends."""
        return isinstance(error, json.JSONDecodeError) and (
            error.msg.startswith("Unterminated") or not self._text[error.pos + _LONGEST_CUT :].strip()
        )

    def quoted(self) -> str:
        return repr(self._text[self._at : self._at + _QUOTED])

    def check_end(self) -> None:
        """Raise unless nothing is behind the character that comes next."""
        self.pass_over(1)
        if self.next():
            raise DataError(f"{self._name} has {self.quoted()} behind the end of its array: remove it")


_AROUND_ROWS = re.compile(rb'\{\s*"([^"\\]{1,99})"\s*:\s*\[\s*\{')
"""How an object begins that has rows in an array."""


def open_json(path: Path) -> Reader:
    """``.json`` files are written both ways: as one array, and as one object per line.

    Raises DataError for what is neither.
    """
    with opened(path) as file:
        pass_mark(file, str(path))
        start = b""
        while not start and (block := file.read(4096)):
            start = block.lstrip()
    if start.startswith(b"["):
        return TextRows.open(path, Array())
    lines = open_lines(path)
    try:
        _ = next(lines.read(0, 1), None)
    except DataError as error:  # such as one object over several lines
        around = _AROUND_ROWS.match(start)
        only = (
            f": write only the array in '{around[1].decode(errors='replace')}', and nothing around it" if around else ""
        )
        raise DataError(f"{error}; a .json file must hold an array of objects or one object per line{only}") from error
    return lines
