"""A run whose export is copied to the hub, which is out of order at first; a pod is lost while it is asked again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.cluster.state import BRIDGE_ADDRESS
from tests.hub_uploads import TOKEN, Fault, UploadHub, as_exported, serve_uploads
from tests.integration.run.slow_network import Gate, gate

from .disturbances import first_process, lose_pod_of, told_by
from .stage import Stage, merge

REPOSITORY = "org/mine"
_TOKEN = {"name": "hub", "key": "token"}


class OnTheHub:
    """The hub, which is there while ``served``."""

    _hub: UploadHub
    _way: Gate
    """To the hub, for pods."""

    @contextmanager
    def served(self) -> Iterator[None]:
        """Of what the run tries a second time, nothing is let through yet."""

        def is_second_try(line: bytes) -> bool:
            return line.startswith(b"POST ") and b"/preupload/" in line and not self._hub.faults

        with serve_uploads() as self._hub:
            self._hub.faults.append(Fault("POST", "/commit/", 500))
            with gate(self._hub.endpoint, is_second_try, at=(BRIDGE_ADDRESS, 0)) as self._way:
                yield

    def begin(self, stage: Stage, job: dict[str, Any]) -> None:
        """The job names a repository that is not there yet."""
        metadata = {"name": _TOKEN["name"], "namespace": stage.namespace}
        secret = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": {_TOKEN["key"]: TOKEN}}
        stage.cluster.apply(secret)
        clients = {"HF_ENDPOINT": self._way.endpoint, "HF_HUB_DISABLE_XET": "1"}
        uploading = {
            "model": {"tokenSecretRef": _TOKEN},
            "compute": {"env": [{"name": name, "value": value} for name, value in clients.items()]},
            "export": {"hub": {"repository": REPOSITORY}},
        }
        stage.apply(merge(job, {"spec": uploading}))

    def lose_pod_while_it_uploads(self, stage: Stage, name: str) -> None:
        """The first commit is answered with 500; at the next try index 0 is gone at once. One commit has the export."""
        stage.wait_for(name, "second try", self._way.held.is_set, seconds=400)
        stage.wait_for(name, "word of the first try", lambda: _is_to_be_tried_again(stage, name))
        process = Path(f"/proc/{first_process(stage, name, 0)}")
        lose_pod_of(stage, name, 0)
        stage.wait_for(name, "end of its processes", lambda: not process.exists())
        self._way.open.set()
        assert stage.wait_for_end(name) == "Complete", stage.explain(name)
        made = self._hub.repositories[REPOSITORY]
        assert made.private
        assert len(made.titles) == 2, made.titles  # that of a new repository, and ours
        here, there = as_exported(stage.folder(name) / "export"), made.files()
        assert here, stage.explain(name)
        assert {file for file in here if there.get(file) != here[file]} == set(), sorted(there)
        assert f"# {name}\n" in there["README.md"].decode(), there["README.md"].decode()
        copy = stage.status(name)["export"]["hub"]
        url = f"{self._way.endpoint}/{REPOSITORY}"
        assert copy == {"url": url, "revision": "main", "commit": made.branches["main"]}, copy
        stage.wait_for(name, "event", lambda: url in told_by(stage, name, "Uploaded"))


def _is_to_be_tried_again(stage: Stage, name: str) -> bool:
    said = f"not uploaded to {REPOSITORY} yet, it is tried again: "
    return any(warning.startswith(said) for warning in stage.status(name).get("warnings") or [])
