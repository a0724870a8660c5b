"""Export of the best checkpoint, through the whole product."""

from tests.integration.run.runs import Ended, Place, step_numbers


def exported(ended: Ended, place: Place) -> tuple[int, int, str]:
    """Step that the status names, that of the model card, and the loss there."""
    assert ended.code == 0, ended.said
    card = (place.store() / "export" / "README.md").read_text()
    facts = dict(
        line.strip("| ").split(" | ") for line in card.splitlines() if line.count("|") == 3 and " | " in line[2:]
    )
    return ended.status["export"]["step"], int(facts["steps"]), facts["evaluation loss"]


def test_the_best_is_exported_and_with_another_word_the_last(place: Place) -> None:
    # Given a run that gets worse in the end: its learning rate is far too high
    optimizer = {"learningRate": 1.0}
    schedule = {"type": "constantWithWarmup", "warmupSteps": 12}
    evaluation = {"everyEpochs": 0.001}  # which every step is more than
    job = place.job(
        data={"eval": [{"uri": f"file://{place.inputs.eval}", "split": "test[:4]", "name": "held-out"}]},
        training={"steps": 6, "optimizer": optimizer, "schedule": schedule, "evaluation": evaluation},
        checkpoint={"keep": {"last": 1, "best": 1}},
        export={"atEnd": True, "checkpoint": "best"},
    )

    # When it is complete
    ended = place.run(job)

    # Then the model is that of the lowest loss, whose checkpoint is kept
    losses = {step: record["evalLoss"] for step, record in step_numbers(place.store()).items()}
    best = min(losses, key=lambda step: losses[step])
    assert best < 6, losses
    assert exported(ended, place) == (best, best, f"{losses[best]:.6g}")
    assert ended.status["checkpoints"]["best"]["step"] == best

    # And who starts it again leaves it there, unless he asks for the last
    model = place.store() / "export" / "model.safetensors"
    before = model.stat().st_mtime_ns
    assert exported(place.run(job), place) == (best, best, f"{losses[best]:.6g}")
    assert model.stat().st_mtime_ns == before
    job["spec"]["export"]["checkpoint"] = "last"
    assert exported(place.run(job), place) == (6, 6, f"{losses[6]:.6g}")
