"""What every end-to-end test stands on: a real node, the operator installed with Helm, an S3 server with inputs."""

import json
import secrets
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any, TypeVar

import yaml

from tests.cluster import images, lifecycle
from tests.cluster.access import Cluster, from_environment
from tests.cluster.binaries import binary
from tests.cluster.object_store import ObjectStore, object_store
from tests.cluster.state import default_folder
from tests.fixtures_inputs import make_inputs
from tests.integration.kubernetes_api import KubernetesApi, kubernetes_api

REPOSITORY = Path(__file__).resolve().parents[2]
QUICKSTART = REPOSITORY / "examples" / "quickstart.yaml"
OPERATOR_NAMESPACE = "sft-system"
BUCKET = "sft"

PLATFORM_FOLDER = "platform"
PLATFORM_URI = f"s3://{BUCKET}/{PLATFORM_FOLDER}"
OPERATOR_SECRET = "operator-store"

T = TypeVar("T")


@dataclass(frozen=True)
class Release:
    """A chart, and the images that it is installed with."""

    chart: Path
    operator: str
    trainer: str


WORKING_TREE = Release(REPOSITORY / "charts" / "sft-operator", images.OPERATOR_IMAGE, images.TRAINER_IMAGE)


@dataclass(frozen=True)
class Stage:
    """A namespace with inputs and credentials, under a running operator."""

    cluster: Cluster
    store: ObjectStore
    namespace: str
    api: KubernetesApi
    """For what is looked at again and again: each kubectl takes 0.2 s of a processor before it asks."""

    def kubectl(self, *arguments: str, stdin: str | None = None, check: bool = True) -> str:
        """kubectl in the namespace of the jobs."""
        done = self.cluster.kubectl(f"--namespace={self.namespace}", *arguments, stdin=stdin, check=check)
        return done.stdout + ("" if check else done.stderr)

    def manifest(self, name: str, **spec: Any) -> dict[str, Any]:
        """examples/quickstart.yaml under another name, with a checkpoint folder of its own; ``spec`` is merged in."""
        job: dict[str, Any] = yaml.safe_load(QUICKSTART.read_text())
        job["metadata"]["name"] = name
        job["spec"]["checkpoint"]["uri"] = f"s3://{BUCKET}/runs/{name}"
        return {**job, "spec": merge(job["spec"], spec)}

    def apply(self, job: dict[str, Any]) -> str:
        """kubectl apply; what it said, also when it was refused."""
        return self.kubectl("apply", "--filename=-", stdin=json.dumps(job), check=False)

    def job(self, name: str) -> dict[str, Any]:
        """The SFTJob as the API server has it; RuntimeError where it has none, or does not answer."""
        path = f"/apis/sftjob.dev/v1alpha1/namespaces/{self.namespace}/sftjobs/{name}"
        try:
            answer = self.api.request("GET", path, "", "application/json")
        except (OSError, HTTPException, ValueError) as error:  # the last where a proxy answers in words, without it
            raise RuntimeError(f"no answer for {path}: {error}") from error
        if not answer.accepted:
            raise RuntimeError(f"no {path}: {answer.body}")
        return answer.body

    def status(self, name: str) -> dict[str, Any]:
        """Its status; empty before the first."""
        status: dict[str, Any] = self.job(name).get("status") or {}
        return status

    def step(self, name: str) -> int:
        """Steps done, as the status says."""
        progress = self.status(name).get("progress") or {}
        return int(progress.get("step") or 0)

    def folder(self, name: str) -> Path:
        """The checkpoint folder of a job made by ``manifest``, on this machine; also by ``on_platform``."""
        platform = self.store.folder / BUCKET / PLATFORM_FOLDER / self.namespace / name
        return platform if platform.exists() else self.store.folder / BUCKET / "runs" / name

    def on_platform(self, job: dict[str, Any]) -> dict[str, Any]:
        """``job``, which saves in the platform's store, where the operator can read what it leaves."""
        uri = f"{PLATFORM_URI}/{self.namespace}/{job['metadata']['name']}"
        return merge(job, {"spec": {"checkpoint": {"uri": uri, "s3": platform_s3(self.store)}}})

    def explain(self, name: str) -> str:
        """Everything worth reading when a job is not where it should be."""
        parts = [
            self.kubectl("get", "sftjob", name, "-o", "yaml", check=False)[-5000:],
            self.kubectl("get", "pods", "-o", "wide", check=False),
            self.kubectl("get", "events", "--sort-by=.lastTimestamp", check=False)[-3000:],
            self.kubectl("logs", f"job/{name}", "--all-pods", "--tail=40", check=False)[-8000:],
            self.cluster.kubectl(
                "logs", f"--namespace={OPERATOR_NAMESPACE}", "deployment/sft-operator", "--tail=60", check=False
            ).stdout[-5000:],
            self.progress_reads(),
        ]
        return "\n----\n".join(parts)

    def progress_reads(self) -> str:
        """How many progress reports each operator pod has read, and asked for in vain, as its metrics say."""
        told = []
        names = self.cluster.kubectl("get", "pods", f"--namespace={OPERATOR_NAMESPACE}", "-o", "name", check=False)
        for pod in names.stdout.split():
            name = pod.removeprefix("pod/")
            path = f"/api/v1/namespaces/{OPERATOR_NAMESPACE}/pods/{name}:8080/proxy/metrics"
            metrics = self.cluster.kubectl("get", f"--raw={path}", check=False)
            lines = metrics.stdout.splitlines() or [metrics.stderr.strip()]
            told += [f"{name}: {line}" for line in lines if "progress_reads_total{" in line or not metrics.stdout]
        return "\n".join(told)

    def wait_for(self, name: str, what: str, look: Callable[[], T | None], *, seconds: float = 240) -> T:
        """Poll ``look`` until it returns something true; an AssertionError says all about the job otherwise."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if found := look():
                return found
            time.sleep(0.25)
        raise AssertionError(f"{name}: no {what} within {seconds:.0f} s\n{self.explain(name)}")

    def condition(self, name: str, kind: str) -> dict[str, Any]:
        """One condition of the status; empty when it is not there."""
        conditions = self.status(name).get("conditions") or []
        return next((found for found in conditions if found["type"] == kind), {})

    def wait_for_end(self, name: str, *, seconds: float = 400) -> str:
        """``Complete`` or ``Failed``."""

        def ended() -> str | None:
            state = self.status(name).get("state")
            return state if state in ("Complete", "Failed") else None

        return self.wait_for(name, "end of the run", ended, seconds=seconds)

    def install_operator(
        self, *values: str, profiles: Mapping[str, Any] | None = None, release: Release = WORKING_TREE
    ) -> None:
        """The operator with the platform's store and further ``values`` of the chart; also over one that is there."""
        install_operator(self.cluster, *_platform_store(self), *values, profiles=profiles, release=release)

    def roll_back(self) -> None:
        """``helm rollback`` to what was installed before."""
        _helm(self.cluster, "rollback", "sft-operator", f"--namespace={OPERATOR_NAMESPACE}", "--wait", "--timeout=180s")

    def delete(self, name: str) -> None:
        """Delete a job and wait until nothing of it is left."""
        self.kubectl("delete", "sftjob", name, "--wait=true", "--timeout=120s")
        selector = f"sftjob.dev/job={name}"
        self.wait_for(name, "end of its pods", lambda: "No resources" in self._list(selector), seconds=120)

    def _list(self, selector: str) -> str:
        kinds = "pods,jobs,services,configmaps,networkpolicies"
        return self.kubectl("get", kinds, f"--selector={selector}", check=False)


def merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """``base`` with ``changes`` laid over it, object by object; None removes."""
    result = dict(base)
    for key, value in changes.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict) and isinstance(base.get(key), dict):
            result[key] = merge(base[key], value)
        else:
            result[key] = value
    return result


@contextmanager
def open_stage(*further: Callable[[], str], keep: bool = False, release: Release = WORKING_TREE) -> Iterator[Stage]:
    """Cluster, images, operator, S3 server, namespace and inputs; all of it goes at the end unless ``keep``.

    ``further`` build images besides those of operator and trainer; ``release`` is installed.
    """
    existing = from_environment()
    if existing is not None:
        with _furnished(existing, release) as stage:
            yield stage
        return
    with lifecycle.borrowed(default_folder(), "node", keep=keep) as cluster:
        for build in (images.build_operator, images.build_trainer, *further):
            images.load(build())
        with _furnished(cluster, release) as stage:
            yield stage


@contextmanager
def _furnished(cluster: Cluster, release: Release) -> Iterator[Stage]:
    with (
        tempfile.TemporaryDirectory(prefix="sft-e2e-") as scratch,
        object_store(Path(scratch) / "s3") as store,
        kubernetes_api(cluster) as api,
    ):
        stage = Stage(cluster, store, f"e2e-{secrets.token_hex(3)}", api)
        _fill_bucket(store, Path(scratch) / "inputs")
        _make_namespace(stage)
        stage.install_operator(release=release)
        try:
            yield stage
        finally:
            cluster.kubectl("delete", "namespace", stage.namespace, "--wait=true", "--timeout=180s", check=False)
            _helm(cluster, "uninstall", "sft-operator", f"--namespace={OPERATOR_NAMESPACE}", "--wait", check=False)


def _fill_bucket(store: ObjectStore, inputs: Path) -> None:
    """Data, tokenizer and model of examples/make_inputs.py, uploaded as a user would."""
    make_inputs(inputs, size="tiny")
    store.client().create_bucket(Bucket=BUCKET)
    upload(store, inputs, "quickstart")


def upload(store: ObjectStore, folder: Path, prefix: str) -> None:
    """All files below ``folder``, into the bucket."""
    client = store.client()
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        client.upload_file(str(file), BUCKET, f"{prefix}/{file.relative_to(folder)}")


def _make_namespace(stage: Stage) -> None:
    """Namespace under the restricted standard, with the Secret and the Service that quickstart.yaml names."""
    assert stage.store.pod_endpoint is not None
    host, _, port = stage.store.pod_endpoint.removeprefix("http://").rpartition(":")
    metadata = {"name": "object-store", "namespace": stage.namespace}
    stage.cluster.apply(
        {
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {"name": stage.namespace, "labels": {"pod-security.kubernetes.io/enforce": "restricted"}},
        }
    )
    stage.cluster.apply(
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": metadata,
            "stringData": {
                "AWS_ACCESS_KEY_ID": stage.store.access_key,
                "AWS_SECRET_ACCESS_KEY": stage.store.secret_key,
            },
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": metadata,
            "spec": {"ports": [{"name": "s3", "port": 9000, "targetPort": int(port)}]},
        },
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {**metadata, "labels": {"kubernetes.io/service-name": "object-store"}},
            "addressType": "IPv4",
            "ports": [{"name": "s3", "port": int(port)}],
            "endpoints": [{"addresses": [host], "conditions": {"ready": True}}],
        },
    )


def platform_s3(store: ObjectStore) -> dict[str, Any]:
    """How jobs and operator reach the platform's store."""
    return {
        "endpoint": store.pod_endpoint,
        "region": store.region,
        "forcePathStyle": True,
        "credentialsSecretRef": "object-store",
    }


def _platform_store(stage: Stage) -> list[str]:
    """Values of the chart for a store that the operator reads, with credentials of its own."""
    cluster, store = stage.cluster, stage.store
    metadata = {"name": OPERATOR_NAMESPACE}
    cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
    keys = {"AWS_ACCESS_KEY_ID": store.access_key, "AWS_SECRET_ACCESS_KEY": store.secret_key}
    metadata = {"name": OPERATOR_SECRET, "namespace": OPERATOR_NAMESPACE}
    cluster.apply({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": keys})
    s3 = {name: json.dumps(value).strip('"') for name, value in platform_s3(store).items()}
    return [
        f"store.uri={PLATFORM_URI}",
        *(f"store.s3.{name}={value}" for name, value in s3.items()),
        "store.verify=true",
        "store.remove=true",
        f"store.operatorCredentialsSecret={OPERATOR_SECRET}",
    ]


def install_operator(
    cluster: Cluster,
    *values: str,
    profiles: Mapping[str, Any] | None = None,
    release: Release = WORKING_TREE,
) -> None:
    """``helm upgrade --install`` of the chart with its images, and these profiles of pods."""
    operator = release.operator.rpartition(":")
    settings = [
        f"image.repository={operator[0]}",
        f"image.tag={operator[2]}",
        "image.pullPolicy=IfNotPresent",
        f"pods.image={release.trainer}",
        "pods.imagePullPolicy=IfNotPresent",
        # Short runs: what is disturbed must not be over before the status says that it has begun.
        "settings.pollSeconds=2",
        "settings.pollSecondsStarting=1",
        "settings.statusSeconds=2",
        "settings.statusSecondsStarting=2",
        # The tag stays the same when the image changes: new pods all the same.
        f"podAnnotations.stage=s{secrets.token_hex(4)}",
        *values,
    ]
    _helm(
        cluster,
        "upgrade",
        "--install",
        "sft-operator",
        str(release.chart),
        f"--namespace={OPERATOR_NAMESPACE}",
        "--create-namespace",
        "--wait",
        "--timeout=180s",
        *([f"--set-json=pods.profiles={json.dumps(profiles)}"] if profiles else []),
        *(f"--set={setting}" for setting in settings),
    )


def _helm(cluster: Cluster, *arguments: str, check: bool = True) -> None:
    done = subprocess.run(
        [str(binary("helm")), f"--kubeconfig={cluster.kubeconfig}", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    if check and done.returncode != 0:
        pods = cluster.kubectl("get", "pods", f"--namespace={OPERATOR_NAMESPACE}", "-o", "wide", check=False).stdout
        logs = cluster.kubectl(
            "logs", f"--namespace={OPERATOR_NAMESPACE}", "deployment/sft-operator", "--tail=40", check=False
        )
        raise AssertionError(f"helm {arguments[0]}: {done.stderr}\n{pods}\n{logs.stdout}{logs.stderr}")
