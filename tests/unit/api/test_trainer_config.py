"""The trainer's configuration survives the way through JSON."""

import json

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


def test_how_often_a_run_may_fail_is_no_business_of_the_trainer(tmp_path) -> None:  # type: ignore[no-untyped-def]
    strict, patient = (
        resolve(manifest(tmp_path, tmp_path / "store", runPolicy={"maxRestarts": number, "progressDeadlineSeconds": 7}))
        for number in (0, 1000)
    )
    policy = json.loads(strict.model_dump_json(by_alias=True))["spec"]["runPolicy"]

    # The same for all: a trainer of before, which counts for itself, leaves it to the operator.
    assert policy["maxRestarts"] == 1000
    assert policy["progressDeadlineSeconds"] == 7
    assert strict.model_dump_json() == patient.model_dump_json()
    assert strict.numbers().digest == patient.numbers().digest


@pytest.mark.parametrize("said", [{"maxRestarts": 7}, {}], ids=["how often", "nothing"])
def test_configurations_of_before_are_still_read(tmp_path, said) -> None:  # type: ignore[no-untyped-def]
    config = resolve(manifest(tmp_path, tmp_path / "store"))
    document = json.loads(config.model_dump_json(by_alias=True, exclude_none=True))
    del document["spec"]["runPolicy"]["maxRestarts"]
    document["spec"]["runPolicy"] |= said

    read = TrainerConfig.model_validate_json(json.dumps(document))

    assert read.model_dump_json() == config.model_dump_json()


@pytest.mark.parametrize(("epochs", "written"), [(None, "1"), (1, "1"), (3.0, "3"), (0.5, "0.5")])
def test_whole_passes_are_written_as_trainers_read_them_that_know_no_parts(tmp_path, epochs, written: str) -> None:  # type: ignore[no-untyped-def]
    training = {"steps": None, "epochs": epochs, "evaluation": {"everyEpochs": 2}}
    data = {"heldOut": {"fraction": 0.1}}
    config = resolve(manifest(tmp_path, tmp_path / "store", training=training, data=data))
    text = config.model_dump_json(by_alias=True, exclude_none=True)
    document = json.loads(text)

    # For them 1.0 is no whole number
    assert str(document["plan"]["epochs"]) == written
    assert str(document["spec"]["training"].get("epochs", written)) == written
    assert str(document["spec"]["training"]["evaluation"]["everyEpochs"]) == "2"
    assert TrainerConfig.model_validate_json(text) == config


@pytest.mark.parametrize("asked", [True, False])
def test_a_plan_that_says_nothing_of_compiling_has_compiled_what_was_asked_for(tmp_path, asked: bool) -> None:  # type: ignore[no-untyped-def]
    # Given the configuration of a run of before plans said it, whose manifest always did: by default false
    config = resolve(manifest(tmp_path, tmp_path / "store", training={"compile": asked}))
    document = json.loads(config.model_dump_json(by_alias=True, exclude_none=True))
    del document["plan"]["compile"]

    assert TrainerConfig.model_validate_json(json.dumps(document)).plan.compile == asked

    # One that says it is believed, whoever asked for what
    document["plan"]["compile"] = not asked
    assert TrainerConfig.model_validate_json(json.dumps(document)).plan.compile != asked
