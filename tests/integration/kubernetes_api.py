"""Plain HTTP to a test API server, through `kubectl proxy`: whatever credentials the kubeconfig holds, and fast."""

from __future__ import annotations

import json
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tests.cluster.access import Cluster
from tests.cluster.binaries import binary
from tests.waiting import PATIENCE_SECONDS


@dataclass(frozen=True)
class Answer:
    """The API server's answer: the object, or a Status that says why not."""

    code: int
    body: dict[str, Any]

    @property
    def accepted(self) -> bool:
        return self.code < 300

    @property
    def causes(self) -> list[tuple[str, str]]:
        """Field path and message of every fault."""
        details = self.body.get("details") or {}
        return [(cause.get("field", ""), cause["message"]) for cause in details.get("causes", [])]


@dataclass(frozen=True)
class KubernetesApi:
    """Requests below one URL."""

    url: str

    def request(self, method: str, path: str, body: str, content_type: str) -> Answer:
        request = urllib.request.Request(
            f"{self.url}{path}",
            data=body.encode(),
            method=method,
            headers={"Content-Type": content_type, "Accept": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as response:
                return Answer(response.status, json.load(response))
        except urllib.error.HTTPError as error:
            return Answer(error.code, json.load(error))


@contextmanager
def kubernetes_api(cluster: Cluster) -> Iterator[KubernetesApi]:
    """An open proxy to ``cluster`` on a free port of this machine."""
    command = [str(binary("kubectl")), f"--kubeconfig={cluster.kubeconfig}", "proxy", "--port=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as proxy:
        try:
            assert proxy.stdout is not None
            greeting = proxy.stdout.readline()  # Starting to serve on 127.0.0.1:40001
            yield KubernetesApi(f"http://{greeting.split()[-1]}")
        finally:
            proxy.terminate()
