"""docs/getting-started.md, word for word: whoever follows it on a cluster gets a trained model."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.cluster import lifecycle
from tests.cluster.access import Cluster, from_environment
from tests.cluster.binaries import binary
from tests.cluster.object_store import ObjectStore, object_store
from tests.cluster.state import default_folder
from tests.e2e.documented import REPOSITORY, Shell, blocks, put_stand_ins

PAGE = REPOSITORY / "docs" / "getting-started.md"
REGISTRY = "registry.example/tests"
NAMESPACE = "getting-started"


def test_what_is_installed_is_what_was_built_and_pushed() -> None:
    """Without a cluster: every image that a way of installing names was built and brought there before."""
    build, install, without_registry, *_ = blocks(PAGE)
    pushed = {command.split()[-1] for command in build if command.startswith("docker push")}
    assert pushed == {command.split()[3] for command in build if command.startswith("docker build")}
    values = dict(word.split("=", 1) for word in " ".join(install).split() if "=$REGISTRY" in word or ".tag=" in word)
    assert {f"{values['image.repository']}:{values['image.tag']}", values["pods.image"]} == pushed

    built = {command.split()[3] for command in without_registry if command.startswith("docker build")}
    (loaded,) = (set(command.split()[3:]) for command in without_registry if command.startswith("kind load"))
    helm = subprocess.run(
        [binary("helm"), "template", "sft-operator", "charts/sft-operator"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert built == loaded
    for image in built:
        assert image.removeprefix("docker.io/") in helm.stdout, "the chart's own names"


@pytest.fixture
def place(tmp_path: Path) -> Iterator[tuple[Shell, ObjectStore, Cluster]]:
    """A fresh copy of the repository, with a cluster and a bucket."""
    files = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in files.stdout.splitlines():
        if (REPOSITORY / name).exists():
            (tmp_path / "checkout" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, tmp_path / "checkout" / name)
    put_stand_ins(tmp_path / "bin")
    with tempfile.TemporaryDirectory(prefix="sft-e2e-") as scratch, object_store(Path(scratch) / "s3") as store:
        given = from_environment()
        if given is not None:
            yield _shell(tmp_path, given), store, given
            return
        with lifecycle.borrowed(default_folder(), "node") as cluster:
            yield _shell(tmp_path, cluster), store, cluster


def _shell(folder: Path, cluster: Cluster) -> Shell:
    for name in ("kubectl", "helm"):
        (folder / "bin" / name).symlink_to(binary(name))
    shutil.copy(cluster.kubeconfig, folder / "kubeconfig")
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    shell = Shell(folder / "checkout", {**os.environ, "PATH": path, "KUBECONFIG": str(folder / "kubeconfig")})
    shell.run(f"kubectl create namespace {NAMESPACE}")
    shell.run(f"kubectl config set-context --current --namespace={NAMESPACE}")
    return shell


@pytest.mark.cluster
@pytest.mark.timeout(1800)
def test_followed_to_the_letter_it_trains_a_model(place: tuple[Shell, ObjectStore, Cluster], tmp_path: Path) -> None:
    shell, store, _ = place
    bucket = store.client()
    bucket.create_bucket(Bucket="mine")
    mine = {
        "REGISTRY": REGISTRY,
        "BUCKET": "mine",
        "S3_ENDPOINT": store.pod_endpoint,
        "AWS_REGION": store.region,
        "AWS_ACCESS_KEY_ID": store.access_key,
        "AWS_SECRET_ACCESS_KEY": store.secret_key,
    }
    build, install, without_registry, first_job, watch, go_on = blocks(PAGE)
    try:
        # Both ways of installing, the second one over the first
        for command in (*without_registry, *build, *install, *first_job):
            shell.run(command, replaced=mine)
        said = {command: shell.run(command) for command in watch}
        assert "quickstart" in said["kubectl get sft"]
        (uris,) = (answer for command, answer in said.items() if "jsonpath" in command)
        assert uris.splitlines() == [
            "s3://mine/quickstart/run/checkpoints/step-00000120-a00001",
            "s3://mine/quickstart/run/export",
        ]
        AutoModelForCausalLM.from_pretrained(tmp_path / "checkout" / "model")
        for command in go_on:
            shell.run(command)
        assert "No resources" in shell.run("kubectl get sft 2>&1")
    finally:
        shell.run(f"kubectl delete namespace {NAMESPACE} --timeout=180s")
        shell.run("helm uninstall sft-operator --namespace sft-system --wait --ignore-not-found")
