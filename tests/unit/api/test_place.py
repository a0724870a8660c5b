"""What a place says of its run, read as what somebody else may have written."""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
import yaml

from sft_api.checkpoints import CheckpointId, digest_of, run_place
from sft_api.numbers import Numbers
from sft_api.place import (
    Done,
    Pin,
    RecordError,
    RunRecord,
    continued_from,
    decode_done,
    decode_record,
    doubts_of_weights,
    encode_done,
    encode_record,
)

NUMBERS = Numbers({"model.uri": "hf://org/model", "data.train": [{"uri": "hf://org/data"}], "training.seed": 7})


def record(**fields: Any) -> RunRecord:
    whole = {
        "name": "tiny", "digest": NUMBERS.digest, "numbers": NUMBERS.as_record(), "namespace": "team", "uid": "u-1",
        "revisions": {"model.uri": "c" * 40}, "created": datetime(2026, 1, 2, tzinfo=UTC), "record_id": "r",
    }  # fmt: skip
    return RunRecord.model_validate({**whole, **fields})


def test_a_record_is_read_as_it_was_written() -> None:
    assert decode_record(encode_record(record())) == record()
    later = {**without_digest(encode_record(record())), "fieldOfALaterVersion": 1}
    assert decode_record(json.dumps(later).encode()) == record()
    assert decode_done(encode_done(Done(step=6, attempt=2))) == Done(step=6, attempt=2)
    assert decode_done(b'{"version":1,"step":6,"attempt":2}') == Done(step=6, attempt=2)


def without_digest(raw: bytes) -> dict[str, Any]:
    """A record as it was written before records had digests of their own."""
    document: dict[str, Any] = json.loads(raw)
    del document["sha256"]
    return document


@pytest.mark.parametrize(
    ("raw", "decode"),
    [(encode_record(record()), decode_record), (encode_done(Done(step=6, attempt=2)), decode_done)],
    ids=["record", "done"],
)
def test_a_byte_that_was_changed_is_noticed_or_says_nothing(raw: bytes, decode: Callable[[bytes], object]) -> None:
    whole = decode(raw)
    for place in range(len(raw)):
        for bit in range(8):
            damaged = raw[:place] + bytes([raw[place] ^ 1 << bit]) + raw[place + 1 :]
            try:
                found = decode(damaged)
            except RecordError:
                continue
            # White space, or the name of the digest.
            assert found == whole, (place, damaged)


def test_half_a_record_is_none() -> None:
    whole = encode_record(record())
    for length in range(len(whole) - 2):
        with pytest.raises(RecordError, match="no whole record"):
            decode_record(whole[:length])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"version": 2}, "of version 2, this program reads version 1"),
        ({"name": None}, r"no whole record \(name: "),
        ({"numbers": {"version": 1, "values": {}}}, "do not match their digest"),
        ({"numbers": {"version": 2, "values": {}}}, "written in version 2"),
        ({"numbers": {}}, "not recorded"),
        ({"digest": "x"}, r"no whole record \(digest: "),
    ],
)
def test_what_cannot_be_compared_is_refused_with_the_reason(change: dict[str, Any], sentence: str) -> None:
    document = {**without_digest(encode_record(record())), **change}
    with pytest.raises(RecordError, match=sentence):
        decode_record(json.dumps(document).encode())


@pytest.mark.parametrize("raw", [b"[]", b"3", b"\xff", b"[" * 100_000, b'{"version": "1"}'])
def test_anything_else_is_refused_too(raw: bytes) -> None:
    with pytest.raises(RecordError):
        decode_record(raw)


def test_half_a_character_is_none() -> None:
    """The operator failed over it in each look at the job, and sft over its terminal."""
    document = json.loads(encode_done(Done(step=5, attempt=1))) | {"stoppedEarly": "for \ud800"}
    del document["sha256"]

    with pytest.raises(RecordError, match=r"it is no whole record .*surrogates not allowed"):
        decode_done(json.dumps(document | {"sha256": digest_of(document)}).encode())


def test_name_and_numbers_count_and_nothing_else() -> None:
    other = record(namespace="elsewhere", uid="u-2", revisions={}, record_id="s")
    assert other.differences("tiny", NUMBERS) == []
    assert record().differences("huge", Numbers({**NUMBERS.values, "training.seed": 8})) == [
        'metadata.name: "tiny" -> "huge"',
        "training.seed: 7 -> 8",
    ]


def test_a_pin_is_read_as_it_was_written() -> None:
    pin = Pin(CheckpointId(attempt=2, step=1200), "c" * 64)
    assert Pin.read(str(pin)) == pin
    for text in ("", "step-00001200-a00002", "step-1@c", "step-00001200-a00002@"):
        with pytest.raises(RecordError, match="is no checkpoint"):
            Pin.read(text)


@pytest.mark.parametrize(
    ("field", "value", "what"),
    [
        ("training.steps", 1201, "everything"),
        ("training.steps", 1200, "weights"),  # with everything no step would be left
        ("training.seed", 9, "weights"),
    ],
)
def test_what_goes_on_elsewhere_is_told_as_yaml(field: str, value: int, what: str) -> None:
    line = continued_from("s3://bucket/runs: a", 1200, NUMBERS, Numbers({**NUMBERS.values, field: value}))
    origin = {"uri": "s3://bucket/runs: a", "step": 1200, "what": what}
    assert yaml.safe_load(line) == {"checkpoint": {"resume": {"from": origin}}}


def test_weights_of_another_config_are_told_of() -> None:
    factor = "model.configOverrides.rope_parameters.factor"
    theirs = Numbers({**NUMBERS.values, factor: 4})
    assert doubts_of_weights(theirs, NUMBERS) == (
        f"its weights were trained with another config of the model ({factor}: 4 -> not set)"
    )
    assert doubts_of_weights(theirs, Numbers({**theirs.values, "training.seed": 9})) == ""


def test_weights_that_know_rows_which_are_held_out_are_told_of() -> None:
    field = "data.heldOut.fraction"
    twentieth, tenth = (Numbers({**NUMBERS.values, field: fraction}) for fraction in (0.05, 0.1))
    said = (
        f"its weights were trained on rows that are held out here ({field}: {{}} -> 0.05): the loss of held-out is no "
        "measure for what they have not seen"
    )
    assert doubts_of_weights(NUMBERS, twentieth) == said.format("not set")
    assert doubts_of_weights(tenth, twentieth) == said.format("0.1")
    # The same rows, none, or those of other sources.
    for theirs, mine in ((twentieth, twentieth), (twentieth, NUMBERS)):
        assert doubts_of_weights(theirs, mine) == ""
    others: list[Any] = [{"uri": "hf://org/other"}, {"uri": "hf://org/data", "split": "test"}, "damaged"]
    for source in others:
        assert doubts_of_weights(Numbers({**NUMBERS.values, "data.train": [source]}), twentieth) == ""


@pytest.mark.parametrize(
    ("theirs", "mine", "fraction", "told"),
    [
        ("train[:98%]", None, None, 'data.heldOut.fraction: not set -> 0.05, data.train[0].split: "train[:98%]" -> '),
        ("train[:98%]", None, 0.1, "data.heldOut.fraction: 0.1 -> 0.05, data.train[0].split: "),
        ("train", None, None, "data.heldOut.fraction: not set -> 0.05)"),
        ("train[10%:]", "train", 0.05, 'data.train[0].split: "train[10%:]" -> "train")'),
        # The same places of the same rows, other rows, and what no split can be.
        ("train[:98%]", None, 0.05, ""),
        ("train[:50%]", "train[50%:]", None, ""),
        ("test", "train", None, ""),
        ("train[", None, None, ""),
        (f"train[:{'9' * 400}%]", None, None, ""),
    ],
)
def test_weights_that_know_a_part_of_what_rows_are_held_out_of_are_told_of(
    theirs: str, mine: str | None, fraction: float | None, told: str
) -> None:
    def numbers(split: str | None, fraction: float | None) -> Numbers:
        source: dict[str, Any] = {"uri": "hf://org/data", **({"split": split} if split else {})}
        held_out = {"data.heldOut.fraction": fraction} if fraction else {}
        return Numbers({**NUMBERS.values, "data.train": [source], **held_out})

    found = doubts_of_weights(numbers(theirs, fraction), numbers(mine, 0.05))
    begin = f"its weights were trained on rows that are held out here ({told}"
    assert found.startswith(begin) if told else found == ""


@pytest.mark.parametrize(
    ("uri", "place"),
    [
        ("s3://b/team/run/checkpoints/step-00000010-a00001", "s3://b/team/run"),
        ("s3://b/checkpoints/run/checkpoints/step-00000010-a00001", "s3://b/checkpoints/run"),
        ("s3://b/run/step-00000010-a00001", None),
        ("s3://b/run/checkpoints/mine", None),
    ],
)
def test_the_place_of_a_run_is_told_by_each_of_its_checkpoints(uri: str, place: str | None) -> None:
    assert run_place(uri) == place
