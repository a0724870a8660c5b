"""The trainer's configuration survives the way through JSON."""

import pytest

from sft_api.trainer_config import TrainerConfig
from tests.parity.runs import manifest, resolve


@pytest.mark.parametrize("at_end", [True, False])
def test_what_is_absent_in_json_is_absent_again(tmp_path, at_end: bool) -> None:  # type: ignore[no-untyped-def]
    config = resolve(manifest(tmp_path, tmp_path / "store", export={"atEnd": at_end}))
    assert (config.export_uri is not None) == at_end
    assert TrainerConfig.model_validate_json(config.model_dump_json(exclude_none=True)) == config


def test_other_numbers_have_another_digest_and_other_places_have_not(tmp_path) -> None:  # type: ignore[no-untyped-def]
    config = resolve(manifest(tmp_path, tmp_path / "store"))
    elsewhere = resolve(manifest(tmp_path, tmp_path / "other", processes=2))
    faster = resolve(manifest(tmp_path, tmp_path / "store", training={"optimizer": {"learningRate": 0.5}}))
    assert config.numbers().digest == elsewhere.numbers().digest != faster.numbers().digest
