"""A run with another config than its model's is published with: what it exports, and what it goes on with."""

import json

import pytest

from tests.integration.run.runs import Place, assert_failed, assert_refused
from tests.integration.run.test_good_runs import evaluation_of

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def test_a_run_with_scaled_positions_exports_the_model_that_it_trained(place: Place) -> None:
    # Given a run by yarn whose documents are longer than what it scales from
    sections = {
        "data": {
            "train": [{"uri": f"file://{place.inputs.train}", "split": "train[:60]"}],
            "eval": [{"uri": f"file://{place.inputs.eval}", "name": "held-out"}],
        },
        "export": {"atEnd": True},
    }

    def with_factor(factor: float) -> dict[str, object]:
        given = {"rope_parameters": {**YARN, "factor": factor}, "max_position_embeddings": 256}
        return {"uri": f"file://{place.inputs.model}", "configOverrides": given}

    ended = place.run(place.job(model=with_factor(4.0), **sections))
    assert ended.code == 0, ended.said

    # Then the exported config has it, and plain transformers finds the loss that the run has measured
    export = place.store() / "export"
    config = json.loads((export / "config.json").read_text())
    assert config["max_position_embeddings"] == 256
    assert {name: config["rope_parameters"][name] for name in YARN} == YARN
    assert "| `max_position_embeddings` | `256` |" in (export / "README.md").read_text()
    rows = [json.loads(line) for line in place.inputs.eval.read_text().splitlines()]
    measured = ended.status["progress"]["evalLoss"]
    loss, _ = evaluation_of(export, rows, 256)
    assert loss == pytest.approx(measured, rel=1e-5)

    # And with the positions of the published model it would be another one
    published = json.loads((place.inputs.model / "config.json").read_text())["rope_parameters"]
    (export / "config.json").write_text(json.dumps({**config, "rope_parameters": published}))
    unscaled, _ = evaluation_of(export, rows, 256)
    assert abs(unscaled - measured) > 1e-5 * measured

    # And the run does not go on with another factor
    again = place.run(place.job(model=with_factor(8.0), **sections))
    assert_failed(again, 10, "ConfigError", "model.configOverrides.rope_parameters.factor: 4 -> 8")


def test_overrides_that_the_model_has_no_place_for_are_refused_before_a_step(place: Place) -> None:
    model = {"uri": f"file://{place.inputs.model}", "configOverrides": {"sliding_window": 64}}
    ended = place.run(place.job(model=model))
    assert_refused(ended, 10, "ConfigError", "model.configOverrides.sliding_window is 64, but a model of type")
