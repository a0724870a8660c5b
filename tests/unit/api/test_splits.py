"""Splits in the hub's notation: one parser, and the same verdict by the pattern that the API server has."""

import pytest
from pydantic import ValidationError

from sft_api.splits import Slice, parse_split
from sft_api.v1alpha1 import TrainSource


@pytest.mark.parametrize(
    ("text", "slices"),
    [
        ("train", [Slice("train", None, None, False)]),
        ("train[:5_000]", [Slice("train", None, 5000, False)]),
        ("train[10%:20%]", [Slice("train", 10, 20, True)]),
        ("train[-100:]", [Slice("train", -100, None, False)]),
        ("train[:50%]+test.clean-1", [Slice("train", None, 50, True), Slice("test.clean-1", None, None, False)]),
        ("train[:]", [Slice("train", None, None, False)]),
    ],
)
def test_what_the_hub_writes_is_read(text: str, slices: list[Slice]) -> None:
    assert parse_split(text) == slices
    assert TrainSource(uri="hf://org/rows", split=text).split == text


@pytest.mark.parametrize(
    "text",
    ["train[:10%", "train[1", "train[5]", "train[_:1]", "train[:1__0]", "train[1_:]", "train[-_:]", "train[:a]",
     "+test", "train+", "train [:5]", "train\n"],
)  # fmt: skip
def test_what_is_no_split_is_refused_before_anything_runs(text: str) -> None:
    with pytest.raises(ValueError, match="must be a split or slices of one: write for example train"):
        parse_split(text)
    with pytest.raises(ValidationError, match="must be a split or slices of one: write for example train"):
        TrainSource(uri="hf://org/rows", split=text)


@pytest.mark.parametrize(
    ("text", "shortest"),
    [
        ("train[0:5_000]", "train[:5000]"),
        ("train[:]", "train"),
        ("train[0%:10]", "train[:10%]"),
        ("train[-100:]", "train[-100:]"),
        ("train[5:10%]", "train[5%:10%]"),
    ],
)
def test_a_slice_has_one_shortest_notation(text: str, shortest: str) -> None:
    (piece,) = parse_split(text)
    assert str(piece) == shortest
    assert parse_split(shortest)[0].bounds(200) == piece.bounds(200)
