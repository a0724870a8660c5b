"""``sft run --launcher ray``: Ray places the ranks, and the numbers are what they are without it."""

from tests.integration.run.runs import Place, step_numbers


def test_ray_places_the_ranks_and_the_numbers_are_the_same(place: Place) -> None:
    # Given a run without Ray
    job = place.job(compute={"gpusPerNode": 0, "processesPerNode": 2})
    assert place.run(job).code == 0

    # When the same job runs with it
    again = place.job("tiny-on-ray", compute={"gpusPerNode": 0, "processesPerNode": 2})
    ended = place.run(again, "--launcher", "ray")

    # Then every number of every step is the same, and no process is left (Place.finish)
    assert ended.code == 0, ended.said
    driver = place.store("tiny-on-ray") / "run" / "ray" / "driver.log"
    assert "Connected to Ray cluster" in driver.read_text()
    assert [record["loss"] for record in step_numbers(place.store("tiny-on-ray")).values()] == [
        record["loss"] for record in step_numbers(place.store()).values()
    ]
