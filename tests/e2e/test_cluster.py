"""The test node does what training pods need of a cluster: restricted pods, stable DNS names, the API."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cluster.access import Cluster
from tests.cluster.images import BASE_IMAGE
from tests.cluster.object_store import ObjectStore

pytestmark = pytest.mark.cluster

# Pod 0 serves its name on port 8080 until pod 1 has read it; pod 1 asks by pod 0's DNS name.
_PROGRAM = """
import http.client, http.server, os, ssl, time
from pathlib import Path

index = os.environ["JOB_COMPLETION_INDEX"]
if index == "0":
    class Name(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(os.uname().nodename.encode())
    http.server.HTTPServer(("", 8080), Name).handle_request()
else:
    for attempt in range(1200):
        try:
            peer = http.client.HTTPConnection("pair-0.pair", 8080, timeout=2)
            peer.request("GET", "/")
            print("peer", peer.getresponse().read().decode())
            break
        except OSError as error:
            print("waiting:", error, flush=True)
            time.sleep(0.1)
    account = Path("/var/run/secrets/kubernetes.io/serviceaccount")
    trust = ssl.create_default_context(cafile=account / "ca.crt")
    api = http.client.HTTPSConnection("kubernetes.default.svc", context=trust, timeout=10)
    token = (account / "token").read_text()
    api.request("GET", "/version", headers={"Authorization": f"Bearer {token}"})
    print("api", api.getresponse().status)
print("uid", os.getuid())
"""


def _job(name: str) -> dict[str, Any]:
    container = {
        "name": "main",
        "image": BASE_IMAGE,
        "command": ["python3", "-c", _PROGRAM],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    pod = {
        "subdomain": name,
        "restartPolicy": "Never",
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 65532,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
    }
    spec = {
        "completions": 2,
        "parallelism": 2,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "template": {"metadata": {"labels": {"app": name}}, "spec": pod},
    }
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": spec}


def _headless_service(name: str) -> dict[str, Any]:
    spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"app": name}}
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": spec}


def test_indexed_pods_find_each_other_and_the_api(cluster: Cluster, namespace: str) -> None:
    cluster.apply(_headless_service("pair"), _job("pair"), namespace=namespace)

    cluster.kubectl("wait", "job/pair", "--for=condition=Complete", "--timeout=120s", f"--namespace={namespace}")

    said = cluster.kubectl(
        "logs", "--selector=batch.kubernetes.io/job-completion-index=1", f"--namespace={namespace}"
    ).stdout
    assert said.splitlines()[-3:] == ["peer pair-0", "api 200", "uid 65532"]


def test_pods_reach_the_object_store(cluster: Cluster, namespace: str, versitygw: ObjectStore) -> None:
    job = _job("store")
    program = f"""
import urllib.error, urllib.request
try:
    urllib.request.urlopen({versitygw.pod_endpoint!r}, timeout=10)
except urllib.error.HTTPError as refused:
    print("unsigned request:", refused.code)
"""
    job["spec"]["template"]["spec"]["containers"][0]["command"] = ["python3", "-c", program]
    job["spec"] |= {"completions": 1, "parallelism": 1}
    cluster.apply(job, namespace=namespace)

    cluster.kubectl("wait", "job/store", "--for=condition=Complete", "--timeout=120s", f"--namespace={namespace}")

    assert cluster.kubectl("logs", "job/store", f"--namespace={namespace}").stdout == "unsigned request: 403\n"


def test_root_pods_are_refused(cluster: Cluster, namespace: str) -> None:
    with pytest.raises(RuntimeError, match="violates PodSecurity"):
        cluster.kubectl("run", "root", f"--image={BASE_IMAGE}", f"--namespace={namespace}")


def test_a_pod_that_asks_for_gpus_runs_once_the_node_claims_them(cluster: Cluster, namespace: str) -> None:
    job = _job("gpu")
    pod = job["spec"]["template"]["spec"]
    pod["containers"][0] |= {"command": ["true"], "resources": {"limits": {"nvidia.com/gpu": "8"}}}
    node = cluster.get("nodes")["items"][0]["metadata"]["name"]
    job["spec"] |= {"completions": 1, "parallelism": 1}
    cluster.apply(job, namespace=namespace)

    cluster.set_node_capacity(node, "nvidia.com/gpu", 8)
    try:
        cluster.kubectl("wait", "job/gpu", "--for=condition=Complete", "--timeout=120s", f"--namespace={namespace}")
    finally:
        cluster.set_node_capacity(node, "nvidia.com/gpu", 0)
