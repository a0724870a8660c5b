"""A listing costs the operator memory for what it keeps of each pod, not for the pods as the API server sends them."""

from __future__ import annotations

import json
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from tests.answering import served
from tests.integration.operator.scene import OperatorProcess, start_operator
from tests.unit.operator.make import child_manifest, job_manifest, pod_manifest

PODS = 3000
POD_BYTES = 46 * 1024
SERVED = {
    "/api/v1": [("pods", "Pod"), ("events", "Event"), ("namespaces", "Namespace")],
    "/apis/batch/v1": [("jobs", "Job")],
    "/apis/sftjob.dev/v1alpha1": [("sftjobs", "SFTJob")],
}


def fat_pod() -> str:
    """A pod of 46 KiB as JSON, with @ in place of its number: long lists of what decides nothing, as real pods have."""
    pod = pod_manifest(0, uid="uid-@", version="@")
    pod["spec"]["containers"] = [{"name": "trainer", "env": []}]
    variables = pod["spec"]["containers"][0]["env"]
    while len(text := json.dumps(pod)) < POD_BYTES:
        variables += [{"name": f"VARIABLE_{len(variables)}", "value": "x" * 20}] * 10
    return text


class ApiServer:
    """As much of an API server as the operator asks for at its start, over ``pods`` fat pods of one job."""

    def __init__(self, pods: int, *, streams: bool = False) -> None:
        """``streams``: it knows streamed lists, of pods."""
        self.pods = pods
        self.streams = streams
        self.listed: list[str] = []
        """Selectors of the listings of pods that were answered to their end."""
        self.expire_at: int | None = None
        """The page that has expired when it is asked for, once."""
        self._pod = fat_pod()

    def answer(self, path: str, query: dict[str, str]) -> tuple[int, str]:
        if path == "/api":
            return 200, json.dumps({"versions": ["v1"]})
        if path == "/apis":
            groups = [name.split("/")[2:] for name in SERVED if name.startswith("/apis/")]
            versions = [
                {
                    "name": g,
                    "versions": [{"groupVersion": f"{g}/{v}", "version": v}],
                    "preferredVersion": {"version": v},
                }
                for g, v in groups
            ]
            return 200, json.dumps({"groups": versions})
        if path in SERVED:
            kinds = [
                {
                    "name": name,
                    "kind": kind,
                    "singularName": "",
                    "namespaced": True,
                    "verbs": ["list", "watch", "patch"],
                }
                for name, kind in SERVED[path]
            ]
            return 200, json.dumps({"resources": kinds})
        if path.endswith("/pods"):
            return self._page(query)
        objects = {"jobs": [child_manifest()], "sftjobs": [job_manifest(compute={"nodes": 4096, "gpusPerNode": 0})]}
        items = objects.get(path.rpartition("/")[2], [])
        return 200, json.dumps({"metadata": {"resourceVersion": "1000000"}, "items": items})

    def _expired(self) -> tuple[int, str]:
        return 410, json.dumps({"reason": "Expired", "message": "the provided continue parameter is too old"})

    def pods_as_events(self, query: dict[str, str]) -> Iterator[str]:
        """The lines of a streamed list of pods."""
        for number in range(self.pods):
            yield f'{{"type": "ADDED", "object": {self._pod.replace("@", str(number + 1))}}}\n'
        metadata = {"resourceVersion": "1000000", "annotations": {"k8s.io/initial-events-end": "true"}}
        yield json.dumps({"type": "BOOKMARK", "object": {"metadata": metadata}}) + "\n"
        self.listed.append(query.get("labelSelector", ""))

    def _page(self, query: dict[str, str]) -> tuple[int, str]:
        begin, size = int(query.get("continue", 0)), int(query["limit"])
        if self.expire_at is not None and begin >= self.expire_at:
            self.expire_at = None
            return self._expired()
        end = min(self.pods, begin + size)
        items = ",".join(self._pod.replace("@", str(number + 1)) for number in range(begin, end))
        more = f', "continue": "{end}"' if end < self.pods else ""
        if not more:
            self.listed.append(query.get("labelSelector", ""))
        return 200, f'{{"kind": "PodList", "metadata": {{"resourceVersion": "1000000"{more}}}, "items": [{items}]}}'


@contextmanager
def serve(api: ApiServer) -> Iterator[str]:
    """The URL of ``api``."""
    end = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url = urllib.parse.urlsplit(self.path)
            query = dict(urllib.parse.parse_qsl(url.query))
            if "sendInitialEvents" in query and not (api.streams and url.path.endswith("/pods")):
                self._send(422, json.dumps({"reason": "Invalid", "message": "sendInitialEvents is forbidden"}))
                return
            if query.get("watch"):
                self.send_response(200)
                self.end_headers()
                if "sendInitialEvents" in query:
                    for line in api.pods_as_events(query):
                        self.wfile.write(line.encode())
                    return
                end.wait(60)
                return
            self._send(*api.answer(url.path, query))

        def do_PATCH(self) -> None:
            self._echo(200)

        def do_POST(self) -> None:
            self._echo(201)

        def _echo(self, code: int) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._send(code, json.dumps({**job_manifest(), **body, "metadata": job_manifest()["metadata"]}))

        def _send(self, code: int, text: str) -> None:
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    with served(Handler) as url:
        try:
            yield url
        finally:
            end.set()


@contextmanager
def operator_of(api: ApiServer, folder: Path) -> Iterator[OperatorProcess]:
    """An operator that serves ``api``, and lists it anew every two seconds."""
    folder.mkdir()
    with serve(api) as url:
        config = {
            "current-context": "c",
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            "clusters": [{"name": "c", "cluster": {"server": url}}],
            "users": [{"name": "u", "user": {"token": "x"}}],
        }
        (folder / "kubeconfig").write_text(json.dumps(config))
        settings: dict[str, Any] = {"resyncSeconds": 2, "pods": {"image": "trainer:1"}}
        operator = start_operator(folder, folder / "kubeconfig", settings)
        try:
            yield operator
        finally:
            operator.process.kill()
            operator.process.wait()


def until(what: Callable[[], object], operator: OperatorProcess) -> None:
    deadline = time.monotonic() + 300
    while not what():
        assert time.monotonic() < deadline, operator.log.read_text()
        assert operator.process.poll() is None, operator.log.read_text()
        time.sleep(0.2)


def peak_mib(operator: OperatorProcess) -> float:
    """The most memory that the process has ever had."""
    lines = Path(f"/proc/{operator.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def peak_with(pods: int, folder: Path, *, streams: bool) -> float:
    """The peak in MiB after the listing at the start, and three of the resync."""
    api = ApiServer(pods, streams=streams)
    with operator_of(api, folder) as operator:
        until(lambda: len(api.listed) >= 4, operator)
        assert set(api.listed) == {"app.kubernetes.io/managed-by=sft-operator"}
        return peak_mib(operator)


@pytest.mark.parametrize("streams", [False, True])
def test_memory_does_not_grow_with_what_nobody_reads_of_the_pods(tmp_path: Path, streams: bool) -> None:
    few = peak_with(10, tmp_path / "few", streams=streams)
    many = peak_with(PODS, tmp_path / "many", streams=streams)

    raw = PODS * POD_BYTES / 2**20
    print(f"peak_mib_few={few:.0f} peak_mib_many={many:.0f} raw_mib={raw:.0f}")
    assert many - few < raw, "less than the text of the pods alone"


def test_a_listing_that_expires_between_two_pages_begins_again(tmp_path: Path) -> None:
    api = ApiServer(1200)
    api.expire_at = 500
    with operator_of(api, tmp_path / "expired") as operator:
        until(lambda: api.expire_at is None and api.listed, operator)
        # That of the resync as well
        api.expire_at = 500
        until(lambda: api.expire_at is None and len(api.listed) >= 3, operator)
        assert "listing failed" not in operator.log.read_text()
