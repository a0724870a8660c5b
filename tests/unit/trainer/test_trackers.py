"""What trackers have in common: a run neither waits for one nor ends with it."""

import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from sft_trainer.callbacks import Control, End, Log, Run, trackers
from sft_trainer.callbacks.trackers import MLflow, Point, Tracker, WeightsAndBiases, described, flat, numbers, run_id
from tests.waiting import PATIENCE_SECONDS, wait_until

RUN = Run("tiny", "team", 1, 0, 10, 2, True, "s3://bucket/run", None, {})


class Recorder(Tracker):
    """Keeps what it is told; fails at first as often as it is to."""

    library = "json"

    def __init__(self, failures: int = 0, hangs: threading.Event | None = None, send_failures: int = 0) -> None:
        super().__init__()
        self.told: list[object] = []
        self._failures, self._hangs, self._send_failures = failures, hangs, send_failures

    def begin(self, run: Run) -> None:
        if self._hangs is not None:
            self._hangs.wait(60)
        if self._failures:
            self._failures -= 1
            raise ConnectionError("no answer")
        self.told.append(run)

    def send(self, points: Sequence[Point]) -> None:
        if self._send_failures:
            self._send_failures -= 1
            raise ConnectionError("no answer")
        self.told += [point.step for point in points]

    def finish(self, end: End) -> None:
        self.told.append(end.outcome)


def follow(tracker: Tracker, steps: int, run: Run = RUN) -> None:
    tracker.on_start(run, Control())
    for step in range(1, steps + 1):
        tracker.on_log(Log(step, {"loss": 1.0}), Control())
    tracker.on_end(End(steps, "complete", "", None))


def test_the_first_process_tells_all_in_order() -> None:
    tracker = Recorder()
    follow(tracker, 5)
    assert tracker.told == [RUN, 1, 2, 3, 4, 5, "complete"]

    other = Recorder()
    follow(other, 5, replace(RUN, is_first_process=False))
    assert other.told == []


def test_what_a_tracker_did_not_take_goes_with_what_comes_next(caplog: pytest.LogCaptureFixture) -> None:
    tracker, again = Recorder(failures=1), threading.Event()
    tracker.on_start(RUN, Control())
    tracker.on_log(Log(1, {"loss": 1.0}), Control())
    while not tracker._troubles:
        again.wait(0.01)
    tracker.on_log(Log(2, {"loss": 1.0}), Control())
    tracker.on_end(End(2, "complete", "", None))
    assert tracker.told == [RUN, 1, 2, "complete"]
    assert caplog.text.count("json: no answer (said once)") == 1


def test_a_tracker_that_refuses_is_not_asked_after_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "_FIRST_PAUSE", PATIENCE_SECONDS)
    # Given one that will take nothing before the end, as with a wrong key
    tracker, again = Recorder(failures=1000), threading.Event()
    tracker.on_start(RUN, Control())
    tracker.on_log(Log(1, {"loss": 1.0}), Control())
    wait_until(lambda: tracker._troubles)

    # When steps follow one another
    for step in range(2, 31):
        tracker.on_log(Log(step, {"loss": 1.0}), Control())
        again.wait(0.01)
    tracker.on_end(End(30, "complete", "", None))

    # Then it was tried at the first, and once more at the end, which waits for no pause
    assert tracker._troubles == 2


def test_what_a_tracker_did_not_take_at_the_end_is_sent_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "_FIRST_PAUSE", 0.01)
    # Given one that was reached, and is away for a moment when the run ends
    tracker = Recorder(send_failures=2)
    follow(tracker, 3)
    assert tracker.told == [RUN, 1, 2, 3, "complete"]


def test_what_a_tracker_lacks_at_the_end_is_said_also_when_it_had_failed_before(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trackers, "_FIRST_PAUSE", 0.01)
    monkeypatch.setattr(trackers, "_SECONDS", 0.1)
    tracker = Recorder(send_failures=1000)
    follow(tracker, 3)
    assert tracker._thread is not None
    tracker._thread.join(PATIENCE_SECONDS)  # on a slow machine it says so after the run has ended
    assert "json: no answer (said once)" in caplog.text
    assert "json lacks how the run ended, and the last steps: no answer" in caplog.text


def test_a_tracker_that_is_slow_hears_the_end_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "_MOST_WAITING", 3)
    # Given one that has not begun when its queue is full, and does while the end waits for it
    released = threading.Event()
    tracker = Recorder(hangs=released)
    threading.Timer(0.3, released.set).start()
    follow(tracker, 20)
    assert tracker.told[-1] == "complete"


def test_a_password_in_the_address_of_a_tracker_is_not_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # Given a library that names the address it was given, as mlflow does with MLFLOW_TRACKING_URI
    tracker = Recorder(failures=1000)
    said = "API request to http://me:s3c@ret@host:9/api/2.0?of=a@b failed, see https://host/c"
    monkeypatch.setattr(tracker, "begin", Mock(side_effect=ConnectionError(said)))
    follow(tracker, 3)
    assert "json: API request to http://host:9/api/2.0?of=a@b failed, see https://host/c (said once)" in caplog.text
    assert "s3c" not in caplog.text


def test_an_error_without_words_is_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    tracker = Recorder()
    monkeypatch.setattr(tracker, "begin", Mock(side_effect=TimeoutError()))
    follow(tracker, 1)
    assert "json: TimeoutError (said once)" in caplog.text


def test_a_tracker_is_tried_again_also_when_no_step_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "_FIRST_PAUSE", 0.01)
    tracker, again = Recorder(failures=3), threading.Event()
    tracker.on_start(RUN, Control())
    tracker.on_log(Log(1, {"loss": 1.0}), Control())
    for _ in range(1000):
        if tracker.told == [RUN, 1]:
            break
        again.wait(0.01)
    assert (tracker.told, tracker._troubles) == ([RUN, 1], 3)
    tracker.on_end(End(1, "complete", "", None))


def test_wandb_has_one_folder_however_often_it_is_tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folders = []

    def init(**given: object) -> None:
        folders.append(given["dir"])
        raise ConnectionError("no answer")

    library = SimpleNamespace(init=init, Settings=dict, __spec__=ModuleSpec("wandb", None))
    monkeypatch.setitem(sys.modules, "wandb", library)  # type: ignore[arg-type]
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("WANDB_DIR", raising=False)
    tracker = WeightsAndBiases("demo")
    for _ in range(3):
        with pytest.raises(ConnectionError):
            tracker.begin(RUN)
    assert folders == [str(folder) for folder in tmp_path.iterdir()] * 3


class MlflowError(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(f"it says {code}")
        self.get_http_status_code = lambda: code


class Server:
    """Of MLflow, as far as it is talked to; answers the first requests that change a run with ``codes``."""

    def __init__(self, *codes: int) -> None:
        self.codes, self.runs, self.given = list(codes), 0, dict[str, str]()
        self.status = "KILLED"

    def get_experiment_by_name(self, name: str) -> object:
        return SimpleNamespace(experiment_id="1")

    def search_runs(self, *_: object, **__: object) -> list[object]:
        return [SimpleNamespace(info=SimpleNamespace(run_id="r"))] * self.runs

    def create_run(self, *_: object, **__: object) -> object:
        self.runs += 1
        return SimpleNamespace(info=SimpleNamespace(run_id="r"))

    def update_run(self, _: str, status: str) -> None:
        if self.codes:
            raise MlflowError(self.codes.pop(0))
        self.status = status

    def log_batch(self, _: str, params: Sequence[tuple[str, str]]) -> None:
        if self.codes:
            raise MlflowError(self.codes.pop(0))
        self.given.update(params)


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> Callable[[Server], MLflow]:
    def make(server: Server) -> MLflow:
        modules = {
            "mlflow": {"MlflowClient": lambda _: server, "__spec__": ModuleSpec("mlflow", None)},
            "mlflow.entities": {"Param": lambda *given: given},
            "mlflow.exceptions": {"MlflowException": MlflowError},
        }
        for name, content in modules.items():
            monkeypatch.setitem(sys.modules, name, SimpleNamespace(**content))  # type: ignore[arg-type]
        return MLflow("demo")

    return make


def test_the_settings_of_a_run_reach_mlflow_though_it_is_away_after_the_run_was_made(
    mlflow: Callable[[Server], MLflow],
) -> None:
    server = Server(503, 500)
    tracker = mlflow(server)
    run = replace(RUN, spec={"training": {f"x{number}": number for number in range(150)}})
    for _ in range(2):
        with pytest.raises(MlflowError):
            tracker.begin(run)
    tracker.begin(run)
    assert server.runs == 1
    assert (server.given["namespace"], server.given["training.x149"]) == ("team", "149")


def test_a_run_that_goes_on_is_running_in_mlflow_though_that_was_away_when_it_was_to_hear_so(
    mlflow: Callable[[Server], MLflow],
) -> None:
    # Given a run that was stopped, and goes on
    server = Server(503)
    server.runs = 1
    tracker = mlflow(server)
    with pytest.raises(MlflowError):
        tracker.begin(RUN)

    # When it is tried again, then it is told
    tracker.begin(RUN)
    assert server.status == "RUNNING"


def test_settings_that_mlflow_refuses_do_not_keep_figures_from_it(
    mlflow: Callable[[Server], MLflow], caplog: pytest.LogCaptureFixture
) -> None:
    mlflow(Server(400)).begin(RUN)
    assert "mlflow: it says 400 (said once)" in caplog.text


def test_a_tracker_that_hangs_holds_up_neither_a_step_nor_the_end_for_long(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trackers, "_SECONDS", 0.1)
    monkeypatch.setattr(trackers, "_MOST_WAITING", 3)
    released = threading.Event()
    tracker = Recorder(hangs=released)
    follow(tracker, 20)
    assert tracker.told == []
    assert "json: it is too slow, and lacks some steps (said once)" in caplog.text
    assert "json does not answer, and may lack the last steps" in caplog.text
    released.set()


@pytest.mark.parametrize("make", [lambda: WeightsAndBiases("demo"), lambda: MLflow("demo")])
def test_a_library_that_is_missing_is_named_at_once(make: object) -> None:
    with pytest.raises(ModuleNotFoundError, match=r"is not installed: add it to compute\.image"):
        make()  # type: ignore[operator]


def test_a_run_has_one_name_in_its_tracker_wherever_it_goes_on() -> None:
    assert run_id(RUN) == run_id(replace(RUN, attempt=7, step=3, namespace="other"))
    assert run_id(RUN) != run_id(replace(RUN, checkpoint_uri="s3://bucket/other"))


def test_runs_on_claims_of_one_name_in_two_namespaces_are_two_runs() -> None:
    on_a_claim = replace(RUN, checkpoint_uri="pvc://checkpoints/run")
    assert run_id(on_a_claim) == run_id(replace(on_a_claim, attempt=7, step=3))
    assert run_id(on_a_claim) != run_id(replace(on_a_claim, namespace="other"))


def test_figures_and_settings_as_trackers_take_them() -> None:
    values = {"step": 3, "time": 1.5, "loss": float("nan"), "tokens": 7, "ok": True, "evalLosses": {"a": 1.0}, "x": "y"}
    assert numbers(values) == {"tokens": 7.0, "evalLosses/a": 1.0}
    assert numbers({"step": 3, "evalLosses": {"time": 1, "step": 2}}) == {"evalLosses/time": 1, "evalLosses/step": 2}
    settings = {"data": {"train": [{"uri": "hf://a/b"}, {"uri": "hf://c/d"}]}, "seed": 1}
    assert dict(flat(settings)) == {"data.train.0.uri": "hf://a/b", "data.train.1.uri": "hf://c/d", "seed": 1}


def test_no_tracker_is_told_the_values_of_the_environment() -> None:
    given: dict[str, Any] = {
        "compute": {"nodes": 2, "env": [{"name": "HF_TOKEN", "value": "s3cret"}, {"name": "A", "valueFrom": {"b": 1}}]},
    }
    told = dict(flat(described(replace(RUN, spec=given))))
    assert "s3cret" not in told.values()
    assert (told["compute.env.0.name"], told["compute.env.1.valueFrom.b"], told["compute.nodes"]) == ("HF_TOKEN", 1, 2)
    assert given["compute"]["env"][0]["value"] == "s3cret"
