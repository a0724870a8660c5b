"""A run that begins from a checkpoint of another one, with its weights or with everything."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from sft_api.checkpoints import Manifest
from sft_trainer.checkpoint.catalog import Catalog
from sft_trainer.checkpoint.local import LocalStore
from tests.cluster.object_store import ObjectStore
from tests.integration.run.runs import Place, assert_refused, step_numbers
from tests.integration.run.stores import credentials, s3_spec
from tests.wider import wider_model

BUCKET = "resume-from"
CONSTANT: dict[str, Any] = {"type": "constant"}


@pytest.fixture(scope="module")
def server(versitygw: ObjectStore) -> ObjectStore:
    versitygw.client().create_bucket(Bucket=BUCKET)
    return versitygw


def training(steps: int, **fields: Any) -> dict[str, Any]:
    return {"training": {"steps": steps, "globalBatchTokens": 512, "schedule": CONSTANT, **fields}}


def objects(server: ObjectStore, prefix: str) -> dict[str, str]:
    """What lies in the bucket under ``prefix``: name and tag."""
    pages = server.client().get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
    return {entry["Key"]: entry["ETag"] for page in pages for entry in page.get("Contents", ())}


def downloaded(server: ObjectStore, prefix: str, folder: Path) -> Path:
    """A copy of what lies in the bucket under ``prefix``."""
    for key in objects(server, prefix):
        file = folder / key.removeprefix(prefix)
        file.parent.mkdir(parents=True, exist_ok=True)
        server.client().download_file(BUCKET, key, str(file))
    return folder


def test_more_steps_are_another_run_that_goes_on_where_the_first_ended(
    place: Place, server: ObjectStore, tmp_path: Path
) -> None:
    # Given a run that is complete
    shell = credentials(server)
    checkpoint = {"uri": f"s3://{BUCKET}/first", "s3": s3_spec(server)}
    first = place.run(place.job("first", **training(3), checkpoint=checkpoint), **shell)
    assert first.code == 0, first.said
    before = objects(server, "first/")

    # When its steps are raised, it is refused, with what to paste into the manifest of another one
    refused = place.run(place.job("first", **training(6), checkpoint=checkpoint), **shell)
    assert_refused(refused, 10, "ConfigError", r"training\.steps: 3 -> 6")
    paste = re.search(r"in spec, (checkpoint: \{.*?\}\}\})", refused.status["message"])
    assert paste, refused.status["message"]
    resume = yaml.safe_load(paste[1])["checkpoint"]
    assert resume == {"resume": {"from": {"uri": f"s3://{BUCKET}/first", "step": 3, "what": "everything"}}}
    checkpoint = {**checkpoint, **resume, "uri": f"s3://{BUCKET}/second"}
    second = place.run(place.job("second", **training(6), checkpoint=checkpoint), **shell)

    # Then its steps are those of a run that made all of them, and nothing of the first was touched
    assert second.code == 0, second.said
    whole = place.run(place.job("whole", **training(6)))
    assert whole.code == 0, whole.said
    expected = step_numbers(place.store("whole"))
    numbers = step_numbers(downloaded(server, "second/", tmp_path / "second"))
    assert numbers == {step: expected[step] for step in (4, 5, 6)}
    assert second.status["progress"]["step"] == 6
    assert second.latest == 6
    assert objects(server, "first/") == before


def test_moments_in_8_bits_are_gone_on_with_to_the_last_bit_and_by_no_others(place: Place, tmp_path: Path) -> None:
    # Given a run of two steps, whose matrices have moments in 8 bits
    model = {"uri": f"file://{wider_model(place.inputs.model, tmp_path / 'model')}"}

    def sections(steps: int, **optimizer: Any) -> dict[str, Any]:
        of = training(steps)
        return {"model": model, "training": {**of.pop("training"), "optimizer": optimizer}, **of}

    first = place.run(place.job("first", **sections(2, stateDtype="int8")))
    assert first.code == 0, first.said
    saved = next(iter(Catalog(LocalStore(place.store("first"))).candidates()))
    assert isinstance(saved, Manifest)
    assert saved.kinds["exp_avg"] < saved.kinds["weight"] / 3
    assert saved.kinds["exp_avg_exponents"] == saved.kinds["exp_avg_sq_exponents"] > 0

    # When another one goes on with it, then its steps are those of a run that made all of them
    resume = {"resume": {"from": {"uri": f"file://{place.store('first')}", "what": "everything"}}}
    for name, checkpoint in (("second", resume), ("whole", {})):
        run = place.run(place.job(name, **sections(4, stateDtype="int8"), checkpoint=checkpoint))
        assert run.code == 0, run.said
    whole = step_numbers(place.store("whole"))
    assert step_numbers(place.store("second")) == {step: whole[step] for step in (3, 4)}

    # And one with other moments is told what to change
    other = place.run(place.job("other", **sections(4), checkpoint=resume))
    assert_refused(other, 10, "ConfigError", r"holds these in int8, .* set that to int8, or name what: weights")


def test_weights_alone_begin_a_new_run_on_other_data(place: Place) -> None:
    # Given a run that ends with an evaluation
    evaluated = {"eval": [{"uri": f"file://{place.inputs.eval}", "name": "held-out"}]}
    first = place.run(place.job("first", **training(3), data=evaluated))
    assert first.code == 0, first.said

    # When another one, with another seed and schedule, begins with its weights
    origin = {"resume": {"from": {"uri": f"file://{place.store('first')}"}}}
    sections = training(2, seed=7, evaluation={"beforeTraining": True})
    second = place.run(place.job("second", **sections, data=evaluated, checkpoint=origin))

    # Then it makes all of its own steps, and before the first of them (0) its loss is what the first run ended with
    assert second.code == 0, second.said
    assert sorted(step_numbers(place.store("second"))) == [0, 1, 2]
    told = {name: json.loads((place.store(name) / "status.json").read_text()) for name in ("first", "second")}
    assert told["second"]["firstEvalLoss"] == told["first"]["evalLoss"] != told["second"]["evalLoss"]
    assert "checkpoint.resume.from" in (place.store("second") / "run.json").read_text()

    # And with another config of the model it says so, in the hint of the first run's place as well
    overridden = {"uri": f"file://{place.inputs.model}", "configOverrides": {"max_position_embeddings": 8192}}
    change = r"its weights were trained with another config of the model \(model\.configOverrides\.max_position"
    again = place.run(place.job("first", **training(3), data=evaluated, model=overridden))
    assert_refused(again, 10, "ConfigError", rf"what: weights\}}\}}\}}, but {change}")
    longer = place.run(place.job("longer", **training(1), data=evaluated, checkpoint=origin, model=overridden))
    assert longer.code == 0, longer.said
    told = json.loads((place.store("longer") / "status.json").read_text())
    assert [warning for warning in told["warnings"] if re.search(change, warning)]

    # And a place without checkpoints is refused before anything is fetched
    (place.folder / "empty").mkdir()
    origin = {"resume": {"from": {"uri": f"file://{place.folder / 'empty'}"}}}
    third = place.run(place.job("third", **training(2), checkpoint=origin))
    assert_refused(third, 10, "ConfigError", r"/empty, which checkpoint\.resume\.from names, holds no checkpoint: name")
    assert "Loading" not in third.said
