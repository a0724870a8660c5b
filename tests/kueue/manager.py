"""Kueue's own manager against a test cluster, with its webhooks for Jobs where they are wanted."""

from __future__ import annotations

import base64
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.certificates import self_signed
from tests.cluster.access import Cluster
from tests.cluster.binaries import binary, kept_folder

Object = dict[str, Any]
GROUP = "kueue.x-k8s.io"
WEBHOOK_PORT, HEALTH_PORT = 19443, 19081
_IN_ITS_OWN_ETC = """
mount -t overlay overlay -o lowerdir=/etc,upperdir="$0/upper",workdir="$0/work" /etc && exec "$@"
"""
"""Kueue reads the certificate of its metrics from a fixed folder below /etc: it gets an /etc of its own."""


def install_crds(cluster: Cluster) -> None:
    """Kueue's kinds, without the conversion webhook: both versions of a Workload are shown as they are stored."""
    for path in sorted(kept_folder("kueue").glob("*.yaml")):
        cluster.kubectl("apply", "--server-side", f"--filename={path}")
    cluster.wait_until_served(f"workloads.{GROUP}")


def remove_crds(cluster: Cluster) -> None:
    """As if Kueue had been uninstalled."""
    for path in sorted(kept_folder("kueue").glob("*.yaml")):
        cluster.kubectl("delete", "--ignore-not-found", "--wait=false", f"--filename={path}")


def queue_objects(name: str, namespace: str, cpu: int, **cluster_queue: Any) -> list[Object]:
    """A flavor, a ClusterQueue with room for ``cpu`` processors, and a LocalQueue of ``namespace`` for it."""
    version = f"{GROUP}/v1beta2"
    quotas = [{"name": "cpu", "nominalQuota": cpu}, {"name": "memory", "nominalQuota": "1Ti"}]
    resources = {"coveredResources": ["cpu", "memory"], "flavors": [{"name": "default", "resources": quotas}]}
    spec = {"namespaceSelector": {}, "resourceGroups": [resources], **cluster_queue}
    return [
        {"apiVersion": version, "kind": "ResourceFlavor", "metadata": {"name": "default"}},
        {"apiVersion": version, "kind": "ClusterQueue", "metadata": {"name": name}, "spec": spec},
        {
            "apiVersion": version,
            "kind": "LocalQueue",
            "metadata": {"name": name, "namespace": namespace},
            "spec": {"clusterQueue": name},
        },
    ]


def priority_class(name: str, value: int) -> Object:
    """A WorkloadPriorityClass."""
    metadata = {"name": name}
    return {"apiVersion": f"{GROUP}/v1beta2", "kind": "WorkloadPriorityClass", "metadata": metadata, "value": value}


@dataclass
class Manager:
    """Kueue's manager, running or not."""

    cluster: Cluster
    folder: Path
    process: subprocess.Popen[bytes] | None = None

    def start(self, **configuration: Any) -> None:
        """Start it and wait until it is ready."""
        certificates = self.folder / "etc" / "upper" / "kueue" / "metrics" / "certs"
        (self.folder / "etc" / "work").mkdir(parents=True, exist_ok=True)
        certificates.mkdir(parents=True, exist_ok=True)
        if not (certificates / "tls.crt").exists():
            self_signed(certificates)
        config = {
            "apiVersion": "config.kueue.x-k8s.io/v1beta2",
            "kind": "Configuration",
            "namespace": "kueue-system",
            "health": {"healthProbeBindAddress": f"127.0.0.1:{HEALTH_PORT}"},
            "metrics": {"bindAddress": "0"},
            "webhook": {"port": WEBHOOK_PORT, "host": "127.0.0.1", "certDir": str(certificates)},
            "leaderElection": {"leaderElect": False},
            "internalCertManagement": {"enable": False},
            "integrations": {"frameworks": ["batch/job"]},
            "clientConnection": {"qps": 200, "burst": 400},
            "featureGates": {"VisibilityOnDemand": False},
            **configuration,
        }
        (self.folder / "config.yaml").write_text(yaml.safe_dump(config))
        command = [str(binary("kueue")), f"--config={self.folder / 'config.yaml'}", "--zap-log-level=2"]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                ["unshare", "--mount", "sh", "-c", _IN_ITS_OWN_ETC, str(self.folder / "etc"), *command],
                env={**os.environ, "KUBECONFIG": str(self.cluster.kubeconfig)},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._wait_ready()

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + 120
        while not self._ready():
            assert self.process
            assert self.process.poll() is None, f"Kueue ended:\n{(self.folder / 'log').read_text()[-3000:]}"
            assert time.monotonic() < deadline, f"Kueue is not ready:\n{(self.folder / 'log').read_text()[-3000:]}"
            time.sleep(0.5)

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{HEALTH_PORT}/readyz", timeout=5):
                return True
        except OSError:
            return False

    def stop(self) -> None:
        if self.process and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(timeout=40)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.process = None

    def restart(self, **configuration: Any) -> None:
        self.stop()
        self.start(**configuration)

    def install_webhooks(self) -> None:
        """The two that look at Jobs; as in Kueue's manifests nothing passes when they do not answer."""
        bundle = self.folder / "etc" / "upper" / "kueue" / "metrics" / "certs" / "tls.crt"
        rule = {"apiGroups": ["batch"], "apiVersions": ["v1"], "resources": ["jobs"]}
        hooks = {
            "Mutating": ("mjob.kb.io", "mutate-batch-v1-job", ["CREATE"]),
            "Validating": ("vjob.kb.io", "validate-batch-v1-job", ["CREATE", "UPDATE"]),
        }
        for kind, (name, path, operations) in hooks.items():
            hook = {
                "name": name,
                "admissionReviewVersions": ["v1"],
                "sideEffects": "None",
                "failurePolicy": "Fail",
                "clientConfig": {
                    "url": f"https://127.0.0.1:{WEBHOOK_PORT}/{path}",
                    "caBundle": base64.b64encode(bundle.read_bytes()).decode(),
                },
                "rules": [{**rule, "operations": operations}],
            }
            self.cluster.apply(
                {
                    "apiVersion": "admissionregistration.k8s.io/v1",
                    "kind": f"{kind}WebhookConfiguration",
                    "metadata": {"name": "kueue-played"},
                    "webhooks": [hook],
                }
            )

    def remove_webhooks(self) -> None:
        for kind in ("mutatingwebhookconfiguration", "validatingwebhookconfiguration"):
            self.cluster.kubectl("delete", kind, "kueue-played", "--ignore-not-found")


@contextmanager
def kueue_manager(cluster: Cluster, folder: Path) -> Iterator[Manager]:
    """Kueue on ``cluster``; its log and configuration lie in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    manager = Manager(cluster, folder)
    try:
        yield manager
    finally:
        manager.stop()
