"""``sft run --launcher ray``: Ray places the ranks, and the numbers are what they are without it."""

from tests.integration.run.conftest import LONG
from tests.integration.run.runs import Place, step_numbers


def test_ray_places_the_ranks_and_the_numbers_are_the_same(undisturbed: Place, place: Place) -> None:
    # When a job is run with Ray
    ended = place.run(place.job(**LONG), "--launcher", "ray")

    # Then every number is that of the run without it, to the last bit; no process is left (Place.finish)
    assert ended.code == 0, ended.said
    driver = place.store() / "run" / "ray" / "driver.log"
    assert "Connected to Ray cluster" in driver.read_text()
    losses, expected = (
        {step: record["loss"] for step, record in step_numbers(of.store()).items()} for of in (place, undisturbed)
    )
    assert losses == expected
