"""What tests of runs rest on: a run that stands still where it should, and one of which nothing comes."""

import pytest

from tests.integration.run import runs
from tests.integration.run.runs import Place
from tests.integration.run.test_callbacks import heard, module


def test_runs_stand_still_one_after_the_other_and_keep_their_callbacks(place: Place) -> None:
    code = module(place)
    for name in ("first", "second"):
        folder = place.folder / "heard" / name
        folder.mkdir(parents=True)
        watch = {"class": "my_team.watch:Watch", "arguments": {"folder": str(folder), "stop_at": "9"}}

        process = place.start_standing(place.job(name, training={"callbacks": [watch]}), 2, **code)
        stood = heard(folder, 0)[-1]
        ended = place.finish(process)

        assert stood[:2] == ["step", 2]
        assert ended.code == 0, ended.said
        assert heard(folder, 0)[-1][:2] == ["end", 3]


def test_a_run_that_never_ends_fails_with_what_it_said(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    job = place.job(training={"callbacks": [{"class": "my_team.watch:Stands"}]})
    process = place.start(job, **module(place))
    place.wait_for_step(1)

    monkeypatch.setattr(runs, "PATIENCE_SECONDS", 0.5)
    with pytest.raises(AssertionError, match=r"(?s)for 1 s it made no step and did not end\n.*tiny.*\"step\": [12]"):
        place.finish(process)

    assert not place.processes()
