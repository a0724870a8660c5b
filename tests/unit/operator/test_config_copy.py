"""The copy of the trainer's configuration that a Job carries."""

from __future__ import annotations

import base64
import random
import string
import tracemalloc
import zlib

import pytest

from sft_operator.builders import build_config_map, config_digest, copy_annotations, restored_config_map
from tests.unit.operator.make import make_job

CONFIG, DIGEST = "sftjob.dev/config", "sftjob.dev/config-digest"
JOB = make_job(training={"epochs": 3}, model={"uri": "hf://org/modèl"})
MADE = build_config_map(JOB, None)
COPIED = copy_annotations(MADE)


def test_a_config_map_is_made_again_byte_for_byte() -> None:
    assert restored_config_map(JOB.metadata, COPIED) == MADE
    assert MADE["immutable"] is True


def test_annotations_of_one_object_have_room_for_256_kib() -> None:
    noise = random.Random(1)
    text = "".join(noise.choices(string.printable, k=400_000))
    large = copy_annotations({"metadata": {}, "data": {"config.json": text}})

    assert large == {DIGEST: config_digest(text)}
    assert restored_config_map(JOB.metadata, large) is None


@pytest.mark.parametrize("copy", ["", "no base64", "YWJj", COPIED[CONFIG][:-40]])
def test_a_copy_that_was_altered_is_none(copy: str) -> None:
    assert restored_config_map(JOB.metadata, COPIED | {CONFIG: copy}) is None


def test_of_a_copy_that_is_no_configuration_no_more_is_unpacked_than_a_config_map_holds() -> None:
    bomb = base64.b64encode(zlib.compress(b" " * 2**24)).decode()

    tracemalloc.start()
    try:
        assert restored_config_map(JOB.metadata, COPIED | {CONFIG: bomb}) is None
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()


def test_nor_is_one_of_another_configuration() -> None:
    other = copy_annotations(build_config_map(make_job(training={"epochs": 4}), None))

    assert restored_config_map(JOB.metadata, COPIED | {CONFIG: other[CONFIG]}) is None
    assert restored_config_map(JOB.metadata, {}) is None
