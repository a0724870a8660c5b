"""Fixtures over a real control plane with our CRD; the pods are played by the test."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.access import Cluster
from tests.cluster.fixtures import own_cluster
from tests.cluster.object_store import ObjectStore
from tests.integration.kubernetes_api import KubernetesApi, kubernetes_api
from tests.integration.operator import scene as scenes
from tests.integration.operator.scene import OperatorProcess, Scene, StartOperator, Supervisors, new_scene

BUCKET = "platform"


@pytest.fixture(scope="package")
def s3(versitygw: ObjectStore) -> Any:
    """A client of the platform's store, with its bucket."""
    client = versitygw.client()
    client.create_bucket(Bucket=BUCKET)
    return client


@pytest.fixture(scope="package")
def supervisors() -> Iterator[Supervisors]:
    with scenes.serve_reports() as served:
        yield served


@pytest.fixture(scope="package")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """An API server with controller-manager and scheduler: Jobs make pods, which no kubelet runs."""
    yield from own_cluster(tmp_path_factory, "control")


@pytest.fixture(scope="package")
def server(control_plane: Cluster) -> Cluster:
    """The control plane with our CRD."""
    scenes.install_crd(control_plane)
    return control_plane


@pytest.fixture(scope="package")
def operator_kubeconfig(server: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Access with just the rights that the chart gives to the operator."""
    return scenes.operator_access(server, tmp_path_factory.mktemp("operator-access") / "kubeconfig")


@pytest.fixture(scope="package")
def api(server: Cluster) -> Iterator[KubernetesApi]:
    with kubernetes_api(server) as opened:
        yield opened


@pytest.fixture(scope="package")
def make_operator(
    operator_kubeconfig: Path, supervisors: Supervisors, tmp_path_factory: pytest.TempPathFactory
) -> StartOperator:
    """Starts an operator with settings suited to tests, which the caller ends."""

    def start(
        *, kubeconfig: Path = operator_kubeconfig, environment: dict[str, str] | None = None, **settings: Any
    ) -> OperatorProcess:
        config = {
            "pods": {"image": "registry.example/sft-trainer:1"},
            "pollSeconds": 0.5,
            "pollSecondsStarting": 0.3,
            "statusSeconds": 1,
            "statusSecondsStarting": 1,
            "stuckPodSeconds": 2,
            "silentSupervisorSeconds": 1,
            "evictionSeconds": 3,
            "progressUrl": supervisors.url,
            **settings,
        }
        return scenes.start_operator(tmp_path_factory.mktemp("operator"), kubeconfig, config, environment)

    return start


@pytest.fixture(scope="package")
def operator(make_operator: StartOperator) -> Iterator[OperatorProcess]:
    """The operator that serves all namespaces."""
    started = make_operator()
    yield started
    started.stop()


@pytest.fixture
def start_operator(make_operator: StartOperator) -> Iterator[StartOperator]:
    """Starts an operator for the test, and ends it with that: many of them would take the time of all tests after."""
    started: list[OperatorProcess] = []

    def start(**settings: Any) -> OperatorProcess:
        started.append(make_operator(**settings))
        return started[-1]

    yield start
    for operator in started:
        if operator.process.poll() is None:
            operator.stop()


@pytest.fixture
def scene(api: KubernetesApi, supervisors: Supervisors, operator: OperatorProcess) -> Iterator[Scene]:
    """A namespace of its own, served by the operator that all share."""
    with new_scene(api, supervisors) as opened:
        yield opened


@pytest.fixture
def own_scene(api: KubernetesApi, supervisors: Supervisors, operator: OperatorProcess) -> Iterator[Scene]:
    """A namespace that only operators of the test serve: the one that all share stands still meanwhile."""
    with new_scene(api, supervisors) as opened:
        operator.process.send_signal(signal.SIGSTOP)
        try:
            yield opened
        finally:
            operator.process.send_signal(signal.SIGCONT)
