"""One run, in turn on different numbers of processes."""

from tests.integration.run.conftest import LONG
from tests.integration.run.runs import Place, assert_the_same_to_rounding


def test_a_run_goes_on_with_another_number_of_processes(undisturbed: Place, place: Place) -> None:
    # Given a run on one process that was interrupted, with steps that three processes cannot share out evenly
    job = place.job(**LONG)
    process = place.start_standing(job, 25)
    interrupted = place.interrupt(process)

    # When it goes on with three
    ended = place.run(job, "--processes", "3")

    # Then it trains on the same tokens as if nothing had happened, and the numbers differ by rounding only
    assert interrupted.code == 30, interrupted.said
    assert ended.code == 0, ended.said
    assert "3 processes instead of the manifest's 1: the steps stay the same." in ended.said
    assert ended.status["plan"]["processes"] == 3
    assert_the_same_to_rounding(place, undisturbed)
