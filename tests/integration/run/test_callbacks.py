"""Classes of a user beside real runs: found in PYTHONPATH, told on every process, heard, and named when they fail."""

import json
from pathlib import Path
from typing import Any

from tests.integration.run.runs import Place, assert_failed, assert_refused, step_numbers

MODULE = '''
import json, os, time
from pathlib import Path
from sft_trainer.callbacks import Callback

class Watch(Callback):
    """Of the second process only that one asks for the end."""
    def __init__(self, folder: Path, stop_at: int) -> None:
        self._file = folder / f"heard-{os.environ['RANK']}.jsonl"
        self._stop_at = stop_at

    def _write(self, *words):
        with self._file.open("a") as file:
            file.write(json.dumps(words) + "\\n")

    def on_start(self, run, control):
        self._write("start", run.attempt, run.step, run.processes, run.is_first_process, run.spec["training"]["seed"])

    def on_step(self, step, control):
        self._write("step", step.step, step.loss)
        if step.step == self._stop_at and os.environ["RANK"] == "1":
            control.stop("seen enough")

    def on_save(self, checkpoint, control):
        self._write("save", checkpoint.step, checkpoint.uri)

    def on_end(self, end):
        self._write("end", end.step, end.outcome, end.message, end.export_uri)

class Breaks(Callback):
    def on_step(self, step, control):
        if step.step == 2:
            raise ValueError("this loss cannot be")

class Stands(Callback):
    def on_step(self, step, control):
        if step.step == 2:
            time.sleep(3600)
'''


def module(place: Place) -> dict[str, str]:
    """Of the environment of a run: the user's code, in a folder of its own."""
    folder = place.folder / "code" / "my_team"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "watch.py").write_text(MODULE)
    return {"PYTHONPATH": str(folder.parent)}


def heard(folder: Path, rank: int) -> list[list[Any]]:
    return [json.loads(line) for line in (folder / f"heard-{rank}.jsonl").read_text().splitlines()]


def test_every_process_is_told_and_one_that_asks_ends_the_run_on_all(place: Place) -> None:
    # Given a class that asks for the end after step 3, on the second of two processes
    code = module(place)
    arguments = {"folder": str(place.folder), "stop_at": "3"}
    job = place.job(
        training={
            "steps": 8,
            "globalBatchTokens": 512,
            "callbacks": [{"class": "my_team.watch:Watch", "arguments": arguments}],
        },
        compute={"gpusPerNode": 0, "processesPerNode": 2},
        checkpoint={"everySteps": 2},
        export={"atEnd": True},
    )

    # When it is trained
    ended = place.run(job, **code)

    # Then it ends one step later as a complete one, with its model
    assert ended.code == 0, ended.said
    why = "after step 4: seen enough (my_team.watch:Watch)"
    status = ended.status
    assert (status["state"], status["message"]) == ("Complete", f"the run was stopped early, {why}")
    assert (status["progress"]["stoppedEarly"], status["export"]["step"]) == (why, 4)
    numbers = step_numbers(place.store())
    losses = [["step", step, numbers[step]["loss"]] for step in (1, 2, 3, 4)]
    first, second = (heard(place.folder, rank) for rank in (0, 1))
    assert [line for line in first if line[0] == "step"] == [line for line in second if line[0] == "step"] == losses
    assert (first[0], second[0]) == (["start", 1, 0, 2, True, 42], ["start", 1, 0, 2, False, 42])
    uri = f"file://{place.store()}"
    saved = [["save", step, f"{uri}/checkpoints/step-{step:08d}-a00001"] for step in (2, 4)]
    assert [line for line in first if line[0] == "save"] == saved
    assert [line for line in second if line[0] == "save"] == []
    assert first[-1] == ["end", 4, "complete", why, f"{uri}/export"]
    assert second[-1][:3] == ["end", 4, "complete"]

    # And it makes no step more, though nobody asks now
    del job["spec"]["training"]["callbacks"]
    again = place.run(job)
    assert (again.code, again.status["progress"]["stoppedEarly"]) == (0, why)


def test_a_class_that_is_not_there_is_said_before_anything_is_loaded(place: Place) -> None:
    # Given data that is wrong too
    job = place.job(training={"callbacks": [{"class": "my_team.watch:Watch"}]})
    job["spec"]["data"]["train"][0]["split"] = "validation"
    ended = place.run(job)
    assert_refused(ended, 10, "ConfigError", r"training.callbacks\[0\].class: there is no module 'my_team'")


def test_an_error_of_a_callback_ends_the_run_for_good_and_mended_it_goes_on(place: Place) -> None:
    code = module(place)
    job = place.job(training={"callbacks": [{"class": "my_team.watch:Breaks"}]}, checkpoint={"everySteps": 1})
    ended = place.run(job, **code)
    sentence = r"my_team.watch:Breaks.on_step raised ValueError: this loss cannot be \(watch.py, line \d+\): mend it"
    assert_failed(ended, 20, "CallbackError", sentence)
    assert "restarts" not in ended.status
    sign = json.loads((place.store() / "alive.json").read_text())
    assert sign["ended"] == "failed", "whoever starts it again as another object need not watch for a sign of life"

    mended = Path(code["PYTHONPATH"]) / "my_team" / "watch.py"
    mended.write_text(mended.read_text().replace("this loss", "no loss").replace("step.step == 2", "step.step == 9"))
    assert place.run(job, **code).code == 0


def test_a_callback_that_never_returns_is_a_hang_whose_line_is_in_the_log(place: Place) -> None:
    code = module(place)
    job = place.job(
        training={"callbacks": [{"class": "my_team.watch:Stands"}]},
        # More than any of its steps takes on a busy machine
        runPolicy={"progressDeadlineSeconds": 20, "maxRestarts": 0},
    )
    ended = place.run(job, **code)
    assert_failed(ended, 17, "RestartsExhausted", "no new step for .* after step 2")
    logs = "".join(file.read_text() for file in (place.store() / "logs").iterdir())
    assert "watch.py" in logs
    assert "in on_step" in logs
    # And they are kept where the message says
    folder = place.store() / "hangs" / "step-00000002-a00001"
    assert f"file://{folder}" in ended.said
    assert "in on_step" in (folder / "stacks-rank-00000.txt").read_text()
