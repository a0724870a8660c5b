"""The test API server itself: real admission, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import ssl
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from tests.cluster.access import Cluster
from tests.cluster.binaries import KUBERNETES_VERSION
from tests.cluster.lifecycle import borrowed, down, running, up


def test_objects_are_checked_by_a_real_api_server(api_server: Cluster) -> None:
    api_server.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "seen"}, "data": {"a": "b"}})

    assert api_server.get("configmap", "seen")["data"] == {"a": "b"}
    with pytest.raises(RuntimeError, match="Invalid value"):
        api_server.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "Not_A_Name"}})


def test_the_token_opens_the_url(api_server: Cluster) -> None:
    context = ssl.create_default_context(cafile=str(api_server.certificate_authority))
    request = urllib.request.Request(
        f"{api_server.url}/version", headers={"Authorization": f"Bearer {api_server.token}"}
    )
    with urllib.request.urlopen(request, context=context) as answer:
        assert json.load(answer)["gitVersion"] == f"v{KUBERNETES_VERSION}"


def test_up_mends_what_was_killed_and_down_leaves_nothing(tmp_path: Path) -> None:
    cluster = up(tmp_path, "api", die_with_parent=True)
    cluster.kubectl("create", "namespace", "kept")
    before = running(tmp_path)

    os.kill(before["etcd"], signal.SIGKILL)
    up(tmp_path, "api", die_with_parent=True)
    after = running(tmp_path)

    assert after["kube-apiserver"] == before["kube-apiserver"]
    assert after["etcd"] != before["etcd"]
    assert cluster.kubectl("get", "namespace", "kept", "-o", "name").stdout == "namespace/kept\n"

    down(tmp_path)
    assert running(tmp_path) == {}
    assert not any(Path(f"/proc/{pid}").exists() for pid in {*before.values(), *after.values()})


def test_stale_state_of_another_boot_is_replaced(tmp_path: Path) -> None:
    first = up(tmp_path, "api", die_with_parent=True)
    for pid in running(tmp_path).values():
        os.kill(pid, signal.SIGKILL)
    while running(tmp_path):
        time.sleep(0.05)

    second = up(tmp_path, "api", die_with_parent=True)

    assert second.token != first.token
    second.kubectl("get", "namespaces")
    down(tmp_path)


def test_the_command_does_not_stop_a_cluster_that_a_session_uses(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.cluster", "down", f"--folder={tmp_path}"]

    with borrowed(tmp_path, "api") as cluster:
        refused = subprocess.run(command, capture_output=True, text=True, check=False)
        cluster.kubectl("get", "namespaces")

    assert refused.returncode == 1
    assert "a test session uses the cluster" in refused.stderr
    assert running(tmp_path) == {}
