"""What index 0's driver asks of Ray, how long it waits for it, and what it makes of the answers. No Ray is running."""

from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError, RpcError
from ray.train.backend import Backend
from ray.train.v2._internal import constants, exceptions
from ray.train.v2._internal.execution.failure_handling import FailureDecision, create_failure_policy
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.train.v2.api.exceptions import ControllerError, PreemptionError, WorkerGroupError
from ray.train.v2.api.preemption import PreemptionInfo

from sft_api.failures import FailureClass
from sft_trainer.on_ray import driver, places
from sft_trainer.on_ray.driver import (
    NotFormedError,
    configuration,
    failure_of,
    failure_of_places,
    missing_pods,
    why_unplaced,
)
from sft_trainer.on_ray.worker import hold_place


class Hung(BaseException):
    """Raised in the place of waiting on, long after any deadline; nothing that catches exceptions catches it."""


class FakeTime:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.now > 2000:
            raise Hung


class FakeRay:
    """A Ray whose own raylet answers at ``up``, and whose pods are there at the times ``joined``."""

    def __init__(self, time: FakeTime, *, up: float, joined: tuple[float, ...] = ()) -> None:
        self._time, self._up, self._joined = time, up, joined

    def init(self, **_: Any) -> None:
        if self._time.now < self._up:
            raise ConnectionError("no GCS")

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {"Resources": {f"{places.POD_RESOURCE}{index}": 1.0}, "Alive": self._time.now >= joined}
            for index, joined in enumerate(self._joined)
        ]


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    monkeypatch.setenv(places.HEAD_VARIABLE, "127.0.1.1:1")
    monkeypatch.setenv(places.ADDRESS_VARIABLE, "127.0.1.1")
    fake = FakeTime()
    monkeypatch.setattr(driver, "time", fake)
    return fake


def test_the_raylet_of_index_0_is_waited_for_until_the_deadline(time: FakeTime) -> None:
    driver._connect(FakeRay(time, up=1100), 1180)

    with pytest.raises(NotFormedError, match="own raylet did not answer within 180 s: no GCS") as raised:
        driver._connect(FakeRay(time, up=5000), 1180)
    assert (raised.value.failure, time.now) == (FailureClass.UNKNOWN, pytest.approx(1180, abs=1))


def test_the_raylets_of_all_pods_are_waited_for_until_the_deadline(time: FakeTime) -> None:
    driver._wait_for_pods(FakeRay(time, up=0, joined=(0, 1090, 1100)), 3, 1180)

    with pytest.raises(NotFormedError, match=r"the raylets of 2 of 3 pods \(1, 2\) did not join .* 180 s") as raised:
        driver._wait_for_pods(FakeRay(time, up=0, joined=(0, 5000)), 3, 1180)
    assert (raised.value.failure, time.now) == (FailureClass.PEER_LOST, pytest.approx(1180, abs=1))


def test_the_pods_whose_raylets_are_missing_are_named() -> None:
    alive = [{"CPU": 4.0, "sft_pod_0": 1.0, "sft_rank": 8.0}, {"sft_pod_10": 1.0}]

    assert missing_pods(alive, 3) == [1, 2]
    assert missing_pods([*alive, {"sft_pod_1": 1.0}, {"sft_pod_2": 1.0}], 3) == []


@pytest.mark.parametrize(
    ("gpus", "each"), [(0, {"sft_rank": 1.0}), (1, {"sft_rank": 1.0, "GPU": 1.0}), (2, {"sft_rank": 1.0, "GPU": 1.0})]
)
def test_ray_train_accepts_a_place_for_each_rank_with_a_gpu_or_without(
    gpus: int, each: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TRAIN_V2_ENABLED", "1")

    told = DataParallelTrainer(hold_place, **configuration(4, gpus, tmp_path))

    scaling = told.scaling_config
    assert (scaling.num_workers, scaling.use_gpu, scaling._resources_per_worker_not_none) == (4, gpus > 0, each)
    assert told.run_config.storage_path == str(tmp_path / "results")


def test_ray_train_makes_no_group_of_processes_and_shows_no_others_their_gpus(tmp_path: Path) -> None:
    backend = configuration(2, 2, tmp_path)["backend_config"]

    assert backend.backend_cls is Backend
    assert not Backend.share_cuda_visible_devices
    # It asks nothing of workers, which are none here.
    Backend().on_start(None, backend)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(ControllerError(exceptions.WorkerGroupStartupTimeoutError(2)), id="no places"),
        pytest.param(ControllerError(exceptions.WorkerGroupStartupFailedError("died")), id="no workers"),
        pytest.param(WorkerGroupError("lost", {0: RuntimeError("lost")}), id="a worker"),
        pytest.param(PreemptionError(PreemptionInfo(None, {})), id="a node that is taken away"),
    ],
)
def test_nothing_is_tried_again_by_ray(error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = create_failure_policy(configuration(2, 0, tmp_path)["run_config"].failure_config)
    monkeypatch.setattr(policy, "_log_decision", lambda *_: None)

    assert policy.make_decision(error) is FailureDecision.RAISE


def test_places_that_do_not_come_are_told_with_the_time_that_has_passed() -> None:
    assert constants.WORKER_GROUP_START_TIMEOUT_S_ENV_VAR == places.PLACE_SECONDS_VARIABLE
    each, free = {"sft_rank": 1.0, "GPU": 1.0}, {"sft_rank": 1.0, "GPU": 0.0}

    waited = why_unplaced(exceptions.WorkerGroupStartupTimeoutError(2), 2, each, free, 1.2)
    other = why_unplaced(exceptions.WorkerGroupStartupFailedError("a worker has died"), 2, each, free, 7.0)

    asked = f"2 ranks of {each} each (free: {free})"
    assert waited == (
        f"no places were found for {asked} in 1 s: a raylet has gone, or tasks of a callback hold what ranks need"
    )
    assert other == f"could not start {asked}: a worker has died"


def raised_by_a_task(cause: Exception) -> RayTaskError:
    """As Ray hands out what an actor has raised: it is of both classes."""
    return RayTaskError("f", "…", cause, "title", 1, "127.0.0.1").as_instanceof_cause()


def died_at_its_start() -> ActorDiedError:
    return ActorDiedError(RayTaskError("f", "…", TypeError("no such argument"), "title", 1, "127.0.0.1"))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (NotFormedError(FailureClass.CONFIG_ERROR, "as it says"), FailureClass.CONFIG_ERROR),
        (ValueError("`use_gpu` is False but `GPU` was found in `resources_per_worker`."), FailureClass.UNKNOWN),
        (TypeError("an unexpected argument"), FailureClass.UNKNOWN),
        (ImportError("no module"), FailureClass.UNKNOWN),
        (raised_by_a_task(ValueError("in the controller")), FailureClass.UNKNOWN),
        (died_at_its_start(), FailureClass.UNKNOWN),
        (
            WorkerGroupError("", {0: exceptions.UserExceptionWithTraceback(ValueError("no place"), "…")}),
            FailureClass.UNKNOWN,
        ),
        (RpcError("the GCS is gone"), FailureClass.PEER_LOST),
        (ActorDiedError(), FailureClass.PEER_LOST),
        (raised_by_a_task(ActorDiedError()), FailureClass.PEER_LOST),
        (WorkerGroupError("", {1: exceptions.WorkerHealthCheckTimeoutError("silent")}), FailureClass.PEER_LOST),
        (ConnectionResetError("by peer"), FailureClass.PEER_LOST),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_a_mistake_is_no_echo_of_what_others_lost(error: Exception, expected: FailureClass) -> None:
    assert failure_of(error) is expected


@pytest.mark.parametrize(
    ("failure", "missing", "too_soon", "expected"),
    [
        (exceptions.WorkerGroupStartupTimeoutError(2), [], False, FailureClass.UNKNOWN),
        (exceptions.WorkerGroupStartupTimeoutError(2), [], True, FailureClass.PEER_LOST),
        (exceptions.WorkerGroupStartupTimeoutError(2), [1], False, FailureClass.PEER_LOST),
        (exceptions.WorkerGroupStartupFailedError("a worker has died"), [], True, FailureClass.PEER_LOST),
        (ActorDiedError(), [], True, FailureClass.PEER_LOST),
        (ValueError("no such option"), [], True, FailureClass.UNKNOWN),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_pod_that_is_lost_while_ranks_are_placed_is_not_charged_to_the_run(
    failure: Exception, missing: list[int], too_soon: bool, expected: FailureClass
) -> None:
    assert failure_of_places(failure, missing=missing, too_soon=too_soon) is expected
