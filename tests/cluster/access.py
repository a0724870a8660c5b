"""How tests reach a cluster: one made here, or the one that `KUBECONFIG` names."""

from __future__ import annotations

import json
import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cluster.binaries import binary
from tests.waiting import PATIENCE_SECONDS


@dataclass(frozen=True)
class Cluster:
    """`token` and `certificate_authority` are None when the user's kubeconfig holds other credentials."""

    kubeconfig: Path
    url: str
    token: str | None
    certificate_authority: Path | None
    folder: Path | None = None

    def kubectl(
        self, *arguments: str, stdin: str | None = None, check: bool = True, timeout_seconds: float = 120
    ) -> subprocess.CompletedProcess[str]:
        """Run kubectl; with `check` a failure raises and quotes what kubectl said."""
        done = subprocess.run(
            [str(binary("kubectl")), f"--kubeconfig={self.kubeconfig}", *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
            check=False,
        )
        if check and done.returncode != 0:
            raise RuntimeError(f"`kubectl {' '.join(arguments)}` failed ({done.returncode}): {done.stderr}")
        return done

    def apply(self, *manifests: dict[str, Any], namespace: str | None = None) -> None:
        """`kubectl apply` of objects given as dicts."""
        listed = {"apiVersion": "v1", "kind": "List", "items": manifests}
        where = [f"--namespace={namespace}"] if namespace else []
        self.kubectl("apply", "--filename=-", *where, stdin=json.dumps(listed))

    def get(self, *arguments: str) -> dict[str, Any]:
        """`kubectl get ... -o json`, parsed."""
        parsed: dict[str, Any] = json.loads(self.kubectl("get", *arguments, "-o", "json").stdout)
        return parsed

    def wait_until_served(self, definition: str) -> None:
        """Wait for a CRD that was just applied. `kubectl wait` fails while it has no conditions at all."""
        end = time.monotonic() + PATIENCE_SECONDS
        while True:
            conditions = self.get("crd", definition).get("status", {}).get("conditions") or ()
            if any(found["type"] == "Established" and found["status"] == "True" for found in conditions):
                return
            if time.monotonic() > end:
                raise TimeoutError(f"crd {definition} is not served after {PATIENCE_SECONDS:.0f} s: {conditions}")
            time.sleep(0.1)

    def set_node_capacity(self, node: str, resource: str, amount: int) -> None:
        """Claim `amount` of an extended resource such as `nvidia.com/gpu` on a node; 0 takes it away."""
        pointer = resource.replace("/", "~1")
        patch = [
            {"op": "add", "path": f"/status/{field}/{pointer}", "value": str(amount)}
            for field in ("capacity", "allocatable")
        ]
        self.kubectl("patch", "node", node, "--subresource=status", "--type=json", f"--patch={json.dumps(patch)}")


def from_environment() -> Cluster | None:
    """The user's own cluster, when `SFT_TEST_USE_KUBECONFIG=1` and `KUBECONFIG` say so."""
    if os.environ.get("SFT_TEST_USE_KUBECONFIG") != "1":
        return None
    named = os.environ.get("KUBECONFIG", "")
    if not Path(named).is_file():
        raise RuntimeError(
            f"SFT_TEST_USE_KUBECONFIG=1 needs KUBECONFIG to name one file, not {named!r}: set or unset both"
        )
    viewed = subprocess.run(
        [
            str(binary("kubectl")),
            f"--kubeconfig={named}",
            "config",
            "view",
            "--raw",
            "--minify",
            "-o",
            "json",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    config = json.loads(viewed.stdout)
    cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
    authority = cluster.get("certificate-authority")
    return Cluster(Path(named), cluster["server"], user.get("token"), Path(authority) if authority else None)
