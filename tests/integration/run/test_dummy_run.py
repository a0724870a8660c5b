"""A dummy run beside the run that its manifest is of."""

from pathlib import Path

from tests.integration.run.runs import Place


def content(folder: Path) -> dict[str, tuple[int, int]]:
    return {
        str(file.relative_to(folder)): (file.stat().st_size, file.stat().st_mtime_ns)
        for file in folder.rglob("*")
        if file.is_file()
    }


def test_it_measures_and_leaves_the_run_of_its_manifest_alone(place: Place) -> None:
    # Given a run that is complete
    job = place.job(compute={"gpusPerNode": 0, "processesPerNode": 2}, export={"atEnd": True})
    assert place.run(job).code == 0
    before = content(place.store())

    # When its manifest asks for a dummy run, also with data that is not there
    job["spec"]["training"]["dummyRun"] = {"steps": 4}
    job["spec"]["training"]["callbacks"] = [{"class": "no.such.module:Callback"}]
    job["spec"]["data"]["train"] = [{"uri": "file:///no/such/rows.jsonl"}]
    job["spec"]["data"]["eval"] = [{"uri": "file:///no/such/eval.jsonl", "name": "held-out"}]
    ended = place.run(job)

    # Then it makes its steps, says what they took, and nothing else is there
    assert ended.code == 0, ended.said
    status = ended.status
    assert status["state"] == "Complete"
    assert {each["reason"] for each in status["conditions"] if each["type"] == "Complete"} == {"DummyRunComplete"}
    assert (status["progress"]["summary"], status["progress"]["percent"]) == ("4/4", 100)
    measured = status["progress"]["dummyRun"]
    assert "a step of 512 random tokens in examples of up to 256 (the median of the last 2 of 4 steps)" in measured
    assert status["message"] == f"training.dummyRun: {measured}"
    assert f"Measured    {measured}" in ended.said
    assert (status["checkpoints"], {"export", "stepsAtRisk"} & set(status)) == ({}, set())
    assert content(place.store()) == before
    assert not list(place.folder.rglob("dummy-run/*"))


def test_it_is_asked_to_stop_like_every_run(place: Place) -> None:
    job = place.job(training={"dummyRun": {"steps": 1000}})
    process = place.start(job)
    place.wait_for_step(2)
    ended = place.interrupt(process)
    assert (ended.code, ended.status["state"]) == (30, "Suspended"), ended.said
    refused = place.run(job, "--fresh")
    assert (refused.code, "omit --fresh" in refused.said) == (10, True)
