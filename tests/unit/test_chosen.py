"""Campaigns try what they are asked for, and nothing else passes for it."""

import pytest

from tests.chosen import chosen

NAMES = ("one", "two", "three")


def test_all_in_their_order_unless_some_are_named() -> None:
    assert chosen(None, NAMES, []) == ["one", "two", "three"]
    assert chosen(None, NAMES, ["three", "one"]) == ["one", "three"]


@pytest.mark.parametrize("arguments", [["four"], ["one", "four"], ["--help"]])
def test_another_name_tries_nothing(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        chosen(None, NAMES, arguments)
    assert "one, two, three" in "".join(capsys.readouterr())
